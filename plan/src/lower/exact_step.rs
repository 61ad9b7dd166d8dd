//! The exact step of LORO: the factor pairs of a stage in rounds.

use crate::emit::OperandSlot;
use crate::graph::OpId;
use crate::mesh::Axis;
use crate::model::{LinearKind, WeightId, WeightShape};
use crate::program::{BufferId, HostAction, HostInstr, OwnedPair};
use crate::strategy::OpParameters;

use super::stage_lowering::{BufferKey, SegmentSite, StageLowering};

/// Pairs of consecutive blocks, with the buffers of their factors.
#[derive(Default)]
struct Round {
    pairs: Vec<OwnedPair>,
    read: Vec<BufferId>,
    written: Vec<BufferId>,
}

impl StageLowering<'_> {
    /// The instructions of the exact step, where the optimizer has exact steps.
    pub(super) fn exact_step(&mut self, sites: &[SegmentSite]) {
        let context = self.plan.context;
        if context.loro_every.is_none() {
            return;
        }
        let owners = context.mesh.tensor * context.mesh.replicas();
        let mut round = Round::default();
        for site in sites {
            self.add_factors(site, &mut round);
            if round.pairs.len() as u64 >= owners {
                self.push_round(std::mem::take(&mut round), owners);
            }
        }
        self.push_round(round, owners);
    }

    /// Adds the factor pairs of a block to a round.
    fn add_factors(&self, site: &SegmentSite, round: &mut Round) {
        let Some(block) = site.block else { return };
        let mut shapes: Vec<WeightShape> = vec![];
        for op in site.plan.segment.op_ids() {
            let Some(OpParameters { members, .. }) = self.parameters(*site, op) else { continue };
            let factors = members.iter().filter(|member| linear_of_factor(member.weight).is_some());
            let before = shapes.len();
            shapes.extend(factors.copied());
            if shapes.len() > before {
                self.add_buffers(site, op, round);
            }
        }
        for a in &shapes {
            let WeightId::FactorA(linear) = a.weight else { continue };
            let is_other = |shape: &&WeightShape| shape.weight == WeightId::FactorB(linear);
            let Some(b) = shapes.iter().find(is_other) else { continue };
            let WeightShape { rows: d_in, columns: rank, .. } = *a;
            let pair = OwnedPair { block, linear, d_in, rank, d_out: b.columns, owner: 0 };
            round.pairs.push(pair);
        }
    }

    /// Adds the buffers of the weights of an op: the moments and the fp32 weights, or their master copies, are read; weights
    /// and master copies are written.
    fn add_buffers(&self, site: &SegmentSite, op: OpId, round: &mut Round) {
        let buffer = |slot| self.buffers.get(&BufferKey::Parameter(site.instance, op, slot));
        let weight = buffer(OperandSlot::Weight(0));
        let master = buffer(OperandSlot::Master(0));
        let moments = [OperandSlot::FirstMoment(0), OperandSlot::SecondMoment(0)].map(buffer);
        round.read.extend(master.or(weight));
        round.read.extend(moments.into_iter().flatten());
        round.written.extend([weight, master].into_iter().flatten());
    }

    fn push_round(&mut self, round: Round, owners: u64) {
        let Round { pairs, read, written } = round;
        if pairs.is_empty() {
            return;
        }
        let mesh = self.plan.context.mesh;
        let axes = [Axis::Tensor, Axis::Data].map(|axis| mesh.group(axis));
        let groups = axes.iter().filter(|group| group.size > 1);
        let actions = [HostAction::Read(read)]
            .into_iter()
            .chain(groups.clone().map(|group| HostAction::SumFactors(*group)))
            .chain([HostAction::Decompose])
            .chain(groups.map(|group| HostAction::SumUpdates(*group)))
            .chain([HostAction::Write(written)]);
        let exact_step = &mut self.program.exact_step;
        let start = exact_step.pairs.len();
        let owned = (start as u64..).zip(pairs).map(|(index, pair)| {
            let owner = index % owners;
            OwnedPair { owner, ..pair }
        });
        exact_step.pairs.extend(owned);
        let pairs = start..exact_step.pairs.len();
        let instr = |action| HostInstr { action, pairs: pairs.clone() };
        exact_step.instrs.extend(actions.map(instr));
    }
}

/// The linear of a factor.
fn linear_of_factor(weight: WeightId) -> Option<LinearKind> {
    match weight {
        WeightId::FactorA(linear) | WeightId::FactorB(linear) => Some(linear),
        _ => None,
    }
}
