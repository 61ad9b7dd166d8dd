//! Weights in the formats of other training codes (`tests/golden/weights`), and the logits of their modules.

use std::collections::BTreeMap;
use std::path::Path;

use narrows_plan::model::{self, Model};
use narrows_reference::{Batch, Parameters, Reference};
use narrows_runtime::interchange::{WeightFormat, import_weights};
use serde_json::Value;

use super::cases::{elements, norm, number, rows};

const CASES: [(&str, WeightFormat); 10] = [
    ("cola", WeightFormat::HuggingFace),
    ("cola-gate", WeightFormat::HuggingFace),
    ("cola-m", WeightFormat::ColaM),
    ("loro", WeightFormat::Loro),
    ("llama", WeightFormat::HuggingFace),
    ("boost", WeightFormat::Nanotron),
    ("boost-grouped", WeightFormat::Nanotron),
    ("nanotron", WeightFormat::Nanotron),
    ("phi3", WeightFormat::Phi3),
    ("internlm2", WeightFormat::InternLm2),
];

/// In f64, logits are those of the original modules; the elements of weights are F32, BF16 or F16.
#[test]
fn imported_weights_give_the_logits_of_the_original_modules() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/weights");
    let text = std::fs::read_to_string(folder.join("cases.json")).unwrap();
    let cases: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), CASES.len());
    for (name, format) in CASES {
        let case = &cases[name];
        let model = model::read(name, &case["config"].to_string()).unwrap();
        let imported = import_weights(&folder.join(name), &model)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(imported.format, format, "{name}");
        let logits = logits(&model, &imported.weights, case);
        let expected = rows(&case["logits"]);
        let difference: Vec<f64> = logits.iter().zip(&expected).map(|(x, y)| x - y).collect();
        let error = norm(&difference) / norm(&expected);
        assert!(error < 1e-12, "{name}: the relative error of the logits is {error:.1e}");
    }
}

fn logits(
    model: &Model,
    weights: &narrows_runtime::session::ModelTensors,
    case: &Value,
) -> Vec<f64> {
    let parameters = Parameters::from_fn(model, |parameter| {
        let (elements, columns) = (weights[&parameter.id].clone(), parameter.columns as usize);
        move |row, column| f64::from(elements[row * columns + column])
    });
    let reference: Reference<f64> = Reference::new(model, parameters).unwrap();
    let tokens: Vec<u32> =
        case["tokens"].as_array().unwrap().iter().map(|token| number(token) as u32).collect();
    let size = |key: &str| number(&case[key]) as usize;
    let batch = Batch {
        tokens: &tokens,
        targets: &tokens,
        sequences: size("sequences"),
        length: size("length"),
    };
    elements(&reference.logits(batch).unwrap())
}
