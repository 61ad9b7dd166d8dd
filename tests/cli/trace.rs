//! Traces: `narrows run --trace`, and `--trace` of `plan` and `cost`.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use super::run::SMALL;
use super::{failure, json, narrows, stdout};

/// Rounding error of microseconds.
const SLACK: f64 = 0.01;

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} in {event}"))
}

/// Events with a duration, by process and thread.
fn threads(trace: &Value) -> BTreeMap<(u64, u64), Vec<Value>> {
    let mut threads: BTreeMap<(u64, u64), Vec<Value>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        if event["ph"] == "X" {
            let key = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            threads.entry(key).or_default().push(event.clone());
        }
    }
    threads
}

/// Checks that each event ends before the next begins, or contains it.
fn check_nesting(events: &[Value]) {
    let mut spans: Vec<(f64, f64)> =
        events.iter().map(|e| (number(e, "ts"), number(e, "ts") + number(e, "dur"))).collect();
    spans.sort_by(|a, b| (a.0, -a.1).partial_cmp(&(b.0, -b.1)).unwrap());
    let mut open: Vec<(f64, f64)> = vec![];
    for (begin, end) in spans {
        assert!(begin <= end, "{begin} to {end}");
        while open.last().is_some_and(|outer| outer.1 <= begin + SLACK) {
            open.pop();
        }
        let fits = open.last().is_none_or(|outer| end <= outer.1 + SLACK);
        assert!(fits, "{begin} to {end} in {:?}", open.last());
        open.push((begin, end));
    }
}

#[test]
fn a_trace_has_every_instruction_once_measured_and_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (trace, metrics) = (at("trace.json"), at("m.jsonl"));
    let mesh = "--devices 4 --tensor 2 --pipeline 2 --micro-batch 1 --schedule zero-bubble";
    let line = format!("{SMALL} {mesh} --steps 3 --trace {trace} --metrics {metrics}");
    assert_eq!(json(&line)["trace"], trace);
    let trace: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
    let counts = json(&format!("run --backend null --global-batch 2 --sequence-length 16 {mesh}"));
    let last = fs::read_to_string(&metrics).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    let step_us = 1e6 * number(&last, "step_time_s");
    let predicted_us = 1e6 * number(&last, "predicted_step_time_s");
    let documented = include_str!("../../docs/metrics.md").replace('\n', " ");
    for event in trace["traceEvents"].as_array().unwrap() {
        let name = event["args"]["name"].as_str().filter(|_| event["name"] == "thread_name");
        assert!(name.is_none_or(|name| documented.contains(&format!("*{name}*"))), "{event}");
    }
    let threads = threads(&trace);
    threads.values().for_each(|events| check_nesting(events));
    let names: Vec<&str> = trace["traceEvents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names.len(), 4 + 2, "{names:?}");
    let processes = (0..4).map(|device| (device, device / 2, step_us));
    let expected = (0..2).map(|stage| (1_000_000 + stage, stage, predicted_us));
    for (pid, stage, length_us) in processes.chain(expected) {
        let thread = |tid: u64| threads.get(&(pid, tid)).cloned().unwrap_or_default();
        let instructions = [thread(1), thread(2)].concat();
        let mut traced: BTreeMap<String, u64> = BTreeMap::new();
        for event in &instructions {
            let name = event["args"]["instruction"].as_str().unwrap();
            *traced.entry(name.into()).or_default() += 1;
        }
        let traced = serde_json::to_value(traced).unwrap();
        assert_eq!(traced, counts["stages"][stage as usize]["instructions"], "process {pid}");
        let busy: f64 = instructions.iter().map(|event| number(event, "dur")).sum();
        assert!(busy <= length_us * 1.0001, "process {pid}: {busy} of {length_us}");
        let steps: Vec<Value> = thread(0).into_iter().filter(|e| e["cat"] == "step").collect();
        let [step] = &steps[..] else { panic!("one step, not {steps:?}") };
        assert!(number(step, "dur") <= length_us * 1.0001, "{step}");
        // Instructions cover nearly all the time of a device, waits included.
        let measured = pid < 1_000_000;
        assert!(!measured || busy > 0.5 * number(step, "dur"), "process {pid}: {busy} of {step}");
        // The passes of two microbatches, and the update. The first stage has no weight-gradient passes.
        let passes = thread(0).iter().filter(|event| event["cat"] == "pass").count();
        assert_eq!(passes, 2 + 2 + 1 + if stage == 0 { 0 } else { 2 });
    }
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let blocks: Vec<u64> = events.filter_map(|event| event["args"]["block"].as_u64()).collect();
    assert!(blocks.contains(&0) && blocks.contains(&1), "{blocks:?}");
}

