//! Schedules of pipelines end.

use crate::PipelineSchedule::{self, Interleaved, OneForwardOneBackward, ZeroBubble};
use crate::check::passes::check_passes;
use crate::model::Rope;
use crate::program::{FusedOp, ModelChunk, ModelConstants, P2pTransfer, StageSchedule};
use crate::{Bytes, Precision, Workload, Zero};

use super::*;

fn instr(action: Action) -> Instr {
    let (reads, writes) = (vec![], vec![]);
    Instr { action, reads, writes, origin: "test".into(), overlapped_instrs: 0 }
}

/// A stage whose chunks receive from one neighbour and send to the other in each pass, and compute nothing.
fn stage(schedule: &StageSchedule, mesh: &Mesh) -> StageProgram {
    let transfer = |peer: u64| P2pTransfer {
        tensors: vec![BoundaryTensorId::Hidden],
        peer_stage: peer as u32,
        group: mesh.group(Axis::Pipeline),
    };
    let pass = |from: Option<u64>, to: Option<u64>| {
        let receive = from.map(|peer| instr(Action::Receive(transfer(peer))));
        let send = to.map(|peer| instr(Action::Send(transfer(peer))));
        receive.into_iter().chain(send).collect::<Vec<_>>()
    };
    let is_deferred = schedule.defers_weight_gradients();
    let chunk = |chunk: u64| {
        let virtual_stage = chunk * schedule.stages + schedule.stage;
        let stage_of = |virtual_stage: u64| virtual_stage % schedule.stages;
        let before = virtual_stage.checked_sub(1).map(stage_of);
        let after = (virtual_stage + 1 < schedule.stages * schedule.chunks)
            .then(|| stage_of(virtual_stage + 1));
        let weight_gradient = is_deferred.then(|| instr(Action::Fused(FusedOp::Fill)));
        ModelChunk {
            forward: pass(before, after),
            backward: pass(after, before),
            weight_gradient: weight_gradient.into_iter().collect(),
            slots: 1,
        }
    };
    let mut stage = StageProgram {
        buffers: vec![],
        chunks: (0..schedule.chunks).map(chunk).collect(),
        step: vec![],
        gradient_buckets: vec![],
        gather_buckets: vec![],
        exact_step: Default::default(),
        schedule: schedule.passes(is_deferred),
        arena: Bytes(0),
    };
    for chunk in 0..stage.chunks.len() {
        stage.chunks[chunk].slots = stage.microbatches_in_flight(chunk);
    }
    stage
}

/// The schedules of a pipeline, with their numbers of chunks.
fn schedules(stages: u64, microbatches: u64) -> Vec<(PipelineSchedule, u64)> {
    let chunks = |schedule: PipelineSchedule| match schedule.has_chunks() {
        false => 1..2,
        true if stages > 1 && microbatches.is_multiple_of(stages) => 2..5,
        true => 0..0,
    };
    let with_chunks = |schedule| chunks(schedule).map(move |chunks| (schedule, chunks));
    PipelineSchedule::ALL.into_iter().flat_map(with_chunks).collect()
}

/// A pipeline whose stages compute nothing.
fn pipeline(schedule: PipelineSchedule, [stages, chunks, microbatches]: [u64; 3]) -> Program {
    let mesh = Mesh { tensor: 1, pipeline: stages, data: 1, context: 1 };
    let workload = Workload { global_batch: microbatches, sequence_length: 1, micro_batch: 1 };
    let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
    let context = Context { schedule, chunks, ..context };
    let constants = ModelConstants {
        hidden: 1,
        vocab: 1,
        norm_epsilon: 1.0,
        latent_norm_epsilon: 1.0,
        rope: Rope::plain(1.0, 2),
        padding_token: None,
    };
    let stages = (0..stages).map(|at| stage(&StageSchedule::of(&context, at), &mesh)).collect();
    Program { context, constants, tied: false, stages }
}

/// The errors of the transfers of a pipeline.
fn transfer_errors(program: &Program) -> CheckErrors {
    let mut errors = CheckErrors::default();
    check_transfers_match(program, &mut errors);
    check_deadlock_free(program, &mut errors);
    errors
}

/// Every schedule ends, for up to 16 stages, 64 microbatches and 4 chunks, with as many microbatches in flight as the
/// schedule states. They would not end if the last stage ran all of its forward passes first.
#[test]
fn no_schedule_has_a_deadlock() {
    for (stages, microbatches) in
        (1..=16).flat_map(|stages| (1..=64).map(move |microbatches| (stages, microbatches)))
    {
        for (schedule, chunks) in schedules(stages, microbatches) {
            let mut program = pipeline(schedule, [stages, chunks, microbatches]);
            let case = format!("{schedule:?}, {stages} stages of {chunks}, {microbatches}");
            for (at, stage) in program.stages.iter().enumerate() {
                check_passes(stage, &program.context).unwrap_or_else(|e| panic!("{case}: {e:?}"));
                let schedule_of_stage = StageSchedule::of(&program.context, at as u64);
                for (chunk, of_chunk) in stage.chunks.iter().enumerate() {
                    let in_flight = schedule_of_stage.microbatches_in_flight(chunk as u64);
                    assert!(of_chunk.slots >= in_flight, "{case}");
                    assert!(of_chunk.slots == in_flight || schedule == ZeroBubble, "{case}");
                    assert!(of_chunk.slots <= (2 * stages).min(microbatches), "{case}");
                    let most = |first, last| stage.microbatches_between(chunk, first, last);
                    assert_eq!(most(Phase::Forward, Phase::Backward), in_flight, "{case}");
                    if schedule_of_stage.defers_weight_gradients() {
                        let deferred = schedule_of_stage.microbatches_deferred();
                        let all = most(Phase::Forward, Phase::WeightGradient);
                        assert_eq!(all, in_flight + deferred, "{case}");
                        let waiting = match microbatches {
                            1 => 0,
                            _ => most(Phase::Backward, Phase::WeightGradient),
                        };
                        assert_eq!(waiting, schedule_of_stage.weight_gradients_waiting(), "{case}");
                    }
                }
            }
            let errors = transfer_errors(&program);
            assert!(errors.0.is_empty(), "{case}: {errors}");
            if stages > 1 && microbatches > stages && chunks == 1 {
                let last = program.stages.last_mut().unwrap();
                last.schedule.sort_by_key(|pass| pass.phase);
                assert!(!transfer_errors(&program).0.is_empty(), "{case}");
            }
        }
    }
}

/// The dependencies between the transfers of a step form chains as long as the step has microbatches.
#[test]
fn schedules_of_very_many_microbatches_are_checked() {
    for (schedule, chunks) in [(OneForwardOneBackward, 1), (ZeroBubble, 1), (Interleaved, 4)] {
        let errors = transfer_errors(&pipeline(schedule, [2, chunks, 50_000]));
        assert!(errors.0.is_empty(), "{schedule:?}: {errors}");
    }
}
