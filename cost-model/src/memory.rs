//! The bytes a choice costs a stage, as the solver counts them.
//!
//! A block with f microbatches in flight holds `resident + f·kept` bytes: its parameters with their
//! gradients and optimizer states, and for each microbatch the copies it keeps. What lives only
//! during one pass is not the block's but the stage's; the arena of the lowered program counts it
//! exactly, and the search gives the blocks that much less.

use narrows_plan::Bytes;
use narrows_plan::emit::copy_bytes;
use narrows_plan::graph::{Op, OpId, ValueId};
use narrows_plan::strategy::{Context, Flow, OpOption, Save, SegmentChoice, SegmentSpace};
use narrows_plan::{Dim, Layout};

/// What one instance of a segment holds between its passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentBytes {
    /// Parameters, gradients and optimizer states.
    pub resident: Bytes,
    /// Copies and statistics kept from a forward pass to its backward pass.
    pub kept: Bytes,
}

impl SegmentBytes {
    /// With this many microbatches in flight.
    pub fn total(&self, in_flight: u64) -> Bytes {
        self.resident + self.kept * in_flight
    }
}

/// The bytes of one instance of a segment under a choice.
pub fn segment_bytes(
    space: &SegmentSpace,
    context: &Context,
    chosen: &SegmentChoice,
) -> SegmentBytes {
    let mut bytes = SegmentBytes::default();
    for id in space.segment.op_ids() {
        let own = op_bytes(space, context, id, &chosen.ops[id.0 as usize]);
        bytes.resident += own.resident;
        bytes.kept += own.kept;
    }
    for id in space.segment.value_ids() {
        bytes.kept += flow_kept(space, id, &chosen.flows[id.0 as usize]);
    }
    bytes
}

/// The bytes of an op: its parameters, and the statistics that are always kept.
pub fn op_bytes(
    space: &SegmentSpace,
    context: &Context,
    id: OpId,
    option: &OpOption,
) -> SegmentBytes {
    let parameter = space.parameters(id, option.choice.strategy, context);
    let resident = parameter.map_or(Bytes(0), |parameter| parameter.resident_bytes(context));
    let kept = match space.segment.op(id).op {
        Op::Norm { .. } => Bytes(4 * context.rows(option.choice.inputs[0].forward)),
        _ => Bytes(0),
    };
    SegmentBytes { resident, kept }
}

/// The bytes of a value's copies that are kept for the backward pass. A latent that crosses between
/// blocks is one tensor, whichever of both keeps it: each pays half, so that it never counts for
/// more than it is.
pub fn flow_kept(space: &SegmentSpace, id: ValueId, flow: &Flow) -> Bytes {
    let value = space.segment.value(id);
    let copies = flow.copies();
    let mut bytes = Bytes(0);
    for (layout, save) in copies.iter().zip(&flow.saves) {
        if *save == Save::Kept {
            let copy = copy_bytes(value.width(), *layout, &space.context);
            let shared = space.segment.carried(id).is_some_and(|carried| carried > 0)
                && *layout == space.border.latents.forward;
            bytes += if shared { Bytes(copy.0 / 2) } else { copy };
        }
    }
    if flow.saves[0] == Save::Kept {
        bytes += log_sum_exp(space, id, copies[0]);
    }
    bytes
}

/// Attention's row statistics live with its output.
fn log_sum_exp(space: &SegmentSpace, id: ValueId, layout: Layout) -> Bytes {
    let Some(op) = space.segment.value(id).producer else { return Bytes(0) };
    let Op::Attention(attention) = &space.segment.op(op).op else { return Bytes(0) };
    let heads = match layout {
        Layout::Sharded(Dim::Feature) => attention.heads / space.context.tensor(),
        _ => attention.heads,
    };
    Bytes(4 * heads * space.context.rows(layout))
}
