//! Faults of the environment: full disks, truncated inputs, folders that vanish. A run saves its state, says what happened,
//! and ends with a code after which schedulers try again.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Output, Stdio};

use tempfile::TempDir;

use super::checkpoints::checkpoint_files;
use super::cluster::{Processes, signal, stderr, wait_all, wait_for_steps};
use super::run::{SMALL, lines};
use super::{failure, stdout};

/// The exit code of faults of the environment.
pub const ENVIRONMENT: i32 = 75;

/// A run in a folder, with metrics there.
pub struct Run {
    folder: TempDir,
}

impl Run {
    pub fn new() -> Run {
        Run { folder: tempfile::tempdir().unwrap() }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Flags of a run without metrics, with checkpoints in this folder.
    pub fn flags(&self, steps: u64) -> String {
        format!("{SMALL} --steps {steps} --checkpoint-dir {}", self.at("kept").display())
    }

    pub fn metrics(&self) -> String {
        format!("--metrics {}", self.at("m.jsonl").display())
    }

    /// Starts `narrows` from a shell, after `prologue`.
    pub fn start(&self, prologue: &str, arguments: &str) -> Child {
        let program = assert_cmd::cargo::cargo_bin!("narrows").display();
        crate::interruptible("sh")
            .args(["-c", &format!("{prologue} exec {program} {arguments}")])
            .env("XDG_CACHE_HOME", crate::CACHE)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The steps of the checkpoints. A run without any leaves no folder.
    pub fn checkpoints(&self) -> Vec<String> {
        let entries = fs::read_dir(self.at("kept")).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("step-")).collect()
    }

    /// Makes a token file of a few hundred tokens.
    fn tokens(&self) -> PathBuf {
        let (text, tokens) = (self.at("text.txt"), self.at("tokens.bin"));
        fs::write(&text, "a short text ".repeat(50)).unwrap();
        stdout(&format!("data {} --output {}", text.display(), tokens.display()));
        tokens
    }
}

/// Asserts that a process ends with this code and a message of these parts.
pub fn assert_ends(child: Child, code: i32, parts: &[&str]) -> Output {
    let output = child.wait_with_output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part} in {message}");
    }
    output
}

#[test]
fn steps_are_saved_when_metrics_or_reports_cannot_be_written() {
    for (redirection, metrics, place) in
        [("", "--metrics /dev/full", "/dev/full"), (">/dev/full", "--metrics -", "-")]
    {
        let run = Run::new();
        let child = run.start("", &format!("{} {metrics} {redirection}", run.flags(1_000_000)));
        let written = format!("error: --metrics {place}: cannot be written: No space left");
        assert_ends(child, ENVIRONMENT, &[&written, "the checkpoint of step 1 is "]);
        assert_eq!(run.checkpoints(), ["step-00000001"]);
        let resumed = format!("{} {} --resume", run.flags(2), run.metrics());
        assert!(stdout(&resumed).contains("after step 1"), "{metrics}");
    }
}

#[test]
fn all_processes_save_a_step_whose_metrics_cannot_be_written() {
    let processes = Processes::new(2);
    let metrics = processes.at("m.jsonl").display().to_string();
    let flags = processes.flags(1_000_000).replace(&metrics, "/dev/full");
    let outputs = wait_all(processes.all(&flags));
    let (first, second) = (stderr(&outputs[0]), stderr(&outputs[1]));
    assert_eq!(outputs[0].status.code(), Some(ENVIRONMENT), "{first}");
    assert!(first.contains("the checkpoint of step 1 is "), "{first}");
    let reason = "process 0 aborted the run: --metrics /dev/full: cannot be written: No space";
    assert!(second.contains(reason), "{second}");
    assert!(processes.at("kept/step-00000001/manifest.json").exists());
}

