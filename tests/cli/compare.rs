//! `narrows compare`: differences between plans.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{failure, json as answer, narrows, stdout};

const REQUEST: &str = "--model cola-60m --devices 2 --sequence-length 512 --global-batch 4";

/// Writes the plan of a request to a file.
fn plan(folder: &Path, name: &str, flags: &str) -> PathBuf {
    let path = folder.join(name);
    stdout(&format!("plan {flags} --output {}", path.display()));
    path
}

#[test]
fn a_plan_equals_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = plan(folder.path(), "a.json", REQUEST);
    let path = path.display();
    let compared = answer(&format!("compare {path} {path}"));
    assert_eq!(compared["decisions"], json!([]));
    assert_eq!(compared["segments"], json!([]));
    let text = stdout(&format!("compare {path} {path}"));
    assert!(text.contains("A and B are equally fast"), "{text}");
    assert!(text.contains("None: the plans are the same"), "{text}");
}

#[test]
fn differences_are_those_of_the_predictions() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", &format!("{REQUEST} --tensor 2 --strategy vanilla-tp"));
    let b = plan(folder.path(), "b.json", &format!("{REQUEST} --tensor 1"));
    let (a, b) = (a.display(), b.display());
    let compared = answer(&format!("compare {a} {b}"));
    let schema: Value = serde_json::from_str(&stdout("schema compare")).expect("JSON");
    jsonschema::meta::validate(&schema).expect("a JSON Schema");
    jsonschema::validate(&schema, &compared).expect("an answer that follows its schema");
    for (index, path) in [a.to_string(), b.to_string()].into_iter().enumerate() {
        let cost = answer(&format!("cost {path}"));
        assert_eq!(compared["plans"][index]["prediction"], cost["prediction"]);
        assert_eq!(compared["plans"][index]["decisions"], cost["decisions"]);
        let sum = |parts: &str| -> f64 {
            let parts = compared[parts].as_array().expect("parts").iter();
            parts.map(|part| part["values"][index].as_f64().expect("a number")).sum()
        };
        let step = cost["prediction"]["step_time_s"].as_f64().expect("a time");
        assert!((sum("step_time_s") - step).abs() < 1e-9 * step);
        let stages = cost["prediction"]["peak_memory_bytes"].as_array().expect("stages");
        let memory = stages.iter().filter_map(Value::as_f64).fold(0.0, f64::max);
        assert_eq!(sum("memory_bytes"), memory);
    }
    assert_eq!(compared["fastest"], "B");
    let tensor = json!({"decision": "mesh.tensor", "values": [2, 1]});
    assert!(compared["decisions"].as_array().expect("a list").contains(&tensor));
    let spread = |part: &Value| {
        let value = |index: usize| part["values"][index].as_f64().expect("a number");
        (value(0) - value(1)).abs()
    };
    for parts in ["step_time_s", "memory_bytes", "sent_bytes"] {
        let spreads: Vec<f64> =
            compared[parts].as_array().expect("parts").iter().map(spread).collect();
        assert!(spreads.is_sorted_by(|a, b| a >= b), "{parts}: {spreads:?}");
    }
    for detail in ["", "--details", "--verbose"] {
        let text = stdout(&format!("compare {a} {b} {detail}"));
        let verdict = text.lines().nth(1).expect("a verdict");
        assert!(verdict.contains("B is ") && verdict.contains(" times as fast as A"), "{text}");
        assert!(text.contains("\nTime of a step in ms\n"), "{text}");
        assert!(text.contains("\nMemory per device in MiB, "), "{text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert_eq!(text.contains("replicate: "), !detail.is_empty(), "{text}");
    }
}

/// Parts of the communication are of one stage, so that they add up to a total that some device sends.
#[test]
fn parts_of_communication_are_of_one_stage() {
    let folder = tempfile::tempdir().expect("a folder");
    let mesh = "--model cola-tiny --hardware a100-80gb --devices 8 --pipeline 2 --tensor 2 \
                --data-parallel 2 --global-batch 8 --sequence-length 128";
    for weights in ["any", "sharded"] {
        let path = plan(folder.path(), "a.json", &format!("{mesh} --weights {weights}"));
        let counts = answer(&format!("run {} --backend null", path.display()));
        let sent = |stage: &Value| -> u64 {
            let kinds = stage["collective_sent_bytes"].as_object().expect("kinds").values();
            let axes = kinds.flat_map(|axes| axes.as_object().expect("axes").values());
            let collectives: u64 = axes.map(|bytes| bytes.as_u64().expect("bytes")).sum();
            collectives + stage["transfer_sent_bytes"].as_u64().expect("bytes")
        };
        let stages: Vec<u64> =
            counts["stages"].as_array().expect("stages").iter().map(sent).collect();
        assert_ne!(stages[0], stages[1], "stages that send as much test nothing");
        let compared = answer(&format!("compare {0} {0}", path.display()));
        let parts = compared["sent_bytes"].as_array().expect("parts").iter();
        let total: f64 = parts.map(|part| part["values"][0].as_f64().expect("bytes")).sum();
        assert_eq!(Some(total as u64), stages.into_iter().max());
    }
}

