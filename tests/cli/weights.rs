//! Weights of other training codes: `--init-from` and `export-weights`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use super::checkpoints::curve;
use super::cluster::{Processes, wait_for_success};
use super::loro::PLAIN_PAIRS;
use super::run::{SMALL, lines};
use super::{failure, json, narrows, stdout};

/// A trained model is exported, and a run starts from the export as from its own checkpoint, under another plan too.
#[test]
fn exported_weights_start_a_run_as_their_checkpoint_does() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    stdout(&format!("{SMALL} --steps 4 --learning-rate 0.01 --checkpoint-dir {}", at("kept")));
    let answer = json(&format!(
        "export-weights {} --model cola-tiny --to cola --output {}",
        at("kept"),
        at("cola")
    ));
    assert_eq!(answer["weights"], json!(at("cola/model.safetensors")));
    assert_eq!(answer["folded_pairs"], json!(0));
    let nanotron = format!("--model {} --to nanotron --output {}", at("cola"), at("nanotron"));
    stdout(&format!("export-weights {} {nanotron}", at("cola")));
    let losses = |from: &str, more: &str| {
        let metrics = at("m.jsonl");
        stdout(&format!("{SMALL} --steps 1 {more} --init-from {} --metrics {metrics}", at(from)));
        let [[_, loss, ..]] = curve(Path::new(&metrics))[..] else { panic!("one step") };
        f64::from_bits(loss)
    };
    let own = losses("kept/step-00000004/model.safetensors", "");
    assert_eq!(losses("kept", ""), own);
    assert_eq!(losses("cola", ""), own);
    assert_eq!(losses("nanotron", ""), own);
    let model = format!("--model {}", at("cola"));
    assert_eq!(losses("cola", &model), own);
    assert!((losses("cola", "--devices 2 --tensor 2") - own).abs() < 1e-4);
    let file = at("cola/model.safetensors");
    let mode = |path: &str| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        mode(&file),
        mode(&at("m.jsonl")),
        "others may read exports as they may read metrics"
    );
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let error = failure(&format!("{SMALL} --steps 1 --init-from {}", at("cola")), 2);
    assert!(error.contains("has elements that are not finite"), "{error}");
    // The logarithm of the vocabulary of 256 is 5.545: the weights are not the initial ones.
    assert!(own < 5.3, "{own}");
}

/// The names of LORO's code, and a configuration without ranks.
#[test]
fn factor_pairs_are_exported_for_the_code_of_loro() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::write(at("pairs.json"), PLAIN_PAIRS).unwrap();
    let run = format!("{SMALL} --model {} --steps 1", at("pairs.json"));
    stdout(&format!("{run} --learning-rate 0.01 --checkpoint-dir {}", at("kept")));
    let answer = json(&format!("export-weights {} --to loro --output {}", at("kept"), at("loro")));
    assert_eq!(answer["folded_pairs"], json!(0));
    let bytes = fs::read(at("loro/model.safetensors")).unwrap();
    let header = String::from_utf8_lossy(&bytes);
    for name in ["self_attn.q_proj.weight_in", "mlp.down_proj.weight_out"] {
        assert!(header.contains(&format!("model.layers.1.{name}")), "{name}");
    }
    let config = fs::read(at("loro/config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["architectures"], json!(["LlamaForCausalLM"]));
    let loss = |from: &str| {
        stdout(&format!("{run} --init-from {} --metrics {}", at(from), at("m.jsonl")));
        curve(Path::new(&at("m.jsonl")))[0][1]
    };
    assert_eq!(loss("loro"), loss("kept"));
    // Under the names of the source again, all weights are those of the checkpoint.
    let model = format!("--model {}", at("pairs.json"));
    let dense = |from: &str| {
        let output = format!("{}-dense", at(from));
        stdout(&format!("export-weights {} {model} --to llama --output {output}", at(from)));
        fs::read(format!("{output}/model.safetensors")).unwrap()
    };
    assert_eq!(dense("loro"), dense("kept"));
}

/// Programs that generate text need both.
#[test]
fn special_tokens_and_the_tokenizer_are_exported() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let config = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 256,
        "bos_token_id": 5, "eos_token_id": [7, 8]
    });
    fs::write(at("config.json"), config.to_string()).unwrap();
    let model = format!("--model {} --steps 1", at("config.json"));
    stdout(&format!("{SMALL} {model} --checkpoint-dir {}", at("kept")));
    let files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
    for name in files {
        fs::write(folder.path().join("kept/step-00000001").join(name), name).unwrap();
    }
    for (class, config, eos) in
        [("llama", "config.json", json!([7, 8])), ("nanotron", "model_config.json", json!(7))]
    {
        let output = folder.path().join(class);
        let flags = format!("--to {class} --output {}", output.display());
        let answer = json(&format!("export-weights {} {flags}", at("kept")));
        assert_eq!(answer["tokenizer"], json!(files));
        for name in files {
            assert_eq!(fs::read_to_string(output.join(name)).unwrap(), name);
        }
        let written = fs::read(output.join(config)).unwrap();
        let written: Value = serde_json::from_slice(&written).unwrap();
        assert_eq!((&written["bos_token_id"], &written["eos_token_id"]), (&json!(5), &eos));
    }
}

