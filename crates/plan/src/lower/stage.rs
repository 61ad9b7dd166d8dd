//! One stage: its segments in order, the transfers to its neighbours, and the step phase.

use crate::decisions::ResolvedPlan;
use crate::emit::{Slot, hops, parameter_extents};
use crate::graph::SegmentKind;
use crate::program::{Extent, Phase, Region, Shard, StageProgram};
use crate::strategy::owned_parameters;
use crate::{DType, Layout};

use super::{Held, Instance, Lowering, Place};

/// Lowers one stage of a plan.
pub fn lower_stage(plan: &ResolvedPlan, stage: usize) -> StageProgram {
    let names: Vec<String> = names(plan, stage);
    let places = places(plan, stage, &names);
    let mut lowering = Lowering::new(plan, stage);
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

fn places<'a>(plan: &'a ResolvedPlan, stage: usize, names: &'a [String]) -> Vec<Place<'a>> {
    let mut segments = vec![];
    if stage == 0 {
        segments.push(&plan.embedding);
    }
    segments.extend(plan.stages[stage].iter().map(|block| &*block.plan));
    if stage + 1 == plan.stages.len() {
        segments.push(&plan.head);
    }
    segments
        .into_iter()
        .zip(names)
        .enumerate()
        .map(|(index, (plan, name))| Place { instance: index as Instance, name, plan })
        .collect()
}

impl Lowering<'_> {
    fn inputs(&mut self, places: &[Place]) {
        let number = Extent::flat(1, DType::F32);
        self.resident(Held::Shared(Slot::SquareSum), "square sum", number, Region::Input, None);
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
                        Held::Shared(Slot::Tokens),
                        "tokens",
                        extent,
                        Region::Input,
                        None,
                    );
                }
                SegmentKind::Head => {
                    let loss = segment.ops.len() - 1;
                    let layout = place.plan.choice.ops[loss].choice.inputs[0].forward;
                    let extent = rows(layout);
                    let targets = Held::Shared(Slot::Targets);
                    self.resident(targets, "targets", extent, Region::Input, None);
                    let loss = Held::Shared(Slot::Loss);
                    self.resident(loss, "loss", number, Region::Input, None);
                }
                SegmentKind::Block => {}
            }
        }
    }

    fn parameters(&mut self, place: Place) {
        let context = self.plan.context;
        let segment = &place.plan.segment;
        for op in segment.op_ids() {
            let strategy = place.plan.choice.ops[op.0 as usize].choice.strategy;
            let Some(parameter) = owned_parameters(segment, op, strategy, self.plan.tied, &context)
            else {
                continue;
            };
            let shard = Shard::of(&parameter, &context);
            for (slot, extent) in parameter_extents(&parameter, &context) {
                let (kind, region) = match slot {
                    Slot::Weight(_) => ("weight", Region::Weight),
                    Slot::WeightGradient(_) => ("gradient", Region::Gradient),
                    Slot::FirstMoment(_) => ("first moment", Region::Optimizer),
                    Slot::SecondMoment(_) => ("second moment", Region::Optimizer),
                    _ => ("master", Region::Optimizer),
                };
                let name = format!("{} {} {kind}", place.name, segment.op(op).name);
                let held = Held::Parameter(place.instance, op, slot);
                self.resident(held, &name, extent, region, Some(shard.clone()));
            }
        }
    }

    /// A tied embedding on the head's stage reads and accumulates into the head's buffers.
    fn share_tied_weight(&mut self, places: &[Place]) {
        if !self.plan.tied || self.plan.stages.len() > 1 {
            return;
        }
        let find = |kind: SegmentKind, name: &str| {
            let place = places.iter().find(|place| place.plan.segment.kind == kind)?;
            let op =
                place.plan.segment.op_ids().find(|id| place.plan.segment.op(*id).name == name)?;
            Some((place.instance, op))
        };
        let embedding = find(SegmentKind::Embedding, "embedding");
        let head = find(SegmentKind::Head, "head");
        if let (Some((to, embedding)), Some((from, head))) = (embedding, head) {
            for slot in [Slot::Weight(0), Slot::WeightGradient(0)] {
                let shared = self.get(Held::Parameter(from, head, slot));
                self.held.insert(Held::Parameter(to, embedding, slot), shared);
            }
        }
    }

    fn forward(&mut self, places: &[Place]) {
        self.phase = Phase::Forward;
        let (hops, _) =
            hops(self.plan.hidden, self.plan.border, self.stage as u64, &self.plan.context);
        let mut hops = hops.into_iter();
        if self.stage > 0
            && let Some(receive) = hops.next()
        {
            let first = places[0];
            let input =
                first.plan.segment.input.expect("a later stage begins with a block or head");
            let extent = receive.writes[0].extent;
            let buffer = self.buffer("received hidden", extent, Region::Activation);
            self.push_reshard(vec![receive], "receive hidden", (buffer, buffer), None);
            self.held.insert(Held::Copy(first.instance, input, 0), buffer);
        }
        for (index, place) in places.iter().enumerate() {
            self.forward_segment(*place);
            let Some(output) = place.plan.segment.output else { continue };
            let copies = place.plan.choice.flows[output.0 as usize].copies().len();
            let hidden = self.get(Held::Copy(place.instance, output, copies - 1));
            match places.get(index + 1) {
                Some(next) => {
                    let input = next.plan.segment.input.expect("blocks and head have an input");
                    self.held.insert(Held::Copy(next.instance, input, 0), hidden);
                }
                None => {
                    let send = hops.next().into_iter().collect();
                    self.push_reshard(send, "send hidden", (hidden, hidden), None);
                }
            }
        }
    }

    fn backward(&mut self, places: &[Place]) {
        self.phase = Phase::Backward;
        let (_, hops) =
            hops(self.plan.hidden, self.plan.border, self.stage as u64, &self.plan.context);
        let mut hops = hops.into_iter();
        let last = places[places.len() - 1];
        if let Some(output) = last.plan.segment.output
            && let Some(receive) = hops.next()
        {
            let extent = receive.writes[0].extent;
            let buffer = self.buffer("received gradient", extent, Region::Activation);
            self.push_reshard(vec![receive], "receive gradient", (buffer, buffer), None);
            self.held.insert(Held::Gradient(last.instance, output, 0), buffer);
        }
        for (index, place) in places.iter().enumerate().rev() {
            self.backward_segment(*place);
            let Some(input) = place.plan.segment.input else { continue };
            let gradient = self.get(Held::Gradient(place.instance, input, 0));
            if index == 0 {
                let send = hops.next().into_iter().collect();
                self.push_reshard(send, "send gradient", (gradient, gradient), None);
            } else {
                let before = places[index - 1];
                let output = before.plan.segment.output.expect("only the head has no output");
                self.held.insert(Held::Gradient(before.instance, output, 0), gradient);
            }
        }
    }
}
