//! `--objective`: the least memory and the least cost of a step.

use std::fs;

use serde_json::{Value, json};

use super::{failure, json as answer, narrows, stdout};

const REQUEST: &str = "--model cola-tiny --devices 4 --global-batch 4 --sequence-length 128";

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {value}"))
}

fn near(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-6 * expected.abs(), "{actual} != {expected}");
}

fn peak_bytes(answer: &Value) -> f64 {
    let stages = answer["prediction"]["peak_memory_bytes"].as_array().expect("stages");
    stages.iter().filter_map(Value::as_f64).fold(0.0, f64::max)
}

/// A profile with a price, in a folder that lasts as long as the returned value.
fn priced_profile(price: f64) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let root = env!("CARGO_MANIFEST_DIR");
    let text = fs::read_to_string(format!("{root}/profiles/a100-80gb.json")).expect("a preset");
    let mut profile: Value = serde_json::from_str(&text).expect("JSON");
    profile["price_per_device_hour"] = json!(price);
    let file = folder.path().join("priced.json");
    fs::write(&file, profile.to_string()).expect("a profile");
    (folder, file.display().to_string())
}

#[test]
fn the_least_cost_is_that_of_a_number_of_devices() {
    let plan = answer(&format!("plan {REQUEST} --objective cost"));
    let devices = number(&plan, "/cost/devices");
    assert_eq!(number(&plan, "/cost/devices_max"), 4.0);
    let axes = ["tensor", "pipeline", "data"];
    let product: f64 =
        axes.iter().map(|axis| number(&plan, &format!("/decisions/mesh/{axis}"))).product();
    assert_eq!(devices, product);
    let cost = number(&plan, "/cost/device_seconds");
    near(cost, devices * number(&plan, "/prediction/step_time_s"));
    let every = (1..=4).map(|devices| {
        let fixed = REQUEST.replace("--devices 4", &format!("--devices {devices}"));
        devices as f64 * number(&answer(&format!("plan {fixed}")), "/prediction/step_time_s")
    });
    near(cost, every.fold(f64::INFINITY, f64::min));
    assert!(plan["search"]["bound_s"].is_null());
    let bound = number(&plan, "/search/bound_device_seconds");
    assert!((number(&plan, "/search/gap") - (cost - bound) / cost).abs() < 1e-6);
    // No price is known.
    assert_eq!(plan["cost"].get("dollars_per_step"), None);
    // Other objectives report no cost.
    assert_eq!(answer(&format!("plan {REQUEST}")).get("cost"), None);
}

