//! `narrows run` on the CPU and on the null backend.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{failure, json as answer_of, narrows, stdout};

/// A run with small steps.
pub const SMALL: &str =
    "run --hardware cpu-local --global-batch 2 --sequence-length 16 --threads 1";

/// The lines of a metrics file.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "an incomplete line: {text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_without_a_plan_trains_on_the_shipped_book() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("m.jsonl");
    let answer = answer_of(&format!("{SMALL} --steps 6 --metrics {}", metrics.display()));
    for (key, value) in [
        ("status", json!("done")),
        ("backend", json!("cpu")),
        ("model", json!("cola-tiny")),
        ("mesh", json!({"tensor": 1, "pipeline": 1, "data": 1})),
        ("threads_per_device", json!(1)),
        ("seed", json!(1)),
        ("data", json!("moby-dick.txt (within the program)")),
        ("steps", json!(6)),
        ("steps_asked", json!(6)),
        ("tokens", json!(6 * 32)),
        ("metrics", json!(metrics.to_str())),
    ] {
        assert_eq!(answer[key], value, "{key}");
    }
    assert_eq!(answer["allocated_bytes"], answer["prediction"]["peak_memory_bytes"]);
    let lines = lines(&metrics);
    assert_eq!(lines.len(), 6);
    for (line, step) in lines.iter().zip(1..) {
        assert_eq!(line["step"], step);
        assert_eq!(line["allocated_bytes"], answer["allocated_bytes"]);
        assert_eq!(line["predicted_allocated_bytes"], line["allocated_bytes"]);
        assert_eq!(line["predicted_step_time_s"], answer["prediction"]["step_time_s"]);
        for key in ["loss", "grad_norm", "learning_rate", "tokens_per_s", "step_time_s"] {
            assert!(line[key].as_f64().is_some_and(|value| value > 0.0), "{key} in {line}");
        }
    }
    assert_eq!(lines[0]["loss"], answer["loss_first"]);
    assert_eq!(lines[5]["loss"], answer["loss_last"]);
    assert!(answer["loss_last"].as_f64() < answer["loss_first"].as_f64());
}

#[test]
fn every_key_of_a_metrics_line_is_documented() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("m.jsonl");
    stdout(&format!("{SMALL} --steps 1 --devices 2 --tensor 2 --metrics {}", metrics.display()));
    let document = fs::read_to_string("docs/metrics.md").unwrap();
    let lines = lines(&metrics);
    for key in lines[0].as_object().unwrap().keys() {
        assert!(document.contains(&format!("| `{key}` |")), "docs/metrics.md lacks `{key}`");
    }
    let devices = lines[0]["collective_bytes"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    let tensor_bytes = |device: &Value| {
        let kinds = device.as_object().unwrap().values();
        kinds.filter_map(|axes| axes["tensor"].as_u64()).sum::<u64>()
    };
    assert!(devices.iter().all(|device| tensor_bytes(device) > 0), "{devices:?}");
}

#[test]
fn a_plan_file_is_run_and_gives_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, tokens) = (at("plan.json"), at("t.tokens"));
    let small = "--model cola-tiny --hardware cpu-local --global-batch 2 --sequence-length 16";
    stdout(&format!("plan {small} --devices 2 --tensor 2 --output {plan}"));
    stdout(&format!("data data/moby-dick.txt --output {tokens}"));
    let two_devices = answer_of(&format!("run {plan} --data {tokens} --steps 3 --seed 5"));
    assert_eq!((&two_devices["mesh"]["tensor"], &two_devices["data"]), (&json!(2), &json!(tokens)));
    let output = at("searched.json");
    let one_device = answer_of(&format!("{SMALL} --steps 3 --seed 5 --output {output}"));
    assert!(Path::new(&output).exists());
    for key in ["loss_first", "loss_last"] {
        let [two, one] = [&two_devices, &one_device].map(|answer| answer[key].as_f64().unwrap());
        assert!((two / one - 1.0).abs() < 1e-4, "{two} and {one}");
    }
}

