//! Invalid models: every defect is reported at its field, all of them at once.

use narrows_plan::{Defects, model};
use serde_json::{Value, json};

fn model_file() -> Value {
    json!({
        "format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 172,
        "blocks": {"count": 4, "default": {
            "product": "plain", "all": {"rank": 16, "activation": "silu"}
        }}
    })
}

fn cola() -> Value {
    json!({
        "model_type": "cola", "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4,
        "intermediate_size": 172, "num_hidden_layers": 4
    })
}

fn llama() -> Value {
    let mut llama = cola();
    llama["model_type"] = "llama".into();
    llama
}

/// `base` with the value at each JSON pointer replaced, or removed where it is the word "REMOVE".
fn with(mut base: Value, changes: &[(&str, Value)]) -> Value {
    for (pointer, value) in changes {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = base.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        if *value == json!("REMOVE") {
            parent.remove(key).unwrap();
        } else {
            parent.insert(key.to_owned(), value.clone());
        }
    }
    base
}

fn refusal(value: &Value) -> Defects {
    match model::read("test.json", &value.to_string()) {
        Ok(model) => panic!("accepted {value} as {model:?}"),
        Err(defects) => defects,
    }
}

/// Expects exactly one defect, at `field`, whose text contains `words`.
#[track_caller]
fn check(value: Value, field: &str, words: &str) {
    let defects = refusal(&value);
    let [defect] = defects.0.as_slice() else { panic!("{value}\n{defects}") };
    assert_eq!(defect.field, field, "{defect}");
    assert!(defect.to_string().contains(words), "{defect}");
}

#[test]
fn invalid_sizes_of_model_files_are_refused() {
    for field in ["hidden", "vocab", "heads", "kv_heads", "d_ff", "max_sequence_length"] {
        check(with(model_file(), &[(&format!("/{field}"), json!(0))]), field, "at least 1");
        check(
            with(model_file(), &[(&format!("/{field}"), json!(u64::MAX))]),
            field,
            "is more than",
        );
        check(
            with(model_file(), &[(&format!("/{field}"), json!(-1))]),
            field,
            "number from 0, found -1",
        );
        check(with(model_file(), &[(&format!("/{field}"), json!("x"))]), field, "line 1 column");
    }
    for field in ["hidden", "vocab", "heads", "d_ff", "blocks"] {
        check(with(model_file(), &[(&format!("/{field}"), json!("REMOVE"))]), field, "is missing");
    }
    let bare = refusal(&json!({"format": "narrows-model/1", "heads": 4, "blocks": {}}));
    let fields: Vec<_> = bare.0.iter().map(|defect| defect.field.as_str()).collect();
    assert_eq!(fields, ["hidden", "vocab", "d_ff", "blocks.count", "blocks.default"]);
    check(with(model_file(), &[("/kv_heads", json!(3))]), "kv_heads", "a divisor of 4");
    check(with(model_file(), &[("/heads", json!(5))]), "heads", "does not divide into 5 heads");
    check(with(model_file(), &[("/head_dim", json!(7))]), "head_dim", "odd");
    check(with(model_file(), &[("/head_dim", json!(0))]), "head_dim", "at least 1");
    check(with(model_file(), &[("/head_dim", json!(1 << 23))]), "head_dim", "wider than");
    check(with(model_file(), &[("/norm_epsilon", json!(0))]), "norm_epsilon", "positive");
    check(with(model_file(), &[("/norm_epsilon", json!(-1e-5))]), "norm_epsilon", "positive");
    check(with(model_file(), &[("/rope_theta", json!(0))]), "rope_theta", "positive");
    check(with(model_file(), &[("/name", json!(""))]), "name", "empty");
    check(
        with(model_file(), &[("/format", json!("narrows-model/2"))]),
        "format",
        "narrows-model/1",
    );
    check(with(model_file(), &[("/dff", json!(3))]), "dff", "unknown field");
}

