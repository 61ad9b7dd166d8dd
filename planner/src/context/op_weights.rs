//! Passes of two microbatches with weights of their own for each op.
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
//! A backward pass runs through the slots of the ops in reverse order. Recomputation may be in any of them: its computation has no smaller
//! weights than any collectives, and its collectives no larger ones than any computation.
//!
//! As a function of the weights, the bound is concave: [the best ones](super::op_weight_search) are those of linear programs.

use std::ops::RangeInclusive;

use narrows_cost_model::OverlapSlowdown;
use narrows_plan::graph::SegmentKind;
#[cfg(test)]
use narrows_plan::{graph::Grouping, strategy::SegmentChoice};

#[cfg(test)]
use crate::segment::SegmentSpec;
use crate::segment::{NodeOfPass, PASSES, PassCosts, PassNode, PassParts, PassTimes};

/// Weights of the computation in each slot of a pass, in bounds by collectives that follow (0) and that precede it (1). The last are
/// those of recomputation.
pub(super) type SlotWeights = Vec<[f64; 2]>;

/// Weights of the forward (0) and the backward pass (1) of a part.
pub(super) type PartWeights = [SlotWeights; PASSES];

/// Those of all parts.
pub(super) type OpWeights = Vec<PartWeights>;

/// The passes of a layout's segments.
pub(super) struct WeightedPasses {
    parts: Vec<PassParts>,
    reach: Vec<[Reach; PASSES]>,
    slowdown: OverlapSlowdown,
}

/// Slots whose computation can be beside the collectives of a pass of a part.
#[derive(Clone)]
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

/// Least weights of the computation of neighbouring segments that can be beside collectives of a part in a pass, where these are on
/// this side of all GEMMs of the part (0) and where they are not (1).
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

impl WeightedPasses {
    /// The passes with these parts; those without decisions are left out.
    pub(super) fn new(mut parts: Vec<PassParts>, slowdown: OverlapSlowdown) -> WeightedPasses {
        parts.retain(PassParts::has_decisions);
        parts.iter_mut().for_each(PassParts::leave_out_resharded_sums);
        let of_part = |part: &PassParts| [0, 1].map(|pass| Reach::of(part, pass));
        let reach = parts.iter().map(of_part).collect();
        WeightedPasses { parts, reach, slowdown }
    }

    /// The parts.
    pub(super) fn parts(&self) -> &[PassParts] {
        &self.parts
    }

    /// The factors by which computation and collectives slow each other.
    pub(super) fn slowdown(&self) -> OverlapSlowdown {
        self.slowdown
    }

    /// Divides a part by whether its decisions have collectives in a node. Those that have none become the last part; returns its index.
    pub(super) fn divide(&mut self, index: usize, node: NodeOfPass) -> usize {
        let restricted = |communicates: bool| {
            let mut part = self.parts[index].restricted(node, communicates);
            part.leave_out_resharded_sums();
            part
        };
        let [with, without] = [true, false].map(restricted);
        // What was beside collectives of the other pass before the division is a superset of what is.
        let mut reach_of_without = self.reach[index].clone();
        reach_of_without[node.pass] = Reach::of(&without, node.pass);
        self.reach[index][node.pass] = Reach::of(&with, node.pass);
        self.reach.push(reach_of_without);
        self.parts[index] = with;
        self.parts.push(without);
        self.parts.len() - 1
    }

    /// The same weight for all computation of each pass.
    pub(super) fn uniform(&self, weights: [f64; PASSES]) -> OpWeights {
        let of_part = |part: &PassParts| {
            [0, 1].map(|pass| vec![[weights[pass]; 2]; part.passes[pass].all_slots()])
        };
        self.parts.iter().map(of_part).collect()
    }

    /// The costs of all decisions with these weights.
    pub(super) fn costs(&self, weights: &OpWeights) -> PassCosts {
        let mut costs = PassCosts::new();
        for (index, part) in self.parts.iter().enumerate() {
            let mut of_part = self.costs_of(index, weights);
            of_part.iter_mut().for_each(|costs| part.leave_out(costs));
            costs.entry((part.spec, part.grouping)).or_default().push(of_part);
        }
        costs
    }

    fn costs_of(&self, index: usize, weights: &OpWeights) -> [Vec<f64>; PASSES] {
        [0, 1].map(|pass| self.costs_in((index, pass), weights))
    }

    /// The costs of the choices of a part in a pass with these weights.
    pub(super) fn costs_in(&self, of_pass: (usize, usize), weights: &OpWeights) -> Vec<f64> {
        let (index, pass) = of_pass;
        let neighbours = self.neighbour_weights(of_pass, weights);
        self.pass_costs(of_pass, &weights[index][pass], &neighbours)
    }

