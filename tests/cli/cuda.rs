//! Runs on GPUs, which the fake CUDA libraries provide.
#![cfg(unix)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::checkpoints::{checkpoint_files, curve};
use super::cluster::{Processes, signal, stderr, wait_all, wait_for_steps, wait_for_success};
use super::run::{SMALL, lines};
use super::{narrows, stdout};

/// The folder of the fake CUDA libraries; `None`, with a printed reason, if they cannot be built.
pub fn libraries() -> Option<PathBuf> {
    match narrows_fake_cuda::build() {
        Ok(libraries) => Some(libraries),
        Err(reason) => {
            println!("skipped: {reason}");
            None
        }
    }
}

/// Environment variables of processes on fake GPUs.
pub fn environment(
    libraries: &Path,
    run: &Processes,
    devices: usize,
) -> Vec<(&'static str, String)> {
    vec![
        ("LD_LIBRARY_PATH", libraries.display().to_string()),
        ("NARROWS_FAKE_CUDA_DEVICES", devices.to_string()),
        ("TMPDIR", run.at("").display().to_string()),
    ]
}

pub fn run_on_gpu(libraries: &Path, run: &Processes, arguments: &str) -> String {
    let mut command = narrows(arguments);
    command.envs(environment(libraries, run, 1));
    let output = command.assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("answers are UTF-8")
}

/// Checks that losses and gradient norms agree with those of another run.
fn assert_metrics_agree(actual: &Path, expected: &Path, tolerance: f64) {
    let (actual, expected) = (lines(actual), lines(expected));
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(&expected) {
        for key in ["loss", "grad_norm"] {
            let [actual, expected] = [actual, expected].map(|line| line[key].as_f64().unwrap());
            let error = (actual / expected - 1.0).abs();
            assert!(error < tolerance, "{key} is {actual}, expected {expected}");
        }
    }
}

#[test]
fn without_a_gpu_a_run_fails_with_a_hint() {
    let doctor: Value = serde_json::from_str(&stdout("doctor --format json")).unwrap();
    if doctor["backends"]["cuda"]["usable"] == true {
        println!("skipped: this machine has a GPU");
        return;
    }
    let assert = narrows("run --backend cuda").assert().code(1);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.starts_with("error: "), "{message}");
    assert!(message.contains("narrows doctor"), "{message}");
}

/// A driver with all functions may still be too old for the compiled kernels.
#[test]
fn old_drivers_are_rejected() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let mut command = narrows("run --backend cuda --steps 1");
    command.envs(environment(&libraries, &run, 1)).env("NARROWS_FAKE_CUDA_DRIVER", "11080");
    let assert = command.assert().code(1);
    let message = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(message.contains("supports CUDA 11.8") && message.contains("525"), "{message}");
    let mut doctor = narrows("doctor");
    doctor.envs(environment(&libraries, &run, 1)).env("NARROWS_FAKE_CUDA_DRIVER", "11080");
    let report = String::from_utf8(doctor.assert().success().get_output().stdout.clone()).unwrap();
    assert!(
        report.contains("cuda  not available") && report.contains("supports CUDA 11.8"),
        "{report}"
    );
}

/// A library of another name, or one that lacks functions, does not load.
#[test]
fn libraries_without_their_functions_do_not_load() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let places = run.at("libraries");
    std::fs::create_dir(&places).unwrap();
    // Another library, which has none of the functions.
    for (name, other) in [
        ("cuda", "libnvrtc.so.12"),
        ("nvrtc", "libcuda.so.1"),
        ("cublasLt", "libnvrtc.so.12"),
        ("cudnn", "libnvrtc.so.12"),
        ("nccl", "libnvrtc.so.12"),
    ] {
        let file = places.join(format!("lib{name}.so"));
        std::fs::copy(libraries.join(other), file).unwrap();
    }
    let environment = environment(&places, &run, 1);
    let doctor = narrows("doctor --format json").envs(environment.clone()).assert().success();
    let report: Value = serde_json::from_slice(&doctor.get_output().stdout).unwrap();
    for library in report["libraries"].as_array().unwrap() {
        assert_eq!(library["loads"], false, "{library}");
    }
    let run = narrows("run --backend cuda").envs(environment).assert().code(1);
    let message = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    assert!(message.contains("libcuda, the driver, does not load"), "{message}");
}

