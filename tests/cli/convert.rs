//! `narrows convert`: rows of measured steps as files of measurements.

use std::fs;

use narrows_test_support::rows::rows_folder;
use serde_json::{Value, json};

use super::{failure, json as answer, narrows, stdout};

pub(super) const ROWS: &str = "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,\
sequence length,tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n\
8,16,2,1024,16,24,1024,2,2,2,400\n";
/// Flags for properties that rows do not contain.
const ROW_FLAGS: &str = "--hardware a100-80gb-8 --recompute none";
pub(super) const JSON_ROW: &str = r#"{"source": "own runs", "framework": "torchtitan FSDP2 eager", "family": "torchtitan",
 "model": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "d_ff": 8192, "gated": true, "vocab": 128256,
 "tied": true}, "device": "A100-80GB", "devices": 8, "tensor": 1, "pipeline": 1, "data": 8, "sharding": "FULL_SHARD",
 "micro_batch": 2, "global_batch": 16, "sequence": 4096, "dtype": "bf16", "recompute": "none", "step_s": 0.9}"#;

pub(super) fn answer_of_convert(path: &std::path::Path) -> Value {
    serde_json::from_str(&stdout(&format!("convert {} {ROW_FLAGS}", path.display()))).unwrap()
}

#[test]
fn converted_rows_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.csv");
    fs::write(&rows, ROWS).unwrap();
    let converted = stdout(&format!("convert {} {ROW_FLAGS} --name mine", rows.display()));
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

/// Rows of other frameworks in JSON are predicted, and their worst cells name a term.
#[test]
fn rows_in_json_are_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let row: Value = serde_json::from_str(JSON_ROW).unwrap();
    let with = |changes: &[(&str, Value)]| {
        let mut row = row.clone();
        for (field, value) in changes {
            row[*field] = value.clone();
        }
        row
    };
    let throughput = with(&[("step_s", json!(null)), ("tokens_per_s", json!(60000.0))]);
    let rows = json!({"rows": [
        row,
        with(&[("recompute", json!("selective op"))]),
        throughput,
        with(&[("family", json!("mpt")), ("device", json!("H100-80GB"))]),
        with(&[("framework", json!("torchtitan, torch.compile"))]),
    ]});
    let path = folder.path().join("rows.json");
    fs::write(&path, rows.to_string()).unwrap();
    let converted = stdout(&format!("convert {} --name theirs", path.display()));
    let file: Value = serde_json::from_str(&converted).unwrap();
    let schema: Value = serde_json::from_str(&stdout("schema measurements")).unwrap();
    assert!(jsonschema::is_valid(&schema, &file));
    let of = |index: usize| &file["measurements"][index];
    assert_eq!(of(2)["value"].as_f64(), Some(16.0 * 4096.0 / 60000.0));
    assert_eq!(
        (&of(3)["hardware"], &of(0)["hardware"]),
        (&"h100-sxm".into(), &"a100-80gb-8".into())
    );
    assert_eq!(of(4)["measured"]["step"]["framework"], "torchtitan-compiled");
    fs::write(&path, &converted).unwrap();
    let document = answer(&format!("validate --measurements {}", path.display()));
    for figure in document["figures"].as_array().unwrap() {
        let [low, high] = [0, 1].map(|end| figure["interval_s"][end].as_f64().unwrap());
        let predicted = figure["predicted_s"].as_f64().unwrap();
        assert!(
            0.2 < predicted && predicted < 3.0 && low < predicted && predicted < high,
            "{figure}"
        );
        assert_eq!(figure["fitted"], false);
    }
    let cells = document["cells"].as_array().unwrap();
    let names: Vec<&str> = cells.iter().filter_map(|cell| cell["name"].as_str()).collect();
    assert!(names.contains(&"width 2048, tensor 1, 2 × 4096 tokens, h100-sxm"), "{names:?}");
    assert!(names.iter().all(|name| name.contains("-80gb") || name.contains("h100")), "{names:?}");
    assert!(!cells.is_empty() && cells.iter().any(|cell| cell["mended_by"]["term"].is_string()));
}