/// Biases of Qwen2 and norms of heads of Qwen3 are trained, exported under their classes, and read again, under another
/// plan too.
#[test]
fn biases_and_norms_of_heads_survive_an_export() {
    let biases = [("q_proj.bias", 32), ("k_proj.bias", 16), ("v_proj.bias", 16)];
    export_and_read_again("Qwen2ForCausalLM", "qwen2", &biases, "biases of q, k and v");
    let norms = [("q_norm.weight", 8), ("k_norm.weight", 8)];
    export_and_read_again("Qwen3ForCausalLM", "qwen3", &norms, "norms of the heads of q and k");
}

/// Fused projections of InternLM2 and Phi-3 become the matrices of LLaMA, which continue a text as the files do from
/// which they were read. LLaMA's class rotates whole heads, so Phi-3's are exported without that part of the config.
#[test]
fn fused_projections_are_read_and_exported_apart() {
    let cases = fs::read_to_string("tests/golden/weights/cases.json").unwrap();
    let cases: Value = serde_json::from_str(&cases).unwrap();
    for name in ["internlm2", "phi3"] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).display().to_string();
        let mut config = cases[name]["config"].clone();
        config.as_object_mut().unwrap().remove("partial_rotary_factor");
        fs::write(at("config.json"), config.to_string()).unwrap();
        fs::copy(format!("tests/golden/weights/{name}/model.safetensors"), at("model.safetensors"))
            .unwrap();
        let source = folder.path().display();
        stdout(&format!("export-weights {source} --to llama --output {}", at("llama")));
        let tokens = |weights: &str| {
            let mut command = narrows("generate");
            // The bytes 10 and 9 are tokens of the vocabulary of 16.
            command.args([weights, "--prompt", "\n\t", "--tokenizer", "bytes"]);
            let assert = command.args(["--tokens", "20", "--format", "json"]).assert().success();
            let answer: Value = serde_json::from_slice(&assert.get_output().stdout).unwrap();
            answer["tokens"].clone()
        };
        assert_eq!(tokens(&at("")), tokens(&at("llama")), "{name}");
    }
}

