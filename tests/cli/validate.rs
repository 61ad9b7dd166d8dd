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
    assert_eq!(figures.len(), 62);
    let overall = &document["overall"][0];
    assert_eq!((&overall["name"], &overall["figures"]), (&"all".into(), &62.into()));
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
    assert!(text.contains("in the 90 % interval") && text.contains("fitted to it"), "{text}");
    assert!(text.contains(" a GB"), "what recomputation frees has a time: {text}");
    let held = &document["overall"][1];
    let predicted = figures.iter().filter(|figure| figure["fitted"] == false).count();
    assert_eq!((&held["figures"], &held["fitted"]), (&predicted.into(), &0.into()));
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
        ("/measurements/0/value", json!(1e-320), "measurements[0].value: 1e-320 is no time"),
        ("/measurements/6/value", json!(101.0), "measurements[6].value: 101 is no share"),
        ("/measurements/60/value", json!(1e300), "measurements[60].value"),
        ("/measurements/60/unit", json!("ms"), "measurements[60].unit"),
        ("/measurements/60/measured/recomputation/recompute", json!("none"), "recompute: say what"),
        ("/measurements/58/measured/kernels/0/norm/norm", json!("auto"), "norm.norm: `auto`"),
        ("/measurements/58/measured/kernels/0/norm/features", json!(4098), "4098 does not divide"),
        ("/measurements/0/table", json!(" "), "measurements[0].table: says nothing"),
        ("/measurements/0/name", json!("\u{1b}[31m"), "measurements[0].name: holds a control"),
        ("/measurements/0/mesh/data", json!(1 << 24), "measurements[0].mesh: more than"),
        ("/measurements/50/measured/step/workload/global_batch", json!(1 << 24), "microbatches"),
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
}

#[test]
fn rows_that_are_wrong_are_refused_with_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    let header = ROWS.lines().next().unwrap();
    for (rows, part) in [
        (ROWS.replace(",400", ",soon"), "line 2, column `iteration time (ms)`: is not a number"),
        (ROWS.replace(",400", ",nan"), "line 2, value: NaN is no time"),
        (ROWS.replace(",400", ",-1"), "line 2, value: -1 is no time"),
        (ROWS.replace(",400", ""), "line 2, column `iteration time (ms)`: is missing"),
        (ROWS.replace(",400", ",1,400"), "line 2: 12 cells, where there are 11 columns"),
        (
            ROWS.replace(",24,", ",25,"),
            "line 2, measured.step.model.gpt.layers: 25 does not divide",
        ),
        (ROWS.replace(",24,", ",2.5,"), "line 2, column `# layers`: 2.5 is not a count"),
        (ROWS.replace("8,16", "9,16"), "line 2, column `# gpus`: 9 devices"),
        (ROWS.replace("2,2,2,", "999999999,999999999,999999999,"), "are not those of the mesh"),
        (
            ROWS.replace("micro batch", "global batch"),
            "line 1: two columns are named `global batch`",
        ),
        (ROWS.replace(',', ";"), "line 1: there is no column `hidden size`"),
        (header.to_owned(), "there are no rows"),
        (String::new(), "line 1: there is no column"),
    ] {
        fs::write(&path, rows).unwrap();
        let message = refusal(&format!("convert {}", path.display()), 2);
        assert!(message.contains(part), "{part}: {message}");
    }
    let quoted = ROWS.lines().map(|line| format!("\"{}\"\r\n", line.replace(',', "\",\"")));
    fs::write(&path, quoted.collect::<String>()).unwrap();
    let converted: Value = answer_of_convert(&path);
    fs::write(&path, ROWS).unwrap();
    assert_eq!(converted, answer_of_convert(&path), "quotes and other ends of lines");
}

fn answer_of_convert(path: &std::path::Path) -> Value {
    serde_json::from_str(&stdout(&format!("convert {}", path.display()))).unwrap()
}

/// What nobody fitted anything to is a prediction, and what somebody did is not.
#[test]
fn rows_that_constants_were_fitted_to_are_no_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    fs::write(&path, ROWS).unwrap();
    let written = folder.path().join("mine.json");
    fs::write(&written, stdout(&format!("convert {}", path.display()))).unwrap();
    let document = answer(&format!("validate --measurements {}", written.display()));
    assert_eq!(document["figures"][0]["fitted"], false);
    let sample = "../shared/data/vtrain-a100-single-sample.csv";
    if !std::path::Path::new(sample).exists() {
        println!("skipped: {sample} is not beside the repository");
        return;
    }
    fs::write(
        &written,
        stdout(&format!("convert {sample}")).replace("\"fitted\": true", "\"fitted\": false"),
    )
    .unwrap();
    let document = answer(&format!("validate --measurements {}", written.display()));
    assert_eq!(document["overall"].as_array().unwrap().len(), 1, "none is called a prediction");
    assert_eq!(document["overall"][0]["fitted"], 240);
}

/// Anyone's figures of anyone's machine.
#[test]
fn figures_are_predicted_on_a_profile_of_ones_own() {
    let folder = tempfile::tempdir().unwrap();
    let profile =
        include_str!("../../profiles/cpu-local.json").replace("\"cpu-local\"", "\"mine\"");
    let (hardware, path) = (folder.path().join("mine.json"), folder.path().join("m.json"));
    fs::write(&hardware, profile).unwrap();
    let text = include_str!("../../data/measurements/boost-a100.json");
    let mut file: Value = serde_json::from_str(text).unwrap();
    file["measurements"].as_array_mut().unwrap().truncate(1);
    file["measurements"][0]["hardware"] = json!("mine");
    fs::write(&path, file.to_string()).unwrap();
    let line = format!("validate --measurements {}", path.display());
    assert!(refusal(&line, 2).contains("--hardware FILE"));
    let document = answer(&format!("{line} --hardware {}", hardware.display()));
    assert_eq!(document["figures"][0]["hardware"], "mine");
    let message = refusal(&format!("{line} --measurements {}", path.display()), 2);
    assert!(message.contains("two files call themselves `boost-a100`"), "{message}");
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
