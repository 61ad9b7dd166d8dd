//! `narrows calibrate`: what it writes can be used, and what it cannot do it says.

use std::fs;

use serde_json::Value;

use super::{json, narrows, refusal, stdout};

/// One plan on one device: as little as can be measured.
const LEAST: &str = "calibrate --quick --threads 1 --devices 1";

#[test]
fn what_is_measured_is_a_profile_that_plans() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.json");
    let file = path.to_str().unwrap();
    let found = json(&format!("{LEAST} --output {file}"));
    assert_eq!(found["output"], file);
    let coverage = found["coverage"].as_array().unwrap();
    let measured = |index: usize| coverage[index]["measured"].as_u64().unwrap();
    assert!(measured(0) > 10 && measured(1) >= 2 && measured(2) > 10, "{coverage:?}");
    assert_eq!(measured(3), 0, "one device has no collectives");

    let text = fs::read_to_string(&path).unwrap();
    let profile: Value = serde_json::from_str(&text).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema profile")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(&profile).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    for group in ["device", "gemm", "attention", "passes", "measured"] {
        let provenance = &profile[group]["provenance"];
        assert_eq!(provenance["kind"], "measured", "{group}");
        assert!(provenance["source"].as_str().unwrap().contains("narrows calibrate --quick"));
    }
    assert_eq!(profile["links"]["intra_node"]["provenance"]["kind"], "assumed");

    let small = "--model cola-tiny --global-batch 2 --sequence-length 16";
    let planned = json(&format!("plan {small} --hardware {file}"));
    let step = planned["prediction"]["step_time_s"].as_f64().unwrap();
    assert!((1e-4..10.0).contains(&step), "{step}");
    let ran = json(&format!("run {small} --hardware {file} --threads 1 --steps 2"));
    assert_eq!(ran["prediction"]["step_time_s"], planned["prediction"]["step_time_s"]);
}

#[test]
fn what_cannot_be_done_is_said_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    for (arguments, part) in [
        (format!("calibrate --output {here}/missing/p.json"), "p.json: cannot be written"),
        (format!("calibrate --output {here}"), "cannot be written"),
        ("calibrate --threads 0".into(), "--threads"),
        ("calibrate --threads 100000".into(), "--threads: 100000 threads would take turns"),
        ("calibrate --threads 1 --devices 2".into(), "--devices: 2 devices would take turns"),
        ("calibrate --output - --format json".into(), "--output: the profile and the JSON"),
        ("calibrate --model nowhere.json".into(), "nowhere.json: cannot be read"),
    ] {
        let message = refusal(&arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}

#[test]
fn a_run_keeps_what_it_measured_where_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let line = "run --global-batch 2 --sequence-length 16 --threads 1 --steps 1";
    let run = |cache: &std::path::Path| {
        let output = narrows(line).env("XDG_CACHE_HOME", cache).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let first = run(folder.path());
    assert!(first.contains("Measuring this machine") && first.contains("Kept in"), "{first}");
    assert_eq!(run(folder.path()), "", "it is measured once");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(run(&file).contains("not kept for the next run"), "a cache that is no folder");
}