#[test]
fn invalid_blocks_of_model_files_are_refused() {
    let count = "/blocks/count";
    check(with(model_file(), &[(count, json!(0))]), "blocks.count", "at least 1");
    check(with(model_file(), &[(count, json!(4097))]), "blocks.count", "more than 4096");
    let default = |key: &str| format!("/blocks/default/{key}");
    for (key, value, field, words) in [
        ("product", json!("REMOVE"), "blocks.default.product", "swiglu"),
        ("product", json!("glu"), "blocks.default.product", "found `glu`"),
        ("all", json!("REMOVE"), "", ""),
        ("all", json!("sparse"), "blocks.default.all", "\"dense\" or an object"),
        ("all", json!({"activation": "silu"}), "blocks.default.all.rank", "missing"),
        ("all", json!({"rank": 4}), "blocks.default.all.activation", "\"identity\" as in SVD"),
        ("all", json!({"rank": 0, "activation": "silu"}), "blocks.default.all.rank", "at least 1"),
        ("all", json!({"rank": 4, "act": 1}), "blocks.default.all.act", "unknown field"),
        (
            "all",
            json!({"rank": 4.5}),
            "blocks.default.all.rank",
            "expected a whole number from 0, found 4.5",
        ),
        ("q", json!({"rank": 1 << 25}), "blocks.default.q.rank", "is more than"),
        ("d_ff", json!(0), "blocks.default.d_ff", "at least 1"),
        ("e", json!("dense"), "blocks.default.e", "unknown field"),
    ] {
        let value = with(model_file(), &[(&default(key), value)]);
        if field.is_empty() {
            let fields: Vec<_> = refusal(&value).0.into_iter().map(|d| d.field).collect();
            let linears = ["q", "k", "v", "o", "gate", "up", "down"];
            assert_eq!(fields, linears.map(|linear| format!("blocks.default.{linear}")));
        } else {
            check(value, field, words);
        }
    }
}

