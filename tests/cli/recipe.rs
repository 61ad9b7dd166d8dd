//! Recipes of training runs: flags, files, schedules, and the tokens that are predicted.

use std::fs;

use serde_json::Value;

use super::loro::PLAIN_PAIRS;
use super::run::{SMALL, lines};
use super::{failure, narrows, stdout};

/// Learning rates of the steps of a run.
fn learning_rates(flags: &str) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("m.jsonl");
    stdout(&format!("{SMALL} {flags} --metrics {}", metrics.display()));
    lines(&metrics).iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect()
}

#[test]
fn schedules_follow_their_flags() {
    let base = "--steps 4 --learning-rate 8 --clip-norm 1e-9";
    for (flags, expected) in [
        ("--lr-schedule constant --warm-up-steps 0", [8.0, 8.0, 8.0, 8.0]),
        ("--lr-schedule linear --warm-up-steps 0 --min-learning-rate 0", [6.0, 4.0, 2.0, 0.0]),
        (
            "--lr-schedule linear --warm-up-steps 2 --min-learning-rate 4 --lr-step-count from-zero",
            [0.0, 4.0, 8.0, 6.0],
        ),
        (
            "--lr-schedule wsd --cooldown-steps 2 --warm-up-steps 0 --min-learning-rate 0",
            [8.0, 8.0, 4.0, 0.0],
        ),
        (
            "--lr-schedule cosine-restarts --restart-every 2 --restart-warm-up-steps 1 --warm-up-steps 1 \
             --min-learning-rate 8",
            [8.0, 0.0, 8.0, 8.0],
        ),
        (
            "--lr-schedule loro-cosine-restarts --restart-every 2 --restart-warm-up-steps 1 --warm-up-steps 2 \
             --lr-step-count from-zero --lr-adjust-steps -2 --min-learning-rate 4",
            [4.0, 2.0, 4.0, 6.0],
        ),
        // A tenth of so few steps is no restart with a step after its warm-up.
        (
            "--lr-schedule cosine-restarts --warm-up-steps 1 --min-learning-rate 8",
            [8.0, 0.0, 8.0, 8.0],
        ),
        (
            "--lr-schedule cosine-restarts --restart-every 1 --warm-up-steps 1 --min-learning-rate 8",
            [8.0; 4],
        ),
        ("--lr-schedule cosine --warm-up-steps 0 --min-learning-rate 8", [8.0; 4]),
        // Nothing of a constant schedule depends on its length.
        ("--lr-schedule constant --warm-up-steps 8", [1.0, 2.0, 3.0, 4.0]),
    ] {
        assert_eq!(learning_rates(&format!("{base} {flags}")), expected, "{flags}");
    }
}

/// Flags override the file, and the file overrides the defaults.
#[test]
fn a_recipe_file_has_the_values_of_flags() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.toml");
    let text = "steps = 2\nlearning_rate = 0.5\nlr_schedule = 'constant'\nwarm_up_steps = 0\nglobal_batch = 3";
    fs::write(&recipe, text).unwrap();
    let metrics = folder.path().join("m.jsonl");
    let run = |flags: &str| {
        let small = "run --hardware cpu-local --sequence-length 16 --threads 1";
        let (recipe, metrics) = (recipe.display(), metrics.display());
        stdout(&format!("{small} --recipe {recipe} {flags} --metrics {metrics}"));
        lines(folder.path().join("m.jsonl").as_path())
    };
    let rates = |lines: &[Value]| -> Vec<f64> {
        lines.iter().map(|line| line["learning_rate"].as_f64().unwrap()).collect()
    };
    let of_file = run("");
    assert_eq!(rates(&of_file), [0.5, 0.5]);
    assert_eq!(of_file[0]["tokens"], 3 * 16);
    let of_flags = run("--steps 1 --learning-rate 0.25 --global-batch 2");
    assert_eq!(rates(&of_flags), [0.25]);
    assert_eq!(of_flags[0]["tokens"], 2 * 16);
}

#[test]
fn every_shipped_recipe_follows_the_schema_and_is_accepted() {
    let schema: Value = serde_json::from_str(&stdout("schema recipe")).expect("a schema");
    jsonschema::meta::validate(&schema).expect("a JSON Schema");
    let mut count = 0;
    for entry in fs::read_dir("recipes").unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let recipe: Value = toml::from_str(&text).unwrap();
        jsonschema::validate(&schema, &recipe).unwrap();
        // The null backend plans the model in the sizes of the recipe.
        let flags = "--backend null --hardware a100-80gb --micro-batch 16 --time-limit 5";
        let report = stdout(&format!("run --recipe {} {flags}", path.display()));
        assert!(report.contains(recipe["model"].as_str().unwrap()), "{report}");
        count += 1;
    }
    assert!(count >= 3, "{count} recipes");
}

