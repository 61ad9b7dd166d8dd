//! The backward pass of a segment: recompute operands, reduce gradients, run the ops' backward templates.

use crate::decisions::SegmentPlan;
use crate::emit::{
    TemplateOperand, copy_recompute, gradient_paths, is_weight_gradient_deferrable, op_backward,
    op_recompute, overlapped_weight_gradient,
};
use crate::graph::{Op, OpId, ValueId};
use crate::program::{Action, BufferId, Instr, StageSchedule};
use crate::strategy::{Save, backward_reads_input, backward_reads_output};

use super::forward::residual_sum;
use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    /// Emits the backward passes of the ops in reverse order. The gradients of the segment's outputs, in the
    /// layouts of the boundary, are bound already.
    pub(super) fn backward_segment(&mut self, site: SegmentSite) {
        let segment = &site.plan.segment;
        self.unbind_unsaved(site);
        for op in segment.op_ids().rev() {
            self.recompute_operands(site, op);
            for value in &segment.op(op).outputs {
                self.sum_contributions(site, *value);
            }
            self.alias_gradients(site, op);
            let choice = &site.plan.choice.ops[op.0 as usize].choice;
            let templates = op_backward(segment, op, choice, &self.plan.context);
            self.push_op(site, op, templates);
            self.hold_weight_gradient(site, op);
            self.defer_weight_gradient(site, op);
        }
        for input in &segment.inputs {
            self.sum_contributions(site, *input);
        }
    }

    /// Holds back the weight-gradient GEMM of a linear, its last instruction, if it overlaps with the collective of its
    /// input's gradient.
    fn hold_weight_gradient(&mut self, site: SegmentSite, op: OpId) {
        let segment = &site.plan.segment;
        for value in &segment.op(op).inputs {
            let flow = &site.plan.choice.flows[value.0 as usize];
            let beside = overlapped_weight_gradient(segment, *value, flow, &self.plan.context);
            if beside == Some(op) {
                let gemm = self.current_chunk().backward.pop();
                debug_assert!(gemm.as_ref().is_some_and(|gemm| gemm.action.is_weight_gradient()));
                self.overlapped_gemms.extend(gemm.map(|gemm| ((site.instance, *value), gemm)));
            }
        }
    }

    /// Moves the weight-gradient GEMM of a linear, its last instruction, to the weight-gradient pass if it may run there.
    fn defer_weight_gradient(&mut self, site: SegmentSite, op: OpId) {
        let SegmentPlan { segment, choice } = site.plan;
        let schedule = StageSchedule::of(&self.plan.context, self.stage as u64);
        if !schedule.defers_weight_gradients()
            || !is_weight_gradient_deferrable(segment, op, choice, &self.plan.context)
        {
            return;
        }
        let gemm = self.current_chunk().backward.pop();
        debug_assert!(gemm.as_ref().is_some_and(|gemm| gemm.action.is_weight_gradient()));
        self.current_chunk().weight_gradient.extend(gemm);
    }

    /// Emits the GEMM that was held back for a value after the collective among the last instructions, which begin at
    /// `begin`.
    fn release_weight_gradient(&mut self, site: SegmentSite, value: ValueId, begin: usize) {
        let Some(gemm) = self.overlapped_gemms.remove(&(site.instance, value)) else { return };
        let backward = &mut self.current_chunk().backward;
        let is_collective = |instr: &Instr| matches!(instr.action, Action::Collective(_));
        let collective = backward[begin..].iter().position(is_collective).map(|at| begin + at);
        if let Some(collective) = collective {
            backward[collective].overlapped_instrs = 1;
        }
        backward.insert(collective.map_or(backward.len(), |collective| collective + 1), gemm);
    }

    /// Unbinds copies that are not kept, so that recomputed copies get new buffers.
    fn unbind_unsaved(&mut self, site: SegmentSite) {
        let segment = &site.plan.segment;
        for id in segment.value_ids() {
            let flow = &site.plan.choice.flows[id.0 as usize];
            for (copy, save) in flow.saves.iter().enumerate() {
                if *save != Save::Kept {
                    self.buffers.remove(&BufferKey::ValueCopy(site.instance, id, copy));
                }
            }
            if let Some(op) = segment.value(id).producer
                && matches!(segment.op(op).op, Op::Attention(_))
                && flow.saves[0] == Save::Recomputed
            {
                self.buffers.remove(&BufferKey::Statistic(site.instance, op));
            }
        }
    }

    /// Recomputes the operands of an op's backward pass that are not available.
    fn recompute_operands(&mut self, site: SegmentSite, op: OpId) {
        let node = site.plan.segment.op(op);
        let option = &site.plan.choice.ops[op.0 as usize];
        if backward_reads_input(&node.op) {
            self.recompute_inputs(site, op);
        }
        if backward_reads_output(&node.op, option.choice.strategy) {
            for value in &node.outputs {
                self.recompute_copy(site, *value, 0);
            }
        }
    }

    fn recompute_inputs(&mut self, site: SegmentSite, op: OpId) {
        for port in 0..site.plan.segment.op(op).inputs.len() {
            self.recompute_input(site, op, port);
        }
    }

    fn recompute_input(&mut self, site: SegmentSite, op: OpId, port: usize) {
        let value = site.plan.segment.op(op).inputs[port];
        let layout = site.plan.choice.input_layout(op, port);
        let flow = &site.plan.choice.flows[value.0 as usize];
        self.recompute_copy(site, value, flow.copy_in(layout));
    }

    /// Recomputes a copy unless it is available.
    fn recompute_copy(&mut self, site: SegmentSite, value: ValueId, copy: usize) {
        if self.buffers.contains_key(&BufferKey::ValueCopy(site.instance, value, copy)) {
            return;
        }
        let segment = &site.plan.segment;
        if copy > 0 {
            self.recompute_copy(site, value, 0);
            let flow = &site.plan.choice.flows[value.0 as usize];
            let templates = copy_recompute(segment.value(value), flow, copy, &self.plan.context);
            self.add_copy(site, value, copy, templates);
            return;
        }
        let Some(op) = segment.value(value).producer else { return };
        self.recompute_inputs(site, op);
        match residual_sum(site, op) {
            Some(sum) if sum.linear == op => {
                self.recompute_input(site, sum.add, sum.residual_port);
                return self.push_residual_sum(site, sum);
            }
            // The linear, an input that is recomputed, has computed the sum.
            Some(_) => return,
            None => {}
        }
        self.alias_in_place(site, op);
        let choice = &site.plan.choice.ops[op.0 as usize].choice;
        let templates = op_recompute(segment, op, choice, &self.plan.context);
        self.push_op(site, op, templates);
    }

    /// Reshards the gradient contributions of a value to the producer's layout and adds them.
    fn sum_contributions(&mut self, site: SegmentSite, value: ValueId) {
        let segment = &site.plan.segment;
        let node = segment.value(value);
        let flow = &site.plan.choice.flows[value.0 as usize];
        let origin = site.origin(&format!("d({})", node.name));
        let begin = self.current_chunk().backward.len();
        let mut total: Option<BufferId> = None;
        for (index, path) in gradient_paths(node, flow, &self.plan.context).into_iter().enumerate()
        {
            let from = self.buffer_of(BufferKey::Gradient(site.instance, value, index));
            let mut to = from;
            let in_place = path.layout == crate::Layout::Partial
                && flow.producer.backward == crate::Layout::Replicated;
            if let Some(last) = path.reshard.last()
                && !in_place
            {
                to = self.add_value_buffer(&origin.to_string(), last.writes[0].extent, node);
            }
            self.push_reshard(path.reshard, &origin, (from, to), None);
            match (total, path.sum) {
                (Some(first), Some(sum)) => {
                    self.push_reshard(vec![sum], &origin, (to, first), None)
                }
                _ => total = Some(to),
            }
        }
        self.release_weight_gradient(site, value, begin);
        if let Some(total) = total {
            self.buffers.insert(BufferKey::Gradient(site.instance, value, 0), total);
        }
    }

    /// The gradient of a value in its producer's layout, after [`Self::sum_contributions`].
    pub(super) fn output_gradient(&self, site: SegmentSite, value: ValueId) -> BufferId {
        self.buffer_of(BufferKey::Gradient(site.instance, value, 0))
    }

    /// Binds the input gradients of additions, of biases and of latents without an instruction to the output gradient,
    /// where they are not accumulated onto other contributions.
    fn alias_gradients(&mut self, site: SegmentSite, op: OpId) {
        let segment = &site.plan.segment;
        let node = segment.op(op);
        let is_identity = match &node.op {
            Op::Add { .. } | Op::Cross { .. } | Op::Bias(_) | Op::GateBias { .. } => true,
            Op::Latent(_) => {
                let choice = &site.plan.choice.ops[op.0 as usize].choice;
                op_backward(segment, op, choice, &self.plan.context).is_empty()
            }
            Op::Embedding { .. }
            | Op::Norm { .. }
            | Op::Linear(_)
            | Op::QkNorm(_)
            | Op::Attention(_)
            | Op::GatedProduct { .. }
            | Op::TensorGate { .. }
            | Op::LatentNorm { .. }
            | Op::Loss { .. } => false,
        };
        if is_identity {
            let gradient = self.output_gradient(site, node.outputs[0]);
            for (port, value) in node.inputs.iter().enumerate() {
                if !segment.accumulates(op, port) {
                    let group = self.gradient_group(site, op, port);
                    self.buffers
                        .insert(BufferKey::Gradient(site.instance, *value, group), gradient);
                }
            }
        }
    }

    /// Index of the sum of contributions that an op contributes to at an input port.
    fn gradient_group(&self, site: SegmentSite, op: OpId, port: usize) -> usize {
        let value = site.plan.segment.op(op).inputs[port];
        let flow = &site.plan.choice.flows[value.0 as usize];
        let layout = site.plan.choice.ops[op.0 as usize].choice.inputs[port].backward;
        flow.gradient_in(layout)
    }

    /// The buffer of an op's gradient contribution. A sum that the last consumer does not write is zeroed.
    pub(super) fn input_gradient(
        &mut self,
        site: SegmentSite,
        op: OpId,
        port: usize,
        operand: TemplateOperand,
    ) -> BufferId {
        let node = site.plan.segment.op(op);
        let value = node.inputs[port];
        let group = self.gradient_group(site, op, port);
        let key = BufferKey::Gradient(site.instance, value, group);
        if let Some(buffer) = self.buffers.get(&key) {
            return *buffer;
        }
        if matches!(node.op, Op::Loss { .. }) {
            // The gradient of the logits replaces them.
            let logits = self.input(site, op, port);
            self.buffers.insert(key, logits);
            return logits;
        }
        if let Some(saved) = self.gradient_in_place(site, op, port, operand) {
            self.buffers.insert(key, saved);
            return saved;
        }
        let origin = site.origin(&format!("d({})", site.plan.segment.value(value).name));
        let name = origin.to_string();
        let buffer = self.bind_or_create(key, |lowering| {
            lowering.add_value_buffer(&name, operand.extent, site.plan.segment.value(value))
        });
        if group > 0 {
            let flow = &site.plan.choice.flows[value.0 as usize];
            let node = site.plan.segment.value(value);
            let fill = gradient_paths(node, flow, &self.plan.context)
                .into_iter()
                .nth(group)
                .and_then(|path| path.fill);
            self.push_reshard(fill.into_iter().collect(), &origin, (buffer, buffer), None);
        }
        buffer
    }

    /// The buffer of an input that its gradient replaces: that of a gated product, the widest of a block, which nothing reads
    /// later. Where weight gradients have a pass of their own, gradients outlive inputs and have buffers of their own.
    fn gradient_in_place(
        &self,
        site: SegmentSite,
        op: OpId,
        port: usize,
        operand: TemplateOperand,
    ) -> Option<BufferId> {
        let segment = &site.plan.segment;
        let node = segment.op(op);
        let schedule = StageSchedule::of(&self.plan.context, self.stage as u64);
        if !matches!(node.op, Op::GatedProduct { .. }) || schedule.defers_weight_gradients() {
            return None;
        }
        let id = node.inputs[port];
        let value = segment.value(id);
        let producer = value.producer?;
        let strategy = site.plan.choice.ops[producer.0 as usize].choice.strategy;
        let is_read_elsewhere = value.consumers.len() > 1
            || segment.outputs.contains(&id)
            || backward_reads_output(&segment.op(producer).op, strategy);
        let shares_buffer = value.aliases.is_some()
            || segment.value_ids().any(|other| segment.value(other).aliases == Some(id));
        if is_read_elsewhere || shares_buffer || self.gradient_group(site, op, port) > 0 {
            return None;
        }
        let saved = self.input(site, op, port);
        (self.program.buffer(saved).extent == operand.extent).then_some(saved)
    }
}
