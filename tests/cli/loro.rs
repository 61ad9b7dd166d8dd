//! The optimizer LORO: plans with its exact steps, runs, and what is refused.

use std::fs;

use serde_json::Value;

use super::{failure, json, narrows, stdout};

/// A model whose pairs have nothing between their factors.
pub const PLAIN_PAIRS: &str = r#"{"format": "narrows-model/1", "hidden": 32, "vocab": 256, "heads": 4, "d_ff": 48,
    "blocks": {"count": 2, "default": {"product": "swiglu", "all": {"rank": 8, "activation": "identity"}}}}"#;

/// Exact steps and refreshes follow from the checkpoint's step and settings, and their cost is predicted.
#[test]
fn a_run_with_loro_resumes_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (model, dir, metrics) = (path("pairs.json"), path("kept"), path("m.jsonl"));
    fs::write(&model, PLAIN_PAIRS).unwrap();
    let command = |flags: &str| {
        let (model, dir, metrics) = (model.display(), dir.display(), metrics.display());
        format!(
            "run --hardware cpu-local --threads 1 --model {model} --checkpoint-dir {dir} --metrics {metrics} {flags}"
        )
    };
    let recipe = "--global-batch 3 --sequence-length 8 --optimizer loro --loro-every 2 --loro-refresh-every 4 \
        --loro-learning-rate-scale 0.5 --decay-steps 20";
    let header = stdout(&command(&format!("{recipe} --steps 8")));
    assert!(header.contains("LORO       an exact step every 2 steps takes "), "{header}");
    assert!(
        header.contains("Measured is the median step. All steps, exact ones included: "),
        "{header}"
    );
    let expected = super::checkpoints::curve(&metrics);
    for stop in [2, 3, 4] {
        fs::remove_dir_all(&dir).unwrap();
        stdout(&command(&format!("{recipe} --steps {stop}")));
        let report = stdout(&command("--steps 8 --resume --format json"));
        assert_eq!(super::checkpoints::curve(&metrics), expected, "resumed after step {stop}");
        let report: Value = serde_json::from_str(&report).unwrap();
        let cost = &report["prediction"]["exact_step"];
        // Two blocks with four pairs of 32 to 32, and three of 32 and 48.
        assert_eq!(cost["bytes"], 16 * 8 * 2 * (4 * 64 + 3 * 80));
        assert_eq!((&cost["every"], &cost["rates"]), (&2.into(), &"assumed".into()));
        let [time, per_step] = ["time_s", "per_step_s"].map(|key| cost[key].as_f64().unwrap());
        assert!(time > 0.0 && per_step == time / 2.0, "{cost}");
    }
    let state = fs::read_to_string(dir.join("step-00000008/state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    let settings = serde_json::json!({"exact_every": 2, "refresh_every": 4, "rate_scale": 0.5});
    assert_eq!(state["optimizer"]["loro"], settings);
    let message = failure(&command("--steps 9 --resume --optimizer adamw"), 2);
    assert!(message.contains("would be those of 8 steps at step 8"), "{message}");
    let output = narrows(&command("--steps 9 --resume --loro-every 3")).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("warning: --loro-every is 3, and 2 in "), "{message}");
    assert_eq!(message.matches("warning").count(), 1, "{message}");
}

/// Moments of 4 steps are not those of a rule with which they would be of none, and bias correction would be wrong.
#[test]
fn refreshes_that_count_other_steps_than_a_checkpoint_has_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (model, dir) = (folder.path().join("m.json"), folder.path().join("checkpoints"));
    fs::write(&model, PLAIN_PAIRS).unwrap();
    let run = |flags: &str| {
        format!(
            "run --hardware cpu-local --threads 1 --model {} --global-batch 2 --sequence-length 8 --checkpoint-dir {} {flags}",
            model.display(),
            dir.display()
        )
    };
    stdout(&run("--steps 4"));
    let loro = "--steps 6 --resume --optimizer loro --loro-every 3";
    let message = failure(&run(&format!("{loro} --loro-refresh-every 4")), 2);
    assert!(message.contains("would be those of 0 steps at step 4"), "{message}");
    stdout(&run(&format!("{loro} --loro-refresh-every 0")));
}