#[test]
fn the_search_is_compared_with_a_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", &format!("{REQUEST} --tensor 2 --strategy vanilla-tp"));
    let compared = answer(&format!("compare {} --with-search", a.display()));
    let best = answer(&format!("plan {REQUEST}"));
    assert_eq!(compared["plans"][1]["name"], "search");
    assert_eq!(compared["plans"][1]["decisions"], best["decisions"]);
    assert_eq!(compared["plans"][1]["search"]["status"], best["search"]["status"]);
    // Flags restrict the search, and the workload applies to all plans.
    let flags = "--with-search --strategy btp --tensor 2 --global-batch 8";
    let plan = fs::read_to_string(&a).expect("a plan");
    let output = narrows(&format!("compare - {flags} --format json")).write_stdin(plan).assert();
    let compared: Value =
        serde_json::from_slice(&output.success().get_output().stdout).expect("JSON");
    for plan in compared["plans"].as_array().expect("plans") {
        assert_eq!(plan["decisions"]["workload"]["global_batch"], 8);
        assert_eq!(plan["decisions"]["mesh"]["tensor"], 2);
    }
}

#[test]
fn other_devices_of_the_search_than_of_a_plan_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", REQUEST);
    let devices = 2;
    for (requested, is_named) in [(devices, false), (2 * devices, true)] {
        let line = format!("compare {} --with-search --devices {requested}", a.display());
        let output = narrows(&line).assert().success().get_output().clone();
        let message = String::from_utf8(output.stderr).expect("UTF-8");
        let warning =
            format!("a.json is a plan for {devices} devices, and is compared as such: --devices");
        assert_eq!(message.contains(&warning), is_named, "{message}");
    }
}

/// Many plans leave little room beside their numbers: neither names nor numbers are broken.
#[test]
fn five_plans_fit_a_terminal() {
    let folder = tempfile::tempdir().expect("a folder");
    let mesh = "--model cola-60m --sequence-length 512 --devices 4 --global-batch 64";
    let flags = ["--tensor 4", "--tensor 2 --zero 1", "--pipeline 4", "--zero 3", "--devices 1"];
    let files = flags.into_iter().zip(0..).map(|(flags, index)| {
        let mesh =
            if flags.contains("devices") { mesh.replace("--devices 4", "") } else { mesh.into() };
        plan(folder.path(), &format!("{index}.json"), &format!("{mesh} {flags}"))
            .display()
            .to_string()
    });
    let files = files.collect::<Vec<_>>().join(" ");
    let run = "--tokens 3e12 --price-per-device-hour 2.1 --power-watts 700";
    let text = stdout(&format!("compare {files} {run}"));
    let names = [
        "device-hours",
        "energy in kWh",
        "optimizer states",
        "data: reduce-scatter",
        "pipeline: P2P",
    ];
    for name in names {
        assert!(text.contains(&format!("\n  {name} ")), "{name} in {text}");
    }
    let (_, parts) = text.split_once("\nTime of a ").expect("a table of times");
    for row in parts.lines().filter(|line| line.contains('.')) {
        // Five plans and their difference, without a unit in the cells.
        let numbers = row.split_whitespace().rev().take(6);
        assert!(
            numbers.clone().all(|cell| cell.trim_start_matches('<').parse::<f64>().is_ok()),
            "{row}"
        );
        assert_eq!(numbers.count(), 6, "{row}");
        assert!(row.chars().count() <= 80, "{row}");
    }
}

/// Plans whose steps have different numbers of tokens are compared by throughput.
#[test]
fn steps_of_different_sizes_are_compared_by_throughput() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", REQUEST);
    let b =
        plan(folder.path(), "b.json", &REQUEST.replace("--global-batch 4", "--global-batch 64"));
    let text = stdout(&format!("compare {} {}", a.display(), b.display()));
    assert!(text.contains("B is ") && text.contains(" tokens/s instead of "), "{text}");
    assert!(text.contains("Time of a million tokens in s\n"), "{text}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(". For a million tokens: "), "{text}");
}

