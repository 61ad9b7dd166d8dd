//! The search for weights of ops with a large bound.
//!
//! The bound of a segment is that of its cheapest part. Each part therefore has weights of its own, which a [linear
//! program](super::op_weight_program) finds: decisions that are the cheapest with its weights are added to it until it has no better
//! ones (cutting planes; Kelley, 1960). The cheapest part comes first, until all parts reach a target. A part that no weights raise is
//! divided by a collective that some of its decisions have and others do not.
//!
//! Collectives at the ends of a segment can be beside computation of its neighbours. At first, each block counts on neighbours with its
//! own weights. All segments then have no smaller weights at their ends than the cheapest block has at its ends, and count on these.

use std::collections::HashMap;

use narrows_plan::graph::{Grouping, SegmentKind};

use super::op_weight_program::{
    Neighbours, PartProgram, ProgramSolution, StepCosts, sides_with_neighbours,
};
use super::op_weights::{NeighbourWeights, OpWeights, PartWeights, WeightedForward};
use crate::segment::{ForwardCosts, ForwardParts, SegmentSpec};

/// Linear programs that are solved for a part.
const PROGRAMS_MAX: usize = 40;
/// Parts of a segment at most.
const PARTS_MAX: usize = 40;
/// The search of a part ends where the program, an upper bound, is larger than the best cost by no more than this share of it.
const TOLERANCE: f64 = 1e-4;
/// Share of the way from the best weights so far to those of a program. The latter are often extreme, and decisions that are cheap with
/// them hardly ever the cheapest with better ones.
const STEP: f64 = 0.5;

/// Weights of the ops of a context with one layout.
pub(super) struct OpWeightSearch<'a> {
    forward: WeightedForward,
    weights: OpWeights,
    is_interrupted: &'a dyn Fn() -> bool,
}

/// A part of a segment.
struct PartState {
    index: usize,
    /// The cost of its cheapest decisions with the current weights, in seconds.
    cost: f64,
    /// Decisions that are the cheapest with the best weights, where these are known: no others give much more.
    tight: Option<Vec<Vec<u32>>>,
}

