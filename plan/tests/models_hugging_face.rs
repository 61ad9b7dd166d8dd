//! Accepted fields of a `config.json`, and their defaults.

use narrows_plan::model::{
    self, Activation, AttentionMask, ConfigClass, GatedProduct, Model, ModelFile, Positions,
    Weight, presets,
};
use serde_json::{Value, json};

/// The required fields, and `more`.
fn config(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4,
        "intermediate_size": 172, "num_hidden_layers": 2
    });
    config.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
    config
}

fn read(config: &Value) -> Model {
    model::read("config.json", &config.to_string()).unwrap_or_else(|e| panic!("{config}\n{e}"))
}

/// (rank of q, rank of down, activation) of the last block, and its product.
fn block(config: &Value) -> (u64, u64, Activation, GatedProduct) {
    let model = read(config);
    let block = model.blocks.last().unwrap();
    let Weight::Pair(pair) = &block.q.weight else { panic!("{config} is dense") };
    (pair.rank, block.down.rank().unwrap(), pair.activation, block.product)
}

#[test]
fn defaults_are_those_of_transformers() {
    let model = read(&config("llama", json!({})));
    assert_eq!((model.kv_heads, model.head_dim, model.max_sequence_length), (4, 16, 2048));
    assert_eq!((model.norm_epsilon, model.rope.theta, model.tied), (1e-6, 1e4, false));
    assert!(!model.is_low_rank());
    assert_eq!(model.blocks[0].product, GatedProduct::SwiGlu);
}

#[test]
fn sizes_are_read() {
    let more = json!({"head_dim": 32, "num_key_value_heads": 2, "tie_word_embeddings": true,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "hidden_size": 64.0});
    let model = read(&config("llama", more));
    assert_eq!((model.blocks[0].q.d_out, model.blocks[0].k.d_out), (128, 64));
    assert_eq!((model.norm_epsilon, model.max_sequence_length, model.tied), (1e-5, 8192, true));
}

#[test]
fn all_forms_of_rope_parameters_are_read() {
    for more in [
        json!({"rope_theta": 5e5}),
        json!({"rope_theta": 500000, "rope_scaling": null}),
        json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        json!({"rope_theta": 5e5, "rope_parameters": {"original_max_position_embeddings": 2048}}),
        json!({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}),
        json!({"rope_scaling": {"type": "default", "factor": null}, "rope_theta": 5e5}),
    ] {
        assert_eq!(read(&config("llama", more)).rope.theta, 5e5);
    }
}

#[test]
fn both_dialects_of_cola_are_read() {
    use Activation::{Identity, Silu};
    use GatedProduct::{Plain, SwiGlu};
    for (more, expected) in [
        (json!({}), (16, 16, Silu, Plain)),
        (json!({"rank": null}), (16, 16, Silu, Plain)),
        (json!({"rank": 24, "only_lr_act": false}), (24, 24, Silu, SwiGlu)),
        (json!({"rank": 24, "lr_act_type": "linear"}), (24, 24, Silu, Plain)),
        (json!({"rank": 24, "hidden_act": "linear"}), (24, 24, Identity, Plain)),
        (json!({"hidden_act": "linear", "only_lr_act": false}), (16, 16, Identity, Plain)),
        (json!({"cola_act": "linear", "only_lr_act": false}), (16, 16, Identity, SwiGlu)),
        (json!({"cola_act": "silu", "hidden_act": "silu"}), (16, 16, Silu, Plain)),
        (json!({"attn_rank": 8, "mlp_rank": 12}), (8, 12, Silu, Plain)),
        (json!({"attn_rank": 8}), (8, 1024, Silu, Plain)),
        (json!({"mlp_rank": 8, "both_act": true}), (1024, 8, Silu, SwiGlu)),
        (json!({"is_cola_llama_config": true}), (1024, 1024, Silu, Plain)),
        (json!({"architectures": ["ColaLlamaForTraining"]}), (1024, 1024, Silu, Plain)),
    ] {
        assert_eq!(block(&config("cola", more.clone())), expected, "{more}");
    }
}

/// CoLA's classes pass `hidden_act` to their layers in place of `lr_act_type`.
#[test]
fn an_ignored_activation_is_a_warning() {
    for (more, field) in [
        (json!({"lr_act_type": "linear"}), Some("lr_act_type")),
        (json!({"lr_act_type": "gelu"}), Some("lr_act_type")),
        (json!({"lr_act_type": "silu"}), None),
        (json!({"lr_act_type": "swish", "hidden_act": "silu"}), None),
        (json!({"lr_act_type": "linear", "cola_act": "linear"}), None),
        (json!({}), None),
    ] {
        let text = config("cola", more.clone()).to_string();
        let (_, warnings) = model::read_with_warnings("config.json", &text).unwrap();
        let fields: Vec<&str> = warnings.iter().map(|warning| &*warning.field).collect();
        assert_eq!(fields, field.as_slice(), "{more}");
    }
}