#[test]
fn a_metrics_file_has_one_run_at_a_time() {
    let (run, other) = (Run::new(), Run::new());
    let child = run.start("", &format!("{} {}", run.flags(1_000_000), run.metrics()));
    wait_for_steps(&run.at("m.jsonl"), 2);
    let message = failure(&format!("{} {}", other.flags(1), run.metrics()), 2);
    assert!(message.contains("m.jsonl: is written by another run that has not ended"), "{message}");
    wait_for_steps(&run.at("m.jsonl"), 4);
    signal(&child, "-TERM");
    assert_ends(child, 130, &["stopped after step"]);
    let steps: Vec<u64> = lines(&run.at("m.jsonl")).iter().filter_map(step_of).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
}

fn step_of(line: &serde_json::Value) -> Option<u64> {
    line["step"].as_u64()
}

#[test]
fn a_truncated_token_file_ends_a_run_with_a_checkpoint() {
    let run = Run::new();
    let tokens = run.tokens();
    let whole = fs::read(&tokens).unwrap();
    let flags =
        |steps| format!("{} --data {} {}", run.flags(steps), tokens.display(), run.metrics());
    let child = run.start("", &flags(1_000_000));
    wait_for_steps(&run.at("m.jsonl"), 2);
    File::options().write(true).open(&tokens).unwrap().set_len(257).unwrap();
    let parts = ["tokens.bin: has been truncated: it had ", "the same command with --resume"];
    assert_ends(child, ENVIRONMENT, &parts);
    let last_step = lines(&run.at("m.jsonl")).len() as u64;
    assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")]);
    fs::write(&tokens, whole).unwrap();
    stdout(&format!("{} --resume", flags(last_step + 1)));
}

/// Starts the program in a file system of its own with this much space, or returns why the system refuses one. `script` is a
/// shell script with the program as `$0`.
pub fn on_small_disk(size: &str, script: &str) -> Result<Output, String> {
    let mount = format!("mount -t tmpfs -o size={size} none /mnt || exit 99; {script}");
    let output = std::process::Command::new("unshare")
        .args(["-rm", "sh", "-c", &mount])
        .arg(assert_cmd::cargo::cargo_bin!("narrows"))
        .env("XDG_CACHE_HOME", crate::CACHE)
        .output()
        .map_err(|error| format!("unshare: {error}"))?;
    let refused = stderr(&output);
    match output.status.code() {
        Some(99) => Err(refused),
        _ if refused.starts_with("unshare:") => Err(refused),
        _ => Ok(output),
    }
}

