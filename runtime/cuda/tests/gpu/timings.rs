//! Measurement of every instruction on every GPU, and of undisturbed steps. The times of fake GPUs are meaningless.

use std::collections::BTreeMap;
use std::time::Duration;

use narrows_plan::program::{Action, Program};
use narrows_plan::{Axis, Mesh, Precision};
use narrows_runtime::{
    DeviceId, InstructionTimings, KernelSample, MeasurementEffort, scheduled_instructions,
    time_instructions,
};

use super::training::{cache_folder, on_each_device, options, program};
use super::{device_choice, plans};

const EFFORT: MeasurementEffort = MeasurementEffort {
    warm_up_steps: 0,
    timed_steps_min: 1,
    timed_steps_max: 1,
    time_limit: Duration::ZERO,
};

/// Number of times that a step of all devices executes each kernel whose time does not depend on other devices.
fn kernel_counts(program: &Program) -> BTreeMap<String, u64> {
    let mesh = program.context.mesh;
    let mut counts = BTreeMap::new();
    for device in 0..mesh.devices() {
        let stage = DeviceId(device).stage(&mesh);
        for scheduled in scheduled_instructions(&program.stages[stage]) {
            let waits_for_others = match &scheduled.instr.action {
                Action::Receive(_) => true,
                Action::Collective(collective) => collective.axis == Axis::Pipeline,
                _ => false,
            };
            if !waits_for_others {
                *counts.entry(format!("{:?}", scheduled.instr.kernel())).or_default() += 1;
            }
        }
    }
    counts
}

/// All processes obtain the times of all devices.
fn check_timings(test: &str, (tensor, pipeline, data): (u64, u64, u64)) {
    let mesh = Mesh { tensor, pipeline, data, context: 1 };
    device_choice::under_seeds(test, [0], mesh.devices(), |seed| {
        let folder = cache_folder();
        let (model, plan) = plans(mesh, 1, Precision::MixedBf16, 40 + seed, 1).remove(0);
        let options = |rank| options(&folder, device_choice::ordinal(rank), false);
        let timings: Vec<InstructionTimings> =
            on_each_device((&model, &plan), Duration::from_secs(120), options, |session, rank| {
                let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                session.initialise(&model, 3).unwrap();
                assert!(session.recording_changes_execution());
                let timings = time_instructions(&mut session, EFFORT)
                    .unwrap_or_else(|e| panic!("{rank}: {e}"));
                assert!(!session.recording_changes_execution(), "graphs are no longer used");
                // Two steps until all graphs are captured, one by the clock, and one with timers.
                assert_eq!(session.steps(), 2 + 1 + 1);
                timings
            });
        let program = program(&plan, &model);
        let program = program.program();
        for timing in &timings {
            let samples = timing.samples(program);
            let count =
                |sample: &KernelSample| (format!("{:?}", sample.kernel), sample.instructions);
            let counts = samples.iter().map(count).collect::<BTreeMap<_, _>>();
            assert_eq!(counts, kernel_counts(program));
            assert!(samples.iter().all(|one| one.seconds.is_finite() && one.seconds >= 0.0));
            assert!(timing.whole_step_s > 0.0 && timing.shortest_step_s > 0.0);
            let arena = |device| program.stages[DeviceId(device).stage(&mesh)].arena.0;
            assert_eq!(timing.allocated_bytes, (0..mesh.devices()).map(arena).collect::<Vec<_>>());
            let difference =
                (timing.undisturbed_step_s() / timings[0].undisturbed_step_s() - 1.0).abs();
            assert!(difference < 1e-9, "processes have different times: {difference}");
        }
    });
}

#[test]
fn one_gpu_is_measured() {
    check_timings("timings::one_gpu_is_measured", (1, 1, 1));
}

#[test]
fn tensor_parallel_gpus_are_measured_together() {
    check_timings("timings::tensor_parallel_gpus_are_measured_together", (2, 1, 1));
}

#[test]
fn pipeline_stages_are_measured() {
    check_timings("timings::pipeline_stages_are_measured", (1, 2, 1));
}