/// The rows that the tables of frameworks were fitted to are labelled, and their errors are those of the README.
#[test]
fn rows_of_the_tables_are_labelled_as_fitted() {
    let rows = concat!(env!("CARGO_MANIFEST_DIR"), "/calibration/data/fits/framework-rows.json");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("converted.json");
    fs::write(&path, stdout(&format!("convert {rows} --name frameworks"))).unwrap();
    let document = answer(&format!("validate --measurements {}", path.display()));
    let figures = document["figures"].as_array().unwrap();
    assert!(figures.len() == 73 && figures.iter().all(|figure| figure["fitted"] == true));
    for (table, largest) in [
        ("mpt on H100-80GB", 4.0),
        ("mpt on A100-80GB", 4.0),
        ("nanotron on H100-80GB", 3.0),
        ("torchtitan on A100-80GB", 2.0),
    ] {
        let tables = document["tables"].as_array().unwrap();
        let of = tables.iter().find(|known| known["name"] == format!("frameworks: {table}"));
        let mean = of.unwrap()["mean_absolute_percent"].as_f64().unwrap();
        assert!(mean < largest, "{table}: {mean}");
    }
}

/// Rows state whatever steps of measurements files state, and are converted to the same steps.
#[test]
fn rows_state_what_measured_steps_state() {
    let planned = json!({"source": "own runs", "framework": "llama.py", "family": "plan", "device": "A100-80GB", "devices": 4,
        "tensor": 4, "pipeline": 1, "data": 1, "sharding": "none", "micro_batch": 1, "global_batch": 1, "sequence": 4096,
        "dtype": "bf16", "executor": "eager", "weights": "sharded", "step_s": 0.4});
    let with = |row: &Value, changes: Value| {
        let mut row = row.clone();
        row.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        row
    };
    let megatron = with(
        &serde_json::from_str(JSON_ROW).unwrap(),
        json!({"family": "megatron", "devices": 16, "tensor": 4, "pipeline": 2, "data": 2, "sharding": "none",
            "interleaving": 2, "strategy": "megatron-sp", "recompute": "block", "dtype": "fp16", "model": {"layers": 16,
            "hidden": 2048, "heads": 32, "kv_heads": 32, "d_ff": 8192, "gated": false, "vocab": 51200, "tied": true}}),
    );
    let rows = json!({"rows": [
        with(&planned, json!({"model": {"preset": "llama-7b"}, "strategy": "fullrank-tp", "recompute": "none",
            "linears": "separate", "accumulate_grad_in_fp32": false, "fitted": true})),
        with(&planned, json!({"model": {"preset": "cola-7b"}, "strategy": "vanilla-tp-published", "recompute": "latents",
            "norm": "sync", "accumulate_grad_in_fp32": true})),
        with(&planned, json!({"model": {"preset": "cola-1b"}, "strategy": "btp", "recompute": "auto", "norm": "online",
            "devices": 32, "data": 4, "context": 2, "sharding": "ZeRO-1", "global_batch": 8, "executor": "compiled",
            "overlap_tensor_collectives": true, "dtype": null})),
        megatron,
    ]});
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.json");
    fs::write(&path, rows.to_string()).unwrap();
    let file: Value =
        serde_json::from_str(&stdout(&format!("convert {}", path.display()))).unwrap();
    let measurements = file["measurements"].as_array().unwrap();
    let step = |index: usize| &measurements[index]["measured"]["step"];
    let workload = json!({"global_batch": 1, "sequence_length": 4096, "micro_batch": 1});
    assert_eq!(
        step(0),
        &json!({"model": {"preset": "llama-7b"}, "workload": workload, "strategy": "fullrank-tp", "recompute": "none",
            "norm": "auto", "weights": "sharded", "zero": "off", "linears": "separate", "accumulate_grad_in_fp32": false})
    );
    assert_eq!(
        step(1),
        &json!({"model": {"preset": "cola-7b"}, "workload": workload, "strategy": "vanilla-tp-published",
            "recompute": "latents", "norm": "sync", "weights": "sharded", "zero": "off", "accumulate_grad_in_fp32": true})
    );
    assert_eq!(
        (&step(2)["zero"], &step(2)["overlap_tensor_collectives"]),
        (&"one".into(), &true.into())
    );
    assert_eq!(
        measurements[2]["mesh"],
        json!({"tensor": 4, "context": 2, "pipeline": 1, "data": 4})
    );
    assert_eq!(measurements[2]["executor"], "compiled");
    assert_eq!(
        (&step(3)["strategy"], &step(3)["interleaving"]),
        (&"megatron-sp".into(), &2.into())
    );
    assert_eq!(
        (&measurements[0]["fitted"], &measurements[1]["fitted"]),
        (&true.into(), &json!(null))
    );

    let schema: Value = serde_json::from_str(&stdout("schema measurements")).unwrap();
    let keys = schema["$defs"]["TrainingStep"]["properties"].as_object().unwrap().keys();
    for key in keys {
        assert!((0..4).any(|index| step(index).get(key).is_some()), "no row states `{key}`");
    }
}