/// `vectors` are the names and widths of the vectors of attention, whose initial elements are equal.
fn export_and_read_again(class: &str, model_type: &str, vectors: &[(&str, usize)], phrase: &str) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let config = json!({
        "architectures": [class], "model_type": model_type, "hidden_act": "silu",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 256, "tie_word_embeddings": false
    });
    fs::write(at("qwen.json"), config.to_string()).unwrap();
    let run = |model: &str, more: &str| {
        let metrics = at("m.jsonl");
        let rate = "--learning-rate 0.01";
        stdout(&format!("{SMALL} --model {} {rate} --metrics {metrics} {more}", at(model)));
        f64::from_bits(curve(Path::new(&metrics))[0][1])
    };
    let untrained = run("qwen.json", &format!("--steps 4 --checkpoint-dir {}", at("kept")));
    let export = format!("export-weights {} --model {} --output", at("kept"), at("qwen.json"));
    stdout(&format!("{export} {} --to llama", at("new")));
    let written: Value = serde_json::from_slice(&fs::read(at("new/config.json")).unwrap()).unwrap();
    assert_eq!(written["architectures"], config["architectures"]);
    let bytes = fs::read(at("new/model.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, elements) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    for (name, width) in vectors {
        let vector = &header[format!("model.layers.1.self_attn.{name}")];
        assert_eq!(vector["shape"], json!([width]), "{header}");
        let offsets: [usize; 2] = serde_json::from_value(vector["data_offsets"].clone()).unwrap();
        let trained = &elements[offsets[0]..offsets[1]];
        assert!(trained.chunks(4).any(|element| *element != trained[..4]), "{name} is trained");
    }
    let own = run("qwen.json", &format!("--steps 1 --init-from {}", at("kept")));
    assert!(own < untrained - 0.1, "{own} after {untrained}");
    let exported = format!("--steps 1 --init-from {}", at("new"));
    assert_eq!(run("new/config.json", &exported), own);
    let sharded = run("qwen.json", &format!("{exported} --devices 2 --tensor 2"));
    assert!((sharded - own).abs() < 1e-4, "{sharded} instead of {own}");
    for (to, owner) in [("nanotron", "the class does"), ("loro", "LORO's modules do")] {
        let error = failure(&format!("{export} {} --to {to}", at("other")), 2);
        let problem = format!("error: qwen: layer 0: has {phrase}, which {owner} not have");
        assert!(error.contains(&problem), "{error}");
    }
}