#[test]
fn measured_counted_and_predicted_bytes_are_equal() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, metrics) = (at("plan.json"), at("m.jsonl"));
    let small = "--model cola-tiny --hardware cpu-local --global-batch 4 --sequence-length 16";
    let mesh = "--devices 4 --tensor 2 --pipeline 2 --micro-batch 1 --strategy btp";
    stdout(&format!("plan {small} {mesh} --output {plan}"));
    let answer = answer_of(&format!("run {plan} --steps 2 --threads 1 --metrics {metrics}"));
    let counted = answer_of(&format!("run {plan} --backend null"));
    let predicted = answer_of(&format!("cost {plan}"));
    let lines = lines(Path::new(&metrics));
    assert_eq!(lines.len(), 2);
    for line in &lines {
        for device in 0..4 {
            let (stage, of) = (device / 2, |key: &str| &line[key][device]);
            let counts = &counted["stages"][stage];
            for key in ["allocated_bytes", "collective_bytes", "collective_sent_bytes"] {
                assert_eq!(of(key), &counts[key], "{key} of device {device}");
            }
            assert_eq!(of("transfer_sent_bytes"), &counts["transfer_sent_bytes"]);
            assert_eq!(of("allocated_bytes"), &predicted["prediction"]["peak_memory_bytes"][stage]);
            assert!(of("collective_bytes")["all_reduce"]["tensor"].as_u64() > Some(0));
            assert!(of("transfer_sent_bytes").as_u64() > Some(0));
            assert!(
                of("scratch_bytes").as_u64() > of("transfer_sent_bytes").as_u64().map(|b| b / 4)
            );
        }
        assert_eq!(line["scratch_bytes"], answer["scratch_bytes"]);
    }
    // A step moves at least the predicted payloads of all blocks over the tensor axis.
    let blocks = &predicted["prediction"]["block_collective_bytes"];
    let sum =
        |pass: &Value| pass.as_object().unwrap().values().filter_map(Value::as_u64).sum::<u64>();
    let block: u64 = ["forward", "backward", "redo"].iter().map(|pass| sum(&blocks[pass])).sum();
    let tensor_bytes = |device: usize| {
        let kinds = lines[0]["collective_bytes"][device].as_object().unwrap().values();
        kinds.filter_map(|axes| axes["tensor"].as_u64()).sum::<u64>()
    };
    assert!(block > 0 && tensor_bytes(0) + tensor_bytes(2) >= 4 * 4 * block, "{block}");
}

#[test]
fn the_text_report_has_predicted_and_measured_times() {
    let report = stdout(&format!("{SMALL} --steps 2"));
    let parts =
        ["Training cola-tiny on 1 device of 1 thread", "step 1  loss 5.", "Predicted and measured"];
    for part in parts {
        assert!(report.contains(part), "{part} in {report}");
    }
    let output = narrows(&format!("{SMALL} --steps 2 --metrics -")).assert().success();
    let printed = String::from_utf8(output.get_output().stdout.clone()).unwrap();
    let lines: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
}

/// The steps of a run are alike.
#[test]
fn the_null_backend_counts_one_step_whatever_their_number() {
    for (steps, warns) in [("", false), ("--steps 1", false), ("--steps 1000000", true)] {
        let output = narrows(&format!("{SMALL} --backend null {steps}")).assert().code(0);
        let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
        assert_eq!(message.contains("the null backend counts one step"), warns, "{message}");
    }
}

#[test]
fn the_null_backend_counts_instructions() {
    let line = "run --backend null --devices 4 --tensor 2 --pipeline 2 --data-parallel 1";
    let counts = answer_of(line);
    assert_eq!(counts["backend"], "null");
    let stages = counts["stages"].as_array().unwrap();
    assert_eq!(stages.len(), 2);
    for stage in stages {
        assert!(stage["allocated_bytes"].as_u64() > Some(0), "{stage}");
        assert!(stage["collective_bytes"].as_object().is_some_and(|kinds| !kinds.is_empty()));
        assert!(stage["transfer_sent_bytes"].as_u64() > Some(0), "{stage}");
    }
    assert!(stdout(line).contains("One step of cola-tiny on 4 devices, counted"));
    // Counting works for every precision.
    let other = format!("{line} --hardware a100-80gb");
    assert!(stdout(&other).contains("counted"));
}