#[test]
fn invalid_overrides_of_model_files_are_refused() {
    let with = |overrides: Value| with(model_file(), &[("/blocks/overrides", overrides)]);
    check(with(json!({"4": {}})), "blocks.overrides.4", "there is no block 4");
    check(with(json!({"2-9": {}})), "blocks.overrides.2-9", "there is no block 9");
    check(with(json!({"3-2": {}})), "blocks.overrides.3-2", "\"2-3\"");
    check(with(json!({"last": {}})), "blocks.overrides.last", "counted from 0");
    check(with(json!({"3": {"q": {"rank": 0}}})), "blocks.overrides.3.q.rank", "at least 1");
    check(with(json!({"3": {"q": {"rnk": 0}}})), "blocks.overrides.3.q.rnk", "unknown field");
    check(
        with(json!({"2-3": {"q": "dense"}, "3": {"q": {"activation": "silu"}}})),
        "blocks.overrides.3.q.rank",
        "missing",
    );
    let repeat = model_file()
        .to_string()
        .replace(r#""default""#, r#""overrides": {"1": {}, "1": {}}, "default""#);
    let defects = model::read("t", &repeat).unwrap_err();
    assert!(defects.to_string().contains("blocks.overrides.1: is repeated"), "{defects}");
}

#[test]
fn invalid_crossings_are_refused() {
    let crossed = |gate: Value, overrides: Value| {
        let crossing = json!({"form": "released", "gate": gate});
        let all = json!({"rank": 16, "activation": "silu", "crossing": crossing});
        with(model_file(), &[("/blocks/default/all", all), ("/blocks/overrides", overrides)])
    };
    let tensor = |a: u64, b: u64| json!({"tensor": {"a": a, "b": b}});
    let none = json!({});
    let gate = "blocks.default.all.crossing.gate.tensor";
    check(crossed(tensor(2, 4), none.clone()), gate, "2·4 is not the rank 16");
    check(crossed(tensor(2, 4), none.clone()), gate, r#"{"a": 4, "b": 4}"#);
    let wide = refusal(&crossed(tensor(1 << 40, 1 << 40), none.clone()));
    let fields: Vec<_> = wide.0.iter().map(|defect| defect.field.clone()).collect();
    assert_eq!(fields, [format!("{gate}.a"), format!("{gate}.b"), gate.to_owned()]);
    check(crossed(json!("open"), none), "blocks.default.all.crossing.gate", "found `open`");

    let three = json!({"3": {"q": {"rank": 8}}});
    check(crossed(json!("identity"), three.clone()), "blocks[3].q.crossing", "rank 16 in block 2");
    let defects = refusal(&crossed(tensor(4, 4), three.clone()));
    let fields: Vec<_> = defects.0.iter().map(|defect| defect.field.as_str()).collect();
    assert_eq!(fields, [gate, "blocks[3].q.crossing"]);
    assert!(model::read("t", &crossed(json!("dense"), three).to_string()).is_ok());

    let dense = json!({"2": {"up": "dense"}});
    check(crossed(json!("identity"), dense), "blocks[3].up.crossing", "up of block 2 is dense");
    let corrected = json!({"2": {"up": "dense"}, "3": {"up": {"rank": 16, "crossing": "none"}}});
    assert!(model::read("t", &crossed(json!("identity"), corrected).to_string()).is_ok());

    let first = json!({"0": {"q": {"crossing": {"form": "paper", "gate": "identity"}}}});
    check(crossed(json!("identity"), first), "blocks.overrides.0.q.crossing", "block 0 has no");
}

#[test]
fn models_above_the_parameter_limit_are_refused() {
    let wide: u64 = 1 << 24;
    let huge = with(
        model_file(),
        &[
            ("/hidden", json!(wide)),
            ("/d_ff", json!(wide)),
            ("/vocab", json!(wide)),
            ("/blocks/count", json!(4096)),
            (
                "/blocks/default/all",
                json!({"rank": wide, "activation": "silu",
            "crossing": {"form": "released", "gate": "dense"}}),
            ),
        ],
    );
    check(huge, "", "parameters are more than");
}

#[test]
fn all_defects_are_reported_at_once() {
    let defects = refusal(&with(
        model_file(),
        &[
            ("/vocab", json!(0)),
            ("/kv_heads", json!(3)),
            ("/norm_epsilon", json!(-1)),
            ("/blocks/default/all", json!({"rank": 0})),
            ("/blocks/overrides", json!({"9": {}, "2": {"d_ff": 0}})),
        ],
    ));
    let fields: Vec<_> = defects.0.iter().map(|defect| defect.field.as_str()).collect();
    assert_eq!(
        fields,
        [
            "kv_heads",
            "vocab",
            "norm_epsilon",
            "blocks.overrides.9",
            "blocks.default.all.rank",
            "blocks.overrides.2.d_ff",
            "blocks.default.all.activation",
        ]
    );
}

#[test]
fn hugging_face_fields_that_change_the_function_are_refused() {
    for (field, value, words) in [
        ("attention_bias", json!(true), "bias"),
        ("mlp_bias", json!(true), "bias"),
        ("attention_dropout", json!(0.1), "dropout"),
        ("hidden_act", json!("gelu"), "\"silu\""),
        ("layer_types", json!(["full_attention", "linear_attention"]), "linear_attention"),
        ("quantization_config", json!({"bits": 4}), "quantised"),
        ("pretraining_tp", json!(2), "1"),
        ("rope_interleaved", json!(true), "half-rotated"),
        ("pruned_heads", json!({"0": [1]}), "pruned"),
        ("num_experts", json!(8), "an unknown field"),
        ("qk_norm", json!(true), "an unknown field"),
        ("tie_word_embeddings", json!("yes"), "true or false"),
        (
            "model_type",
            json!("gpt5"),
            "llama, mistral, phi3, internlm2, smollm3, qwen2, qwen3, cola or cola_m",
        ),
        ("model_type", json!("gpt2"), "learned positions"),
        ("architectures", json!(["LlamaForSequenceClassification"]), "LlamaForCausalLM"),
        ("rope_theta", json!("big"), "a number"),
    ] {
        check(with(llama(), &[(&format!("/{field}"), value)]), field, words);
    }
    for (value, field, words) in [
        (json!({"rope_type": "mrope"}), "rope_scaling.rope_type", "\"default\""),
        (json!({"type": "linear"}), "rope_scaling.factor", "missing"),
        (json!({"type": "linear", "factor": 0}), "rope_scaling.factor", "positive"),
        (json!({"type": "linear", "factor": 2, "beta": 1}), "rope_scaling.beta", "changes RoPE"),
        (
            json!({"type": "longrope", "short_factor": 1, "long_factor": [1, 1, 1, 1, 1, 1, 1, 1]}),
            "rope_scaling.short_factor",
            "a list",
        ),
        (
            json!({"type": "su", "short_factor": [1], "long_factor": [1, 1, 1, 1, 1, 1, 1, 1]}),
            "rope_scaling.short_factor",
            "1 divisors for 8 pairs",
        ),
        (
            json!({"type": "dynamic", "factor": 2, "original_max_position_embeddings": 512}),
            "rope_scaling",
            "from 512 tokens on",
        ),
        (
            json!({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}),
            "rope_scaling.low_freq_factor",
            "not below high_freq_factor",
        ),
        (json!({"type": "default", "factor": 2.0}), "rope_scaling.factor", "changes RoPE"),
        (json!("yarn"), "rope_scaling", "an object"),
    ] {
        check(with(llama(), &[("/rope_scaling", value)]), field, words);
    }
    for (class, model_type) in [("ColaForCausalLM", "llama"), ("MistralForCausalLM", "llama")] {
        let contradiction =
            [("/architectures", json!([class])), ("/model_type", json!(model_type))];
        let model = with(llama(), &contradiction);
        check(model.clone(), "architectures", class);
        check(model, "architectures", "contradicts `model_type` \"llama\"");
    }
    let two = [("/rope_theta", json!(1e4)), ("/rope_parameters", json!({"rope_theta": 5e5}))];
    check(with(llama(), &two), "rope_parameters.rope_theta", "one of the two");
}

#[test]
fn defects_of_hugging_face_configs_name_their_own_fields() {
    for (field, value, words) in [
        ("hidden_size", json!("REMOVE"), "missing"),
        ("vocab_size", json!(0), "at least 1"),
        ("num_hidden_layers", json!(1e9), "more than 4096"),
        ("intermediate_size", json!(null), "missing"),
        ("num_attention_heads", json!(7), "does not divide"),
        ("num_attention_heads", json!(2.5), "a whole number"),
        ("num_key_value_heads", json!(3), "a divisor of 4"),
        ("head_dim", json!(5), "odd"),
        ("max_position_embeddings", json!(0), "at least 1"),
        ("rms_norm_eps", json!(0), "positive"),
        ("rank", json!(0), "at least 1"),
        ("attn_rank", json!(0), "at least 1"),
        ("mlp_rank", json!(0), "at least 1"),
        ("cola_act", json!("gelu"), "\"linear\""),
        ("hidden_act", json!("gelu"), "\"linear\""),
        ("initializer_range", json!(0), "positive"),
        ("pad_token_id", json!(256), "256 tokens"),
        ("pad_token_id", json!(-257), "256 tokens"),
        ("pad_token_id", json!("<pad>"), "a whole number"),
    ] {
        check(with(cola(), &[(&format!("/{field}"), value)]), field, words);
    }
    let contradiction = [("/only_lr_act", json!(true)), ("/both_act", json!(true))];
    check(with(cola(), &contradiction), "both_act", "contradict");
}

#[test]
fn mistral_configs_without_a_sliding_window_field_are_refused() {
    let mistral = with(
        llama(),
        &[
            ("/model_type", json!("mistral")),
            ("/num_key_value_heads", json!(2)),
            ("/max_position_embeddings", json!(4096)),
        ],
    );
    check(mistral.clone(), "sliding_window", "Mistral's default is 4096");
    let open = with(mistral, &[("/sliding_window", json!(null))]);
    assert_eq!(model::read("m", &open.to_string()).unwrap().kv_heads, 2);
}

#[test]
fn windows_without_keys_and_unknown_kinds_of_attention_are_refused() {
    let mistral = |window: serde_json::Value| {
        let mistral = [
            ("/model_type", json!("mistral")),
            ("/num_key_value_heads", json!(2)),
            ("/max_position_embeddings", json!(4096)),
            ("/sliding_window", window),
        ];
        with(llama(), &mistral)
    };
    check(mistral(json!(0)), "sliding_window", "must be");
    let types = |types| with(mistral(json!(8)), &[("/layer_types", types)]);
    check(types(json!(["linear_attention"])), "layer_types", "is not supported");
    check(types(json!(vec!["full_attention"; 99])), "layer_types", "has 99 entries");
}

#[test]
fn text_that_is_not_a_model_is_refused() {
    for (text, words) in [
        ("", "line 1 column 0"),
        ("{\"format\": ", "line 1 column"),
        ("{}\n{}", "line 2 column"),
        ("[]", "not a JSON object"),
        ("{}", "neither a `format` nor a `model_type`"),
        (r#"{"format": "narrows-plan/1"}"#, "the file is a plan, not a model"),
        ("{\"hidden\": 1e999}", "number out of range"),
    ] {
        let defects = model::read("t", text).unwrap_err();
        assert!(defects.to_string().contains(words), "{text}: {defects}");
    }
    let deep = "[".repeat(100_000);
    assert!(model::read("t", &deep).unwrap_err().to_string().contains("recursion limit"));
}

/// JSON readers disagree on which of two equal keys takes precedence.
#[test]
fn repeated_keys_are_refused() {
    let repeat = |value: Value, at: &str, again: &str| {
        let text = value.to_string();
        assert_eq!(text.matches(at).count(), 1, "{at} in {text}");
        let defects = model::read("x.json", &text.replace(at, &format!("{again}, {at}")));
        let defects = defects.unwrap_err();
        defects.0.iter().map(|defect| format!("{}: {}", defect.field, defect.problem)).collect()
    };
    let problems: Vec<String> = repeat(llama(), r#""hidden_size":"#, r#""hidden_size": 8"#);
    assert_eq!(problems, ["hidden_size: is repeated"]);
    let scaled = with(llama(), &[("/rope_scaling", json!({"factor": [{"a": 1}]}))]);
    let problems = repeat(scaled, r#""a":1"#, r#""a": 2, "a": 3"#);
    assert_eq!(problems, ["rope_scaling.factor[0].a: is repeated"]);
    let overridden = with(model_file(), &[("/blocks/overrides", json!({"0": {"q": "dense"}}))]);
    let problems = repeat(overridden, r#""0":"#, r#""0": {"k": "dense"}"#);
    assert_eq!(problems, ["blocks.overrides.0: is repeated"]);
}
