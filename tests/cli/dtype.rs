//! `--dtype`: GEMMs of the CPU backend in bf16.

use narrows_cpu::kernels::supports_bf16;
use serde_json::Value;

use super::{failure, json, narrows, stdout};

const RUN: &str = "run --hardware cpu-local --threads 1 --global-batch 4 --sequence-length 32";

#[test]
fn the_flag_is_of_the_cpu_backend() {
    let message = failure(&format!("{RUN} --backend null --dtype bf16"), 2);
    assert!(message.contains("--dtype: the null backend computes nothing"), "{message}");
}

#[test]
fn a_processor_without_bf16_refuses_it() {
    if supports_bf16() {
        eprintln!("skipped: this processor has AVX512_BF16");
        return;
    }
    let message = failure(&format!("{RUN} --steps 1 --dtype bf16"), 2);
    assert!(message.contains("it does not have AVX512_BF16\n  hint: --dtype f32"), "{message}");
}

#[test]
fn a_run_in_bf16_learns_as_in_f32_and_resumes_in_bf16() {
    if !supports_bf16() {
        eprintln!("skipped: this processor does not have AVX512_BF16");
        return;
    }
    let run = |flags: &str| json(&format!("{RUN} --steps 20 {flags}"));
    let (exact, rounded) = (run(""), run("--dtype bf16"));
    assert_eq!((&exact["dtype"], &rounded["dtype"]), (&"f32".into(), &"bf16".into()));
    for key in ["loss_first", "loss_last"] {
        let [exact, rounded] = [&exact, &rounded].map(|report| report[key].as_f64().unwrap());
        let difference = (rounded / exact - 1.0).abs();
        assert!(difference > 0.0 && difference < 5e-3, "{key}: {exact} and {rounded}");
    }

    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("checkpoints");
    let flags = format!("--decay-steps 20 --checkpoint-dir {}", dir.display());
    let first = format!("{RUN} {flags} --steps 10");
    let header = stdout(&format!("{first} --dtype bf16"));
    assert!(header.contains("The prediction has GEMMs in f32"), "{header}");
    let state = std::fs::read_to_string(dir.join("step-00000010/state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!(state["gemm_dtype"], "bf16");
    let resumed = run(&format!("{flags} --resume"));
    assert_eq!((&resumed["dtype"], &resumed["loss_last"]), (&"bf16".into(), &rounded["loss_last"]));
    let command = format!("{RUN} {flags} --steps 21 --resume --dtype f32");
    let output = narrows(&command).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("--dtype is f32, and bf16 in "), "{message}");
}

/// A calibration measures the rate of GEMMs in bf16, so that a run in bf16 has a prediction of its own.
#[test]
fn a_measured_profile_has_prices_of_bf16() {
    if !supports_bf16() {
        eprintln!("skipped: this processor does not have AVX512_BF16");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("here.json");
    let file = file.display();
    let calibrate = format!("calibrate --quick --threads 1 --devices 1 --output {file}");
    narrows(&calibrate).env("XDG_CACHE_HOME", folder.path()).assert().success();
    let run = format!(
        "run --hardware {file} --threads 1 --model cola-60m --global-batch 2 --sequence-length 64 --steps 1"
    );
    let predicted = |dtype: &str| {
        let report = json(&format!("{run} --dtype {dtype}"));
        report["prediction"]["step_time_s"].as_f64().unwrap()
    };
    let (exact, rounded) = (predicted("f32"), predicted("bf16"));
    assert!(rounded > 0.0 && rounded != exact, "{rounded} and {exact}");
    assert!(!stdout(&format!("{run} --dtype bf16")).contains("have no price"));
}