/// The all-reduce of the gradient norm synchronises the stages before the update: all stages leave it together.
#[test]
fn predicted_stages_wait_for_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let mesh = "--devices 3 --pipeline 3 --micro-batch 1";
    stdout(&format!("{SMALL} {mesh} --steps 1 --trace {}", trace.display()));
    let trace: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
    let threads = threads(&trace);
    let end = |event: &Value| number(event, "ts") + number(event, "dur");
    let syncs: Vec<(f64, f64)> = (0..3)
        .map(|stage| {
            let events = &threads[&(1_000_000 + stage, 2)];
            let norm = events.iter().find(|e| e["name"] == "step gradient norm").unwrap();
            let compute = threads[&(1_000_000 + stage, 1)].iter();
            let updates = compute.filter(|e| e["args"]["instruction"] == "adamw");
            let first = updates.map(|e| number(e, "ts")).fold(f64::INFINITY, f64::min);
            assert!(first >= end(norm) - SLACK && first.is_finite(), "stage {stage}: {first}");
            (number(norm, "ts"), end(norm))
        })
        .collect();
    let last = syncs.iter().map(|(arrival, _)| *arrival).fold(0.0, f64::max);
    for (_, end) in &syncs {
        assert!((end - syncs[0].1).abs() < SLACK && *end > last, "{syncs:?}");
    }
    assert!(syncs.iter().any(|(arrival, _)| *arrival < last - SLACK), "no stage waits: {syncs:?}");
}

