//! `narrows validate` and files of measurements.

use std::fs;

use serde_json::{Value, json};

use super::convert::{JSON_ROW, ROWS, answer_of_convert};
use super::{failure, json as answer, narrows, stdout};

#[test]
fn published_measurements_are_predicted() {
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
    assert!(text.contains("in interval") && text.contains("* fitted: a price"), "{text}");
    assert!(text.contains("/GB"), "recomputation has no time per freed gigabyte: {text}");
    let not_fitted = &document["overall"][1];
    let count = figures.iter().filter(|figure| figure["fitted"] == false).count();
    assert_eq!((&not_fitted["figures"], &not_fitted["fitted"]), (&count.into(), &0.into()));
    assert!(text.contains("Errors by source") && text.contains("arXiv 2512.12131"), "{text}");
}

#[test]
fn damaged_measurements_are_located() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.json");
    let text = include_str!("../../calibration/data/measurements/boost-a100.json");
    for (pointer, value, part) in [
        ("/measurements/0/value", json!(-1.0), "measurements[0].value"),
        ("/measurements/0/value", json!(1e-320), "measurements[0].value: 1e-320 is not a time"),
        ("/measurements/6/value", json!(101.0), "measurements[6].value: 101 is not a percentage"),
        ("/measurements/60/value", json!(1e300), "measurements[60].value"),
        ("/measurements/60/unit", json!("ms"), "measurements[60].unit"),
        (
            "/measurements/60/measured/recomputation/recompute",
            json!("none"),
            "recompute: must name",
        ),
        ("/measurements/58/measured/kernels/0/norm/norm", json!("auto"), "norm.norm: `auto`"),
        ("/measurements/58/mesh/tensor", json!(1), "kernels[0].norm: runs among the devices"),
        ("/measurements/30/mesh/tensor", json!(1), "measured.kernels[0].all_reduce: runs among"),
        (
            "/measurements/51/measured/step/linears",
            json!("separate"),
            "measured.step.linears: `separate` is priced with fullrank-tp, vanilla-tp",
        ),
        (
            "/measurements/50/measured/step/overlap_tensor_collectives",
            json!(true),
            "measured.step.linears: `separate` is priced without overlap",
        ),
        (
            "/measurements/50/mesh/pipeline",
            json!(2),
            "measured.step.linears: is priced on one replica",
        ),
        (
            "/measurements/50/executor",
            json!("captured"),
            "measured.step.accumulate_grad_in_fp32: differs from a plan in frameworks",
        ),
        (
            "/measurements/60/measured/recomputation/accumulate_grad_in_fp32",
            json!(true),
            "measured.recomputation.accumulate_grad_in_fp32: is stated of planned steps alone",
        ),
        (
            "/measurements/53/measured/step/strategy",
            json!("fullrank-tp"),
            "measurements[53].measured.step.strategy: `fullrank-tp` shards dense linears",
        ),
        (
            "/measurements/50/measured/step/workload/sequence_length",
            json!(1 << 20),
            "measured.step.workload.sequence_length: 1048576 tokens exceed",
        ),
        (
            "/measurements/52/measured/step/workload/global_batch",
            json!(5),
            "measurements[52].measured.step.workload.global_batch: 5 sequences cannot be divided",
        ),
        ("/measurements/58/measured/kernels/0/norm/features", json!(4098), "4098 is not divisible"),
        ("/measurements/0/table", json!(" "), "measurements[0].table: is empty"),
        ("/measurements/0/name", json!("\u{1b}[31m"), "measurements[0].name: contains a control"),
        ("/measurements/0/mesh/data", json!(1 << 24), "measurements[0].mesh: more than"),
        ("/measurements/50/measured/step/workload/global_batch", json!(1 << 24), "microbatches"),
        ("/measurements/0/source", json!("unknown"), "measurements[0].source"),
        ("/measurements/0/hardware", json!("b200"), "measurements[0].hardware"),
        ("/measurements/0/unit", json!("hours"), "measurements[0].unit"),
        (
            "/measurements/1/name",
            json!("fullrank_attn, 4 sequences"),
            "already the name of measurements[0]",
        ),
        ("/measurements/0/mesh/tensor", json!(0), "measurements[0].mesh.tensor"),
        (
            "/measurements/50/measured/step/model",
            json!({"preset": "x"}),
            "measurements[50].measured.step.model.preset: there is no",
        ),
        ("/measurements/50/measured/step/workload/global_batch", json!(5), "cannot be divided"),
        (
            "/measurements/50/measured/step/recompute",
            json!("selective"),
            "measurements[50].measured.step.recompute: `selective` is for GPTs",
        ),
        (
            "/measurements/60/measured/recomputation/recompute",
            json!("selective"),
            "measured.recomputation.recompute: `selective` is for GPTs",
        ),
        ("/format", json!("narrows-measurements/9"), "format"),
    ] {
        let mut file: Value = serde_json::from_str(text).unwrap();
        let (parent, key) = pointer.rsplit_once('/').expect(pointer);
        file.pointer_mut(parent).expect(pointer)[key] = value;
        fs::write(&path, file.to_string()).unwrap();
        let message = failure(&format!("validate --measurements {}", path.display()), 2);
        assert!(message.contains(part), "{pointer}: {message}");
        assert!(message.contains("m.json: "), "the file is not named: {message}");
        assert!(message.lines().all(|line| line.len() < 300), "a line is too long: {message}");
    }
    let mut file: Value = serde_json::from_str(text).unwrap();
    file["measurements"][50]["measured"]["step"]["interleaving"] = json!(2);
    fs::write(&path, file.to_string()).unwrap();
    let message = failure(&format!("validate --measurements {}", path.display()), 2);
    let problem = "measured.step.interleaving: the chunks of a stage are for GPTs";
    assert!(message.contains(problem) && message.contains("omit `interleaving`"), "{message}");
    let duplicate = text.replacen("\"boost-all-reduces\": {", "\"boost-products\": {", 1);
    assert_ne!(duplicate, text);
    fs::write(&path, duplicate).unwrap();
    let message = failure(&format!("validate --measurements {}", path.display()), 2);
    assert!(message.contains("duplicate key `boost-products`"), "{message}");
}

