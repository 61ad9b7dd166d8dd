//! How the processes of a run meet: those that fail before, or belong to another run or job.
#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use super::cluster::{Processes, TIMEOUT, signal, stderr, wait_all, wait_for_success};
use super::run::SMALL;

/// Whoever connects without being a process of the job is named once, with the reason, and the run goes on.
#[test]
fn strangers_at_the_rendezvous_are_named() {
    let processes = Processes::new(2);
    let flags = format!("{SMALL} --steps 2 --tensor 2");
    let first = processes.start(0, &flags, processes.torchrun(0));
    let start = Instant::now();
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", processes.port())) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
        assert!(start.elapsed() < TIMEOUT, "process 0 does not listen");
    };
    for _ in 0..3 {
        let mut stream = connect();
        stream.write_all(b"GET /\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        // The process hangs up.
        let _ = stream.read(&mut [0]);
        drop(connect());
    }
    let second = processes.start(1, &flags, processes.torchrun(1));
    let outputs = wait_for_success(vec![first, second]);
    let message = stderr(&outputs[0]);
    let reports: Vec<&str> =
        message.lines().filter(|line| line.contains("the rendezvous turned away ")).collect();
    assert_eq!(reports.len(), 2, "{message}");
    for reason in [
        ": it is another program, or another version of this one",
        ": it closed the connection before it had proved itself",
    ] {
        let is_report = |line: &&&str| {
            line.starts_with("warning: the rendezvous turned away 127.0.0.1:")
                && line.ends_with(reason)
        };
        assert_eq!(reports.iter().filter(is_report).count(), 1, "{reason}: {message}");
    }
    assert!(!stderr(&outputs[1]).contains("turned away"), "{outputs:#?}");
}

/// A process that a signal ends before all have joined tells the others, whether it still reads its plan or waits for them.
#[test]
fn a_signal_before_the_meeting_ends_all_processes() {
    for (world, victim, waits) in [(2, 1, false), (2, 0, false), (3, 1, true), (3, 0, true)] {
        let processes = Processes::new(world);
        // A plan that never comes.
        let pipe = processes.at("plan.json");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let read = format!("run {}", pipe.display());
        let flags = format!("{SMALL} --steps 1 --devices {world} --join-timeout 100");
        let start = Instant::now();
        let run = |rank: usize| {
            let arguments = if rank == victim && !waits { &read } else { &flags };
            processes.start(rank, arguments, processes.torchrun(rank))
        };
        // Of three processes, one never starts.
        let children: Vec<Child> = (0..2).map(run).collect();
        std::thread::sleep(Duration::from_secs(2));
        signal(&children[victim], "-TERM");
        let outputs = wait_all(children);
        let case = format!("process {victim} of {world}, waits {waits}: {outputs:#?}");
        assert!(start.elapsed() < Duration::from_secs(30), "{case}");
        assert_eq!(outputs[victim].status.code(), Some(130), "{case}");
        let other = &outputs[1 - victim];
        assert_eq!(other.status.code(), Some(1), "{case}");
        let message = format!("process {victim} aborted the run: a signal stopped it");
        assert!(stderr(other).contains(&message), "{case}");
    }
}

#[test]
fn processes_of_different_runs_do_not_start() {
    let processes = Processes::new(2);
    let arguments = format!("{SMALL} --steps 2 --seed");
    let start = |rank: usize| {
        processes.start(rank, &format!("{arguments} {rank}"), processes.torchrun(rank))
    };
    for output in wait_all((0..2).map(start).collect()) {
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let text = stderr(&output);
        assert!(
            text.contains("process 1 was started for another run than process 0: seed: 1, not 0"),
            "{text}"
        );
    }
    // Of the optimizer, only the value that differs is named.
    let start = |rank: usize| {
        let rate = if rank == 0 { "0.01" } else { "0.02" };
        let arguments = format!("{SMALL} --steps 2 --learning-rate {rate}");
        processes.start(rank, &arguments, processes.torchrun(rank))
    };
    for output in wait_all((0..2).map(start).collect()) {
        let text = stderr(&output);
        let message = "process 1 was started for another run than process 0: --learning-rate: 0.02, not 0.01\n";
        assert!(text.contains(message), "{text}");
    }
    // One process per device.
    for output in wait_all(processes.all(&format!("{SMALL} --steps 2 --devices 3"))) {
        assert_eq!(output.status.code(), Some(2));
        let text = stderr(&output);
        assert!(text.contains("is for 3 devices, and 2 processes were started"), "{text}");
    }
}

#[test]
fn a_join_timeout_names_the_missing_processes() {
    let processes = Processes::new(4);
    let arguments = format!("{SMALL} --steps 2 --join-timeout 0.5");
    let first = processes.start(0, &arguments, processes.torchrun(0));
    let output = first.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("3 of 4 processes did not join"), "{}", stderr(&output));
    let second = processes.start(1, &arguments, processes.torchrun(1));
    let output = second.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot reach process 0 at 127.0.0.1"), "{}", stderr(&output));
}

