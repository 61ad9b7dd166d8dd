//! Kernel times: each instruction is measured once, at its shortest time, without waiting for other stages.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use narrows_plan::model::presets;
use narrows_plan::program::{Action, ChunkPhase, Instr};
use narrows_plan::{Axis, CheckedProgram, Kernel, Plan, lower};
use narrows_runtime::{DeviceId, InstructionTimings, MeasurementEffort, time_instructions};

/// Two stages of two devices each, and four microbatches.
const PLAN: &str = narrows_test_support::plan_files::TINY;

fn program() -> CheckedProgram {
    let model = presets::find("cola-tiny").unwrap();
    let plan = Plan::read(PLAN).unwrap();
    CheckedProgram::check(lower(&plan.resolve(&model).unwrap())).unwrap()
}

/// Measures `steps` steps of a new session.
fn measure(program: &CheckedProgram, steps: usize) -> InstructionTimings {
    let model = presets::find("cola-tiny").unwrap();
    let mut session = narrows_cpu::session(&model, program.clone(), 1).unwrap();
    session.initialise(&model, 1).unwrap();
    let effort = MeasurementEffort {
        warm_up_steps: 0,
        timed_steps_min: steps,
        timed_steps_max: steps,
        time_limit: Duration::ZERO,
    };
    time_instructions(&mut session, effort).unwrap()
}

fn waits_for_another_stage(instr: &Instr) -> bool {
    match &instr.action {
        Action::Receive(_) => true,
        Action::Collective(collective) => collective.axis == Axis::Pipeline,
        _ => false,
    }
}

/// Number of times that a step of all devices runs each kernel, from the program.
fn kernel_counts(program: &CheckedProgram) -> BTreeMap<String, u64> {
    let program = program.program();
    let mesh = program.context.mesh;
    let microbatches = program.context.workload.microbatches(&mesh);
    let mut counts = BTreeMap::new();
    for device in 0..mesh.devices() {
        let stage = &program.stages[DeviceId(device).stage(&mesh)];
        for at in stage.chunk_phases() {
            let times = if at == ChunkPhase::STEP { 1 } else { microbatches };
            for instr in
                stage.instructions(at).iter().filter(|instr| !waits_for_another_stage(instr))
            {
                *counts.entry(format!("{:?}", instr.kernel())).or_default() += times;
            }
        }
    }
    counts
}

#[test]
fn every_instruction_counts_once_unless_it_waits_for_another_stage() {
    let program = program();
    let samples = measure(&program, 1).samples(program.program());
    let counts = samples
        .iter()
        .map(|sample| (format!("{:?}", sample.kernel), sample.instructions))
        .collect();
    assert_eq!(kernel_counts(&program), counts);
    let kernels: HashSet<&Kernel> = samples.iter().map(|sample| &sample.kernel).collect();
    assert_eq!(kernels.len(), samples.len(), "several samples of one kernel");
    let transfers = samples.iter().filter(|sample| matches!(sample.kernel, Kernel::Transfer(_)));
    assert!(transfers.count() > 0, "no sends among the samples");
    assert!(samples.iter().all(|sample| sample.seconds >= 0.0 && sample.seconds.is_finite()));
    assert!(samples.iter().any(|sample| sample.seconds > 0.0));
}

/// Instructions of a device do not overlap and count with their shortest times, so their sum is no longer
/// than any step. Waiting for other stages is part of steps only.
#[test]
fn the_undisturbed_step_is_no_longer_than_the_shortest_step() {
    let program = program();
    let minima = measure(&program, 3);
    assert!(
        0.0 < minima.undisturbed_step_s() && minima.undisturbed_step_s() <= minima.shortest_step_s
    );
    let devices = program.program().context.mesh.devices() as f64;
    let samples = minima.samples(program.program());
    let kernels: f64 =
        samples.iter().map(|sample| sample.seconds * sample.instructions as f64).sum();
    assert!(
        kernels > 0.0 && kernels < minima.undisturbed_step_s() * devices,
        "the time of receives is missing"
    );
}

#[test]
fn merging_measurements_keeps_the_shorter_times() {
    let program = program();
    let (one, other) = (measure(&program, 1), measure(&program, 1));
    let mut both = one.clone();
    both.keep_shortest(&other);
    let mut same = both.clone();
    same.keep_shortest(&both);
    assert_eq!(same, both);
    assert!(both.undisturbed_step_s() <= one.undisturbed_step_s().min(other.undisturbed_step_s()));
    assert_eq!(both.shortest_step_s, one.shortest_step_s.min(other.shortest_step_s));
    let seconds = |timings: &InstructionTimings| -> Vec<f64> {
        timings.samples(program.program()).iter().map(|sample| sample.seconds).collect()
    };
    let (one, other, both) = (seconds(&one), seconds(&other), seconds(&both));
    // The order of summation affects the last digits.
    let shorter = |index: usize| both[index] <= one[index].min(other[index]) * (1.0 + 1e-9);
    assert!((0..both.len()).all(shorter));
    assert!(both != one && both != other, "one of the measurements has no effect");
}

#[test]
fn allocated_bytes_are_those_of_the_arenas() {
    let program = program();
    let arena = |device: u64| {
        let stage = DeviceId(device).stage(&program.program().context.mesh);
        program.program().stages[stage].arena.0
    };
    assert_eq!(measure(&program, 0).allocated_bytes, (0..4).map(arena).collect::<Vec<_>>());
}
