//! Failures are reported by all processes, before a timeout.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use narrows_cluster::{ClusterError, ClusterFault};
use narrows_cuda::{CudaError, GpuOptions};
use narrows_plan::{Mesh, Precision};
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, RunError};

use super::training::{cache_folder, on_each_device, options, tokens};
use super::{device_choice, plans};

fn plan_on(tensor: u64, pipeline: u64) -> (narrows_plan::model::Model, narrows_plan::Plan) {
    let mesh = Mesh { tensor, pipeline, data: 1, context: 1 };
    plans(mesh, 1, Precision::Fp32, 5, 1).pop().unwrap()
}

/// Longer than any item of a step takes on a busy machine.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// A device that makes no second step leaves the other waiting in a collective, which gives up after the timeout and
/// reports the last activity: in captured graphs, and in single launches.
#[test]
fn stalled_steps_are_reported_after_the_timeout() {
    const EAGER: u32 = 1;
    let test = "failures::stalled_steps_are_reported_after_the_timeout";
    device_choice::under_seeds_at_once(test, [0, EAGER], 2, |seed| {
        check_stall(seed == u64::from(EAGER))
    });
}

fn check_stall(eager: bool) {
    let (model, plan) = plan_on(2, 1);
    let folder = cache_folder();
    let given_up = AtomicBool::new(false);
    let results = on_each_device(
        (&model, &plan),
        STALL_TIMEOUT,
        |rank| options(&folder, device_choice::ordinal(rank), eager),
        |session, rank| {
            let mut session = session.unwrap_or_else(|error| panic!("{error}"));
            session.initialise(&model, 1).unwrap();
            let ids = tokens(&plan, 0, model.vocab);
            let input = StepInput { tokens: &ids, targets: &ids };
            let optimizer = Optimizer::new(1e-3, 1, 10);
            session.step(&optimizer, input).unwrap();
            if rank == 1 {
                while !given_up.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(50));
                }
                return None;
            }
            let start = Instant::now();
            let error = session.step(&optimizer, input).unwrap_err();
            let waited = start.elapsed();
            given_up.store(true, Ordering::SeqCst);
            // The session cannot be used any more, and does not block.
            let again = session.step(&optimizer, input).unwrap_err().to_string();
            assert!(again.contains("an earlier step failed"), "{again}");
            Some((error, waited))
        },
    );
    let (error, waited) = results.into_iter().flatten().next().unwrap();
    let RunError::Device(device) = &error else { panic!("{error}") };
    let CudaError::Stalled { step: 2, recent_activity, .. } = device.source_as().unwrap() else {
        panic!("{error}")
    };
    assert!(
        recent_activity.iter().any(|line| line.contains("not ended: forward pass of microbatch 0")),
        "{error}"
    );
    assert!(recent_activity.iter().any(|line| line.contains("over tensor of")), "{error}");
    assert!(waited >= STALL_TIMEOUT, "{waited:?}");
    // A graph has ended or not as a whole; with single launches the very collective is reported.
    assert_ne!(device.hint().unwrap().contains("--eager"), eager, "{error}");
    let last = recent_activity.last().unwrap();
    let names_collective = last.contains("not ended: ") && !last.contains("instructions");
    assert_eq!(names_collective, eager, "{error}");
}

/// A single GPU waits for no other process, but a step may still never end. Every step of a fake GPU exceeds a timeout of
/// zero; one of a real GPU might not.
#[test]
fn a_stalled_single_gpu_is_reported() {
    device_choice::on_fake_gpus("failures::a_stalled_single_gpu_is_reported", &[], || {
        let (model, plan) = plan_on(1, 1);
        let folder = cache_folder();
        let no_timeout = GpuOptions { timeout: Duration::ZERO, ..options(&folder, 0, false) };
        let mut results = on_each_device(
            (&model, &plan),
            Duration::ZERO,
            |_| no_timeout.clone(),
            |session, _| {
                let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                session.initialise(&model, 1).unwrap();
                let ids = tokens(&plan, 0, model.vocab);
                let input = StepInput { tokens: &ids, targets: &ids };
                session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err()
            },
        );
        let error = results.pop().unwrap();
        let RunError::Device(device) = &error else { panic!("{error}") };
        let CudaError::Stalled { step: 1, recent_activity, .. } = device.source_as().unwrap()
        else {
            panic!("{error}")
        };
        assert!(recent_activity.iter().any(|line| line.contains("not ended: ")), "{error}");
    });
}

/// A process that fails tells the others, which wait for their GPUs.
#[test]
fn a_failure_is_reported_to_processes_that_wait_for_a_gpu() {
    let test = "failures::a_failure_is_reported_to_processes_that_wait_for_a_gpu";
    device_choice::under_seeds(test, [0], 2, |_| {
        for (tensor, pipeline) in [(2, 1), (1, 2)] {
            let (model, plan) = plan_on(tensor, pipeline);
            let folder = cache_folder();
            let errors = on_each_device(
                (&model, &plan),
                Duration::from_secs(300),
                |rank| options(&folder, device_choice::ordinal(rank), true),
                |session, rank| {
                    let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                    session.initialise(&model, 1).unwrap();
                    let ids = tokens(&plan, 0, model.vocab);
                    let invalid = vec![99_999; ids.len()];
                    let ids = if rank == 1 { &invalid } else { &ids };
                    let input = StepInput { tokens: ids, targets: ids };
                    session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err()
                },
            );
            let RunError::TokenOutOfVocabulary { token: 99_999, .. } = &errors[1] else {
                panic!("{}", errors[1])
            };
            let RunError::Cluster(ClusterError { fault, .. }) = &errors[0] else {
                panic!("{}", errors[0])
            };
            let ClusterFault::Aborted { rank: 1, reason } = fault else { panic!("{fault}") };
            assert!(reason.contains("token 99999"), "{reason}");
        }
    });
}

/// The error states the requested and the free bytes.
#[test]
fn insufficient_memory_is_reported() {
    let variables = [("NARROWS_FAKE_CUDA_MEMORY", "100000")];
    let test = "failures::insufficient_memory_is_reported";
    device_choice::on_fake_gpus(test, &variables, || {
        let (model, plan) = plan_on(1, 1);
        let folder = cache_folder();
        let errors = on_each_device(
            (&model, &plan),
            Duration::from_secs(60),
            |rank| options(&folder, device_choice::ordinal(rank), false),
            |session, _| session.err().unwrap(),
        );
        let RunError::Device(device) = &errors[0] else { panic!("{}", errors[0]) };
        let CudaError::OutOfMemory { purpose, requested, free, .. } = device.source_as().unwrap()
        else {
            panic!("{}", errors[0])
        };
        assert_eq!(*purpose, "the program's memory");
        assert!(requested > free, "{}", errors[0]);
    });
}

#[test]
fn a_missing_gpu_is_reported() {
    device_choice::under_seeds("failures::a_missing_gpu_is_reported", [0], 1, |_| {
        let (model, plan) = plan_on(1, 1);
        let (folder, beyond) = (cache_folder(), device_choice::count());
        let errors = on_each_device(
            (&model, &plan),
            Duration::from_secs(60),
            |_| options(&folder, beyond, false),
            |session, _| session.err().unwrap().to_string(),
        );
        let message = format!("GPU {beyond} does not exist: this machine shows {beyond}");
        assert!(errors[0].contains(&message), "{}", errors[0]);
    });
}
