//! The bytes of a choice in the solver's memory rows.
//!
//! A block with f microbatches in flight occupies `resident + f·kept` bytes: its parameters with their gradients and
//! optimizer states, and for each microbatch the copies that are kept for the backward pass. Buffers that live within
//! one pass belong to the stage and not to the block: the arena of the lowered program counts them exactly, and the
//! search reduces the blocks' limit by them.

use narrows_plan::emit::activation_bytes;
use narrows_plan::graph::{Op, OpId, ValueId};
use narrows_plan::strategy::{Flow, OpOption, Save, SegmentChoice, SegmentSpace};
use narrows_plan::{Bytes, Layout};

/// Bytes that one instance of a segment occupies between its passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentBytes {
    /// Parameters, gradients and optimizer states.
    pub resident: Bytes,
    /// Copies and statistics kept from a forward pass to its backward pass, for one microbatch.
    pub kept: Bytes,
}

impl SegmentBytes {
    /// The bytes with `in_flight` microbatches in flight.
    pub fn total(&self, in_flight: u64) -> Bytes {
        self.resident + self.kept * in_flight
    }
}

/// The bytes that one instance of a segment keeps for each microbatch in flight under a choice.
pub fn kept_bytes(space: &SegmentSpace, choice: &SegmentChoice) -> Bytes {
    let ops = space.segment.op_ids().map(|id| op_kept_bytes(space, id, &choice.ops[id.0 as usize]));
    let flow = |id: ValueId| flow_kept_bytes(space, id, &choice.flows[id.0 as usize]);
    ops.chain(space.segment.value_ids().map(flow)).sum()
}

/// The bytes that an op always keeps: the statistics of a norm, and the logits, which the loss replaces by their gradient.
pub(crate) fn op_kept_bytes(space: &SegmentSpace, id: OpId, option: &OpOption) -> Bytes {
    let layout = || option.choice.inputs[0].forward;
    match space.segment.op(id).op {
        Op::Norm { .. } => Bytes(4 * space.context.rows(layout())),
        Op::Loss { vocab } => activation_bytes(vocab, layout(), &space.context),
        _ => Bytes(0),
    }
}

/// The bytes of a value's copies that are kept for the backward pass. A latent that crosses between two blocks is one
/// buffer that both may keep: each block counts half, so that the sum never exceeds the buffer.
pub(crate) fn flow_kept_bytes(space: &SegmentSpace, id: ValueId, flow: &Flow) -> Bytes {
    let value = space.segment.value(id);
    let copies = flow.copies();
    let mut bytes = Bytes(0);
    for (layout, save) in copies.iter().zip(&flow.saves) {
        if *save == Save::Kept {
            let copy = activation_bytes(value.width(), *layout, &space.context);
            let shared = space.segment.boundary_index(id).is_some_and(|carried| carried > 0)
                && *layout == space.boundary.latents.forward;
            bytes += if shared { Bytes(copy.0 / 2) } else { copy };
        }
    }
    if flow.saves[0] == Save::Kept {
        bytes += log_sum_exp(space, id, copies[0]);
    }
    bytes
}

/// Bytes of attention's log-sum-exp of each row, which is kept with its output.
fn log_sum_exp(space: &SegmentSpace, id: ValueId, layout: Layout) -> Bytes {
    let Some(op) = space.segment.value(id).producer else { return Bytes(0) };
    let Op::Attention(attention) = &space.segment.op(op).op else { return Bytes(0) };
    let context = &space.context;
    Bytes(4 * context.columns(attention.heads, layout) * context.rows(layout))
}
