//! `--context`: sequences sharded over devices, planned, proven, priced, compared and executed.

use serde_json::Value;

use super::{failure, json, stdout};

/// One sequence for each of two parts of the batch.
const REQUEST: &str =
    "--model cola-tiny --devices 4 --global-batch 4 --sequence-length 128 --pipeline 1";

#[test]
fn plans_with_a_context_axis_are_written_and_proven() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = folder.path().join("plan.json");
    let plan = plan.display();
    for (tensor, context, data) in [(1, 2, 2), (2, 2, 1)] {
        let flags = format!("--tensor {tensor} --context {context}");
        let planned = json(&format!("plan {REQUEST} {flags} --output {plan}"));
        let mesh = &planned["decisions"]["mesh"];
        assert_eq!((&mesh["context"], &mesh["data"]), (&context.into(), &data.into()));
        let text = stdout(&format!("cost {plan}"));
        let axes = format!("tensor {tensor} × context 2 × pipeline 1 × data {data}");
        assert!(text.contains(&axes), "{text}");
        assert!(text.contains("A2A all-to-all"), "{text}");
        let numeric = json(&format!("check {plan} --numeric"));
        assert_eq!(numeric["numeric"]["equal"], true, "{numeric}");
    }
}

/// More devices than heads share a sequence: keys and values are gathered, or rotate.
#[test]
fn plans_whose_queries_stay_are_written_and_proven() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = folder.path().join("plan.json");
    let plan = plan.display();
    let request = REQUEST.replace("--devices 4", "--devices 16");
    let gathered = "keys and values gathered over the context axis";
    let rotate = "keys and values rotate around the context axis";
    for (tensor, context, attention, field, collectives) in [
        (1, 16, "gather", gathered, &["AG", "RS"][..]),
        (2, 8, "gather", gathered, &["AG", "RS"]),
        (1, 16, "ring", rotate, &["SH shifts around a ring"]),
        (2, 8, "ring", rotate, &["SH shifts around a ring"]),
    ] {
        let flags =
            format!("--tensor {tensor} --context {context} --context-attention {attention}");
        let planned = json(&format!("plan {request} {flags} --output {plan}"));
        assert_eq!(planned["decisions"]["context_attention"], attention);
        let text = stdout(&format!("cost {plan}"));
        assert!(text.contains(field), "{text}");
        assert!(collectives.iter().all(|name| text.contains(name)), "{text}");
        let numeric = json(&format!("check {plan} --numeric"));
        assert_eq!(numeric["numeric"]["equal"], true, "{numeric}");
    }
}

/// Frameworks with all-gather or ring attention in place of the exchange take these plans as they are.
#[test]
fn plans_whose_queries_stay_are_exported() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = folder.path().join("plan.json");
    let plan = plan.display();
    let flags = "--devices 4 --tensor 1 --pipeline 1 --context 4 --global-batch 2 --zero one";
    for (attention, framework, option) in [
        ("gather", "megatron", "--cp-comm-type all_gather"),
        ("gather", "torchtitan", "context_parallel_degree = 4"),
        ("ring", "megatron", "--cp-comm-type p2p"),
        ("ring", "torchtitan", "context_parallel_rotate_method = \"alltoall\""),
    ] {
        let attended = format!("--context-attention {attention} --output {plan}");
        stdout(&format!("plan --model llama-60m {flags} {attended}"));
        let exported = json(&format!("export {plan} --to {framework} --allow-loss"));
        let rows = exported["decisions"].as_array().expect("decisions");
        let row = rows.iter().find(|row| row["decision"] == "mesh.context").expect("a row");
        assert_eq!(
            (&row["fate"], &row["value"]),
            (&"exact".into(), &format!("4, {attention}").into()),
            "{row}"
        );
        let text = stdout(&format!("export {plan} --to {framework} --allow-loss --output -"));
        assert!(text.contains(option), "{text}");
    }
}

