//! `narrows validate`, `narrows convert` and files of measurements.

use std::fs;

use serde_json::{Value, json};

use super::{json as answer, narrows, refusal, stdout};

const ROWS: &str = "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,\
sequence length,tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n\
8,16,2,1024,16,24,1024,2,2,2,400\n";

#[test]
fn published_figures_are_predicted() {
    let document = answer("validate");
    let figures = document["figures"].as_array().expect("figures");
    assert_eq!(figures.len(), 58);
    let overall = &document["overall"][0];
    assert_eq!((&overall["name"], &overall["figures"]), (&"all".into(), &58.into()));
    for key in ["mean", "median", "worst"] {
        assert!(overall[format!("{key}_absolute_percent")].as_f64().is_some(), "{key}");
    }
    let coverage = &overall["coverage_90"];
    let inside = figures.iter().filter(|figure| figure["inside"] == true).count();
    assert_eq!(coverage["inside"].as_u64(), Some(inside as u64));
    assert!(coverage["share"].as_f64().unwrap() > 0.8, "{coverage}");
    for figure in figures {
        let [low, high] = [0, 1].map(|end| figure["interval_s"][end].as_f64().unwrap());
        let predicted = figure["predicted_s"].as_f64().unwrap();
        assert!(low < predicted && predicted < high, "{figure}");
    }
    let text = stdout("validate");
    assert!(text.contains("in the 90 % interval"), "{text}");
    assert!(text.contains("Errors by source") && text.contains("arXiv 2512.12131"), "{text}");
}

#[test]
fn rows_become_measurements_and_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.csv");
    fs::write(&rows, ROWS).unwrap();
    let converted = stdout(&format!("convert {} --name mine", rows.display()));
    let file: Value = serde_json::from_str(&converted).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema measurements")).unwrap();
    assert!(jsonschema::is_valid(&schema, &file));
    let written = folder.path().join("mine.json");
    fs::write(&written, &converted).unwrap();
    let document = answer(&format!("validate --measurements {}", written.display()));
    assert_eq!(document["figures"][0]["measured_s"], 0.4);
    assert!(document["figures"][0]["predicted_s"].as_f64().unwrap() > 0.05);
    narrows("validate --measurements -").write_stdin(converted).assert().success();
}

#[test]
fn damaged_measurements_are_refused_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.json");
    let text = include_str!("../../data/measurements/boost-a100.json");
    for (pointer, value, part) in [
        ("/measurements/0/value", json!(-1.0), "measurements[0].value"),
        ("/measurements/0/source", json!("nobody"), "measurements[0].source"),
        ("/measurements/0/hardware", json!("b200"), "measurements[0].hardware"),
        ("/measurements/0/unit", json!("hours"), "measurements[0].unit"),
        ("/measurements/1/name", json!("fullrank_attn, 4 sequences"), "measurements[1].name"),
        ("/measurements/0/mesh/tensor", json!(0), "measurements[0].mesh.tensor"),
        ("/measurements/50/measured/step/model", json!({"preset": "x"}), "measurements[50]"),
        ("/measurements/50/measured/step/workload/global_batch", json!(5), "do not divide"),
        ("/format", json!("narrows-measurements/9"), "format"),
    ] {
        let mut file: Value = serde_json::from_str(text).unwrap();
        *file.pointer_mut(pointer).expect(pointer) = value;
        fs::write(&path, file.to_string()).unwrap();
        let message = refusal(&format!("validate --measurements {}", path.display()), 2);
        assert!(message.contains(part), "{pointer}: {message}");
    }
    fs::write(&path, ROWS.replace(",400", ",soon")).unwrap();
    let message = refusal(&format!("convert {}", path.display()), 2);
    assert!(message.contains("line 2, column `iteration time (ms)`"), "{message}");
}

/// What a step adds to its kernels is in every time that is reported.
#[test]
fn eager_bounds_and_predictions_are_times_of_steps() {
    let document = answer("plan --model cola-tiny --devices 2 --tensor 2 --executor eager");
    let (step, bound) = (&document["prediction"]["step_time_s"], &document["search"]["bound_s"]);
    let ratio = step.as_f64().unwrap() / bound.as_f64().unwrap();
    assert_eq!(document["search"]["status"], "optimal");
    assert!((ratio - 1.0).abs() < 1e-6, "{ratio}");
}
