//! Properties of all models and all texts.

use arbtest::arbitrary::{Result, Unstructured};
use arbtest::arbtest;
use narrows_plan::model::{
    self, Activation, BlockFile, CrossingFile, CrossingForm, CrossingGate, GatedProduct,
    LinearFile, Model, ModelFile, PairFile, Positions, presets,
};
use serde_json::Value;

const EXAMPLES: [&str; 6] = [
    include_str!("../../models/cola-7b.config.json"),
    include_str!("../../models/boost-cola-7b.config.json"),
    include_str!("../../models/llama-7b.config.json"),
    include_str!("../../models/mixed-ranks.json"),
    include_str!("../../models/lax-1b.json"),
    r#"{"is_cola_llama_config": true, "hidden_size": 64, "intermediate_size": 172,
        "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256, "attn_rank": 16,
        "mlp_rank": 8, "both_act": false, "eos_token_id": [1, 2]}"#,
];

/// Reads a text: a model must round-trip, a defect must have a place.
fn check_read(text: &str) {
    match model::read("fuzz.json", text) {
        Ok(model) => {
            assert!(model.parameters() > 0);
            assert_eq!(model.fingerprint().len(), 64);
            round_trip(&model);
        }
        Err(defects) => {
            assert!(!defects.0.is_empty());
            for defect in &defects.0 {
                let located = !defect.field.is_empty()
                    || defect.problem.contains("line ")
                    || defect.problem.contains("the file")
                    || defect.problem.contains("parameters");
                assert!(located, "{defect}\n{text}");
                assert!(!defect.problem.is_empty());
            }
        }
    }
}

fn round_trip(model: &Model) {
    let file = ModelFile::from(model);
    let text = serde_json::to_string_pretty(&file).unwrap();
    let again = model::read("again.json", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    assert_eq!(&again, model, "{text}");
    assert_eq!(ModelFile::from(&again), file);
    assert_eq!(again.fingerprint(), model.fingerprint());
}

#[test]
fn presets_and_examples_round_trip() {
    for name in presets::names() {
        round_trip(&presets::find(&name).unwrap());
    }
    for text in EXAMPLES {
        round_trip(&model::read("example.json", text).unwrap());
    }
}

#[test]
fn a_uniform_model_is_written_without_overrides() {
    for name in ["lax-7b", "cola-7b", "llama-7b"] {
        let file = ModelFile::from(&presets::find(name).unwrap());
        assert!(file.blocks.overrides.is_empty(), "{name}");
        assert!(file.blocks.default.linears().iter().all(|(_, linear)| linear.is_none()));
    }
}

#[test]
fn mutated_text_never_panics() {
    arbtest(|u| {
        let mut text = u.choose(&EXAMPLES)?.as_bytes().to_vec();
        for _ in 0..u.int_in_range(1..=4)? {
            let at = u.choose_index(text.len())?;
            match u.int_in_range(0..=3)? {
                0 => text[at] = *u.choose(b"0123456789-+.eE{}[]\",:nullx \\\xff")?,
                1 => drop(text.remove(at)),
                2 => text.insert(at, u.arbitrary()?),
                _ => text.truncate(at.max(1)),
            }
        }
        check_read(&String::from_utf8_lossy(&text));
        Ok(())
    });
}

#[test]
fn mutated_values_never_panic() {
    arbtest(|u| {
        let mut value: Value = serde_json::from_str(u.choose(&EXAMPLES)?).unwrap();
        for _ in 0..u.int_in_range(1..=3)? {
            mutate(&mut value, u)?;
        }
        check_read(&value.to_string());
        Ok(())
    });
}

/// Replaces, removes or adds a random value.
fn mutate(value: &mut Value, u: &mut Unstructured<'_>) -> Result<()> {
    match value {
        Value::Object(map) if !map.is_empty() && u.ratio(9, 10)? => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = u.choose(&keys)?;
            match u.int_in_range(0..=9)? {
                0 => drop(map.remove(key)),
                1 => drop(map.insert(u.arbitrary()?, random_value(u)?)),
                2 => drop(map.insert(format!("{}-{}", u.arbitrary::<u8>()?, 7), random_value(u)?)),
                _ => mutate(&mut map[key], u)?,
            }
        }
        place => *place = random_value(u)?,
    }
    Ok(())
}

