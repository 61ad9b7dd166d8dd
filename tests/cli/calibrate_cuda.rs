//! `narrows calibrate --backend cuda` on the fake CUDA libraries: every instruction of every device is measured, and the
//! result is a valid profile. The measured times are meaningless.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::cluster::{Processes, stderr, wait_all, wait_for_success};
use super::cuda::{environment, libraries};
use super::{json, narrows, stdout};

/// The smallest measurement.
const LEAST: &str =
    "calibrate --backend cuda --quick --model cola-tiny --global-batch 2 --sequence-length 16";

/// A small step for plans on the measured profile.
const SMALL: &str = "--model cola-tiny --global-batch 2 --sequence-length 16";

/// A fake GPU that was measured by [`LEAST`].
struct MeasuredGpu {
    run: Processes,
    libraries: PathBuf,
    /// The JSON answer of the calibration.
    answer: Value,
}

impl MeasuredGpu {
    /// `None`, with a printed reason, without the fake CUDA libraries.
    fn measure() -> Option<MeasuredGpu> {
        let (libraries, run) = (libraries()?, Processes::new(1));
        let [answer, _] = on_gpu(&libraries, &run, "cache", &format!("{LEAST} --format json"));
        let answer = serde_json::from_str(&answer).unwrap();
        Some(MeasuredGpu { run, libraries, answer })
    }

    /// The file of the profile in the cache.
    fn profile(&self) -> &Path {
        Path::new(self.answer["output"].as_str().unwrap())
    }

    /// Standard output and standard error of a command that finds the profile in its cache.
    fn narrows(&self, line: &str) -> [String; 2] {
        on_gpu(&self.libraries, &self.run, "cache", line)
    }
}

/// Standard output and standard error of a command on one fake GPU, with a cache folder of this name.
fn on_gpu(libraries: &Path, run: &Processes, cache: &str, line: &str) -> [String; 2] {
    let mut command = narrows(line);
    command.envs(environment(libraries, run, 1)).env("XDG_CACHE_HOME", run.at(cache));
    let output = command.assert().success();
    let output = output.get_output();
    [&output.stdout, &output.stderr].map(|text| String::from_utf8(text.clone()).unwrap())
}

/// Reads a profile and checks it against the schema, and the sources of its parts.
fn valid_profile(path: &Path) -> Value {
    let profile: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema profile")).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator.iter_errors(&profile).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(profile["precision"], "mixed-bf16");
    let measured = &profile["measured"];
    assert!(measured.get("threads").is_none(), "a GPU profile has CPU threads");
    assert!(measured["machine"].as_str().unwrap().contains("driver"), "{}", measured["machine"]);
    for group in ["gemm", "attention", "passes", "measured"] {
        let provenance = &profile[group]["provenance"];
        assert_eq!(provenance["kind"], "measured", "{group}");
        let source = provenance["source"].as_str().unwrap();
        assert!(
            source.contains("narrows calibrate --quick --model cola-tiny --backend cuda"),
            "{source}"
        );
    }
    // Launch gaps are derived, and no preset is of a fake GPU.
    for executor in ["captured", "eager"] {
        let provenance = &profile["executors"][executor]["provenance"];
        assert_eq!(provenance["kind"], "derived");
        assert!(profile["executors"][executor]["launch_gap_s"].as_f64().unwrap() >= 0.0);
    }
    assert_eq!(profile["device"]["provenance"]["kind"], "assumed");
    profile
}

