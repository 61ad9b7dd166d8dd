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
//! beside it, neighbouring segments included, and one within an op has none. The decisions are divided by where they have collectives,
//! so that little can be beside each.
//!
//! As a function of the weights, the bound is concave. For given decisions, the best weights are 1 where collectives take longer
//! than the computation beside them, and 0 elsewhere.

use std::ops::RangeInclusive;

use narrows_cost_model::OverlapSlowdown;
use narrows_plan::graph::SegmentKind;
#[cfg(test)]
use narrows_plan::{graph::Grouping, strategy::SegmentChoice};

#[cfg(test)]
use crate::segment::SegmentSpec;
use crate::segment::{ForwardCosts, ForwardNode, ForwardParts};

/// Shares of the way to other weights that are tried.
const SHARES: [f64; 3] = [0.25, 0.5, 1.0];
/// Factor by which a step raises the bound at least.
const GAIN_MIN: f64 = 1.0 + 1e-4;

/// Weights of the computation in each slot of each part, in bounds by collectives that follow (0) and that precede it (1).
pub(super) type OpWeights = Vec<Vec<[f64; 2]>>;

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

/// A run of computation with a GEMM or attention, and the collectives after it. Slots are of parts at a place of a sequence.
#[derive(Default)]
struct Run {
    /// In seconds.
    computation: f64,
    has_gemm: bool,
    slots: Vec<(usize, usize)>,
    /// In seconds.
    collectives: f64,
    /// Slots of short computation between these collectives.
    between: Vec<(usize, usize)>,
}

