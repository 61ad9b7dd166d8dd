//! Files and folders that cannot be written any more: size limits, full disks, folders that another run has.
#![cfg(target_os = "linux")]

use std::fs;

use super::cluster::{signal, stderr, wait_for_steps};
use super::environment::{ENVIRONMENT, Run, assert_ends, on_small_disk};
use super::run::SMALL;
use super::{narrows, stdout};

/// Limits are in blocks of 512 bytes.
#[test]
fn files_beyond_the_size_limit_are_errors_that_name_the_limit() {
    let run = Run::new();
    let limit = "hint: a higher limit of file sizes: `ulimit -f` allows this process 4.0 KiB";
    let child = run.start("ulimit -f 8;", &format!("{SMALL} --steps 1000000 {}", run.metrics()));
    let written = "m.jsonl: cannot be written: File too large";
    assert_ends(child, ENVIRONMENT, &[written, limit, "the metrics until step "]);
    assert!(fs::metadata(run.at("m.jsonl")).unwrap().len() <= 4096);
    let child = run.start("ulimit -f 8;", &run.flags(2));
    let written = "model.safetensors: cannot be written: File too large";
    assert_ends(child, ENVIRONMENT, &[written, limit]);
    assert!(run.checkpoints().is_empty(), "an unfinished checkpoint remains");
    let plan = run.at("plan.json");
    let request = format!("plan --model cola-7b --devices 4 --output {}", plan.display());
    let child = run.start("ulimit -f 1;", &request);
    assert_ends(child, ENVIRONMENT, &["plan.json: cannot be written: File too large"]);
    assert!(!plan.exists());
}

/// The metrics cannot be written, and then neither can the checkpoint.
#[test]
fn a_failed_rescue_does_not_hide_its_cause() {
    let run = Run::new();
    let flags = format!("{} {}", run.flags(1_000_000), run.metrics());
    let child = run.start("ulimit -f 8;", &flags);
    let parts = [
        "error: ",
        "m.jsonl: cannot be written: File too large",
        "model.safetensors: cannot be written: File too large",
        "no checkpoint was written to ",
    ];
    let message = stderr(&assert_ends(child, ENVIRONMENT, &parts));
    let places = parts.map(|part| message.find(part).unwrap());
    assert!(places[1] < places[2], "the cause comes first: {message}");
    // A signal may be the cause too.
    let stopped = Run::new();
    let flags = format!("{} {}", stopped.flags(1_000_000), stopped.metrics());
    // Room for the metrics of hundreds of steps, and none for a checkpoint.
    let child = stopped.start("ulimit -f 1000;", &flags);
    wait_for_steps(&stopped.at("m.jsonl"), 2);
    signal(&child, "-TERM");
    assert_ends(
        child,
        ENVIRONMENT,
        &["model.safetensors: cannot", "a signal stopped the run after"],
    );
}

/// Steps of the run before it was resumed count.
#[test]
fn a_failed_run_says_until_which_step_its_metrics_are() {
    let run = Run::new();
    stdout(&format!("{} {}", run.flags(3), run.metrics()));
    let resumed = format!("{} {} --resume", run.flags(1_000_000), run.metrics());
    // Room for the metrics of some steps, and none for a checkpoint.
    let message = stderr(&assert_ends(run.start("ulimit -f 16;", &resumed), ENVIRONMENT, &[]));
    let text = fs::read_to_string(run.at("m.jsonl")).unwrap();
    let whole = text.matches('\n').count();
    assert!(whole > 3, "{text}");
    assert!(message.contains(&format!("the metrics until step {whole} are in ")), "{message}");
}

