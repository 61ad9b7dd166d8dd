//! Least bytes that the backward pass of a block or of the head needs besides what blocks keep from forward passes.
//!
//! At the backward pass of its gated product, a block holds both inputs of the product, kept or recomputed, and the gradient
//! of its output; at the weight gradient of a linear, the input of the linear and both of its gradients. With ZeRO-3 it also
//! holds the gathered weights of the linears whose backward passes follow, and with ZeRO-2 and ZeRO-3 the gradients of those
//! before. Its own input, which the backward pass reads last, is kept if every choice keeps it, and the gradients of
//! the residual stream, which go around the MLP or the attention, wait for the gradients of these. What the block itself
//! keeps may be among all this, so that a memory row counts either the one or the other.
//!
//! Where the collectives of sharded parameters overlap with passes, neighbouring blocks have theirs at the same time: during its
//! whole backward pass, a block also holds the weights of the block before and the gradients of the block after it.

use narrows_plan::emit::{
    InstrTemplate, OperandSlot, TemplateOperand, activation_bytes, op_backward,
};
use narrows_plan::graph::{Op, OpId, ValueId};
use narrows_plan::strategy::{Flow, OpParameters, Save, SegmentSpace, backward_reads_input};
use narrows_plan::{Bytes, Context, Layout};

use crate::memory::flow_kept_bytes;
use crate::sharding::{gathered_bytes, reduced_bytes};

/// Lower bounds on what a block holds besides activations that are kept, over all of its choices.
#[derive(Clone, Copy, Debug)]
pub struct WorkingBytes {
    /// Bytes at the fullest of the instructions that are counted.
    at_fullest: Bytes,
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
        let segment = &space.segment;
        let is_product = |op: &OpId| matches!(segment.op(*op).op, Op::GatedProduct { .. });
        let product = segment.op_ids().find(is_product)?;
        let linears = LinearBytes::of_segment(space, context);
        let mut positions = vec![product];
        // Overlapped weight-gradient GEMMs run later than those of other linears.
        if !context.overlap_tensor_collectives {
            positions.extend(linears.iter().map(|linear| linear.op));
        }
        let at_position = |position: OpId| -> Option<Bytes> {
            let operands = activations_min(space, position, context)?;
            let residual = residual_gradients(space, position, context);
            let around = parameters_around(&linears, position);
            Some(operands + around + input_kept_min(space, position) + residual)
        };
        let at_positions: Option<Vec<Bytes>> = positions.into_iter().map(at_position).collect();
        let gradients: Bytes = linears.iter().map(|linear| linear.gradient).sum();
        // Whichever weight gradient is the last one, all gradients are there when it has read its operands.
        let last_reads =
            linears.iter().map(|linear| weight_gradient_reads_min(space, linear.op, context));
        let at_end = gradients + last_reads.min().unwrap_or_default();
        Some(WorkingBytes {
            at_fullest: at_positions?.into_iter().fold(at_end, Bytes::max),
            weights: linears.iter().map(|linear| linear.weight).sum(),
            gradients,
        })
    }

    /// Lower bound on what the backward pass of the head with these alternatives holds: at the gradient of the loss, or at that of
    /// its linear.
    pub fn least_of_head(space: &SegmentSpace, context: &Context) -> Bytes {
        let segment = &space.segment;
        let linears = LinearBytes::of_segment(space, context);
        let counts = |op: &OpId| matches!(segment.op(*op).op, Op::Linear(_) | Op::Loss { .. });
        let at_position =
            |op: OpId| Some(activations_min(space, op, context)? + parameters_around(&linears, op));
        segment.op_ids().filter(counts).filter_map(at_position).max().unwrap_or_default()
    }

    /// The smaller bound of each.
    pub fn min(self, other: WorkingBytes) -> WorkingBytes {
        WorkingBytes {
            at_fullest: self.at_fullest.min(other.at_fullest),
            weights: self.weights.min(other.weights),
            gradients: self.gradients.min(other.gradients),
        }
    }

    /// Bytes at the fullest of the instructions of a backward pass that are counted.
    pub fn at_fullest(&self) -> Bytes {
        self.at_fullest
    }

    /// Working sets of the last stage of a pipeline, whose head needs at least `of_head`, if it has blocks.
    pub fn of_last_stage(self, of_head: Bytes) -> Vec<WorkingSet> {
        vec![
            WorkingSet { last_blocks: 0, bytes: of_head },
            WorkingSet { last_blocks: 1, bytes: self.at_fullest },
        ]
    }

    /// Working sets of a pipeline of one stage with this many blocks, whose head needs at least `of_head`; the first one leaves
    /// out no block.
    pub fn of_stage(self, context: &Context, blocks: u64, of_head: Bytes) -> Vec<WorkingSet> {
        let WorkingBytes { at_fullest, weights, gradients } = self;
        // The last block begins with all of its gathered weights, and has reduced nothing.
        let mut at_begin = weights;
        if context.overlap_grad_reduce && blocks >= 2 {
            at_begin += weights;
        }
        // The weights of the last block are gathered during the backward pass of the head.
        let beside_head = if context.overlap_grad_reduce { weights } else { Bytes(0) };
        let mut sets = vec![
            WorkingSet { last_blocks: 0, bytes: at_begin.max(of_head + beside_head) },
            WorkingSet { last_blocks: 1, bytes: at_fullest },
        ];
        if context.overlap_grad_reduce {
            // There is a block before the last one. Before and after the second to last, there is one.
            let last = WorkingSet { last_blocks: 1, bytes: at_fullest + weights };
            let before = WorkingSet { last_blocks: 2, bytes: at_fullest + weights + gradients };
            sets.extend((blocks >= 2).then_some(last));
            sets.extend((blocks >= 3).then_some(before));
        }
        sets
    }
}

