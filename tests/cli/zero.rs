//! `--zero` and `--shard-size`: planned, written, proven, and executed.

use super::{failure, json, stdout};

/// Two microbatches for each of four replicas.
const REQUEST: &str = "--model cola-tiny --devices 4 --global-batch 8 --micro-batch 1 --sequence-length 128 \
                       --tensor 1 --pipeline 1";

#[test]
fn plans_with_shard_groups_are_written_and_proven() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = folder.path().join("plan.json");
    let plan = plan.display();
    let planned = json(&format!("plan {REQUEST} --zero 3 --shard-size 2 --output {plan}"));
    let decisions = &planned["decisions"];
    assert_eq!((&decisions["zero"], &decisions["shard_size"]), (&"three".into(), &2.into()));
    let text = stdout(&format!("cost {plan}"));
    assert!(text.contains("data 4, ZeRO-3 in groups of 2"), "{text}");
    assert!(
        text.contains("weights are gathered and gradients reduced during the passes"),
        "{text}"
    );
    let numeric = json(&format!("check {plan} --numeric"));
    assert_eq!(numeric["numeric"]["equal"], true, "{numeric}");
}

#[test]
fn every_stage_trains_alike() {
    let folder = tempfile::tempdir().expect("a folder");
    let loss_after = |flags: &str| {
        let plan = folder.path().join("plan.json");
        let plan = plan.display();
        let short = REQUEST.replace("--sequence-length 128", "--sequence-length 32");
        stdout(&format!("plan {short} --hardware cpu-local {flags} --output {plan}"));
        let run = json(&format!("run {plan} --steps 3 --seed 3 --threads 1"));
        run["loss_last"].as_f64().expect("a loss")
    };
    let expected = loss_after("--zero 0");
    for flags in ["--zero 1 --shard-size 2", "--zero 2", "--zero 3", "--zero 3 --shard-size 2"] {
        let loss = loss_after(flags);
        assert!((loss / expected - 1.0).abs() < 1e-5, "{flags}: {loss}, expected {expected}");
    }
}

/// Sharding over fewer replicas needs more memory and fewer bytes over slow links.
#[test]
fn a_plan_is_priced_with_other_shard_groups() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = folder.path().join("plan.json");
    let plan = plan.display();
    stdout(&format!("plan {REQUEST} --zero 3 --shard-size 2 --output {plan}"));
    let memory = |flags: &str| {
        let priced = json(&format!("cost {plan} {flags}"));
        priced["prediction"]["peak_memory_bytes"][0].as_u64().expect("bytes")
    };
    let (all, groups, none) = (memory("--shard-size 4"), memory(""), memory("--zero 0"));
    assert!(all < groups && groups < none, "{all}, {groups}, {none}");
}

#[test]
fn shard_groups_divide_the_replicas() {
    let message = failure("plan --model cola-tiny --devices 4 --data-parallel 4 --shard-size 3", 2);
    assert!(message.contains("4 replicas do not divide into groups of 3"), "{message}");
    assert!(message.contains("a divisor of the data axis"), "{message}");
    for (flags, expected) in [
        ("--shard-size 3", "4 devices do not divide into groups of 3"),
        ("--zero 3 --shard-size 1", "a shard group needs at least two replicas"),
        ("--zero 0 --shard-size 2", "without ZeRO nothing is sharded over replicas"),
    ] {
        let message = failure(&format!("plan --model cola-tiny --devices 4 {flags}"), 2);
        assert!(message.contains(expected), "{message}");
    }
}