#[test]
fn gpt_steps_without_a_price_are_rejected_by_field() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, path) = (folder.path().join("rows.csv"), folder.path().join("m.json"));
    fs::write(&rows, ROWS).unwrap();
    let good = answer_of_convert(&rows);
    let line = format!("validate --measurements {}", path.display());
    for (field, value, problem, hint) in [
        ("recompute", json!("auto"), "predicted without recomputation", "none, selective, block"),
        (
            "recompute",
            json!("latents"),
            "predicted without recomputation",
            "none, selective, block",
        ),
        ("norm", json!("sync"), "LayerNorms of a GPT have whole rows", "omit `norm`"),
        ("norm", json!("online"), "LayerNorms of a GPT have whole rows", "omit `norm`"),
        ("weights", json!("sharded"), "sharding of a GPT's weights is fixed", "omit `weights`"),
        ("zero", json!("one"), "without ZeRO", "off"),
        (
            "strategy",
            json!("btp"),
            "`fullrank-tp` or `megatron-sp`, not `btp`",
            "fullrank-tp, megatron-sp",
        ),
        ("interleaving", json!(0), "0 is not between 1 and", ""),
        ("interleaving", json!(1 << 15), "4 microbatches through 32768 chunks", ""),
    ] {
        let mut file = good.clone();
        file["measurements"][0]["measured"]["step"][field] = value;
        fs::write(&path, file.to_string()).unwrap();
        let message = failure(&line, 2);
        let place = format!("measurements[0].measured.step.{field}: ");
        for part in [place.as_str(), problem, hint] {
            assert!(message.contains(part), "{field}: {message}");
        }
    }
    let mut file = good.clone();
    file["measurements"][0]["hardware"] = json!("cpu-local");
    fs::write(&path, file.to_string()).unwrap();
    let message = failure(&line, 2);
    assert!(
        message.contains("measured.step.model: `megatron-deepspeed` is priced in 16 bits"),
        "{message}"
    );
    for (pipeline, interleaving, batch, problem) in [
        (2, 5, 16, "model.gpt.layers: 24 is not divisible by 10"),
        (1, 3, 16, "interleaving: 3 chunks of a stage, and the pipeline axis is 1"),
        (2, 3, 12, "workload.global_batch: 3 microbatches are not divisible by 2 stages"),
    ] {
        let mut file = good.clone();
        file["measurements"][0]["mesh"]["pipeline"] = json!(pipeline);
        let step = &mut file["measurements"][0]["measured"]["step"];
        step["interleaving"] = json!(interleaving);
        step["workload"]["global_batch"] = json!(batch);
        fs::write(&path, file.to_string()).unwrap();
        let message = failure(&line, 2);
        assert!(message.contains(&format!("measurements[0].measured.step.{problem}")), "{message}");
    }
    let mut file = good.clone();
    let step = &mut file["measurements"][0]["measured"]["step"];
    step["strategy"] = json!("megatron-sp");
    step["workload"]["sequence_length"] = json!(1023);
    fs::write(&path, file.to_string()).unwrap();
    let message = failure(&line, 2);
    let problem = "workload.sequence_length: 1023 tokens are not divisible by 2 devices";
    assert!(message.contains(problem), "{message}");
    for flags in ["--recompute latents --hardware a100-80gb-8", "--recompute none", "--hardware x"]
    {
        failure(&format!("convert {} {flags}", rows.display()), 2);
    }
}

