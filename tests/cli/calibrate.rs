//! `narrows calibrate` on processors.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use narrows_cpu::kernels::supports_bf16;
use serde_json::Value;

use super::{failure, json, narrows, stdout};

/// The smallest measurement: plans on one device.
const LEAST: &str = "calibrate --quick --threads 1 --devices 1";

/// The answer of [`LEAST`] and the text of its profile, measured once for the tests that only read them. The answer names
/// the file in an empty cache, which is gone.
static MEASURED: LazyLock<(Value, String)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let mut command = narrows(&format!("{LEAST} --format json"));
    let output = command.env("XDG_CACHE_HOME", folder.path()).assert().success();
    let output = output.get_output();
    let messages = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!messages.contains("keeps predicting"), "the cache was empty: {messages}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let path = answer["output"].as_str().unwrap();
    assert!(path.starts_with(folder.path().to_str().unwrap()), "{path}");
    let text = fs::read_to_string(path).unwrap();
    (answer, text)
});

/// The correction of a measured kernel does not cancel a change of the hardware.
#[test]
fn whatif_changes_measured_hardware() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.json");
    fs::write(&path, &MEASURED.1).unwrap();
    let profile: Value = serde_json::from_str(&MEASURED.1).unwrap();
    let peak = profile["device"]["peak_flops_per_s"]["f32"].as_f64().unwrap();
    let answer = json(&format!(
        "whatif --model cola-tiny --hardware {} --devices 1 --global-batch 4 --sequence-length 256 \
         --sweep hardware.device.peak_flops_per_s.f32={peak},{}",
        path.display(),
        2.0 * peak
    ));
    let gemm_s = |index: usize| {
        answer["points"][index]["prediction"]["breakdown_s"]["gemm"].as_f64().unwrap()
    };
    let ratio = gemm_s(1) / gemm_s(0);
    assert!(ratio > 0.45 && ratio < 0.9, "{ratio} of the time at twice the rate");
}

#[test]
fn a_measured_profile_is_valid_and_plans() {
    let (answer, text) = &*MEASURED;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.json");
    let file = path.to_str().unwrap();
    fs::write(&path, text).unwrap();
    let coverage = answer["coverage"].as_array().unwrap();
    let measured = |index: usize| coverage[index]["measured"].as_u64().unwrap();
    assert!(measured(0) > 10 && measured(1) >= 2 && measured(2) > 10, "{coverage:?}");
    assert_eq!(measured(3), 0, "one device has no collectives");
    let kernels = answer["kernels"].as_array().unwrap();
    let total: u64 = (0..4).map(measured).sum();
    assert_eq!(kernels.len() as u64, total);
    let peak = coverage[0]["flops_per_s"][1].as_f64().unwrap();
    for kernel in kernels {
        let flops = kernel["flops_per_s"].as_f64();
        let bytes = kernel["bytes_per_s"].as_f64();
        assert_ne!(flops.is_some(), bytes.is_some(), "{kernel}");
        assert!(flops.or(bytes).is_some_and(|rate| rate > 0.0), "{kernel}");
        let is_gemm = kernel["kernel"].as_str().unwrap().starts_with("GEMM");
        assert!(!is_gemm || flops.unwrap() <= peak, "{kernel}");
    }

    let profile: Value = serde_json::from_str(text).unwrap();
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
    // Values computed from measurements are derived, and unmeasured parts are named.
    let gap = &profile["executors"]["captured"]["provenance"];
    assert_eq!(gap["kind"], "derived");
    assert!(gap["source"].as_str().unwrap().contains("half of the shortest fused op"), "{gap}");
    let unmeasured = profile["device"]["provenance"]["assumed"].to_string();
    assert!(unmeasured.contains("compute_units"), "{unmeasured}");
    assert_eq!(unmeasured.contains("peak_flops_per_s.bf16"), !supports_bf16(), "{unmeasured}");
    for group in ["gemm", "attention", "passes"] {
        let source = profile[group]["provenance"]["source"].as_str().unwrap();
        assert!(source.contains("fitted to"), "{group}: {source}");
    }

    let repeatability = &answer["repeatability"];
    for key in ["rounds_apart_median", "rounds_apart_90", "undisturbed"] {
        let in_profile = &profile["measured"]["repeatability"][key];
        assert!(in_profile.as_f64().is_some_and(|number| number >= 0.0), "{key}: {in_profile}");
        assert_eq!(&repeatability[key], in_profile);
    }
    assert_eq!(repeatability["rounds"], 2);
    // The answer has the provenance of every group of numbers.
    let mut groups = vec![];
    groups_with_provenance(&profile, "", &mut groups);
    let reported = answer["provenance"].as_array().unwrap().iter().map(|group| &group["field"]);
    assert_eq!(reported.collect::<Vec<_>>(), groups.iter().collect::<Vec<_>>());
    // The measured model is covered, and one of 40 billion parameters is not.
    let coverage = |model: &str| {
        let presets = answer["presets"].as_array().unwrap();
        presets.iter().find(|preset| preset["model"] == model).unwrap().clone()
    };
    let tiny = coverage("cola-tiny");
    assert!(tiny["measured_share"].as_f64().unwrap() > 0.9, "{tiny}");
    assert!(coverage("llama-40b")["measured_share"].as_f64().unwrap() < 0.5);

    let small = "--model cola-tiny --global-batch 2 --sequence-length 16";
    let planned = json(&format!("plan {small} --hardware {file}"));
    let step = planned["prediction"]["step_time_s"].as_f64().unwrap();
    assert!((1e-4..10.0).contains(&step), "{step}");
    let run = json(&format!("run {small} --hardware {file} --threads 1 --steps 2"));
    assert_eq!(run["prediction"]["step_time_s"], planned["prediction"]["step_time_s"]);
}