#[test]
fn a_gpu_trains_as_the_cpu_does() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let doctor = run_on_gpu(&libraries, &run, "doctor --format json");
    let doctor: Value = serde_json::from_str(&doctor).unwrap();
    assert_eq!(doctor["backends"]["cuda"]["usable"], true, "{doctor}");
    assert_eq!(doctor["devices"].as_array().unwrap().len(), 1);
    let file = |name: &str| run.at(name).display().to_string();
    let [cpu, graphs, eager, mixed] = ["cpu", "graphs", "eager", "mixed"].map(file);
    stdout(&format!("{SMALL} --steps 4 --metrics {cpu}"));
    let small = SMALL.replace(" --threads 1", " --backend cuda");
    let text = run_on_gpu(&libraries, &run, &format!("{small} --steps 4 --metrics {graphs}"));
    assert!(text.contains("Training cola-tiny on 1 GPU"), "{text}");
    let arguments = format!("{small} --steps 4 --eager --metrics {eager} --format json");
    let answer = run_on_gpu(&libraries, &run, &arguments);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((&answer["backend"], &answer["threads_per_device"]), (&"cuda".into(), &Value::Null));
    assert_eq!(answer["allocated_bytes"], answer["prediction"]["peak_memory_bytes"]);
    assert!(answer["breakdown_s"]["gemm"].as_f64().unwrap() > 0.0, "{}", answer["breakdown_s"]);
    assert!(text.contains("--eager or --trace breaks them down"), "{text}");
    assert_metrics_agree(graphs.as_ref(), cpu.as_ref(), 1e-4);
    assert_eq!(curve(graphs.as_ref()), curve(eager.as_ref()), "graphs and single launches differ");
    // In mixed precision, the default for GPUs.
    let mixed_run = small.replace("--hardware cpu-local", "--hardware h200-sxm");
    run_on_gpu(&libraries, &run, &format!("{mixed_run} --steps 4 --metrics {mixed}"));
    assert_metrics_agree(mixed.as_ref(), cpu.as_ref(), 2e-2);
    assert_ne!(curve(mixed.as_ref()), curve(graphs.as_ref()));
}

/// From the second step on only graphs are launched, without a synchronisation in between, by the log of the fake
/// driver.
#[test]
fn later_steps_launch_graphs_without_synchronising() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let log = run.at("log.txt");
    let small = SMALL.replace(" --threads 1", " --backend cuda");
    let mut command = narrows(&format!("{small} --steps 5"));
    command.envs(environment(&libraries, &run, 1)).env("NARROWS_FAKE_CUDA_LOG", &log);
    command.assert().success();
    let log = std::fs::read_to_string(log).unwrap();
    let calls: Vec<&str> = log.lines().filter(|line| line.contains(" host ")).collect();
    let contains = |event: &'static str| move |line: &&&str| line.contains(event);
    let captured = calls.iter().filter(contains("host captures graph")).count();
    let launched = calls.iter().filter(contains("host launches graph")).count();
    // Forward pass, backward pass and step phase of one microbatch.
    assert_eq!((captured, launched), (3, 4 * 3), "{calls:#?}");
    let first = calls.iter().position(|line| line.contains("host launches graph")).unwrap();
    let last = calls.iter().rposition(|line| line.contains("host launches graph")).unwrap();
    let waits = calls[first..last].iter().filter(contains("host synchronises")).count();
    assert_eq!(waits, 0, "{calls:#?}");
}

#[test]
fn each_process_has_its_own_gpu() {
    let Some(libraries) = libraries() else { return };
    for mesh in [
        "--tensor 2 --pipeline 1",
        "--tensor 1 --pipeline 2",
        "--data-parallel 2",
        "--tensor 1 --pipeline 1 --context 2 --context-attention gather",
        "--tensor 1 --pipeline 1 --context 2 --context-attention ring",
    ] {
        let [run, cpu_run] = [Processes::new(2), Processes::new(1)];
        let arguments = format!("{} {mesh}", run.flags(4)).replace("--threads 1", "--backend cuda");
        let begin = |rank| {
            let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
            run.start(rank, &arguments, environment)
        };
        let outputs = wait_for_success((0..2).map(begin).collect());
        assert!(!outputs[0].stdout.is_empty() && outputs[1].stdout.is_empty(), "{outputs:#?}");
        stdout(&format!("{} --devices 2 {mesh}", cpu_run.flags(4)));
        let metrics = [&run, &cpu_run].map(|run| run.at("m.jsonl"));
        assert_metrics_agree(&metrics[0], &metrics[1], 1e-4);
        let bytes = metrics.map(|file| {
            let keys = ["allocated_bytes", "collective_bytes", "transfer_sent_bytes"];
            keys.map(|key| lines(&file)[3][key].clone())
        });
        assert_eq!(bytes[0], bytes[1], "{mesh}");
    }
}

