//! Forward passes of two microbatches with weights of their own for each op.
//!
//! A pass alternates between runs of computation and of collectives. Collectives of x seconds beside computation of c seconds, each
//! alone, take at least (1 − θ)·(c + h·x) + θ·(x + h'·c) for each weight θ ([`PairPrices`](crate::segment::PairPrices)). The collectives
//! of one microbatch run beside the run before them, of the other microbatch, and those of the other beside the run after them.
//! So all computation has two weights: one for collectives that follow it, and one for collectives that precede it. The sum
//! over a run is a bound where no collective has a larger weight than any computation beside it: computation counts less the larger
//! its weight is, and a collective counts more.
//!
//! What is beside a collective depends on all decisions. Where all of them have a collective between two ops, and a GEMM or attention
//! after it, no collective that follows has the first op beside it. A collective has the least weight of all computation that can be
//! beside it, neighbouring segments included, and one within an op has none. Decisions can be divided by where they have collectives,
//! so that little can be beside each.
//!
//! As a function of the weights, the bound is concave: [the best ones](super::op_weight_search) are those of linear programs.

use std::ops::RangeInclusive;

use narrows_cost_model::OverlapSlowdown;
use narrows_plan::graph::SegmentKind;
#[cfg(test)]
use narrows_plan::{graph::Grouping, strategy::SegmentChoice};

#[cfg(test)]
use crate::segment::SegmentSpec;
use crate::segment::{ForwardCosts, ForwardNode, ForwardParts};

/// Weights of the computation in each slot of a part, in bounds by collectives that follow (0) and that precede it (1).
pub(super) type PartWeights = Vec<[f64; 2]>;

/// Those of all parts.
pub(super) type OpWeights = Vec<PartWeights>;

/// The forward passes of a layout's segments.
pub(super) struct WeightedForward {
    parts: Vec<ForwardParts>,
    reach: Vec<Reach>,
    slowdown: OverlapSlowdown,
}

/// Slots whose computation can be beside the collectives of a part.
struct Reach {
    /// For each GEMM, the first slot that can be in the last run before a collective after it; `None` where that run can begin in
    /// an earlier segment.
    first: Vec<Option<usize>>,
    /// The same of collectives in the next segment, after a GEMM there.
    first_of_next: Option<usize>,
    /// For each GEMM, the last slot that can be in the first run after a collective before it; `None` where that run can end in a
    /// later segment.
    last: Vec<Option<usize>>,
    /// The same of collectives in the segment before, with a GEMM after them there.
    last_of_previous: Option<usize>,
}

/// Least weights of the computation of neighbouring segments that can be beside collectives of a part, where these are on this side
/// of all GEMMs of the part (0) and where they are not (1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NeighbourWeights {
    /// At the end of the segment before.
    pub end: [f64; 2],
    /// At the begin of the next one.
    pub begin: [f64; 2],
}

/// Computation that can be beside the collectives in a slot, on one side.
pub(super) struct Beside {
    /// Slots of the same part.
    pub slots: RangeInclusive<usize>,
    /// Whether a GEMM of the part is between the collectives and the neighbouring segment that can be beside them too.
    pub neighbour: Option<bool>,
}

impl WeightedForward {
    /// The passes with these parts; those without decisions are left out.
    pub(super) fn new(mut parts: Vec<ForwardParts>, slowdown: OverlapSlowdown) -> WeightedForward {
        parts.retain(|part| part.cheapest(&part.backward).is_some());
        parts.iter_mut().for_each(ForwardParts::leave_out_resharded_sums);
        let reach = parts.iter().map(Reach::of).collect();
        WeightedForward { parts, reach, slowdown }
    }

    /// The parts.
    pub(super) fn parts(&self) -> &[ForwardParts] {
        &self.parts
    }

    /// The factors by which computation and collectives slow each other.
    pub(super) fn slowdown(&self) -> OverlapSlowdown {
        self.slowdown
    }

    /// Divides a part by whether its decisions have collectives in a node. Those that have none become the last part; returns its index.
    pub(super) fn divide(&mut self, index: usize, node: usize) -> usize {
        let restricted = |communicates: bool| {
            let mut part = self.parts[index].restricted(node, communicates);
            part.leave_out_resharded_sums();
            part
        };
        let [with, without] = [true, false].map(restricted);
        self.reach[index] = Reach::of(&with);
        self.reach.push(Reach::of(&without));
        self.parts[index] = with;
        self.parts.push(without);
        self.parts.len() - 1
    }

    /// The same weight for all computation.
    pub(super) fn uniform(&self, weight: f64) -> OpWeights {
        self.parts.iter().map(|part| vec![[weight; 2]; part.slots()]).collect()
    }