fn groups_with_provenance(value: &Value, path: &str, groups: &mut Vec<Value>) {
    let Value::Object(fields) = value else { return };
    if fields.contains_key("provenance") {
        groups.push(path.into());
    }
    for (key, child) in fields {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        groups_with_provenance(child, &path, groups);
    }
}

/// The smallest closed loop: three groups of two plans on one device.
#[test]
fn a_comparison_gives_the_interval_of_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.json");
    let file = path.to_str().unwrap();
    let answer = json(&format!("{LEAST} --compare --output {file}"));
    assert_eq!(answer["output"], file);
    let comparison = &answer["comparison"];
    let (plans, interval) = (comparison["plans"].as_array().unwrap(), &comparison["interval"]);
    assert_eq!((plans.len(), &interval["groups"]), (6, &3.into()));
    assert_eq!(comparison["memory_exact"], 6);
    let inside = |plan: &&Value| {
        let [low, high] = [0, 1].map(|end| plan["interval_s"][end].as_f64().unwrap());
        let time = |key: &str| plan[key].as_f64().unwrap();
        let predicted = time("predicted_step_time_s");
        assert!(low < predicted && predicted < high, "{plan}");
        (low..=high).contains(&time("measured_step_time_s"))
    };
    assert_eq!(interval["inside"], plans.iter().filter(inside).count());
    let profile: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let steps = &profile["measured"]["steps"];
    assert_eq!(steps["half_width_90"], interval["half_width_90"]);
    assert_eq!(steps["provenance"]["kind"], "measured");
    assert!(profile["executors"]["captured"].get("step_error").is_none());
    // Quick calibrations measure no recomputed additions. A plan that has one has a wider interval.
    let planned = json(&format!(
        "plan --model cola-tiny --global-batch 4 --sequence-length 128 --recompute none --hardware {file}"
    ));
    assert_eq!(planned["prediction"]["unmeasured"], serde_json::json!([]));
    let [low, high] =
        [0, 1].map(|end| planned["prediction"]["step_time_interval_s"][end].as_f64().unwrap());
    let half = (high / low).ln() / 2.0;
    let expected = steps["half_width_90"].as_f64().unwrap().ln_1p();
    assert!((half / expected - 1.0).abs() < 0.25, "{half} {expected}");
}

