//! `generate`: texts from checkpoints, and the files beside them.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::run::SMALL;
use super::{failure, json, narrows, stdout};

/// Greedy choice of tokens.
const GREEDY: &str = "--temperature 0 --tokens 8";

fn generate(checkpoint: &Path, prompt: &str, more: &str) -> assert_cmd::assert::Assert {
    let mut command = narrows("generate");
    command.arg(checkpoint).args(["--prompt", prompt]).args(more.split_whitespace());
    command.assert()
}

fn answer(checkpoint: &Path, prompt: &str, more: &str) -> Value {
    let assert = generate(checkpoint, prompt, &format!("{more} --format json")).success();
    serde_json::from_slice(&assert.get_output().stdout).unwrap()
}

/// The message of a command that ends with exit code 2.
fn error(checkpoint: &Path, prompt: &str, more: &str) -> String {
    let assert = generate(checkpoint, prompt, more).code(2);
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

#[test]
fn every_checkpoint_of_a_run_continues_a_text_as_its_seed_says() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("eval.txt"), "Some years ago - never mind how long precisely.").unwrap();
    let (text, tokens, kept) = (at("eval.txt"), at("eval.tokens"), at("kept"));
    stdout(&format!("data {} --output {}", text.display(), tokens.display()));
    let evaluated = format!("--eval-data {} --eval-every 2 --keep-best", tokens.display());
    let saved = format!("--checkpoint-dir {} --checkpoint-every 2", kept.display());
    stdout(&format!("{SMALL} --steps 4 --learning-rate 0.02 {evaluated} {saved}"));
    let last = answer(&kept, "Call me", "--seed 3 --tokens 30");
    assert_eq!(last["weights"], json!(kept.join("step-00000004")));
    assert_eq!(last["prompt_tokens"].as_array().unwrap().len(), 7);
    assert_eq!(last["tokens"].as_array().unwrap().len(), 30);
    assert_eq!(last["ended_by"], json!("tokens"));
    let tokens_of = |folder: &Path, more: &str| {
        answer(folder, "Call me", &format!("{more} --tokens 30"))["tokens"].clone()
    };
    assert_eq!(tokens_of(&kept.join("step-00000004"), "--seed 3"), last["tokens"]);
    assert_ne!(tokens_of(&kept, "--seed 4"), last["tokens"]);
    assert_ne!(tokens_of(&kept.join("step-00000002"), "--seed 3"), last["tokens"]);
    let greedy = "--temperature 0 --seed 8";
    assert_eq!(tokens_of(&kept, greedy), tokens_of(&kept, "--top-p 0.0001"));
    answer(&kept.join("best"), "Call me", GREEDY);
    // The weights alone, as another code would have them.
    let file = kept.join("step-00000004/model.safetensors");
    assert_eq!(tokens_of(&file, "--seed 3"), last["tokens"]);
    let assert = generate(&kept, "Call me", "--seed 3 --tokens 30").success();
    let output = assert.get_output();
    let expected = format!("Call me{}\n", last["text"].as_str().unwrap());
    let shown = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(shown.chars().count(), expected.chars().count());
    let report = String::from_utf8_lossy(&output.stderr);
    assert!(report.starts_with("30 tokens after 7 tokens of prompt, "), "{report}");
}

#[test]
fn a_checkpoint_has_the_configuration_that_an_export_has() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let read =
        |file: &str| -> Value { serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap() };
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", at("kept")));
    json(&format!("export-weights {} --to cola --output {}", at("kept"), at("cola")));
    let config = read(&at("kept/step-00000001/config.json"));
    assert_eq!(config, read(&at("cola/config.json")));
    assert_eq!(config["architectures"], json!(["ColaForCausalLM"]));
    let model = at("kept/step-00000001/model.json");
    assert_eq!(read(&model)["format"], json!("narrows-model/1"));
    stdout(&format!("{SMALL} --model {model} --steps 2 --checkpoint-dir {} --resume", at("kept")));
    // No class has latent crossings.
    let crossing = json!({"form": "paper", "gate": "identity"});
    let pair = json!({"rank": 8, "activation": "silu", "crossing": crossing});
    let lax = json!({
        "format": "narrows-model/1", "hidden": 32, "vocab": 256, "heads": 2, "d_ff": 64,
        "blocks": {"count": 2, "default": {"product": "swiglu", "all": pair}}
    });
    fs::write(at("lax.json"), lax.to_string()).unwrap();
    let model = format!("--model {}", at("lax.json"));
    stdout(&format!("{SMALL} {model} --steps 1 --checkpoint-dir {}", at("lax")));
    assert!(Path::new(&at("lax/step-00000001/model.json")).exists());
    assert!(!Path::new(&at("lax/step-00000001/config.json")).exists());
}