/// A step has the same loss whether sequences are sharded or not, and a run resumes under another mesh.
#[test]
fn every_context_axis_trains_alike() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    let planned = |name: &str, flags: &str| {
        let plan = at(name);
        let short = REQUEST.replace("--sequence-length 128", "--sequence-length 32");
        stdout(&format!("plan {short} --hardware cpu-local {flags} --output {plan}"));
        plan
    };
    let plans = [
        planned("whole.json", "--tensor 1 --context 1 --zero 0"),
        planned("context.json", "--tensor 1 --context 2 --zero 3"),
        planned("both.json", "--tensor 2 --context 2 --zero 1"),
        planned("gather.json", "--tensor 1 --context 4 --zero 2 --context-attention gather"),
        planned("ring.json", "--tensor 2 --context 2 --zero 1 --context-attention ring"),
        planned("long-ring.json", "--tensor 1 --context 4 --zero 3 --context-attention ring"),
    ];
    let loss = |flags: &str| {
        let run = json(&format!("run {flags} --seed 3 --threads 1"));
        run["loss_last"].as_f64().expect("a loss")
    };
    let expected = loss(&format!("{} --steps 4", plans[0]));
    for plan in &plans[1..] {
        let trained = loss(&format!("{plan} --steps 4"));
        assert!((trained / expected - 1.0).abs() < 1e-5, "{plan}: {trained}, not {expected}");
    }
    let resumed = |first: usize, second: usize| {
        let checkpoints = at(&format!("checkpoints-{first}-{second}"));
        let begin = "--steps 2 --decay-steps 4";
        loss(&format!("{} {begin} --checkpoint-dir {checkpoints}", plans[first]));
        loss(&format!("{} --steps 4 --checkpoint-dir {checkpoints} --resume", plans[second]))
    };
    for (first, second) in [(1, 2), (2, 0), (1, 3), (3, 4), (4, 5), (5, 0)] {
        let trained = resumed(first, second);
        assert!((trained / expected - 1.0).abs() < 1e-5, "{trained}, not {expected}");
    }
}

#[test]
fn sizes_that_divide_nothing_are_refused() {
    for (flags, message) in [
        ("--context 3", "--context: 3 devices do not divide 128 positions evenly"),
        (
            "--context 4 --tensor 4 --devices 16",
            "--context: tensor × context = 16 devices do not divide",
        ),
        ("--context 16 --devices 16 --tensor 1", "or --context-attention gather"),
        (
            "--context 4 --tensor 16 --devices 64 --context-attention gather",
            "--context: tensor = 16 devices do not divide 8 query heads",
        ),
        (
            "--context 128 --tensor 1 --devices 128 --context-attention gather",
            "--context: 128 devices do not divide 128 positions into two equal chunks each",
        ),
        (
            "--context 16 --devices 16 --tensor 1 --context-attention gather --grouping on",
            "--context: queries are one tensor with keys and values, which are gathered alone\n  hint: another \
             --grouping than `on`, or --context-attention ring",
        ),
        (
            "--tensor 1 --context-attention gather --grouping on",
            "--context-attention: queries are one tensor with keys and values",
        ),
        (
            "--context 128 --tensor 1 --devices 128 --context-attention ring",
            "--context: 128 devices do not divide 128 positions into two equal chunks each",
        ),
        (
            "--context 4 --tensor 16 --devices 64 --context-attention ring",
            "--context: tensor = 16 devices do not divide 8 query heads",
        ),
        ("--context 0", "--context: 0 is not between 1 and"),
        ("--context 2 --data-parallel 4", "product of the fixed axes"),
    ] {
        let request = REQUEST
            .replace("--devices 4", if flags.contains("--devices") { "" } else { "--devices 4" });
        let error = failure(&format!("plan {request} {flags}"), 2);
        assert!(error.contains(message), "{flags}: {error}");
    }
}

#[test]
fn an_attention_without_a_context_axis_is_warned_of() {
    for attention in ["gather", "ring"] {
        let request = "--model cola-tiny --devices 2 --sequence-length 64";
        let flag = format!("--context-attention {attention}");
        let planned = crate::narrows(&format!("plan {request} {flag}")).assert().success();
        let message = String::from_utf8(planned.get_output().stderr.clone()).unwrap();
        let warning =
            format!("warning: `{flag}` has no effect on this plan: the mesh has no context axis");
        assert!(message.contains(&warning), "{message}");
        let run = format!(
            "run {request} {flag} --data-parallel 2 --zero 1 --backend null --hardware a100-80gb"
        );
        let run = crate::narrows(&run).assert().success();
        let [report, message] = [&run.get_output().stdout, &run.get_output().stderr]
            .map(|bytes| String::from_utf8_lossy(bytes));
        assert!(message.contains(&warning), "{message}");
        assert!(report.contains("× data 2, ZeRO-1\n"), "{report}");
    }
}

