//! Memory of runs of many steps.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// A model whose steps take microseconds.
const TINIEST: &str = r#"{
    "format": "narrows-model/1", "hidden": 8, "vocab": 256, "heads": 1, "kv_heads": 1, "d_ff": 8, "tied": true,
    "blocks": {"count": 1, "default": {"product": "swiglu", "all": {"rank": 2, "activation": "silu"}}}
}"#;

/// Growth a step of a list with a number for each.
const LIST_BYTES: u64 = 8;

/// Tenths of the steps in which the memory may grow as if there were such a list: the allocator takes and returns some megabytes
/// now and then, and a list grows in all of them.
const GROWING_TENTHS_MAX: usize = 2;

/// Asserts that the memory of a run does not grow with its steps. A run prints a line every tenth.
fn check_memory_is_flat(steps: u64) {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiniest.json");
    fs::write(&model, TINIEST).unwrap();
    let flags = "--hardware cpu-local --global-batch 1 --sequence-length 2 --threads 1";
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_narrows"))
        .args(["run", "--model", &model.display().to_string(), "--metrics", "/dev/null"])
        .args(flags.split_whitespace())
        .args(["--steps", &steps.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut memory = vec![];
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        let step = line.strip_prefix("  step ").and_then(|rest| rest.split_whitespace().next());
        // The report has a line of the step time.
        let step = step.and_then(|step| step.parse::<u64>().ok());
        memory.extend(step.and_then(|step| Some((step, anonymous_bytes(child.id())?))));
    }
    assert!(child.wait().unwrap().success());
    // The first and the last tenth begin and end the run.
    let between = |(step, _): &&(u64, u64)| (steps / 10..steps).contains(step);
    let memory: Vec<(u64, u64)> = memory.iter().filter(between).copied().collect();
    // The run may have ended before its last lines are read.
    assert!(memory.len() > 2 * GROWING_TENTHS_MAX, "{memory:?}");
    let grows = |pair: &&[(u64, u64)]| pair[1].1 > pair[0].1 + steps / 10 * LIST_BYTES;
    let growing = memory.windows(2).filter(grows).count();
    assert!(growing <= GROWING_TENTHS_MAX, "bytes after steps: {memory:?}");
}

/// Memory of a process without its files; `None` where it has ended.
fn anonymous_bytes(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib * 1024)
}

#[test]
fn memory_is_flat_over_the_steps_of_a_run() {
    check_memory_is_flat(40_000);
}

#[test]
#[ignore = "second level: half a minute"]
fn memory_is_flat_over_hundreds_of_thousands_of_steps() {
    check_memory_is_flat(400_000);
}
