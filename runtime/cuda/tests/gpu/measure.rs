//! What is measured on GPUs: every instruction of every device, and steps as they are otherwise. What times the
//! stand-ins make up says nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use narrows_plan::Precision;
use narrows_plan::mesh::{Axis, Mesh};
use narrows_plan::program::{Action, Program};
use narrows_runtime::{
    DeviceId, InstructionTimings, MeasurementEffort, scheduled_instructions, time_instructions,
};

use super::support::{each, folder, options, program};
use super::{devices, plans};

const EFFORT: MeasurementEffort = MeasurementEffort {
    warm_up_steps: 0,
    timed_steps_min: 1,
    timed_steps_max: 1,
    time_limit: Duration::ZERO,
};

/// How often a step of all devices runs each kernel that says something about itself.
fn counted(program: &Program) -> BTreeMap<String, u64> {
    let mesh = program.context.mesh;
    let mut counts = BTreeMap::new();
    for device in 0..mesh.devices() {
        let stage = DeviceId(device).stage(&mesh);
        for moment in scheduled_instructions(&program.stages[stage]) {
            let of_others = match &moment.instr.action {
                Action::Receive(_) => true,
                Action::Collective(exchange) => exchange.axis == Axis::Pipeline,
                _ => false,
            };
            if !of_others {
                *counts.entry(format!("{:?}", moment.instr.kernel())).or_default() += 1;
            }
        }
    }
    counts
}

/// All processes end with the same: every device's times.
fn measures(test: &str, (tensor, pipeline, data): (u64, u64, u64)) {
    let mesh = Mesh { tensor, pipeline, data };
    devices::seeded(test, 1, mesh.devices(), |seed| {
        let folder = folder();
        let (model, plan) = plans(mesh, Precision::MixedBf16, 40 + seed, 1).remove(0);
        let options = |rank| options(&folder, devices::ordinal(rank), false);
        let found: Vec<InstructionTimings> =
            each((&model, &plan), Duration::from_secs(120), options, |session, rank| {
                let mut session = session.unwrap_or_else(|error| panic!("{error}"));
                session.initialise(&model, 3).unwrap();
                assert!(session.recording_changes_execution());
                let minima = time_instructions(&mut session, EFFORT)
                    .unwrap_or_else(|e| panic!("{rank}: {e}"));
                assert!(!session.recording_changes_execution(), "graphs are over");
                // Two until all is captured and one by the clock, and then one that is timed.
                assert_eq!(session.steps(), 2 + 1 + 1);
                minima
            });
        let program = program(&plan, &model);
        let program = program.program();
        for minima in &found {
            let samples = minima.samples(program);
            let of = |sample: &narrows_runtime::KernelSample| {
                (format!("{:?}", sample.kernel), sample.instructions)
            };
            assert_eq!(samples.iter().map(of).collect::<BTreeMap<_, _>>(), counted(program));
            assert!(samples.iter().all(|one| one.seconds.is_finite() && one.seconds >= 0.0));
            assert!(minima.whole_step_s > 0.0 && minima.shortest_step_s > 0.0);
            let arena = |device| program.stages[DeviceId(device).stage(&mesh)].arena.0;
            assert_eq!(minima.allocated_bytes, (0..mesh.devices()).map(arena).collect::<Vec<_>>());
            let apart = (minima.undisturbed_step_s() / found[0].undisturbed_step_s() - 1.0).abs();
            assert!(apart < 1e-9, "every process has all devices' times: {apart}");
        }
    });
}

#[test]
fn one_gpu_is_measured() {
    measures("measure::one_gpu_is_measured", (1, 1, 1));
}

#[test]
fn several_gpus_are_measured_together() {
    measures("measure::several_gpus_are_measured_together", (2, 1, 1));
}

#[test]
fn stages_are_measured() {
    measures("measure::stages_are_measured", (1, 2, 1));
}