/// A model of seven words, with an end-of-text token, and the tokens of a text of documents `a b c d e`.
fn write_words(folder: &Path) {
    let vocab = json!({"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "d": 5, "e": 6});
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab}
    });
    let model = json!({
        "format": "narrows-model/1", "hidden": 32, "vocab": 7, "heads": 2, "d_ff": 64,
        "max_sequence_length": 24,
        "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("tokenizer_config.json"), "{}").unwrap();
    fs::write(folder.join("words.json"), model.to_string()).unwrap();
    fs::write(folder.join("words.jsonl"), "{\"text\": \"a b c d e\"}\n".repeat(40)).unwrap();
}

#[test]
fn a_tokenizer_moves_with_the_checkpoints_and_its_end_of_text_ends_a_text() {
    let folder = tempfile::tempdir().unwrap();
    write_words(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let tokenizer = format!("--tokenizer {}", at("tokenizer.json"));
    stdout(&format!("data {} {tokenizer} --append-eos --output {}", at("words.jsonl"), at("t")));
    let run = format!("{SMALL} --model {} --data {}", at("words.json"), at("t"));
    let run = format!("{run} --learning-rate 0.02 --checkpoint-dir {}", at("kept"));
    stdout(&format!("{run} --steps 40 {tokenizer}"));
    stdout(&format!("{run} --steps 41 --resume"));
    for step in ["step-00000040", "step-00000041"] {
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            let copy = fs::read(at(&format!("kept/{step}/{name}"))).unwrap();
            assert_eq!(copy, fs::read(at(name)).unwrap(), "{step}/{name}");
        }
    }
    let kept = folder.path().join("kept");
    let text = answer(&kept, "a b", GREEDY);
    assert_eq!((&text["text"], &text["ended_by"]), (&json!(" c d e"), &json!("end_of_text")));
    // An empty prompt is the beginning of a document.
    assert_eq!(answer(&kept, "", GREEDY)["prompt_tokens"], json!([1]));
    let long = "a ".repeat(20);
    let text = answer(&kept, &long, "--tokens 100 --temperature 9 --seed 1");
    let end = text["ended_by"].as_str().unwrap();
    let tokens = text["tokens"].as_array().unwrap().len();
    assert!(end == "end_of_text" && tokens <= 4 || end == "positions" && tokens == 4, "{text}");
    let error = |prompt: &str, more: &str| error(&kept, prompt, more);
    let message = error(&"a ".repeat(24), "");
    assert!(message.contains("--prompt: has 24 tokens, but words has 24 positions"), "{message}");
    let message = error("a", "--tokenizer bytes");
    let problem = "--prompt: contains token 97 of the tokenizer bytes, but the vocabulary of words has 7 tokens";
    assert!(message.contains(problem), "{message}");
    for step in ["step-00000040", "step-00000041"] {
        fs::remove_file(at(&format!("kept/{step}/tokenizer.json"))).unwrap();
    }
    let message = error("a", "");
    assert!(message.contains("has no tokenizer.json"), "{message}");
    assert!(message.contains("hint: --tokenizer FILE"), "{message}");
    fs::remove_file(at("kept/step-00000041/model.json")).unwrap();
    fs::remove_file(at("kept/step-00000041/config.json")).unwrap();
    let message = error("a", &tokenizer);
    assert!(message.contains("hint: --model, the model of these weights"), "{message}");
}

#[test]
fn a_tokenizer_of_other_tokens_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write_words(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let run = format!("{SMALL} --steps 1 --tokenizer {}", at("tokenizer.json"));
    let message = failure(&format!("{run} --checkpoint-dir {}", at("kept")), 2);
    assert!(message.contains("--tokenizer: is not the tokenizer of moby-dick.txt"), "{message}");
    assert!(!folder.path().join("kept").exists(), "a refused run leaves its folder");
    fs::create_dir(at("kept")).unwrap();
    let message = error(&folder.path().join("kept"), "a", "");
    assert!(message.contains("kept: has no checkpoint"), "{message}");
    let message = failure(&run, 2);
    assert!(message.contains("--checkpoint-dir"), "{message}");
}

#[test]
fn a_tokenizer_that_does_not_fit_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write_words(folder.path());
    let at = |name: &str| folder.path().join(name).display().to_string();
    let pairs = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": null, "decoder": null,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    });
    fs::write(at("pairs.json"), pairs.to_string()).unwrap();
    let tokenizer = format!("--tokenizer {}", at("tokenizer.json"));
    stdout(&format!("data {} {tokenizer} --output {}", at("words.jsonl"), at("t")));
    let run = format!("{SMALL} --model {} --data {} --steps 1", at("words.json"), at("t"));
    stdout(&format!("{run} --checkpoint-dir {}", at("kept")));
    let (kept, other) = (folder.path().join("kept"), format!("--tokenizer {}", at("pairs.json")));
    let message = error(&kept, "z", &other);
    assert!(message.contains("--prompt: has no tokens: the tokenizer "), "{message}");
    assert!(message.contains("pairs.json knows none of its characters\n"), "{message}");
    assert!(message.contains("hint: --tokenizer, the tokenizer of the training"), "{message}");
    let warnings = |more: &str| {
        let assert = generate(&kept, "a", &format!("{more} --tokens 20 --temperature 9")).success();
        let text = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
        text.lines().filter(|line| line.starts_with("warning: ")).collect::<Vec<_>>().join("\n")
    };
    let warning = warnings(&other);
    let parts =
        ["--tokenizer: ", " of 20 new tokens are not in the tokenizer ", "and words has 7: "];
    assert!(parts.iter().all(|part| warning.contains(part)), "{warning}");
    assert_eq!(warnings(&tokenizer), "");
}

