//! Dependences between instructions of a stage, and pairs of dependent instructions that commute.

use narrows_plan::program::{
    Access, Action, BufferId, BufferRole, CollectiveFunction, CollectiveOp, FusedOp, Instr, Phase,
    Reduction, StageProgram,
};

fn accesses(instr: &Instr, id: BufferId) -> bool {
    instr.reads.iter().chain(&instr.writes).any(|access| access.buffer == id)
}

/// The buffers that both instructions access and at least one writes.
fn conflicting_buffers(one: &Instr, two: &Instr) -> Vec<BufferId> {
    let by_one = one.writes.iter().filter(|access| accesses(two, access.buffer));
    let by_two = two.writes.iter().filter(|access| accesses(one, access.buffer));
    let mut buffers: Vec<BufferId> = by_one.chain(by_two).map(|access| access.buffer).collect();
    buffers.sort();
    buffers.dedup();
    buffers
}

/// Whether the order of two instructions matters to a dependence analysis of buffers.
pub fn depends(stage: &StageProgram, one: &Instr, two: &Instr) -> bool {
    // AdamW clips by the gradient norm, which is no operand of the instruction.
    let clips = |one: &Instr, two: &Instr| {
        let norm = one
            .writes
            .first()
            .is_some_and(|a| stage.buffer(a.buffer).role == BufferRole::SquareSum);
        norm && matches!(two.action, Action::Fused(FusedOp::AdamW))
    };
    clips(one, two) || clips(two, one) || !conflicting_buffers(one, two).is_empty()
}

/// Whether dependent instructions give the same result in either order: two additions to one buffer; an
/// all-reduce and a linear operation (a rotation, or another all-reduce) on its buffer; and a
/// recomputation that writes the contents that the buffer already has.
pub fn commutes(stage: &StageProgram, one: &Instr, two: &Instr) -> bool {
    let buffers = conflicting_buffers(one, two);
    !buffers.is_empty()
        && buffers.into_iter().all(|id| {
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
    let once = |side: &[Access]| side.iter().filter(|access| access.buffer == id).count() == 1;
    let adds = match &instr.action {
        Action::Gemm(gemm) => gemm.accumulate,
        Action::Fused(op) => matches!(
            op,
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
    adds && once(&instr.reads) && once(&instr.writes)
}

fn sums_in_place(instr: &Instr) -> bool {
    matches!(
        &instr.action,
        Action::Collective(CollectiveOp {
            function: CollectiveFunction::AllReduce(Reduction::Sum),
            ..
        })
    )
}

/// Whether several instructions overwrite a buffer: recomputing an op for one of its results writes its
/// other results again.
pub fn is_written_twice(stage: &StageProgram, id: BufferId) -> bool {
    let overwrites = |instr: &&Instr| {
        let written = instr.writes.iter().any(|access| access.buffer == id);
        written && !instr.reads.iter().any(|access| access.buffer == id)
    };
    let passes = stage.pass_phases().filter(|at| at.phase != Phase::WeightGradient);
    passes.flat_map(|at| stage.instructions(at)).filter(overwrites).count() > 1
}