/// Of two processes, each writes shards. Damage that leaves all elements finite is found by the checksums.
#[test]
fn runs_start_from_whole_checkpoints_only() {
    let processes = Processes::new(2);
    wait_for_success(processes.all(&format!("{} --tensor 2", processes.flags(2))));
    let start = |metrics: &str| {
        let (kept, metrics) = (processes.at("kept"), processes.at(metrics));
        format!("{SMALL} --steps 1 --init-from {} --metrics {}", kept.display(), metrics.display())
    };
    stdout(&start("whole.jsonl"));
    let loss = |name: &str, step: usize| {
        lines(&processes.at(name))[step]["loss"].as_f64().expect("a loss")
    };
    assert!(loss("whole.jsonl", 0) < loss("m.jsonl", 0), "the weights are not the initial ones");
    let shard = processes.at("kept/step-00000002/model-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&0.5_f32.to_le_bytes());
    fs::write(&shard, bytes).unwrap();
    let error = failure(&start("damaged.jsonl"), 2);
    assert!(error.contains("model-00001-of-00002.safetensors"), "{error}");
    assert!(error.contains("the checkpoint is damaged or was edited"), "{error}");
}

/// Weights fit another model of equal shapes, which computes another function with them.
#[test]
fn weights_of_another_function_are_refused_or_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", at("kept")));
    let model = at("kept/step-00000001/model.json");
    let stored: Value = serde_json::from_slice(&fs::read(&model).unwrap()).unwrap();
    stdout(&format!("export-weights {} --to cola --output {}", at("kept"), at("cola")));
    let start = |from: &str, pointer: &str, value: Value| {
        let mut other = stored.clone();
        *other.pointer_mut(pointer).expect(pointer) = value;
        fs::write(at("other.json"), other.to_string()).unwrap();
        format!("{SMALL} --steps 1 --model {} --init-from {}", at("other.json"), at(from))
    };
    for (pointer, value, problem) in [
        ("/norm_epsilon", json!(1e-3), "norm_epsilon: is 1e-6, and 0.001 in the model"),
        ("/blocks/default/product", json!("swiglu"), "blocks[0].product: is \"plain\", and"),
        (
            "/blocks/default/all/activation",
            json!("identity"),
            "blocks[0].q.activation: is \"silu\", and \"identity\" in the model",
        ),
    ] {
        let error = failure(&start("kept", pointer, value.clone()), 2);
        assert!(error.contains(&format!("error: --init-from {model}: {problem}")), "{error}");
        let hint = format!("hint: --model {model}, the model of these weights");
        assert!(error.contains(&hint), "{error}");
        let error = failure(&start("cola", pointer, value), 2);
        assert!(error.contains(&format!("{}: {problem}", at("cola/config.json"))), "{error}");
    }
    let warnings = |command: &str| {
        let output = narrows(command).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    for (pointer, value, difference) in [
        ("/rope_theta", json!(500_000.0), "rope_theta: is 10000.0, and 500000.0 in the model"),
        ("/max_sequence_length", json!(8192), "max_sequence_length: is 4096, and 8192 in the"),
    ] {
        let message = warnings(&start("kept", pointer, value));
        let expected = format!("warning: --init-from {model}: {difference}");
        assert!(message.contains(&expected), "{message}");
    }
    assert_eq!(warnings(&start("kept", "/name", json!("renamed"))), "");
    // Commands that use weights as they are refuse such a model too.
    let (cola, exported) = (at("cola"), at("exported"));
    for command in [
        format!("export-weights {cola} --to cola --output {exported}"),
        format!("factor {cola} --rank 4 --output {exported}"),
        format!("generate {cola} --prompt a --tokens 1"),
    ] {
        start("cola", "/norm_epsilon", json!(1e-3));
        let command = format!("{command} --model {}", at("other.json"));
        let error = failure(&command, 2);
        let problem = "norm_epsilon: is 1e-6, and 0.001 in the model cola-tiny of --model";
        assert!(error.contains(&format!("error: {cola}/config.json: {problem}")), "{error}");
        assert!(error.contains("the weights would compute another function"), "{error}");
        assert!(error.contains(&format!("hint: --model {cola}/config.json")), "{error}");
        assert!(!fs::exists(&exported).unwrap());
    }
    start("cola", "/rope_theta", json!(500_000.0));
    let model = format!("--model {}", at("other.json"));
    let message = warnings(&format!("generate {cola} --prompt a --tokens 1 {model}"));
    let difference = "rope_theta: is 10000.0, and 500000.0 in the model cola-tiny of --model";
    let expected = format!("config.json: {difference}: the weights were not trained with it\n");
    assert!(message.contains(&expected), "{message}");
    fs::write(at("cola/config.json"), "{").unwrap();
    let unread = warnings(&start("cola", "/name", json!("renamed")));
    assert!(unread.contains("config.json: cannot be compared with the model of this"), "{unread}");
}

#[test]
fn an_export_names_the_checkpoint_before_a_damaged_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    stdout(&format!("{SMALL} --steps 2 --checkpoint-every 1 --checkpoint-dir {}", at("kept")));
    fs::write(at("kept/step-00000002/model.safetensors"), "cut off").unwrap();
    let export = format!("export-weights {} --model cola-tiny --to cola --output", at("kept"));
    let output = narrows(&format!("{export} {}", at("one"))).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let warning = format!(
        "warning: {} is incomplete: the weights are those of {}\n",
        at("kept/step-00000002"),
        at("kept/step-00000001")
    );
    assert_eq!(message, warning);
}

/// A limit of the file size acts as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn an_export_that_cannot_be_written_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", at("kept")));
    let names = || fs::read_dir(folder.path()).unwrap().count();
    let before = names();
    let narrows = assert_cmd::cargo::cargo_bin!("narrows").display();
    for (to, file) in [("cola", "model.safetensors"), ("nanotron", "model/")] {
        let export = format!("export-weights {} --model cola-tiny --to {to}", at("kept"));
        let limited = format!("ulimit -f 8; exec {narrows} {export} --output {}", at("new"));
        let output = std::process::Command::new("sh").args(["-c", &limited]).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(75), "{message}");
        assert!(message.contains(&format!("error: {}{file}", at("new/"))), "{message}");
        assert!(message.contains("cannot be written: "), "{message}");
        assert_eq!(names(), before, "{message}");
    }
    // The same command succeeds once there is space, also where the folder exists and is empty.
    fs::create_dir(at("new")).unwrap();
    let export = format!("export-weights {} --model cola-tiny --to cola", at("kept"));
    stdout(&format!("{export} --output {}", at("new")));
    assert!(fs::exists(at("new/model.safetensors")).unwrap());
    assert_eq!(names(), before + 1);
}