/// Figures that no fit contains keep the errors that are documented.
#[test]
fn unseen_figures_are_predicted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/measurements/boost-a100-unseen.json");
    let document = answer(&format!("validate --measurements {path}"));
    let overall = &document["overall"][0];
    assert_eq!((&overall["figures"], &overall["fitted"]), (&40.into(), &0.into()));
    assert!(overall["mean_absolute_percent"].as_f64().unwrap() < 7.4, "{overall}");
    // Intervals of 90 % contain 36 of 40 figures.
    assert!(overall["coverage_90"]["inside"].as_u64().unwrap() >= 37, "{overall}");
}

/// Sequence parallelism, selective recomputation and interleaved stages.
#[test]
fn published_megatron_steps_are_predicted() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/measurements/megatron-a100.json");
    let file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema measurements")).unwrap();
    assert!(jsonschema::is_valid(&schema, &file));
    let document = answer(&format!("validate --measurements {path}"));
    let figures = document["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 8);
    assert!(document["overall"][0]["mean_absolute_percent"].as_f64().unwrap() < 4.0, "{document}");
    let predicted = |index: usize| figures[index]["predicted_s"].as_f64().unwrap();
    for (index, figure) in figures.iter().enumerate() {
        assert_eq!((&figure["fitted"], &figure["inside"]), (&false.into(), &true.into()));
        let error = predicted(index) / figure["measured_s"].as_f64().unwrap() - 1.0;
        assert!(error.abs() < 0.12, "{figure}");
    }
    for model in 0..4 {
        assert!(predicted(2 * model + 1) < predicted(2 * model), "{figures:?}");
    }
    // The bubble of 280 equal microbatches on 35 stages is 34/280 of their time without chunks, and with three a third of
    // that. Transfers of all chunks and the loss on the last stage leave less of the difference.
    let mut plain = file;
    for row in plain["measurements"].as_array_mut().unwrap() {
        row["measured"]["step"].as_object_mut().unwrap().remove("interleaving");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plain.json");
    fs::write(&path, plain.to_string()).unwrap();
    let document = answer(&format!("validate --measurements {}", path.display()));
    let ratio = document["figures"][5]["predicted_s"].as_f64().unwrap() / predicted(5);
    assert!((1.03..314.0 / (280.0 + 34.0 / 3.0)).contains(&ratio), "{ratio}");
}

/// Each fitted step is predicted by a fit to the others, in JSON and in text.
#[test]
fn fitted_steps_are_left_out_in_turn() {
    let document = answer("validate");
    let figures = document["left_out"].as_array().unwrap();
    assert_eq!(figures.len(), 8);
    let text = stdout("validate");
    let table = text.split("each left out of the fit in turn").nth(1).expect("a table");
    let table = table.split("Sources").next().unwrap();
    for figure in figures {
        let (name, error) = (figure["name"].as_str().unwrap(), &figure["error_percent"]);
        let row = table.lines().find(|line| line.contains(name)).expect(name);
        assert!(row.contains(&format!("{:+.1} %", error.as_f64().unwrap())), "{row} {error}");
        let all = document["figures"].as_array().unwrap();
        let fitted = all.iter().find(|figure| figure["name"] == name).unwrap();
        let error_of_fit = fitted["error_percent"].as_f64().unwrap();
        assert!(
            error.as_f64().unwrap().abs() > error_of_fit.abs(),
            "{name} was not left out: {error} {error_of_fit}"
        );
    }
}

#[test]
fn measurements_are_predicted_with_a_profile_file() {
    let folder = tempfile::tempdir().unwrap();
    let profile =
        include_str!("../../profiles/cpu-local.json").replace("\"cpu-local\"", "\"mine\"");
    let (hardware, path) = (folder.path().join("mine.json"), folder.path().join("m.json"));
    fs::write(&hardware, profile).unwrap();
    let text = include_str!("../../calibration/data/measurements/boost-a100.json");
    let mut file: Value = serde_json::from_str(text).unwrap();
    file["measurements"].as_array_mut().unwrap().truncate(1);
    file["measurements"][0]["hardware"] = json!("mine");
    fs::write(&path, file.to_string()).unwrap();
    let line = format!("validate --measurements {}", path.display());
    assert!(failure(&line, 2).contains("--hardware FILE"));
    let document = answer(&format!("{line} --hardware {}", hardware.display()));
    assert_eq!(document["figures"][0]["hardware"], "mine");
    let message = failure(&format!("{line} --measurements {}", path.display()), 2);
    assert!(message.contains("two files are named `boost-a100`"), "{message}");
    let again = hardware.display();
    let message = failure(&format!("{line} --hardware {again} --hardware {again}"), 2);
    assert!(message.contains("two files are named `mine`"), "{message}");
}

#[test]
fn a_profile_file_replaces_the_preset_of_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a100.json");
    let mut profile: Value =
        serde_json::from_str(include_str!("../../profiles/a100-80gb.json")).unwrap();
    profile["executors"]["eager"]["step_factor"] = json!(2.0);
    fs::write(&path, profile.to_string()).unwrap();
    let document = answer(&format!("validate --hardware {}", path.display()));
    let hardware = &document["hardware"][0];
    assert_eq!((&hardware["name"], &hardware["hides_preset"]), (&"a100-80gb".into(), &true.into()));
    assert_eq!(hardware["from"], path.to_str().unwrap());
    assert_eq!(document["left_out"], json!([]), "the factor was not fitted to these steps");
    let text = stdout(&format!("validate --hardware {}", path.display()));
    assert!(text.contains("which replaces the preset of that name"), "{text}");
    fs::write(folder.path().join("a100-80gb"), profile.to_string()).unwrap();
    let line = "validate --hardware a100-80gb";
    let mut command = narrows(line);
    let output = command.current_dir(folder.path()).assert().success().get_output().clone();
    let warning = String::from_utf8_lossy(&output.stderr);
    assert!(warning.contains("taken as the preset; for the file pass `./a100-80gb`"), "{warning}");
    let mut command = narrows("validate --hardware h100-sxm");
    let output = command.assert().success().get_output().clone();
    let warning = String::from_utf8_lossy(&output.stderr);
    assert!(warning.contains("no measurement names `h100-sxm`"), "{warning}");
}

