//! The null backend counts exactly the instructions and bytes of the program.
//!
//! The saved plans are BTP on four devices, two stages of two devices, and two replicas with ZeRO-1.

use std::collections::BTreeMap;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::presets;
use narrows_plan::program::{Action, ChunkPhase, CollectiveOp, Instr};
use narrows_plan::{Axis, Bytes, CheckedProgram, Plan, lower};
use narrows_runtime::{DeviceId, StepReport, count_step};

const PLANS: [(&str, &str); 3] = [
    ("btp", narrows_test_support::plan_files::BTP),
    ("stages", narrows_test_support::plan_files::STAGES),
    ("replicas", narrows_test_support::plan_files::REPLICAS),
];

fn checked(text: &str) -> CheckedProgram {
    let plan = Plan::read(text).expect("a plan");
    let model = presets::find(&plan.model.name).expect("a preset");
    let resolved = plan.resolve(&model).expect("a resolved plan");
    CheckedProgram::check(lower(&resolved)).unwrap_or_else(|errors| panic!("{errors}"))
}

fn count(program: &CheckedProgram) -> StepReport {
    count_step(program).unwrap_or_else(|error| panic!("{error}"))
}

/// Every phase of a stage, and how often it is executed in a step.
fn phases(program: &CheckedProgram, stage: usize) -> Vec<(&[Instr], u64)> {
    let program = program.program();
    let microbatches = program.context.workload.microbatches(&program.context.mesh);
    let stage = &program.stages[stage];
    let times = |at: ChunkPhase| if at == ChunkPhase::STEP { 1 } else { microbatches };
    stage.chunk_phases().map(|at| (stage.instructions(at), times(at))).collect()
}

/// The collectives among instructions.
fn collectives<'a>(
    instructions: impl IntoIterator<Item = &'a Instr>,
) -> impl Iterator<Item = &'a CollectiveOp> {
    instructions.into_iter().filter_map(|instr| match &instr.action {
        Action::Collective(collective) => Some(collective),
        _ => None,
    })
}

#[test]
fn instructions_and_memory_equal_those_of_the_program() {
    for (name, text) in PLANS {
        let program = checked(text);
        let report = count(&program);
        assert_eq!(report.stages.len(), program.program().stages.len());
        for (index, stage) in report.stages.iter().enumerate() {
            let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
            for (list, times) in phases(&program, index) {
                for instr in list {
                    *expected.entry(instr.action.name()).or_default() += times;
                }
            }
            assert_eq!(stage.instructions, expected, "{name}, stage {index}");
            assert_eq!(stage.allocated, program.program().stages[index].arena);
        }
    }
}

#[test]
fn collective_volumes_equal_those_of_the_program() {
    for (name, text) in PLANS {
        let program = checked(text);
        let report = count(&program);
        for (index, stage) in report.stages.iter().enumerate() {
            for axis in Axis::ALL {
                let mut expected = 0;
                for (list, times) in phases(&program, index) {
                    let over_axis = collectives(list).filter(|collective| collective.axis == axis);
                    let bytes: Bytes =
                        over_axis.map(|collective| collective.payload + collective.statistic).sum();
                    expected += bytes.0 * times;
                }
                let counted: u64 = stage
                    .collectives
                    .iter()
                    .filter(|((_, over), _)| *over == axis)
                    .map(|(_, count)| count.payload.0)
                    .sum();
                assert_eq!(counted, expected, "{name}, stage {index}, {}", axis.name());
            }
        }
    }
}

#[test]
fn collectives_use_the_axes_of_several_devices() {
    let (_, btp) = PLANS[0];
    let report = count(&checked(btp));
    let axes: Vec<Axis> = report.stages[0].collectives.keys().map(|(_, axis)| *axis).collect();
    assert!(axes.contains(&Axis::Tensor) && !axes.contains(&Axis::Data), "{axes:?}");
    let (_, replicas) = PLANS[2];
    let report = count(&checked(replicas));
    assert!(report.stages[0].collectives.keys().any(|(_, axis)| *axis == Axis::Data));
}

/// The published volume of BTP: all-reduces of 7r per block and token, forward and backward.
#[test]
fn btp_all_reduces_seven_ranks_per_block_and_token() {
    let (_, text) = PLANS[0];
    let program = checked(text);
    let stage = &program.program().stages[0];
    let (rank, tokens, blocks, bf16) = (128, 4 * 1024, 8, 2);
    for pass in [&stage.chunks[0].forward, &stage.chunks[0].backward] {
        let of_blocks = pass.iter().filter(|instr| instr.origin.block.is_some());
        let all_reduces = collectives(of_blocks).filter(|collective| {
            (collective.kind(), collective.axis) == (CollectiveKind::AllReduce, Axis::Tensor)
        });
        let payload: Bytes = all_reduces.map(|collective| collective.payload).sum();
        assert_eq!(payload, Bytes(7 * rank * tokens * blocks * bf16));
    }
}

#[test]
fn stages_receive_what_their_neighbours_send() {
    let (_, text) = PLANS[1];
    let program = checked(text);
    let report = count(&program);
    let [first, second] = &report.stages[..] else { panic!("two stages") };
    assert!(first.sent > Bytes(0) && second.sent > Bytes(0));
    assert_eq!((first.sent, first.received), (second.received, second.sent));
}

#[test]
fn every_device_has_a_report() {
    let (_, text) = PLANS[1];
    let report = count(&checked(text));
    assert_eq!(report.devices().count(), 4);
    assert_eq!(report.device(DeviceId(1)), &report.stages[0]);
    assert_eq!(report.device(DeviceId(2)), &report.stages[1]);
}

#[test]
fn counts_are_deterministic() {
    let (_, text) = PLANS[1];
    let program = checked(text);
    assert_eq!(count(&program), count(&program));
}
