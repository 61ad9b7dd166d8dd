//! `narrows sensitivity`: elasticities, gains of better hardware, and assumed numbers.

use std::fs;
use std::sync::LazyLock;

use serde_json::Value;

use super::{failure, json, narrows, stdout};

const TINY: &str = "sensitivity --model cola-tiny --hardware a100-80gb";

/// The answer of [`TINY`].
static TINY_ANSWER: LazyLock<Value> = LazyLock::new(|| json(TINY));

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn row<'a>(rows: &'a Value, name: &str) -> &'a Value {
    let rows = rows.as_array().expect("rows");
    rows.iter().find(|row| row["number"] == name).unwrap_or_else(|| panic!("no row {name}"))
}

/// On one device all times scale together: with every rate λ times as high and every time divided by λ, the step takes
/// 1/λ of its time. The elasticities of rates less those of times are −1 in total.
#[test]
fn elasticities_of_rates_and_times_add_up() {
    let answer = &*TINY_ANSWER;
    let total: f64 = [
        ("device.peak_flops_per_s.bf16", 1.0),
        ("device.memory_bandwidth_bytes_per_s", 1.0),
        ("gemm.start_s", -1.0),
        ("attention.start_s", -1.0),
        ("passes.start_s", -1.0),
        ("executors.captured.launch_gap_s", -1.0),
    ]
    .into_iter()
    .map(|(name, sign)| {
        let row = row(&answer["elasticities"], &format!("hardware.{name}"));
        sign * number(&row["kept_plan"]["value"])
    })
    .sum();
    assert!((total + 1.0).abs() < 2e-3, "{total}");
    for row in answer["elasticities"].as_array().expect("rows") {
        let (value, interval) = (&row["replanned"]["value"], &row["replanned"]["interval"]);
        assert!(number(&interval[0]) <= number(value) && number(value) <= number(&interval[1]));
    }
}

/// Elasticities, gains and changes of the plan are those of separate what-if questions.
#[test]
fn answers_are_those_of_sweeps() {
    let request = "--model cola-60m --devices 2 --tensor 2 --micro-batch 1 --sequence-length 512";
    let answer = json(&format!("sensitivity {request}"));
    assert_eq!(answer["is_complete"], true);
    let sweep = |field: &str, values: &[f64]| -> Vec<Value> {
        let values: Vec<String> = values.iter().map(f64::to_string).collect();
        let answer = json(&format!("whatif {request} --sweep {field}={}", values.join(",")));
        answer["points"].as_array().expect("points").clone()
    };
    let time = |point: &Value| number(&point["prediction"]["step_time_s"]);

    let bandwidth = "hardware.device.memory_bandwidth_bytes_per_s";
    let upgrade = row(&answer["upgrades"], bandwidth);
    let value = number(&upgrade["value"]);
    let points = sweep(bandwidth, &[value / 1.05, value, value * 1.05, value * 2.0]);
    let elasticity = (time(&points[2]) / time(&points[0])).ln() / (1.05_f64 * 1.05).ln();
    let found = number(&row(&answer["elasticities"], bandwidth)["replanned"]["value"]);
    assert!((found - elasticity).abs() < 1e-6, "{found} {elasticity}");
    let gain = number(&upgrade["gains"][1]["gain"]["value"]);
    assert!((gain - (1.0 - time(&points[3]) / time(&points[1]))).abs() < 1e-9, "{gain}");

    let rows = answer["assumed"].as_array().expect("rows");
    let changed = rows.iter().find(|row| !row["change"].is_null()).expect("a change of the plan");
    let (value, at) = (number(&changed["value"]), number(&changed["change"]["value"]));
    // Bisection leaves 2 % between the last value that keeps the plan and the first one that changes it.
    let near = if at < value { at * 1.03 } else { at / 1.03 };
    let field = changed["number"].as_str().expect("a name");
    let points = sweep(field, &[near, at]);
    let without_hardware = |decisions: &Value| {
        let mut decisions = decisions.clone();
        decisions["hardware"] = Value::Null;
        decisions
    };
    let [present, before, after] =
        [&answer["decisions"], &points[0]["decisions"], &points[1]["decisions"]]
            .map(without_hardware);
    assert_eq!(present, before, "{field} at {near}");
    assert_ne!(present, after, "{field} at {at}");
    assert_eq!(after, without_hardware(&changed["change"]["decisions"]));
}

