//! Bad input: exit code 2 and the location of the defect.

use std::fs;

use super::{failure, narrows};

#[test]
fn invalid_flags_are_reported_by_name() {
    for (arguments, part) in [
        ("plan", "--model: is missing"),
        ("plan --model cola-7", "did you mean cola-7b?"),
        ("plan --model cola-7b --hardware b200", "--hardware: there is no hardware profile"),
        ("plan --model cola-7b --devices 0", "--devices: 0 is not between"),
        (
            "plan --model cola-7b --devices 6 --tensor 4",
            "--devices: 6 devices are not a multiple of 4",
        ),
        ("plan --model cola-7b --sequence-length 8192", "--sequence-length: 8192 tokens"),
        (
            "plan --model cola-7b --sequence-length 4096 --micro-batch 524288",
            "--micro-batch: 524288 sequences of 4096 tokens exceed 2147483647 tokens",
        ),
        ("plan --model cola-7b --strategy megatron", "fullrank-tp"),
        ("plan --model cola-7b --memory-limit lots", "64GiB"),
        ("plan --model cola-7b --time-limit -1", "expected between 0"),
        ("plan --model cola-7b --devices -2", "--devices"),
        ("plan --model cola-7b --zero 4", "--zero"),
        ("plan --model nowhere.json", "nowhere.json: cannot be read"),
        ("plan --model src", "config.json: cannot be read"),
        ("check nowhere.json", "nowhere.json: cannot be read"),
        ("check", "<PLAN>"),
        ("schema tokens", "possible values"),
        ("paln", "plan"),
    ] {
        let message = failure(arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}

#[test]
fn invalid_files_are_reported_with_location() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.json");
    let name = path.to_str().unwrap();
    for (text, part) in [
        (&b""[..], "bad.json"),
        (b"{", "line 1 column"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (br#"{"format": "narrows-model/1"}"#, "bad.json: hidden: is missing"),
        (br#"{"model_type": "bert"}"#, "bad.json: "),
        (
            br#"{"model_type": "gpt2", "n_embd": 768}"#,
            "bad.json: model_type: `gpt2` is not supported: it has learned positions",
        ),
        (
            br#"{"model_type": "llama", "hidden_size": 8, "hidden_size": 16}"#,
            "bad.json: hidden_size: is repeated",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let message = failure(&format!("plan --model {name}"), 2);
        assert!(message.contains(part), "{message}");
        failure(&format!("plan --model cola-tiny --hardware {name}"), 2);
        failure(&format!("check {name}"), 2);
        failure(&format!("cost {name}"), 2);
        failure(&format!("explain {name}"), 2);
    }
}

#[test]
fn several_defects_are_reported_at_once() {
    let message = failure("plan --model cola-7 --hardware b200", 2);
    assert_eq!(message.matches("error:").count(), 2, "{message}");
}

#[test]
fn help_and_version_exit_with_0() {
    for arguments in ["--help", "plan --help", "-V", "help cost"] {
        narrows(arguments).assert().success();
    }
}
