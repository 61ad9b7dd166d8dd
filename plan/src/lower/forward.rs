//! The forward pass of a segment: ops, then the copies of their outputs.

use std::collections::HashMap;

use crate::emit::{InstrTemplate, OperandSlot, TemplateOperand, copy_forward, op_forward};
use crate::graph::{Op, OpId, ValueId};
use crate::program::{BufferId, BufferRole};

use super::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    /// Runs every op of the segment; what enters it is already held.
    pub(super) fn forward_segment(&mut self, place: SegmentSite) {
        let segment = &place.plan.segment;
        for entry in &segment.inputs {
            self.forward_copies(place, *entry);
        }
        for op in segment.op_ids() {
            self.alias_in_place(place, op);
            let choice = &place.plan.choice.ops[op.0 as usize].choice;
            let templates = op_forward(segment, op, choice, &self.plan.context);
            self.push_op(place, op, templates);
            for value in &segment.op(op).outputs {
                self.forward_copies(place, *value);
            }
        }
    }

    /// A value whose producer works in place takes its input's buffer.
    pub(super) fn alias_in_place(&mut self, place: SegmentSite, op: OpId) {
        let segment = &place.plan.segment;
        for output in &segment.op(op).outputs {
            if segment.value(*output).aliases.is_some() {
                let source = self.input(place, op, 0);
                self.held.insert(BufferKey::Copy(place.instance, *output, 0), source);
            }
        }
    }

    pub(super) fn forward_copies(&mut self, place: SegmentSite, value: ValueId) {
        let node = place.plan.segment.value(value);
        let flow = &place.plan.choice.flows[value.0 as usize];
        for copy in 1..flow.copies().len() {
            let templates = copy_forward(node, flow, copy, &self.plan.context);
            self.make_copy(place, value, copy, templates);
        }
    }

    /// Makes one copy of a value from the producer's with the given reshard.
    pub(super) fn make_copy(
        &mut self,
        place: SegmentSite,
        value: ValueId,
        copy: usize,
        templates: Vec<InstrTemplate>,
    ) {
        let node = place.plan.segment.value(value);
        let flow = &place.plan.choice.flows[value.0 as usize];
        let from = self.get(BufferKey::Copy(place.instance, value, 0));
        let to = if flow.in_place(copy) {
            from
        } else {
            let last = templates.last().and_then(|t| t.writes.first());
            let extent = last
                .map(|operand| operand.extent)
                .unwrap_or_else(|| self.program.buffer(from).extent);
            let name = format!("{} {}@{}", place.name, node.name, flow.copies()[copy]);
            self.value_buffer(&name, extent, node)
        };
        let statistic = node
            .carries_statistic_of
            .and_then(|norm| self.held.get(&BufferKey::Statistic(place.instance, norm)).copied());
        let origin = place.origin(&node.name);
        self.push_reshard(templates, &origin, (from, to), statistic);
        self.held.insert(BufferKey::Copy(place.instance, value, copy), to);
    }

    /// The buffer an op reads at an input port.
    pub(super) fn input(&self, place: SegmentSite, op: OpId, port: usize) -> BufferId {
        let value = place.plan.segment.op(op).inputs[port];
        let layout = place.plan.choice.input_layout(op, port);
        let flow = &place.plan.choice.flows[value.0 as usize];
        self.get(BufferKey::Copy(place.instance, value, flow.copy_in(layout)))
    }

    /// Emits an op's templates with every slot bound to what is held, making what is new.
    pub(super) fn push_op(&mut self, place: SegmentSite, op: OpId, templates: Vec<InstrTemplate>) {
        let node = place.plan.segment.op(op);
        let origin = place.origin(&node.name);
        let mut temporaries: HashMap<u8, BufferId> = HashMap::new();
        for template in templates {
            self.push(template, &origin, |lowering, operand| match operand.slot {
                OperandSlot::Temporary(n) => *temporaries.entry(n).or_insert_with(|| {
                    lowering.buffer(
                        &format!("{origin} partial"),
                        operand.extent,
                        BufferRole::Activation,
                    )
                }),
                _ => lowering.bind(place, op, operand),
            });
        }
    }

    fn bind(&mut self, place: SegmentSite, op: OpId, operand: TemplateOperand) -> BufferId {
        let segment = &place.plan.segment;
        let node = segment.op(op);
        let instance = place.instance;
        match operand.slot {
            OperandSlot::Input(port) => self.input(place, op, port as usize),
            OperandSlot::Output(port) => {
                let value = node.outputs[port as usize];
                let name = format!("{} {}", place.name, segment.value(value).name);
                let held = BufferKey::Copy(instance, value, 0);
                self.held_or_made(held, |lowering| {
                    lowering.value_buffer(&name, operand.extent, segment.value(value))
                })
            }
            OperandSlot::OutputGradient(port) => {
                self.output_gradient(place, node.outputs[port as usize])
            }
            OperandSlot::InputGradient(port) => {
                self.input_gradient(place, op, port as usize, operand)
            }
            OperandSlot::Statistic => {
                let name = format!("{} {} statistic", place.name, node.name);
                self.held_or_new(BufferKey::Statistic(instance, op), &name, operand)
            }
            OperandSlot::NormStatistic => {
                self.get(BufferKey::Statistic(instance, norm_of(&node.op, op)))
            }
            OperandSlot::NormStatisticGradient => {
                let held = BufferKey::StatisticGradient(instance, norm_of(&node.op, op));
                let name = format!("{} {} statistic gradient", place.name, node.name);
                self.held_or_new(held, &name, operand)
            }
            OperandSlot::Tokens
            | OperandSlot::Targets
            | OperandSlot::Loss
            | OperandSlot::SquareSum => self.get(BufferKey::Shared(operand.slot)),
            slot => self.get(BufferKey::Parameter(instance, op, slot)),
        }
    }

    pub(super) fn held_or_new(
        &mut self,
        held: BufferKey,
        name: &str,
        operand: TemplateOperand,
    ) -> BufferId {
        self.held_or_made(held, |lowering| {
            lowering.buffer(name, operand.extent, BufferRole::Activation)
        })
    }

    pub(super) fn held_or_made(
        &mut self,
        held: BufferKey,
        make: impl FnOnce(&mut Self) -> BufferId,
    ) -> BufferId {
        if let Some(found) = self.held.get(&held) {
            return *found;
        }
        let made = make(self);
        self.held.insert(held, made);
        made
    }
}

/// The norm a latent divides by; a norm is its own.
fn norm_of(op: &Op, id: OpId) -> OpId {
    match op {
        Op::Latent(latent) => latent.norm.unwrap_or(id),
        _ => id,
    }
}