    /// The costs of all decisions with these weights.
    pub(super) fn costs(&self, weights: &OpWeights) -> ForwardCosts {
        let mut costs = ForwardCosts::new();
        for (index, part) in self.parts.iter().enumerate() {
            let mut of_part = self.costs_of(index, weights);
            part.leave_out(&mut of_part);
            costs.entry((part.spec, part.grouping)).or_default().push(of_part);
        }
        costs
    }

    fn costs_of(&self, index: usize, weights: &OpWeights) -> Vec<f64> {
        self.part_costs(index, &weights[index], &self.neighbour_weights(index, weights))
    }

    /// The costs of the choices of a part with these weights of its own and of its neighbours.
    pub(super) fn part_costs(
        &self,
        index: usize,
        weights: &[[f64; 2]],
        neighbours: &NeighbourWeights,
    ) -> Vec<f64> {
        let part = &self.parts[index];
        let [hidden, hidden_computation] =
            [self.slowdown.hidden_cost(), self.slowdown.hidden_computation_cost()];
        let mean = |[a, b]: [f64; 2]| (a + b) / 2.0;
        let of_node = |(number, node): (usize, &ForwardNode)| {
            let counted = |slot: usize| {
                let weight = mean(self.weight_of(index, slot, weights));
                1.0 - weight * (1.0 - hidden_computation)
            };
            let own = counted(node.slot());
            // A residual sum in a GEMM saves time of the linear.
            let (of_collectives, of_savings) = match node {
                ForwardNode::Op(_) => (0.0, own),
                ForwardNode::Reshards(_) => (
                    mean(self.weight_at(index, node.slot(), weights, neighbours)),
                    counted(node.slot().saturating_sub(1)),
                ),
            };
            let of_collectives = hidden + of_collectives * (1.0 - hidden);
            let times = part.computation[number].iter().zip(&part.collectives[number]);
            times.map(move |(computation, collective)| {
                let of_computation = if *computation < 0.0 { of_savings } else { own };
                computation * of_computation + collective * of_collectives
            })
        };
        part.nodes.iter().enumerate().flat_map(of_node).collect()
    }

    /// The weights of computation in a slot. An addition that the GEMM of a linear may compute has no smaller ones than that linear.
    fn weight_of(&self, index: usize, slot: usize, weights: &[[f64; 2]]) -> [f64; 2] {
        let linear = self.parts[index].residual_sums.iter().find(|[_, add]| *add == slot);
        let of_linear = linear.map_or([0.0; 2], |[linear, _]| weights[*linear]);
        [0, 1].map(|side| weights[slot][side].max(of_linear[side]))
    }

    /// The weights of collectives in a slot.
    fn weight_at(
        &self,
        index: usize,
        slot: usize,
        weights: &[[f64; 2]],
        neighbours: &NeighbourWeights,
    ) -> [f64; 2] {
        let beside = self.beside(index, slot);
        [0, 1].map(|side| {
            let Beside { slots, neighbour } = &beside[side];
            let of_neighbour = neighbour.map_or(1.0, |gemm| neighbours.of(side)[usize::from(gemm)]);
            weights[slots.clone()].iter().map(|both| both[side]).fold(of_neighbour, f64::min)
        })
    }

    /// Computation that can be beside the collectives in a slot, before (0) and after them (1).
    pub(super) fn beside(&self, index: usize, slot: usize) -> [Beside; 2] {
        let (part, reach) = (&self.parts[index], &self.reach[index]);
        let before = part.gemms.iter().rposition(|gemm| *gemm <= slot);
        let preceding = match before.and_then(|gemm| reach.first[gemm]) {
            Some(first) => Beside { slots: first..=slot, neighbour: None },
            None => Beside { slots: 0..=slot, neighbour: Some(before.is_some()) },
        };
        let after = part.gemms.iter().position(|gemm| *gemm > slot);
        let following = match after.and_then(|gemm| reach.last[gemm]) {
            Some(last) => Beside { slots: slot..=last, neighbour: None },
            None => Beside { slots: slot..=part.slots() - 1, neighbour: Some(after.is_some()) },
        };
        [preceding, following]
    }

    /// The least weights of neighbours of a part.
    fn neighbour_weights(&self, index: usize, weights: &OpWeights) -> NeighbourWeights {
        let begin = NeighbourWeights { end: [1.0; 2], begin: [1.0; 2] };
        let before = self.previous(index).fold(begin, |least, other| {
            let NeighbourWeights { end, .. } = self.end_weights(other, &weights[other]);
            NeighbourWeights { end: [0, 1].map(|gemm| least.end[gemm].min(end[gemm])), ..least }
        });
        self.next(index).fold(before, |least, other| {
            let NeighbourWeights { begin, .. } = self.end_weights(other, &weights[other]);
            NeighbourWeights {
                begin: [0, 1].map(|gemm| least.begin[gemm].min(begin[gemm])),
                ..least
            }
        })
    }

