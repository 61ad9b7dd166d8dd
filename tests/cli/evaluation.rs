//! Evaluations during a run: metrics, the best checkpoint, and the early end.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use super::checkpoints::curve;
use super::run::{SMALL, lines};
use super::{failure, json, narrows, stdout};

/// A folder with a token file to evaluate.
fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (text, tokens) = (folder.path().join("eval.txt"), folder.path().join("eval.tokens"));
    fs::write(&text, "Some years ago - never mind how long precisely. ".repeat(3)).unwrap();
    stdout(&format!("data {} --output {}", text.display(), tokens.display()));
    (folder, tokens)
}

/// Metrics of a run of six steps with these flags.
fn run(folder: &Path, name: &str, flags: &str) -> PathBuf {
    let metrics = folder.join(name);
    stdout(&format!("{SMALL} --steps 6 --metrics {} {flags}", metrics.display()));
    metrics
}

/// The steps with an evaluation, and their losses.
fn evaluations(metrics: &Path) -> Vec<(u64, f64)> {
    let lines = lines(metrics);
    let evaluated = |line: &Value| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?));
    lines.iter().filter_map(evaluated).collect()
}

#[test]
fn evaluations_change_no_bit_of_training() {
    let (folder, tokens) = folder();
    let tokens = tokens.display();
    let expected = curve(&run(folder.path(), "without.jsonl", ""));
    let mut losses: Vec<Vec<f64>> = vec![];
    for (name, plan) in [
        ("one", ""),
        ("tensor", "--devices 2 --tensor 2 --strategy btp"),
        ("pipeline", "--devices 2 --pipeline 2 --micro-batch 1"),
        ("data", "--devices 2 --data-parallel 2 --zero 3"),
        ("context", "--devices 2 --context 2"),
        ("ring", "--devices 2 --context 2 --context-attention ring"),
    ] {
        let without = run(folder.path(), &format!("{name}-without.jsonl"), plan);
        let flags = format!("{plan} --eval-data {tokens} --eval-every 4");
        let metrics = run(folder.path(), &format!("{name}.jsonl"), &flags);
        assert_eq!(curve(&metrics), curve(&without), "{name}");
        if name == "one" {
            assert_eq!(curve(&metrics), expected);
        }
        let evaluations = evaluations(&metrics);
        let steps: Vec<u64> = evaluations.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, [4, 6], "{name}");
        losses.push(evaluations.iter().map(|(_, loss)| *loss).collect());
        let line = &lines(&metrics)[3];
        // 144 tokens are eight windows of 16 targets, and one that is too short.
        assert_eq!(line["eval_tokens"], 8 * 16, "{name}");
        let perplexity = line["eval_loss"].as_f64().unwrap().exp();
        assert_eq!(line["eval_perplexity"].as_f64(), Some(perplexity));
    }
    // Every plan computes the same losses, up to the order of sums.
    for other in &losses[1..] {
        for (a, b) in other.iter().zip(&losses[0]) {
            assert!((a / b - 1.0).abs() < 1e-4, "{a} and {b}");
        }
    }
}

/// The loss is the mean over all predicted tokens, so that it does not depend on the batch.
#[test]
fn the_loss_does_not_depend_on_the_batch() {
    let (folder, tokens) = folder();
    let loss = |batch: u64, tokens_max: &str| {
        let metrics = folder.path().join("m.jsonl");
        let flags = format!("--global-batch {batch} --sequence-length 16 --threads 1");
        // No step changes a weight.
        let still = "--steps 1 --learning-rate 1e-30 --weight-decay 0";
        let (tokens, metrics_file) = (tokens.display(), metrics.display());
        let eval = format!("--eval-data {tokens} {tokens_max} --metrics {metrics_file}");
        let report = stdout(&format!("run --hardware cpu-local {flags} {still} {eval}"));
        let line = &lines(&metrics)[0];
        let count = line["eval_tokens"].as_u64().unwrap();
        let sequences = count / 16;
        let rounded = match tokens_max {
            "--eval-tokens 33" => ", --eval-tokens 33 rounded up",
            "--eval-tokens 130" => ", fewer than --eval-tokens 130: all that it has",
            _ => "",
        };
        let expected = format!(" {count} tokens of {tokens}, {sequences} sequences{rounded} Loss ");
        let words: Vec<&str> = report.split_whitespace().collect();
        assert!(words.join(" ").contains(&expected), "{report}");
        (line["eval_loss"].as_f64().unwrap(), count)
    };
    let (expected, count) = loss(1, "");
    assert_eq!(count, 8 * 16);
    for batch in [3, 5, 8, 11] {
        let (actual, count) = loss(batch, "");
        assert!((actual / expected - 1.0).abs() < 1e-6, "{actual} and {expected}");
        assert_eq!(count, 8 * 16, "the tokens of an incomplete batch are not counted twice");
    }
    assert_eq!(loss(2, "--eval-tokens 33").1, 3 * 16);
    assert_eq!(loss(2, "--eval-tokens 48").1, 3 * 16);
    assert_eq!(loss(2, "--eval-tokens 130").1, 8 * 16);
}