/// With a tensor axis, gathers and reductions of sharded parameters run on a stream of their own beside the collectives of
/// activations, in whichever order the streams allow.
#[test]
fn sharded_parameters_overlap_with_collectives_of_activations() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    // Nothing overlaps on CPUs unless their profile has factors.
    let provenance = json!({ "kind": "assumed", "source": "a test", "date": "2026-11-28" });
    let mut profile: Value =
        serde_json::from_str(include_str!("../../profiles/cpu-local.json")).unwrap();
    profile["overlap"] =
        json!({ "compute_slowdown": 1.1, "collective_slowdown": 1.1, "provenance": provenance });
    let hardware = run.at("hardware.json");
    std::fs::write(&hardware, profile.to_string()).unwrap();
    let arguments = |run: &Processes, backend: &str| {
        let mesh = "--tensor 2 --data-parallel 2 --zero 3";
        let flags = run.flags(3).replace("--threads 1", &format!("{backend} {mesh}"));
        flags.replace("cpu-local", hardware.to_str().unwrap())
    };
    let trace = run.at("trace.json");
    let traced = format!("--threads 1 --devices 4 --trace {}", trace.display());
    stdout(&arguments(&run, &traced));
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    // The thread of overlapped collectives of sharded parameters.
    let events = trace["traceEvents"].as_array().unwrap();
    let overlaps = |event: &&Value| event["tid"] == 4 && event["cat"] == "collective_exposed";
    assert!(events.iter().filter(overlaps).count() > 10);
    for seed in 0..3 {
        let on_gpus = Processes::new(4);
        let arguments = arguments(&on_gpus, "--backend cuda");
        let begin = |rank| {
            let of_seed = vec![("NARROWS_FAKE_CUDA_SEED", seed.to_string())];
            let of_libraries = environment(&libraries, &on_gpus, 4);
            let environment = [on_gpus.torchrun(rank), of_libraries, of_seed].concat();
            on_gpus.start(rank, &arguments, environment)
        };
        wait_for_success((0..4).map(begin).collect());
        let metrics = [&on_gpus, &run].map(|run| run.at("m.jsonl"));
        assert_metrics_agree(&metrics[0], &metrics[1], 1e-4);
    }
}

/// Processes on GPUs copy what they save while steps go on: files and losses are those of a run that waits.
#[test]
fn checkpoints_are_written_beside_steps_on_gpus() {
    let Some(libraries) = libraries() else { return };
    // Both runs use the GEMM algorithms that the first one tunes: algorithms decide the bits.
    let cache = tempfile::tempdir().unwrap();
    let cache = vec![("XDG_CACHE_HOME", cache.path().display().to_string())];
    let [blocking, background] = ["", "--checkpoint-async"].map(|mode| {
        let run = Processes::new(2);
        let flags = format!("{} --tensor 2 --checkpoint-every 1 --keep 9 {mode}", run.flags(3));
        let arguments = flags.replace("--threads 1", "--backend cuda --deterministic");
        let begin = |rank| {
            let of_libraries = environment(&libraries, &run, 2);
            let environment = [run.torchrun(rank), of_libraries, cache.clone()].concat();
            run.start(rank, &arguments, environment)
        };
        wait_for_success((0..2).map(begin).collect());
        run
    });
    let curves = [&blocking, &background].map(|run| curve(&run.at("m.jsonl")));
    assert_eq!(curves[0], curves[1]);
    let files = [&blocking, &background].map(|run| checkpoint_files(&run.at("kept")));
    assert_eq!(files[0].len(), 3 * 8);
    assert!(files[0] == files[1], "the checkpoints differ");
}

/// Two processes reduce gradients in bf16: metrics are near those of fp32 reductions, and half the bytes are sent, in the
/// step phase and in passes.
#[test]
fn processes_reduce_gradients_in_bf16() {
    let Some(libraries) = libraries() else { return };
    for zero in [0, 3] {
        let [fp32, bf16] = ["fp32", "bf16"].map(|dtype| {
            let run = Processes::new(2);
            let flags = format!("--data-parallel 2 --zero {zero} --grad-reduce-dtype {dtype}");
            let arguments = format!("{} {flags}", run.flags(2))
                .replace("--threads 1", "--backend cuda")
                .replace("--hardware cpu-local", "--hardware h200-sxm");
            let begin = |rank| {
                let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
                run.start(rank, &arguments, environment)
            };
            wait_for_success((0..2).map(begin).collect());
            run
        });
        let [of_fp32, of_bf16] = [&fp32, &bf16].map(|run| run.at("m.jsonl"));
        assert_metrics_agree(&of_bf16, &of_fp32, 1e-2);
        assert_ne!(curve(&of_bf16), curve(&of_fp32), "ZeRO-{zero}");
        let kind = if zero == 0 { "all_reduce" } else { "reduce_scatter" };
        let [of_fp32, of_bf16] = [of_fp32, of_bf16].map(|file| {
            let collectives = &lines(&file)[1]["collective_bytes"][0];
            collectives[kind]["data"].as_f64().unwrap_or_else(|| panic!("{collectives}"))
        });
        // The gradient norm is reduced in fp32.
        assert!((of_bf16 / of_fp32 - 0.5).abs() < 1e-3, "{of_bf16} of {of_fp32} bytes");
    }
}

