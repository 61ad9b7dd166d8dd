//! Computation and collectives of passes apart, in the order in which they run.
//!
//! A backward pass runs through the ops in reverse order: the gradients of an op's outputs are resharded before its own backward
//! pass, as the outputs are after it in the forward pass. Values that are recomputed have no certain place: they are before the first
//! backward pass that reads them, or that reads a value which is recomputed from them. They may be in any slot.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::emit::ResidualSum;
use narrows_plan::graph::{Grouping, Op, OpId, Segment};
#[cfg(test)]
use narrows_plan::strategy::SegmentChoice;

use super::pair_prices::{KernelClass, PairPrices, PassWork};
use super::prepared::PreparedSegment;
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;

/// The number of passes that a microbatch has, forward (0) and backward (1).
pub(crate) const PASSES: usize = 2;

/// Costs of choices in the forward (0) and in the backward pass (1) of one microbatch, in seconds, of segments with a grouping. Those
/// of all nodes follow one after the other.
/// Each of several costs is of some of the decisions, and infinite for all others.
pub(crate) type PassCosts = HashMap<(SegmentSpec, Grouping), Vec<[Vec<f64>; PASSES]>>;

/// The passes of a segment with one grouping and all or some of the decisions.
#[derive(Clone)]
pub(crate) struct PassParts {
    /// The segment.
    pub spec: SegmentSpec,
    /// Grouping of its linears.
    pub grouping: Grouping,
    /// The forward (0) and the backward pass (1).
    pub passes: [PassTimes; PASSES],
    prepared: Arc<PreparedSegment>,
    /// Nodes of passes of which decisions are left out: those with collectives or those without.
    communicates: Vec<(NodeOfPass, bool)>,
}

/// A pass of a segment: times of the choices of its table in seconds, by node.
#[derive(Clone)]
pub(crate) struct PassTimes {
    /// The places of the nodes.
    pub nodes: Vec<PassNode>,
    /// Times of computation in these places.
    pub computation: Arc<[Vec<f64>]>,
    /// Times of collectives of activations in these places.
    pub collectives: Arc<[Vec<f64>]>,
    /// Recomputation; `None` in forward passes.
    pub recomputation: Option<Recomputation>,
    /// Slots with a GEMM or attention whatever is chosen, in order.
    pub gemms: Vec<usize>,
    /// Slots of linears whose GEMM may compute an addition, each with the slot of the addition.
    pub residual_sums: Vec<[usize; 2]>,
    /// Number of slots.
    pub slots: usize,
}

/// Recomputation in a backward pass.
#[derive(Clone)]
pub(crate) struct Recomputation {
    /// Times of computation.
    pub computation: Arc<[Vec<f64>]>,
    /// Times of collectives of activations.
    pub collectives: Arc<[Vec<f64>]>,
}

/// The work of a node in a pass. Slots number the reshards of the inputs, the first op, the reshards of its outputs, the
/// second op, and so on, and from the last to the first in backward passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassNode {
    /// The op in this slot.
    Op(usize),
    /// Reshards of one value in this slot.
    Reshards(usize),
}

/// A node in one of the passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeOfPass {
    /// Forward (0) or backward (1).
    pub pass: usize,
    /// Number of the node in the table.
    pub node: usize,
}

impl SegmentSolver<'_> {
    /// The passes of segments, with all of their groupings; `None` where one is too wide for elimination.
    pub(crate) fn pass_parts(
        &self,
        specs: &[SegmentSpec],
        context: &Context,
    ) -> Option<Vec<PassParts>> {
        let only = |work| {
            [KernelClass::Computation, KernelClass::Collectives]
                .map(|class| self.with_pair_prices(PairPrices::Only(class, work)))
        };
        let [forward, backward, recompute] =
            [PassWork::Forward, PassWork::Backward, PassWork::Recompute].map(only);
        let of_spec = |spec: &SegmentSpec| {
            let of_grouping = |grouping| {
                let prepared = self.prepare(*spec, grouping, context);
                prepared.order.as_ref()?;
                let in_forward = StepWeights { forward: 1.0, ..StepWeights::default() };
                let in_backward = StepWeights { backward: 1.0, ..StepWeights::default() };
                let times = |of_classes: &[SegmentSolver; 2], weights| {
                    of_classes.each_ref().map(|solver| {
                        let prepared = solver.prepare(*spec, grouping, context);
                        prepared.priced.weighted_pass_times(weights)
                    })
                };
                let segment: &Segment = &prepared.priced.space.segment;
                let passes = [
                    PassTimes::forward(segment, times(&forward, &in_forward)),
                    PassTimes::backward(
                        segment,
                        times(&backward, &in_backward),
                        times(&recompute, &in_backward),
                    ),
                ];
                let (spec, communicates) = (*spec, vec![]);
                Some(PassParts { spec, grouping, passes, prepared, communicates })
            };
            self.groupings(*spec).into_iter().map(of_grouping).collect::<Vec<_>>()
        };
        specs.iter().flat_map(of_spec).collect()
    }
}

impl PassTimes {
    fn forward(segment: &Segment, [computation, collectives]: [Vec<Vec<f64>>; 2]) -> PassTimes {
        let slot = |op: OpId| 2 * op.0 as usize + 1;
        let slot_of_value = |id| segment.output_port(id).map_or(0, |(op, _)| slot(op) + 1);
        let ops = segment.op_ids().map(|op| PassNode::Op(slot(op)));
        let reshards = segment.value_ids().map(|id| PassNode::Reshards(slot_of_value(id)));
        let is_gemm = |op: &Op| matches!(op, Op::Linear(_) | Op::Attention(_));
        let gemms = segment.op_ids().filter(|op| is_gemm(&segment.op(*op).op));
        let sums = segment.value_ids().filter_map(|id| ResidualSum::of_some_flow(segment, id));
        PassTimes {
            nodes: ops.chain(reshards).collect(),
            computation: computation.into(),
            collectives: collectives.into(),
            recomputation: None,
            gemms: gemms.map(slot).collect(),
            residual_sums: sums.map(|sum| [sum.linear, sum.add].map(slot)).collect(),
            slots: 2 * segment.ops.len() + 1,
        }
    }

