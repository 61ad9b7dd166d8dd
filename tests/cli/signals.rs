//! Signals that stop a run: it saves its state, says so, and ends with a documented code.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use super::cluster::{Processes, signal, stderr, wait_all, wait_for_steps};
use super::environment::{ENVIRONMENT, Run, assert_ends};
use super::interrupts::wait_for_handler;
use super::run::{SMALL, lines};

/// Signals with which schedulers and the kernel stop a run, the exit code, and a part of the message.
const REQUESTS: [(&str, i32, &str); 6] = [
    ("-TERM", 130, "stopped after step"),
    ("-HUP", 130, "stopped after step"),
    ("-USR1", 130, "stopped after step"),
    ("-USR2", 130, "stopped after step"),
    ("-ALRM", 130, "stopped after step"),
    ("-XCPU", ENVIRONMENT, "error: CPU time: the limit of this process is used up"),
];

#[test]
fn every_signal_of_a_scheduler_saves_the_run() {
    for (name, code, message) in REQUESTS {
        let run = Run::new();
        let child = run.start("", &format!("{} {}", run.flags(1_000_000), run.metrics()));
        wait_for_steps(&run.at("m.jsonl"), 2);
        signal(&child, name);
        assert_ends(child, code, &[message, "the same command with --resume continues"]);
        let last_step = lines(&run.at("m.jsonl")).len();
        assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")], "{name}");
    }
}

/// Slurm may ask again, and ends the run with SIGTERM when its time is over: of these signals only a second SIGTERM ends the run at
/// once.
#[test]
fn requests_to_save_do_not_end_a_run_that_saves() {
    let run = Run::new();
    let flags = format!("{} --checkpoint-every 1 --checkpoint-async", run.flags(1_000_000));
    let child = run.start("", &format!("{flags} {}", run.metrics()));
    wait_for_steps(&run.at("m.jsonl"), 2);
    for name in ["-USR1", "-USR1", "-USR2", "-ALRM", "-TERM"] {
        signal(&child, name);
    }
    assert_ends(child, 130, &["stopped after step", "the same command with --resume continues"]);
    let last_step = lines(&run.at("m.jsonl")).len();
    assert!(run.checkpoints().contains(&format!("step-{last_step:08}")));
}

/// GNU `timeout` signals the program and then its process group.
#[test]
fn signals_that_arrive_together_are_one_request() {
    for _ in 0..5 {
        let run = Run::new();
        let child = run.start("", &format!("{} {}", run.flags(1_000_000), run.metrics()));
        wait_for_steps(&run.at("m.jsonl"), 2);
        signal(&child, "-TERM");
        signal(&child, "-TERM");
        assert_ends(
            child,
            130,
            &["stopped after step", "the same command with --resume continues"],
        );
        let last_step = lines(&run.at("m.jsonl")).len();
        assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")]);
    }
}

/// The kernel repeats its signal every second until the hard limit.
#[test]
fn a_run_is_saved_when_its_cpu_time_is_used_up() {
    // At a hard limit, the kernel ends a program without a signal that it could handle.
    for (limit, reserved) in
        [("ulimit -S -t 2;", ": SIGXCPU"), ("ulimit -t 2;", ", but for 1 s to save the run")]
    {
        let run = Run::new();
        let flags = format!("{} {}", run.flags(1_000_000), run.metrics());
        let child = run.start(limit, &flags);
        let used_up =
            format!("error: CPU time: the limit of 2 s (`ulimit -t`) is used up{reserved}");
        assert_ends(child, ENVIRONMENT, &[&used_up, "continues from it"]);
        let last_step = lines(&run.at("m.jsonl")).len();
        assert!(run.checkpoints().contains(&format!("step-{last_step:08}")), "{limit}");
    }
}