/// With --keep 1, a disk that has room for one checkpoint is full again after each restart.
#[test]
fn a_full_disk_keeps_the_only_checkpoint_and_says_what_to_do() {
    let run = format!("\"$0\" {SMALL} --checkpoint-dir /mnt/kept --checkpoint-every 1 --keep 1");
    let script = format!(
        "{run} --steps 1 >/dev/null || exit 98; size=$(du -sk /mnt | cut -f1)
        mount -o remount,size=$((size * 3 / 2))k /mnt
        for attempt in 1 2; do
            {run} --steps 2 --resume=auto >/dev/null; echo \"code $?\"; ls -A /mnt/kept
        done
        mount -o remount,size=512m /mnt
        {run} --steps 2 --resume=auto >/dev/null; echo \"code $?\"; ls -A /mnt/kept"
    );
    let output = match on_small_disk("512m", &script) {
        Ok(output) => output,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let message = stderr(&output);
    let printed = String::from_utf8(output.stdout).unwrap();
    let full = "code 75\n.narrows-lock\nstep-00000001\n";
    let expected = format!("{full}{full}code 0\n.narrows-lock\nstep-00000002\n");
    assert_eq!(printed, expected, "{message}");
    for part in [
        "cannot be written: No space left on device",
        "hint: free space for /mnt/kept: a checkpoint takes ",
        "the checkpoint of step 1 is /mnt/kept/step-00000001",
    ] {
        assert_eq!(message.matches(part).count(), 2, "{part} in {message}");
    }
}

/// Process 1 of 2 writes files up to a limit, as onto a disk that becomes full.
#[test]
fn a_failed_save_ends_all_processes_with_the_reason_of_the_writer() {
    for (limited, mode) in [(0, ""), (1, ""), (1, "--checkpoint-async")] {
        let processes = Processes::new(2);
        let dir = processes.at("kept");
        let save = format!("--checkpoint-every 1 {mode} --checkpoint-dir {}", dir.display());
        let arguments = format!("{SMALL} --steps 1000000 --tensor 2 {save}");
        let start = |rank: usize| {
            let limit = if rank == limited { "ulimit -f 8;" } else { "" };
            let program = assert_cmd::cargo::cargo_bin!("narrows").display();
            std::process::Command::new("sh")
                .args(["-c", &format!("{limit} exec {program} {arguments}")])
                .envs(processes.torchrun(rank))
                .env("XDG_CACHE_HOME", processes.at("cache"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let outputs = wait_all((0..2).map(start).collect());
        let file = format!("model-0000{}-of-00002.safetensors", limited + 1);
        for (rank, output) in outputs.iter().enumerate() {
            let message = stderr(output);
            assert_eq!(output.status.code(), Some(ENVIRONMENT), "{limited} {mode} {message}");
            let reason = format!("{file}: cannot be written: File too large");
            assert!(message.contains(&reason), "{limited} {mode} {message}");
            let other = format!("process {limited} cannot write its part: ");
            assert_eq!(message.contains(&other), rank != limited, "{message}");
        }
        assert!(!dir.exists(), "an unfinished checkpoint remains");
    }
}

#[test]
fn all_processes_save_a_step_after_which_tokens_cannot_be_read() {
    for flag in ["--data", "--eval-every 2 --eval-data"] {
        let run = Run::new();
        let tokens = run.tokens();
        let processes = Processes::new(2);
        let flags = processes.flags(1_000_000);
        let children = processes.all(&format!("{flags} --tensor 2 {flag} {}", tokens.display()));
        wait_for_steps(&processes.at("m.jsonl"), 2);
        File::options().write(true).open(&tokens).unwrap().set_len(257).unwrap();
        let outputs = wait_all(children);
        // One process may have read the tokens of the step before they were cut off, and gets the reason of the other.
        let has_failed = |output: &Output| output.status.code() == Some(ENVIRONMENT);
        assert!(outputs.iter().any(has_failed), "{outputs:#?}");
        for output in &outputs {
            assert!(stderr(output).contains("tokens.bin: has been truncated"), "{outputs:#?}");
        }
        let last_step = lines(&processes.at("m.jsonl")).len();
        let checkpoint = processes.at(&format!("kept/step-{last_step:08}/manifest.json"));
        assert!(checkpoint.exists(), "{flag}: {outputs:#?}");
    }
}

#[test]
fn a_step_is_saved_after_which_evaluations_cannot_be_read() {
    let run = Run::new();
    let tokens = run.tokens();
    let eval = format!("--eval-data {} --eval-every 2", tokens.display());
    let child = run.start("", &format!("{} {eval} {}", run.flags(1_000_000), run.metrics()));
    wait_for_steps(&run.at("m.jsonl"), 2);
    File::options().write(true).open(&tokens).unwrap().set_len(257).unwrap();
    let parts = ["tokens.bin: has been truncated: it had ", "the same command with --resume"];
    assert_ends(child, ENVIRONMENT, &parts);
    let last_step = lines(&run.at("m.jsonl")).len();
    assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")]);
}

#[test]
fn damaged_tokens_end_a_run() {
    let run = Run::new();
    let tokens = run.tokens();
    let mut bytes = fs::read(&tokens).unwrap();
    let claimed = bytes.clone();
    // Another byte of the text, which is a token of the vocabulary.
    *bytes.get_mut(300).unwrap() ^= 1;
    fs::write(&tokens, &bytes).unwrap();
    let flags = format!("--data {} {}", tokens.display(), run.metrics());
    let mismatch = "tokens.bin: byte 256 (tokens): the tokens have SHA-256 ";
    let message = failure(&format!("{} {flags}", run.flags(1)), 2);
    assert!(message.contains(mismatch), "{message}");
    assert!(run.checkpoints().is_empty() && !run.at("m.jsonl").exists());
    // Large files are verified while the run trains: steps that it has executed by then are saved.
    let background = format!("{} {flags} --verify-data background", run.flags(1_000_000));
    assert_ends(
        run.start("", &background),
        2,
        &[mismatch, "once this is fixed, the same command with --resume"],
    );
    let last_step = lines(&run.at("m.jsonl")).len();
    assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")]);
    let steps = last_step as u64 + 1;
    let report = stdout(&format!("{} {flags} --verify-data never --resume", run.flags(steps)));
    assert!(report.contains("tokens.bin, not verified"), "{report}");
    fs::write(&tokens, claimed).unwrap();
    let report = stdout(&format!("{} {flags} --resume", run.flags(steps + 1)));
    assert!(report.contains("tokens.bin, verified\n"), "{report}");
    // The tokens of evaluations are verified too.
    fs::write(&tokens, bytes).unwrap();
    let eval = format!("--eval-data {}", tokens.display());
    assert!(failure(&format!("{SMALL} --steps 1 {eval}"), 2).contains(mismatch));
}

#[test]
fn checkpoints_written_behind_steps_are_those_of_a_run_that_waits() {
    for world in [1, 2] {
        let [blocking, background] = ["", "--checkpoint-async"].map(|mode| {
            let processes = Processes::new(world);
            let flags = processes.flags(7);
            let flags = format!("{flags} --checkpoint-every 2 --keep 9 --tensor {world} {mode}");
            let children = match world {
                1 => vec![Run::new().start("", &flags)],
                _ => processes.all(&flags),
            };
            for output in wait_all(children) {
                assert!(output.status.success(), "{}", stderr(&output));
            }
            checkpoint_files(&processes.at("kept"))
        });
        // The steps 2, 4, 6 and 7, and six files each or eight.
        assert_eq!(blocking.len(), 4 * (4 + 2 * world), "{world}");
        assert!(blocking == background, "{world}: the checkpoints differ");
    }
}

#[test]
fn outputs_that_are_hard_links_of_inputs_are_rejected() {
    let run = Run::new();
    let (tokens, link) = (run.tokens(), run.at("link"));
    let before = fs::read(&tokens).unwrap();
    fs::hard_link(&tokens, &link).unwrap();
    let flags = format!("{} --data {}", run.flags(1), tokens.display());
    for flag in ["--metrics", "--trace", "--output"] {
        let message = failure(&format!("{flags} {flag} {}", link.display()), 2);
        assert!(message.contains("is an input too"), "{flag}: {message}");
    }
    assert_eq!(fs::read(&tokens).unwrap(), before);
}

/// From limits under which the program hardly starts to such that suffice, memory or threads are refused in many places.
#[test]
fn little_memory_ends_with_a_sentence() {
    let run = Run::new();
    let mut refused = 0;
    for limit_kib in (50_000..=130_000).step_by(8_000) {
        let prologue = format!("ulimit -v {limit_kib}; ");
        let flags =
            "run --hardware cpu-local --steps 1 --global-batch 2 --sequence-length 16 --threads 2";
        let output = run.start(&prologue, flags).wait_with_output().unwrap();
        let message = stderr(&output);
        match output.status.code() {
            // The system could not load the program, or the limit suffices.
            None | Some(0) => continue,
            Some(127) if message.contains("error while loading shared libraries") => continue,
            code => assert_eq!(code, Some(ENVIRONMENT), "{limit_kib} KiB: {message}"),
        }
        let is_explained = message.contains("error: memory: the system refuses ")
            || message.contains("threads: the system refuses them");
        assert!(is_explained && message.matches("error:").count() == 1, "{limit_kib}: {message}");
        refused += 1;
    }
    assert!(refused > 0, "no limit was too small");
}
