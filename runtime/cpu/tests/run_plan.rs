//! The example runs a plan without the planner and the cost model.

use std::collections::BTreeSet;
use std::process::Command;

#[path = "../examples/run_plan.rs"]
#[allow(dead_code, reason = "`main` reads the command line")]
mod example;

/// Output of `narrows plan --model cola-tiny --hardware cpu-local --devices 4 --tensor 2 --pipeline 2
/// --global-batch 4 --micro-batch 1 --sequence-length 16 --weights sharded`.
const PLAN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/support/data/tiny.json");

#[test]
fn the_loss_of_the_example_falls() {
    let losses = example::run(PLAN, "cola-tiny", 8).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(losses.len(), 8);
    assert!((losses[0] - 256.0_f64.ln()).abs() < 0.5, "{losses:?}");
    assert!(losses[7] < losses[0] - 0.5, "{losses:?}");
}

/// The crate executes plans without the planner, a solver or the cost model.
#[test]
fn the_dependencies_include_no_planner_and_no_solver() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--offline", "--package", "narrows-cpu", "--edges", "normal,build"])
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("text");
    let packages: BTreeSet<&str> =
        lines.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(packages.contains("narrows-plan") && packages.contains("gemm"), "{packages:?}");
    for package in
        ["narrows", "narrows-planner", "narrows-cost-model", "good_lp", "microlp", "highs"]
    {
        assert!(!packages.contains(package), "{package} is among {packages:?}");
    }
}