#[test]
fn contradictory_flags_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, tokens, wide) = (at("gpu.json"), at("t.tokens"), at("wide.json"));
    stdout(&format!("plan --model cola-tiny --sequence-length 64 --output {plan}"));
    let cpu = "--model cola-60m --hardware cpu-local --sequence-length 16";
    stdout(&format!("plan {cpu} --output {wide}"));
    fs::write(folder.path().join("few.txt"), "few").unwrap();
    stdout(&format!("data {} --output {tokens}", at("few.txt")));
    for (arguments, part) in [
        ("run --eager".to_owned(), "--eager: applies to --backend cuda only"),
        ("run --deterministic".to_owned(), "--deterministic: applies to --backend cuda only"),
        ("run --backend null --metrics m.jsonl".into(), "--metrics: the null backend computes"),
        ("run --steps 0".into(), "'0' for '--steps <N>': expected a whole number from 1"),
        ("run --seed x".into(), "'x' for '--seed <S>': expected a whole number"),
        ("run --data=".into(), "--data: the file name is empty"),
        ("run --recipe=".into(), "--recipe: the file name is empty"),
        ("run --steps 1 --trace t.json --trace-steps 2".into(), "the run has 1 step, and no step"),
        ("run --learning-rate 0".into(), "expected a number above 0"),
        ("run --clip-norm nan".into(), "expected a number above 0"),
        ("run --weight-decay=-1".into(), "expected a non-negative number"),
        ("run --data -".into(), "--data: a token file is read at any position"),
        ("run --data nowhere.tokens".into(), "error: --data nowhere.tokens: cannot be read"),
        ("run --eval-data no.tokens".into(), "error: --eval-data no.tokens: cannot be read"),
        ("run --init-from nowhere".into(), "error: --init-from nowhere: cannot be opened"),
        ("run --metrics no/m.jsonl".into(), "error: --metrics no/m.jsonl: cannot be written"),
        ("run --trace no/t.json".into(), "error: --trace no/t.json: cannot be written"),
        ("run --output no/p.json".into(), "error: --output no/p.json: cannot be written"),
        ("run --tensorboard src/lib.rs".into(), "error: --tensorboard src/lib.rs: cannot be"),
        ("run --tensorboard -".into(), "--tensorboard: a folder cannot go to standard output"),
        ("run --checkpoint-dir src/lib.rs".into(), "error: --checkpoint-dir src/lib.rs: cannot be"),
        ("run --checkpoint-dir -".into(), "--checkpoint-dir: a folder cannot go to standard"),
        (
            "run --checkpoint-dir kept --tokenizer no.json".into(),
            "error: --tokenizer no.json: cannot be read",
        ),
        ("run --data data/moby-dick.txt".into(), "is not the magic number of a token file"),
        (format!("run --data {tokens}"), "t.tokens: has 3 tokens, too few for one sequence"),
        (format!("run --metrics {}", folder.path().display()), "cannot be written"),
        (format!("run --data {tokens} --metrics {tokens}"), "is an input too"),
        (format!("run --init-from {tokens} --metrics {tokens}"), "is an input too"),
        (
            format!("run --init-from {} --output {tokens}", folder.path().display()),
            "is an input too",
        ),
        ("run --metrics - --format json".into(), "the metrics and the JSON answer would both"),
        ("run --metrics - --output -".into(), "the metrics and the plan would both"),
        ("run --metrics /dev/stdout --output -".into(), "the metrics and the plan would both"),
        ("run --metrics - --output /dev/stdout".into(), "the metrics and the plan would both"),
        ("run --hardware a100-80gb".into(), "--hardware: plans for `a100-80gb` compute in"),
        (format!("run {plan}"), "gpu.json: precision: the plan computes in mixed bf16"),
        (format!("run {wide} --model cola-tiny"), "wide.json: model.fingerprint: the plan was"),
        (format!("run {wide} --norm sync"), "--norm: restricts a search"),
        ("run nowhere.json".into(), "nowhere.json: cannot be read"),
    ] {
        let message = failure(&arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_located() {
    let folder = tempfile::tempdir().unwrap();
    // The llm.c layout has no vocabulary size: GPT-2 ids for a model of 256.
    let mut bytes = vec![0; 1024];
    for (at, number) in [20_240_520_u32, 1, 600].into_iter().enumerate() {
        bytes[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
    }
    bytes.extend((0..600_u16).flat_map(|id| (id % 300).to_le_bytes()));
    let path = folder.path().join("gpt2.bin");
    fs::write(&path, bytes).unwrap();
    let line = format!("{SMALL} --steps 50 --format json --data {}", path.display());
    let message = failure(&line, 2);
    assert!(message.contains("gpt2.bin: byte ") && message.contains("(token "), "{message}");
}

#[test]
fn a_non_finite_loss_ends_a_run_and_keeps_its_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("m.jsonl");
    let hot = "--steps 5 --learning-rate 1e30 --warm-up-steps 0 --clip-norm 1e30";
    let line = format!("{SMALL} {hot} --format json --metrics {}", metrics.display());
    let message = failure(&line, 1);
    for part in ["step 2: the loss is ", "the metrics until step 1 are in ", "--learning-rate"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(lines(&metrics).len(), 1);
}

#[test]
fn a_run_larger_than_the_memory_is_rejected_before_allocation() {
    let large = "run --model cola-30b --memory-limit none --global-batch 1 --sequence-length 16";
    let message = failure(&format!("{large} --steps 1 --format json"), 1);
    for part in ["memory: training cola-30b needs ", " are free", "hint: a smaller model"] {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn the_breakdown_of_a_step_is_predicted_and_measured() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("m.jsonl");
    let line =
        format!("{SMALL} --steps 3 --devices 2 --pipeline 2 --metrics {}", metrics.display());
    let answer = answer_of(&line);
    let parts = |value: &Value| -> Vec<(String, f64)> {
        let parts = value.as_object().unwrap().iter();
        parts.map(|(name, time)| (name.clone(), time.as_f64().unwrap())).collect()
    };
    let names = |parts: &[(String, f64)]| -> Vec<String> {
        parts.iter().map(|(name, _)| name.clone()).collect()
    };
    let (measured, predicted) =
        (parts(&answer["breakdown_s"]), parts(&answer["prediction"]["breakdown_s"]));
    assert_eq!(names(&measured), names(&predicted));
    let lines = lines(&metrics);
    for value in lines.iter().chain([&answer]) {
        let sum: f64 = parts(&value["breakdown_s"]).iter().map(|(_, time)| time).sum();
        let step = value["step_time_s"].as_f64().unwrap();
        assert!((sum / step - 1.0).abs() < 1e-6, "{sum} and {step}");
    }
    assert_eq!(lines[0]["predicted_breakdown_s"], answer["prediction"]["breakdown_s"]);
    for name in ["gemm", "attention", "elementwise", "bubble", "optimizer", "other"] {
        assert!(answer["breakdown_s"][name].as_f64() > Some(0.0), "{name}: {measured:?}");
    }
}

#[test]
fn more_threads_than_cores_cause_a_warning() {
    let output = narrows("run --hardware cpu-local --devices 4 --tensor 4 --sequence-length 16 --steps 1 --threads 20")
        .assert()
        .success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("warning: 80 threads of 4 devices share "), "{message}");
}

/// Ctrl-C ends a run after its step.
#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_run_reports_its_steps() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let arguments = format!("{SMALL} --steps 1000000 --metrics -");
    let mut child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
        .args(arguments.split_whitespace())
        .env("XDG_CACHE_HOME", crate::CACHE)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("{\"step\":1,"));
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let steps = 1 + lines.map(Result::unwrap).count();
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{message}");
    assert!(message.contains(&format!("stopped after step {steps} of 1000000")), "{message}");
    assert!(message.contains("Predicted and measured"), "{message}");
}

#[test]
fn the_number_of_threads_is_limited() {
    let message = failure("run --steps 1 --threads 40000", 2);
    assert!(message.contains("--threads: 40000 threads per device are too many"), "{message}");
}

/// A checkpoint in place of the folder of checkpoints would begin another run within it.
#[test]
fn one_checkpoint_is_no_folder_of_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept").display().to_string();
    let run = format!("{SMALL} --steps 1 --checkpoint-dir {kept}");
    crate::stdout(&run);
    let message = failure(&format!("{run}/step-00000001 --resume"), 2);
    let problem = format!("error: --checkpoint-dir {kept}/step-00000001: is one checkpoint, and");
    assert!(message.contains(&problem), "{message}");
    assert!(message.contains(&format!("hint: --checkpoint-dir {kept}\n")), "{message}");
    // A plan may lie in the folder, and is no checkpoint.
    fs::write(format!("{kept}/plan.json"), "[]").unwrap();
    let message = failure(&format!("run {kept}/plan.json --checkpoint-dir {kept}"), 2);
    assert!(message.starts_with(&format!("error: {kept}/plan.json: expected an")), "{message}");
}