#[test]
fn rows_in_json_report_every_defect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.json");
    let row: Value = serde_json::from_str(JSON_ROW).unwrap();
    for (field, value, problem) in [
        ("family", json!("gpt"), "rows[0].family: `gpt` has no prices"),
        ("device", json!("B200"), "rows[0].device: no preset is known for `B200`"),
        ("devices", json!(4), "rows[0].devices: 4 is not tensor × pipeline × data"),
        ("dtype", json!("fp8"), "rows[0].dtype: `fp8` is not a format of 16 bits"),
        ("recompute", json!("some"), "rows[0].recompute: `some` is not a known recomputation"),
        ("sharding", json!("half"), "rows[0].sharding: `half` is not a known sharding"),
        ("step_s", json!(null), "rows[0].step_s: is missing"),
        ("step_s", json!(-1.0), "rows[0], value: -1 is not a time"),
        ("global_batch", json!(17), "17 sequences cannot be divided"),
        ("model", json!({"layers": 16}), "rows[0].model.hidden: is missing"),
        ("dtype", json!(null), "rows[0].dtype: is missing"),
        ("family", json!("plan"), "rows[0].model: has sizes alone"),
        ("model", json!({"preset": "cola-7b"}), "rows[0].model: has a plan"),
        (
            "linears",
            json!("separate"),
            "rows[0], measured.step.linears: is stated of planned steps alone",
        ),
        ("linears", json!("apart"), "rows[0].linears: expected `any` or `separate`, found `apart`"),
        (
            "accumulate_grad_in_fp32",
            json!(true),
            "rows[0], measured.step.accumulate_grad_in_fp32: is stated of planned steps alone",
        ),
        ("accumulate_grad_in_fp32", json!("yes"), "rows[0].accumulate_grad_in_fp32: expected"),
        ("norm", json!("sync"), "rows[0], measured.step.norm: the norms of a `decoder`"),
        (
            "overlap_tensor_collectives",
            json!(true),
            "rows[0], measured.step.overlap_tensor_collectives: is stated of planned steps alone",
        ),
        (
            "strategy",
            json!("auto"),
            "`auto` leaves the sharding to a plan, and a `decoder` has none",
        ),
        (
            "step_s",
            json!(1e12),
            "value: 1e12 is not a time: it must be between 1e-12 and 1e9 seconds",
        ),
        ("global_batch", json!(0), "rows[0].global_batch: 0 is not a positive number"),
        ("all", json!({"sequence": 0, "tokens_per_s": 9}), "rows[0].sequence: 0 is not a positive"),
        (
            "model",
            json!({"layers": 16, "hidden": 2048, "heads": 1, "kv_heads": 56, "d_ff": 8192, "gated": true,
                "vocab": 128256, "tied": true}),
            "model.decoder.heads: 1 is not divisible by 56 (`kv_heads`)",
        ),
        (
            "all",
            json!({"family": "megatron", "sharding": "none", "model": {"layers": 16, "hidden": 2048, "heads": 32,
                "kv_heads": 32, "d_ff": 8192, "gated": false, "vocab": 51200, "tied": false}}),
            "rows[0].model.tied: a Megatron-LM row is priced with a tied embedding",
        ),
        ("tokens_per_s", json!(0), "rows[0].tokens_per_s: 0 is not positive"),
        ("tokens_per_s", json!(1e300), "0.9 contradicts `tokens_per_s`: at 1e300 tokens"),
        ("context", json!(2), "rows[0].devices: 8 is not tensor × pipeline × data × context"),
        (
            "all",
            json!({"family": "plan", "model": {"preset": "llama-1b"}}),
            "rows[0].strategy: is missing",
        ),
        (
            "all",
            json!({"recompute": "selective + sequence parallel", "strategy": "fullrank-tp"}),
            "rows[0].strategy: `fullrank-tp` contradicts `recompute`",
        ),
    ] {
        let mut row = row.clone();
        match field {
            "all" => row.as_object_mut().unwrap().extend(value.as_object().unwrap().clone()),
            _ => row[field] = value,
        }
        fs::write(&path, json!({"rows": [row]}).to_string()).unwrap();
        let message = failure(&format!("convert {}", path.display()), 2);
        assert!(message.contains(problem), "{message}");
    }
    fs::write(&path, json!({"rows": []}).to_string()).unwrap();
    assert!(failure(&format!("convert {}", path.display()), 2).contains("rows: is empty"));
    let message = failure(&format!("convert {} --recompute none", path.display()), 2);
    let named = format!("--recompute: applies to CSV only, and `{}` holds JSON", path.display());
    assert!(message.contains(&named), "{message}");
}