/// Bounds include the time of a step beyond its kernels and the factor on them, as predictions do. Launches of the host
/// lengthen the step alone.
#[test]
fn eager_bounds_include_the_time_beyond_kernels() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a100.json");
    let mut profile: Value =
        serde_json::from_str(include_str!("../../profiles/a100-80gb.json")).unwrap();
    let plan = "plan --model cola-tiny --devices 2 --tensor 2 --executor eager";
    assert_eq!(profile["executors"]["eager"]["step_s"], json!(0.048));
    let planned = |profile: &Value| {
        fs::write(&path, profile.to_string()).unwrap();
        answer(&format!("{plan} --hardware {}", path.display()))
    };
    let ratio = |document: &Value| {
        let (step, bound) =
            (&document["prediction"]["step_time_s"], &document["search"]["bound_s"]);
        let [step, bound] = [step, bound].map(|time_s| time_s.as_f64().unwrap() - 0.048);
        step / bound
    };
    let step_s = |document: &Value| document["prediction"]["step_time_s"].as_f64().unwrap();
    let bubble_s =
        |document: &Value| document["prediction"]["breakdown_s"]["bubble"].as_f64().unwrap();
    assert!(ratio(&answer(plan)) > 1.05);
    profile["executors"]["eager"]["host_launch_s"] = json!(0.0);
    let document = planned(&profile);
    profile["executors"]["eager"]["step_factor"] = json!(1.5);
    let scaled = planned(&profile);
    for document in [&document, &scaled] {
        assert_eq!(document["search"]["status"], "optimal");
        assert!((ratio(document) - 1.0).abs() < 1e-6, "{}", ratio(document));
        assert!((bubble_s(document) - 0.048).abs() < 1e-9, "{document}");
    }
    let kernels_s = step_s(&document) - 0.048;
    assert!((step_s(&scaled) - 0.048 - 1.5 * kernels_s).abs() < 1e-9, "{document} {scaled}");
}

/// The rows of a picture are all of the measurements, with their whole names.
#[test]
fn a_picture_has_every_measurement_with_its_whole_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let mut row: Value = serde_json::from_str(JSON_ROW).unwrap();
    row["recompute"] = json!("selective op");
    fs::write(at("rows.json"), json!({"rows": vec![row; 70]}).to_string()).unwrap();
    fs::write(at("m.json"), stdout(&format!("convert {}", at("rows.json")))).unwrap();
    stdout(&format!("validate --measurements {} --plot {}", at("m.json"), at("m.svg")));
    let svg = fs::read_to_string(at("m.svg")).unwrap();
    let name = "row 69: 2048 × 16, 2 × 4096 tokens, T1 P1 D8, selective op";
    assert_eq!(svg.matches(&name[7..]).count(), 70);
    assert!(svg.contains(name));
    // A letter takes at most 8 of the picture's units, and a name ends at the left of its bars.
    let left = svg.split(name).next().unwrap().rsplit(" x=\"").next().unwrap();
    let left: f64 = left.split('"').next().unwrap().parse().unwrap();
    assert!(left > 7.5 * name.chars().count() as f64, "the name ends at {left}");
}