    /// The costs of the choices of a part in a pass with these weights of its own and of its neighbours.
    pub(super) fn pass_costs(
        &self,
        (index, pass): (usize, usize),
        weights: &[[f64; 2]],
        neighbours: &NeighbourWeights,
    ) -> Vec<f64> {
        let times = &self.parts[index].passes[pass];
        let [hidden, hidden_computation] =
            [self.slowdown.hidden_cost(), self.slowdown.hidden_computation_cost()];
        let mean = |[a, b]: [f64; 2]| (a + b) / 2.0;
        let counted = |slot: usize| {
            let weight = mean(Self::weight_of(times, slot, weights));
            1.0 - weight * (1.0 - hidden_computation)
        };
        let of_collectives = |slot: usize| {
            let weight = mean(self.weight_at((index, pass), slot, weights, neighbours));
            hidden + weight * (1.0 - hidden)
        };
        let of_node = |(number, node): (usize, &PassNode)| {
            let own = counted(node.slot());
            // A residual sum in a GEMM saves time of the linear.
            let (of_collectives, of_savings) = match node {
                PassNode::Op(_) => (hidden, own),
                PassNode::Reshards(slot) => {
                    (of_collectives(*slot), counted(slot.saturating_sub(1)))
                }
            };
            let all = times.computation[number].iter().zip(&times.collectives[number]);
            all.map(move |(computation, collective)| {
                let of_computation = if *computation < 0.0 { of_savings } else { own };
                computation * of_computation + collective * of_collectives
            })
        };
        let mut costs: Vec<f64> = times.nodes.iter().enumerate().flat_map(of_node).collect();
        let Some(recomputation) = &times.recomputation else { return costs };
        let slot = times.slot_of_recomputation();
        let (own, of_collectives) = (counted(slot), of_collectives(slot));
        let all = recomputation.computation.iter().flatten();
        let all = all.zip(recomputation.collectives.iter().flatten());
        for (cost, (computation, collective)) in costs.iter_mut().zip(all) {
            // What a residual sum in a GEMM saves counts in full: the linear and the addition count with less.
            let of_computation = if *computation < 0.0 { 1.0 } else { own };
            *cost += computation * of_computation + collective * of_collectives;
        }
        costs
    }

    /// The weights of computation in a slot. An addition that the GEMM of a linear may compute has no smaller ones than that linear.
    fn weight_of(times: &PassTimes, slot: usize, weights: &[[f64; 2]]) -> [f64; 2] {
        let linear = times.residual_sums.iter().find(|[_, add]| *add == slot);
        let of_linear = linear.map_or([0.0; 2], |[linear, _]| weights[*linear]);
        [0, 1].map(|side| weights[slot][side].max(of_linear[side]))
    }

    /// The weights of collectives in a slot.
    fn weight_at(
        &self,
        of_pass: (usize, usize),
        slot: usize,
        weights: &[[f64; 2]],
        neighbours: &NeighbourWeights,
    ) -> [f64; 2] {
        let beside = self.beside(of_pass, slot);
        [0, 1].map(|side| {
            let Beside { slots, neighbour } = &beside[side];
            let of_neighbour = neighbour.map_or(1.0, |gemm| neighbours.of(side)[usize::from(gemm)]);
            let times = &self.parts[of_pass.0].passes[of_pass.1];
            least_in((times, weights), slots.clone(), side).min(of_neighbour)
        })
    }

    /// Computation that can be beside the collectives in a slot, before (0) and after them (1), besides recomputation.
    pub(super) fn beside(&self, (index, pass): (usize, usize), slot: usize) -> [Beside; 2] {
        let times = &self.parts[index].passes[pass];
        let reach = &self.reach[index][pass];
        let (from, to) = times.range_of(slot).into_inner();
        let before = times.gemms.iter().rposition(|gemm| *gemm <= from);
        let preceding = match before.and_then(|gemm| reach.first[gemm]) {
            Some(first) => Beside { slots: first..=to, neighbour: None },
            None => Beside { slots: 0..=to, neighbour: Some(before.is_some()) },
        };
        let after = times.gemms.iter().position(|gemm| *gemm > to);
        let following = match after.and_then(|gemm| reach.last[gemm]) {
            Some(last) => Beside { slots: from..=last, neighbour: None },
            None => Beside { slots: from..=times.slots - 1, neighbour: Some(after.is_some()) },
        };
        [preceding, following]
    }

    /// The least weights of neighbours of a part in a pass.
    fn neighbour_weights(
        &self,
        (index, pass): (usize, usize),
        weights: &OpWeights,
    ) -> NeighbourWeights {
        let kind = self.parts[index].spec.kind;
        let least = |side: usize| {
            let others = self.of_kinds(neighbours(kind, pass, side));
            others.fold([1.0_f64; 2], |least, other| {
                let at_end = self.end_weights((other, pass), &weights[other][pass]);
                [0, 1].map(|gemm| least[gemm].min(at_end.of(side)[gemm]))
            })
        };
        NeighbourWeights { end: least(0), begin: least(1) }
    }

    /// The least weights of a part that can be beside collectives of its neighbours in a pass.
    pub(super) fn end_weights(
        &self,
        of_pass: (usize, usize),
        weights: &[[f64; 2]],
    ) -> NeighbourWeights {
        let times = &self.parts[of_pass.0].passes[of_pass.1];
        let least = |side: usize| {
            [false, true].map(|gemm| {
                let slots = self.slots_at_end(of_pass, side, gemm);
                least_in((times, weights), slots, side)
            })
        };
        NeighbourWeights { end: least(0), begin: least(1) }
    }