/// Plans and runs warn of profiles of a busy machine; runs also warn of profiles of another machine.
#[test]
fn profiles_of_busy_and_other_machines_cause_warnings() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here.json");
    let file = path.to_str().unwrap();
    let mut profile: Value = serde_json::from_str(&MEASURED.1).unwrap();
    let small = "--model cola-tiny --global-batch 2 --sequence-length 16";
    let run = format!("run {small} --hardware {file} --threads 1 --steps 1");
    let plan = format!("plan {small} --hardware {file}");
    let mut warnings = |undisturbed: f64, machine: Option<&str>, line: &str| {
        let repeatability = &mut profile["measured"]["repeatability"];
        repeatability["undisturbed"] = undisturbed.into();
        repeatability["rounds_apart_median"] = 0.0.into();
        if let Some(machine) = machine {
            profile["measured"]["machine"] = machine.into();
        }
        fs::write(&path, profile.to_string()).unwrap();
        let output = narrows(line).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let (busy, other) = ("was measured on a busy machine", "was measured on another machine");
    for line in [&plan, &run] {
        let message = warnings(1.0, None, line);
        assert!(!message.contains(busy) && !message.contains(other), "{line}: {message}");
        assert_eq!(warnings(0.4, None, line).matches(busy).count(), 1, "{line}");
    }
    let threads = warnings(1.0, None, &run.replace("--threads 1", "--threads 2"));
    assert!(cores() < 2 || threads.contains(other), "{threads}");
    assert!(warnings(1.0, Some("an abacus, 1 thread"), &run).contains(other));
    assert!(!warnings(1.0, None, &plan).contains(other), "plans may be for any machine");
    warnings(0.4, None, &plan);
    let answer = json(&plan);
    let warning = answer["prediction"]["warning"].as_str().unwrap();
    let consequence = "; its predictions may be wrong by more than their intervals say";
    assert!(warning.contains(busy) && warning.ends_with(consequence), "{warning}");
}

/// Measured profiles share a name, so a plan identifies its profile by fingerprint.
#[test]
fn repricing_a_plan_of_another_measurement_warns() {
    let folder = tempfile::tempdir().unwrap();
    let (path, plan) = (folder.path().join("there.json"), folder.path().join("plan.json"));
    let outputs = |line: &str| {
        let output = narrows(line).env("XDG_CACHE_HOME", folder.path()).assert().success();
        let output = output.get_output();
        [&output.stdout, &output.stderr].map(|text| String::from_utf8(text.clone()).unwrap())
    };
    let [answer, _] = outputs("calibrate --quick --devices 1 --format json");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let cached = fs::read_to_string(answer["output"].as_str().unwrap()).unwrap();
    let mut profile: Value = serde_json::from_str(&cached).unwrap();
    let warns = |profile: &std::path::Path| {
        outputs(&format!(
            "plan --model cola-tiny --hardware {} --output {}",
            profile.display(),
            plan.display()
        ));
        let [_, message] = outputs(&format!("cost {}", plan.display()));
        message.contains("another machine or measurement called `cpu-measured`")
    };
    fs::write(&path, profile.to_string()).unwrap();
    assert!(!warns(&path), "a copy of the cached profile causes a warning");
    let time = &mut profile["measured"]["points"][0]["time_s"];
    *time = (time.as_f64().unwrap() * 1.5).into();
    fs::write(&path, profile.to_string()).unwrap();
    assert!(warns(&path), "another measurement causes no warning");
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[test]
fn bad_flags_fail_before_the_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    for (arguments, part) in [
        (format!("calibrate --output {here}/missing/p.json"), "p.json: cannot be written"),
        (format!("calibrate --output {here}"), "cannot be written"),
        ("calibrate --threads 0".into(), "--threads"),
        ("calibrate --threads 100000".into(), "--threads: 100000 threads are too many"),
        ("calibrate --threads 1 --devices 2".into(), "--devices: 2 devices are too many"),
        ("calibrate --output - --format json".into(), "--output: the profile and the JSON"),
        ("calibrate --model nowhere.json".into(), "nowhere.json: cannot be read"),
        ("calibrate --global-batch 2".into(), "--global-batch: applies to --backend cuda only"),
        ("calibrate --backend cuda --threads 1".into(), "--threads: applies to --backend cpu only"),
        ("calibrate --backend cuda --devices 1".into(), "--devices: applies to --backend cpu only"),
    ] {
        let message = failure(&arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}

#[test]
fn an_unwritable_cache_fails_before_the_measurement() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let assert = narrows(LEAST).env("XDG_CACHE_HOME", &file).assert().code(2);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("file/narrows: cannot be written"), "{message}");
    assert!(message.contains("--output FILE"), "{message}");
    let mut without_home = narrows(LEAST);
    let assert = without_home.env_remove("XDG_CACHE_HOME").env_remove("HOME").assert().code(2);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("neither XDG_CACHE_HOME nor HOME"), "{message}");
}

