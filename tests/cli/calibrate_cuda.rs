//! `narrows calibrate --backend cuda`, on the stand-ins of CUDA's libraries: every instruction of every device is
//! measured, and what is written is a profile. What times the stand-ins make up means nothing.
#![cfg(unix)]

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::cluster::{Processes, done, ends, said};
use super::cuda::{alone, environment, libraries};
use super::{json, narrows, stdout};

/// As little as can be measured.
const LEAST: &str = "calibrate --backend cuda --quick --global-batch 2 --sequence-length 16";

/// Which small steps plans are made for afterwards.
const SMALL: &str = "--model cola-tiny --global-batch 2 --sequence-length 16";

fn is_a_profile(path: &Path) -> Value {
    let profile: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema profile")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(&profile).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(profile["precision"], "mixed-bf16");
    let measured = &profile["measured"];
    assert!(measured.get("threads").is_none(), "GPUs share nothing");
    assert!(measured["machine"].as_str().unwrap().contains("driver"), "{}", measured["machine"]);
    for group in ["gemm", "attention", "passes", "measured"] {
        let provenance = &profile[group]["provenance"];
        assert_eq!(provenance["kind"], "measured", "{group}");
        let source = provenance["source"].as_str().unwrap();
        assert!(source.contains("narrows calibrate --quick --backend cuda"), "{source}");
    }
    // Nobody measured what lies between launches, and no preset is of a stand-in.
    for executor in ["captured", "eager"] {
        let provenance = &profile["executors"][executor]["provenance"];
        assert_eq!(provenance["kind"], "derived");
        assert!(profile["executors"][executor]["launch_gap_s"].as_f64().unwrap() >= 0.0);
    }
    assert_eq!(profile["device"]["provenance"]["kind"], "assumed");
    profile
}

/// Kinds of kernels among what was measured on a mesh of so many devices.
fn kinds(profile: &Value, devices: u64) -> Vec<String> {
    let points = profile["measured"]["points"].as_array().unwrap();
    let of = |point: &Value| {
        (point["devices"] == devices)
            .then(|| point["kernel"].as_object().unwrap().keys().next().unwrap().clone())
    };
    let mut kinds: Vec<String> = points.iter().filter_map(of).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// One GPU: the profile is kept, doctor finds it, and runs predict with it.
#[test]
fn a_gpu_is_measured_and_runs_predict_with_it() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let cache = run.at("cache");
    let here = |line: &str| {
        let mut command = narrows(line);
        command.envs(environment(&libraries, &run, 1)).env("XDG_CACHE_HOME", &cache);
        let output = command.assert().success();
        let output = output.get_output();
        [&output.stdout, &output.stderr].map(|text| String::from_utf8(text.clone()).unwrap())
    };
    let small = format!("run --backend cuda {SMALL} --steps 1");
    let [_, said] = here(&small);
    assert!(said.contains("Predicting with the preset `"), "{said}");
    assert!(said.contains("narrows calibrate --backend cuda"), "{said}");
    let [doctor, _] = here("doctor");
    assert!(doctor.contains("not measured yet: `narrows calibrate --backend cuda`"), "{doctor}");

    let [found, _] = here(&format!("{LEAST} --format json"));
    let found: Value = serde_json::from_str(&found).unwrap();
    let path = Path::new(found["output"].as_str().unwrap());
    assert!(path.starts_with(&cache) && path.to_str().unwrap().ends_with("-quick.json"));
    let profile = is_a_profile(path);
    assert_eq!(kinds(&profile, 1), ["attention", "gemm", "pass"]);
    assert_ne!(profile["links"]["intra_node"]["provenance"]["kind"], "measured");

    let [doctor, _] = here("doctor --format json");
    let doctor: Value = serde_json::from_str(&doctor).unwrap();
    assert_eq!(doctor["gpus"]["profile"], found["output"]);
    let plan = run.at("plan.json");
    let [answer, said] = here(&format!("{small} --output {} --format json", plan.display()));
    assert!(!said.contains("Predicting with"), "{said}");
    let planned: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    assert_eq!(planned["hardware"]["name"], profile["name"]);
    let file = path.display();
    let priced = json(&format!("plan {SMALL} --hardware {file}"));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(priced["prediction"]["step_time_s"], answer["prediction"]["step_time_s"]);
    // The plan names what is kept, and is priced with it: no word of another.
    let [_, said] = here(&format!("cost {}", plan.display()));
    assert!(!said.contains("was made for"), "{said}");
}