/// A checkpoint has steps whose lines a full disk refused, or someone removed.
#[test]
fn a_resumed_run_says_which_steps_its_metrics_lack() {
    let run = Run::new();
    stdout(&format!("{} {}", run.flags(4), run.metrics()));
    let metrics = run.at("m.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    let first: String = text.lines().take(2).map(|line| format!("{line}\n")).collect();
    fs::write(&metrics, first).unwrap();
    let resume = |steps| {
        let request = format!("{} {} --resume", run.flags(steps), run.metrics());
        stderr(narrows(&request).assert().code(0).get_output())
    };
    let message = resume(5);
    assert!(message.contains("m.jsonl has no line of steps 3 to 4, which the checkpoint has\n"));
    // The line of step 5 was written.
    let message = resume(6);
    assert!(!message.contains("has no line"), "{message}");
    let text = fs::read_to_string(&metrics).unwrap();
    let last = text.trim_end().rfind('\n').unwrap();
    fs::write(&metrics, &text[..=last]).unwrap();
    let message = resume(7);
    assert!(message.contains("m.jsonl has no line of step 6, which the checkpoint"), "{message}");
}

/// A run that wrote no event leaves nothing that refuses the next one.
#[test]
fn event_files_that_cannot_be_begun_are_removed() {
    let run = Run::new();
    let flags = format!("{SMALL} --steps 1 --tensorboard {}", run.at("board").display());
    let written = "narrows: cannot be written: File too large";
    assert_ends(run.start("ulimit -f 0;", &flags), ENVIRONMENT, &[written]);
    assert_eq!(fs::read_dir(run.at("board")).unwrap().count(), 0);
    // Other programs, and runs that were killed, leave empty files.
    fs::write(run.at("board/events.out.tfevents.1"), "").unwrap();
    stdout(&flags);
    narrows(&flags).assert().code(2);
}

#[test]
fn a_trace_that_cannot_be_written_does_not_cost_the_report() {
    let output =
        narrows(&format!("{SMALL} --steps 2 --trace /dev/full")).assert().code(ENVIRONMENT);
    let output = output.get_output();
    let [report, message] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(report.contains("step time") && !report.contains("Trace for"), "{report}");
    assert!(message.contains("/dev/full: cannot be written"), "{message}");
}

#[test]
fn a_trace_on_a_full_disk_costs_no_checkpoint() {
    let run = Run::new();
    let flags = run.flags(2);
    let script =
        format!("\"$0\" {flags} --trace /mnt/trace.json >/dev/null; echo \"code $?\"; ls -A /mnt");
    let output = match on_small_disk("16k", &script) {
        Ok(output) => output,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let message = stderr(&output);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "code 75\n", "{message}");
    let written = "/mnt/trace.json: cannot be written: No space left on device (os error 28)\n";
    assert!(message.contains(written), "{message}");
    assert_eq!(run.checkpoints(), ["step-00000002"]);
}

#[test]
fn a_run_stops_before_it_writes_into_a_folder_that_it_has_not_locked() {
    for lose in [
        |run: &Run| fs::remove_file(run.at("kept/.narrows-lock")).unwrap(),
        |run: &Run| fs::rename(run.at("kept"), run.at("moved")).unwrap(),
        // Another run has taken the place.
        |run: &Run| {
            fs::rename(run.at("kept"), run.at("moved")).unwrap();
            narrows(&run.flags(1)).assert().success();
        },
    ] {
        let run = Run::new();
        let flags = format!("{} {} --checkpoint-every 20", run.flags(1_000_000), run.metrics());
        let child = run.start("", &flags);
        wait_for_steps(&run.at("m.jsonl"), 21);
        lose(&run);
        let lost = "kept: is no longer the folder that this run has locked: ";
        let message = stderr(&assert_ends(child, ENVIRONMENT, &[lost]));
        // Checkpoints are named where they are now.
        let moved = run.at("moved").display().to_string();
        let is_moved = run.at("moved").exists();
        assert_eq!(message.contains(&format!("that one is now {moved}\n")), is_moved, "{message}");
        let checkpoint = format!(" is now {moved}/step-000000");
        assert_eq!(message.contains(&checkpoint), is_moved, "{message}");
        assert_eq!(message.contains(" was written to "), !is_moved, "{message}");
        // The other run's checkpoint is the only one in the new folder.
        if run.at("moved").exists() && run.at("kept").exists() {
            assert_eq!(run.checkpoints(), ["step-00000001"]);
        }
    }
}

/// Every file of an answer that cannot be written is named, and the answer is printed nevertheless.
#[test]
fn an_output_that_cannot_be_written_does_not_cost_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (plan, page, full_picture) = (at("plan.json"), at("page.html"), at("full.svg"));
    std::os::unix::fs::symlink("/dev/full", &full_picture).unwrap();
    let request =
        "--model cola-tiny --hardware a100-80gb --devices 2 --global-batch 4 --sequence-length 128";
    stdout(&format!("plan {request} --tensor 2 --output {plan}"));
    let all = format!("--output /dev/full --plot {full_picture} --report {page} --trace /dev/full");
    let sweep = "--sweep global_batch=4,8";
    let break_even = "--break-even global_batch=4,8 --between tensor=2,data-parallel";
    for (command, written) in [
        (format!("plan {request} {all}"), "step time"),
        (format!("cost {plan} {all}"), "step time"),
        (format!("explain {request} --output /dev/full --plot {full_picture}"), "step time"),
        (format!("whatif {request} {sweep} --csv /dev/full --report {page}"), "global_batch"),
        (format!("whatif {request} {break_even} --csv /dev/full"), "break-even"),
        (format!("whatif {request} {sweep} --plot {full_picture}"), "global_batch"),
        (format!("sensitivity {request} --csv /dev/full --report {page}"), "step time"),
        (
            format!("compare {plan} --with-search --plot {full_picture} --report {page}"),
            "step time",
        ),
        (format!("validate --plot {full_picture} --report {page}"), "step time"),
        (format!("export {plan} --to torchtitan --allow-loss --output /dev/full"), "torchtitan"),
    ] {
        let _ = fs::remove_file(&page);
        let assert = narrows(&command).assert().code(ENVIRONMENT);
        let output = assert.get_output();
        let [answer, message] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(answer.contains(written), "{command}: {answer}");
        assert!(!answer.contains("written to"), "{command}: {answer}");
        for flag in ["--output", "--csv", "--trace"] {
            assert!(
                !command.contains(&format!("{flag} /dev/full"))
                    || message.contains("/dev/full: cannot be written: No space left"),
                "{command}: {message}"
            );
        }
        let is_named = message.contains("full.svg: cannot be written: No space left");
        assert_eq!(is_named, command.contains("full.svg"), "{command}: {message}");
        assert_eq!(fs::exists(&page).unwrap(), command.contains(&page), "{command}");
    }
}

#[test]
fn help_that_cannot_be_written_is_an_error() {
    for words in ["--help", "plan --help", "--version"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut help = std::process::Command::new(assert_cmd::cargo::cargo_bin!("narrows"));
        let status = help.args(words.split(' ')).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(ENVIRONMENT), "{words}");
    }
}
