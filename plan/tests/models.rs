//! Presets and example files equal the published models.

use narrows_plan::model::{
    self, Activation, CrossingForm, CrossingGate, GatedProduct, Model, ModelFile, SpecialTokens,
    Weight, presets,
};

fn example(name: &str) -> (String, String) {
    let path = format!("{}/../models/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    (path, text)
}

fn read_example(name: &str) -> Model {
    let (path, text) = example(name);
    model::read(&path, &text).unwrap_or_else(|defects| panic!("{path}\n{defects}"))
}

fn billions(preset: &str) -> String {
    format!("{:.3}", presets::find(preset).unwrap().parameters() as f64 / 1e9)
}

#[test]
fn parameter_counts_equal_the_published_ones() {
    for (size, dense, low_rank) in
        [("1b", "1.275", "0.544"), ("7b", "6.607", "2.690"), ("30b", "29.405", "11.776")]
    {
        assert_eq!(billions(&format!("llama-{size}")), dense);
        assert_eq!(billions(&format!("cola-{size}")), low_rank);
        assert_eq!(billions(&format!("svd-{size}")), low_rank);
    }
}

#[test]
fn every_preset_resolves_under_its_name() {
    for name in presets::names() {
        let model = presets::find(&name).unwrap_or_else(|defect| panic!("{defect}"));
        assert_eq!(model.name, name);
        assert_eq!(model.is_low_rank(), !name.starts_with("llama"), "{name}");
        assert_eq!(presets::find(&name.to_uppercase()).unwrap(), model);
    }
}

#[test]
fn families_differ_in_product_activation_and_crossing() {
    let pair = |model: &Model, block: usize| match &model.blocks[block].gate.weight {
        Weight::Pair(pair) => pair.clone(),
        Weight::Dense => panic!("{} is dense", model.name),
    };
    for (name, product, activation) in [
        ("cola-60m", GatedProduct::SwiGlu, Activation::Silu),
        ("cola-130m", GatedProduct::SwiGlu, Activation::Silu),
        ("cola-350m", GatedProduct::Plain, Activation::Silu),
        ("svd-60m", GatedProduct::SwiGlu, Activation::Identity),
        ("svd-7b", GatedProduct::SwiGlu, Activation::Identity),
        ("lax-130m", GatedProduct::SwiGlu, Activation::Silu),
        ("lax-1b", GatedProduct::Plain, Activation::Silu),
        ("dlr-1b", GatedProduct::SwiGlu, Activation::Silu),
    ] {
        let model = presets::find(name).unwrap();
        assert_eq!(model.blocks[1].product, product, "{name}");
        assert_eq!(pair(&model, 1).activation, activation, "{name}");
        assert_eq!(pair(&model, 0).crossing, None, "{name}: block 0 has no previous block");
        assert_eq!(pair(&model, 1).crossing.is_some(), name.starts_with("lax"), "{name}");
        assert_eq!(model.latent_residual.is_some(), name.starts_with("dlr"), "{name}");
        assert_eq!(model.tied, !name.ends_with('m'), "{name}");
    }
    let crossing = pair(&presets::find("lax-7b").unwrap(), 31).crossing.unwrap();
    assert_eq!((crossing.form, crossing.gate), (CrossingForm::Released, CrossingGate::Identity));

    let tiny = presets::find("cola-tiny").unwrap();
    assert_eq!((tiny.vocab, tiny.blocks.len(), tiny.head_dim), (256, 4, 32));
}

#[test]
fn an_unknown_preset_lists_near_names() {
    for (wrong, near) in [
        ("cola-7", "cola-7b"),
        ("cola7b", "cola-7b"),
        ("lama-30b", "llama-30b"),
        ("llama-tiny", "cola-tiny"),
        ("gpt-4", "svd-, lax- or dlr-"),
        ("", "cola-tiny"),
        ("–", "cola-tiny"),
    ] {
        let defect = presets::find(wrong).unwrap_err();
        let hint = defect.hint.as_deref().unwrap_or_default();
        assert!(hint.contains(near), "{wrong}: {defect}");
        assert_eq!(defect.field, "model");
    }
}

#[test]
fn the_dense_counterpart_is_the_dense_preset() {
    for size in ["60m", "7b"] {
        let dense = presets::find(&format!("llama-{size}")).unwrap();
        for family in ["cola", "svd", "lax", "llama"] {
            let model = presets::find(&format!("{family}-{size}")).unwrap();
            assert_eq!(model.dense_counterpart(), dense, "{family}");
        }
    }
    let mixed = read_example("mixed-ranks.json").dense_counterpart();
    assert_eq!(mixed.name, "mixed-ranks-dense");
    assert!(!mixed.is_low_rank());
}

#[test]
fn examples_equal_the_presets_of_their_names() {
    for (file, preset) in [
        ("boost-cola-7b.config.json", "cola-7b"),
        ("llama-7b.config.json", "llama-7b"),
        ("lax-1b.json", "lax-1b"),
    ] {
        let example = read_example(file);
        let special_tokens = SpecialTokens::default();
        let example = Model { name: preset.to_owned(), special_tokens, ..example };
        assert_eq!(example, presets::find(preset).unwrap(), "{file}");
    }
}

/// The 7B model of CoLA's repository has an untied head and a padding token; the preset is BOOST's.
#[test]
fn cola_and_boost_differ_in_their_7b_models() {
    let cola = read_example("cola-7b.config.json");
    assert_eq!((cola.tied, cola.padding_token), (false, Some(0)));
    let (tied, max_sequence_length) = (true, 4096);
    assert_eq!(cola.special_tokens, SpecialTokens { bos: Some(0), eos: vec![1] });
    let special_tokens = SpecialTokens::default();
    let boost = Model { tied, padding_token: None, special_tokens, max_sequence_length, ..cola };
    assert_eq!(boost, presets::find("cola-7b").unwrap());
}

#[test]
fn overrides_of_the_mixed_ranks_example_apply_in_order() {
    let model = read_example("mixed-ranks.json");
    let rank = |block: usize, slot: usize| model.blocks[block].linears()[slot].1.rank();
    let ranks =
        |block: usize| std::array::from_fn::<_, 7, _>(|slot| rank(block, slot).unwrap_or(0));
    assert_eq!(ranks(0), [0; 7]);
    assert_eq!(ranks(1), [256, 128, 192, 256, 256, 256, 320]);
    assert_eq!(ranks(3), [77, 128, 192, 256, 256, 256, 320]);
    assert_eq!(ranks(5), [256, 64, 192, 256, 160, 160, 320]);
    assert_eq!(ranks(6), [256, 64, 192, 0, 160, 160, 320]);
    assert_eq!(ranks(9), [256, 128, 192, 256, 256, 256, 240]);
    assert_eq!((model.blocks[9].down.d_in, model.blocks[8].down.d_in), (2048, 2816));
    assert_eq!((model.blocks[2].k.d_out, model.blocks[2].q.d_out), (256, 1024));
}

/// Apart from initial values, the model is CoLA's.
#[test]
fn the_dlr_example_is_cola_with_a_latent_residual() {
    let dlr = read_example("dlr-60m.json");
    let cola = presets::find("cola-60m").unwrap();
    assert_eq!(dlr.latent_residual, Some(1.0));
    assert_eq!(dlr.parameters(), cola.parameters());
    let without = Model { latent_residual: None, ..dlr };
    assert_eq!(without.fingerprint(), cola.fingerprint());
    let dense = r#"{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 172, "latent_residual": 1.0,
        "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}}"#;
    let defects = model::read("dense", dense).unwrap_err().to_string();
    assert!(defects.contains("latent_residual: has no effect"), "{defects}");
    for alpha in ["0", "-1"] {
        let text = example("dlr-60m.json")
            .1
            .replace("\"latent_residual\": 1.0", &format!("\"latent_residual\": {alpha}"));
        let defects = model::read("dlr", &text).unwrap_err().to_string();
        assert!(defects.contains("latent_residual: must be a positive number"), "{defects}");
    }
}

#[test]
fn examples_and_written_models_conform_to_the_schema() {
    let schema = model::schema();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let directory = format!("{}/../models", env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let (path, text) = example(&name);
        let model = model::read(&path, &text).unwrap_or_else(|defects| panic!("{path}\n{defects}"));
        // Written models conform to the schema too, also those read from Hugging Face configs.
        let written = serde_json::to_value(ModelFile::from(&model)).unwrap();
        let read = serde_json::from_str(&text).unwrap();
        let is_model_file = !name.ends_with(".config.json");
        seen += usize::from(is_model_file);
        for value in std::iter::once(&written).chain(is_model_file.then_some(&read)) {
            let errors: Vec<_> = validator.iter_errors(value).map(|e| e.to_string()).collect();
            assert!(errors.is_empty(), "{name}: {errors:#?}");
        }
    }
    assert_eq!(seen, 3);
    let mut wrong: serde_json::Value = serde_json::from_str(&example("lax-1b.json").1).unwrap();
    wrong["blocks"]["default"]["all"]["rank"] = 0.into();
    assert!(!validator.is_valid(&wrong));
}

#[test]
fn a_dense_gate_between_unequal_ranks_has_as_many_parameters_as_their_product() {
    let text = r#"{"format": "narrows-model/1", "hidden": 8, "vocab": 4, "heads": 2, "d_ff": 8,
        "blocks": {"count": 2, "default": {"product": "plain", "all": "dense",
            "q": {"rank": 3, "activation": "silu", "crossing": {"form": "paper", "gate": "dense"}}},
            "overrides": {"1": {"q": {"rank": 5}}}}}"#;
    let model = model::read("two", text).unwrap();
    assert_eq!(model.block_linear_parameters(0), 3 * 16 + 6 * 64);
    assert_eq!(model.block_linear_parameters(1), 5 * 16 + 3 * 5 + 6 * 64);
    let rest = 2 * 4 * 8 + (2 * 2 + 1) * 8;
    assert_eq!(model.parameters(), 3 * 16 + 5 * 16 + 3 * 5 + 12 * 64 + rest);
}