/// A plan with exact steps is searched, priced from its file, and run with the interval of the recipe.
#[test]
fn a_plan_has_the_exact_steps_of_loro() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (model, plan) = (path("pairs.json"), path("plan.json"));
    fs::write(&model, PLAIN_PAIRS).unwrap();
    let sizes = "--devices 2 --global-batch 4 --sequence-length 8";
    let request = format!("--model {model} --hardware cpu-local {sizes}");
    let planned = json(&format!("plan {request} --loro-every 50 --output {plan}"));
    assert_eq!(planned["decisions"]["loro_every"], 50);
    let exact_step = &planned["prediction"]["exact_step"];
    assert_eq!(exact_step["every"], 50);
    let seconds = |key: &str| exact_step[key].as_f64().unwrap();
    assert!((seconds("time_s") / seconds("per_step_s") - 50.0).abs() < 1e-9, "{exact_step}");
    let cost = |flags: &str| json(&format!("cost {plan} --model {model} {flags}"));
    assert_eq!(cost("")["prediction"]["exact_step"], *exact_step);
    let often = cost("--loro-every 5");
    assert_eq!(often["decisions"]["loro_every"], 5);
    assert_eq!(often["prediction"]["exact_step"]["time_s"], exact_step["time_s"]);
    // The step time is that of the average step, and a training run takes it.
    let step_time = |priced: &Value| priced["prediction"]["step_time_s"].as_f64().unwrap();
    let between = seconds("time_s") * (1.0 / 5.0 - 1.0 / 50.0);
    let difference = step_time(&often) - step_time(&planned);
    assert!((difference / between - 1.0).abs() < 1e-6, "{difference}, expected {between}");
    let days = |flags: &str| {
        let run = cost(&format!("--tokens 3200 {flags}"));
        run["run"]["days"].as_f64().unwrap_or_else(|| panic!("{run}"))
    };
    let ratio = days("--loro-every 5") / days("");
    assert!((ratio / (step_time(&often) / step_time(&planned)) - 1.0).abs() < 1e-6, "{ratio}");
    let [bound, gap] = ["bound_s", "gap"].map(|key| planned["search"][key].as_f64().unwrap());
    assert!((bound / step_time(&planned) - (1.0 - gap)).abs() < 1e-6, "{}", planned["search"]);
    // Without the key, and where the optimizer is AdamW.
    let without = json(&format!("plan {request}"));
    assert!(without["decisions"].get("loro_every").is_none());
    assert!(without["prediction"].get("exact_step").is_none());
    let text = stdout(&format!("cost {plan} --model {model}"));
    assert!(text.contains("an exact step every 50 steps takes "), "{text}");
    let run = |flags: &str| {
        let run = format!("run {plan} --model {model} --threads 1 --steps 2 {flags}");
        json(&run)["prediction"].clone()
    };
    let every_second = run("--optimizer loro --loro-every 2");
    assert_eq!(every_second["exact_step"]["every"], 2);
    let adamw = run("");
    assert!(adamw.get("exact_step").is_none());
    // The run compares its steps with those between exact steps.
    let [with, without] = [&every_second, &adamw].map(|step| step["step_time_s"].as_f64().unwrap());
    assert!((with / without - 1.0).abs() < 1e-9, "{with} and {without}");
    let output =
        narrows(&format!("run {plan} --model {model} --threads 1 --steps 1")).assert().success();
    let warning = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    let expected = "is for LORO with an exact step every 50 steps, and the run has AdamW";
    assert!(warning.contains(expected), "{warning}");
    let checked = json(&format!("check {plan} --model {model}"));
    assert_eq!(checked["stages"][0]["exact_step_pairs"], 14, "{checked}");
    let counted = stdout(&format!(
        "run {plan} --model {model} --backend null --optimizer loro --loro-every 50 --steps 1"
    ));
    assert!(counted.contains("in exact steps are not counted"), "{counted}");
    // The alternatives that `explain` searches include dense models.
    for devices in [1, 2] {
        let sizes = format!("--devices {devices} --global-batch 4 --sequence-length 8");
        let explained =
            stdout(&format!("explain --model svd-60m --hardware cpu-local {sizes} --loro-every 2"));
        assert!(explained.contains("% hosts: exact steps of LORO"), "{explained}");
    }
}