/// A class that refuses a model names another one only if that has the model.
#[test]
fn classes_that_refuse_a_model_too_are_no_hints() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", at("kept")));
    let model = fs::read(at("kept/step-00000001/model.json")).unwrap();
    let mut model: Value = serde_json::from_slice(&model).unwrap();
    model["blocks"]["default"]["qkv_bias"] = json!(true);
    for (activation, has_llama) in [("silu", false), ("identity", true)] {
        model["blocks"]["default"]["all"]["activation"] = json!(activation);
        // The product of dense models.
        model["blocks"]["default"]["product"] = json!("swiglu");
        fs::write(at("biased.json"), model.to_string()).unwrap();
        for class in ["cola", "nanotron", "loro"] {
            let from = format!("{} --model {}", at("kept"), at("biased.json"));
            let line = format!("export-weights {from} --to {class} --output {}", at("new"));
            let error = failure(&line, 2);
            let problem = match (class, has_llama) {
                // The class has pairs in blocks of BOOST alone, and other models folded.
                ("nanotron", false) => "layer 0 q: has SiLU between its factors",
                _ => "layer 0: has biases of q, k and v",
            };
            assert!(error.contains(problem), "{error}");
            assert_eq!(error.contains("hint: --to llama"), has_llama, "{class}: {error}");
        }
    }
}

#[test]
fn weights_that_a_class_or_a_model_cannot_have_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("new").display().to_string();
    let export = |to: &str, from: &str| {
        failure(&format!("export-weights {from} --model cola-tiny --to {to} --output {output}"), 2)
    };
    let golden = "tests/golden/weights/cola-m";
    let error = export("loro", golden);
    let problem =
        "cola-tiny: layer 0 q: has SiLU between its factors, and LORO's modules have nothing there";
    assert!(error.contains(problem) && error.contains("hint: --to cola"), "{error}");
    let error = export("llama", golden);
    assert!(error.contains("layer 0 q: has SiLU between its factors"), "{error}");
    let error = export("cola", golden);
    assert!(error.contains("cola_a`: has the shape [16, 6]"), "{error}");
    assert!(error.contains("is missing"), "{error}");
    assert!(!Path::new(&output).exists());
    let error = failure(&format!("{SMALL} --init-from {golden}"), 2);
    assert!(error.contains("tensor `model.layers.0.input_layernorm.weight`"), "{error}");
    let error = failure("run --backend null --init-from weights", 2);
    assert!(error.contains("--init-from: the null backend computes nothing"), "{error}");
    fs::create_dir(&output).unwrap();
    fs::write(format!("{output}/file"), "").unwrap();
    let error = export("cola", golden);
    assert!(error.contains("is not an empty folder"), "{error}");
    for command in [
        &format!("export-weights - --to cola --output {output}-new"),
        &format!("factor - --model llama-60m --rank 4 --output {output}-new"),
        "generate - --prompt a",
        &format!("{SMALL} --steps 1 --init-from -"),
    ] {
        let error = failure(command, 2);
        assert!(error.contains("-: weights are read at any position, which a stream"), "{error}");
    }
    for to in ["-", "/dev/stdout"] {
        let export = format!("export-weights {golden} --model cola-tiny --to cola --output {to}");
        let error = failure(&export, 2);
        assert!(error.contains("--output: a folder cannot go to standard output"), "{error}");
    }
}

