//! One stage: its segments in order, the transfers to its neighbours, and the step phase.

use crate::decisions::{ResolvedPlan, SegmentPlan};
use crate::emit::{
    InstrTemplate, OperandSlot, StageBoundary, TemplateOperand, parameter_buffers, stage_transfers,
};
use crate::graph::{OpId, SegmentKind, ValueId};
use crate::program::{
    Action, BufferId, BufferRole, Extent, InstrOrigin, ParameterShard, Phase, StageProgram,
};
use crate::strategy::{OpParameters, owned_parameters};
use crate::{DType, Layout};

use super::stage_lowering::{BufferKey, SegmentInstance, SegmentSite, StageLowering};

/// Lowers one stage of a plan.
pub(super) fn lower_stage(plan: &ResolvedPlan, stage: usize) -> StageProgram {
    let virtual_stages: Vec<usize> =
        (stage..plan.stages.len()).step_by(plan.context.mesh.pipeline as usize).collect();
    let names: Vec<String> =
        virtual_stages.iter().flat_map(|stage| segment_names(plan, *stage)).collect();
    let sites = segment_sites(plan, &virtual_stages, &names);
    let mut lowering = StageLowering::new(plan, stage);
    lowering.add_stage_buffers(&sites);
    for site in &sites {
        lowering.add_parameters(*site);
    }
    lowering.share_tied_weight(&sites);
    for chunk in sites.chunk_by(|a, b| a.chunk == b.chunk) {
        lowering.chunk = chunk[0].chunk;
        lowering.forward(chunk);
        lowering.backward(chunk);
    }
    if plan.context.overlap_microbatch_pairs {
        lowering.pair_microbatches();
    }
    lowering.step(&sites);
    lowering.exact_step(&sites);
    lowering.finish()
}

fn segment_names(plan: &ResolvedPlan, virtual_stage: usize) -> Vec<String> {
    let mut names: Vec<String> = vec![];
    if virtual_stage == 0 {
        names.push("embedding".into());
    }
    names.extend(plan.stages[virtual_stage].iter().map(|block| format!("layer {}", block.layer)));
    if virtual_stage + 1 == plan.stages.len() {
        names.push("head".into());
    }
    names
}

/// The segments of the chunks of a stage, of which each is a virtual stage.
fn segment_sites<'a>(
    plan: &'a ResolvedPlan,
    virtual_stages: &[usize],
    names: &'a [String],
) -> Vec<SegmentSite<'a>> {
    let mut segments = vec![];
    for (chunk, virtual_stage) in virtual_stages.iter().enumerate() {
        if *virtual_stage == 0 {
            segments.push((chunk, None, &plan.embedding));
        }
        let blocks = plan.stages[*virtual_stage].iter();
        segments.extend(blocks.map(|block| (chunk, Some(block.layer), &*block.plan)));
        if virtual_stage + 1 == plan.stages.len() {
            segments.push((chunk, None, &plan.head));
        }
    }
    segments
        .into_iter()
        .zip(names)
        .enumerate()
        .map(|(index, ((chunk, block, plan), name))| SegmentSite {
            instance: index as SegmentInstance,
            chunk,
            block,
            name,
            plan,
        })
        .collect()
}