#[test]
fn contradictions_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    fs::write(&bad, "beta_2 = 0.9").unwrap();
    let file = bad.display();
    let repeated = folder.path().join("repeated.json");
    fs::write(&repeated, r#"{"steps": 2, "steps": 3}"#).unwrap();
    for (flags, part) in [
        (format!("--recipe {file}"), "bad.toml: beta_2: is not a field of a recipe"),
        (format!("--recipe {file}"), "did you mean `beta2`?"),
        ("--recipe nowhere.toml".into(), "nowhere.toml: cannot be read"),
        (format!("--recipe {}", repeated.display()), "repeated.json: steps: is set twice"),
        ("--beta2 1".into(), "expected a number from 0 to below 1"),
        ("--beta2 -0.5".into(), "'-0.5' for '--beta2 <BETA>': expected a number from 0 to below 1"),
        (
            "--learning-rate -0.001".into(),
            "'-0.001' for '--learning-rate <RATE>': expected a number",
        ),
        ("--steps -1".into(), "invalid value '-1' for '--steps <N>'"),
        ("--eval-every 2".into(), "--eval-every: needs evaluations"),
        ("--eval-tokens 2".into(), "--eval-tokens: needs evaluations"),
        ("--pad-id 256".into(), "--pad-id: 256 is not below 256, the vocabulary size of cola-tiny"),
        (
            "--steps 5 --warm-up-steps 5".into(),
            "--warm-up-steps: 5 steps leave nothing of the 5 steps of --decay-steps",
        ),
        (
            "--steps 9 --warm-up-steps 4 --decay-steps 3 --lr-schedule linear".into(),
            "--warm-up-steps: 4 steps leave nothing of the 3 steps of --decay-steps",
        ),
        (
            "--steps 9 --warm-up-steps 4 --lr-schedule wsd --cooldown-steps 6".into(),
            "--cooldown-steps: 6 steps are more than the 5 steps that --warm-up-steps leaves",
        ),
        (
            "--lr-schedule cosine-restarts --restart-every 3 --restart-warm-up-steps 4".into(),
            "--restart-warm-up-steps: 4 steps are more than the 3 steps of --restart-every",
        ),
        (
            "--lr-schedule loro-cosine-restarts --restart-every 1 --restart-warm-up-steps 1".into(),
            "--restart-warm-up-steps: 1 step begins every restart with almost no learning rate",
        ),
        ("--epsilon 0".into(), "expected a number above 0"),
        ("--min-learning-rate 1 --learning-rate 0.5".into(), "1 is larger than the peak 0.5"),
        ("--cooldown-steps 3".into(), "--cooldown-steps: has no effect with --lr-schedule cosine"),
        ("--restart-every 3 --lr-schedule wsd".into(), "--lr-schedule cosine-restarts"),
        (
            "--lr-adjust-steps -3 --lr-schedule cosine-restarts".into(),
            "--lr-adjust-steps: has no effect with --lr-schedule cosine-restarts",
        ),
        (
            "--steps 9 --warm-up-steps 4 --lr-adjust-steps 5 --lr-schedule loro-cosine-restarts"
                .into(),
            "--lr-adjust-steps: 5 and --warm-up-steps 4 leave nothing of the 9 steps",
        ),
        ("--loro-every 3".into(), "--loro-every: has no effect with --optimizer adamw"),
        (
            "--optimizer adamw --loro-learning-rate-scale auto".into(),
            "--loro-learning-rate-scale: has no effect with --optimizer adamw",
        ),
        (
            "--optimizer loro --loro-learning-rate-scale 0".into(),
            "expected `auto` or a number above 0",
        ),
        (
            "--optimizer loro".into(),
            "--optimizer loro: layer 0 q has an activation or a latent crossing between its factors",
        ),
        (
            "--lr-schedule constant --min-learning-rate 0".into(),
            "--min-learning-rate: has no effect with --lr-schedule constant",
        ),
    ] {
        let message = failure(&format!("{SMALL} {flags}"), 2);
        assert!(message.contains(part), "{flags}: {message}");
    }
    let one_token = SMALL.replace("--sequence-length 16", "--sequence-length 1");
    let message = failure(&format!("{one_token} --last-target ignored"), 2);
    let part =
        "--sequence-length: with --last-target ignored, a sequence of one token predicts none";
    assert!(message.contains(part), "{message}");
}

/// Messages name the file and the field that set a value, unless a flag overrides it.
#[test]
fn values_of_a_recipe_file_are_named_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recipe.toml");
    let small = "run --hardware cpu-local --threads 1";
    for (text, flags, problem) in [
        ("min_learning_rate = 1\nlearning_rate = 0.5", "", "min_learning_rate: 1 is larger than"),
        ("loro_every = 3", "", "loro_every: has no effect with --optimizer adamw"),
        ("optimizer = 'loro'", "", "optimizer: loro: layer 0 q has an activation"),
        ("data = 'no.tokens'", "", "data: no.tokens: cannot be read"),
        ("model = 'no.json'", "", "model: no.json: cannot be read"),
        ("eval_every = 3", "", "eval_every: needs evaluations"),
        ("pad_id = 256", "--steps 1", "pad_id: 256 is not below 256"),
        ("sequence_length = 5000", "", "sequence_length: 5000 tokens exceed the 4096"),
    ] {
        fs::write(&path, text).unwrap();
        let message = failure(&format!("{small} --recipe {} {flags}", path.display()), 2);
        let expected = format!("error: --recipe {}: {problem}", path.display());
        assert!(message.contains(&expected), "{text}: {message}");
    }
    fs::write(&path, "min_learning_rate = 1\nsequence_length = 5000\ndtype = 'f32'").unwrap();
    let recipe = format!("{small} --recipe {}", path.display());
    let message = failure(&format!("{recipe} --min-learning-rate 2"), 2);
    assert!(message.contains("error: --min-learning-rate: 2 is larger"), "{message}");
    let flags = "--sequence-length 16 --min-learning-rate 0 --backend null";
    let counted = narrows(&format!("{recipe} {flags}")).assert().success();
    let warning = format!(
        "warning: --recipe {}: dtype: has no effect, since the null backend computes nothing\n",
        path.display()
    );
    assert_eq!(String::from_utf8(counted.get_output().stderr.clone()).unwrap(), warning);
}

