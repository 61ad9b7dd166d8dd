//! Runs that a scheduler restarts whenever a process dies, as torchrun and Slurm do.
#![cfg(target_os = "linux")]

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use narrows_test_support::plans::TestRng;
use narrows_test_support::random_seed;

use super::checkpoints::{curve, damage};
use super::cluster::{Processes, signal, stderr, wait_all, wait_for_success};
use super::stdout;

/// The mesh of the run, and how often it saves.
const FLAGS: &str = "--tensor 2 --pipeline 1 --checkpoint-every 1 --collective-timeout 20";

/// The best checkpoint is the last resort before the first step.
#[test]
fn a_run_resumes_from_its_best_checkpoint_where_all_others_are_damaged() {
    for (world, file) in [(1, "optimizer"), (2, "optimizer-00002-of-00002")] {
        let (processes, undisturbed) = (Processes::new(world), Processes::new(world));
        let flags = |run: &Processes, steps| {
            let (text, tokens) = (run.at("eval.txt"), run.at("eval.tokens"));
            fs::write(&text, "Call me Ishmael. ".repeat(20)).unwrap();
            stdout(&format!("data {} --output {}", text.display(), tokens.display()));
            let eval = format!("--eval-data {} --eval-every 2 --keep-best", tokens.display());
            let save = "--checkpoint-every 1 --resume=auto";
            format!("{} {eval} {save} --tensor {world}", run.flags(steps))
        };
        wait_for_success(processes.all(&flags(&processes, 3)));
        assert!(processes.at("kept/best/step-00000003").exists());
        for step in 1..=3 {
            damage(&processes.at(&format!("kept/step-0000000{step}/{file}.safetensors")));
        }
        let outputs = wait_for_success(processes.all(&flags(&processes, 6)));
        let message = stderr(&outputs[0]);
        assert_eq!(message.matches("the checkpoint is now ").count(), 3, "{message}");
        assert!(!message.contains("no undamaged checkpoint left"), "{message}");
        let report = String::from_utf8(outputs[0].stdout.clone()).unwrap();
        assert!(report.contains("after step 3: "), "{report}");
        wait_for_success(undisturbed.all(&flags(&undisturbed, 6)));
        let curves = [&processes, &undisturbed].map(|run| curve(&run.at("m.jsonl")));
        assert!(curves[0] == curves[1], "{world}: the losses differ");
        assert!(!processes.at("m.jsonl.old-1").exists());
    }
}

/// Ends processes that have not noticed within seconds that another died, as launchers do. They may wait for it to join.
fn end_survivors(children: &mut [Child]) {
    let deadline = Instant::now() + Duration::from_secs(5);
    for child in children {
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                signal(child, "-KILL");
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Kills a random process of a run after a random time, and starts all again, until `time` is over. Then lets the run
/// end, and compares its losses with those of an undisturbed one. `mode` are flags of how checkpoints are written.
fn kill_at_random(seed: u64, time: Duration, steps: u64, mode: &str) {
    println!("seed {seed}");
    let mut rng = TestRng::new(seed);
    let processes = Processes::new(2);
    let decay = format!("--decay-steps {steps}");
    let flags = processes.flags(steps).replace("--decay-steps 12", &decay);
    let flags = format!("{flags} {FLAGS} {mode} --resume=auto");
    let (start, mut kills) = (Instant::now(), 0);
    let mut children = processes.all(&flags);
    loop {
        let pause = Duration::from_millis(50 + rng.below(2000) as u64);
        let is_over = start.elapsed() >= time;
        let deadline = Instant::now() + pause;
        while !is_over && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        if !is_over {
            // A process that has ended takes no signal.
            let victim = &mut children[rng.below(2)];
            if victim.try_wait().unwrap().is_none() {
                signal(victim, ["-KILL", "-KILL", "-TERM"][rng.below(3)]);
                kills += 1;
            }
        }
        if !is_over {
            end_survivors(&mut children);
        }
        let outputs = wait_all(children);
        if outputs.iter().all(|output| output.status.success()) {
            break;
        }
        // The survivor may have met the successor of its dead peer, and no other error.
        for output in &outputs {
            assert!(!stderr(output).contains("panicked"), "{}", stderr(output));
            assert_ne!(output.status.code(), Some(2), "seed {seed}: {}", stderr(output));
        }
        children = processes.all(&flags);
    }
    println!("{kills} kills");
    let undisturbed = Processes::new(1);
    let flags = undisturbed.flags(steps).replace("--decay-steps 12", &decay);
    stdout(&format!("{flags} --devices 2 {FLAGS}"));
    let curves = [&processes, &undisturbed].map(|run| curve(&run.at("m.jsonl")));
    assert!(curves[0] == curves[1], "seed {seed}: the losses differ");
}

#[test]
fn losses_of_a_run_whose_processes_are_killed_equal_those_of_an_undisturbed_one() {
    kill_at_random(11, Duration::from_secs(4), 40, "");
}

#[test]
fn losses_are_equal_where_kills_interrupt_saves_behind_steps() {
    kill_at_random(12, Duration::from_secs(4), 40, "--checkpoint-async");
}

#[test]
#[ignore = "second level: half a minute"]
fn losses_are_equal_after_half_a_minute_of_kills() {
    kill_at_random(random_seed(), Duration::from_secs(30), 100, "");
}

#[test]
#[ignore = "second level: half a minute"]
fn losses_are_equal_after_half_a_minute_of_kills_that_interrupt_saves_behind_steps() {
    kill_at_random(random_seed(), Duration::from_secs(30), 100, "--checkpoint-async");
}
