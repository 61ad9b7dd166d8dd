//! Schedules of pipelines end.

use crate::PipelineSchedule::{OneForwardOneBackward, ZeroBubble};
use crate::check::passes::check_passes;
use crate::program::{FusedOp, P2pTransfer, StageSchedule};
use crate::{Bytes, Context, Precision, Workload, Zero};

use super::*;

fn instr(action: Action) -> Instr {
    let (reads, writes) = (vec![], vec![]);
    Instr { action, reads, writes, origin: "test".into(), overlapped_instrs: 0 }
}

/// A stage that receives from one neighbour and sends to the other in each pass, and computes nothing.
fn stage(schedule: &StageSchedule, mesh: &Mesh) -> StageProgram {
    let transfer = |peer: u64| P2pTransfer {
        tensors: vec![BoundaryTensorId::Hidden],
        peer_stage: peer as u32,
        group: mesh.group(Axis::Pipeline),
    };
    let (before, after) = (schedule.stage.checked_sub(1), schedule.stage + 1);
    let after = (after < schedule.stages).then_some(after);
    let pass = |from: Option<u64>, to: Option<u64>| {
        let receive = from.map(|peer| instr(Action::Receive(transfer(peer))));
        let send = to.map(|peer| instr(Action::Send(transfer(peer))));
        receive.into_iter().chain(send).collect::<Vec<_>>()
    };
    let is_deferred = schedule.defers_weight_gradients();
    let weight_gradient = is_deferred.then(|| instr(Action::Fused(FusedOp::Fill)));
    let mut stage = StageProgram {
        buffers: vec![],
        forward: pass(before, after),
        backward: pass(after, before),
        weight_gradient: weight_gradient.into_iter().collect(),
        step: vec![],
        gradient_buckets: vec![],
        schedule: schedule.passes(is_deferred),
        slots: 1,
        arena: Bytes(0),
    };
    stage.slots = stage.microbatches_between(Phase::Forward, stage.last_phase());
    stage
}

/// Every schedule ends, for up to 16 stages and 64 microbatches, with at most as many microbatches in flight as stages.
/// They would not end if the last stage ran all of its forward passes first.
#[test]
fn no_schedule_has_a_deadlock() {
    for (stages, schedule) in
        (1..=16).flat_map(|stages| [(stages, OneForwardOneBackward), (stages, ZeroBubble)])
    {
        for microbatches in 1..=64 {
            let mesh = Mesh { tensor: 1, pipeline: stages, data: 1 };
            let workload =
                Workload { global_batch: microbatches, sequence_length: 1, micro_batch: 1 };
            let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
            let context = Context { schedule, ..context };
            let of_stage = |at| stage(&context.stage_schedule(at), &mesh);
            let programs: Vec<StageProgram> = (0..stages).map(of_stage).collect();
            let case = format!("{schedule:?}, {stages} stages, {microbatches} microbatches");
            for program in &programs {
                check_passes(program, microbatches).unwrap_or_else(|e| panic!("{case}: {e:?}"));
                assert!(program.slots <= stages.min(microbatches), "{case}");
            }
            let constants = crate::program::ModelConstants {
                hidden: 1,
                vocab: 1,
                norm_epsilon: 1.0,
                rope_theta: 1.0,
            };
            let mut program = Program { context, constants, tied: false, stages: programs };
            let mut errors = CheckErrors::default();
            check_transfers_match(&program, &mut errors);
            check_deadlock_free(&program, &mut errors);
            assert!(errors.0.is_empty(), "{case}: {errors}");
            if stages > 1 && microbatches > stages {
                let last = program.stages.last_mut().unwrap();
                last.schedule.sort_by_key(|pass| pass.phase);
                check_deadlock_free(&program, &mut errors);
                assert!(!errors.0.is_empty(), "{case}");
            }
        }
    }
}