/// NCCL rejects two processes on the same GPU of a host; the error has a hint.
#[test]
fn processes_on_one_gpu_need_different_host_ids() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let arguments = format!("{} --tensor 2", run.flags(2)).replace("--threads 1", "--backend cuda");
    let run_all = |extra: fn(usize) -> Vec<(&'static str, String)>| {
        let begin = |rank| {
            let environment =
                [run.torchrun(rank), environment(&libraries, &run, 1), extra(rank)].concat();
            run.start(rank, &arguments, environment)
        };
        wait_all((0..2).map(begin).collect())
    };
    let outputs = run_all(|_| vec![]);
    assert!(outputs.iter().all(|output| output.status.code() == Some(1)), "{outputs:#?}");
    assert!(outputs.iter().all(|output| stderr(output).contains("NCCL_HOSTID")), "{outputs:#?}");
    let outputs = run_all(|rank| vec![("NCCL_HOSTID", format!("narrows-{rank}"))]);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:#?}");
}

#[test]
fn processes_must_use_the_same_backend() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let begin = |rank: usize| {
        let backend = ["--backend cuda", "--backend cpu"][rank];
        let arguments = format!("{} --tensor 2", run.flags(2)).replace("--threads 1", backend);
        let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, &arguments, environment)
    };
    let outputs = wait_all((0..2).map(begin).collect());
    for output in outputs {
        let message = stderr(&output);
        assert!(message.contains("backend: cpu, not cuda"), "{message}");
    }
}

/// A run continues from checkpoints of the other backend.
#[test]
fn checkpoints_move_between_gpu_and_cpu() {
    let Some(libraries) = libraries() else { return };
    let [run, cpu_run] = [Processes::new(1), Processes::new(1)];
    let on_gpu = |steps| run.flags(steps).replace("--threads 1", "--backend cuda");
    run_on_gpu(&libraries, &run, &on_gpu(2));
    stdout(&format!("{} --resume", run.flags(4)));
    run_on_gpu(&libraries, &run, &format!("{} --resume", on_gpu(6)));
    stdout(&cpu_run.flags(6));
    assert_metrics_agree(&run.at("m.jsonl"), &cpu_run.at("m.jsonl"), 1e-4);
}

/// The remaining process ends and names the killed one.
#[test]
fn a_killed_process_ends_the_run() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(2);
    let arguments = format!("{} --tensor 2", run.flags(1000));
    let arguments = arguments.replace("--threads 1", "--backend cuda");
    let begin = |rank| {
        let environment = [run.torchrun(rank), environment(&libraries, &run, 2)].concat();
        run.start(rank, &arguments, environment)
    };
    let children: Vec<_> = (0..2).map(begin).collect();
    wait_for_steps(&run.at("m.jsonl"), 2);
    signal(&children[1], "-KILL");
    let outputs = wait_all(children);
    assert!(!outputs[0].status.success());
    let message = stderr(&outputs[0]);
    assert!(message.contains("process 1") && !message.contains("panicked"), "{message}");
}

/// A traced run has the time of each instruction on the GPU, and breaks down the step time.
#[test]
fn a_run_on_a_gpu_is_traced() {
    let Some(libraries) = libraries() else { return };
    let run = Processes::new(1);
    let small = SMALL.replace(" --threads 1", " --backend cuda");
    let (trace, metrics) = (run.at("trace.json"), run.at("m.jsonl"));
    let files = format!("--trace {} --metrics {}", trace.display(), metrics.display());
    run_on_gpu(&libraries, &run, &format!("{small} --steps 2 {files}"));
    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let has_duration = |event: &&Value| event["dur"].as_f64().is_some_and(|dur| dur > 0.0);
    assert!(events.iter().filter(has_duration).count() > 100, "{} events", events.len());
    let parts = &lines(&metrics)[1]["breakdown_s"];
    for part in ["gemm", "attention", "elementwise", "optimizer"] {
        assert!(parts[part].as_f64().unwrap() > 0.0, "{parts}");
    }
}