#[test]
fn a_field_that_the_original_code_ignores_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("linear.json");
    let config = json!({
        "model_type": "cola", "hidden_size": 64, "vocab_size": 256, "num_attention_heads": 4,
        "intermediate_size": 172, "num_hidden_layers": 2, "lr_act_type": "linear"
    });
    fs::write(&file, config.to_string()).unwrap();
    let plan = format!("plan --hardware cpu-local --model {}", file.display());
    let assert = narrows(&plan).assert().success();
    let warning = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(warning.contains("lr_act_type: is `linear`, which CoLA's classes ignore"), "{warning}");
}

/// Factors are written with the model file that has their ranks, and fold back to the approximated matrices.
#[test]
fn dense_weights_are_factored_with_their_errors() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let cases = fs::read_to_string("tests/golden/weights/cases.json").unwrap();
    let cases: Value = serde_json::from_str(&cases).unwrap();
    fs::write(at("dense.json"), cases["llama"]["config"].to_string()).unwrap();
    fs::create_dir(at("llama")).unwrap();
    for file in fs::read_dir("tests/golden/weights/llama").unwrap().map(Result::unwrap) {
        fs::copy(file.path(), folder.path().join("llama").join(file.file_name())).unwrap();
    }
    let names = ["tokenizer.json", "tokenizer_config.json"];
    names.iter().for_each(|name| fs::write(at(&format!("llama/{name}")), *name).unwrap());
    let factor = |choice: &str, output: &str| {
        format!(
            "factor {} --model {} {choice} --output {}",
            at("llama"),
            at("dense.json"),
            at(output)
        )
    };
    let answer = json(&factor("--rank 4", "low"));
    assert_eq!(answer["tokenizer"], json!(names));
    for name in names {
        assert_eq!(fs::read_to_string(at(&format!("low/{name}"))).unwrap(), name);
    }
    let linears = answer["linears"].as_array().unwrap();
    assert_eq!(linears.len(), 14);
    for linear in linears {
        assert_eq!(linear["rank"], json!(4));
        let error = linear["relative_error"].as_f64().unwrap();
        assert!(0.1 < error && error < 0.9, "{linear}");
    }
    assert!(answer["parameters"].as_u64() < answer["dense_parameters"].as_u64());
    let tables = stdout(&factor("--rank 4", "text"));
    assert!(tables.contains("      0  4  4  4  4     4   4     4\n"), "{tables}");
    assert!(tables.contains("tokenizer.json, tokenizer_config.json\n"), "{tables}");
    let model = format!("--model {}", at("low/model.json"));
    let folded = format!("export-weights {} {model} --to llama --output {}", at("low"), at("back"));
    assert_eq!(json(&folded)["folded_pairs"], json!(14));
    // The factors of all singular values would have more parameters than the matrices.
    let whole = json(&factor("--energy 1", "whole"));
    assert!(whole["linears"].as_array().unwrap().iter().all(|linear| linear["rank"].is_null()));
    let warned = narrows(&factor("--energy 1", "dense")).assert().success();
    let warned = String::from_utf8_lossy(&warned.get_output().stderr).into_owned();
    assert!(warned.contains("warning: no linear became a factor pair"), "{warned}");
    let error = failure(&factor("--rank 16", "wide"), 2);
    assert!(error.contains("layer 0 k: has rank 8 at most"), "{error}");
    // The hint suits all linears, not only the first one that is too narrow.
    let error = failure(&factor("--rank 64", "wide"), 2);
    assert!(error.contains("hint: --rank 8\n") && !error.contains("layer 0 k"), "{error}");
    let error = failure(&factor("--energy 1.5", "wide"), 2);
    assert!(error.contains("--energy: 1.5 is not a share of the energy"), "{error}");
    let error = failure(&factor("--rank 4", "dense.json/low"), 2);
    let problem = format!("cannot be written: `{}` is not a folder", at("dense.json"));
    assert!(error.contains(&problem), "{error}");
    failure(&factor("", "wide"), 2);
    let error =
        failure(&factor("--rank 4", "wide").replace(&at("llama"), "tests/golden/weights/cola"), 2);
    assert!(error.contains("hint: --model is "), "{error}");
}