#[test]
fn the_best_checkpoint_is_kept_and_a_run_ends_early() {
    let (folder, tokens) = folder();
    let (dir, metrics) = (folder.path().join("kept"), folder.path().join("m.jsonl"));
    let (dir_name, tokens) = (dir.display(), tokens.display());
    // A weight decay that large moves the weights away from every optimum.
    let flags = "--steps 30 --learning-rate 0.03 --warm-up-steps 10 --lr-schedule constant --weight-decay 20";
    let eval = format!("--eval-data {tokens} --eval-every 1 --early-stop 3 --keep-best");
    let line = format!("{SMALL} {flags} {eval} --checkpoint-dir {dir_name} --metrics");
    let answer = json(&format!("{line} {}", metrics.display()));
    let evaluations = evaluations(&metrics);
    let (last, _) = *evaluations.last().unwrap();
    let best = evaluations.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
    assert_eq!(answer["status"], "stopped_early", "{evaluations:?}");
    assert_eq!(last, best.0 + 3, "{evaluations:?}");
    assert!(last < 30);
    assert_eq!(answer["eval_loss_best"].as_f64(), Some(best.1));
    assert!(dir.join(format!("best/step-{:08}/model.safetensors", best.0)).exists());
    assert_eq!(folders(&dir.join("best")).len(), 1);
    assert!(dir.join(format!("step-{last:08}")).exists());
    // As if killed between writing the best checkpoint and removing the one before it; the later one is of a run that was
    // resumed from an earlier step.
    let kept = dir.join(format!("best/step-{:08}", best.0));
    for step in [best.0 - 1, 30] {
        copy_folder(&kept, &dir.join(format!("best/step-{step:08}")));
    }
    // The same command again executes no step.
    let before = fs::read(&metrics).unwrap();
    let answer = json(&format!("{line} {} --resume", metrics.display()));
    assert_eq!(answer["eval_loss_best"].as_f64(), Some(best.1));
    assert_eq!((&answer["steps"], &answer["status"]), (&0.into(), &"stopped_early".into()));
    assert_eq!(fs::read(&metrics).unwrap(), before);
    assert_eq!(folders(&dir.join("best")), [kept.file_name().unwrap().to_str().unwrap()]);
    // So does its report, at the end, and that of a run which stops.
    for resume in [true, false] {
        if !resume {
            fs::remove_dir_all(&dir).unwrap();
        }
        let resume = if resume { "--resume" } else { "" };
        let report = stdout(&format!("{line} {} {resume}", metrics.display()));
        let joined = report.split_whitespace().collect::<Vec<_>>().join(" ");
        let sentence = format!(
            "The run stopped early after step {last}: the last 3 evaluations have not lowered the loss of step {}.",
            best.0
        );
        assert!(joined.contains(&sentence), "{report}");
        assert!(!report.contains("already contains all steps"), "{report}");
        assert!(report.ends_with(&format!("Best checkpoint: {}\n", kept.display())), "{report}");
    }
    // More patience continues the run.
    let patient = line.replace("--early-stop 3", "--early-stop 5");
    let answer = json(&format!("{patient} {} --resume", metrics.display()));
    assert_eq!((&answer["steps"], &answer["status"]), (&2.into(), &"stopped_early".into()));
}

