//! One stage: its segments in order, the transfers to its neighbours, and the step phase.

use crate::decisions::ResolvedPlan;
use crate::emit::{
    InstrTemplate, OperandSlot, StageBoundary, TemplateOperand, parameter_buffers, stage_transfers,
};
use crate::graph::{SegmentKind, ValueId};
use crate::program::{
    Action, BufferId, BufferRole, Extent, InstrOrigin, ParameterShard, Phase, StageProgram,
};
use crate::strategy::owned_parameters;
use crate::{DType, Layout};

use super::{BufferKey, SegmentInstance, SegmentSite, StageLowering};

/// Lowers one stage of a plan.
pub fn lower_stage(plan: &ResolvedPlan, stage: usize) -> StageProgram {
    let names: Vec<String> = names(plan, stage);
    let places = places(plan, stage, &names);
    let mut lowering = StageLowering::new(plan, stage);
    lowering.inputs(&places);
    for place in &places {
        lowering.parameters(*place);
    }
    lowering.share_tied_weight(&places);
    lowering.forward(&places);
    lowering.backward(&places);
    lowering.step(&places);
    lowering.finish()
}

fn names(plan: &ResolvedPlan, stage: usize) -> Vec<String> {
    let mut names: Vec<String> = vec![];
    if stage == 0 {
        names.push("embedding".into());
    }
    names.extend(plan.stages[stage].iter().map(|block| format!("layer {}", block.layer)));
    if stage + 1 == plan.stages.len() {
        names.push("head".into());
    }
    names
}

fn places<'a>(plan: &'a ResolvedPlan, stage: usize, names: &'a [String]) -> Vec<SegmentSite<'a>> {
    let mut segments = vec![];
    if stage == 0 {
        segments.push((None, &plan.embedding));
    }
    segments.extend(plan.stages[stage].iter().map(|block| (Some(block.layer), &*block.plan)));
    if stage + 1 == plan.stages.len() {
        segments.push((None, &plan.head));
    }
    segments
        .into_iter()
        .zip(names)
        .enumerate()
        .map(|(index, ((block, plan), name))| SegmentSite {
            instance: index as SegmentInstance,
            block,
            name,
            plan,
        })
        .collect()
}