/// One process cannot read its token; the others do not wait for it until their timeout.
#[test]
fn a_process_that_fails_before_it_joins_ends_the_run_of_all() {
    let processes = Processes::new(2);
    let start = |rank: usize| {
        let data = if rank == 1 { "nowhere.bin.json" } else { "" };
        let arguments =
            format!("{data} {SMALL}").replace(&format!("{data} run"), &format!("run {data}"));
        processes.start(rank, &format!("{arguments} --steps 2"), processes.torchrun(rank))
    };
    let begin = Instant::now();
    let outputs = wait_all((0..2).map(start).collect());
    assert!(begin.elapsed() < TIMEOUT);
    let (first, second) = (stderr(&outputs[0]), stderr(&outputs[1]));
    assert!(
        second.starts_with("error: process 1 of 2: nowhere.bin.json: cannot be read"),
        "{second}"
    );
    assert!(
        first.contains("process 1 aborted the run: nowhere.bin.json: cannot be read"),
        "{first}"
    );
}

/// A process with one of the variables of torchrun does not train alone.
#[test]
fn a_rank_without_a_number_of_processes_is_refused() {
    for rank in ["0", "1"] {
        let mut run = super::narrows(&format!("{SMALL} --steps 1"));
        let assert = run.env("RANK", rank).env_remove("WORLD_SIZE").assert().code(2);
        let message = stderr(assert.get_output());
        let expected = "error: environment: RANK is set, and WORLD_SIZE is not: ";
        assert!(message.starts_with(expected), "{message}");
        assert_eq!(message.matches("hint: ").count(), 2, "{message}");
    }
}

/// One process is given flags that it cannot parse. The others do not wait for it.
#[test]
fn a_process_with_invalid_flags_ends_the_run_of_all() {
    let processes = Processes::new(2);
    let token = processes.at("token");
    fs::write(&token, "a secret").unwrap();
    let flags = format!("--steps 2 --job-token-file {}", token.display());
    for (failed, invalid, reason) in [
        (1, "--stepz 9", "unexpected argument '--stepz' found"),
        (0, "--micro-batch=some", "invalid value 'some' for '--micro-batch"),
        // The deadline of the failed process is then the default one.
        (1, "--join-timeout never", "invalid value 'never' for '--join-timeout"),
        (0, "--resume", "the following required arguments were not provided:"),
    ] {
        let start = |rank: usize| {
            let invalid = if rank == failed { invalid } else { "" };
            let arguments = format!("{SMALL} {invalid} {flags}");
            processes.start(rank, &arguments, processes.torchrun(rank))
        };
        let begin = Instant::now();
        let outputs = wait_all((0..2).map(start).collect());
        assert!(begin.elapsed() < Duration::from_secs(30), "{invalid}: {outputs:#?}");
        assert_eq!(outputs[failed].status.code(), Some(2), "{invalid}: {outputs:#?}");
        let message = format!("error: process {failed} of 2: {reason}");
        assert!(stderr(&outputs[failed]).starts_with(&message), "{invalid}: {outputs:#?}");
        let other = &outputs[1 - failed];
        assert_eq!(other.status.code(), Some(1), "{invalid}: {outputs:#?}");
        let message = format!("process {failed} aborted the run: {reason}");
        assert!(stderr(other).contains(&message), "{invalid}: {outputs:#?}");
    }
}

#[test]
fn processes_with_different_job_tokens_do_not_meet() {
    let processes = Processes::new(2);
    let token = |rank: usize, text: &str| {
        let path = processes.at(&format!("token-{rank}"));
        fs::write(&path, text).unwrap();
        format!("{SMALL} --steps 2 --tensor 2 --job-token-file {}", path.display())
    };
    let start = |texts: [&str; 2], flags: &str| {
        let one = |rank: usize| {
            let arguments = format!("{} {flags}", token(rank, texts[rank]));
            processes.start(rank, &arguments, processes.torchrun(rank))
        };
        wait_all((0..2).map(one).collect())
    };
    let outputs = start(["a secret", "another"], "--join-timeout 6");
    assert!(outputs.iter().all(|output| output.status.code() == Some(1)), "{outputs:#?}");
    assert!(stderr(&outputs[0]).contains("1 of 2 processes did not join"), "{outputs:#?}");
    let report = "the proof of this process: its job token may differ";
    assert_eq!(stderr(&outputs[0]).matches(report).count(), 1, "{outputs:#?}");
    assert!(stderr(&outputs[1]).contains("its job token differs"), "{outputs:#?}");
    // White space at the end does not count.
    let outputs = start(["a secret", "a secret\n"], "");
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:#?}");
    let outputs = start(["", ""], "");
    assert!(outputs.iter().all(|output| output.status.code() == Some(2)), "{outputs:#?}");
    assert!(stderr(&outputs[0]).contains("token-0: is empty"), "{outputs:#?}");
}