/// A run that resumes without flags has the values of its checkpoint, and each flag that changes one is named.
#[test]
fn a_resumed_run_keeps_the_recipe_of_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, metrics) = (folder.path().join("kept"), folder.path().join("m.jsonl"));
    let run = |flags: &str| {
        let small = "run --hardware cpu-local --threads 1";
        let (dir, metrics) = (dir.display(), metrics.display());
        let flags = format!("{small} --checkpoint-dir {dir} --metrics {metrics} {flags}");
        let output = narrows(&flags).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let recipe = "--global-batch 3 --sequence-length 8 --seed 5 --beta2 0.99 --epsilon 1e-7 --decay-norms \
        --lr-schedule linear --learning-rate 0.01 --min-learning-rate 0.002 --decay-steps 20 --last-target ignored \
        --pad-id 32";
    run(&format!("{recipe} --steps 6"));
    let expected = super::checkpoints::curve(&metrics);
    fs::remove_dir_all(&dir).unwrap();
    run(&format!("{recipe} --steps 3"));
    // Another world has another default batch.
    let message = run("--steps 6 --resume");
    assert!(!message.contains("warning"), "{message}");
    assert_eq!(super::checkpoints::curve(&metrics), expected);
    let last = |metrics: &std::path::Path| lines(metrics).pop().unwrap()["step"].as_u64();
    assert_eq!(last(&metrics), Some(6));
    let message = run("--steps 7 --resume --beta2 0.95 --global-batch 2 --decay-norms=false");
    for part in [
        "--beta2 is 0.95, and 0.99 in ",
        "--global-batch is 2, and 3 in ",
        "--decay-norms is false, and true in ",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(message.matches("warning").count(), 3, "{message}");
    let others = format!("run --hardware cpu-local --threads 1 --checkpoint-dir {}", dir.display());
    let message = failure(&format!("{others} --steps 7 --resume --pad-id 33"), 2);
    assert!(message.contains("--last-target and --pad-id as before"), "{message}");
    run("--resume");
    assert_eq!(last(&metrics), Some(20), "the end of the schedule");
}

/// A flag that chooses another optimizer or schedule leaves out what the recipe has for its own.
#[test]
fn another_optimizer_or_schedule_overrides_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let (model, recipe) = (folder.path().join("m.json"), folder.path().join("r.toml"));
    fs::write(&model, PLAIN_PAIRS).unwrap();
    fs::write(
        &recipe,
        format!(
            "model = \"{}\"\noptimizer = \"loro\"\nloro_every = 9\nlr_schedule = \"cosine-restarts\"\nrestart_every = 5\n\
             steps = 2\nglobal_batch = 2\nsequence_length = 8\n",
            model.display()
        ),
    )
    .unwrap();
    let run = |flags: &str| {
        let command =
            format!("run --hardware cpu-local --threads 1 --recipe {} {flags}", recipe.display());
        let output = narrows(&command).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let warning = format!(
        "--recipe {}: loro_every 9 is more than the 2 steps of the run: no step is exact",
        recipe.display()
    );
    assert!(run("").contains(&warning), "{}", run(""));
    let by_flag = run("--loro-every 8");
    assert!(by_flag.contains("warning: --loro-every 8 is more than the 2 steps of"), "{by_flag}");
    assert!(!run("--optimizer adamw --lr-schedule cosine").contains("loro"));
}

/// The folded residual decays, where DLR's does not.
#[test]
fn a_latent_residual_is_trained_with_a_warning_of_its_decay() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("dlr.json");
    let text = PLAIN_PAIRS.replace(r#""hidden": 32"#, r#""latent_residual": 1.0, "hidden": 32"#);
    fs::write(&model, text).unwrap();
    let run = |flags: &str| {
        let sizes = "--global-batch 2 --sequence-length 8 --steps 1";
        let model = model.display();
        let command =
            format!("run --hardware cpu-local --threads 1 --model {model} {sizes} {flags}");
        let output = narrows(&command).assert().success();
        String::from_utf8(output.get_output().stderr.clone()).unwrap()
    };
    let warning = "--weight-decay 0.1 also decays the latent residual";
    assert!(run("").contains(warning));
    assert!(!run("--weight-decay 0").contains("warning"));
}
