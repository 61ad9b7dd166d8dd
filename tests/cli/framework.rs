//! `cost --framework`: steps of full-rank models under other frameworks.

use std::fs;

use super::{failure, json, stdout};

const STEP: &str = "--model llama-1b --hardware a100-80gb-8 --devices 16 --tensor 2 --pipeline 2 --global-batch 32 \
                    --micro-batch 2 --sequence-length 2048";

/// The step that the flags of [`STEP`] describe, as a measurement.
const MEASUREMENT: &str = r#"{"format": "narrows-measurements/1", "name": "mine", "description": "",
  "sources": {"s": {"citation": "none", "conditions": ""}},
  "measurements": [{"name": "step", "table": "steps", "source": "s", "hardware": "a100-80gb-8", "executor": "eager",
    "mesh": {"tensor": 2, "pipeline": 2, "data": 4}, "value": 1, "unit": "s",
    "measured": {"step": {"model": {"decoder": {"layers": 24, "hidden": 2048, "heads": 32, "kv_heads": 32, "d_ff": 5472,
      "mlp": "gated", "vocabulary": 32000, "embedding": "tied"}}, "framework": "nanotron", "zero": "one",
      "workload": {"global_batch": 32, "sequence_length": 2048, "micro_batch": 2}, "strategy": "megatron-sp",
      "recompute": "none"}}}]}"#;

fn step_s(flags: &str) -> f64 {
    let answer = json(&format!("cost {STEP} {flags}"));
    answer["prediction"]["step_time_s"].as_f64().expect("a time")
}

#[test]
fn the_price_of_flags_is_that_of_the_measurement_they_describe() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("mine.json");
    fs::write(&file, MEASUREMENT).expect("a file");
    let validated = json(&format!("validate --measurements {}", file.display()));
    let answer = json(&format!("cost {STEP} --framework nanotron"));
    let (prediction, figure) = (&answer["prediction"], &validated["figures"][0]);
    assert_eq!(prediction["step_time_s"], figure["predicted_s"]);
    assert_eq!(prediction["step_time_interval_s"], figure["interval_s"]);
    assert_eq!(
        (&answer["step"]["zero"], &answer["step"]["sequence_parallel"]),
        (&"one".into(), &true.into())
    );
    assert_eq!(answer["step"]["mesh"]["data"], 4);
    for source in ["values", "interval"] {
        assert!(!answer["fitted"][source]["source"].as_str().expect("a source").is_empty());
    }
    let text = stdout(&format!("cost {STEP} --framework nanotron --tokens 1e9"));
    for part in ["llama-1b under nanotron", "90 % interval", "Uncertainty", "device-hours"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Models and strategies without a price are refused, and `auto` is the framework's default.
#[test]
fn strategies_and_blocks_without_a_price_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("m.json");
    let cost = format!("cost {STEP} --framework torchtitan").replace("llama-1b", "MODEL");
    for (field, part) in [
        (r#""attention": {"sliding_window": 8}"#, "has a sliding window"),
        (r#""qk_norm": true"#, "has norms of the heads of q and k"),
    ] {
        let model = format!(
            r#"{{"format": "narrows-model/1", "hidden": 256, "vocab": 512, "heads": 4, "d_ff": 688,
            "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": "dense", {field}}}}}}}"#
        );
        fs::write(&file, model).expect("a file");
        let message = failure(&cost.replace("MODEL", &file.display().to_string()), 2);
        assert!(message.contains(part), "{message}");
    }
    let of = |flags: &str| step_s(&format!("--framework torchtitan {flags}"));
    assert_eq!(of("--strategy auto"), of(""));
    let message = failure(&format!("cost {STEP} --framework torchtitan --strategy btp"), 2);
    assert!(message.contains("--strategy: btp is for plans of narrows"), "{message}");
}

#[test]
fn recomputation_and_chunks_are_those_of_the_flags() {
    let of = |flags: &str| step_s(&format!("--framework torchtitan {flags}"));
    let [none, attention, layers, block] = [
        "--recompute none",
        "--selective-recompute attention",
        "--selective-recompute layers",
        "--recompute block",
    ]
    .map(of);
    assert!(
        none < attention && attention < layers && layers < block,
        "{none} {attention} {layers} {block}"
    );
    assert_eq!(of(""), none);
    assert!(of("--chunks 2") < none, "interleaved chunks shorten the bubble");
    assert!(of("--zero 0") != none && of("--strategy fullrank-tp") != none);
}

/// The framework `narrows` is this program, whose steps are those of plans.
#[test]
fn the_framework_narrows_is_a_plan() {
    let flags = "cost --model cola-tiny --devices 2 --global-batch 4";
    let [own, default] = ["--framework narrows", ""].map(|framework| {
        let answer = json(&format!("{flags} {framework}"));
        [answer["decisions"].clone(), answer["prediction"].clone()]
    });
    assert_eq!(own, default);
}

#[test]
fn what_a_framework_cannot_do_is_refused() {
    for (arguments, part) in [
        ("plan --framework fsdp --model llama-7b", "narrows cost --framework fsdp"),
        ("explain --framework fsdp --model llama-7b", "narrows cost --framework fsdp"),
        ("whatif --framework fsdp --model llama-7b --list", "narrows cost --framework fsdp"),
        ("sensitivity --framework fsdp --model llama-7b", "narrows cost --framework fsdp"),
        (
            "cost --framework megatron --model llama-7b --devices 8 --tensor 8 --chunks 2",
            "--chunks: 2 chunks of a stage, and the pipeline axis is 1",
        ),
        (
            "cost --framework megatron --model llama-7b --devices 8 --pipeline 2 --chunks 3 --micro-batch 1",
            "layers: 32 is not divisible by 6 (stages, or all their chunks)\n  hint: --pipeline times --chunks has to divide",
        ),
        ("cost --framework fspd --model llama-7b", "fsdp"),
        ("cost --framework fsdp --model cola-7b", "llama-7b"),
        (
            "cost --framework fsdp --model llama-7b --hardware cpu-local",
            "--hardware: `fsdp` is priced in 16 bits",
        ),
        (
            "cost --framework fsdp --model llama-7b --overlap on",
            "--overlap: is for plans of narrows",
        ),
        ("cost plan.json --framework fsdp --model llama-7b", "PLAN: is for plans of narrows"),
        ("cost --framework fsdp --model llama-7b --recompute auto", "--selective-recompute"),
        (
            "cost --framework fsdp --model llama-7b --recompute block --selective-recompute ops",
            "one of the two",
        ),
        (
            "cost --framework fsdp --model llama-7b --devices 8 --micro-batch 3",
            "--global-batch: 8 sequences",
        ),
        (
            "cost --framework fsdp --model llama-7b --devices 3 --pipeline 3",
            "layers: 32 is not divisible by 3",
        ),
        (
            "cost --framework fsdp --model llama-7b --devices 4 --data-parallel 2",
            "--devices: 4 devices are not",
        ),
        ("cost --framework narrows --model llama-7b --chunks 2", "--schedule interleaved"),
        ("cost --model llama-7b --chunks 2", "--framework"),
    ] {
        let message = failure(arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}