/// The names in a folder that are not hidden.
fn folders(path: &Path) -> Vec<String> {
    let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| !name.starts_with('.')).collect()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn the_lowest_loss_of_other_tokens_does_not_count() {
    let (folder, tokens) = folder();
    let (text, other) = (folder.path().join("other.txt"), folder.path().join("other.tokens"));
    fs::write(&text, "0123456789".repeat(30)).unwrap();
    stdout(&format!("data {} --output {}", text.display(), other.display()));
    let dir = folder.path().join("kept");
    let line = |steps: u64, tokens: &Path| {
        let (dir, tokens) = (dir.display(), tokens.display());
        let eval = format!("--eval-data {tokens} --eval-every 1 --early-stop 9 --keep-best");
        format!("{SMALL} --steps {steps} --decay-steps 9 {eval} --checkpoint-dir {dir}")
    };
    let best = |arguments: &str| {
        let output = narrows(&format!("{arguments} --format json")).assert().success();
        let output = output.get_output();
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let warning = String::from_utf8(output.stderr.clone()).unwrap();
        (answer["eval_loss_best"].as_f64().unwrap(), warning)
    };
    let (of_text, _) = best(&line(4, &tokens));
    let (same, warning) = best(&format!("{} --resume", line(5, &tokens)));
    assert!(same <= of_text && warning.is_empty(), "{warning}");
    for (steps, tokens, windows) in [(6, &other, ""), (7, &other, "--eval-tokens 32")] {
        let (best, warning) = best(&format!("{} {windows} --resume", line(steps, tokens)));
        let expected = format!("other.tokens: the evaluations until step {} were of", steps - 1);
        assert!(warning.contains(&expected), "{warning}");
        // Digits are predicted worse than words at this step, so an earlier loss would still be the lowest.
        assert!(best > of_text, "{best} and {of_text}");
        assert_eq!(folders(&dir.join("best")), [format!("step-{steps:08}")]);
    }
}

#[test]
fn a_collapse_is_reported_when_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let line = format!("{SMALL} --checkpoint-dir {}", folder.path().join("kept").display());
    stdout(&format!("{line} --steps 30 --warm-up-steps 5"));
    // ηλ = 1 removes the weights, all but a step of AdamW.
    let flags =
        "--steps 33 --resume --lr-schedule constant --learning-rate 1e-5 --weight-decay 1e5";
    let output = narrows(&format!("{line} {flags}")).assert().success();
    let message = String::from_utf8(output.get_output().stderr.clone()).unwrap();
    assert!(message.contains("step 32: the loss is back at ln V = 5.5452"), "{message}");
    assert_eq!(message.matches("ln V").count(), 1, "{message}");
}

#[test]
fn flags_without_evaluations_are_rejected() {
    let (folder, tokens) = folder();
    let tokens = tokens.display();
    let dir = folder.path().join("kept");
    for (flags, part) in [
        ("--early-stop 3".into(), "--early-stop: needs evaluations"),
        (
            format!("--keep-best --checkpoint-dir {}", dir.display()),
            "--keep-best: needs evaluations",
        ),
        (format!("--keep-best --eval-data {tokens}"), "--checkpoint-dir"),
        ("--eval-data -".into(), "--eval-data: a token file is read at any position"),
        ("--eval-data nowhere.tokens".into(), "nowhere.tokens: cannot be read"),
        (format!("--eval-data {tokens} --metrics {tokens}"), "eval.tokens` is an input too"),
        (format!("--eval-data {tokens} --sequence-length 999"), "has 144 tokens, too few"),
    ] {
        let small = SMALL.replace(" --sequence-length 16", "");
        let length = if part.contains("too few") { "" } else { "--sequence-length 16" };
        let message = failure(&format!("{small} {length} --steps 1 {flags}"), 2);
        assert!(message.contains(part), "{flags}: {message}");
    }
    let null = failure(&format!("{SMALL} --backend null --eval-data {tokens}"), 2);
    assert!(null.contains("--eval-data: the null backend"), "{null}");
}
