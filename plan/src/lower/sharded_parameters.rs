//! Collectives of sharded parameters of blocks (ZeRO-2 and ZeRO-3) within the passes.
//!
//! With ZeRO-3 the weights of a block are gathered before each pass that reads them, into buffers that live until its last
//! reader. With ZeRO-2 and ZeRO-3 the backward pass of a block writes whole gradients of the microbatch, which are
//! reduce-scattered, rounded where gradients are reduced in bf16; then each replica adds its part to its sum. A block has one
//! collective of each kind, for all of its parameters.
//!
//! With `overlap_grad_reduce`, collectives overlap with the pass of a neighbouring block: during the pass of a block, the
//! weights of the next block are gathered and the gradients of the previous block are reduced, one collective after the other.

use std::ops::Range;

use crate::emit::{
    OperandSlot, accumulate_gradient_part, all_gather, microbatch_gradient_extent, reduce_scatter,
    round_microbatch_gradient, zero_microbatch_gradient,
};
use crate::graph::{OpId, SegmentKind};
use crate::program::{Access, Buffer, BufferId, BufferRole};
use crate::strategy::OpParameters;

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    /// The buffer of a parameter as the passes access it.
    pub(super) fn parameter_in_pass(
        &mut self,
        site: SegmentSite,
        op: OpId,
        slot: OperandSlot,
    ) -> BufferId {
        let context = &self.plan.context;
        let is_block = site.plan.segment.kind == SegmentKind::Block;
        match slot {
            OperandSlot::Weight(_) if is_block && context.shards_weights() => {
                self.buffer_of(BufferKey::GatheredWeight(site.instance, op))
            }
            OperandSlot::WeightGradient(_) if is_block && context.shards_gradients() => {
                self.microbatch_gradient(site, op)
            }
            slot => self.buffer_of(BufferKey::Parameter(site.instance, op, slot)),
        }
    }

    /// The buffer of a microbatch's gradient, created when its op first writes it.
    fn microbatch_gradient(&mut self, site: SegmentSite, op: OpId) -> BufferId {
        let key = BufferKey::MicrobatchGradient(site.instance, op);
        if let Some(buffer) = self.buffers.get(&key) {
            return *buffer;
        }
        let Some(parameters) = self.parameters(site, op) else {
            unreachable!("an op with a weight gradient has a weight")
        };
        let node = site.plan.segment.op(op);
        let extent = microbatch_gradient_extent(&node.op, &parameters, &self.plan.context);
        let name = format!("{} {} microbatch gradient", site.name, node.name);
        let shard = Some(self.parameter_shard(site, &parameters));
        let role = BufferRole::MicrobatchGradient;
        let buffer = self.add_bound_buffer(key, &name, extent, role, shard);
        let zeroes = zero_microbatch_gradient(&node.op, &parameters, &self.plan.context);
        if let Some(template) = zeroes {
            self.push(template, &site.origin(&node.name), |_, _| buffer);
        }
        buffer
    }

    /// The parameters of which replicas accumulate their parts of gradients, by op.
    fn sharded_parameters(&self, site: SegmentSite) -> Vec<(OpId, OpParameters)> {
        let segment = &site.plan.segment;
        if segment.kind != SegmentKind::Block || !self.plan.context.shards_gradients() {
            return vec![];
        }
        segment.op_ids().filter_map(|op| Some((op, self.parameters(site, op)?))).collect()
    }

    /// Gathers the weights of the first segment of a pass.
    pub(super) fn gather_first_weights(&mut self, site: &SegmentSite) {
        if self.plan.context.overlap_grad_reduce {
            self.gather_weights(*site);
        }
    }

    /// Emits the collectives before the forward pass of a segment. Returns the collectives that may overlap with the pass.
    pub(super) fn begin_forward(
        &mut self,
        site: SegmentSite,
        next: Option<&SegmentSite>,
    ) -> Range<usize> {
        let begin = self.instructions().len();
        match next {
            _ if !self.plan.context.overlap_grad_reduce => self.gather_weights(site),
            Some(next) => self.gather_weights(*next),
            None => {}
        }
        begin..self.instructions().len()
    }

    /// Emits the collectives before the backward pass of a segment: the weights of the previous segment of the
    /// model, and the gradients of the next one. Returns the collectives that may overlap with the pass.
    pub(super) fn begin_backward(
        &mut self,
        site: SegmentSite,
        previous: Option<&SegmentSite>,
        next: Option<&SegmentSite>,
    ) -> Range<usize> {
        let begin = self.instructions().len();
        if !self.plan.context.overlap_grad_reduce {
            self.gather_weights(site);
        } else {
            previous.into_iter().for_each(|previous| self.gather_weights(*previous));
            next.into_iter().for_each(|next| self.reduce_gradients(*next));
        }
        begin..self.instructions().len()
    }

    /// Emits the instructions after the backward pass of a segment: gradients are rounded, and each replica adds its reduced
    /// parts. With overlap, these are the parts of the next segment of the model.
    pub(super) fn end_backward(&mut self, site: SegmentSite, next: Option<&SegmentSite>) {
        self.record_gradient_end(site);
        self.round_gradients(site);
        if !self.plan.context.overlap_grad_reduce {
            self.reduce_gradients(site);
            self.accumulate_parts(site);
        } else if let Some(next) = next {
            self.accumulate_parts(*next);
        }
    }

    /// Reduces the gradients of the segment that the backward pass ends with.
    pub(super) fn reduce_last_gradients(&mut self, site: &SegmentSite) {
        if self.plan.context.overlap_grad_reduce {
            self.reduce_gradients(*site);
            self.accumulate_parts(*site);
        }
    }

    /// Records that the gradients of a segment are complete here.
    fn record_gradient_end(&mut self, site: SegmentSite) {
        let chunk = self.current_chunk();
        let ends = [chunk.backward.len(), chunk.weight_gradient.len()];
        self.gradient_ends.insert(site.instance, ends);
    }

    /// Lets these collectives overlap with all instructions after them.
    pub(super) fn overlap(&mut self, collectives: Range<usize>) {
        if !self.plan.context.overlap_grad_reduce {
            return;
        }
        let instructions = self.instructions();
        let end = instructions.len();
        for at in collectives {
            instructions[at].overlapped_instrs = end - at - 1;
        }
    }

    /// Gathers the weights of a block from the parts of the replicas.
    fn gather_weights(&mut self, site: SegmentSite) {
        let context = self.plan.context;
        if !context.shards_weights() {
            return;
        }
        let mut operands = vec![];
        for (op, parameters) in self.sharded_parameters(site) {
            let part = BufferKey::Parameter(site.instance, op, OperandSlot::Weight(0));
            let part = self.whole_access(self.buffer_of(part));
            let extent = parameters.whole_weight_extent(&context);
            let name = format!("{} {} gathered weight", site.name, site.plan.segment.op(op).name);
            let shard = Some(self.parameter_shard(site, &parameters));
            let (key, role) =
                (BufferKey::GatheredWeight(site.instance, op), BufferRole::GatheredWeight);
            let buffer = self.add_bound_buffer(key, &name, extent, role, shard);
            operands.push((part, Access { buffer, extent }));
        }
        self.push_collective(site.origin("weights"), operands, all_gather);
    }

    /// Rounds the gradients of a block's microbatch that have another format than their reduction.
    fn round_gradients(&mut self, site: SegmentSite) {
        let context = self.plan.context;
        for (op, parameters) in self.sharded_parameters(site) {
            let node = site.plan.segment.op(op);
            let template = round_microbatch_gradient(&node.op, &parameters, &context);
            let Some(template) = template else { continue };
            let name = format!("{} {} rounded microbatch gradient", site.name, node.name);
            let shard = Some(self.parameter_shard(site, &parameters));
            let key = BufferKey::RoundedMicrobatchGradient(site.instance, op);
            let (extent, role) = (template.writes[0].extent, BufferRole::MicrobatchGradient);
            let rounded = self.add_bound_buffer(key, &name, extent, role, shard);
            self.push(template, &site.origin(&node.name), |lowering, operand| match operand.slot {
                OperandSlot::RoundedGradient(_) => rounded,
                _ => lowering.microbatch_gradient(site, op),
            });
        }
    }

    /// The buffer of a microbatch's gradient in which the replicas reduce it.
    fn reduced_gradient(&mut self, site: SegmentSite, op: OpId) -> BufferId {
        match self.buffers.get(&BufferKey::RoundedMicrobatchGradient(site.instance, op)) {
            Some(rounded) => *rounded,
            None => self.microbatch_gradient(site, op),
        }
    }

    /// Reduces the gradients of a block's microbatch. Each replica gets its part: in place, or where these are not added to
    /// others as the sum.
    fn reduce_gradients(&mut self, site: SegmentSite) {
        let mut operands = vec![];
        for (op, _) in self.sharded_parameters(site) {
            let whole = self.reduced_gradient(site, op);
            let sum = BufferKey::Parameter(site.instance, op, OperandSlot::WeightGradient(0));
            let accumulates = self.plan.context.accumulates_parts();
            let to = if accumulates { whole } else { self.buffer_of(sum) };
            operands.push((self.whole_access(whole), self.whole_access(to)));
        }
        self.push_collective(site.origin("gradients"), operands, reduce_scatter);
    }

    /// Adds the reduced parts of a block's gradients to the parts of earlier microbatches, if there are any.
    fn accumulate_parts(&mut self, site: SegmentSite) {
        let context = self.plan.context;
        for (op, parameters) in self.sharded_parameters(site) {
            if context.accumulates_parts() {
                let origin = site.origin(&site.plan.segment.op(op).name);
                let template = accumulate_gradient_part(&parameters, &context);
                self.push(template, &origin, |lowering, operand| match operand.slot {
                    OperandSlot::WeightGradient(_) => {
                        lowering.buffer_of(BufferKey::Parameter(site.instance, op, operand.slot))
                    }
                    _ => lowering.reduced_gradient(site, op),
                });
            }
            self.record_gradient_end(site);
        }
    }

    fn whole_access(&self, buffer: BufferId) -> Access {
        let Buffer { extent, .. } = *self.program.buffer(buffer);
        Access { buffer, extent }
    }
}