impl StageLowering<'_> {
    fn inputs(&mut self, places: &[SegmentSite]) {
        let number = Extent::flat(1, DType::F32);
        self.resident(
            BufferKey::Shared(OperandSlot::SquareSum),
            "square sum",
            number,
            BufferRole::SquareSum,
            None,
        );
        for place in places {
            let segment = &place.plan.segment;
            // Embedding and loss see the tokens of this device's rows.
            let rows = |layout: Layout| Extent {
                rows: self.plan.context.rows(layout),
                columns: 1,
                dtype: DType::U32,
            };
            match segment.kind {
                SegmentKind::Embedding => {
                    let layout = place.plan.choice.ops[0].choice.outputs[0].forward;
                    let extent = rows(layout);
                    self.resident(
                        BufferKey::Shared(OperandSlot::Tokens),
                        "tokens",
                        extent,
                        BufferRole::Tokens,
                        None,
                    );
                }
                SegmentKind::Head => {
                    let loss = segment.ops.len() - 1;
                    let layout = place.plan.choice.ops[loss].choice.inputs[0].forward;
                    let extent = rows(layout);
                    let targets = BufferKey::Shared(OperandSlot::Targets);
                    self.resident(targets, "targets", extent, BufferRole::Targets, None);
                    let loss = BufferKey::Shared(OperandSlot::Loss);
                    self.resident(loss, "loss", number, BufferRole::Loss, None);
                }
                SegmentKind::Block => {}
            }
        }
    }

    fn parameters(&mut self, place: SegmentSite) {
        let context = self.plan.context;
        let segment = &place.plan.segment;
        for op in segment.op_ids() {
            let strategy = place.plan.choice.ops[op.0 as usize].choice.strategy;
            let Some(parameter) = owned_parameters(segment, op, strategy, self.plan.tied, &context)
            else {
                continue;
            };
            let shard = ParameterShard::of(place.block, &parameter, &context);
            for TemplateOperand { slot, extent } in parameter_buffers(&parameter, &context) {
                let (kind, role) = match slot {
                    OperandSlot::Weight(_) => ("weight", BufferRole::Weight),
                    OperandSlot::WeightGradient(_) => ("gradient", BufferRole::WeightGradient),
                    OperandSlot::FirstMoment(_) => ("first moment", BufferRole::FirstMoment),
                    OperandSlot::SecondMoment(_) => ("second moment", BufferRole::SecondMoment),
                    _ => ("master", BufferRole::MasterWeight),
                };
                let name = format!("{} {} {kind}", place.name, segment.op(op).name);
                let held = BufferKey::Parameter(place.instance, op, slot);
                self.resident(held, &name, extent, role, Some(shard.clone()));
            }
        }
    }

    /// A tied embedding on the head's stage reads and accumulates into the head's buffers.
    fn share_tied_weight(&mut self, places: &[SegmentSite]) {
        if !self.plan.tied || self.plan.stages.len() > 1 {
            return;
        }
        let find = |kind: SegmentKind| {
            let place = places.iter().find(|place| place.plan.segment.kind == kind)?;
            Some((place.instance, place.plan.segment.vocabulary_op()?))
        };
        let (embedding, head) = (find(SegmentKind::Embedding), find(SegmentKind::Head));
        if let (Some((to, embedding)), Some((from, head))) = (embedding, head) {
            for slot in [OperandSlot::Weight(0), OperandSlot::WeightGradient(0)] {
                let shared = self.get(BufferKey::Parameter(from, head, slot));
                self.held.insert(BufferKey::Parameter(to, embedding, slot), shared);
            }
        }
    }

    /// The transfers of this stage: (forward pass, backward pass).
    fn hops(&self) -> (Vec<InstrTemplate>, Vec<InstrTemplate>) {
        let (border, stage) = (self.plan.boundary, self.stage as u64);
        let before = StageBoundary {
            tensors: self.plan.boundary_tensors(self.stage.wrapping_sub(1)),
            layout: border,
        };
        let after =
            StageBoundary { tensors: self.plan.boundary_tensors(self.stage), layout: border };
        stage_transfers(&before, &after, stage, &self.plan.context)
    }

    /// Receives into new buffers, one for each tensor carried.
    fn receive(&mut self, hop: InstrTemplate, what: &str) -> Vec<BufferId> {
        let Action::Receive(transfer) = &hop.action else { return vec![] };
        let buffers: Vec<BufferId> = transfer
            .carries
            .iter()
            .zip(&hop.writes)
            .map(|(tensor, operand)| {
                let name = format!("received {}{what}", tensor.name());
                self.buffer(&name, operand.extent, BufferRole::Activation)
            })
            .collect();
        self.push_hop(hop, format!("receive{what}").as_str(), &buffers);
        buffers
    }

    fn push_hop(&mut self, hop: InstrTemplate, origin: &str, buffers: &[BufferId]) {
        self.push(hop, &InstrOrigin::from(origin), |_, operand| match operand.slot {
            OperandSlot::Carried(at) => buffers[at as usize],
            slot => unreachable!("a transfer has no {slot:?}"),
        });
    }

    fn forward(&mut self, places: &[SegmentSite]) {
        self.phase = Phase::Forward;
        let mut hops = self.hops().0.into_iter();
        if self.stage > 0
            && let Some(receive) = hops.next()
        {
            let buffers = self.receive(receive, "");
            self.enter(places[0], &buffers);
        }
        for (index, place) in places.iter().enumerate() {
            self.forward_segment(*place);
            let leaving: Vec<BufferId> =
                place.plan.segment.outputs.iter().map(|exit| self.leaving(*place, *exit)).collect();
            match places.get(index + 1) {
                Some(next) => self.enter(*next, &leaving),
                None => {
                    if let Some(send) = hops.next() {
                        self.push_hop(send, "send", &leaving);
                    }
                }
            }
        }
    }

    /// What the segment before left is what enters this one.
    fn enter(&mut self, place: SegmentSite, buffers: &[BufferId]) {
        for (entry, buffer) in place.plan.segment.inputs.iter().zip(buffers) {
            self.held.insert(BufferKey::Copy(place.instance, *entry, 0), *buffer);
        }
    }

    /// The copy of a value that the segment after reads.
    fn leaving(&self, place: SegmentSite, exit: ValueId) -> BufferId {
        let flow = &place.plan.choice.flows[exit.0 as usize];
        self.get(BufferKey::Copy(place.instance, exit, flow.copy_in(flow.primary.forward)))
    }

    fn backward(&mut self, places: &[SegmentSite]) {
        self.phase = Phase::Backward;
        let mut hops = self.hops().1.into_iter();
        let last = places[places.len() - 1];
        if !last.plan.segment.outputs.is_empty()
            && let Some(receive) = hops.next()
        {
            let buffers = self.receive(receive, " gradient");
            self.leave(last, &buffers);
        }
        for (index, place) in places.iter().enumerate().rev() {
            self.backward_segment(*place);
            let entering: Vec<BufferId> = place
                .plan
                .segment
                .inputs
                .iter()
                .map(|entry| self.get(BufferKey::Gradient(place.instance, *entry, 0)))
                .collect();
            match index.checked_sub(1) {
                Some(before) => self.leave(places[before], &entering),
                None => {
                    if let Some(send) = hops.next() {
                        self.push_hop(send, "send gradient", &entering);
                    }
                }
            }
        }
    }

    /// The gradients that the segment after made are the first contributions to this one's exits.
    fn leave(&mut self, place: SegmentSite, gradients: &[BufferId]) {
        for (exit, gradient) in place.plan.segment.outputs.iter().zip(gradients) {
            self.held.insert(BufferKey::Gradient(place.instance, *exit, 0), *gradient);
        }
    }
}
