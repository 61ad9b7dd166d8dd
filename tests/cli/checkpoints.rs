//! Checkpoints: writing, resuming, and rejecting those of other runs.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::run::{SMALL, lines};
use super::{failure, json, narrows, stdout};

/// A folder for the files of a run.
struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The checkpoint of a step.
    fn step(&self, step: u64) -> PathBuf {
        self.at(&format!("kept/step-{step:08}"))
    }

    /// Flags of a run with metrics and checkpoints in this folder.
    fn flags(&self, steps: u64) -> String {
        let (dir, metrics) = (self.at("kept"), self.at("m.jsonl"));
        let (dir, metrics) = (dir.display(), metrics.display());
        format!("{SMALL} --steps {steps} --metrics {metrics} --checkpoint-dir {dir}")
    }

    fn curve(&self) -> Vec<[u64; 4]> {
        curve(&self.at("m.jsonl"))
    }
}

/// Names and contents of the files of all checkpoints in a folder.
pub fn checkpoint_files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = vec![];
    for step in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        for file in fs::read_dir(&step).into_iter().flatten() {
            let path = file.unwrap().path();
            files.push((path.strip_prefix(dir).unwrap().to_owned(), fs::read(&path).unwrap()));
        }
    }
    files.sort();
    files
}

/// The bits of loss, gradient norm and learning rate of each step.
pub fn curve(metrics: &Path) -> Vec<[u64; 4]> {
    let number = |line: &Value, key: &str| line[key].as_f64().unwrap().to_bits();
    lines(metrics)
        .iter()
        .map(|line| {
            let step = line["step"].as_u64().unwrap();
            let keys = ["loss", "grad_norm", "learning_rate"];
            let [loss, norm, rate] = keys.map(|key| number(line, key));
            [step, loss, norm, rate]
        })
        .collect()
}

/// The curve of an uninterrupted run.
fn uninterrupted(steps: u64) -> Vec<[u64; 4]> {
    let files = Files::new();
    let metrics = files.at("m.jsonl");
    stdout(&format!("{SMALL} --steps {steps} --metrics {}", metrics.display()));
    curve(&metrics)
}

#[test]
fn a_resumed_run_continues_bit_for_bit() {
    let files = Files::new();
    let answer = json(&format!("{} --checkpoint-every 4 --keep 2", files.flags(10)));
    assert_eq!(answer["checkpoint"].as_str(), files.step(10).to_str());
    assert!(answer["resumed_step"].is_null());
    let uninterrupted = files.curve();
    assert_eq!(uninterrupted.len(), 10);
    assert!(files.step(8).exists() && !files.step(4).exists(), "--keep 2 keeps two checkpoints");
    // Without the last checkpoint, steps 9 and 10 are repeated.
    fs::remove_dir_all(files.step(10)).unwrap();
    let answer = json(&format!("{} --resume", files.flags(10)));
    assert_eq!((&answer["resumed_step"], &answer["steps"]), (&8.into(), &2.into()));
    assert_eq!(files.curve(), uninterrupted, "every step occurs once and is bitwise equal");
    // Another plan sums in another order.
    fs::remove_dir_all(files.step(10)).unwrap();
    let split = "--devices 2 --tensor 2 --strategy btp --resume";
    let report = stdout(&format!("{} {split}", files.flags(10)));
    assert!(report.contains("starts     after step 8: "), "{report}");
    for (actual, expected) in files.curve().iter().zip(&uninterrupted) {
        let [actual, expected] = [actual, expected].map(|step| f64::from_bits(step[1]));
        assert!((actual / expected - 1.0).abs() < 1e-4, "{actual} and {expected}");
    }
    // The checkpoint already contains all steps.
    let answer = json(&format!("{} --resume", files.flags(10)));
    assert_eq!((&answer["status"], &answer["steps"]), (&"done".into(), &0.into()));
    assert_eq!(files.curve().len(), 10);
}