/// A plan file with a context axis that its sequences or heads do not allow is refused at that field.
#[test]
fn edited_plans_are_refused_at_the_field() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plan.json");
    let path = file.display();
    stdout(&format!("plan {REQUEST} --tensor 1 --context 2 --output {path}"));
    let error = failure(&format!("cost {path} --context 0"), 2);
    assert_eq!(error.matches("error:").count(), 1, "{error}");
    assert!(error.contains("mesh.context: 0 is not between 1 and"), "{error}");
    let text = std::fs::read_to_string(&file).expect("a plan");
    let (exchange, gather) = ("exchange", "gather");
    for (size, attention, problem) in [
        (3, exchange, "do not divide"),
        (16, exchange, "heads"),
        (0, exchange, "0 is not between 1 and"),
        (128, gather, "into two equal chunks each"),
        (128, "ring", "into two equal chunks each"),
    ] {
        let mut plan: Value = serde_json::from_str(&text).expect("JSON");
        plan["mesh"]["context"] = size.into();
        plan["context_attention"] = attention.into();
        std::fs::write(&file, plan.to_string()).expect("written");
        for command in ["check", "cost"] {
            let error = failure(&format!("{command} {path}"), 2);
            assert!(error.contains("mesh.context") && error.contains(problem), "{error}");
        }
    }
    // One tensor of queries, keys and values is not gathered.
    let mut plan: Value = serde_json::from_str(&text).expect("JSON");
    plan["context_attention"] = gather.into();
    for decisions in plan["blocks"].as_object_mut().expect("blocks").values_mut() {
        assert_eq!(decisions["grouping"]["qkv"], true, "{decisions}");
    }
    std::fs::write(&file, plan.to_string()).expect("written");
    let error = failure(&format!("cost {path}"), 2);
    assert!(error.contains("ops.attention: ") && error.contains("`grouping.qkv` false"), "{error}");
    // It rotates, but not in pairs of microbatches.
    stdout(&format!(
        "plan {REQUEST} --tensor 1 --context 2 --context-attention ring --grouping on --output {path}"
    ));
    let text = std::fs::read_to_string(&file).expect("a plan");
    let mut plan: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(plan["context_attention"], "ring");
    plan["overlap_microbatch_pairs"] = true.into();
    std::fs::write(&file, plan.to_string()).expect("written");
    let error = failure(&format!("check {path}"), 2);
    assert!(error.contains("overlap_microbatch_pairs: ") && error.contains("`ring`"), "{error}");
}

/// Keys outside a sliding window would travel for nothing.
#[test]
fn rings_are_refused_within_sliding_windows() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("window.json");
    let text = r#"{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "kv_heads": 4, "d_ff": 96,
        "blocks": {"count": 2, "default": {"product": "swiglu", "all": "dense", "attention": {"sliding_window": 8}}}}"#;
    std::fs::write(&model, text).expect("written");
    let (model, plan) = (model.display(), folder.path().join("plan.json"));
    let path = plan.display();
    let request =
        format!("--model {model} --devices 2 --context 2 --sequence-length 32 --global-batch 2");
    let error = failure(&format!("plan {request} --context-attention ring"), 2);
    assert!(error.contains("--context: ring attention passes all keys around"), "{error}");
    assert!(error.contains("--context-attention gather"), "{error}");
    let searched = request.replace("--context 2", "");
    let error = failure(&format!("plan {searched} --context-attention ring"), 2);
    assert!(error.contains("--context-attention: ring attention passes all keys"), "{error}");
    stdout(&format!("plan {request} --context-attention gather --output {path}"));
    let text = std::fs::read_to_string(&plan).expect("a plan");
    std::fs::write(&plan, text.replace("\"gather\"", "\"ring\"")).expect("written");
    let error = failure(&format!("check {path} --model {model}"), 2);
    assert!(error.contains("mesh.context: ring attention passes all keys around"), "{error}");
    // Shorter sequences have all keys within the window.
    let short = request.replace("--sequence-length 32", "--sequence-length 8");
    stdout(&format!("plan {short} --context-attention ring"));
}

#[test]
fn sweeps_and_explanations_show_the_context_axis() {
    let request =
        "--model cola-tiny --hardware a100-80gb --devices 4 --global-batch 2 --sequence-length 256";
    let page = stdout(&format!("whatif {request} --sweep context=1,2"));
    assert!(page.contains("C2") && page.contains("C: devices along the context axis"), "{page}");
    let page = stdout(&format!("explain {request} --context 2"));
    assert!(page.contains("Mesh: tensor × context × pipeline × data"), "{page}");
    let gather = "--context 2 --context-attention gather";
    let page = stdout(&format!("whatif {request} {gather} --sweep global_batch=2,4"));
    assert!(page.contains("Cg2") && page.contains("Cg: keys and values are gathered"), "{page}");
    let page = stdout(&format!("explain {request} {gather}"));
    assert!(page.contains("g: gathered keys and values"), "{page}");
    let ring = "--context 2 --context-attention ring";
    let page = stdout(&format!("whatif {request} {ring} --sweep global_batch=2,4"));
    assert!(page.contains("Cr2") && page.contains("Cr: keys and values rotate"), "{page}");
    let page = stdout(&format!("explain {request} {ring}"));
    assert!(page.contains("r: ring attention"), "{page}");
}