/// Least bytes of the sharded parameters of a linear.
struct LinearBytes {
    op: OpId,
    /// The gathered weight.
    weight: Bytes,
    /// The whole gradient for one microbatch.
    gradient: Bytes,
}

impl LinearBytes {
    fn of_segment(space: &SegmentSpace, context: &Context) -> Vec<LinearBytes> {
        let is_linear = |op: &OpId| matches!(space.segment.op(*op).op, Op::Linear(_));
        let linears = space.segment.op_ids().filter(is_linear);
        linears.map(|op| LinearBytes::least(space, op, context)).collect()
    }

    fn least(space: &SegmentSpace, op: OpId, context: &Context) -> LinearBytes {
        let strategies = space.ops[op.0 as usize].iter().map(|option| option.choice.strategy);
        let parameters: Vec<OpParameters> =
            strategies.filter_map(|of| space.parameters(op, of, context)).collect();
        let least = |bytes: fn(&OpParameters, &Context) -> Bytes| {
            parameters.iter().map(|of| bytes(of, context)).min().unwrap_or_default()
        };
        LinearBytes { op, weight: least(gathered_bytes), gradient: least(reduced_bytes) }
    }
}

/// Gathered weights of the linears whose backward passes follow that of an op, and gradients of those before, and of the op's own.
fn parameters_around(linears: &[LinearBytes], op: OpId) -> Bytes {
    let of_linear = |linear: &LinearBytes| match linear.op < op {
        true => linear.weight,
        false => linear.gradient,
    };
    linears.iter().map(of_linear).sum()
}

/// The least bytes of activations and their gradients that the backward pass of an op accesses at once: all that it reads; of a
/// linear, what its weight-gradient GEMM reads, and the gradient that the GEMM before it has written. `None` without alternatives.
fn activations_min(space: &SegmentSpace, op: OpId, context: &Context) -> Option<Bytes> {
    least_of_backward(space, op, context, |templates| {
        let weight_gradient =
            templates.iter().position(|template| template.action.is_weight_gradient());
        let reads = |template: &InstrTemplate| activation_operand_bytes(&template.reads);
        match weight_gradient {
            Some(at) if at > 0 => {
                reads(&templates[at]) + activation_operand_bytes(&templates[at - 1].writes)
            }
            _ => templates.iter().map(reads).max().unwrap_or_default(),
        }
    })
}