/// With `--decay-steps`, a run can be extended later.
#[test]
fn an_extended_run_equals_an_uninterrupted_one() {
    const STEPS: u64 = 6;
    let expected = uninterrupted(2 * STEPS);
    let files = Files::new();
    let decay = format!("--decay-steps {}", 2 * STEPS);
    stdout(&format!("{} {decay}", files.flags(STEPS)));
    let resume = format!("{} {decay} --resume", files.flags(2 * STEPS));
    let output = narrows(&resume).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(!message.contains("the loss curve is not that of a single run"), "{message}");
    assert_eq!(files.curve(), expected);
    let weights = |files: &Files| fs::read(files.step(2 * STEPS).join("model.safetensors"));
    let single_run = Files::new();
    stdout(&single_run.flags(2 * STEPS));
    assert!(weights(&files).unwrap() == weights(&single_run).unwrap(), "weights differ");
    // Without the flag, the learning rate decays until the end of each run.
    let other = Files::new();
    stdout(&other.flags(STEPS));
    assert_ne!(other.curve(), expected[..STEPS as usize]);
}

#[test]
fn an_empty_folder_is_resumed_at_the_first_step() {
    let files = Files::new();
    let report = stdout(&format!("{} --resume", files.flags(1)));
    assert!(report.contains("at the first step: there is no checkpoint in "), "{report}");
    assert!(report.contains("Last checkpoint: "), "{report}");
    assert!(files.step(1).exists());
}

