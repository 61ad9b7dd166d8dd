//! Frequencies of scaled RoPE.

use narrows_plan::model::{self, Model, Rope, RopeScaling};
use serde_json::{Value, json};

/// Frequencies that transformers computes in f32 (`tests/golden/rope.py`).
#[test]
fn frequencies_are_those_of_transformers() {
    let text = include_str!("../../tests/golden/rope.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let model = model::read("golden", &case["config"].to_string()).unwrap();
        let actual = model.rope.frequencies(case["length"].as_u64().unwrap());
        let near = |actual: f64, expected: &Value| {
            let expected = expected.as_f64().unwrap();
            // Powers in f32 lose about ln θ units in the last place.
            assert!((actual / expected - 1.0).abs() < 3e-6, "{actual} for {expected} in {case}");
        };
        near(actual.attention_factor, &case["attention_factor"]);
        let expected = case["frequencies"].as_array().unwrap();
        assert_eq!(actual.frequencies.len(), expected.len());
        for (actual, expected) in actual.frequencies.iter().zip(expected) {
            near(*actual, expected);
        }
    }
}

fn config(more: Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4,
        "intermediate_size": 172, "num_hidden_layers": 2, "max_position_embeddings": 4096
    });
    config.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
    config
}

fn read(more: Value) -> Model {
    let config = config(more);
    model::read("config.json", &config.to_string()).unwrap_or_else(|e| panic!("{config}\n{e}"))
}

#[test]
fn yarn_has_the_defaults_of_transformers() {
    let yarn = |more: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0});
        scaling.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        match read(json!({"rope_scaling": scaling})).rope.scaling {
            Some(RopeScaling::Yarn {
                beta_fast,
                beta_slow,
                attention_factor,
                original_length,
                ..
            }) => (beta_fast, beta_slow, attention_factor, original_length),
            other => panic!("{other:?}"),
        }
    };
    let plain = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(json!({})), (32.0, 1.0, plain, 4096));
    let nested = json!({"original_max_position_embeddings": 1024, "attention_factor": 1.5});
    assert_eq!(yarn(nested), (32.0, 1.0, 1.5, 1024));
    assert_eq!(yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})).2, 1.0);
    assert_eq!(yarn(json!({"mscale": 1.0})).2, plain);
}

#[test]
fn part_of_a_head_is_rotated() {
    for (more, dim) in [
        (json!({}), 16),
        (json!({"partial_rotary_factor": 1.0}), 16),
        (json!({"partial_rotary_factor": 0.5}), 8),
        (json!({"rotary_pct": 0.25}), 4),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.75}}), 12),
        // The product is truncated.
        (json!({"partial_rotary_factor": 0.3}), 4),
    ] {
        assert_eq!(read(more.clone()).rope.dim, dim, "{more}");
    }
}

/// `config.json` files of LLaMA have all scalings; a canonical model file has everything.
#[test]
fn models_with_scaled_rope_return_from_their_files() {
    let base = read(json!({}));
    let original_length = 1024;
    let fingerprints: Vec<String> = [
        RopeScaling::Linear { factor: 2.0 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_length,
        },
        RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
            original_length,
        },
        RopeScaling::LongRope {
            short: vec![1.0; 8],
            long: vec![2.5; 8],
            attention_factor: 1.5,
            original_length,
        },
    ]
    .into_iter()
    .map(|scaling| {
        let rope = Rope { scaling: Some(scaling), ..base.rope.clone() };
        let model = Model { rope, ..base.clone() };
        let config = model.hugging_face_config(model::ConfigClass::Llama).unwrap();
        assert_eq!(model::read("config.json", &config.to_string()).unwrap().rope, model.rope);
        let partial = Model { rope: Rope { dim: 8, ..model.rope.clone() }, ..model.clone() };
        assert!(partial.hugging_face_config(model::ConfigClass::Llama).is_err());
        for model in [&model, &Model { rope: Rope::plain(1e4, 8), ..model.clone() }] {
            let file = serde_json::to_string(&model::ModelFile::from(model)).unwrap();
            assert_eq!(&model::read("model.json", &file).unwrap(), model, "{file}");
        }
        model.fingerprint()
    })
    .chain([base.fingerprint()])
    .collect();
    let distinct: std::collections::HashSet<&String> = fingerprints.iter().collect();
    assert_eq!(distinct.len(), 5);
}

/// Scalings that are plain RoPE in all sequences of a model are read as such.
#[test]
fn dynamic_scaling_beyond_the_longest_sequence_is_a_warning() {
    let text = config(json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}})).to_string();
    let (model, warnings) = model::read_with_warnings("config.json", &text).unwrap();
    assert_eq!(model.rope, Rope::plain(1e4, 16));
    let fields: Vec<&str> = warnings.iter().map(|warning| &*warning.field).collect();
    assert_eq!(fields, ["rope_scaling"]);
}
