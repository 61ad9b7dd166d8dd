//! Accepted fields of a `config.json`, and their defaults.

use narrows_plan::model::{self, Activation, GatedProduct, Model, Weight, presets};
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
    assert_eq!((model.norm_epsilon, model.rope_theta, model.tied), (1e-6, 1e4, false));
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
        json!({"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}),
        json!({"rope_scaling": {"type": "default", "factor": null}, "rope_theta": 5e5}),
    ] {
        assert_eq!(read(&config("llama", more)).rope_theta, 5e5);
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
        (json!({"rank": 24, "lr_act_type": "linear"}), (24, 24, Identity, Plain)),
        (json!({"cola_act": "silu", "hidden_act": "silu"}), (16, 16, Silu, Plain)),
        (json!({"attn_rank": 8, "mlp_rank": 12}), (8, 12, Silu, Plain)),
        (json!({"attn_rank": 8}), (8, 16, Silu, Plain)),
        (json!({"mlp_rank": 8, "both_act": true}), (16, 8, Silu, SwiGlu)),
    ] {
        assert_eq!(block(&config("cola", more.clone())), expected, "{more}");
    }
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
