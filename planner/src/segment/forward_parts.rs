//! Computation and collectives of forward passes apart, in the order in which they run.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::emit::ResidualSum;
use narrows_plan::graph::{Grouping, Op, OpId, Segment};
#[cfg(test)]
use narrows_plan::strategy::SegmentChoice;

use super::pair_prices::{KernelClass, PairPrices};
use super::prepared::PreparedSegment;
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;

/// Costs of choices in the forward pass of one microbatch, in seconds, of segments with a grouping. Those of all nodes follow one after the
/// other.
/// Each of several costs is of some of the decisions, and infinite for all others.
pub(crate) type ForwardCosts = HashMap<(SegmentSpec, Grouping), Vec<Vec<f64>>>;

/// The forward pass of a segment with one grouping and all or some of the decisions: times of its choices in seconds, by node.
#[derive(Clone)]
pub(crate) struct ForwardParts {
    /// The segment.
    pub spec: SegmentSpec,
    /// Grouping of its linears.
    pub grouping: Grouping,
    /// The nodes of its table.
    pub nodes: Vec<ForwardNode>,
    /// Times of computation.
    pub computation: Arc<[Vec<f64>]>,
    /// Times of collectives of activations.
    pub collectives: Arc<[Vec<f64>]>,
    /// Times in the backward pass of one microbatch. Those of all nodes follow one after the other.
    pub backward: Arc<[f64]>,
    /// Slots with a GEMM or attention whatever is chosen, in order.
    pub gemms: Vec<usize>,
    /// Slots of linears whose GEMM may compute an addition, each with the slot of the addition.
    pub residual_sums: Vec<[usize; 2]>,
    prepared: Arc<PreparedSegment>,
    /// Nodes of which decisions are left out: those with collectives or those without.
    communicates: Vec<(usize, bool)>,
}

/// The work of a node in a forward pass. Slots number the reshards of the inputs, the first op, the reshards of its outputs, the
/// second op, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForwardNode {
    /// The op in this slot.
    Op(usize),
    /// Reshards of one value in this slot.
    Reshards(usize),
}

impl SegmentSolver<'_> {
    /// The forward passes of segments, with all of their groupings; `None` where one is too wide for elimination.
    pub(crate) fn forward_parts(
        &self,
        specs: &[SegmentSpec],
        context: &Context,
    ) -> Option<Vec<ForwardParts>> {
        let only = |class| self.with_pair_prices(PairPrices::Forward(class));
        let [computation, collectives] =
            [KernelClass::Computation, KernelClass::Collectives].map(only);
        let of_spec = |spec: &SegmentSpec| {
            let of_grouping = |grouping| {
                let prepared = self.prepare(*spec, grouping, context);
                prepared.order.as_ref()?;
                let times = |solver: &SegmentSolver| {
                    let forward = StepWeights { forward: 1.0, ..StepWeights::default() };
                    let prepared = solver.prepare(*spec, grouping, context);
                    prepared.priced.weighted_pass_times(&forward)
                };
                let times = [times(&computation), times(&collectives)];
                Some(ForwardParts::new((*spec, grouping), times, prepared))
            };
            self.groupings(*spec).into_iter().map(of_grouping).collect::<Vec<_>>()
        };
        specs.iter().flat_map(of_spec).collect()
    }
}

impl ForwardParts {
    fn new(
        (spec, grouping): (SegmentSpec, Grouping),
        [computation, collectives]: [Vec<Vec<f64>>; 2],
        prepared: Arc<PreparedSegment>,
    ) -> ForwardParts {
        let segment: &Segment = &prepared.priced.space.segment;
        let slot = |op: OpId| 2 * op.0 as usize + 1;
        let slot_of_value = |id| segment.output_port(id).map_or(0, |(op, _)| slot(op) + 1);
        let ops = segment.op_ids().map(|op| ForwardNode::Op(slot(op)));
        let reshards = segment.value_ids().map(|id| ForwardNode::Reshards(slot_of_value(id)));
        let is_gemm = |op: &Op| matches!(op, Op::Linear(_) | Op::Attention(_));
        let gemms = segment.op_ids().filter(|op| is_gemm(&segment.op(*op).op));
        let sums = segment.value_ids().filter_map(|id| ResidualSum::of_some_flow(segment, id));
        let backward = StepWeights { backward: 1.0, ..StepWeights::default() };
        ForwardParts {
            spec,
            grouping,
            nodes: ops.chain(reshards).collect(),
            computation: computation.into(),
            collectives: collectives.into(),
            backward: prepared.priced.weighted_pass_times(&backward).concat().into(),
            gemms: gemms.map(slot).collect(),
            residual_sums: sums.map(|sum| [sum.linear, sum.add].map(slot)).collect(),
            prepared,
            communicates: vec![],
        }
    }

