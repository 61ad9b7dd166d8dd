//! The forward pass of a segment: the templates of each op, then the copies of its outputs.

use rustc_hash::FxHashMap;

use crate::decisions::SegmentPlan;
use crate::emit::{
    InstrTemplate, OperandSlot, ResidualSum, TemplateOperand, copy_forward, op_forward,
};
use crate::graph::{Op, OpId, ValueId};
use crate::program::{BufferId, BufferRole};

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

impl StageLowering<'_> {
    /// Emits the forward passes of all ops. The inputs of the segment are bound already.
    pub(super) fn forward_segment(&mut self, site: SegmentSite) {
        let segment = &site.plan.segment;
        for input in &segment.inputs {
            self.forward_copies(site, *input);
        }
        for op in segment.op_ids() {
            self.alias_in_place(site, op);
            let choice = &site.plan.choice.ops[op.0 as usize].choice;
            match residual_sum(site, op) {
                Some(sum) if sum.linear == op => self.push_residual_sum(site, sum),
                Some(_) => {}
                None => {
                    let templates = op_forward(segment, op, choice, &self.plan.context);
                    self.push_op(site, op, templates);
                }
            }
            for value in &segment.op(op).outputs {
                self.forward_copies(site, *value);
            }
        }
    }

    /// Emits the GEMM of a linear that computes a residual sum. The product has the buffer of the sum.
    pub(super) fn push_residual_sum(&mut self, site: SegmentSite, sum: ResidualSum) {
        let SegmentPlan { segment, choice } = site.plan;
        let choice = &choice.ops[sum.linear.0 as usize].choice;
        let template = sum.gemm(segment, choice, &self.plan.context);
        let value = segment.op(sum.add).outputs[0];
        let key = BufferKey::ValueCopy(site.instance, value, 0);
        let name = format!("{} {}", site.name, segment.value(value).name);
        let extent = template.writes[0].extent;
        let buffer = self.bind_or_create(key, |lowering| {
            lowering.add_value_buffer(&name, extent, segment.value(value))
        });
        let product = segment.op(sum.linear).outputs[0];
        self.buffers.insert(BufferKey::ValueCopy(site.instance, product, 0), buffer);
        self.push_op(site, sum.linear, vec![template]);
    }

    /// Binds the outputs of an op that works in place to the buffer of its input.
    pub(super) fn alias_in_place(&mut self, site: SegmentSite, op: OpId) {
        let segment = &site.plan.segment;
        for output in &segment.op(op).outputs {
            if segment.value(*output).aliases.is_some() {
                let source = self.input(site, op, 0);
                self.buffers.insert(BufferKey::ValueCopy(site.instance, *output, 0), source);
            }
        }
    }

    pub(super) fn forward_copies(&mut self, site: SegmentSite, value: ValueId) {
        let node = site.plan.segment.value(value);
        let flow = &site.plan.choice.flows[value.0 as usize];
        for copy in 1..flow.copies().len() {
            let templates = copy_forward(node, flow, copy, &self.plan.context);
            self.add_copy(site, value, copy, templates);
        }
    }

    /// Adds a copy of a value, which these templates compute from the producer's copy.
    pub(super) fn add_copy(
        &mut self,
        site: SegmentSite,
        value: ValueId,
        copy: usize,
        templates: Vec<InstrTemplate>,
    ) {
        let node = site.plan.segment.value(value);
        let flow = &site.plan.choice.flows[value.0 as usize];
        let from = self.buffer_of(BufferKey::ValueCopy(site.instance, value, 0));
        let to = if flow.in_place(copy) {
            from
        } else {
            let last = templates.last().and_then(|t| t.writes.first());
            let extent = last
                .map(|operand| operand.extent)
                .unwrap_or_else(|| self.program.buffer(from).extent);
            let name = format!("{} {}@{}", site.name, node.name, flow.copies()[copy]);
            self.add_value_buffer(&name, extent, node)
        };
        let statistic = node
            .carries_statistic_of
            .and_then(|norm| self.buffers.get(&BufferKey::Statistic(site.instance, norm)).copied());
        let origin = site.origin(&node.name);
        self.push_reshard(templates, &origin, (from, to), statistic);
        self.buffers.insert(BufferKey::ValueCopy(site.instance, value, copy), to);
    }

    /// The buffer that an op reads at an input port.
    pub(super) fn input(&self, site: SegmentSite, op: OpId, port: usize) -> BufferId {
        let value = site.plan.segment.op(op).inputs[port];
        let layout = site.plan.choice.input_layout(op, port);
        let flow = &site.plan.choice.flows[value.0 as usize];
        self.buffer_of(BufferKey::ValueCopy(site.instance, value, flow.copy_in(layout)))
    }

    /// Emits the templates of an op with every slot bound to a buffer, new ones for new operands.
    pub(super) fn push_op(&mut self, site: SegmentSite, op: OpId, templates: Vec<InstrTemplate>) {
        let node = site.plan.segment.op(op);
        let origin = site.origin(&node.name);
        let mut temporaries: FxHashMap<u8, BufferId> = FxHashMap::default();
        for template in templates {
            self.push(template, &origin, |lowering, operand| match operand.slot {
                OperandSlot::Temporary(n) => *temporaries.entry(n).or_insert_with(|| {
                    lowering.add_buffer(
                        &format!("{origin} partial"),
                        operand.extent,
                        BufferRole::Activation,
                    )
                }),
                _ => lowering.bind(site, op, operand),
            });
        }
    }

    fn bind(&mut self, site: SegmentSite, op: OpId, operand: TemplateOperand) -> BufferId {
        let segment = &site.plan.segment;
        let node = segment.op(op);
        let instance = site.instance;
        match operand.slot {
            OperandSlot::Input(port) => self.input(site, op, port as usize),
            OperandSlot::Output(port) => {
                let value = node.outputs[port as usize];
                let key = BufferKey::ValueCopy(instance, value, 0);
                self.bind_or_create(key, |lowering| {
                    let name = format!("{} {}", site.name, segment.value(value).name);
                    lowering.add_value_buffer(&name, operand.extent, segment.value(value))
                })
            }
            OperandSlot::Residual => match residual_sum(site, op) {
                Some(sum) => self.input(site, sum.add, sum.residual_port),
                None => unreachable!("only the GEMM of a residual sum reads a residual"),
            },
            OperandSlot::OutputGradient(port) => {
                self.output_gradient(site, node.outputs[port as usize])
            }
            OperandSlot::InputGradient(port) => {
                self.input_gradient(site, op, port as usize, operand)
            }
            OperandSlot::Statistic => {
                let name = || format!("{} {} statistic", site.name, node.name);
                self.bind_or_add(BufferKey::Statistic(instance, op), name, operand)
            }
            OperandSlot::NormStatistic => {
                self.buffer_of(BufferKey::Statistic(instance, norm_of(&node.op, op)))
            }
            OperandSlot::NormStatisticGradient => {
                let key = BufferKey::StatisticGradient(instance, norm_of(&node.op, op));
                let name = || format!("{} {} statistic gradient", site.name, node.name);
                self.bind_or_add(key, name, operand)
            }
            OperandSlot::Tokens
            | OperandSlot::Targets
            | OperandSlot::Loss
            | OperandSlot::SquareSum => self.buffer_of(BufferKey::Shared(operand.slot)),
            slot => self.parameter_in_pass(site, op, slot),
        }
    }

    pub(super) fn bind_or_add(
        &mut self,
        key: BufferKey,
        name: impl FnOnce() -> String,
        operand: TemplateOperand,
    ) -> BufferId {
        self.bind_or_create(key, |lowering| {
            lowering.add_buffer(&name(), operand.extent, BufferRole::Activation)
        })
    }

    pub(super) fn bind_or_create(
        &mut self,
        key: BufferKey,
        create: impl FnOnce(&mut Self) -> BufferId,
    ) -> BufferId {
        if let Some(buffer) = self.buffers.get(&key) {
            return *buffer;
        }
        let buffer = create(self);
        self.buffers.insert(key, buffer);
        buffer
    }
}

/// The residual sum in a GEMM that a linear or an addition takes part in.
pub(super) fn residual_sum(site: SegmentSite, op: OpId) -> Option<ResidualSum> {
    let SegmentPlan { segment, choice } = site.plan;
    let of = |value: &ValueId| ResidualSum::of(segment, *value, &choice.flows[value.0 as usize]);
    let node = segment.op(op);
    match node.op {
        Op::Linear(_) => node.outputs.iter().find_map(of),
        Op::Add { .. } => node.inputs.iter().find_map(of),
        _ => None,
    }
}

/// The norm of a latent; for other ops, the op itself.
fn norm_of(op: &Op, id: OpId) -> OpId {
    match op {
        Op::Latent(latent) => latent.norm.unwrap_or(id),
        _ => id,
    }
}
