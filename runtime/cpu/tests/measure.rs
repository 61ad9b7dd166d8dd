//! What is measured of a program's kernels: each instruction once, the shortest time of each, and nothing
//! that is another stage's.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use narrows_plan::Axis;
use narrows_plan::lower;
use narrows_plan::model::presets;
use narrows_plan::program::{Action, Instr};
use narrows_plan::{CheckedProgram, Kernel, Plan};
use narrows_runtime::DeviceId;
use narrows_runtime::{InstructionTimings, MeasurementEffort, time_instructions};

/// Four devices: two stages of two, and four microbatches.
const PLAN: &str = narrows_test_support::saved::TINY;

fn program() -> CheckedProgram {
    let model = presets::find("cola-tiny").unwrap();
    let plan = Plan::read(PLAN).unwrap();
    CheckedProgram::check(lower(&plan.resolve(&model).unwrap())).unwrap()
}

/// Steps of one session: `least` of them, however long they take.
fn measured(program: &CheckedProgram, least: usize) -> InstructionTimings {
    let model = presets::find("cola-tiny").unwrap();
    let mut session = narrows_cpu::session(&model, program.clone(), 1).unwrap();
    session.initialise(&model, 1).unwrap();
    let effort = MeasurementEffort {
        warm_up_steps: 0,
        timed_steps_min: least,
        timed_steps_max: least,
        time_limit: Duration::ZERO,
    };
    time_instructions(&mut session, effort).unwrap()
}

fn waits_for_another_stage(instr: &Instr) -> bool {
    match &instr.action {
        Action::Receive(_) => true,
        Action::Collective(exchange) => exchange.axis == Axis::Pipeline,
        _ => false,
    }
}

/// How often a step of all devices runs each kernel, by the program's lists.
fn counted(program: &CheckedProgram) -> BTreeMap<String, u64> {
    let program = program.program();
    let mesh = program.context.mesh;
    let turns = program.context.workload.microbatches(&mesh);
    let mut counts = BTreeMap::new();
    for device in 0..mesh.devices() {
        let stage = &program.stages[DeviceId(device).stage(&mesh)];
        for (list, times) in [(&stage.forward, turns), (&stage.backward, turns), (&stage.step, 1)] {
            for instr in list.iter().filter(|instr| !waits_for_another_stage(instr)) {
                *counts.entry(format!("{:?}", instr.kernel())).or_default() += times;
            }
        }
    }
    counts
}

#[test]
fn every_instruction_counts_once_unless_it_waits_for_another_stage() {
    let program = program();
    let samples = measured(&program, 1).samples(program.program());
    let found = samples.iter().map(|one| (format!("{:?}", one.kernel), one.instructions)).collect();
    assert_eq!(counted(&program), found);
    let kernels: HashSet<&Kernel> = samples.iter().map(|one| &one.kernel).collect();
    assert_eq!(kernels.len(), samples.len(), "a kernel is one sample");
    let transfers = samples.iter().filter(|one| matches!(one.kernel, Kernel::Transfer(_)));
    assert!(transfers.count() > 0, "sends are measured, receives are not");
    assert!(samples.iter().all(|one| one.seconds >= 0.0 && one.seconds.is_finite()));
    assert!(samples.iter().any(|one| one.seconds > 0.0));
}

/// Instructions of a device do not overlap, and each is at its shortest: together they are no longer than any
/// step, and what is another stage's is in the step alone.
#[test]
fn a_step_without_disturbance_is_no_longer_than_one_with_it() {
    let program = program();
    let minima = measured(&program, 3);
    assert!(
        0.0 < minima.undisturbed_step_s() && minima.undisturbed_step_s() <= minima.shortest_step_s
    );
    let devices = program.program().context.mesh.devices() as f64;
    let samples = minima.samples(program.program());
    let kernels: f64 = samples.iter().map(|one| one.seconds * one.instructions as f64).sum();
    assert!(
        kernels > 0.0 && kernels < minima.undisturbed_step_s() * devices,
        "receives take their time"
    );
}

#[test]
fn of_two_measurements_the_shorter_times_count() {
    let program = program();
    let (one, other) = (measured(&program, 1), measured(&program, 1));
    let mut both = one.clone();
    both.keep_shortest(&other);
    let mut same = both.clone();
    same.keep_shortest(&both);
    assert_eq!(same, both);
    assert!(both.undisturbed_step_s() <= one.undisturbed_step_s().min(other.undisturbed_step_s()));
    assert_eq!(both.shortest_step_s, one.shortest_step_s.min(other.shortest_step_s));
    let seconds = |of: &InstructionTimings| -> Vec<f64> {
        of.samples(program.program()).iter().map(|sample| sample.seconds).collect()
    };
    let (one, other, both) = (seconds(&one), seconds(&other), seconds(&both));
    // Sums in another order differ in their last digits.
    let shorter = |index: usize| both[index] <= one[index].min(other[index]) * (1.0 + 1e-9);
    assert!((0..both.len()).all(shorter));
    assert!(both != one && both != other, "two measurements are never the same throughout");
}

#[test]
fn what_is_allocated_is_the_arena() {
    let program = program();
    let arena = |device: u64| {
        let stage = DeviceId(device).stage(&program.program().context.mesh);
        program.program().stages[stage].arena.0
    };
    assert_eq!(measured(&program, 0).allocated_bytes, (0..4).map(arena).collect::<Vec<_>>());
}