    /// The backward pass with these times of computation and of collectives, without recomputation and of it.
    fn backward(
        segment: &Segment,
        times: [Vec<Vec<f64>>; 2],
        recomputation: [Vec<Vec<f64>>; 2],
    ) -> PassTimes {
        let mut pass = PassTimes::forward(segment, times);
        let last = pass.slots - 1;
        pass.nodes.iter_mut().for_each(|node| *node = node.in_slot(last - node.slot()));
        pass.gemms = pass.gemms.iter().rev().map(|slot| last - slot).collect();
        pass.residual_sums = vec![];
        let [computation, collectives] = recomputation.map(Arc::from);
        pass.recomputation = Some(Recomputation { computation, collectives });
        pass
    }

    /// The slot that stands for recomputation.
    pub(crate) fn slot_of_recomputation(&self) -> usize {
        self.slots
    }

    /// The slots, and the one that stands for recomputation where there is such.
    pub(crate) fn all_slots(&self) -> usize {
        self.slots + usize::from(self.recomputation.is_some())
    }

    /// The slots in which the work of a slot may be: all for recomputation.
    pub(crate) fn range_of(&self, slot: usize) -> RangeInclusive<usize> {
        if slot == self.slot_of_recomputation() { 0..=self.slots - 1 } else { slot..=slot }
    }

    /// These slots and the one that stands for recomputation.
    pub(crate) fn with_recomputation(
        &self,
        slots: RangeInclusive<usize>,
    ) -> impl Iterator<Item = usize> {
        slots.chain(self.slots..self.all_slots())
    }
}

impl PassParts {
    /// The decisions among these that have collectives in a node, or those that have none there.
    pub(crate) fn restricted(&self, node: NodeOfPass, communicates: bool) -> PassParts {
        let mut restricted = self.clone();
        restricted.communicates.push((node, communicates));
        restricted
    }

    /// Leaves out additions to linears whose product all decisions reshard by a collective, so that no GEMM computes them.
    pub(crate) fn leave_out_resharded_sums(&mut self) {
        for pass in 0..PASSES {
            let mut sums = std::mem::take(&mut self.passes[pass].residual_sums);
            sums.retain(|[linear, _]| !self.always_communicates(pass, linear + 1..=linear + 1));
            self.passes[pass].residual_sums = sums;
        }
    }

    /// Makes the costs of decisions that are left out infinite.
    pub(crate) fn leave_out(&self, costs: &mut [f64]) {
        for (NodeOfPass { pass, node }, communicates) in &self.communicates {
            let collectives = &self.passes[*pass].collectives;
            let first: usize = collectives[..*node].iter().map(Vec::len).sum();
            for (cost, time) in costs[first..].iter_mut().zip(&collectives[*node]) {
                if (*time > 0.0) != *communicates {
                    *cost = f64::INFINITY;
                }
            }
        }
    }

    /// Whether it is decided by a division of the decisions if a node has collectives.
    pub(crate) fn is_decided(&self, node: NodeOfPass) -> bool {
        self.communicates.iter().any(|(of, _)| *of == node)
    }

    /// The slots of a pass in which some decisions have collectives in one of these nodes, in order.
    pub(crate) fn communicating_slots(
        &self,
        pass: usize,
        counts: impl Fn(&PassNode) -> bool,
    ) -> Vec<usize> {
        let times = &self.passes[pass];
        let may_communicate = |node: usize| {
            !self.communicates.contains(&(NodeOfPass { pass, node }, false))
                && times.collectives[node].iter().any(|time| *time > 0.0)
        };
        let nodes = times.nodes.iter().enumerate();
        let nodes = nodes.filter(|(number, node)| counts(node) && may_communicate(*number));
        let mut slots: Vec<usize> = nodes.map(|(_, node)| node.slot()).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Whether all decisions have a collective of activations in some of these slots of a pass.
    pub(crate) fn always_communicates(&self, pass: usize, slots: RangeInclusive<usize>) -> bool {
        let PassTimes { nodes, collectives, .. } = &self.passes[pass];
        let is_certain = |(node, communicates): &(NodeOfPass, bool)| {
            *communicates && node.pass == pass && slots.contains(&nodes[node.node].slot())
        };
        if self.communicates.iter().any(is_certain) {
            return true;
        }
        let costs = nodes.iter().zip(collectives.iter()).flat_map(|(node, times)| {
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

    /// Whether some decisions are legal.
    pub(crate) fn has_decisions(&self) -> bool {
        let choices: usize = self.passes[0].computation.iter().map(Vec::len).sum();
        self.cheapest(&vec![0.0; choices]).is_some()
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
        let chosen =
            ops.chain(flows).zip(self.passes[0].computation.iter()).map(|(choice, of_node)| {
                first += of_node.len();
                Some(costs[first - of_node.len() + choice?])
            });
        chosen.sum()
    }
}

impl PassNode {
    /// The slot.
    pub(crate) fn slot(self) -> usize {
        match self {
            PassNode::Op(slot) | PassNode::Reshards(slot) => slot,
        }
    }

    fn in_slot(self, slot: usize) -> PassNode {
        match self {
            PassNode::Op(_) => PassNode::Op(slot),
            PassNode::Reshards(_) => PassNode::Reshards(slot),
        }
    }
}