impl StageLowering<'_> {
    fn add_stage_buffers(&mut self, sites: &[SegmentSite]) {
        let scalar = Extent::flat(1, DType::F32);
        self.add_bound_buffer(
            BufferKey::Shared(OperandSlot::SquareSum),
            "square sum",
            scalar,
            BufferRole::SquareSum,
            None,
        );
        for site in sites {
            let segment = &site.plan.segment;
            // Embedding and loss read the token ids of their rows on this device.
            let rows = |layout: Layout| Extent {
                rows: self.plan.context.rows(layout),
                columns: 1,
                dtype: DType::U32,
            };
            match segment.kind {
                SegmentKind::Embedding => {
                    let layout = site.plan.choice.ops[0].choice.outputs[0].forward;
                    let extent = rows(layout);
                    self.add_bound_buffer(
                        BufferKey::Shared(OperandSlot::Tokens),
                        "tokens",
                        extent,
                        BufferRole::Tokens,
                        None,
                    );
                }
                SegmentKind::Head => {
                    let loss = segment.ops.len() - 1;
                    let layout = site.plan.choice.ops[loss].choice.inputs[0].forward;
                    let extent = rows(layout);
                    let targets = BufferKey::Shared(OperandSlot::Targets);
                    self.add_bound_buffer(targets, "targets", extent, BufferRole::Targets, None);
                    let loss = BufferKey::Shared(OperandSlot::Loss);
                    self.add_bound_buffer(loss, "loss", scalar, BufferRole::Loss, None);
                }
                SegmentKind::Block => {}
            }
        }
    }

    /// The parameters that an op owns; `None` for ops without any.
    pub(super) fn parameters(&self, site: SegmentSite, op: OpId) -> Option<OpParameters> {
        let SegmentPlan { segment, choice } = site.plan;
        let strategy = choice.ops[op.0 as usize].choice.strategy;
        owned_parameters(segment, op, strategy, self.plan.tied, &self.plan.context)
    }

    /// The shard of an op's parameters in each of their buffers.
    pub(super) fn parameter_shard(
        &self,
        site: SegmentSite,
        parameters: &OpParameters,
    ) -> ParameterShard {
        let OpParameters { members, split, .. } = parameters;
        let devices = self.plan.context.tensor_size();
        ParameterShard::new(site.block, members.clone(), *split, devices)
    }

    fn add_parameters(&mut self, site: SegmentSite) {
        let context = self.plan.context;
        let segment = &site.plan.segment;
        for op in segment.op_ids() {
            let Some(parameter) = self.parameters(site, op) else { continue };
            let shard = self.parameter_shard(site, &parameter);
            for TemplateOperand { slot, extent } in parameter_buffers(&parameter, &context) {
                let (kind, role) = match slot {
                    OperandSlot::Weight(_) => ("weight", BufferRole::Weight),
                    OperandSlot::WeightGradient(_) => ("gradient", BufferRole::WeightGradient),
                    OperandSlot::FirstMoment(_) => ("first moment", BufferRole::FirstMoment),
                    OperandSlot::SecondMoment(_) => ("second moment", BufferRole::SecondMoment),
                    OperandSlot::Master(_) => ("master", BufferRole::MasterWeight),
                    slot => unreachable!("a parameter has no {slot:?}"),
                };
                let name = format!("{} {} {kind}", site.name, segment.op(op).name);
                let key = BufferKey::Parameter(site.instance, op, slot);
                self.add_bound_buffer(key, &name, extent, role, Some(shard.clone()));
            }
        }
    }

    /// Binds the weight and gradient of a tied embedding to the head's buffers, where one stage has both.
    fn share_tied_weight(&mut self, sites: &[SegmentSite]) {
        if !self.plan.tied || self.plan.context.mesh.pipeline > 1 {
            return;
        }
        let find = |kind: SegmentKind| {
            let site = sites.iter().find(|site| site.plan.segment.kind == kind)?;
            Some((site.instance, site.plan.segment.vocabulary_op()?))
        };
        let (embedding, head) = (find(SegmentKind::Embedding), find(SegmentKind::Head));
        if let (Some((to, embedding)), Some((from, head))) = (embedding, head) {
            for slot in [OperandSlot::Weight(0), OperandSlot::WeightGradient(0)] {
                let shared = self.buffer_of(BufferKey::Parameter(from, head, slot));
                self.buffers.insert(BufferKey::Parameter(to, embedding, slot), shared);
            }
        }
    }

    /// The virtual stage of the current chunk.
    fn virtual_stage(&self) -> usize {
        self.plan.context.virtual_stage(self.stage, self.chunk)
    }

    /// The transfers of one microbatch through the current chunk: (forward pass, backward pass).
    fn p2p_transfers(&self) -> (Vec<InstrTemplate>, Vec<InstrTemplate>) {
        let (layout, stage) = (self.plan.boundary, self.virtual_stage());
        let boundary =
            |stage: usize| StageBoundary { tensors: self.plan.boundary_tensors(stage), layout };
        let (before, after) = (boundary(stage.wrapping_sub(1)), boundary(stage));
        stage_transfers(&before, &after, stage, &self.plan.context)
    }

    /// Receives into new buffers, one for each transferred tensor.
    fn push_receive(&mut self, transfer: InstrTemplate, suffix: &str) -> Vec<BufferId> {
        let Action::Receive(p2p) = &transfer.action else { return vec![] };
        let buffers: Vec<BufferId> = p2p
            .tensors
            .iter()
            .zip(&transfer.writes)
            .map(|(tensor, operand)| {
                let name = format!("received {}{suffix}", tensor.name());
                self.add_buffer(&name, operand.extent, BufferRole::Activation)
            })
            .collect();
        self.push_transfer(transfer, format!("receive{suffix}").as_str(), &buffers);
        buffers
    }

    fn push_transfer(&mut self, transfer: InstrTemplate, origin: &str, buffers: &[BufferId]) {
        self.push(transfer, &InstrOrigin::from(origin), |_, operand| match operand.slot {
            OperandSlot::BoundaryTensor(index) => buffers[index as usize],
            slot => unreachable!("a transfer template has no slot {slot:?}"),
        });
    }

    fn forward(&mut self, sites: &[SegmentSite]) {
        self.phase = Phase::Forward;
        let mut transfers = self.p2p_transfers().0.into_iter();
        if self.virtual_stage() > 0
            && let Some(receive) = transfers.next()
        {
            let buffers = self.push_receive(receive, "");
            self.bind_inputs(sites[0], &buffers);
        }
        self.gather_first_weights(&sites[0]);
        for (index, site) in sites.iter().enumerate() {
            let begin = self.instructions().len();
            self.forward_begins.insert(site.instance, begin);
            let collectives = self.begin_forward(*site, sites.get(index + 1));
            self.forward_segment(*site);
            self.overlap(collectives);
            let outputs: Vec<BufferId> = site
                .plan
                .segment
                .outputs
                .iter()
                .map(|output| self.output_buffer(*site, *output))
                .collect();
            match sites.get(index + 1) {
                Some(next) => self.bind_inputs(*next, &outputs),
                None => {
                    if let Some(send) = transfers.next() {
                        self.push_transfer(send, "send", &outputs);
                    }
                }
            }
        }
    }

    /// Binds the inputs of a segment to the outputs of the previous one.
    fn bind_inputs(&mut self, site: SegmentSite, buffers: &[BufferId]) {
        for (input, buffer) in site.plan.segment.inputs.iter().zip(buffers) {
            self.buffers.insert(BufferKey::ValueCopy(site.instance, *input, 0), *buffer);
        }
    }

    /// The copy of an output that the next segment reads.
    fn output_buffer(&self, site: SegmentSite, output: ValueId) -> BufferId {
        let flow = &site.plan.choice.flows[output.0 as usize];
        self.buffer_of(BufferKey::ValueCopy(
            site.instance,
            output,
            flow.copy_in(flow.primary.forward),
        ))
    }

    fn backward(&mut self, sites: &[SegmentSite]) {
        self.phase = Phase::Backward;
        let mut transfers = self.p2p_transfers().1.into_iter();
        let last = sites[sites.len() - 1];
        if !last.plan.segment.outputs.is_empty()
            && let Some(receive) = transfers.next()
        {
            let buffers = self.push_receive(receive, " gradient");
            self.bind_output_gradients(last, &buffers);
        }
        self.gather_first_weights(&last);
        for (index, site) in sites.iter().enumerate().rev() {
            let previous = index.checked_sub(1).map(|previous| &sites[previous]);
            let collectives = self.begin_backward(*site, previous, sites.get(index + 1));
            self.backward_segment(*site);
            self.overlap(collectives);
            self.end_backward(*site, sites.get(index + 1));
            let gradients: Vec<BufferId> = site
                .plan
                .segment
                .inputs
                .iter()
                .map(|input| self.buffer_of(BufferKey::Gradient(site.instance, *input, 0)))
                .collect();
            match index.checked_sub(1) {
                Some(previous) => self.bind_output_gradients(sites[previous], &gradients),
                None => {
                    if let Some(send) = transfers.next() {
                        self.push_transfer(send, "send gradient", &gradients);
                    }
                }
            }
        }
        self.reduce_last_gradients(&sites[0]);
    }

    /// Binds the gradients of a segment's outputs, whose first contributions the next segment computed.
    fn bind_output_gradients(&mut self, site: SegmentSite, gradients: &[BufferId]) {
        for (output, gradient) in site.plan.segment.outputs.iter().zip(gradients) {
            self.buffers.insert(BufferKey::Gradient(site.instance, *output, 0), *gradient);
        }
    }
}