#[test]
fn invalid_rows_are_located_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    let header = ROWS.lines().next().unwrap();
    for (rows, part) in [
        (ROWS.replace(",400", ",soon"), "line 2, column `iteration time (ms)`: is not a number"),
        (ROWS.replace(",400", ",nan"), "line 2, value: NaN is not a time"),
        (ROWS.replace(",400", ",-1"), "line 2, value: -1 is not a time"),
        (ROWS.replace(",400", ""), "line 2, column `iteration time (ms)`: is missing"),
        (ROWS.replace(",400", ",1,400"), "line 2: 12 cells for 11 columns"),
        (
            ROWS.replace(",24,", ",25,"),
            "line 2, measured.step.model.gpt.layers: 25 is not divisible",
        ),
        (ROWS.replace(",24,", ",2.5,"), "line 2, column `# layers`: 2.5 is not a count"),
        (ROWS.replace("8,16", "9,16"), "line 2, column `# gpus`: 9 is not the product"),
        (
            ROWS.replace("2,2,2,", "999999999,999999999,999999999,"),
            "is not the product of the mesh",
        ),
        (
            ROWS.replace("micro batch", "global batch"),
            "line 1: more than one column is named `global batch`",
        ),
        (ROWS.replace(',', ";"), "line 1: there is no column `hidden size`"),
        (header.to_owned(), "there are no rows"),
        (String::new(), "rows.csv: is empty"),
    ] {
        fs::write(&path, rows).unwrap();
        let message = failure(&format!("convert {} {ROW_FLAGS}", path.display()), 2);
        assert!(message.contains(part), "{part}: {message}");
    }
    let quoted = ROWS.lines().map(|line| format!("\"{}\"\r\n", line.replace(',', "\",\"")));
    fs::write(&path, quoted.collect::<String>()).unwrap();
    let converted: Value = answer_of_convert(&path);
    fs::write(&path, ROWS).unwrap();
    assert_eq!(converted, answer_of_convert(&path), "quotes or line ends change the result");
}