/// The least bytes of activations that the weight-gradient GEMM of a linear reads; 0 without one.
fn weight_gradient_reads_min(space: &SegmentSpace, op: OpId, context: &Context) -> Bytes {
    let least = least_of_backward(space, op, context, |templates| {
        let of_weight = templates.iter().find(|template| template.action.is_weight_gradient());
        of_weight.map_or(Bytes(0), |template| activation_operand_bytes(&template.reads))
    });
    least.unwrap_or_default()
}

/// The least of a number of bytes over the backward passes of an op's alternatives; `None` without any.
fn least_of_backward(
    space: &SegmentSpace,
    op: OpId,
    context: &Context,
    bytes: impl Fn(&[InstrTemplate]) -> Bytes,
) -> Option<Bytes> {
    let options = space.ops[op.0 as usize].iter();
    options.map(|option| bytes(&op_backward(&space.segment, op, &option.choice, context))).min()
}

/// Bytes of the operands that are activations or their gradients.
fn activation_operand_bytes(operands: &[TemplateOperand]) -> Bytes {
    let is_parameter = |slot| {
        matches!(
            slot,
            OperandSlot::Weight(_)
                | OperandSlot::WeightGradient(_)
                | OperandSlot::MicrobatchGradient(_)
        )
    };
    let activations = operands.iter().filter(|operand| !is_parameter(operand.slot));
    activations.map(|operand| operand.extent.bytes()).sum()
}

/// The least bytes that the segment keeps of its first input, the hidden state, if the backward passes of other ops than `op`
/// and later ones read it.
fn input_kept_min(space: &SegmentSpace, op: OpId) -> Bytes {
    let segment = &space.segment;
    let Some(input) = segment.inputs.first() else { return Bytes(0) };
    let reads_in_backward = |op: &OpId| backward_reads_input(&segment.op(*op).op);
    let readers = segment.value(*input).consumers.iter().map(|(op, _)| *op);
    let mut readers = readers.filter(reads_in_backward).peekable();
    if readers.peek().is_none() || readers.any(|reader| reader >= op) {
        return Bytes(0);
    }
    let has_kept_copy = |flow: &&Flow| flow.saves.contains(&Save::Kept);
    let flows = space.flows[input.0 as usize].iter().filter(has_kept_copy);
    flows.map(|flow| flow_kept_bytes(space, *input, flow)).min().unwrap_or_default()
}

/// The bytes of gradients of values with a consumer before `op` and one after it, which is a residual addition: during the backward
/// pass of `op`, the contribution of the addition waits for the other one. Counted on one device of the tensor and the context axis,
/// where layouts do not matter, and for ops whose output gradients are no contributions of this kind themselves.
fn residual_gradients(space: &SegmentSpace, op: OpId, context: &Context) -> Bytes {
    let segment = &space.segment;
    let has_own_gradient = |(consumer, _): &(OpId, usize)| {
        use Op::{Attention, GatedProduct, Latent, Linear};
        matches!(
            segment.op(*consumer).op,
            Attention(_) | GatedProduct { .. } | Latent(_) | Linear(_)
        )
    };
    let outputs = segment.op(op).outputs.iter();
    let mut consumers = outputs.flat_map(|output| &segment.value(*output).consumers);
    if context.has_activation_collectives() || !consumers.all(has_own_gradient) {
        return Bytes(0);
    }
    let waits = |value: &ValueId| {
        let consumers = segment.value(*value).consumers.iter().map(|(consumer, _)| *consumer);
        let is_sum = |of: OpId| of > op && matches!(segment.op(of).op, Op::Add { .. });
        consumers.clone().any(is_sum) && consumers.clone().any(|consumer| consumer < op)
    };
    let bytes = |value| activation_bytes(segment.value(value).width(), Layout::Replicated, context);
    segment.value_ids().filter(waits).map(bytes).sum()
}