/// Kinds of the kernels that were measured on a number of devices.
fn kinds(profile: &Value, devices: u64) -> Vec<String> {
    let points = profile["measured"]["points"].as_array().unwrap();
    let kind = |point: &Value| point["kernel"].as_object().unwrap().keys().next().unwrap().clone();
    let mut kinds: Vec<String> =
        points.iter().filter(|point| point["devices"] == devices).map(kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

#[test]
fn a_gpu_is_measured() {
    let Some(measured) = MeasuredGpu::measure() else { return };
    runs_predict_with_the_cached_profile(&measured);
    runs_warn_of_a_profile_of_other_gpus(&measured);
}

/// The profile is cached, doctor finds it, and runs predict with it.
fn runs_predict_with_the_cached_profile(measured: &MeasuredGpu) {
    let small = format!("run --backend cuda {SMALL} --steps 1");
    let unmeasured = |line| on_gpu(&measured.libraries, &measured.run, "unmeasured", line);
    let [_, messages] = unmeasured(&small);
    assert!(messages.contains("Predicting with the preset `"), "{messages}");
    assert!(messages.contains("narrows calibrate --backend cuda"), "{messages}");
    let [doctor, _] = unmeasured("doctor");
    assert!(doctor.contains("not measured yet: `narrows calibrate --backend cuda`"), "{doctor}");

    let path = measured.profile();
    assert!(path.starts_with(measured.run.at("cache")));
    assert!(path.to_str().unwrap().ends_with("-quick.json"));
    let profile = valid_profile(path);
    assert_eq!(kinds(&profile, 1), ["attention", "gemm", "pass"]);
    assert_ne!(profile["links"]["intra_node"]["provenance"]["kind"], "measured");

    let [doctor, _] = measured.narrows("doctor --format json");
    let doctor: Value = serde_json::from_str(&doctor).unwrap();
    assert_eq!(doctor["gpus"]["profile"], measured.answer["output"]);
    let plan = measured.run.at("plan.json");
    let line = format!("{small} --output {} --format json", plan.display());
    let [answer, messages] = measured.narrows(&line);
    assert!(!messages.contains("Predicting with"), "{messages}");
    let planned: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    assert_eq!(planned["hardware"]["name"], profile["name"]);
    let priced = json(&format!("plan {SMALL} --hardware {}", path.display()));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(priced["prediction"]["step_time_s"], answer["prediction"]["step_time_s"]);
    // The plan names the cached profile and is priced with it, without a warning.
    let [_, messages] = measured.narrows(&format!("cost {}", plan.display()));
    assert!(!messages.contains("was made for"), "{messages}");
}

/// Two processes with a GPU each: collectives and transfers are measured too, and the first process writes and prints.
#[test]
#[ignore = "second level: measures ten plans in two processes"]
fn gpus_are_measured_together() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let path = run.at("profile.json");
    let arguments = format!("{LEAST} --output {} --format json", path.display());
    let begin = |rank| {
        let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, &arguments, environment)
    };
    let outputs = wait_for_success((0..2).map(begin).collect());
    assert!(!outputs[0].stdout.is_empty() && outputs[1].stdout.is_empty(), "{outputs:#?}");
    let answer: Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(answer["output"].as_str(), path.to_str());
    let profile = valid_profile(&path);
    assert_eq!(kinds(&profile, 1), ["attention", "gemm", "pass"]);
    assert_eq!(kinds(&profile, 2), ["collective", "transfer"]);
    assert_eq!(profile["links"]["intra_node"]["provenance"]["kind"], "measured");
    assert_eq!(profile["links"]["inter_node"]["provenance"]["kind"], "assumed");
    assert_eq!(profile["links"]["devices_per_node"], 2);
    let file = path.display();
    let planned = json(&format!("plan {SMALL} --devices 2 --tensor 2 --hardware {file}"));
    assert!(planned["prediction"]["step_time_s"].as_f64().unwrap() > 0.0);
}

/// If one process cannot complete a measurement, all processes end before it.
#[test]
fn processes_that_cannot_measure_together_end() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let start = |rank: usize, arguments: &str| {
        let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, arguments, environment)
    };
    let nowhere = format!("{LEAST} --output {}/missing/p.json", run.at("").display());
    let outputs = wait_all(vec![start(0, &nowhere), start(1, &nowhere)]);
    let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
    assert_eq!(codes, [Some(2), Some(1)], "{outputs:#?}");
    let [first, second] = [0, 1].map(|rank: usize| stderr(&outputs[rank]));
    assert!(first.contains("process 0 of 2") && first.contains("cannot be written"), "{first}");
    assert!(second.contains("missing/p.json: cannot be written"), "{second}");
    let outputs = wait_all(vec![start(0, LEAST), start(1, &LEAST.replace("16", "8"))]);
    for output in outputs {
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("for another run than process 0"), "{}", stderr(&output));
    }
}

#[test]
fn a_calibration_without_a_gpu_fails_with_a_hint() {
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

fn runs_warn_of_a_profile_of_other_gpus(measured: &MeasuredGpu) {
    let run_warns_of = |profile: &Path| {
        let line = format!("run --backend cuda {SMALL} --steps 1 --hardware {}", profile.display());
        let [_, messages] = on_gpu(&measured.libraries, &measured.run, "other", &line);
        messages.contains("was measured on other GPUs")
    };
    assert!(!run_warns_of(measured.profile()));
    let mut profile = valid_profile(measured.profile());
    profile["measured"]["machine"] = "an abacus, driver 13.0".into();
    let path = measured.run.at("other.json");
    fs::write(&path, profile.to_string()).unwrap();
    assert!(run_warns_of(&path));
}
