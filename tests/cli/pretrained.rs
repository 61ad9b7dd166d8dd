//! Weights that the published classes load by `from_pretrained`, where there is a Python with torch and transformers:
//! `NARROWS_PYTHON`, or `python3`. CoLA's class is that of the checkout of `alvin-zyl/CoLA` that `NARROWS_COLA` names, and
//! needs transformers 4.49.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use narrows_plan::model;
use narrows_reference::{Batch, Parameters, Reference};
use narrows_runtime::interchange::import_weights;
use serde_json::{Value, json};

use super::run::SMALL;
use super::{narrows, stdout};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/pretrained.py");
const PROMPT: &str = "Call me Ishmael.";
const NEW_TOKENS: usize = 12;

#[test]
fn classes_of_transformers_load_exports_and_checkpoints() {
    let config = |class: &str, fields: Value| {
        let mut config = json!({
            "architectures": [class], "hidden_act": "silu", "hidden_size": 32, "head_dim": 8,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "vocab_size": 256, "tie_word_embeddings": false
        });
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        config
    };
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16
    });
    let llama = |fields| ("LlamaForCausalLM", config("LlamaForCausalLM", fields));
    let cases = [
        llama(json!({"model_type": "llama", "tie_word_embeddings": true})),
        llama(json!({"model_type": "llama", "rope_scaling": scaling})),
        ("Qwen2ForCausalLM", config("Qwen2ForCausalLM", json!({"model_type": "qwen2"}))),
        ("Qwen3ForCausalLM", config("Qwen3ForCausalLM", json!({"model_type": "qwen3"}))),
    ];
    compare(&cases, "llama");
}

#[test]
fn the_class_of_cola_loads_exports_and_checkpoints() {
    if std::env::var_os("NARROWS_COLA").is_none() {
        return println!("skipped: NARROWS_COLA does not name a checkout of alvin-zyl/CoLA");
    }
    let cases = [("silu", true, false), ("silu", false, true), ("linear", true, false)];
    let cases = cases.map(|(activation, only_latent, tied)| {
        let config = json!({
            "architectures": ["ColaForCausalLM"], "model_type": "cola", "hidden_act": activation,
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "rank": 6,
            "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "vocab_size": 256, "tie_word_embeddings": tied, "only_lr_act": only_latent
        });
        ("ColaForCausalLM", config)
    });
    compare(&cases, "cola");
}

/// Trains models of these configurations, and compares what their classes make of the checkpoint and of its export with the
/// reference and with `generate`.
fn compare(cases: &[(&str, Value)], format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let tokens: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
    if skips(&answers(&tokens, &[])) {
        return;
    }
    let mut folders = vec![];
    for (index, (class, config)) in cases.iter().enumerate() {
        let name = |file: &str| at(&format!("{file}-{index}"));
        let config_file = format!("{}.json", name("config"));
        fs::write(&config_file, config.to_string()).unwrap();
        let model = format!("--model {config_file}");
        let run = format!("{SMALL} {model} --steps 4 --learning-rate 0.02");
        stdout(&format!("{run} --checkpoint-dir {}", name("kept")));
        let export = format!("export-weights {} {model} --to {format}", name("kept"));
        stdout(&format!("{export} --output {}", name("exported")));
        folders.push((*class, format!("{}/step-00000004", name("kept"))));
        folders.push((*class, name("exported")));
    }
    let response = answers(&tokens, &folders);
    let answers = response["answers"].as_array().unwrap();
    assert_eq!(answers.len(), folders.len());
    for ((class, weights), answer) in folders.iter().zip(answers) {
        if skips(answer) {
            continue;
        }
        assert_eq!(answer["problems"], json!([]), "{class} {weights}");
        let logits: Vec<f64> = serde_json::from_value(answer["logits"].clone()).unwrap();
        let error = relative_error(&logits, &reference_logits(Path::new(weights), &tokens));
        println!("{class}: logits differ by {error:.1e} ({})", response["versions"]);
        assert!(error < 1e-5, "{class} {weights}: the error of the logits is {error:.1e}");
        let mut command = narrows("generate");
        command.args([weights, "--prompt", PROMPT, "--temperature", "0", "--format", "json"]);
        let generate = command.args(["--tokens", &NEW_TOKENS.to_string()]);
        let output = generate.assert().success().get_output().stdout.clone();
        let generated: Value = serde_json::from_slice(&output).unwrap();
        assert_eq!(generated["tokens"], answer["continuation"], "{class} {weights}");
    }
}

fn relative_error(values: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let differences: Vec<f64> = values.iter().zip(expected).map(|(x, y)| x - y).collect();
    norm(&differences) / norm(expected)
}

/// Logits of the reference in f64, with the configuration and the weights of a folder.
fn reference_logits(folder: &Path, tokens: &[u32]) -> Vec<f64> {
    let text = fs::read_to_string(folder.join("config.json")).unwrap();
    let model = model::read("config.json", &text).unwrap();
    let weights = import_weights(folder, &model).unwrap().weights;
    let parameters = Parameters::from_fn(&model, |parameter| {
        let (elements, columns) = (weights[&parameter.id].clone(), parameter.columns as usize);
        move |row, column| f64::from(elements[row * columns + column])
    });
    let reference: Reference<f64> = Reference::new(&model, parameters).unwrap();
    let batch = Batch { tokens, targets: tokens, sequences: 1, length: tokens.len() };
    reference.logits(batch).unwrap().elements().to_vec()
}

/// Results of the classes for the weights in these folders, or the reason why no Python has the classes.
fn answers(tokens: &[u32], folders: &[(&str, String)]) -> Value {
    let python = std::env::var("NARROWS_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(&python);
    command.arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return json!({"skipped": format!("{python}: {error}")}),
    };
    let request = json!({"tokens": tokens, "cases": folders}).to_string();
    // A Python without torch ends before it reads the request.
    let _ = child.stdin.take().unwrap().write_all(request.as_bytes());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{python} {SCRIPT}: {message}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Prints why an answer is missing, if it is.
fn skips(answer: &Value) -> bool {
    let reason = &answer["skipped"];
    if !reason.is_null() {
        println!("skipped: {reason}");
    }
    !reason.is_null()
}
