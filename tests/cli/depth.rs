//! Models of very many blocks.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::Command;

/// CPU time in which a deep model is lowered, placed and checked, or its plan is checked. Quadratic algorithms took minutes.
const CPU_SECONDS_MAX: f64 = 5.0;

/// Time limit of the search.
const SEARCH_SECONDS: f64 = 2.0;

/// CPU time of a command that succeeds, which other programs on the machine do not change as they change the time on the clock.
fn cpu_seconds(arguments: &str) -> f64 {
    let program = assert_cmd::cargo::cargo_bin!("narrows");
    let output = Command::new("sh")
        .args(["-c", "\"$0\" \"$@\" >/dev/null || exit; times"])
        .arg(program)
        .args(arguments.split_whitespace())
        .env("XDG_CACHE_HOME", crate::CACHE)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments}: {output:?}");
    // The second line has the user and the system time of the children: `0m1.370000s 0m0.030000s`.
    let times = String::from_utf8(output.stdout).unwrap();
    let seconds = |time: &str| {
        let (minutes, seconds) = time.trim_end_matches('s').split_once('m')?;
        Some(60.0 * minutes.parse::<f64>().ok()? + seconds.parse::<f64>().ok()?)
    };
    let children = times.lines().nth(1).unwrap_or_default().split_whitespace();
    children.map(|time| seconds(time).unwrap_or_else(|| panic!("{times}"))).sum()
}

/// Writes the config of a LLaMA-7B with this many blocks.
fn write_model(path: &Path, blocks: u64) {
    let config = fs::read_to_string("models/llama-7b.config.json").unwrap();
    let blocks = format!("\"num_hidden_layers\": {blocks}");
    let deep = config.replace("\"num_hidden_layers\": 32", &blocks);
    assert!(deep.contains(&blocks));
    fs::write(path, deep).unwrap();
}

/// Lowering, placement and check take near-linear time in the depth of a model.
#[test]
fn a_plan_of_4096_blocks_is_found_and_checked_soon() {
    let folder = tempfile::tempdir().unwrap();
    let [model, plan] = ["deep.json", "plan.json"].map(|name| folder.path().join(name));
    write_model(&model, 4096);
    let (model, plan) = (model.display(), plan.display());
    let limits = format!("--memory-limit none --time-limit {SEARCH_SECONDS}");
    let plan_s = cpu_seconds(&format!("plan --model {model} --devices 8 {limits} --output {plan}"));
    let cores = std::thread::available_parallelism().unwrap().get();
    let search_s = SEARCH_SECONDS * cores as f64;
    assert!(plan_s < search_s + CPU_SECONDS_MAX, "planned in {plan_s} s of {cores} cores");
    let check_s = cpu_seconds(&format!("check {plan} --model {model} --memory-limit none"));
    assert!(check_s < CPU_SECONDS_MAX, "checked in {check_s} s");
}
