//! Published models: which of their configs are read, and why others are refused.

use narrows_plan::model;
use serde_json::Value;

/// `config.json` files of published families.
///
/// `model` is the repository on the Hugging Face hub whose file has these values, and `copy` where a public copy
/// of it was read; without a copy, the values are written from memory of the file. `fate` is `"planned"`,
/// `{"warning": field}` or `{"refused": words of the reason}`.
const CONFIGS: &str = include_str!("data/published_configs.json");

struct Published {
    family: String,
    fate: Value,
    config: Value,
}

fn published() -> Vec<Published> {
    let entries: Vec<Value> = serde_json::from_str(CONFIGS).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let entry = |entry: Value| Published {
        family: text(&entry["family"]),
        fate: entry["fate"].clone(),
        config: entry["config"].clone(),
    };
    entries.into_iter().map(entry).collect()
}

#[test]
fn published_configs_are_read_or_refused_by_name() {
    for Published { family, fate, config } in published() {
        let read = model::read_with_warnings(&family, &config.to_string());
        let actual = match &read {
            Ok((_, warnings)) if warnings.is_empty() => "planned".to_owned(),
            Ok((_, warnings)) => {
                let fields: Vec<&str> = warnings.iter().map(|warning| &*warning.field).collect();
                fields.join(" ")
            }
            Err(defects) => defects.to_string(),
        };
        match (fate.as_str(), fate["warning"].as_str(), fate["refused"].as_str()) {
            (Some("planned"), ..) => assert_eq!(actual, "planned", "{family}"),
            (_, Some(field), _) => assert_eq!(actual, field, "{family}"),
            (.., Some(words)) => {
                let defects = read.expect_err(&family);
                let [defect] = defects.0.as_slice() else { panic!("{family}: {defects}") };
                assert_eq!(defect.field, "model_type", "{family}");
                assert!(defect.problem.contains(words), "{family}: {defect}");
            }
            _ => panic!("{family} has no fate"),
        }
    }
}

/// Parameters of the published models, in millions, where a model card or paper states them.
#[test]
fn published_models_have_their_numbers_of_parameters() {
    let millions = |family: &str| {
        let published = published().into_iter().find(|published| published.family == family);
        let text = published.unwrap().config.to_string();
        model::read(family, &text).unwrap().parameters().div_ceil(1_000_000)
    };
    for (family, expected) in [
        ("LLaMA", 6739),
        ("LLaMA 3.1", 8031),
        ("LLaMA 3.2", 1236),
        ("TinyLlama", 1101),
        ("SmolLM2", 135),
        ("SmolLM3", 3076),
        ("Mistral 7B", 7242),
        ("Phi-3", 3822),
        ("Phi-4", 14_660),
        ("InternLM2.5", 7738),
        ("Qwen2.5", 7616),
        ("Qwen3", 8191),
    ] {
        assert_eq!(millions(family), expected, "{family}");
    }
}
