//! The backward pass of a segment: redo what is needed, gather gradients, run the op's backward.

use crate::emit::{TemplateOperand, copy_recompute, gradient_paths, op_backward, op_recompute};
use crate::graph::{Op, OpId, ValueId};
use crate::program::BufferId;
use crate::strategy::{Save, backward_reads_input, backward_reads_output};

use super::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    /// Walks the segment's ops backwards. The gradients of what leaves it, in the border's layouts,
    /// are already held.
    pub(super) fn backward_segment(&mut self, place: SegmentSite) {
        let segment = &place.plan.segment;
        self.forget_unsaved(place);
        for op in segment.op_ids().rev() {
            self.provide(place, op);
            for value in &segment.op(op).outputs {
                self.gather_gradient(place, *value);
            }
            self.alias_gradients(place, op);
            let choice = &place.plan.choice.ops[op.0 as usize].choice;
            let templates = op_backward(segment, op, choice, &self.plan.context);
            self.push_op(place, op, templates);
        }
        for entry in &segment.inputs {
            self.gather_gradient(place, *entry);
        }
    }

    /// What is not kept is not there: whatever is redone gets new buffers.
    fn forget_unsaved(&mut self, place: SegmentSite) {
        let segment = &place.plan.segment;
        for id in segment.value_ids() {
            let flow = &place.plan.choice.flows[id.0 as usize];
            for (copy, save) in flow.saves.iter().enumerate() {
                if *save != Save::Kept {
                    self.held.remove(&BufferKey::Copy(place.instance, id, copy));
                }
            }
            if let Some(op) = segment.value(id).producer
                && matches!(segment.op(op).op, Op::Attention(_))
                && flow.saves[0] == Save::Recomputed
            {
                self.held.remove(&BufferKey::Statistic(place.instance, op));
            }
        }
    }

    /// Makes sure that all an op's backward pass reads is there.
    fn provide(&mut self, place: SegmentSite, op: OpId) {
        let node = place.plan.segment.op(op);
        let option = &place.plan.choice.ops[op.0 as usize];
        if backward_reads_input(&node.op) {
            self.provide_inputs(place, op);
        }
        if backward_reads_output(&node.op, option.choice.strategy) {
            for value in &node.outputs {
                self.provide_copy(place, *value, 0);
            }
        }
    }

    fn provide_inputs(&mut self, place: SegmentSite, op: OpId) {
        for (port, value) in place.plan.segment.op(op).inputs.iter().enumerate() {
            let layout = place.plan.choice.input_layout(op, port);
            let flow = &place.plan.choice.flows[value.0 as usize];
            self.provide_copy(place, *value, flow.copy_in(layout));
        }
    }

    /// Redoes a copy unless it is there.
    fn provide_copy(&mut self, place: SegmentSite, value: ValueId, copy: usize) {
        if self.held.contains_key(&BufferKey::Copy(place.instance, value, copy)) {
            return;
        }
        let segment = &place.plan.segment;
        if copy > 0 {
            self.provide_copy(place, value, 0);
            let flow = &place.plan.choice.flows[value.0 as usize];
            let templates = copy_recompute(segment.value(value), flow, copy, &self.plan.context);
            self.make_copy(place, value, copy, templates);
            return;
        }
        let Some(op) = segment.value(value).producer else { return };
        self.provide_inputs(place, op);
        self.alias_in_place(place, op);
        let choice = &place.plan.choice.ops[op.0 as usize].choice;
        let templates = op_recompute(segment, op, choice, &self.plan.context);
        self.push_op(place, op, templates);
    }

    /// Brings a value's gradient contributions to the layout its producer wants, and adds them.
    fn gather_gradient(&mut self, place: SegmentSite, value: ValueId) {
        let segment = &place.plan.segment;
        let node = segment.value(value);
        let flow = &place.plan.choice.flows[value.0 as usize];
        let origin = place.origin(&format!("d({})", node.name));
        let mut total: Option<BufferId> = None;
        for (index, path) in gradient_paths(node, flow, &self.plan.context).into_iter().enumerate()
        {
            let from = self.get(BufferKey::Gradient(place.instance, value, index));
            let mut to = from;
            let in_place = path.layout == crate::Layout::Partial
                && flow.producer.backward == crate::Layout::Replicated;
            if let Some(last) = path.reshard.last()
                && !in_place
            {
                to = self.value_buffer(&origin.to_string(), last.writes[0].extent, node);
            }
            self.push_reshard(path.reshard, &origin, (from, to), None);
            match (total, path.sum) {
                (Some(first), Some(sum)) => {
                    self.push_reshard(vec![sum], &origin, (to, first), None)
                }
                _ => total = Some(to),
            }
        }
        if let Some(total) = total {
            self.held.insert(BufferKey::Gradient(place.instance, value, 0), total);
        }
    }

    /// The gradient of a value in its producer's layout, after [`gather_gradient`].
    pub(super) fn output_gradient(&self, place: SegmentSite, value: ValueId) -> BufferId {
        self.get(BufferKey::Gradient(place.instance, value, 0))
    }

    /// Ops whose input's gradient is their output's gradient, unless others have contributed to it
    /// already: additions, and latents that pass through.
    fn alias_gradients(&mut self, place: SegmentSite, op: OpId) {
        let segment = &place.plan.segment;
        let node = segment.op(op);
        let passes = match &node.op {
            Op::Add { .. } | Op::Cross { .. } => true,
            Op::Latent(_) => {
                let choice = &place.plan.choice.ops[op.0 as usize].choice;
                op_backward(segment, op, choice, &self.plan.context).is_empty()
            }
            _ => false,
        };
        if passes {
            let gradient = self.output_gradient(place, node.outputs[0]);
            for (port, value) in node.inputs.iter().enumerate() {
                if !segment.accumulates(op, port) {
                    let group = self.gradient_group(place, op, port);
                    self.held.insert(BufferKey::Gradient(place.instance, *value, group), gradient);
                }
            }
        }
    }

    /// Which of the value's gradient layouts an op contributes to.
    fn gradient_group(&self, place: SegmentSite, op: OpId, port: usize) -> usize {
        let value = place.plan.segment.op(op).inputs[port];
        let flow = &place.plan.choice.flows[value.0 as usize];
        let layout = place.plan.choice.ops[op.0 as usize].choice.inputs[port].backward;
        flow.gradient_in(layout)
    }

    /// The buffer an op's contribution goes to; a sum that no last consumer wrote starts from zeros.
    pub(super) fn input_gradient(
        &mut self,
        place: SegmentSite,
        op: OpId,
        port: usize,
        operand: TemplateOperand,
    ) -> BufferId {
        let node = place.plan.segment.op(op);
        let value = node.inputs[port];
        let group = self.gradient_group(place, op, port);
        let held = BufferKey::Gradient(place.instance, value, group);
        if let Some(found) = self.held.get(&held) {
            return *found;
        }
        if matches!(node.op, Op::Loss { .. }) {
            // The gradient of the logits takes their place.
            let logits = self.input(place, op, port);
            self.held.insert(held, logits);
            return logits;
        }
        let origin = place.origin(&format!("d({})", place.plan.segment.value(value).name));
        let name = origin.to_string();
        let made = self.held_or_made(held, |lowering| {
            lowering.value_buffer(&name, operand.extent, place.plan.segment.value(value))
        });
        if group > 0 {
            let flow = &place.plan.choice.flows[value.0 as usize];
            let node = place.plan.segment.value(value);
            let fill = gradient_paths(node, flow, &self.plan.context)
                .into_iter()
                .nth(group)
                .and_then(|path| path.fill);
            self.push_reshard(fill.into_iter().collect(), &origin, (made, made), None);
        }
        made
    }
}