impl WeightedForward {
    /// The parts divided by where the decisions have collectives that are the cheapest if half of the collectives is exposed: one
    /// part has all of these, and each other is without one that those before it have.
    pub(super) fn new(parts: Vec<ForwardParts>, slowdown: OverlapSlowdown) -> WeightedForward {
        let of_part = |part| divided(part, slowdown);
        let mut parts: Vec<ForwardParts> = parts.into_iter().flat_map(of_part).collect();
        parts.retain(|part| part.cheapest(&part.backward).is_some());
        parts.iter_mut().for_each(ForwardParts::leave_out_resharded_sums);
        let reach = parts.iter().map(Reach::of).collect();
        WeightedForward { parts, reach, slowdown }
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
                    mean(self.weight_at(index, node.slot(), weights)),
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
    fn weight_of(&self, index: usize, slot: usize, weights: &OpWeights) -> [f64; 2] {
        let (part, weights) = (&self.parts[index], &weights[index]);
        let linear = part.residual_sums.iter().find(|[_, add]| *add == slot);
        let of_linear = linear.map_or([0.0; 2], |[linear, _]| weights[*linear]);
        [0, 1].map(|side| weights[slot][side].max(of_linear[side]))
    }

    /// The weights of collectives in a slot.
    fn weight_at(&self, index: usize, slot: usize, weights: &OpWeights) -> [f64; 2] {
        let (part, reach) = (&self.parts[index], &self.reach[index]);
        let least = |of: usize, slots: RangeInclusive<usize>, side: usize| {
            weights[of][slots].iter().map(|both| both[side]).fold(1.0, f64::min)
        };
        let before = part.gemms.iter().rposition(|gemm| *gemm <= slot);
        let preceding = match before.and_then(|gemm| reach.first[gemm]) {
            Some(first) => least(index, first..=slot, 0),
            None => {
                let of_previous =
                    |other: usize| least(other, self.end_of(other, before.is_some()), 0);
                let own = least(index, 0..=slot, 0);
                self.previous(index).map(of_previous).fold(own, f64::min)
            }
        };
        let after = part.gemms.iter().position(|gemm| *gemm > slot);
        let following = match after.and_then(|gemm| reach.last[gemm]) {
            Some(last) => least(index, slot..=last, 1),
            None => {
                let of_next = |other: usize| least(other, self.begin_of(other, after.is_some()), 1);
                let own = least(index, slot..=part.slots() - 1, 1);
                self.next(index).map(of_next).fold(own, f64::min)
            }
        };
        [preceding, following]
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

    /// The cheapest decisions of a part in both passes of one microbatch with these weights, and their cost in seconds.
    fn cheapest(&self, index: usize, weights: &OpWeights) -> Option<(f64, Vec<u32>)> {
        let part = &self.parts[index];
        let both = part.backward.iter().zip(self.costs_of(index, weights));
        part.cheapest(&both.map(|(backward, forward)| backward + forward).collect::<Vec<f64>>())
    }

    /// The best weights for the decisions of each part that are the cheapest with these.
    pub(super) fn best_for_cheapest(&self, weights: &OpWeights) -> OpWeights {
        let chosen: Vec<Option<(f64, Vec<u32>)>> =
            (0..self.parts.len()).map(|index| self.cheapest(index, weights)).collect();
        let mut best = self.uniform(0.0);
        let is_chosen = |index: &usize| chosen[*index].is_some();
        let first = |kinds| self.of_kinds(kinds).find(is_chosen);
        let (Some(embedding), Some(head)) =
            (first(&[SegmentKind::Embedding]), first(&[SegmentKind::Head]))
        else {
            return best;
        };
        // The cheapest last: embedding and head have the weights of its neighbours.
        let mut blocks: Vec<usize> =
            self.of_kinds(&[SegmentKind::Block]).filter(is_chosen).collect();
        let cost = |index: &usize| chosen[*index].as_ref().map_or(0.0, |(cost, _)| *cost);
        blocks.sort_by(|a, b| cost(b).total_cmp(&cost(a)));
        for block in &blocks {
            // The block between two others has the runs of most blocks.
            let sequence = [embedding, *block, *block, *block, head];
            let choices =
                sequence.map(|index| chosen[index].as_ref().map(|(_, choice)| &choice[..]));
            let runs = self.runs(&sequence, &choices.map(Option::unwrap_or_default));
            for (of_run, slots) in self.weights_of_runs(&runs) {
                for (place, slot) in slots.iter().filter(|(place, _)| ![1, 3].contains(place)) {
                    best[sequence[*place]][*slot] = of_run;
                }
            }
        }
        if let Some(cheapest) = blocks.last() {
            self.raise_neighbours(*cheapest, &mut best);
        }
        best
    }

    /// The weights with the largest bound on the way from these, with a known bound, towards those that are best for the cheapest
    /// decisions; `None` where the first step hardly raises the bound.
    pub(super) fn improved(
        &self,
        (known, weights): &(f64, OpWeights),
        bound: impl Fn(&OpWeights) -> f64,
    ) -> Option<(f64, OpWeights)> {
        let best = self.without_losses(weights, self.best_for_cheapest(weights));
        let step = |share: f64| {
            let tried = weights_between([weights, &best], share);
            (bound(&tried), tried)
        };
        // A concave bound that a short step does not raise is raised by no longer one.
        let [short, longer @ ..] = SHARES;
        let mut highest = step(short);
        if highest.0 <= known * GAIN_MIN {
            return None;
        }
        for share in longer {
            let next = step(share);
            if next.0 <= highest.0 {
                break;
            }
            highest = next;
        }
        Some(highest)
    }

    /// The changed weights of the parts whose cheapest decisions cost no less with them, and the given weights of all others.
    fn without_losses(&self, weights: &OpWeights, mut changed: OpWeights) -> OpWeights {
        let cost = |index: usize, weights: &OpWeights| {
            self.cheapest(index, weights).map_or(f64::INFINITY, |(cost, _)| cost)
        };
        let indices = 0..self.parts.len();
        let losses: Vec<usize> =
            indices.filter(|index| cost(*index, &changed) < cost(*index, weights)).collect();
        for index in losses {
            changed[index].clone_from(&weights[index]);
        }
        changed
    }

    /// Raises the weights next to a block of this part, in whichever parts these are, to its own weights there.
    fn raise_neighbours(&self, block: usize, weights: &mut OpWeights) {
        let least = |weights: &[[f64; 2]], side: usize| {
            weights.iter().map(|both| both[side]).fold(1.0, f64::min)
        };
        let (end, begin) = (self.end_of(block, true), self.begin_of(block, true));
        let (of_end, of_begin) = (least(&weights[block][end], 0), least(&weights[block][begin], 1));
        for other in self.previous(block) {
            let raised = weights[other][self.end_of(other, true)].iter_mut();
            raised.for_each(|both| both[0] = both[0].max(of_end));
        }
        for other in self.next(block) {
            let raised = weights[other][self.begin_of(other, true)].iter_mut();
            raised.for_each(|both| both[1] = both[1].max(of_begin));
        }
    }

    /// The weights of each run, and the larger ones of neighbouring runs for what is between them, with their slots.
    fn weights_of_runs<'a>(
        &self,
        runs: &'a [Run],
    ) -> impl Iterator<Item = ([f64; 2], &'a [(usize, usize)])> {
        let [hidden, hidden_computation] =
            [self.slowdown.hidden_cost(), self.slowdown.hidden_computation_cost()];
        let weight = move |collectives: f64, run: &Run| {
            let is_longer =
                collectives * (1.0 - hidden) > run.computation * (1.0 - hidden_computation);
            if is_longer { 1.0_f64 } else { 0.0 }
        };
        let of_run = move |at: usize| {
            let run = runs.get(at)?;
            let before = at.checked_sub(1).map_or(0.0, |before| runs[before].collectives);
            Some([run.collectives, before].map(|collectives| weight(collectives, run)))
        };
        runs.iter().enumerate().flat_map(move |(at, run)| {
            let of_both: [[f64; 2]; 2] =
                [of_run(at), of_run(at + 1)].map(Option::unwrap_or_default);
            let larger = [0, 1].map(|side| of_both[0][side].max(of_both[1][side]));
            [(of_both[0], &run.slots[..]), (larger, &run.between[..])]
        })
    }

    /// The runs of a sequence of parts under these choices.
    fn runs(&self, sequence: &[usize], choices: &[&[u32]]) -> Vec<Run> {
        let mut runs: Vec<Run> = vec![];
        let mut run = Run::default();
        for (place, (index, choice)) in sequence.iter().zip(choices).enumerate() {
            let part = &self.parts[*index];
            let mut times = vec![[0.0; 2]; part.slots()];
            for (number, (node, choice)) in part.nodes.iter().zip(*choice).enumerate() {
                let [computation, collectives] = &mut times[node.slot()];
                *computation += part.computation[number][*choice as usize];
                *collectives += part.collectives[number][*choice as usize];
            }
            for (slot, [computation, collectives]) in times.into_iter().enumerate() {
                run.computation += computation;
                run.has_gemm |= part.gemms.contains(&slot);
                if collectives == 0.0 {
                    run.slots.push((place, slot));
                    continue;
                }
                run.collectives += collectives;
                run.between.push((place, slot));
                match runs.last_mut() {
                    Some(before) if !run.has_gemm => {
                        before.collectives += run.collectives;
                        before.between.append(&mut run.slots);
                        before.between.append(&mut run.between);
                    }
                    _ => runs.push(std::mem::take(&mut run)),
                }
                run = Run::default();
            }
        }
        runs.push(run);
        runs
    }
}

impl Reach {
    fn of(part: &ForwardParts) -> Reach {
        let end = part.slots() - 1;
        let first_before =
            |end: usize| (0..=end).rev().find(|first| part.always_communicates(*first..=end));
        let last_after =
            |begin: usize| (begin..=end).find(|last| part.always_communicates(begin..=*last));
        Reach {
            first: part.gemms.iter().map(|gemm| first_before(gemm - 1)).collect(),
            first_of_next: first_before(end),
            last: part.gemms.iter().map(|gemm| last_after(gemm + 1)).collect(),
            last_of_previous: last_after(0),
        }
    }
}

/// The parts of a block's decisions; others are not divided.
fn divided(part: ForwardParts, slowdown: OverlapSlowdown) -> Vec<ForwardParts> {
    let exposed = (1.0 + slowdown.hidden_cost()) / 2.0;
    let forward = part.computation.iter().flatten().zip(part.collectives.iter().flatten());
    let forward = forward.map(|(computation, collective)| computation + exposed * collective);
    let both = part.backward.iter().zip(forward);
    let costs: Vec<f64> = both.map(|(backward, forward)| backward + forward).collect();
    let Some((_, choice)) = part.cheapest(&costs) else { return vec![part] };
    let communicates = |node: &usize| part.collectives[*node][choice[*node] as usize] > 0.0;
    let (mut parts, mut rest) = (vec![], part.clone());
    if part.spec.kind == SegmentKind::Block {
        for node in (0..part.nodes.len()).filter(communicates) {
            parts.push(rest.restricted(node, false));
            rest = rest.restricted(node, true);
        }
    }
    parts.push(rest);
    parts
}

/// Weights between others: those at the begin and a share of the way to those at the end.
fn weights_between([begin, end]: [&OpWeights; 2], share: f64) -> OpWeights {
    let of_slot = |(begin, end): (&[f64; 2], &[f64; 2])| {
        [0, 1].map(|side| begin[side] + share * (end[side] - begin[side]))
    };
    let of_part = |(begin, end): (&Vec<[f64; 2]>, &Vec<[f64; 2]>)| {
        begin.iter().zip(end).map(of_slot).collect()
    };
    begin.iter().zip(end).map(of_part).collect()
}