#[test]
fn the_traced_steps_can_be_selected() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let line = format!("{SMALL} --steps 4 --trace {}", trace.display());
    stdout(&format!("{line} --trace-steps 2-3"));
    let events: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
    let threads = threads(&events);
    threads.values().for_each(|events| check_nesting(events));
    let steps = threads[&(0, 0)].iter().filter(|event| event["cat"] == "step");
    let names: Vec<&str> = steps.map(|event| event["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["step 2", "step 3"]);
    for (arguments, part) in [
        (format!("{line} --trace-steps 4-5"), "--trace-steps: the run has 4 steps, and no step 5"),
        (format!("{line} --trace-steps 3-2"), "the first step is after the last"),
        ("run --trace-steps 1".into(), "--trace"),
        ("run --trace -".into(), "--trace: a trace cannot go to standard output"),
        ("run --backend null --trace t.json".into(), "--trace: the null backend"),
    ] {
        let message = failure(&arguments, 2);
        assert!(message.contains(part), "{arguments}: {message}");
    }
}

#[test]
fn a_failed_run_writes_the_trace_of_earlier_steps() {
    let folder = tempfile::tempdir().unwrap();
    let hot = "--learning-rate 1e30 --warm-up-steps 0 --clip-norm 1e30 --format json";
    let failed_run = |flags: &str| {
        let trace = folder.path().join("trace.json");
        let line = format!("{SMALL} {hot} --steps 5 {flags} --trace {}", trace.display());
        let message = failure(&line, 1);
        let text = fs::read_to_string(&trace).ok();
        let _ = fs::remove_file(&trace);
        (message, text)
    };
    for flags in ["", "--trace-steps 1-3"] {
        let (message, trace) = failed_run(flags);
        assert!(message.contains("the trace of 1 step before it is in "), "{message}");
        let trace: Value = serde_json::from_str(&trace.unwrap()).unwrap();
        let threads = threads(&trace);
        threads.values().for_each(|events| check_nesting(events));
        let steps = threads[&(0, 0)].iter().filter(|event| event["cat"] == "step");
        let names: Vec<&str> = steps.map(|event| event["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["step 1"]);
    }
    let (message, trace) = failed_run("--trace-steps 3-4");
    assert!(trace.is_none() && !message.contains("trace"), "{message}");
}

#[test]
fn a_simulated_trace_is_as_long_as_the_predicted_step() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (trace, plan) = (at("trace.json"), at("plan.json"));
    let request = "--model cola-tiny --hardware a100-80gb --devices 8 --tensor 2 --pipeline 2 \
        --micro-batch 1 --global-batch 8 --sequence-length 128";
    for command in [format!("plan {request} --output {plan}"), format!("cost {plan}")] {
        let answer = json(&format!("{command} --trace {trace}"));
        let step_us = 1e6 * number(&answer["prediction"], "step_time_s");
        let events: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
        let threads = threads(&events);
        threads.values().for_each(|events| check_nesting(events));
        let processes: Vec<u64> = threads.keys().map(|(device, _)| *device).collect();
        assert_eq!((processes.len(), processes.last()), (4 * 8, Some(&7)), "{processes:?}");
        let instructions = || threads.iter().filter(|((_, thread), _)| *thread > 0);
        let ends = instructions().flat_map(|(_, events)| events);
        let end = ends.map(|e| number(e, "ts") + number(e, "dur")).fold(0.0, f64::max);
        assert!((end - step_us).abs() < SLACK, "{end} µs in the trace, {step_us} µs predicted");
        // Gradients are reduced during the last backward pass, before the update begins.
        for device in 0..8 {
            let update = threads[&(device, 0)].iter().find(|e| e["name"] == "update");
            let begin = number(update.expect("an update"), "ts");
            for reduction in &threads[&(device, 3)] {
                assert_eq!(reduction["args"]["phase"], "step");
                let end = number(reduction, "ts") + number(reduction, "dur");
                assert!(end <= begin + SLACK, "{reduction}");
            }
        }
        // All other instructions of one device follow each other, so their times add up to at most the step.
        for device in 0..8 {
            let events =
                instructions().filter(|((process, thread), _)| *process == device && *thread < 3);
            let busy: f64 = events.flat_map(|(_, events)| events).map(|e| number(e, "dur")).sum();
            assert!(busy <= step_us + SLACK && busy > 0.5 * step_us, "device {device}: {busy}");
        }
        let gemm = threads[&(0, 1)]
            .iter()
            .find(|e| e["args"]["kernel"].as_str().unwrap().starts_with("GEMM"));
        let gemm = gemm.expect("a GEMM");
        assert!(number(&gemm["args"], "flops") > number(&gemm["args"], "bytes"), "{gemm}");
        let microbatches = threads[&(0, 2)].iter().filter_map(|e| e["args"]["microbatch"].as_u64());
        assert_eq!(microbatches.max(), Some(3), "four microbatches of each replica");
    }
    for (flags, part) in [
        ("--trace -", "--trace: a trace cannot go to standard output"),
        ("--trace missing/trace.json", "missing/trace.json: cannot be written"),
    ] {
        let message = failure(&format!("plan {request} {flags}"), 2);
        assert!(message.contains(part), "{message}");
    }
}

/// A trace too large for viewers says what it has, in the file and in a warning.
#[test]
#[ignore = "second level: simulates 8,192 microbatches"]
fn a_large_simulated_trace_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let line = format!(
        "plan --model cola-tiny --hardware a100-80gb --devices 4 --pipeline 2 --micro-batch 1 \
         --global-batch 16384 --sequence-length 16 --trace {}",
        file.display()
    );
    let output = narrows(&line).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let warning = String::from_utf8(output.stderr).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    let (events, end) = text.rsplit_once("],").unwrap();
    let extent: Value = serde_json::from_str(&format!("{{{end}")).unwrap();
    let extent = extent["otherData"]["extent"].as_str().unwrap();
    assert!(warning.contains(&format!("trace.json has {extent}: ")), "{warning}");
    assert!(extent.starts_with("one device of each stage with the first "), "{extent}");
    assert!(extent.ends_with(" of 8,192 microbatches"), "{extent}");
    let microbatches: usize = extent.split(' ').nth(8).unwrap().replace(',', "").parse().unwrap();
    let instructions = events.matches("\"instruction\":").count();
    assert!((400_000..=500_000).contains(&instructions), "{instructions}");
    let of_stages = |name: &str| events.matches(&format!("\"name\":\"{name}\"")).count();
    assert_eq!(of_stages(&format!("backward {}", microbatches - 1)), 2);
    assert_eq!((of_stages(&format!("forward {microbatches}")), of_stages("update")), (0, 2));
}

/// Events of a pipeline with several model chunks name the chunk of their pass, in a simulated and in a measured step.
#[test]
fn events_name_their_model_chunk() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let mesh = "--devices 2 --tensor 1 --pipeline 2 --micro-batch 1";
    for (schedule, chunks) in [("interleaved", &[0, 1][..]), ("1f1b", &[])] {
        let line = format!("{SMALL} {mesh} --schedule {schedule} --steps 1");
        stdout(&format!("{line} --trace {}", trace.display()));
        let events: Value = serde_json::from_str(&fs::read_to_string(&trace).unwrap()).unwrap();
        let threads = threads(&events);
        for process in [0, 1, 1_000_000, 1_000_001] {
            let of = |thread: u64| threads[&(process, thread)].iter();
            let named = |chunk: u64| {
                let passes = of(0).filter(|e| e["cat"] == "pass" && e["args"]["chunk"] == chunk);
                let instructions = of(1).filter(|e| e["args"]["chunk"] == chunk);
                (
                    passes.map(|e| e["name"].as_str().unwrap()).collect::<Vec<_>>(),
                    instructions.count(),
                )
            };
            for chunk in chunks {
                let (passes, instructions) = named(*chunk);
                let forward = format!("forward 1 (chunk {chunk})");
                assert!(passes.len() == 4 && passes.contains(&&*forward), "{passes:?}");
                assert!(instructions > 0, "process {process}, chunk {chunk}");
            }
            let in_chunks = of(0).chain(of(1)).filter(|e| e["args"].get("chunk").is_some());
            assert_eq!(in_chunks.count() == 0, chunks.is_empty());
            let update = of(0).find(|e| e["name"] == "update").unwrap();
            assert_eq!(update["args"].get("chunk"), None);
        }
    }
}