#[test]
fn outputs_must_be_different_files() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("z.json");
    let arguments = format!("{SMALL} --steps 1 --metrics {0} --trace {0}", file.display());
    let message = failure(&arguments, 2);
    assert!(
        message.contains("--trace:") && message.contains("is the file of --metrics too"),
        "{message}"
    );
    assert!(!file.exists());
    let link = folder.path().join("link.json");
    std::os::unix::fs::symlink("z.json", &link).unwrap();
    let (file, link) = (file.display(), link.display());
    for (metrics, output) in [(&file, &link), (&link, &file)] {
        let arguments = format!("{SMALL} --steps 1 --metrics {metrics} --output {output}");
        let message = failure(&arguments, 2);
        assert!(message.contains("is the file of --metrics too"), "{message}");
    }
}

#[test]
fn a_collapsing_loss_is_warned_of() {
    let flags = "--steps 20 --warm-up-steps 0 --clip-norm 1e30";
    let warning = "Warning: the loss has collapsed";
    let hot = stdout(&format!("{SMALL} {flags} --learning-rate 1"));
    assert!(hot.contains(warning) && hot.contains("--learning-rate or more"), "{hot}");
    let falling = stdout(&format!("{SMALL} {flags} --learning-rate 0.001"));
    assert!(!falling.contains(warning), "{falling}");
}