fn random_value(u: &mut Unstructured<'_>) -> Result<Value> {
    let texts = [
        "null",
        "true",
        "0",
        "1",
        "-1",
        "3",
        "64",
        "16777216",
        "16777217",
        "4096",
        "1.5",
        "1e300",
        "18446744073709551615",
        "99999999999999999999",
        "\"\"",
        "\"dense\"",
        "\"none\"",
        "[]",
        "{}",
        "[[1]]",
        "{\"rank\": 16}",
        "{\"rank\": 16777216, \"activation\": \"silu\"}",
        "{\"form\": \"paper\", \"gate\": \"dense\"}",
        "{\"tensor\": {\"a\": 32, \"b\": 16}}",
    ];
    Ok(serde_json::from_str(u.choose(&texts)?).unwrap())
}

#[test]
fn any_model_round_trips() {
    let mut resolved = 0;
    arbtest(|u| {
        let mut file = ModelFile::from(&presets::find("cola-tiny").unwrap());
        file.name = Some(u.arbitrary::<String>()?);
        file.tied = u.arbitrary()?;
        file.kv_heads = Some(*u.choose(&[1, 2, 4, 8])?);
        file.blocks.count = u.int_in_range(1..=9)?;
        file.blocks.default = layer(u)?;
        file.blocks.default.product = Some(GatedProduct::Plain);
        file.blocks.default.all = Some(LinearFile::Pair(PairFile {
            rank: Some(16),
            activation: Some(Activation::Silu),
            crossing: None,
        }));
        for _ in 0..u.int_in_range(0..=4)? {
            let first = u.int_in_range(0..=file.blocks.count - 1)?;
            let last = u.int_in_range(first..=file.blocks.count - 1)?;
            file.blocks.overrides.insert(format!("{first}-{last}"), layer(u)?);
        }
        if let Ok(model) = file.resolve() {
            resolved += 1;
            round_trip(&model);
        }
        Ok(())
    });
    assert!(resolved > 0);
}

fn layer(u: &mut Unstructured<'_>) -> Result<BlockFile> {
    Ok(BlockFile {
        d_ff: u.ratio(1, 4)?.then_some(u.int_in_range(1..=3)? * 64),
        product: u.ratio(1, 4)?.then_some(GatedProduct::SwiGlu),
        positions: u.ratio(1, 4)?.then_some(*u.choose(&[Positions::Rotary, Positions::None])?),
        all: linear(u)?,
        q: linear(u)?,
        gate: linear(u)?,
        down: linear(u)?,
        ..Default::default()
    })
}

fn linear(u: &mut Unstructured<'_>) -> Result<Option<LinearFile>> {
    if u.ratio(1, 2)? {
        return Ok(None);
    }
    if u.ratio(1, 5)? {
        return Ok(Some(LinearFile::Dense));
    }
    let crossing = match u.int_in_range(0..=5)? {
        0 => Some(CrossingFile::None),
        1 => Some(CrossingFile::Some(model::LatentCrossing {
            form: *u.choose(&[CrossingForm::Paper, CrossingForm::Released])?,
            gate: *u.choose(&[
                CrossingGate::Dense,
                CrossingGate::Affine,
                CrossingGate::Identity,
                CrossingGate::Tensor { a: 4, b: 4 },
            ])?,
        })),
        _ => None,
    };
    Ok(Some(LinearFile::Pair(PairFile {
        rank: u.ratio(2, 3)?.then_some(*u.choose(&[16, 16, 16, 12])?),
        activation: u.ratio(1, 4)?.then_some(Activation::Identity),
        crossing,
    })))
}
