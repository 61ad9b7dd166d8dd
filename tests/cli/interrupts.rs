//! Ctrl-C during searches and long analyses, whose answer has what is done, and during the making of a token file, which leaves
//! nothing.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Bit of SIGXCPU in a mask of signals. Its handler is installed after those of the other signals.
const SIGXCPU_BIT: u64 = 1 << 23;

/// Whether a process handles signals itself.
fn handles_interrupts(child: &Child) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & SIGXCPU_BIT != 0)
}

/// Waits until a process handles signals itself.
pub fn wait_for_handler(child: &Child) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !handles_interrupts(child) {
        assert!(Instant::now() < deadline, "no handler in two minutes");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a command handles signals, and sends it one.
fn signal(child: &Child, name: &str) {
    wait_for_handler(child);
    send(child, name);
}

fn send(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

/// The answer of a command that takes minutes, after Ctrl-C.
fn interrupted(arguments: &str) -> Value {
    interrupted_with(130, arguments)
}

/// The answer of a command that takes long, and ends with this exit code after Ctrl-C.
fn interrupted_with(code: i32, arguments: &str) -> Value {
    let child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
        .args(arguments.split_whitespace())
        .args(["--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// A search of many seconds, in which an even partition fits.
const SEARCH: &str =
    "--model lax-7b --hardware a100-40gb --devices 128 --global-batch 512 --sequence-length 4096";

#[test]
fn an_interrupted_search_has_the_best_plan_so_far() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    for command in ["plan", "cost", "explain"] {
        let output = format!("--output {}", file.display());
        let answer = interrupted_with(0, &format!("{command} {SEARCH} {output}"));
        let search = &answer["search"];
        assert_eq!(search["status"], "time_limit", "{search}");
        assert_eq!(search["interrupted"], true, "{search}");
        assert!(search["gap"].as_f64().is_some_and(|gap| gap > 0.0 && gap < 1.0), "{search}");
        let written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        match command {
            "explain" => {
                assert_eq!(answer["is_complete"], false);
                assert_eq!(answer["alternatives"], serde_json::json!([]));
                assert!(answer["chosen"]["prediction"].is_object(), "{answer}");
                let binds = answer["binds"].as_array().unwrap();
                let of_memory =
                    |sentence: &Value| sentence.as_str().unwrap().contains("memory does");
                assert!(!binds.iter().any(of_memory), "not known: {binds:?}");
            }
            _ => assert_eq!(answer["decisions"], written, "{command}"),
        }
        crate::narrows(&format!("check {}", file.display())).assert().success();
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_search_that_is_interrupted_without_a_plan_is_stopped() {
    let request = "--model llama-13b --hardware a100-40gb --devices 1024 --global-batch 4096 \
                   --sequence-length 4096 --memory-limit 1GB";
    let answer = interrupted_with(130, &format!("plan {request}"));
    assert_eq!(answer["search"]["interrupted"], true, "{answer}");
    assert!(answer["decisions"].is_null() && answer["search"]["gap"].is_null(), "{answer}");
}

/// The plan is written to a pipe that is not read, so that the program cannot end by itself.
#[test]
fn a_further_interrupt_ends_a_search_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("plan.json");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for request in [SEARCH, "--model cola-tiny --hardware cpu-local"] {
        let mut child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
            .arg("plan")
            .args(request.split_whitespace())
            .arg("--output")
            .arg(&pipe)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        wait_for_handler(&child);
        let deadline = Instant::now() + Duration::from_secs(120);
        let status = loop {
            send(&child, "-INT");
            std::thread::sleep(Duration::from_millis(300));
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "no end after two minutes of signals");
        };
        assert_eq!(status.code(), Some(130), "{request}");
    }
}

#[test]
fn interrupted_analyses_answer_with_what_is_done() {
    let request = "--model cola-7b --sequence-length 4096";
    let sweep = format!("{request} --sweep devices=16..64*2 --sweep rank=64..1024+64");
    let answer = interrupted(&format!("whatif {sweep}"));
    assert_eq!(answer["is_complete"], false);
    assert!(answer["points"].as_array().unwrap().len() < 3 * 16, "{answer}");
    let field = "hardware.links.inter_node.bandwidth_gbps=1..1000";
    let question = format!("--break-even {field} --between btp+tensor=8,data-parallel");
    let answer = interrupted(&format!("whatif {request} --devices 64 {question}"));
    assert_eq!(answer["is_complete"], false);
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.csv");
    let csv = format!("--csv {}", rows.display());
    let answer = interrupted(&format!("sensitivity {request} --devices 16 {csv}"));
    assert_eq!(answer["is_complete"], false);
    assert!(answer["prediction"]["step_time_s"].is_f64(), "the present plan is known: {answer}");
    // Numbers that were not planned are left out: a gain of `null` is a value without a plan.
    let rows = fs::read_to_string(rows).unwrap();
    assert!(rows.lines().count() <= 1 + answer["elasticities"].as_array().unwrap().len(), "{rows}");
    for upgrade in answer["upgrades"].as_array().unwrap() {
        assert!(upgrade["gains"].as_array().unwrap().iter().all(|gain| !gain["gain"].is_null()));
    }
    for assumed in answer["assumed"].as_array().unwrap() {
        assert_ne!(assumed["range"][0], assumed["range"][1], "{assumed}");
        assert!(!assumed["losses"].as_array().unwrap().iter().all(Value::is_null), "{assumed}");
    }
}

/// The input neither ends nor goes on, so that only the signal ends the command.
#[test]
fn a_token_file_that_is_stopped_leaves_nothing() {
    for (name, before) in [("-INT", None), ("-TERM", Some("old")), ("-HUP", None)] {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("t.tokens");
        before.iter().for_each(|text| fs::write(&output, text).unwrap());
        let mut child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
            .args(["data", "-", "--output"])
            .arg(&output)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(b"Call me Ishmael.").unwrap();
        signal(&child, name);
        let status = child.wait_with_output().unwrap();
        assert_eq!(status.status.code(), Some(130), "{name}: {status:?}");
        let message = String::from_utf8(status.stderr).unwrap();
        assert!(message.starts_with("Stopped by a signal: nothing was written to "), "{message}");
        let files = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(files, before.iter().count(), "{name}");
        assert_eq!(fs::read_to_string(&output).ok().as_deref(), before, "{name}");
    }
}