#[test]
fn a_comparison_is_drawn_and_written_as_a_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", &format!("{REQUEST} --tensor 2"));
    let b = plan(folder.path(), "b.json", &format!("{REQUEST} --tensor 1"));
    let (picture, page) = (folder.path().join("plans.svg"), folder.path().join("plans.html"));
    let files = format!("--plot {} --report {}", picture.display(), page.display());
    let text = stdout(&format!("compare {} {} {files}", a.display(), b.display()));
    let picture = fs::read_to_string(picture).expect("the picture");
    for name in ["a.json", "b.json"] {
        assert!(picture.contains(name), "{picture}");
    }
    let page = fs::read_to_string(page).expect("the page");
    let verdict = text.lines().nth(1).expect("a verdict").trim();
    assert!(page.contains(verdict), "{verdict} in {page}");
    assert!(page.contains("<svg") && page.contains("<h2>Decisions that differ</h2>"), "{page}");
}

#[test]
fn bad_comparisons_are_located() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = plan(folder.path(), "a.json", REQUEST);
    let b = plan(folder.path(), "b.json", "--model cola-tiny");
    let (a, b) = (a.display(), b.display());
    for (arguments, part) in [
        (format!("{a}"), "--with-search"),
        (format!("{a} {b}"), "is a plan of `cola-tiny`, and"),
        (format!("{a} {a} --strategy btp"), "--strategy: describes a search"),
        (format!("{a} {a} --devices 4"), "--devices: describes a search"),
        (format!("{a} {a} {a} {a} {a} {a}"), "6 plans are too many"),
        ("- -".into(), "one standard input"),
        (format!("{a} {a} --plot plans.svg --plot-kind block"), "draws no picture `block`"),
        (format!("{a} no/such.json"), "no/such.json: cannot be read"),
        (String::new(), "<PLAN>"),
    ] {
        let message = failure(&format!("compare {arguments}"), 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
    let message = failure(&format!("compare {a} --with-search --memory-limit 1MiB"), 1);
    assert!(message.contains("no plan exists"), "{message}");
}

/// Schedules name their model chunks, and the blocks of a stage are those of its chunks.
#[test]
fn chunks_of_interleaved_pipelines_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let request = "--model cola-60m --hardware a100-80gb --devices 2 --pipeline 2 --micro-batch 1 \
                   --global-batch 8 --sequence-length 512";
    let interleaved = plan(folder.path(), "a.json", &format!("{request} --schedule interleaved"));
    let one_f_one_b = plan(folder.path(), "b.json", &format!("{request} --schedule 1f1b"));
    let (a, b) = (interleaved.display(), one_f_one_b.display());
    let text = fs::read_to_string(&interleaved).expect("a plan");
    let stages = serde_json::from_str::<Value>(&text).expect("JSON")["stages"].clone();
    let (stages, blocks) = (stages.as_array().expect("stages").len(), 8);
    let chunks = stages / 2;
    let of_stage = vec![(blocks / stages).to_string(); chunks].join(" + ");
    let text = stdout(&format!("compare {a} {b}"));
    let row = |name: &str| text.lines().find(|line| line.trim().starts_with(name)).expect(name);
    let schedule = row("schedule");
    assert!(schedule.contains(&format!("interleaved ({chunks} chunks)")), "{text}");
    assert!(schedule.ends_with(" 1F1B"), "{text}");
    assert!(row("blocks of each stage").contains(&format!("2 × ({of_stage})")), "{text}");
    assert!(!text.contains("chunks of each stage"), "{text}");
    let compared = answer(&format!("compare {a} {b}"));
    let decisions = compared["decisions"].as_array().expect("a list");
    for (decision, values) in
        [("schedule", json!(["interleaved", "1f1b"])), ("chunks of each stage", json!([chunks, 1]))]
    {
        let expected = json!({"decision": decision, "values": values});
        assert!(decisions.contains(&expected), "{compared:#}");
    }
}

/// Twice the devices make a plan faster, but not each of its devices.
#[test]
fn plans_on_other_numbers_of_devices_are_compared_per_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let request = "--model cola-60m --hardware a100-80gb --global-batch 8 --sequence-length 512";
    let plans = [("a.json", 4), ("b.json", 2)].map(|(name, devices)| {
        plan(folder.path(), name, &format!("{request} --devices {devices}")).display().to_string()
    });
    let compare = format!("compare {}", plans.join(" "));
    let answer = answer(&compare);
    let rate = |index: usize, devices: f64| {
        let rate = &answer["plans"][index]["prediction"]["tokens_per_s"];
        (rate.as_f64().expect("a rate") / devices).round()
    };
    let text = stdout(&compare).replace("\n  ", " ").replace(',', "");
    let phrase = format!(
        "Tokens/s of one device: A on 4 devices: {}; B on 2 devices: {}.",
        rate(0, 4.0),
        rate(1, 2.0)
    );
    assert!(text.contains(&phrase), "{phrase}\n{text}");
    assert!(!stdout(&format!("compare {0} {0}", plans[0])).contains("of one device"));
}