#[test]
fn plans_of_models_without_plain_pairs_have_no_exact_steps() {
    let folder = tempfile::tempdir().unwrap();
    let plan = folder.path().join("plan.json").display().to_string();
    let request = "--model cola-60m --hardware cpu-local --global-batch 1 --sequence-length 8";
    let reason = "layer 0 q has an activation or a latent crossing between its factors";
    for command in ["plan", "cost", "explain"] {
        let message = failure(&format!("{command} {request} --loro-every 500"), 2);
        assert!(message.contains(&format!("--loro-every: {reason}")), "{command}: {message}");
    }
    stdout(&format!("plan {request} --output {plan}"));
    let mut changed: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    changed["loro_every"] = 500.into();
    fs::write(&plan, changed.to_string()).unwrap();
    for command in ["cost", "check"] {
        let message = failure(&format!("{command} {plan}"), 2);
        assert!(message.contains("loro_every") && message.contains(reason), "{message}");
    }
    let message = failure("plan --model svd-60m --loro-every 0", 2);
    assert!(message.contains("--loro-every"), "{message}");
}

#[test]
fn the_null_backend_refuses_an_optimizer_that_cannot_train_the_model() {
    let run = "run --hardware cpu-local --model llama-60m --global-batch 1 --sequence-length 8 --optimizer loro --steps 1";
    for backend in ["null", "cpu"] {
        let message = failure(&format!("{run} --backend {backend}"), 2);
        assert!(message.contains("the model has no factor pairs"), "{backend}: {message}");
    }
}

#[test]
fn restarts_follow_the_refreshes_of_loro() {
    let folder = tempfile::tempdir().unwrap();
    let (model, dir) = (folder.path().join("m.json"), folder.path().join("checkpoints"));
    fs::write(&model, PLAIN_PAIRS).unwrap();
    let restart_every = |flags: &str| {
        let _ = fs::remove_dir_all(&dir);
        stdout(&format!(
            "run --hardware cpu-local --threads 1 --model {} --global-batch 2 --sequence-length 8 --checkpoint-dir {} \
             --steps 1 --optimizer loro --lr-schedule loro-cosine-restarts {flags}",
            model.display(),
            dir.display()
        ));
        let state = fs::read_to_string(dir.join("step-00000001/state.json")).unwrap();
        let state: Value = serde_json::from_str(&state).unwrap();
        let schedule = &state["optimizer"]["schedule"]["loro_cosine_restarts"];
        schedule["restart_every"].as_u64().unwrap_or_else(|| panic!("{state}"))
    };
    assert_eq!(restart_every("--decay-steps 200"), 500);
    assert_eq!(restart_every("--decay-steps 200 --loro-refresh-every 40"), 40);
    assert_eq!(restart_every("--loro-refresh-every 0 --decay-steps 200"), 20);
    assert_eq!(restart_every("--loro-refresh-every 0 --decay-steps 12"), 2);
    assert_eq!(restart_every("--decay-steps 200 --restart-every 30"), 30);
}

#[test]
fn exact_steps_are_swept() {
    let request = "--model svd-60m --devices 1 --sequence-length 512";
    let answer = json(&format!("whatif {request} --loro-every 7 --sweep loro_every=100,1000"));
    for (point, every) in answer["points"].as_array().expect("points").iter().zip([100, 1000]) {
        assert_eq!(point["decisions"]["loro_every"], every);
    }
    let plan = json(&format!("plan {request} --loro-every 100"));
    assert_eq!(answer["points"][0]["prediction"], plan["prediction"]);
    let answer = json(&format!("whatif {request} --loro-every 100 --sweep global_batch=1"));
    assert_eq!(answer["points"][0]["prediction"], plan["prediction"]);
}