#[test]
fn checkpoints_of_other_runs_are_rejected() {
    let files = Files::new();
    stdout(&files.flags(2));
    let message = failure(&files.flags(2), 2);
    assert!(message.contains("kept: already holds checkpoints, the last of step 2"), "{message}");
    assert!(message.contains("hint: --resume, to continue"), "{message}");
    fs::write(files.at("other.txt"), "another text ".repeat(100)).unwrap();
    let tokens = files.at("other.tokens").display().to_string();
    stdout(&format!("data {} --output {tokens}", files.at("other.txt").display()));
    let before = fs::read(files.at("m.jsonl")).unwrap();
    let flags = files.flags(4);
    for (arguments, part) in [
        (
            format!("{flags} --resume --seed 2"),
            "state.json: field `cursor`: the cursor is for seed 1",
        ),
        (format!("{flags} --resume --data {tokens}"), "the cursor is for tokens with SHA-256"),
        (flags.replace("length 16", "length 8") + " --resume", "for sequences of length 16"),
        (
            format!("{flags} --resume --model cola-60m"),
            "state.json: field `model`: the checkpoint is of",
        ),
        (files.flags(1) + " --resume", "more than 2, since --steps counts all steps"),
        (flags.replace("m.jsonl", "other.txt") + " --resume", "line 1: is not a line of metrics"),
        ("run --resume".into(), "--checkpoint-dir"),
        ("run --keep 0 --checkpoint-dir x".into(), "--keep"),
        ("run --checkpoint-dir Cargo.toml".into(), "Cargo.toml: cannot be listed"),
        ("run --backend null --checkpoint-dir x".into(), "--checkpoint-dir: the null backend"),
    ] {
        let message = failure(&arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
    assert_eq!(fs::read(files.at("m.jsonl")).unwrap(), before, "a failed run changed the metrics");
    // Other hyperparameters are allowed, with a warning.
    let output = narrows(&format!("{flags} --resume --weight-decay 0")).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("--weight-decay is 0, and 0.1 in "), "{message}");
    assert_eq!(message.matches("loss curve is not that of a single run").count(), 1, "{message}");
}

#[test]
fn damaged_checkpoints_are_located() {
    let files = Files::new();
    stdout(&format!("{} --checkpoint-every 1", files.flags(3)));
    let optimizer = files.step(3).join("optimizer.safetensors");
    let intact = fs::read(&optimizer).unwrap();
    let mut flipped = intact.clone();
    flipped[intact.len() / 2] ^= 1;
    fs::write(&optimizer, flipped).unwrap();
    let resume = files.flags(4) + " --resume";
    let message = failure(&resume, 2);
    for part in ["optimizer.safetensors: the file has SHA-256", "move it out of the folder"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    fs::write(&optimizer, &intact[..intact.len() / 2]).unwrap();
    let output = narrows(&resume).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("step-00000003 is incomplete: the run resumes from"), "{message}");
    for step in [1, 2, 4] {
        let _ = fs::remove_dir_all(files.step(step));
    }
    fs::write(files.step(3).join("optimizer.safetensors"), "short").unwrap();
    let message = failure(&resume, 2);
    assert!(
        message.contains("optimizer.safetensors: the file has 5 bytes, and the manif"),
        "{message}"
    );
}

/// A value belongs to the flag only after `=`: the next word is a plan.
#[test]
fn a_space_before_the_value_of_resume_is_explained() {
    let message = failure(&format!("{} --resume auto", Files::new().flags(1)), 2);
    assert!(message.contains("--resume: `auto` after a space"), "{message}");
    assert!(message.contains("hint: --resume=auto"), "{message}");
}

/// A schedule of restarts needs no person: a damaged checkpoint is set aside.
#[test]
fn resuming_automatically_sets_damaged_checkpoints_aside() {
    let files = Files::new();
    let expected = uninterrupted(6);
    let decay = "--decay-steps 6 --checkpoint-every 1 --keep 6";
    stdout(&format!("{} {decay} --resume=auto", files.flags(4)));
    let weights = files.step(4).join("model.safetensors");
    let mut flipped = fs::read(&weights).unwrap();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    fs::write(&weights, &flipped).unwrap();
    fs::remove_file(files.step(3).join("state.json")).unwrap();
    let resume = format!("{} {decay} --resume=auto", files.flags(6));
    assert_warns(
        &resume,
        &[
            "warning: ",
            "step-00000004/model.safetensors: the file has SHA-256",
            "step-00000003/state.json: is missing; the checkpoint is now ",
        ],
    );
    assert_eq!(files.curve(), expected);
    let aside = files.at("kept/step-00000004.damaged/model.safetensors");
    assert!(fs::read(aside).unwrap() == flipped, "damaged contents may be worth inspecting");
    // The run has written undamaged ones of the same steps.
    assert!(files.step(4).exists() && files.at("kept/step-00000003.damaged").exists());
}

/// Asserts that a run succeeds, and prints all of these parts on standard error.
fn assert_warns(arguments: &str, parts: &[&str]) {
    let output = narrows(arguments).assert().success().get_output().clone();
    let message = String::from_utf8(output.stderr).unwrap();
    for part in parts {
        assert!(message.contains(part), "{part} in {message}");
    }
}

/// The manifest agrees with the edited files.
#[test]
fn resuming_automatically_sets_edited_checkpoints_aside() {
    let files = Files::new();
    let expected = uninterrupted(6);
    let decay = "--decay-steps 6 --checkpoint-every 1 --keep 6";
    stdout(&format!("{} {decay}", files.flags(5)));
    let edit = |step: u64, name: &str, edit: &dyn Fn(&mut Vec<u8>)| {
        let folder = files.step(step);
        let mut bytes = fs::read(folder.join(name)).unwrap();
        edit(&mut bytes);
        fs::write(folder.join(name), &bytes).unwrap();
        let manifest = folder.join("manifest.json");
        let mut value: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
        let sha256 = hex::encode(narrows_runtime::sha256(&bytes));
        value["files"][name] = serde_json::json!({ "bytes": bytes.len(), "sha256": sha256 });
        fs::write(&manifest, value.to_string()).unwrap();
    };
    // The header of the weights begins at byte 8.
    edit(5, "model.safetensors", &|bytes| bytes[8] = b'!');
    edit(4, "state.json", &|bytes| {
        let mut state: Value = serde_json::from_slice(bytes).unwrap();
        state["step"] = Value::from(2);
        *bytes = state.to_string().into_bytes();
    });
    edit(3, "state.json", &|bytes| bytes[0] = b'!');
    let message = failure(&format!("{} {decay} --resume", files.flags(6)), 2);
    assert!(
        message.contains("model.safetensors: header: is not a safetensors header"),
        "{message}"
    );
    let resume = format!("{} {decay} --resume=auto", files.flags(6));
    assert_warns(
        &resume,
        &[
            "step-00000005/model.safetensors: header: is not a safetensors header",
            "step-00000004/state.json: field `step`: is 2, and the name of the folder has 4; the checkpoint is now ",
            "step-00000003/state.json: ",
        ],
    );
    assert_eq!(files.curve(), expected);
    assert!((3..=5).all(|step| files.at(&format!("kept/step-{step:08}.damaged")).is_dir()));
}

/// Changes a byte in the middle of a file.
pub fn damage(file: &Path) {
    let mut bytes = fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_run_without_an_undamaged_checkpoint_begins_anew_and_loses_nothing() {
    let files = Files::new();
    let expected = uninterrupted(6);
    let flags = |steps| {
        let every = "--decay-steps 6 --checkpoint-every 1 --resume=auto";
        format!("{} {every}", files.flags(steps))
    };
    stdout(&flags(3));
    (1..=3).for_each(|step| damage(&files.step(step).join("model.safetensors")));
    let before = fs::read(files.at("m.jsonl")).unwrap();
    let aside = |step| files.at(&format!("kept/step-{step:08}.damaged/model.safetensors"));
    let damaged = fs::read(files.step(3).join("model.safetensors")).unwrap();
    assert_warns(
        &flags(6),
        &[
            "kept has no undamaged checkpoint left: the run begins at the first step",
            "m.jsonl has steps of which no checkpoint is left: it is now ",
        ],
    );
    assert_eq!(files.curve(), expected);
    assert!(fs::read(files.at("m.jsonl.old-1")).unwrap() == before);
    assert!(fs::read(aside(3)).unwrap() == damaged && (1..3).all(|step| aside(step).exists()));
}

#[test]
fn a_run_has_the_values_of_the_checkpoint_that_it_resumes_from() {
    let files = Files::new();
    let run = |steps, more: &str| {
        let flags = format!("{} --decay-steps 9 --checkpoint-every 2 --keep 9", files.flags(steps));
        let output = narrows(&format!("{flags} {more}")).assert().success().get_output().clone();
        String::from_utf8(output.stderr).unwrap()
    };
    run(2, "");
    assert!(run(4, "--resume --learning-rate 0.02").contains("--learning-rate is 0.02"));
    damage(&files.step(4).join("model.safetensors"));
    let message = run(6, "--resume=auto");
    assert!(message.contains("the checkpoint is now"), "{message}");
    assert!(!message.contains("--learning-rate"), "{message}");
}

#[test]
fn every_mth_checkpoint_is_kept_besides_the_last() {
    let files = Files::new();
    stdout(&format!("{} --checkpoint-every 1 --keep 2 --keep-every 3", files.flags(8)));
    let present: Vec<u64> = (1..=8).filter(|step| files.step(*step).exists()).collect();
    assert_eq!(present, [3, 6, 7, 8]);
}

#[test]
fn a_failed_step_names_the_last_checkpoint() {
    let files = Files::new();
    let hot = "--learning-rate 1e30 --warm-up-steps 0 --clip-norm 1e30 --format json";
    let message = failure(&format!("{} {hot} --checkpoint-every 1", files.flags(5)), 1);
    for part in
        ["step 2: the loss is ", "the checkpoint of step 1 is ", "--resume continues from it"]
    {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert!(files.step(1).exists() && !files.step(2).exists());
    let other = Files::new();
    let message = failure(&format!("{} {hot}", other.flags(5)), 1);
    assert!(message.contains("no checkpoint was written to "), "{message}");
}

#[cfg(target_os = "linux")]
mod signals {
    use std::process::{Child, Command, Output, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// Starts a run and waits for its first step.
    fn start(arguments: &str, metrics: &Path) -> Child {
        let child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
            .args(arguments.split_whitespace())
            .env("XDG_CACHE_HOME", crate::CACHE)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !fs::read_to_string(metrics).is_ok_and(|text| text.contains('\n')) {
            assert!(Instant::now() < deadline, "no step in a minute");
            std::thread::sleep(Duration::from_millis(2));
        }
        child
    }

    fn send(signal: &str, child: &Child) {
        let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the end of a run. Returns its output and its messages.
    fn wait(child: Child) -> (Output, String) {
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8(output.stderr.clone()).unwrap();
        (output, message)
    }

    #[test]
    fn a_stopped_and_resumed_run_equals_an_uninterrupted_one() {
        const STEPS: u64 = 60;
        let expected = uninterrupted(STEPS);
        for signal in ["-TERM", "-INT"] {
            let files = Files::new();
            let child = start(&files.flags(STEPS), &files.at("m.jsonl"));
            send(signal, &child);
            let (output, message) = wait(child);
            assert_eq!(output.status.code(), Some(130), "{signal}: {message}");
            let last_step = files.curve().len() as u64;
            assert!((1..STEPS).contains(&last_step), "{last_step}");
            for part in [
                format!("stopped after step {last_step} of {STEPS}; the checkpoint of step"),
                format!("{}: the same command with --resume", files.step(last_step).display()),
            ] {
                assert!(message.contains(&part), "{part} in {message}");
            }
            stdout(&format!("{} --resume", files.flags(STEPS)));
            assert!(files.curve() == expected, "{signal}: the loss curves differ");
        }
    }

    #[test]
    fn a_checkpoint_folder_is_locked_by_its_run() {
        let files = Files::new();
        let flags = |steps| format!("{} --checkpoint-every 1", files.flags(steps));
        let child = start(&flags(1_000_000), &files.at("m.jsonl"));
        let other = flags(1_000_000).replace("m.jsonl", "other.jsonl");
        let message = failure(&format!("{other} --resume"), 2);
        for part in ["kept: is locked by another run", "hint: another folder"] {
            assert!(message.contains(part), "{part} in {message}");
        }
        assert!(!files.at("other.jsonl").exists());
        send("-KILL", &child);
        wait(child);
        assert!(files.at("kept/.narrows-lock").exists());
        let steps = 2 + fs::read_to_string(files.at("m.jsonl")).unwrap().lines().count() as u64;
        assert_eq!(json(&format!("{} --resume", flags(steps)))["status"], "done");
    }

    #[test]
    fn runs_that_are_killed_or_interrupted_twice_can_be_resumed() {
        for signals in [&["-INT", "-INT"][..], &["-KILL"]] {
            let files = Files::new();
            let flags = |steps| format!("{} --checkpoint-every 1", files.flags(steps));
            let mut child = start(&flags(1_000_000), &files.at("m.jsonl"));
            for signal in signals {
                if child.try_wait().unwrap().is_none() {
                    send(signal, &child);
                }
            }
            let (output, message) = wait(child);
            assert!(matches!(output.status.code(), Some(130) | None), "{message}");
            let text = fs::read_to_string(files.at("m.jsonl")).unwrap();
            let steps = 2 + text.lines().count() as u64;
            let answer = json(&format!("{} --resume", flags(steps)));
            assert_eq!(answer["status"], "done");
            let curve_steps: Vec<u64> = files.curve().iter().map(|step| step[0]).collect();
            assert_eq!(curve_steps, (1..=steps).collect::<Vec<_>>());
        }
    }
}