/// Slowdowns by overlap are at least 1: values below are planned as 1.
#[test]
fn slowdowns_are_varied_down_to_one() {
    for name in ["compute_slowdown", "collective_slowdown"] {
        let row = row(&TINY_ANSWER["assumed"], &format!("hardware.overlap.{name}"));
        assert!(number(&row["value"]) < 2.0, "{row}");
        assert_eq!(row["range"], serde_json::json!([1.0, 2.0 * number(&row["value"])]), "{row}");
    }
}

/// A number at the end of its range has a difference to one side. That it has bootstrap draws, which its variants have
/// not, leaves the interval as narrow as that of a difference to both sides.
#[test]
fn differences_to_one_side_have_the_same_errors_at_both_values() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("profile.json");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/profiles/a100-80gb.json");
    let text = fs::read_to_string(file).expect("a profile");
    let mut profile: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(profile["refits"]["numbers"][0], "gemm.efficiency_max");
    profile["refits"]["fitted"][0] = 1.0.into();
    profile["gemm"]["efficiency_max"] = 1.0.into();
    fs::write(&path, profile.to_string()).expect("written");
    let answer = json(&format!("sensitivity --model cola-tiny --hardware {}", path.display()));
    let row = row(&answer["elasticities"], "hardware.gemm.efficiency_max");
    assert_eq!(row["factors"][1], 1.0, "{row}");
    for estimate in [&row["replanned"], &row["kept_plan"]] {
        let [low, high] = [0, 1].map(|end| number(&estimate["interval"][end]));
        assert!(low < number(&estimate["value"]) && high < 0.0, "{estimate}");
    }
}

#[test]
fn answers_follow_the_schema() {
    let schema: Value = serde_json::from_str(&stdout("schema sensitivity")).expect("JSON");
    jsonschema::meta::validate(&schema).expect("a JSON Schema");
    let answer = &*TINY_ANSWER;
    jsonschema::validate(&schema, answer).expect("an answer that follows its schema");
    for pointer in ["/upgrades/0", "/assumed/0", "/elasticities/0/replanned"] {
        let mut damaged = answer.clone();
        let object = damaged.pointer_mut(pointer).and_then(Value::as_object_mut).expect("object");
        let field = object.keys().next().expect("a field").clone();
        object.remove(&field);
        assert!(!jsonschema::is_valid(&schema, &damaged), "{pointer}/{field} is required");
    }
}

#[test]
fn tables_fit_a_terminal_and_files_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("a path").to_owned();
    let [csv, svg, html] = ["a.csv", "a.svg", "a.html"].map(path);
    let files = format!("--csv {csv} --plot {svg} --report {html}");
    let text = stdout(&format!("{TINY} --details {files}"));
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.lines().nth(1).expect("a verdict").contains("The fastest plan takes"), "{text}");
    for title in ["What to buy next", "What to measure first"] {
        assert!(text.contains(title), "{text}");
    }
    assert!(!text.contains("more number"), "--details lists all: {text}");
    let rows = fs::read_to_string(&csv).expect("rows");
    let columns: Vec<usize> = rows.lines().map(|line| line.split(',').count()).collect();
    assert!(columns.len() > 20 && columns.iter().all(|count| *count == columns[0]), "{rows}");
    assert!(rows.starts_with("number,kind,value,is_assumed,"), "{rows}");
    let picture = fs::read_to_string(&svg).expect("a picture");
    assert!(picture.contains("device.memory_bandwidth"), "{picture}");
    assert!(fs::read_to_string(&html).expect("a page").contains("<svg"));
}

#[test]
fn bad_input_is_refused() {
    let message = failure(&format!("{TINY} --csv - --format json"), 2);
    assert!(message.contains("standard output"), "{message}");
    assert!(failure("sensitivity --devices 2", 2).contains("--model: is missing"));
    let message = failure("sensitivity --model cola-7b --memory-limit 1GiB", 1);
    assert!(message.contains("no plan exists"), "{message}");
    narrows(&format!("{TINY} --tensor 3")).assert().code(2);
}