/// The five `colam_*.json` files of the CoLA repository differ in these sizes.
#[test]
fn official_configs_of_cola_m_are_read() {
    for (hidden, d_ff, heads, layers, rank, only_lr_act) in [
        (512, 1376, 8, 8, 128, Some(false)),
        (768, 2048, 12, 12, 256, Some(false)),
        (1024, 2736, 16, 24, 256, None),
        (2048, 5461, 32, 24, 512, None),
        (4096, 11_008, 32, 32, 1024, None),
    ] {
        let mut official = json!({
            "architectures": ["ColaMForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
            "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": d_ff,
            "initializer_range": 0.02, "max_sequence_length": 1024, "model_type": "cola_m",
            "num_attention_heads": heads, "num_hidden_layers": layers, "pad_token_id": 0,
            "rms_norm_eps": 1e-06, "use_cache": false, "vocab_size": 32000, "rank": rank
        });
        let product = match only_lr_act {
            Some(value) => {
                official["only_lr_act"] = json!(value);
                GatedProduct::SwiGlu
            }
            None => GatedProduct::Plain,
        };
        let model = read(&official);
        assert_eq!(block(&official), (rank, rank, Activation::Silu, product));
        assert_eq!((model.tied, model.padding_token), (false, Some(0)));
    }
}

#[test]
fn padding_and_initialisation_are_those_of_the_original_classes() {
    for (family, more, expected) in [
        ("cola", json!({"pad_token_id": 0, "initializer_range": 0.01}), (Some(0), 0.01)),
        ("llama", json!({"pad_token_id": -1, "initializer_range": 0.03}), (Some(255), 0.03)),
        ("llama", json!({"pad_token_id": null}), (None, 0.02)),
        // BOOST's classes take the initial standard deviation from the YAML file of a run.
        ("cola", json!({"attn_rank": 8, "initializer_range": 0.01}), (None, 0.02)),
    ] {
        let model = read(&config(family, more.clone()));
        assert_eq!((model.padding_token, model.initial_std), expected, "{more}");
    }
}

#[test]
fn special_tokens_survive_a_written_config() {
    for (family, class, ids, written) in [
        ("llama", ConfigClass::Llama, json!([0, 2]), json!([0, 2])),
        ("llama", ConfigClass::Llama, json!([0, [2, 300]]), json!([0, [2, 300]])),
        ("llama", ConfigClass::Nanotron, json!([0, [2, 300]]), json!([0, 2])),
        ("cola", ConfigClass::Cola, json!([5, [7]]), json!([5, 7])),
        ("llama", ConfigClass::Llama, json!([null, -1]), json!([null, null])),
    ] {
        let model = read(&config(family, json!({"bos_token_id": ids[0], "eos_token_id": ids[1]})));
        let config = model.hugging_face_config(class).unwrap();
        assert_eq!(json!([config["bos_token_id"], config["eos_token_id"]]), written, "{ids}");
        let file = serde_json::to_string(&ModelFile::from(&model)).unwrap();
        assert_eq!(model::read("model.json", &file).unwrap(), model, "{file}");
    }
    let wrong = config("llama", json!({"eos_token_id": "</s>"})).to_string();
    let error = model::read("config.json", &wrong).unwrap_err().to_string();
    assert!(error.contains("eos_token_id") && error.contains("or a list of them"), "{error}");
}

#[test]
fn boost_configs_without_model_type_are_read() {
    let boost = json!({
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 172, "is_cola_llama_config": true,
        "max_position_embeddings": 2048, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": null, "pad_token_id": null, "pretraining_tp": 1,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e4, "rope_interleaved": false,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 256, "attn_rank": 32,
        "mlp_rank": 8, "both_act": false
    });
    assert_eq!(block(&boost), (32, 8, Activation::Silu, GatedProduct::Plain));
}

#[test]
fn galore_configs_equal_the_dense_preset() {
    let galore = json!({
        "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1,
        "hidden_act": "silu", "hidden_size": 512, "intermediate_size": 1376,
        "initializer_range": 0.02, "max_sequence_length": 4096, "model_type": "llama",
        "num_attention_heads": 8, "num_hidden_layers": 8, "pad_token_id": -1,
        "rms_norm_eps": 1e-06, "transformers_version": "4.28.1", "use_cache": true,
        "vocab_size": 32000
    });
    let expected = presets::find("llama-60m").unwrap();
    // PyTorch counts a negative `padding_idx` from the end of the vocabulary.
    let expected = Model { padding_token: Some(31_999), ..expected };
    assert_eq!(read(&galore).fingerprint(), expected.fingerprint());
}

#[test]
fn fields_without_effect_are_accepted() {
    let more = json!({
        "architectures": ["LlamaForCausalLM"], "eos_token_id": [128001, 128008], "prefix": null,
        "attention_dropout": 0, "layer_types": ["full_attention", "full_attention"],
        "pruned_heads": {}, "chunk_size_feed_forward": 0, "quantization_config": null,
        "id2label": {"0": "LABEL_0"}, "top_p": 0.9, "is_encoder_decoder": false, "dtype": "float32"
    });
    read(&config("llama", more));
}

/// A written config reads as the same model, and what a class does not have is refused by its place.
#[test]
fn written_configs_read_as_the_same_model() {
    use ConfigClass::{Cola, Llama, Nanotron};
    let cola = presets::find("cola-60m").unwrap();
    let padded = Model { padding_token: Some(0), initial_std: 0.03, ..cola.clone() };
    let tied = presets::find("cola-1b").unwrap();
    let linear = read(&config("cola", json!({"hidden_act": "linear"})));
    let halves = json!({"attn_rank": 8, "mlp_rank": 12, "num_key_value_heads": 2});
    let boost = read(&config("cola", halves));
    let dense = read(&config("llama", json!({"num_key_value_heads": 2, "head_dim": 32})));
    let svd = presets::find("svd-60m").unwrap();
    let lax = presets::find("lax-60m").unwrap();
    let mixed = model::read("mixed", include_str!("../../models/mixed-ranks.json")).unwrap();
    for (model, class, refusal) in [
        (&cola, Cola, None),
        (&padded, Cola, None),
        (&tied, Cola, None),
        (&tied, Nanotron, None),
        (&linear, Cola, None),
        (&boost, Nanotron, None),
        (&dense, Llama, None),
        (&dense, Nanotron, None),
        (&svd.folded().unwrap(), Llama, None),
        (&cola, Llama, Some("layer 0 q: is a factor pair")),
        (&cola, Nanotron, Some("layer 0: has SiLU on the gate")),
        (&svd, Cola, Some("layer 0: has SiLU on the gate and not in the latents")),
        (&svd, Nanotron, Some("layer 0 q: has no activation")),
        (&boost, Cola, Some("layer 0 gate: has rank 12, and q has 8")),
        (&dense, Cola, Some("layer 0 q: is dense")),
        (&lax, Cola, Some("layer 1 q: has a latent crossing")),
        (&mixed, Llama, Some("layer 1 q: differs from layer 0")),
    ] {
        let written = model.hugging_face_config(class);
        match (written, refusal) {
            (Ok(config), None) => {
                let again = Model { name: model.name.clone(), ..read(&config) };
                assert_eq!(again, *model, "{class:?}");
            }
            (Err(defect), Some(words)) => {
                assert!(defect.to_string().starts_with(words), "{words}: {defect}");
            }
            (written, _) => panic!("{class:?} of {}: {written:?}", model.name),
        }
    }
}

#[test]
fn pairs_are_folded_where_their_function_is_linear() {
    let svd = presets::find("svd-60m").unwrap();
    let folded = svd.folded().unwrap();
    assert!(!folded.is_low_rank());
    assert_eq!(folded.blocks[0].product, svd.blocks[0].product);
    for (name, words) in [
        ("cola-60m", "layer 0 q: has SiLU between its factors"),
        ("lax-60m", "layer 0 q: has SiLU between its factors"),
    ] {
        let defect = presets::find(name).unwrap().folded().unwrap_err();
        assert!(defect.to_string().starts_with(words), "{name}: {defect}");
    }
}

/// Blocks with a window, of four: by class, by `layer_types`, and by the index of the first one.
#[test]
fn sliding_windows_are_those_of_the_class() {
    let qwen = |more: Value| {
        let mut fields = json!({"sliding_window": 512, "use_sliding_window": true});
        fields.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        ("qwen2", fields)
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let cases = [
        (("mistral", json!({"sliding_window": null})), [None; 4]),
        (("mistral", json!({"sliding_window": 512})), [Some(512); 4]),
        (("mistral", json!({"sliding_window": 512, "layer_types": vec![full; 4]})), [Some(512); 4]),
        (("phi3", json!({"sliding_window": 2047})), [Some(2047); 4]),
        (qwen(json!({})), [None; 4]),
        (qwen(json!({"max_window_layers": 3})), [None, None, None, Some(512)]),
        (qwen(json!({"max_window_layers": 0, "sliding_window": null})), [None; 4]),
        (("qwen3", json!({"max_window_layers": 0, "use_sliding_window": true})), [Some(4096); 4]),
        (qwen(json!({"max_window_layers": 0, "use_sliding_window": false})), [None; 4]),
        (
            qwen(json!({"layer_types": [sliding, full, sliding, full]})),
            [Some(512), None, Some(512), None],
        ),
        (
            ("smollm3", json!({"sliding_window": 256, "use_sliding_window": true})),
            [None, None, None, Some(256)],
        ),
    ];
    for ((model_type, more), expected) in cases {
        let mut fields = json!({
            "num_hidden_layers": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "pad_token_id": 0, "rope_theta": 1e4, "tie_word_embeddings": false
        });
        fields.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        let model = read(&config(model_type, fields));
        let windows: Vec<Option<u64>> =
            model.blocks.iter().map(|block| block.attention.window(8192)).collect();
        assert_eq!(windows, expected, "{model_type} {more}");
        assert_eq!(model.max_sequence_length, 4096);
    }
}

/// LLaMA's class reads no window, and a warning says so.
#[test]
fn windows_that_a_class_ignores_are_warnings() {
    for (more, warned) in [
        (json!({"sliding_window": 512}), true),
        (json!({"sliding_window": 512, "use_sliding_window": false}), false),
        (json!({"sliding_window": null}), false),
    ] {
        let text = config("llama", more.clone()).to_string();
        let (model, warnings) = model::read_with_warnings("config.json", &text).unwrap();
        assert!(model.blocks.iter().all(|block| block.attention == AttentionMask::Full));
        assert_eq!(warnings.len() == 1, warned, "{more}");
    }
}

/// A config that is written for a model with windows is read as an equal model.
#[test]
fn windows_are_written_for_mistral_and_qwen() {
    let with_windows = |bias: bool, windowed: fn(usize) -> bool| {
        let mut model = presets::find("llama-60m").unwrap();
        for (index, block) in model.blocks.iter_mut().enumerate() {
            block.qkv_bias = bias;
            if windowed(index) {
                block.attention = AttentionMask::SlidingWindow(128);
            }
        }
        model
    };
    let all = with_windows(false, |_| true);
    for (model, model_type) in
        [(&all, "mistral"), (&with_windows(true, |index| index % 2 == 0), "qwen2")]
    {
        let config = model.hugging_face_config(ConfigClass::Llama).unwrap();
        assert_eq!(config["model_type"], model_type);
        assert_eq!(read(&config).blocks, model.blocks);
    }
    let mixed = with_windows(false, |index| index != 3);
    let defect = mixed.hugging_face_config(ConfigClass::Llama).unwrap_err();
    assert!(defect.to_string().starts_with("layer 3: has no window"), "{defect}");
    let defect = all.hugging_face_config(ConfigClass::Nanotron).unwrap_err();
    assert!(defect.to_string().starts_with("layer 0: attends within a window"), "{defect}");
}

#[test]
fn defaults_of_other_classes_than_llama_are_required() {
    for (model_type, field) in [
        ("mistral", "sliding_window"),
        ("phi3", "rms_norm_eps"),
        ("phi3", "pad_token_id"),
        ("internlm2", "bias"),
    ] {
        let mut fields = json!({
            "num_key_value_heads": 4, "max_position_embeddings": 2048, "sliding_window": null,
            "rms_norm_eps": 1e-5, "pad_token_id": 0, "bias": false
        });
        read(&config(model_type, fields.clone()));
        fields.as_object_mut().unwrap().remove(field);
        let defects = model::read("c", &config(model_type, fields).to_string()).unwrap_err();
        assert_eq!(defects.0.len(), 1, "{defects}");
        assert_eq!(defects.0[0].field, field);
    }
}

#[test]
fn blocks_without_rope_are_read() {
    let shape = json!({
        "num_key_value_heads": 4, "max_position_embeddings": 2048, "rope_theta": 1e4, "pad_token_id": 0,
        "tie_word_embeddings": false, "num_hidden_layers": 4
    });
    for (more, without) in [
        (json!({}), vec![3]),
        (json!({"no_rope_layer_interval": 2}), vec![1, 3]),
        (json!({"no_rope_layers": [0, 1, 1, 0], "no_rope_layer_interval": 2}), vec![0, 3]),
    ] {
        let mut fields = shape.clone();
        fields.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        let model = read(&config("smollm3", fields));
        let blocks = model.blocks.iter().enumerate();
        let found: Vec<usize> =
            blocks.filter(|(_, b)| b.positions == Positions::None).map(|(at, _)| at).collect();
        assert_eq!(found, without, "{more}");
        assert!(model.hugging_face_config(ConfigClass::Llama).is_err());
    }
    let mut fields = shape;
    fields["no_rope_layers"] = json!([1, 0]);
    let defects = model::read("c", &config("smollm3", fields).to_string()).unwrap_err();
    assert_eq!(defects.0[0].field, "no_rope_layers", "{defects}");
}
