//! Predictions do not get worse unnoticed: every table that is published, and the rows beside the
//! repository where they are there, against the mean errors in `tests/data/recorded-errors.json`.
//!
//! After a change that is meant, `NARROWS_BLESS=1 cargo test --test accuracy` records the new errors.

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

use serde_json::Value;

/// Percentage points by which a mean error may grow.
const SLACK: f64 = 0.5;
const RECORDED: &str = "tests/data/recorded-errors.json";

/// Rows beside the repository: the file, and what it does not say.
const ROWS: [(&str, &str, &str); 2] = [
    ("vtrain-a100-single-sample", "a100-80gb-8", "none"),
    ("vtrain-a100-multi-sample", "a100-80gb-8-4nic", "block"),
];

fn narrows(arguments: &[&str]) -> Vec<u8> {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("narrows");
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command.args(arguments).assert().success().get_output().stdout.clone()
}

fn validated(files: &[String]) -> Value {
    let mut arguments = vec!["validate", "--format", "json"];
    arguments.extend(files.iter().flat_map(|file| ["--measurements", file.as_str()]));
    serde_json::from_slice(&narrows(&arguments)).expect("JSON")
}

/// Mean absolute errors by table, in percent.
fn means(document: &Value) -> BTreeMap<String, f64> {
    let tables = document["tables"].as_array().expect("tables");
    let mean = |table: &Value| {
        let name = table["name"].as_str().expect("a name").to_owned();
        (name, table["mean_absolute_percent"].as_f64().expect("a number"))
    };
    tables.iter().map(mean).collect()
}

fn rows() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data");
    let mut files = vec![];
    for (name, hardware, recompute) in ROWS {
        let rows = folder.join(format!("{name}.csv"));
        if !rows.exists() {
            println!("skipped: {name}.csv is not beside the repository");
            continue;
        }
        let rows = rows.display().to_string();
        let flags = ["--name", name, "--hardware", hardware, "--recompute", recompute];
        let measurements = narrows(&[&["convert", rows.as_str()], &flags[..]].concat());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.json"));
        fs::write(&file, measurements).expect("a file");
        files.push(file.display().to_string());
    }
    files
}

#[test]
fn no_mean_error_has_grown() {
    let mut found = means(&validated(&[]));
    let rows = rows();
    if !rows.is_empty() {
        found.extend(means(&validated(&rows)));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(RECORDED);
    let text = fs::read_to_string(&path).unwrap_or_else(|_| "{}".into());
    let mut recorded: BTreeMap<String, f64> = serde_json::from_str(&text).expect("numbers");
    for (table, mean) in &found {
        println!("{table}: {mean:.2} %, recorded {:?}", recorded.get(table));
    }
    if env::var_os("NARROWS_BLESS").is_some() {
        recorded.extend(
            found.iter().map(|(table, mean)| (table.clone(), (mean * 100.0).round() / 100.0)),
        );
        let text = serde_json::to_string_pretty(&recorded).expect("numbers");
        fs::write(&path, text + "\n").expect("a file");
        return;
    }
    let grown = |(table, mean): &(&String, &f64)| {
        recorded.get(*table).is_none_or(|recorded| **mean > recorded + SLACK)
    };
    let grown: Vec<_> = found.iter().filter(grown).collect();
    assert!(grown.is_empty(), "mean errors have grown, or nobody recorded them: {grown:?}");
}

#[test]
fn whoever_was_faster_is_predicted_to_be() {
    let document = validated(&[]);
    for table in document["tables"].as_array().expect("tables") {
        let orderings = &table["orderings"];
        assert_eq!(orderings["pairs"], orderings["right"], "{}", table["name"]);
    }
}

/// The intervals that are shipped hold nine in ten, or more, of what they were made from: published figures
/// and rows beside the repository. What is left out says more: `calibration/tests/gpt` and `calibration`.
#[test]
fn intervals_hold_what_they_were_made_from() {
    let mut documents = vec![validated(&[])];
    let rows = rows();
    if !rows.is_empty() {
        documents.push(validated(&rows));
    }
    for document in documents {
        for one in document["sources"].as_array().expect("sources") {
            println!("{}: {}", one["name"], one["coverage_90"]);
        }
        let share = document["overall"][0]["coverage_90"]["share"].as_f64().expect("a share");
        assert!(share >= 0.85, "{share}");
    }
}

/// The figure that a reported one is of.
fn reported_figure<'a>(steps: &[&'a Value], reported: &Value) -> &'a Value {
    steps.iter().find(|figure| figure["name"] == reported["name"]).expect("a step of that name")
}

/// One number is fitted to three steps. Without one of them it is the geometric mean of the other
/// two, and the third is predicted by that.
#[test]
fn steps_are_predicted_with_each_left_out_of_the_fit() {
    let document = validated(&[]);
    let figures = document["figures"].as_array().expect("figures");
    let ratio = |figure: &&Value| {
        figure["measured_s"].as_f64().expect("s") / figure["predicted_s"].as_f64().expect("s")
    };
    let steps: Vec<&Value> = figures.iter().filter(|figure| figure["table"] == "steps").collect();
    let fitted: Vec<f64> =
        steps.iter().filter(|figure| figure["fitted"] == true).map(ratio).collect();
    assert_eq!(fitted.len(), 3);
    let mean = |ratios: &[f64]| {
        (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
    };
    for reported in document["left_out"].as_array().expect("figures") {
        let own = ratio(&reported_figure(&steps, reported));
        let rest: Vec<f64> = fitted.iter().copied().filter(|ratio| *ratio != own).collect();
        let error = (mean(&rest) / own - 1.0) * 100.0;
        // Steps of one stage are their kernels times the factor, which is written down with three digits.
        let reported = reported["error_percent"].as_f64().expect("a number");
        assert!((reported - error).abs() < 0.1, "{reported} is reported, and {error} comes out");
    }
    let mut sizes = vec![];
    for figure in &steps {
        let own = ratio(figure);
        let rest: Vec<f64> = fitted.iter().copied().filter(|ratio| *ratio != own).collect();
        let error = (mean(&rest) / own - 1.0) * 100.0;
        println!("{}: {error:+.1} % when left out", figure["name"]);
        sizes.push(error.abs());
    }
    let mean = sizes.iter().sum::<f64>() / sizes.len() as f64;
    println!("mean {mean:.2} %");
    assert!(mean < 8.0, "{mean} %");
}
