//! Which instructions depend on each other, and which of those may run in either order.

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::program::{
    Access, Action, BufferId, BufferRole, CollectiveOp, FusedOp, Instr, Reduction, StageProgram,
};

fn touches(instr: &Instr, id: BufferId) -> bool {
    instr.reads.iter().chain(&instr.writes).any(|access| access.buffer == id)
}

/// The buffers over which the order of two instructions matters.
fn contested(one: &Instr, two: &Instr) -> Vec<BufferId> {
    let written = one.writes.iter().filter(|access| touches(two, access.buffer));
    let others = two.writes.iter().filter(|access| touches(one, access.buffer));
    let mut found: Vec<BufferId> = written.chain(others).map(|access| access.buffer).collect();
    found.sort();
    found.dedup();
    found
}

pub fn depends(stage: &StageProgram, one: &Instr, two: &Instr) -> bool {
    // The optimizer clips by the norm, which the program passes it on the side.
    let clips = |one: &Instr, two: &Instr| {
        let norm = one
            .writes
            .first()
            .is_some_and(|a| stage.buffer(a.buffer).role == BufferRole::SquareSum);
        norm && matches!(two.action, Action::Fused(FusedOp::AdamW))
    };
    clips(one, two) || clips(two, one) || !contested(one, two).is_empty()
}

/// Whether either order gives the same result: sums into one buffer, a rotation or another sum
/// and the all-reduce it is linear in, and writing again what a buffer holds already.
pub fn commutes(stage: &StageProgram, one: &Instr, two: &Instr) -> bool {
    let contested = contested(one, two);
    !contested.is_empty()
        && contested.into_iter().all(|id| {
            let both_add = adds_into(one, id) && adds_into(two, id);
            let linear = |one: &Instr, two: &Instr| {
                sums_in_place(one)
                    && (sums_in_place(two)
                        || matches!(
                            two.action,
                            Action::Fused(FusedOp::Rope { .. } | FusedOp::RopeBackward { .. })
                        ))
            };
            both_add || linear(one, two) || linear(two, one) || is_written_twice(stage, id)
        })
}

fn adds_into(instr: &Instr, id: BufferId) -> bool {
    use FusedOp::*;
    let both = |side: &[Access]| side.iter().filter(|access| access.buffer == id).count() == 1;
    let adds = match &instr.action {
        Action::Gemm(product) => product.accumulate,
        Action::Fused(pass) => matches!(
            pass,
            AddInto
                | ScatterAdd
                | NormBackward
                | NormBackwardApply
                | NormOnlineBackward
                | LatentRecoverBackward { .. }
                | LatentNormBackward { .. }
                | TensorGateBackward { .. }
                | SquareSum
        ),
        _ => false,
    };
    adds && both(&instr.reads) && both(&instr.writes)
}

fn sums_in_place(instr: &Instr) -> bool {
    matches!(
        &instr.action,
        Action::Collective(CollectiveOp {
            kind: CollectiveKind::AllReduce,
            reduction: Reduction::Sum,
            ..
        })
    )
}

/// An operation with several results is redone for one of them, and makes the others again.
pub fn is_written_twice(stage: &StageProgram, id: BufferId) -> bool {
    let fresh = |instr: &&Instr| {
        let written = instr.writes.iter().any(|access| access.buffer == id);
        written && !instr.reads.iter().any(|access| access.buffer == id)
    };
    stage.forward.iter().chain(&stage.backward).filter(fresh).count() > 1
}