/// Slurm signals every process of a step.
#[test]
fn all_processes_save_when_all_are_asked_to() {
    for (name, code, message) in [
        ("-USR1", 130, "stopped after step"),
        ("-XCPU", ENVIRONMENT, "CPU time: the limit of this process"),
    ] {
        let processes = Processes::new(2);
        let flags = format!("{} --tensor 2", processes.flags(1_000_000));
        let children = processes.all(&flags);
        wait_for_steps(&processes.at("m.jsonl"), 2);
        children.iter().for_each(|child| signal(child, name));
        let outputs = wait_all(children);
        assert!(stderr(&outputs[0]).contains(message), "{name}: {outputs:#?}");
        // A process that has not yet seen its signal when another fails ends because of that one.
        let has_code = |output: &Output| output.status.code() == Some(code);
        let is_ended_by_other = |output: &Output| stderr(output).contains("aborted the run");
        assert!(outputs.iter().any(has_code), "{name}: {outputs:#?}");
        assert!(
            outputs.iter().all(|o| has_code(o) || is_ended_by_other(o)),
            "{name}: {outputs:#?}"
        );
        let last_step = lines(&processes.at("m.jsonl")).len();
        let manifest = format!("kept/step-{last_step:08}/manifest.json");
        assert!(processes.at(&manifest).exists(), "{name}: {outputs:#?}");
    }
}

#[test]
fn signals_that_were_ignored_at_the_start_stay_ignored() {
    let run = Run::new();
    let flags = format!("{} {}", run.flags(1_000_000), run.metrics());
    let child = run.start("trap '' HUP INT USR1 USR2 ALRM XCPU;", &flags);
    wait_for_steps(&run.at("m.jsonl"), 1);
    for name in ["-HUP", "-INT", "-INT", "-USR1", "-USR2", "-ALRM", "-XCPU"] {
        signal(&child, name);
    }
    let steps = lines_of(&run.at("m.jsonl"));
    wait_for_steps(&run.at("m.jsonl"), steps + 3);
    signal(&child, "-TERM");
    assert_ends(child, 130, &["stopped after step"]);
}

fn lines_of(path: &Path) -> usize {
    fs::read_to_string(path).unwrap().matches('\n').count()
}

/// A process that does not yet train ends at once.
#[test]
fn a_run_that_is_stopped_before_its_first_step_exits_as_a_stopped_one() {
    let processes = Processes::new(2);
    let joining = format!("{SMALL} --tensor 2 --steps 2");
    let sweep =
        "--model cola-7b --hardware a100-80gb --devices 512 --backend null --sequence-length 4096";
    let planning = format!("run {sweep} --global-batch 512");
    let cpu_time = "error: CPU time: the limit of this process is used up";
    for (arguments, name, code, message) in [
        (&joining, "-TERM", 130, "process 0 of 2: stopped by SIGTERM before the first step"),
        (&planning, "-TERM", 130, "stopped by SIGTERM before the first step"),
        (&joining, "-USR1", 130, "process 0 of 2: stopped by SIGUSR1 before the first step"),
        (&planning, "-XCPU", ENVIRONMENT, cpu_time),
    ] {
        let child =
            crate::interruptible(assert_cmd::cargo::cargo_bin!("narrows").to_str().unwrap())
                .args(arguments.split_whitespace())
                .envs(processes.torchrun(0))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
        wait_for_handler(&child);
        signal(&child, name);
        assert_ends(child, code, &[message]);
    }
}

#[test]
fn a_stopped_run_waits_for_the_checkpoint_that_is_being_written() {
    let run = Run::new();
    let flags =
        format!("{} --checkpoint-every 1 --checkpoint-async --keep 1", run.flags(1_000_000));
    let child = run.start("", &format!("{flags} {}", run.metrics()));
    wait_for_steps(&run.at("m.jsonl"), 5);
    signal(&child, "-TERM");
    assert_ends(child, 130, &["stopped after step"]);
    let last_step = lines(&run.at("m.jsonl")).len();
    assert_eq!(run.checkpoints(), [format!("step-{last_step:08}")]);
    assert_eq!(fs::read_dir(run.at("kept")).unwrap().count(), 2, "a temporary folder remains");
    // A disk without space ends such a run at the next step.
    let full = Run::new();
    let flags = format!("{} --checkpoint-every 1 --checkpoint-async", full.flags(1_000_000));
    let written = ["model.safetensors: cannot be written: File too large"];
    assert_ends(full.start("ulimit -f 8;", &flags), ENVIRONMENT, &written);
}