/// Ctrl-C after the second round of a full calibration leaves the profile of the rounds so far; one that ends removes it.
#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_calibration_leaves_its_rounds() {
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    let folder = tempfile::tempdir().unwrap();
    let [output, partial] = ["here.json", "here.json.partial"].map(|name| folder.path().join(name));
    let flags = format!("--threads 1 --devices 1 --output {}", output.display());
    let child = crate::interruptible(env!("CARGO_BIN_EXE_narrows"))
        .args(format!("calibrate {flags}").split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while !partial.exists() {
        assert!(start.elapsed() < Duration::from_secs(300), "no rounds were kept");
        std::thread::sleep(Duration::from_millis(20));
    }
    crate::cluster::signal(&child, "-INT");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    let message = String::from_utf8(ended.stderr).unwrap();
    let kept = format!(" of 4 rounds is in {}\n", partial.display());
    assert!(message.contains("Stopped by a signal: the profile of "), "{message}");
    assert!(message.ends_with(&kept), "{message}");
    assert!(!output.exists(), "an unfinished profile has the name of a finished one");
    let profile: Value = serde_json::from_str(&fs::read_to_string(&partial).unwrap()).unwrap();
    let source = profile["device"]["provenance"]["source"].as_str().unwrap().to_owned();
    assert!(source.contains("unfinished, ") && source.contains(" of 4 rounds"), "{source}");
    let request = "plan --model cola-tiny --devices 1 --global-batch 2 --hardware";
    stdout(&format!("{request} {}", partial.display()));
    stdout(&format!("calibrate --quick {flags}"));
    assert!(output.exists() && !partial.exists());
}

/// A quick profile is cached beside the full one, which `run` prefers.
#[test]
fn a_quick_calibration_leaves_the_full_profile() {
    let (folder, (answer, measured)) = (tempfile::tempdir().unwrap(), &*MEASURED);
    let name = Path::new(answer["output"].as_str().unwrap()).file_name().unwrap();
    let cache = folder.path().join("narrows");
    fs::create_dir(&cache).unwrap();
    let quick = cache.join(name).to_str().unwrap().to_owned();
    fs::write(&quick, measured).unwrap();
    // A stand-in for the profile of a full calibration, which takes minutes.
    let full = quick.strip_suffix("-quick.json").unwrap().to_owned() + ".json";
    let text = measured.replace("cpu-measured", "cpu-full");
    fs::write(&full, &text).unwrap();
    let mut command = narrows(&format!("{LEAST} --format json"));
    let output = command.env("XDG_CACHE_HOME", folder.path()).assert().success();
    let output = output.get_output();
    let second: Value = serde_json::from_slice(&output.stdout).unwrap();
    let messages = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(second["output"], *quick);
    assert_ne!(fs::read_to_string(&quick).unwrap(), *measured, "measured again");
    assert!(messages.contains(&full) && messages.contains("--output FILE"), "{messages}");
    assert_eq!(fs::read_to_string(&full).unwrap(), text, "the full profile was changed");
    let line = "run --global-batch 2 --sequence-length 16 --threads 1 --steps 1 --output -";
    let run = narrows(line).env("XDG_CACHE_HOME", folder.path()).assert().success();
    let plan: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert_eq!(plan["hardware"]["name"], "cpu-full");
}

#[test]
fn a_run_caches_its_measurement_if_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let line = "run --global-batch 2 --sequence-length 16 --threads 1 --steps 1";
    let run = |cache: &std::path::Path| {
        let output = narrows(line).env("XDG_CACHE_HOME", cache).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let first = run(folder.path());
    assert!(
        first.contains("Measuring this machine") && first.contains("Profile cached in"),
        "{first}"
    );
    let second = run(folder.path());
    assert!(!second.contains("Measuring") && !second.contains("cached in"), "{second}");
    // The machine may have been busy during the measurement.
    assert!(second.lines().all(|line| line.contains("busy machine")), "{second}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let refused = run(&file);
    let place = format!("not cached for the next run: {}/", file.display());
    assert!(refused.contains(&place), "the cache is not a folder: {refused}");
}
