//! What goes wrong is said, in time, by all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use narrows_cluster::{ClusterError, ClusterFault};
use narrows_cuda::{CudaError, GpuOptions};
use narrows_plan::Precision;
use narrows_plan::mesh::Mesh;
use narrows_runtime::session::StepInput;
use narrows_runtime::{Optimizer, RunError};

use super::support::{each, folder, options, tokens};
use super::{devices, plans};

fn along(tensor: u64, pipeline: u64) -> (narrows_plan::model::Model, narrows_plan::Plan) {
    let mesh = Mesh { tensor, pipeline, data: 1 };
    plans(mesh, Precision::Full32, 5, 1).pop().unwrap()
}

/// A device that makes no second step leaves the other in a collective: it gives up at its deadline, and
/// says what was under way.
#[test]
fn who_stalls_is_found_at_the_deadline() {
    devices::seeded("failures::who_stalls_is_found_at_the_deadline", 1, 2, |_| {
        stalls(false);
        stalls(true);
    });
}

fn stalls(eager: bool) {
    let (model, plan) = along(2, 1);
    let folder = folder();
    // Longer than a step takes on the busiest machine.
    let deadline = Duration::from_secs(20);
    let given_up = AtomicBool::new(false);
    let ended = each(
        (&model, &plan),
        deadline,
        |rank| options(&folder, devices::ordinal(rank), eager),
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
            let begun = Instant::now();
            let error = session.step(&optimizer, input).unwrap_err();
            let waited = begun.elapsed();
            given_up.store(true, Ordering::SeqCst);
            // Nothing can be done with it any more, and nothing waits for ever.
            let again = session.step(&optimizer, input).unwrap_err().to_string();
            assert!(again.contains("it failed before"), "{again}");
            Some((error, waited))
        },
    );
    let (error, waited) = ended.into_iter().flatten().next().unwrap();
    let RunError::Device(device) = &error else { panic!("{error}") };
    let CudaError::Stalled { step: 2, recent, .. } = device.source_as().unwrap() else {
        panic!("{error}")
    };
    assert!(recent.contains("not over: forward of microbatch 0"), "{error}");
    assert!(recent.contains("over tensor of"), "{error}");
    assert!(waited >= deadline, "{waited:?}");
    // Graphs are over or not, as wholes; of single launches the very collective is named.
    assert_ne!(recent.contains("try: --eager"), eager, "{error}");
    let last = recent.lines().last().unwrap();
    let one = last.contains("not over: ") && !last.contains("instructions");
    assert_eq!(one, eager, "{error}");
}

/// A GPU that is alone waits for nobody, and may still never end a step. A stand-in's takes longer than it is first
/// looked for; a GPU's may not.
#[test]
fn who_is_alone_and_stalls_is_found_too() {
    devices::of_stand_ins("failures::who_is_alone_and_stalls_is_found_too", &[], || {
        let (model, plan) = along(1, 1);
        let folder = folder();
        // A stall is what takes longer than allowed: here, than any step could.
        let impatient = GpuOptions { deadline: Duration::ZERO, ..options(&folder, 0, false) };
        let mut ended = each(
            (&model, &plan),
            Duration::ZERO,
            |_| impatient.clone(),
            |session, _| {
                let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                session.initialise(&model, 1).unwrap();
                let ids = tokens(&plan, 0, model.vocab);
                let input = StepInput { tokens: &ids, targets: &ids };
                session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err()
            },
        );
        let error = ended.pop().unwrap();
        let RunError::Device(device) = &error else { panic!("{error}") };
        let CudaError::Stalled { step: 1, recent, .. } = device.source_as().unwrap() else {
            panic!("{error}")
        };
        assert!(recent.contains("not over: "), "{error}");
    });
}

/// A device that fails tells the others, which wait on their GPUs.
#[test]
fn who_fails_tells_those_that_wait_on_a_gpu() {
    devices::seeded("failures::who_fails_tells_those_that_wait_on_a_gpu", 1, 2, |_| {
        for (tensor, pipeline) in [(2, 1), (1, 2)] {
            let (model, plan) = along(tensor, pipeline);
            let folder = folder();
            let ended = each(
                (&model, &plan),
                Duration::from_secs(300),
                |rank| options(&folder, devices::ordinal(rank), true),
                |session, rank| {
                    let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                    session.initialise(&model, 1).unwrap();
                    let ids = tokens(&plan, 0, model.vocab);
                    let outside = vec![99_999; ids.len()];
                    let ids = if rank == 1 { &outside } else { &ids };
                    let input = StepInput { tokens: ids, targets: ids };
                    session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err()
                },
            );
            let RunError::TokenOutOfVocabulary { token: 99_999, .. } = &ended[1] else {
                panic!("{}", ended[1])
            };
            let RunError::Cluster(ClusterError { fault, .. }) = &ended[0] else {
                panic!("{}", ended[0])
            };
            let ClusterFault::Aborted { rank: 1, reason } = fault else { panic!("{fault}") };
            assert!(reason.contains("token 99999"), "{reason}");
        }
    });
}

/// A program that does not fit is refused with the bytes it wants and those there are.
#[test]
fn too_little_memory_is_said() {
    let little = [("NARROWS_FAKE_CUDA_MEMORY", "100000")];
    devices::of_stand_ins("failures::too_little_memory_is_said", &little, || {
        let (model, plan) = along(1, 1);
        let folder = folder();
        let ended = each(
            (&model, &plan),
            Duration::from_secs(60),
            |rank| options(&folder, devices::ordinal(rank), false),
            |session, _| session.err().unwrap(),
        );
        let RunError::Device(device) = &ended[0] else { panic!("{}", ended[0]) };
        let CudaError::Memory { what, wanted, free, .. } = device.source_as().unwrap() else {
            panic!("{}", ended[0])
        };
        assert_eq!(*what, "the program's memory");
        assert!(*wanted > *free, "{}", ended[0]);
    });
}

/// There is no second GPU for a second process.
#[test]
fn a_missing_gpu_is_said() {
    devices::seeded("failures::a_missing_gpu_is_said", 1, 1, |_| {
        let (model, plan) = along(1, 1);
        let (folder, beyond) = (folder(), devices::count());
        let ended = each(
            (&model, &plan),
            Duration::from_secs(60),
            |_| options(&folder, beyond, false),
            |session, _| session.err().unwrap().to_string(),
        );
        let said = format!("wants GPU {beyond}, and this machine shows {beyond}");
        assert!(ended[0].contains(&said), "{}", ended[0]);
    });
}
