//! The bytes of a choice in the solver's memory rows.
//!
//! A block with f microbatches in flight occupies `resident + f·kept` bytes: its parameters with their gradients and
//! optimizer states, and for each microbatch the copies that are kept for the backward pass. Where weight gradients have passes of
//! their own, it also keeps their operands for each microbatch that waits for its pass. Buffers that live within
//! one pass belong to the stage and not to the block: the arena of the lowered program counts them exactly, and the
//! search reduces the blocks' limit by them.

use narrows_plan::emit::{activation_bytes, may_defer_weight_gradient, overlapped_weight_gradient};
use narrows_plan::graph::{Op, OpId, SegmentKind, ValueId};
use narrows_plan::strategy::{Flow, OpOption, Save, SegmentChoice, SegmentSpace};
use narrows_plan::{Bytes, Layout};

/// Bytes that one instance of a segment occupies between its passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentBytes {
    /// Parameters, gradients and optimizer states.
    pub resident: Bytes,
    /// Copies and statistics kept from a forward pass to its backward pass, for one microbatch.
    pub kept: Bytes,
    /// Operands of weight gradients that have a pass of their own.
    pub deferred: DeferredBytes,
}

/// Lower bounds on the operands of weight gradients that have a pass of their own, for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeferredBytes {
    /// Operands in buffers that are there from the forward to the backward pass as well.
    pub kept: Bytes,
    /// Operands in buffers that the backward pass writes.
    pub written: Bytes,
}

/// Microbatches whose activations are stored at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct InFlight {
    /// Microbatches between their forward and their backward pass.
    pub kept: u64,
    /// Microbatches between their forward pass and a pass for weight gradients, beyond those that are kept.
    pub deferred: u64,
    /// Microbatches between their backward pass and a pass for weight gradients; 0 where the one follows the other at once.
    pub written: u64,
}

impl InFlight {
    /// Multiplicities of the bytes kept, of the [operands kept](DeferredBytes::kept), and of [those written](DeferredBytes::written).
    pub fn weights(self) -> [u64; 3] {
        [self.kept, self.deferred, self.written]
    }
}

impl SegmentBytes {
    /// The bytes with these microbatches in flight.
    pub fn total(&self, in_flight: InFlight) -> Bytes {
        let [kept, operands_kept, operands_written] = in_flight.weights();
        let deferred =
            self.deferred.kept * operands_kept + self.deferred.written * operands_written;
        self.resident + self.kept * kept + deferred
    }
}

/// The bytes that one instance of a segment keeps for each microbatch in flight under a choice.
pub fn kept_bytes(space: &SegmentSpace, choice: &SegmentChoice) -> Bytes {
    let ops = space.segment.op_ids().map(|id| op_kept_bytes(space, id, &choice.ops[id.0 as usize]));
    let flow = |id: ValueId| flow_kept_bytes(space, id, &choice.flows[id.0 as usize]);
    ops.chain(space.segment.value_ids().map(flow)).sum()
}

/// The bytes that an op always keeps: the statistics of a norm, and the logits, which the loss replaces by their gradient. Where
/// the head's linear writes the gradient of its input, all that the head keeps is there as well: a share of it counts for
/// each microbatch of a pass.
pub(crate) fn op_kept_bytes(space: &SegmentSpace, id: OpId, option: &OpOption) -> Bytes {
    let SegmentSpace { segment, context, .. } = space;
    let input = option.choice.inputs.first();
    let bytes = |width, layout| activation_bytes(width, layout, context);
    match (&segment.op(id).op, input) {
        (Op::Norm { .. }, Some(input)) => Bytes(4 * context.rows(input.forward)),
        (Op::Loss { vocab }, Some(input)) => bytes(*vocab, input.forward),
        (Op::Linear(linear), Some(input)) if segment.kind == SegmentKind::Head => {
            Bytes(bytes(linear.members[0].d_in, input.backward).0 / context.pass_microbatches())
        }
        _ => Bytes(0),
    }
}