#[test]
fn rows_that_no_price_was_fitted_to_are_not_marked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    fs::write(&path, ROWS).unwrap();
    let written = folder.path().join("mine.json");
    fs::write(&written, stdout(&format!("convert {} {ROW_FLAGS}", path.display()))).unwrap();
    let document = answer(&format!("validate --measurements {}", written.display()));
    assert_eq!(document["figures"][0]["fitted"], false);
}

#[test]
#[ignore = "needs NARROWS_ROWS"]
fn needs_rows_the_rows_that_prices_were_fitted_to_are_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let written = folder.path().join("mine.json");
    let sample = rows_folder().join("vtrain-a100-single-sample.csv");
    fs::write(
        &written,
        stdout(&format!("convert {} {ROW_FLAGS}", sample.display()))
            .replace("\"fitted\": true", "\"fitted\": false"),
    )
    .unwrap();
    let line = format!("validate --measurements {}", written.display());
    let document = answer(&line);
    assert_eq!(document["overall"].as_array().unwrap().len(), 1, "a row counts as predicted");
    assert_eq!(document["overall"][0]["fitted"], 240);
    let figures = document["figures"].as_array().unwrap();
    assert!(figures.iter().all(|figure| figure["terms_of_fit"].is_null()));
    let mut rounded: Value = serde_json::from_str(&fs::read_to_string(&written).unwrap()).unwrap();
    for row in rounded["measurements"].as_array_mut().unwrap() {
        let value = row["value"].as_f64().unwrap();
        row["value"] = json!(format!("{value:.1e}").parse::<f64>().unwrap());
        row["measured"]["step"]["recompute"] = json!("block");
    }
    fs::write(&written, rounded.to_string()).unwrap();
    let document = answer(&line);
    assert_eq!(document["overall"][0]["fitted"], 240, "rounded rows count as predicted");
    assert_eq!(document["figures"][0]["terms_of_fit"], json!(["a100-80gb-8", "none", "51200"]));
    let text = stdout(&line);
    assert!(text.contains("GPT prices were fitted to 240 measurements"), "{text}");
}

/// A file of rows that is not read as its author meant is refused with the reason.
#[test]
fn files_of_rows_are_read_as_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows");
    let convert = |text: &str, flags: &str| {
        fs::write(&path, text).unwrap();
        narrows(&format!("convert {} {flags}", path.display())).output().unwrap()
    };
    let rows = |row: &str| format!("{{\"rows\": [{row}]}}");
    let slow = JSON_ROW.replace("\"step_s\": 0.9", "\"step_s\": 0.9, \"tokens_per_s\": 60000");
    let agreeing = slow.replace("60000", "72000");
    let huge = JSON_ROW.replace("\"hidden\": 2048", "\"hidden\": 9223372036854775807");
    let csv = "--hardware a100-80gb-8 --recompute none";
    for (text, flags, part) in [
        ("", csv, "rows: is empty"),
        ("\u{feff} \n", "", "rows: is empty"),
        ("[{}]", "", "rows: is a JSON array"),
        ("a,b", "--recompute none", "rows` is read as CSV, which does not state hardware"),
        (&rows(JSON_ROW), "--source here", "--source: applies to CSV only"),
        (&rows(JSON_ROW), "--vocabulary 9", "--vocabulary: applies to CSV only"),
        (&rows(JSON_ROW), "--recompute none", "--recompute: applies to CSV only"),
        (&rows(&slow), "", "rows[0].step_s: 0.9 contradicts `tokens_per_s`"),
        (&rows(&huge), "", "hidden"),
        (&rows(&huge.replace("torchtitan", "megatron")), "", "model"),
    ] {
        let output = convert(text, flags);
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text} {flags}: {message}");
        assert!(message.contains(part), "{text} {flags}: {message}");
    }
    for text in [rows(JSON_ROW), format!("\u{feff}{}", rows(&agreeing))] {
        let output = convert(&text, "");
        assert!(output.status.success(), "{text}: {output:?}");
    }
}
