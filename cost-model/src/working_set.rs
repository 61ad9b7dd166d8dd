//! Least bytes that the backward pass of a block needs besides what blocks keep from forward passes.
//!
//! At the backward pass of its gated product, a block holds both inputs of the product, kept or recomputed, and the gradient
//! of its output. With ZeRO-3 it also holds the gathered weights of the linears whose backward passes follow, and with ZeRO-2
//! and ZeRO-3 the gradients of those before. What the block itself keeps may be among these, so that a memory row counts
//! either the one or the other.
//!
//! Where these collectives overlap with the passes of neighbouring blocks, which have no collectives of their own, the whole
//! pass of a block also holds the weights of the block before and the gradients of the block after it.

use narrows_plan::emit::{InstrTemplate, op_backward};
use narrows_plan::graph::{Op, OpId};
use narrows_plan::strategy::{OpParameters, SegmentSpace};
use narrows_plan::{Bytes, Context};

use crate::sharding::{gathered_bytes, reduced_bytes};

/// Lower bounds on what a block holds besides activations that are kept, over all of its choices.
#[derive(Clone, Copy, Debug)]
pub struct WorkingBytes {
    /// Bytes at the backward pass of its gated product.
    at_product: Bytes,
    /// Gathered weights of all of its linears.
    weights: Bytes,
    /// Whole gradients of all of its linears for one microbatch.
    gradients: Bytes,
}

/// Bytes that a stage needs besides what all but its last blocks keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    /// Number of blocks at the end of the stage whose kept activations are left out.
    pub last_blocks: u64,
    /// The bytes.
    pub bytes: Bytes,
}

impl WorkingBytes {
    /// The bounds for a block with these alternatives; `None` without a gated product.
    pub fn least(space: &SegmentSpace, context: &Context) -> Option<WorkingBytes> {
        let (product, mut at_product) = least_at_product(space, context)?;
        let (mut weights, mut gradients) = (Bytes(0), Bytes(0));
        for op in space.segment.op_ids() {
            if !matches!(space.segment.op(op).op, Op::Linear(_)) {
                continue;
            }
            let strategies = space.ops[op.0 as usize].iter().map(|option| option.choice.strategy);
            let parameters: Vec<OpParameters> =
                strategies.filter_map(|of| space.parameters(op, of, context)).collect();
            let least = |bytes: fn(&OpParameters, &Context) -> Bytes| {
                parameters.iter().map(|of| bytes(of, context)).min().unwrap_or_default()
            };
            let (weight, gradient) = (least(gathered_bytes), least(reduced_bytes));
            // The backward pass of a linear reads its weight and writes its gradient.
            at_product += if op < product { weight } else { gradient };
            weights += weight;
            gradients += gradient;
        }
        Some(WorkingBytes { at_product, weights, gradients })
    }

    /// The smaller bound of each.
    pub fn min(self, other: WorkingBytes) -> WorkingBytes {
        WorkingBytes {
            at_product: self.at_product.min(other.at_product),
            weights: self.weights.min(other.weights),
            gradients: self.gradients.min(other.gradients),
        }
    }

    /// Working sets of a pipeline of one stage with this many blocks.
    pub fn of_stage(self, context: &Context, blocks: u64) -> Vec<WorkingSet> {
        let WorkingBytes { at_product, weights, gradients } = self;
        let mut sets = vec![WorkingSet { last_blocks: 1, bytes: at_product }];
        if context.overlap_grad_reduce && !context.has_activation_collectives() {
            // There is a block before the last one. Before and after the second to last, there is one.
            let last = WorkingSet { last_blocks: 1, bytes: at_product + weights };
            let before = WorkingSet { last_blocks: 2, bytes: at_product + weights + gradients };
            sets.extend((blocks >= 2).then_some(last));
            sets.extend((blocks >= 3).then_some(before));
        }
        sets
    }
}

/// The gated product of a block, with the least bytes that its backward pass reads.
fn least_at_product(space: &SegmentSpace, context: &Context) -> Option<(OpId, Bytes)> {
    let segment = &space.segment;
    let is_product = |op: &OpId| matches!(segment.op(*op).op, Op::GatedProduct { .. });
    let product = segment.op_ids().find(is_product)?;
    let read = |template: &InstrTemplate| -> Bytes {
        template.reads.iter().map(|operand| operand.extent.bytes()).sum()
    };
    let of_options = space.ops[product.0 as usize].iter().map(|option| {
        let templates = op_backward(segment, product, &option.choice, context);
        templates.iter().map(read).max().unwrap_or_default()
    });
    Some((product, of_options.min()?))
}