#[test]
fn an_empty_text_of_bytes_has_nothing_to_continue() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", kept.display()));
    let message = error(&kept, "", "");
    assert!(message.contains("--prompt: is empty"), "{message}");
    let message = error(&folder.path().join("none"), "a", "");
    assert!(message.contains("none"), "{message}");
}

/// LongRoPE has other frequencies in longer sequences: training sequences have one length, texts grow.
#[test]
fn texts_do_not_grow_beyond_the_length_at_which_frequencies_change() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let scaling =
        json!({"short": [1, 2], "long": [3, 4], "attention_factor": 1.1, "original_length": 12});
    let model = json!({
        "format": "narrows-model/1", "hidden": 32, "vocab": 256, "heads": 2, "d_ff": 64,
        "rotary_dim": 4, "rope_scaling": {"long_rope": scaling},
        "blocks": {"count": 1, "default": {"product": "swiglu", "all": "dense"}}
    });
    fs::write(at("long.json"), model.to_string()).unwrap();
    stdout(&format!(
        "{SMALL} --model {} --steps 1 --checkpoint-dir {}",
        at("long.json"),
        at("kept")
    ));
    let kept = folder.path().join("kept");
    assert_eq!(answer(&kept, "Call", GREEDY)["ended_by"], json!("tokens"));
    let message = error(&kept, "Call m", "--tokens 7");
    assert!(message.contains("--tokens: gives 13 tokens"), "{message}");
    assert!(message.contains("hint: fewer tokens, with the prompt at most 12"), "{message}");
}

/// As `head -c 1` closes the pipe after the first byte.
#[test]
fn a_text_that_nobody_reads_any_more_ends() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    stdout(&format!("{SMALL} --steps 1 --checkpoint-dir {}", kept.display()));
    let mut child = Command::new(assert_cmd::cargo::cargo_bin!("narrows"))
        .arg("generate")
        .arg(&kept)
        .args(["--prompt", "Call", "--tokens", "4000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success());
    // The summary follows the last token.
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
}