#[test]
fn a_price_is_that_of_the_flag_or_of_the_profile() {
    let (_folder, profile) = priced_profile(3.6);
    let priced = format!("plan {REQUEST} --objective cost --hardware {profile}");
    let plan = answer(&priced);
    let seconds = number(&plan, "/cost/device_seconds");
    near(number(&plan, "/cost/dollars_per_step"), seconds * 1e-3);
    let flag = answer(&format!("{priced} --price-per-device-hour 7.2"));
    near(number(&flag, "/cost/dollars_per_step"), seconds * 2e-3);
    // The price changes no decision, and plans of a profile with another price are not stale.
    assert_eq!(flag["decisions"], plan["decisions"]);
    let preset = answer(&format!("plan {REQUEST} --objective cost"));
    assert_eq!(plan["decisions"], preset["decisions"]);
    // A run has the price of the profile too.
    let run = answer(&format!("plan {REQUEST} --hardware {profile} --tokens 1e9"));
    near(number(&run, "/run/dollars"), 3.6 * number(&run, "/run/device_hours"));
    let text = stdout(&format!("{priced} --price-per-device-hour 7.2"));
    for part in ["device-seconds at $7.2 per hour", "of the request", "cheapest plan"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn the_least_memory_is_that_of_no_faster_plan() {
    let smallest = answer(&format!("plan {REQUEST} --objective memory"));
    let least = peak_bytes(&smallest);
    assert!(least < peak_bytes(&answer(&format!("plan {REQUEST}"))));
    let bound = number(&smallest, "/search/bound_bytes");
    assert!(bound <= least);
    assert!((number(&smallest, "/search/gap") - (least - bound) / least).abs() < 1e-6);
    assert!(smallest["search"]["bound_s"].is_null());
    let mesh = &smallest["decisions"]["mesh"];
    let product: f64 =
        ["tensor", "pipeline", "data"].iter().map(|a| mesh[a].as_f64().unwrap()).product();
    assert_eq!(product, 4.0, "all devices are used");
    let two = REQUEST.replace("--devices 4", "--devices 2");
    let text = stdout(&format!("plan {two} --objective memory"));
    assert!(text.contains("no plan saves more than"), "{text}");
}

#[test]
fn objectives_can_be_swept() {
    let sweep = "--sweep objective=step-time,memory,cost --price-per-device-hour 2";
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rows.csv");
    let points =
        answer(&format!("whatif {REQUEST} {sweep} --csv {}", file.display()))["points"].clone();
    let point = |index: usize| &points[index];
    assert!(peak_bytes(point(1)) < peak_bytes(point(0)));
    let cost = |index: usize| number(point(index), "/cost/dollars_per_step");
    assert!(cost(2) <= cost(0) && cost(2) <= cost(1));
    assert_eq!(number(point(0), "/cost/devices"), 4.0);
    let csv = fs::read_to_string(&file).expect("rows");
    let header = csv.lines().next().expect("a header");
    assert!(
        header.ends_with(",device_seconds,dollars_per_step,context_attention,shard_size,error"),
        "{header}"
    );
    let columns = header.split(',').count();
    assert!(csv.lines().all(|line| line.split(',').count() == columns), "{csv}");
}

/// Alternatives to the cheapest plan are plans for as many devices.
#[test]
fn the_cheapest_plan_is_explained() {
    let request = "--model cola-tiny --devices 5 --tensor 2 --global-batch 4 --sequence-length 128";
    let text = stdout(&format!("explain {request} --objective cost"));
    assert!(text.starts_with("cola-tiny on "), "{text}");
    assert!(text.contains("cheapest plan") && text.contains("btp, tensor axis 2"), "{text}");
}

#[test]
fn explanations_state_the_cost_that_plan_states() {
    let (_folder, profile) = priced_profile(3.6);
    for price in ["", "--price-per-device-hour 7.2"] {
        let request = format!("{REQUEST} --objective cost --hardware {profile} {price}");
        let planned = answer(&format!("plan {request}"));
        let explained = answer(&format!("explain {request}"));
        assert!(number(&explained, "/cost/dollars_per_step") > 0.0);
        assert_eq!(explained["cost"], planned["cost"]);
    }
    let text = stdout(&format!("explain {REQUEST} --objective cost --price-per-device-hour 7.2"));
    for part in ["device-seconds at $7.2 per hour", " of the request"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(answer(&format!("explain {REQUEST}"))["cost"].is_null());
    let message = failure(&format!("explain {REQUEST} --price-per-device-hour 7.2"), 2);
    assert!(message.contains("--price-per-device-hour: is for the cost of a step"), "{message}");
    assert!(message.contains("hint: --objective cost"), "{message}");
}

/// The mesh of the cheapest plan is not the fastest one.
#[test]
fn a_strategy_without_a_tensor_axis_is_warned_of() {
    for objective in ["step-time", "cost"] {
        let request = "--model llama-60m --devices 8 --strategy fullrank-tp --objective";
        let planned = narrows(&format!("plan {request} {objective}")).assert().success();
        let message = String::from_utf8_lossy(&planned.get_output().stderr).into_owned();
        let reason = "has no effect on this plan: the mesh of the plan has no tensor axis";
        assert!(message.contains(reason), "{message}");
    }
}

/// Devices of a measured processor are parts of it.
#[test]
fn fewer_parts_of_one_machine_cost_no_less() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = env!("CARGO_MANIFEST_DIR");
    let text = fs::read_to_string(format!("{root}/profiles/cpu-local.json")).expect("a preset");
    let mut profile: Value = serde_json::from_str(&text).expect("JSON");
    profile["measured"] = json!({
        "threads": 2,
        "points": [{"kernel": {"gemm": {"m": 8, "n": 8, "k": 8, "batch": 1, "accumulate": false,
            "input": "f32", "output": "f32"}}, "devices": 1, "time_s": 1e-3, "spread": 0.0}],
        "provenance": {"kind": "measured", "source": "a test", "date": "2026-11-22"},
    });
    let file = folder.path().join("measured.json");
    fs::write(&file, profile.to_string()).expect("a profile");
    let request = format!("{REQUEST} --hardware {} --objective", file.display());
    let message = failure(&format!("plan {request} cost"), 2);
    assert!(message.contains("parts of one machine"), "{message}");
    assert!(peak_bytes(&answer(&format!("plan {request} memory"))) > 0.0);
}

/// The gap of the least memory is one of memory.
#[test]
fn gaps_of_a_sweep_are_those_of_its_objectives() {
    let request = "--model cola-60m --devices 4 --pipeline 2 --sequence-length 512";
    let text = stdout(&format!("whatif {request} --sweep objective=step-time,memory"));
    let text = text.replace("\n  ", " ");
    let phrase = "None of the plans is proven optimal: no plan takes more than ";
    assert!(text.contains(phrase), "{text}");
    assert!(text.contains(" less time, no plan saves more than "), "{text}");
}

/// Bounds are of what the objective compares.
#[test]
fn explanations_say_what_their_bounds_are_of() {
    for (objective, parts) in [
        ("step-time", ["ruled out by bounds of ", " ms.", "with larger bounds."]),
        ("memory", ["need no more memory than the chosen one", " ms.", "plan of that memory"]),
        (
            "cost",
            ["by their device-seconds", " device-seconds.", "larger bounds of device-seconds"],
        ),
    ] {
        let request = "--model llama-60m --devices 6 --global-batch 24 --sequence-length 2048";
        let text = stdout(&format!("explain {request} --objective {objective}"));
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let missing: Vec<&&str> = parts.iter().filter(|part| !text.contains(**part)).collect();
        assert!(missing.is_empty(), "{objective}: no {missing:?} in {text}");
    }
}

#[test]
fn bad_objectives_are_rejected() {
    let (_folder, expensive) = priced_profile(1e9);
    for (arguments, parts) in [
        (format!("plan {REQUEST} --objective costs"), ["--objective", "step-time, memory, cost"]),
        (
            format!("plan {REQUEST} --objective cost --tensor 8"),
            ["4 devices are fewer than 8", "hint: 8 devices, or axes whose product"],
        ),
        (format!("plan {REQUEST} --price-per-device-hour 2"), ["--tokens", "--objective cost"]),
        (
            format!("plan {REQUEST} --objective memory --price-per-device-hour 2"),
            ["--price-per-device-hour", "--objective cost"],
        ),
        (
            format!("plan {REQUEST} --objective cost --hardware {expensive}"),
            ["price_per_device_hour", "not between 0 and"],
        ),
        (
            format!("plan {REQUEST} --tokens 1e9 --price-per-device-hour 1e300"),
            ["--price-per-device-hour", "from 0 to 1e6"],
        ),
        (format!("sensitivity {REQUEST} --objective cost"), ["--objective", "step time"]),
        ("run --objective cost".to_owned(), ["a run uses all of its devices", "narrows run FILE"]),
    ] {
        let message = failure(&arguments, 2);
        assert!(parts.iter().all(|part| message.contains(part)), "{arguments}: {message}");
    }
    let message = failure(&format!("plan {REQUEST} --objective cost --memory-limit 1MiB"), 1);
    assert!(message.contains("on up to 4 devices"), "{message}");
}
