//! Time, cost and energy of whole training runs.

use std::fs;

use serde_json::{Value, json};

use super::{failure, json as answer, stdout};

const REQUEST: &str = "--model cola-60m --devices 2 --sequence-length 512";
const RUN: &str = "--tokens 3e9 --price-per-device-hour 2.5 --power-watts 700";
const FAILURES: &str = "--mtbf-hours 1000 --checkpoint-seconds 30";

fn number(value: &Value, pointer: &str) -> f64 {
    value.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer} in {value}"))
}

fn near(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-9 * expected, "{actual} != {expected}");
}

#[test]
fn a_run_repeats_the_predicted_step() {
    let plan = answer(&format!("plan {REQUEST} {RUN}"));
    let run = &plan["run"];
    // Two sequences of 512 tokens.
    let steps = (3e9_f64 / 1024.0).ceil();
    assert_eq!(number(run, "/steps"), steps);
    let days = steps * number(&plan, "/prediction/step_time_s") / 86_400.0;
    near(number(run, "/days"), days);
    near(
        number(run, "/days_interval/1"),
        steps * number(&plan, "/prediction/step_time_interval_s/1") / 86_400.0,
    );
    near(number(run, "/device_hours"), days * 24.0 * 2.0);
    near(number(run, "/dollars"), days * 24.0 * 2.0 * 2.5);
    near(number(run, "/energy_kwh"), days * 24.0 * 2.0 * 0.7);
    assert_eq!(run.get("failures"), None);
    assert_eq!(answer(&format!("cost {REQUEST} {RUN}"))["run"], *run);

    let failing = answer(&format!("plan {REQUEST} {RUN} {FAILURES}"))["run"].clone();
    let goodput = number(&failing, "/failures/goodput");
    assert!((0.9..1.0).contains(&goodput), "{goodput}");
    near(number(&failing, "/days"), days / goodput);
    near(number(&failing, "/failures/cluster_mtbf_hours"), 500.0);

    assert_eq!(answer(&format!("plan {REQUEST}")).get("run"), None);
    let text = stdout(&format!("plan {REQUEST} {RUN} {FAILURES}"));
    for part in
        ["Run of 3.00 B tokens", "cost", "energy in kWh", "goodput", "a restart 5.0 minutes"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

/// Checkpoints are written between steps, however often devices fail.
#[test]
fn checkpoints_are_at_least_a_step_apart() {
    let failing = format!(
        "plan {REQUEST} {RUN} --mtbf-hours 0.001 --checkpoint-seconds 0.000001 --restart-seconds 0"
    );
    let plan = answer(&failing);
    let failures = &plan["run"]["failures"];
    near(number(failures, "/checkpoint_interval_s"), number(&plan, "/prediction/step_time_s"));
    assert_eq!(failures["checkpoint_interval_steps"], 1.0);
    let text = stdout(&failing);
    assert!(text.contains("after every step, the shortest interval"), "{text}");
    assert!(text.contains("expected, one every 1.80 s; goodput"), "{text}");
}

/// The interval beside the time of a run is that of the run: a checkpoint as long as all steps halves it.
#[test]
fn the_interval_of_a_row_is_that_of_its_run() {
    let sweep = format!(
        "whatif {REQUEST} {RUN} --mtbf-hours 1e9 --checkpoint-seconds 20000 --sweep devices=2"
    );
    let point = answer(&sweep)["points"][0].clone();
    let step = &point["prediction"]["step_time_interval_s"];
    let step_width = number(step, "/1") - number(step, "/0");
    let step_width = 50.0 * step_width / number(&point, "/prediction/step_time_s");
    let run = &point["run"];
    let [low, high] = [0, 1].map(|end| number(run, &format!("/days_interval/{end}")));
    let width = 50.0 * (high - low) / number(run, "/days");
    assert!(width < 0.8 * step_width, "{width} {step_width}");
    let text = stdout(&sweep);
    assert!(text.contains(&format!("±{width:.1} %")), "±{width:.1} %: {text}");
}

/// Several clusters side by side, each with its price.
#[test]
fn runs_are_swept() {
    let sweep = format!(
        "whatif {REQUEST} {RUN} {FAILURES} --sweep hardware=a100-80gb,h100-sxm \
         --sweep price_per_device_hour=1,10 --zip"
    );
    let swept = answer(&sweep);
    let schema: Value = serde_json::from_str(&stdout("schema whatif")).expect("JSON");
    jsonschema::validate(&schema, &swept).expect("an answer that follows its schema");
    let runs: Vec<&Value> = (0..2).map(|index| &swept["points"][index]["run"]).collect();
    near(number(runs[0], "/dollars"), number(runs[0], "/device_hours"));
    near(number(runs[1], "/dollars"), number(runs[1], "/device_hours") * 10.0);
    assert!(number(runs[1], "/days") < number(runs[0], "/days"), "an H100 is faster");
    let text = stdout(&sweep);
    assert!(text.contains("Lowest cost: $"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(", at hardware a100-80gb"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");

    // Clusters may have a price in common.
    let same = sweep.replace("price_per_device_hour=1,10", "price_per_device_hour=2,2");
    let same = answer(&same);
    for point in same["points"].as_array().expect("points") {
        near(number(point, "/run/dollars"), 2.0 * number(point, "/run/device_hours"));
    }
    assert_eq!(same["points"].as_array().map(Vec::len), Some(2));

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("runs.csv");
    stdout(&format!("whatif {REQUEST} {RUN} --sweep tensor=1,3 --csv {}", path.display()));
    let text = fs::read_to_string(path).expect("the file");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    let column = |name: &str| rows[0].iter().position(|column| *column == name).expect(name);
    let days: f64 = rows[1][column("days")].parse().expect("a number");
    let hours: f64 = rows[1][column("device_hours")].parse().expect("a number");
    near(hours, days * 48.0);
    assert_eq!(rows[1].len(), rows[0].len());
    assert_eq!(rows[1][column("goodput")], "");
    assert_eq!(rows[2][column("days")], "");
}

#[test]
fn runs_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("plan.json");
    let path = path.display();
    stdout(&format!("plan {REQUEST} --tensor 2 --output {path}"));
    let command = format!("compare {path} --with-search {RUN}");
    let compared = answer(&command);
    let schema: Value = serde_json::from_str(&stdout("schema compare")).expect("JSON");
    jsonschema::validate(&schema, &compared).expect("an answer that follows its schema");
    let cost = answer(&format!("cost {path} {RUN}"));
    assert_eq!(compared["plans"][0]["run"], cost["run"]);
    let text = stdout(&command);
    assert!(text.contains("Run of 3.00 B tokens") && text.contains("cost in $"), "{text}");
}

#[test]
fn incomplete_runs_are_located() {
    for (arguments, part) in [
        ("--tokens 0", "above 0"),
        ("--tokens many", "above 0"),
        ("--tokens 1e30", "at most 1e18"),
        ("--price-per-device-hour 2", "--price-per-device-hour: describes a training run"),
        ("--tokens 1e9 --mtbf-hours 100", "--mtbf-hours: needs --checkpoint-seconds"),
        ("--tokens 1e9 --checkpoint-seconds 9", "--checkpoint-seconds: needs --mtbf-hours"),
        ("--tokens 1e9 --restart-seconds 9", "--restart-seconds: needs --mtbf-hours"),
        ("--tokens 1e9 --mtbf-hours 0 --checkpoint-seconds 9", "above 0"),
        ("--tokens 1e9 --mtbf-hours 1e-4 --checkpoint-seconds 600", "never ends"),
    ] {
        let message = failure(&format!("plan --model cola-tiny {arguments}"), 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
    let message = failure("whatif --model cola-tiny --sweep power_watts=1,2", 2);
    assert!(message.contains("--tokens 300e9"), "{message}");
    let swept = answer(
        "whatif --model cola-tiny --tokens 1e9 --checkpoint-seconds 600 --sweep mtbf_hours=1e-4,1e4",
    );
    let error = swept["points"][0]["error"]["message"].as_str().expect("an error");
    assert!(error.contains("never ends"), "{error}");
    assert_ne!(swept["points"][1]["run"], json!(null));
}