/// Two processes, a GPU each: collectives and transfers are measured too, and the first writes and speaks.
#[test]
fn gpus_are_measured_together() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let path = run.at("profile.json");
    let arguments = format!("{LEAST} --output {} --format json", path.display());
    let begin = |rank| {
        let told = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, &arguments, told)
    };
    let outputs = done((0..2).map(begin).collect());
    assert!(!outputs[0].stdout.is_empty() && outputs[1].stdout.is_empty(), "{outputs:#?}");
    let found: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(found["output"].as_str(), path.to_str());
    let profile = is_a_profile(&path);
    assert_eq!(kinds(&profile, 1), ["attention", "gemm", "pass"]);
    assert_eq!(kinds(&profile, 2), ["collective", "transfer"]);
    assert_eq!(profile["links"]["intra_node"]["provenance"]["kind"], "measured");
    assert_eq!(profile["links"]["inter_node"]["provenance"]["kind"], "assumed");
    assert_eq!(profile["links"]["devices_per_node"], 2);
    let file = path.display();
    let planned = json(&format!("plan {SMALL} --devices 2 --tensor 2 --hardware {file}"));
    assert!(planned["prediction"]["step_time_s"].as_f64().unwrap() > 0.0);
}

/// Nobody measures for nothing, and nobody waits for who cannot.
#[test]
fn processes_that_cannot_end_together() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let start = |rank: usize, arguments: &str| {
        let told = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, arguments, told)
    };
    let nowhere = format!("{LEAST} --output {}/missing/p.json", run.at("").display());
    let outputs = ends(vec![start(0, &nowhere), start(1, &nowhere)]);
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(2), Some(1)], "{outputs:#?}");
    let [first, second] = [0, 1].map(|rank: usize| said(&outputs[rank]));
    assert!(first.contains("process 0 of 2") && first.contains("cannot be written"), "{first}");
    assert!(second.contains("process 0 aborted the run: cannot be written"), "{second}");
    let outputs = ends(vec![start(0, LEAST), start(1, &LEAST.replace("16", "8"))]);
    for output in outputs {
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("for another run than process 0"), "{}", said(&output));
    }
}

/// A machine without GPUs says so, as a run does.
#[test]
fn without_a_gpu_nothing_is_measured() {
    let doctor: Value = serde_json::from_str(&stdout("doctor --format json")).unwrap();
    if doctor["backends"]["cuda"]["usable"] == true {
        println!("skipped: this machine has a GPU");
        return;
    }
    assert_eq!(doctor["gpus"], Value::Null);
    let assert = narrows(LEAST).assert().code(1);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.starts_with("error: ") && message.contains("narrows doctor"), "{message}");
}

/// A profile of GPUs says so where it is run on others.
#[test]
fn other_gpus_are_warned_of() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let path = run.at("profile.json");
    alone(&libraries, &run, &format!("{LEAST} --output {}", path.display()));
    let warned = || {
        let line = format!("run --backend cuda {SMALL} --steps 1 --hardware {}", path.display());
        let output = narrows(&line).envs(environment(&libraries, &run, 1)).assert().success();
        let said = String::from_utf8(output.get_output().stderr.clone()).unwrap();
        said.contains("was measured on other GPUs")
    };
    assert!(!warned());
    let mut profile = is_a_profile(&path);
    profile["measured"]["machine"] = "an abacus, driver 13.0".into();
    fs::write(&path, profile.to_string()).unwrap();
    assert!(warned());
}