/// The bytes of a value's copies that are kept for the backward pass. A latent that crosses between two blocks is one
/// buffer that both may keep: the block that computes it counts three quarters and the next one a quarter, so that the sum never
/// exceeds the buffer. Often the former alone keeps it: unless it is needed for recomputation, a crossing that adds does not read it.
pub(crate) fn flow_kept_bytes(space: &SegmentSpace, id: ValueId, flow: &Flow) -> Bytes {
    let value = space.segment.value(id);
    let copies = flow.copies();
    // The hidden state has the index 0.
    let quarters = match (space.segment.input_index(id), space.segment.output_index(id)) {
        (Some(1..), _) => 1,
        (_, Some(1..)) => 3,
        _ => 4,
    };
    let mut bytes = Bytes(0);
    for (layout, save) in copies.iter().zip(&flow.saves) {
        if *save == Save::Kept {
            let copy = activation_bytes(value.width(), *layout, &space.context);
            let is_shared = *layout == space.boundary.latents.forward;
            bytes += Bytes(copy.0 * if is_shared { quarters } else { 4 } / 4);
        }
    }
    if flow.saves[0] == Save::Kept {
        bytes += log_sum_exp(space, id, copies[0]);
    }
    bytes
}

/// Lower bound on the operands of weight gradients that read a value and have a pass of their own: the copy that is read, and the
/// gradients of the outputs of these linears. A copy that is kept has one buffer for each microbatch from its forward pass
/// to the weight gradient, and so has a factor of a gated product, which its gradient may replace.
pub(crate) fn flow_deferred_bytes(space: &SegmentSpace, id: ValueId, flow: &Flow) -> DeferredBytes {
    let SegmentSpace { segment, context, .. } = space;
    let overlapped = overlapped_weight_gradient(segment, id, flow, context);
    let consumers = segment.value(id).consumers.iter().map(|(op, _)| *op);
    let deferred: Vec<OpId> = consumers
        .filter(|op| may_defer_weight_gradient(segment, *op, context) && Some(*op) != overlapped)
        .collect();
    if deferred.is_empty() || segment.boundary_index(id).is_some() {
        return DeferredBytes::default();
    }
    let bytes = |id: ValueId, layout| activation_bytes(segment.value(id).width(), layout, context);
    let read = [Some(flow.primary), flow.second].into_iter().flatten();
    let read = read.map(|copy| bytes(id, copy.forward)).min().unwrap_or_default();
    let mut operands = match flow.saves.contains(&Save::Kept) {
        true => DeferredBytes { kept: read, written: Bytes(0) },
        false => DeferredBytes { kept: Bytes(0), written: read },
    };
    let is_factor = |value: ValueId| {
        let mut consumers = segment.value(value).consumers.iter();
        consumers.any(|(op, _)| matches!(segment.op(*op).op, Op::GatedProduct { .. }))
    };
    for op in deferred {
        let options = &space.ops[op.0 as usize];
        for (port, output) in segment.op(op).outputs.iter().enumerate() {
            let of_option =
                |option: &OpOption| bytes(*output, option.choice.outputs[port].backward);
            let gradient = options.iter().map(of_option).min().unwrap_or_default();
            match is_factor(*output) {
                true => operands.kept += gradient,
                false => operands.written += gradient,
            }
        }
    }
    operands
}

/// The operands of weight gradients with a pass of their own that one instance of a segment keeps for each microbatch that waits
/// for it, under a choice; a lower bound.
pub fn deferred_bytes(space: &SegmentSpace, choice: &SegmentChoice) -> DeferredBytes {
    let mut total = DeferredBytes::default();
    for id in space.segment.value_ids() {
        let of_flow = flow_deferred_bytes(space, id, &choice.flows[id.0 as usize]);
        total.kept += of_flow.kept;
        total.written += of_flow.written;
    }
    total
}

/// Bytes of attention's log-sum-exp of each row, which is kept with its output.
fn log_sum_exp(space: &SegmentSpace, id: ValueId, layout: Layout) -> Bytes {
    let Some(op) = space.segment.value(id).producer else { return Bytes(0) };
    let Op::Attention(attention) = &space.segment.op(op).op else { return Bytes(0) };
    let context = &space.context;
    Bytes(4 * context.columns(attention.heads, layout) * context.rows(layout))
}