    /// Slots that can be beside collectives of the next segment (0) or of the one before (1), with or without a GEMM of that one
    /// between, besides recomputation.
    pub(super) fn slots_at_end(
        &self,
        (index, pass): (usize, usize),
        side: usize,
        gemm: bool,
    ) -> RangeInclusive<usize> {
        let reach = &self.reach[index][pass];
        let end = self.parts[index].passes[pass].slots - 1;
        match side {
            0 => reach.at_end(gemm).unwrap_or(0)..=end,
            _ => 0..=reach.at_begin(gemm).unwrap_or(end),
        }
    }

    fn of_kinds(&self, kinds: &'static [SegmentKind]) -> impl Iterator<Item = usize> {
        (0..self.parts.len()).filter(|index| kinds.contains(&self.parts[*index].spec.kind))
    }

    /// The times of decisions in both passes with these weights, in seconds; `None` where they are none of the segment.
    #[cfg(test)]
    pub(super) fn times(
        &self,
        weights: &OpWeights,
        (spec, grouping): (SegmentSpec, Grouping),
        choice: &SegmentChoice,
    ) -> Option<[f64; PASSES]> {
        let of_part = |(index, part): (usize, &PassParts)| {
            let of_pass = |mut costs: Vec<f64>| {
                part.leave_out(&mut costs);
                part.cost_of(&costs, choice).filter(|cost| cost.is_finite())
            };
            let [forward, backward] = self.costs_of(index, weights).map(of_pass);
            Some([forward?, backward?])
        };
        let parts = self.parts.iter().enumerate();
        let mut parts = parts.filter(|(_, part)| (part.spec, part.grouping) == (spec, grouping));
        parts.find_map(of_part)
    }
}

/// The least weight of the computation in some slots, and of recomputation.
fn least_in(
    (times, weights): (&PassTimes, &[[f64; 2]]),
    slots: RangeInclusive<usize>,
    side: usize,
) -> f64 {
    times.with_recomputation(slots).map(|slot| weights[slot][side]).fold(1.0, f64::min)
}

/// The segments that can come before (0) and after (1) one of a kind in a pass.
pub(super) fn neighbours(kind: SegmentKind, pass: usize, side: usize) -> &'static [SegmentKind] {
    let is_before_in_forward = side == pass;
    match (kind, is_before_in_forward) {
        (SegmentKind::Embedding, true) | (SegmentKind::Head, false) => &[],
        (SegmentKind::Embedding, false) | (SegmentKind::Head, true) => &[SegmentKind::Block],
        (SegmentKind::Block, true) => &[SegmentKind::Embedding, SegmentKind::Block],
        (SegmentKind::Block, false) => &[SegmentKind::Block, SegmentKind::Head],
    }
}

impl NeighbourWeights {
    /// Those before collectives (0) or after them (1).
    pub(super) fn of(&self, side: usize) -> [f64; 2] {
        [self.end, self.begin][side]
    }
}

impl Reach {
    fn of(part: &PassParts, pass: usize) -> Reach {
        let PassTimes { gemms, slots, .. } = &part.passes[pass];
        let end = slots - 1;
        let communicating = part.communicating_slots(pass, |_| true);
        // Slots are in order, so that no later one reaches further back, and no earlier one further ahead.
        let mut from = None;
        let mut first_before = |end: usize| {
            let candidates = communicating.iter().rev().copied();
            let mut candidates = candidates.filter(|slot| *slot <= end && from < Some(*slot));
            from = candidates.find(|slot| part.always_communicates(pass, *slot..=end)).or(from);
            from
        };
        let first = gemms.iter().map(|gemm| first_before(gemm - 1)).collect();
        let first_of_next = first_before(end);
        let mut to = None;
        let mut last_after = |begin: usize| {
            let is_nearer = |slot: usize| to.is_none_or(|to| slot < to);
            let mut candidates =
                communicating.iter().copied().filter(|slot| *slot >= begin && is_nearer(*slot));
            to = candidates.find(|slot| part.always_communicates(pass, begin..=*slot)).or(to);
            to
        };
        let mut last: Vec<Option<usize>> =
            gemms.iter().rev().map(|gemm| last_after(gemm + 1)).collect();
        last.reverse();
        Reach { first, first_of_next, last, last_of_previous: last_after(0) }
    }

    /// The first slot that can be beside collectives of the next segment, after a GEMM there or before all of these.
    fn at_end(&self, after_gemm: bool) -> Option<usize> {
        match after_gemm {
            true => self.first_of_next,
            false => self.first.last().copied().flatten(),
        }
    }

    /// The last slot that can be beside collectives of the segment before, before a GEMM there or after all of these.
    fn at_begin(&self, before_gemm: bool) -> Option<usize> {
        match before_gemm {
            true => self.last_of_previous,
            false => self.last.first().copied().flatten(),
        }
    }
}