#[test]
fn fingerprints_are_stable_and_ignore_names() {
    let cola = presets::find("cola-7b").unwrap();
    let renamed = Model { name: "another".to_owned(), ..cola.clone() };
    assert_eq!(cola.fingerprint(), renamed.fingerprint());
    assert_eq!(cola.fingerprint(), read_example("boost-cola-7b.config.json").fingerprint());
    for other in [
        Model { padding_token: Some(0), ..cola.clone() },
        Model { padding_token: Some(1), ..cola.clone() },
        Model { initial_std: 0.01, ..cola.clone() },
        Model { latent_residual: Some(1.0), ..cola.clone() },
        Model { latent_residual: Some(0.5), ..cola.clone() },
    ] {
        assert_ne!(cola.fingerprint(), other.fingerprint());
    }
    let special_tokens = SpecialTokens { bos: Some(1), eos: vec![2] };
    let with_tokens = Model { special_tokens, ..cola.clone() };
    assert_eq!(cola.fingerprint(), with_tokens.fingerprint());
    // Without a LayerNorm over latents, its ε has no effect.
    let other_epsilon = Model { latent_norm_epsilon: 1e-5, ..cola.clone() };
    assert_eq!(cola.fingerprint(), other_epsilon.fingerprint());
    let lax = presets::find("lax-60m").unwrap();
    let other_epsilon = Model { latent_norm_epsilon: 1e-5, ..lax.clone() };
    assert_ne!(lax.fingerprint(), other_epsilon.fingerprint());
    // Plans name their models by fingerprint, so it must not change.
    let stable = "aff20da4c2b09a028f66118b4859fe6614c4355a5730194b7ceca57bfd7f9328";
    assert_eq!(presets::find("cola-tiny").unwrap().fingerprint(), stable);

    let mut all: Vec<String> =
        presets::names().iter().map(|name| presets::find(name).unwrap().fingerprint()).collect();
    let presets = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), presets);
}