impl<'a> OpWeightSearch<'a> {
    /// A search from the same weight of all ops.
    pub(super) fn new(
        forward: WeightedForward,
        weight: f64,
        is_interrupted: &'a dyn Fn() -> bool,
    ) -> OpWeightSearch<'a> {
        let weights = forward.uniform(weight);
        OpWeightSearch { forward, weights, is_interrupted }
    }

    /// The costs of all decisions with the current weights.
    pub(super) fn costs(&self) -> ForwardCosts {
        self.forward.costs(&self.weights)
    }

    /// The passes as they are divided, and the weights.
    #[cfg(test)]
    pub(super) fn into_weights(self) -> (WeightedForward, OpWeights) {
        (self.forward, self.weights)
    }

    /// Raises the least cost of each segment, given the costs of a part in a step: those of blocks by `slack` seconds or less, and those
    /// of embedding and head as far as possible.
    pub(super) fn raise(&mut self, step_costs: impl Fn(&ForwardParts) -> StepCosts, slack: f64) {
        let mut costs = HashMap::new();
        for part in self.forward.parts() {
            costs.entry((part.spec, part.grouping)).or_insert_with(|| step_costs(part));
        }
        let mut specs: Vec<SegmentSpec> = vec![];
        for part in self.forward.parts() {
            if !specs.contains(&part.spec) {
                specs.push(part.spec);
            }
        }
        let is_block = |spec: &SegmentSpec| spec.kind == SegmentKind::Block;
        let mut cheapest: Option<(f64, NeighbourWeights)> = None;
        let mut targets = HashMap::new();
        for spec in specs.iter().copied().filter(is_block) {
            let states = self.states(spec, &costs, Neighbours::Same);
            let least = states.iter().map(|state| state.cost).fold(f64::INFINITY, f64::min);
            targets.insert(spec, least + slack);
            let states = self.raise_segment(states, &costs, Neighbours::Same, least + slack);
            let least = states.iter().min_by(|a, b| a.cost.total_cmp(&b.cost));
            if let Some(PartState { index, cost, .. }) = least
                && cheapest.is_none_or(|(other, _)| *cost < other)
            {
                cheapest = Some((*cost, self.forward.end_weights(*index, &self.weights[*index])));
            }
        }
        let Some((_, neighbours)) = cheapest else { return };
        self.raise_ends(neighbours);
        for spec in specs {
            let target = targets.get(&spec).copied().unwrap_or(f64::INFINITY);
            let neighbours = Neighbours::Given(neighbours);
            let states = self.states(spec, &costs, neighbours);
            self.raise_segment(states, &costs, neighbours, target);
        }
    }

    /// Raises the weights at the ends of all parts to those that their neighbours count on.
    fn raise_ends(&mut self, neighbours: NeighbourWeights) {
        for (index, part) in self.forward.parts().iter().enumerate() {
            for side in sides_with_neighbours(part) {
                for gemm in [false, true] {
                    let slots = self.forward.slots_at_end(index, side, gemm);
                    let least = neighbours.of(side)[usize::from(gemm)];
                    for weights in &mut self.weights[index][slots] {
                        weights[side] = weights[side].max(least);
                    }
                }
            }
        }
    }

    /// The parts of a segment with their current weights.
    fn states(
        &self,
        spec: SegmentSpec,
        costs: &HashMap<PartKey, StepCosts>,
        neighbours: Neighbours,
    ) -> Vec<PartState> {
        let of_segment = (0..self.forward.parts().len())
            .filter(|index| self.forward.parts()[*index].spec == spec);
        of_segment
            .filter_map(|index| self.state(index, &costs[&self.key(index)], neighbours))
            .collect()
    }

    /// Raises the costs of the cheapest parts of a segment to a target.
    fn raise_segment(
        &mut self,
        mut states: Vec<PartState>,
        costs: &HashMap<PartKey, StepCosts>,
        neighbours: Neighbours,
        target: f64,
    ) -> Vec<PartState> {
        loop {
            let cost = |at: &usize| states[*at].cost;
            let cheapest = (0..states.len()).min_by(|a, b| cost(a).total_cmp(&cost(b)));
            let Some(at) = cheapest.filter(|at| states[*at].cost < target) else { break };
            if (self.is_interrupted)() {
                break;
            }
            let index = states[at].index;
            let step_costs = &costs[&self.key(index)];
            let Some(tight) = &states[at].tight else {
                states[at] = self.raise_part(index, step_costs, neighbours, target);
                continue;
            };
            let node = self.uncertain_collective(index, tight);
            let Some(node) = node.filter(|_| states.len() < PARTS_MAX) else { break };
            let without = self.forward.divide(index, node);
            self.weights.push(self.weights[index].clone());
            states.swap_remove(at);
            let both = [index, without];
            states.extend(
                both.into_iter().filter_map(|index| self.state(index, step_costs, neighbours)),
            );
        }
        states
    }

    fn key(&self, index: usize) -> PartKey {
        let part = &self.forward.parts()[index];
        (part.spec, part.grouping)
    }

    /// A part with its current weights; `None` without legal decisions.
    fn state(&self, index: usize, costs: &StepCosts, neighbours: Neighbours) -> Option<PartState> {
        let part = (&self.forward, index);
        let (cost, _) = costs.cheapest(part, &self.weights[index], neighbours)?;
        Some(PartState { index, cost, tight: None })
    }

    /// Raises the cost of a part's cheapest decisions up to a target, as far as weights do.
    fn raise_part(
        &mut self,
        index: usize,
        costs: &StepCosts,
        neighbours: Neighbours,
        target: f64,
    ) -> PartState {
        let mut program = PartProgram::new(&self.forward, index, costs, neighbours);
        let mut tried: PartWeights = self.weights[index].clone();
        let mut best = (f64::NEG_INFINITY, tried.clone());
        let mut tight = vec![];
        for _ in 0..PROGRAMS_MAX {
            let Some((cost, choice)) = program.cheapest(&tried) else { break };
            if cost > best.0 {
                best = (cost, tried);
            }
            if best.0 >= target {
                break;
            }
            // Decisions that are the cheapest on the way may be known, but hardly those with the weights of the program.
            let is_known = program.knows(&choice);
            if !is_known {
                program.add(choice);
            }
            let Some(solution) = program.solve(best.0) else { break };
            let ProgramSolution { weights, value, tight: of_solution } = solution;
            tight = of_solution;
            if value <= best.0 * (1.0 + TOLERANCE) {
                break;
            }
            let share = if is_known { 1.0 } else { STEP };
            tried = weights_between(&best.1, &weights, share);
        }
        let (cost, weights) = best;
        self.weights[index] = weights;
        PartState { index, cost, tight: (cost < target).then_some(tight) }
    }

    /// The node with the longest collective by which a part can be divided: one that some of these decisions have and others have not,
    /// or else one that they have and other decisions of the part may not.
    fn uncertain_collective(&self, index: usize, tight: &[Vec<u32>]) -> Option<usize> {
        let part = &self.forward.parts()[index];
        let [mut disputed, mut undecided] = [(0.0, None); 2];
        for number in 0..part.nodes.len() {
            let times = tight.iter().map(|of| part.collectives[number][of[number] as usize]);
            let (least, most) =
                times.fold((f64::INFINITY, 0.0_f64), |(a, b), time| (a.min(time), b.max(time)));
            if part.is_decided(number) {
                continue;
            }
            if least == 0.0 && most > disputed.0 {
                disputed = (most, Some(number));
            }
            if most > undecided.0 {
                undecided = (most, Some(number));
            }
        }
        disputed.1.or(undecided.1)
    }
}

/// Parts with equal costs besides forward passes.
type PartKey = (SegmentSpec, Grouping);

/// Weights at a share of the way between others.
fn weights_between(begin: &[[f64; 2]], end: &[[f64; 2]], share: f64) -> PartWeights {
    let of_slot = |(begin, end): (&[f64; 2], &[f64; 2])| {
        [0, 1].map(|side| begin[side] + share * (end[side] - begin[side]))
    };
    begin.iter().zip(end).map(of_slot).collect()
}
