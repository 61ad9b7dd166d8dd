//! The bytes a choice keeps alive, as the solver counts them.
//!
//! A stage of n blocks with f microbatches in flight holds, at a point of one block's backward walk,
//!
//! ```text
//! n·resident + (n·f − 1)·kept + alive(point)
//! ```
//! where `alive` counts what that one block holds there: kept copies until their last reader is
//! done, redone copies between their first and last reader, gradients from their first contribution
//! to their producer. The arena of the lowered program is exact; these rows steer the search to it.

use narrows_plan::Bytes;
use narrows_plan::emit::copy_bytes;
use narrows_plan::graph::{Op, OpId, ValueId};
use narrows_plan::strategy::{Flow, OpOption, Save, SegmentSpace};
use narrows_plan::{Dim, Layout};

/// How the segment's bytes add up on a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryWeights {
    /// Blocks of this shape on the stage.
    pub blocks: u64,
    /// Microbatches whose activations are alive at once.
    pub in_flight: u64,
    /// What they may use together.
    pub limit: Bytes,
}

/// Byte counts of a segment's choices.
pub struct SegmentMemory<'a> {
    space: &'a SegmentSpace,
}

impl<'a> SegmentMemory<'a> {
    /// For one segment.
    pub fn new(space: &'a SegmentSpace) -> Self {
        SegmentMemory { space }
    }

    /// Parameters with their gradients and optimizer states, and statistics that are always kept.
    pub fn op(&self, id: OpId, option: &OpOption, weights: &MemoryWeights) -> Bytes {
        let (resident, kept) = self.op_parts(id, option);
        resident * weights.blocks + kept * (weights.blocks * weights.in_flight)
    }

    /// Resident bytes and always-kept statistics of one op.
    pub fn op_parts(&self, id: OpId, option: &OpOption) -> (Bytes, Bytes) {
        let context = &self.space.context;
        let strategy = option.choice.strategy;
        let resident =
            self.space.parameters(id, strategy).map_or(Bytes(0), |p| p.resident_bytes(context));
        let kept = match self.space.segment.op(id).op {
            Op::Norm { .. } => Bytes(4 * context.rows(option.choice.inputs[0].forward)),
            _ => Bytes(0),
        };
        (resident, kept)
    }

    /// The bytes of a value's copies and gradients at one point of the backward walk.
    pub fn flow(&self, id: ValueId, flow: &Flow, point: OpId, weights: &MemoryWeights) -> Bytes {
        let elsewhere = (weights.blocks * weights.in_flight).saturating_sub(1);
        self.kept(id, flow) * elsewhere + self.alive(id, flow, point)
    }

    /// The bytes of a value's copies that are kept for the backward pass.
    pub fn kept(&self, id: ValueId, flow: &Flow) -> Bytes {
        self.saved(id, flow, Save::Kept)
    }

    fn saved(&self, id: ValueId, flow: &Flow, wanted: Save) -> Bytes {
        let value = self.space.segment.value(id);
        let context = &self.space.context;
        let copies = flow.copies();
        let mut bytes = Bytes(0);
        for (copy, layout) in copies.iter().enumerate() {
            if flow.saves[copy] == wanted {
                bytes += copy_bytes(value.width(), *layout, context);
            }
        }
        if flow.saves[0] == wanted {
            bytes += self.log_sum_exp(id, copies[0]);
        }
        bytes
    }

    /// Attention's row statistics live with its output.
    fn log_sum_exp(&self, id: ValueId, layout: Layout) -> Bytes {
        let Some(op) = self.space.segment.value(id).producer else { return Bytes(0) };
        let Op::Attention(attention) = &self.space.segment.op(op).op else { return Bytes(0) };
        let context = &self.space.context;
        let heads = match layout {
            Layout::Sharded(Dim::Feature) => attention.heads / context.tensor(),
            _ => attention.heads,
        };
        Bytes(4 * heads * context.rows(layout))
    }

    fn alive(&self, id: ValueId, flow: &Flow, point: OpId) -> Bytes {
        let value = self.space.segment.value(id);
        let readers = || value.consumers.iter().map(|(op, _)| *op);
        let (Some(first), Some(last)) = (readers().min(), readers().max()) else {
            return Bytes(0);
        };
        let mut bytes = Bytes(0);
        if point >= first {
            bytes += self.saved(id, flow, Save::Kept);
        }
        if (first..=last).contains(&point) {
            bytes += self.saved(id, flow, Save::Redone);
        }
        let producer = value.producer.unwrap_or(OpId(0));
        if (producer..=last).contains(&point) {
            bytes += self.gradients(id, flow);
        }
        bytes
    }

    fn gradients(&self, id: ValueId, flow: &Flow) -> Bytes {
        let segment = &self.space.segment;
        let value = segment.value(id);
        let context = &self.space.context;
        let bytes = |layout| copy_bytes(value.width(), layout, context);
        // The residual branch's gradient is the residual's own buffer.
        let branch = value
            .consumers
            .last()
            .is_some_and(|(op, port)| matches!(segment.op(*op).op, Op::Add { .. }) && *port == 1);
        let wanted = flow.producer.backward;
        flow.gradients()
            .into_iter()
            .enumerate()
            .map(|(index, layout)| {
                let own = if branch && index == 0 { Bytes(0) } else { bytes(layout) };
                let in_place = (layout, wanted) == (Layout::Partial, Layout::Replicated);
                let other = if layout == wanted || in_place { Bytes(0) } else { bytes(wanted) };
                own + other
            })
            .sum()
    }
}