    /// The decisions among these that have collectives in a node, or those that have none there.
    pub(crate) fn restricted(&self, node: usize, communicates: bool) -> ForwardParts {
        let mut restricted = self.clone();
        restricted.communicates.push((node, communicates));
        restricted
    }

    /// Leaves out additions to linears whose product all decisions reshard by a collective, so that no GEMM computes them.
    pub(crate) fn leave_out_resharded_sums(&mut self) {
        let mut sums = std::mem::take(&mut self.residual_sums);
        sums.retain(|[linear, _]| !self.always_communicates(linear + 1..=linear + 1));
        self.residual_sums = sums;
    }

    /// Makes the costs of decisions that are left out infinite.
    pub(crate) fn leave_out(&self, costs: &mut [f64]) {
        for (node, communicates) in &self.communicates {
            let first: usize = self.collectives[..*node].iter().map(Vec::len).sum();
            for (cost, time) in costs[first..].iter_mut().zip(&self.collectives[*node]) {
                if (*time > 0.0) != *communicates {
                    *cost = f64::INFINITY;
                }
            }
        }
    }

    /// Whether it is decided by a division of the decisions if a node has collectives.
    pub(crate) fn is_decided(&self, node: usize) -> bool {
        self.communicates.iter().any(|(of, _)| *of == node)
    }

    /// The slots in which some decisions have collectives in one of these nodes, in order.
    pub(crate) fn communicating_slots(&self, counts: impl Fn(&ForwardNode) -> bool) -> Vec<usize> {
        let may_communicate = |number: usize| {
            !self.communicates.contains(&(number, false))
                && self.collectives[number].iter().any(|time| *time > 0.0)
        };
        let nodes = self.nodes.iter().enumerate();
        let nodes = nodes.filter(|(number, node)| counts(node) && may_communicate(*number));
        let mut slots: Vec<usize> = nodes.map(|(_, node)| node.slot()).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        2 * self.prepared.priced.space.segment.ops.len() + 1
    }

    /// Whether all decisions have a collective of activations in some of these slots.
    pub(crate) fn always_communicates(&self, slots: RangeInclusive<usize>) -> bool {
        let is_certain = |(node, communicates): &(usize, bool)| {
            *communicates && slots.contains(&self.nodes[*node].slot())
        };
        if self.communicates.iter().any(is_certain) {
            return true;
        }
        let costs = self.nodes.iter().zip(self.collectives.iter()).flat_map(|(node, times)| {
            let counts = slots.contains(&node.slot());
            times.iter().map(move |time| if counts && *time > 0.0 { 1.0 } else { 0.0 })
        });
        let mut costs: Vec<f64> = costs.collect();
        self.leave_out(&mut costs);
        self.prepared.cheapest(&costs).is_none_or(|least| least.cost > 0.5)
    }

    /// The choices of all nodes with the least sum of costs, and that sum; `None` without legal decisions.
    pub(crate) fn cheapest(&self, costs: &[f64]) -> Option<(f64, Vec<u32>)> {
        let mut costs = costs.to_vec();
        self.leave_out(&mut costs);
        let cheapest = self.prepared.cheapest(&costs)?;
        cheapest.cost.is_finite().then(|| (cheapest.cost, cheapest.assignment.to_vec()))
    }

    /// The sum of the costs of decisions; `None` where they are none of the segment.
    #[cfg(test)]
    pub(crate) fn cost_of(&self, costs: &[f64], choice: &SegmentChoice) -> Option<f64> {
        let space = &self.prepared.priced.space;
        let ops = choice.ops.iter().zip(space.ops.iter());
        let ops = ops.map(|(op, all)| all.iter().position(|other| other == op));
        let flows = choice.flows.iter().zip(space.flows.iter());
        let flows = flows.map(|(flow, all)| all.iter().position(|other| other == flow));
        let mut first = 0;
        let chosen = ops.chain(flows).zip(self.computation.iter()).map(|(choice, of_node)| {
            first += of_node.len();
            Some(costs[first - of_node.len() + choice?])
        });
        chosen.sum()
    }
}

impl ForwardNode {
    /// The slot.
    pub(crate) fn slot(self) -> usize {
        match self {
            ForwardNode::Op(slot) | ForwardNode::Reshards(slot) => slot,
        }
    }
}