    /// The least weights of a part that can be beside collectives of its neighbours.
    pub(super) fn end_weights(&self, index: usize, weights: &[[f64; 2]]) -> NeighbourWeights {
        let least = |side: usize| {
            [false, true].map(|gemm| {
                let slots = self.slots_at_end(index, side, gemm);
                weights[slots].iter().map(|both| both[side]).fold(1.0, f64::min)
            })
        };
        NeighbourWeights { end: least(0), begin: least(1) }
    }

    /// Slots that can be beside collectives of the next segment (0) or of the one before (1), with or without a GEMM of that one
    /// between.
    pub(super) fn slots_at_end(
        &self,
        index: usize,
        side: usize,
        gemm: bool,
    ) -> RangeInclusive<usize> {
        match side {
            0 => self.end_of(index, gemm),
            _ => self.begin_of(index, gemm),
        }
    }

    /// Slots that can be beside collectives of the next segment, after a GEMM there or before all of these.
    fn end_of(&self, index: usize, after_gemm: bool) -> RangeInclusive<usize> {
        let reach = &self.reach[index];
        let first = match after_gemm {
            true => reach.first_of_next,
            false => reach.first.last().copied().flatten(),
        };
        first.unwrap_or(0)..=self.parts[index].slots() - 1
    }

    /// Slots that can be beside collectives of the segment before, before a GEMM there or after all of these.
    fn begin_of(&self, index: usize, before_gemm: bool) -> RangeInclusive<usize> {
        let reach = &self.reach[index];
        let last = match before_gemm {
            true => reach.last_of_previous,
            false => reach.last.first().copied().flatten(),
        };
        0..=last.unwrap_or(self.parts[index].slots() - 1)
    }

    /// The parts that can come before a part.
    fn previous(&self, index: usize) -> impl Iterator<Item = usize> {
        self.of_kinds(match self.parts[index].spec.kind {
            SegmentKind::Embedding => &[],
            SegmentKind::Block => &[SegmentKind::Embedding, SegmentKind::Block],
            SegmentKind::Head => &[SegmentKind::Block],
        })
    }

    /// The parts that can come after a part.
    fn next(&self, index: usize) -> impl Iterator<Item = usize> {
        self.of_kinds(match self.parts[index].spec.kind {
            SegmentKind::Embedding => &[SegmentKind::Block],
            SegmentKind::Block => &[SegmentKind::Block, SegmentKind::Head],
            SegmentKind::Head => &[],
        })
    }

    fn of_kinds(&self, kinds: &'static [SegmentKind]) -> impl Iterator<Item = usize> {
        (0..self.parts.len()).filter(|index| kinds.contains(&self.parts[*index].spec.kind))
    }

    /// The time of decisions with these weights, in seconds; `None` where they are none of the segment.
    #[cfg(test)]
    pub(super) fn time(
        &self,
        weights: &OpWeights,
        (spec, grouping): (SegmentSpec, Grouping),
        choice: &SegmentChoice,
    ) -> Option<f64> {
        let of_part = |(index, part): (usize, &ForwardParts)| {
            let mut costs = self.costs_of(index, weights);
            part.leave_out(&mut costs);
            part.cost_of(&costs, choice)
        };
        let parts = self.parts.iter().enumerate();
        let parts = parts.filter(|(_, part)| (part.spec, part.grouping) == (spec, grouping));
        parts.filter_map(of_part).filter(|cost| cost.is_finite()).reduce(f64::min)
    }
}

impl NeighbourWeights {
    /// Those before collectives (0) or after them (1).
    pub(super) fn of(&self, side: usize) -> [f64; 2] {
        [self.end, self.begin][side]
    }
}

impl Reach {
    fn of(part: &ForwardParts) -> Reach {
        let end = part.slots() - 1;
        let communicating = part.communicating_slots(|_| true);
        // Slots are in order, so that no later one reaches further back, and no earlier one further ahead.
        let mut from = None;
        let mut first_before = |end: usize| {
            let candidates = communicating.iter().rev().copied();
            let mut candidates = candidates.filter(|slot| *slot <= end && from < Some(*slot));
            from = candidates.find(|slot| part.always_communicates(*slot..=end)).or(from);
            from
        };
        let first = part.gemms.iter().map(|gemm| first_before(gemm - 1)).collect();
        let first_of_next = first_before(end);
        let mut to = None;
        let mut last_after = |begin: usize| {
            let is_nearer = |slot: usize| to.is_none_or(|to| slot < to);
            let mut candidates =
                communicating.iter().copied().filter(|slot| *slot >= begin && is_nearer(*slot));
            to = candidates.find(|slot| part.always_communicates(begin..=*slot)).or(to);
            to
        };
        let mut last: Vec<Option<usize>> =
            part.gemms.iter().rev().map(|gemm| last_after(gemm + 1)).collect();
        last.reverse();
        Reach { first, first_of_next, last, last_of_previous: last_after(0) }
    }
}
