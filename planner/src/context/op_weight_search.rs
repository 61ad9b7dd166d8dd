//! The search for weights of ops with a large bound.
//!
//! The bound of a segment is that of its cheapest part. Each part therefore has weights of its own, which a [linear
//! program](super::op_weight_program) finds: decisions that are the cheapest with its weights are added to it until it has no better
//! ones (cutting planes; Kelley, 1960). The cheapest part comes first, until all parts reach a target. A part that no weights raise is
//! divided by a collective that some of its decisions have and others do not.
//!
//! Weights of forward passes come first, then those of backward passes with these: the programs of both at once need many more decisions.
//!
//! Collectives at the ends of a segment can be beside computation of its neighbours. At first, each block counts on neighbours with its
//! own weights. All segments then have no smaller weights at their ends than the cheapest block has at its ends, and count on these.

use std::collections::HashMap;

use narrows_plan::graph::{Grouping, SegmentKind};

use super::op_weight_program::{
    Neighbours, PartProgram, PassOfPart, ProgramSolution, StepCosts, sides_with_neighbours,
};
use super::op_weights::{NeighbourWeights, OpWeights, SlotWeights, WeightedPasses};
use crate::segment::{NodeOfPass, PASSES, PassCosts, PassParts, SegmentSpec};

/// Linear programs that are solved for a part.
const PROGRAMS_MAX: usize = 40;
/// Parts of a segment at most.
const PARTS_MAX: usize = 40;
/// The search of a part ends where the program, an upper bound, is larger than the best cost by no more than this share of it.
const TOLERANCE: f64 = 1e-4;
/// Share of the way from the best weights so far to those of a program. The latter are often extreme, and decisions that are cheap with
/// them hardly ever the cheapest with better ones.
const STEP: f64 = 0.5;

/// Costs of a part in a step.
pub(super) struct PartCosts {
    /// Of all choices, besides those of passes of one microbatch. Those of all nodes follow one after the other.
    pub besides: Vec<f64>,
    /// The numbers of forward (0) and of backward passes (1).
    pub passes: [f64; PASSES],
}

/// Weights of the ops of a context with one layout.
pub(super) struct OpWeightSearch<'a> {
    passes: WeightedPasses,
    weights: OpWeights,
    is_interrupted: &'a dyn Fn() -> bool,
}

/// A pass whose weights are sought, and the costs of parts.
struct SearchedPass<'c> {
    pass: usize,
    costs: &'c HashMap<PartKey, PartCosts>,
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
    /// A search from the same weight of all ops in forward (0) and in backward passes (1).
    pub(super) fn new(
        passes: WeightedPasses,
        weights: [f64; PASSES],
        is_interrupted: &'a dyn Fn() -> bool,
    ) -> OpWeightSearch<'a> {
        let weights = passes.uniform(weights);
        OpWeightSearch { passes, weights, is_interrupted }
    }

    /// The costs of all decisions with the current weights.
    pub(super) fn costs(&self) -> PassCosts {
        self.passes.costs(&self.weights)
    }

    /// The passes as they are divided, and the weights.
    #[cfg(test)]
    pub(super) fn into_weights(self) -> (WeightedPasses, OpWeights) {
        (self.passes, self.weights)
    }

    /// Raises the least cost of each segment by weights in a pass, given the costs of a part in a step: those of blocks by `slack` seconds
    /// or less, and those of embedding and head as far as possible.
    pub(super) fn raise(
        &mut self,
        pass: usize,
        part_costs: impl Fn(&PassParts) -> PartCosts,
        slack: f64,
    ) {
        let mut costs = HashMap::new();
        for part in self.passes.parts() {
            costs.entry((part.spec, part.grouping)).or_insert_with(|| part_costs(part));
        }
        let searched = SearchedPass { pass, costs: &costs };
        let mut specs: Vec<SegmentSpec> = vec![];
        for part in self.passes.parts() {
            if !specs.contains(&part.spec) {
                specs.push(part.spec);
            }
        }
        let is_block = |spec: &SegmentSpec| spec.kind == SegmentKind::Block;
        let mut cheapest: Option<(f64, NeighbourWeights)> = None;
        let mut targets = HashMap::new();
        for spec in specs.iter().copied().filter(is_block) {
            let states = self.states(spec, &searched, Neighbours::Same);
            let least = states.iter().map(|state| state.cost).fold(f64::INFINITY, f64::min);
            targets.insert(spec, least + slack);
            let states = self.raise_segment(states, &searched, Neighbours::Same, least + slack);
            let least = states.iter().min_by(|a, b| a.cost.total_cmp(&b.cost));
            if let Some(PartState { index, cost, .. }) = least
                && cheapest.is_none_or(|(other, _)| *cost < other)
            {
                let ends = self.passes.end_weights((*index, pass), &self.weights[*index][pass]);
                cheapest = Some((*cost, ends));
            }
        }
        let Some((_, neighbours)) = cheapest else { return };
        self.raise_ends(pass, neighbours);
        for spec in specs {
            let target = targets.get(&spec).copied().unwrap_or(f64::INFINITY);
            let neighbours = Neighbours::Given(neighbours);
            let states = self.states(spec, &searched, neighbours);
            self.raise_segment(states, &searched, neighbours, target);
        }
    }

    /// Raises the weights at the ends of all parts to those that their neighbours count on.
    fn raise_ends(&mut self, pass: usize, neighbours: NeighbourWeights) {
        for (index, part) in self.passes.parts().iter().enumerate() {
            for side in sides_with_neighbours(part, pass) {
                for gemm in [false, true] {
                    let slots = self.passes.slots_at_end((index, pass), side, gemm);
                    let least = neighbours.of(side)[usize::from(gemm)];
                    for slot in part.passes[pass].with_recomputation(slots) {
                        let weight = &mut self.weights[index][pass][slot][side];
                        *weight = weight.max(least);
                    }
                }
            }
        }
    }

    /// The parts of a segment with their current weights.
    fn states(
        &self,
        spec: SegmentSpec,
        searched: &SearchedPass,
        neighbours: Neighbours,
    ) -> Vec<PartState> {
        let of_segment =
            (0..self.passes.parts().len()).filter(|index| self.passes.parts()[*index].spec == spec);
        of_segment.filter_map(|index| self.state(index, searched, neighbours)).collect()
    }

    /// The costs of a part in a step, with the current weights of the other pass.
    fn step_costs(&self, index: usize, searched: &SearchedPass) -> StepCosts {
        let part = &self.passes.parts()[index];
        let PartCosts { besides, passes } = &searched.costs[&(part.spec, part.grouping)];
        let other = 1 - searched.pass;
        let of_other = self.passes.costs_in((index, other), &self.weights);
        let all = besides.iter().zip(of_other);
        StepCosts {
            besides: all.map(|(besides, of_other)| besides + passes[other] * of_other).collect(),
            passes: passes[searched.pass],
        }
    }

    /// Raises the costs of the cheapest parts of a segment to a target.
    fn raise_segment(
        &mut self,
        mut states: Vec<PartState>,
        searched: &SearchedPass,
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
            let Some(tight) = &states[at].tight else {
                states[at] = self.raise_part(index, searched, neighbours, target);
                continue;
            };
            let node = self.uncertain_collective((index, searched.pass), tight);
            let Some(node) = node.filter(|_| states.len() < PARTS_MAX) else { break };
            let without = self.passes.divide(index, node);
            self.weights.push(self.weights[index].clone());
            states.swap_remove(at);
            let both = [index, without];
            states.extend(
                both.into_iter().filter_map(|index| self.state(index, searched, neighbours)),
            );
        }
        states
    }

    /// A part with its current weights; `None` without legal decisions.
    fn state(
        &self,
        index: usize,
        searched: &SearchedPass,
        neighbours: Neighbours,
    ) -> Option<PartState> {
        let pass = searched.pass;
        let of = PassOfPart { passes: &self.passes, index, pass, neighbours };
        let costs = self.step_costs(index, searched);
        let (cost, _) = of.cheapest(&costs, &self.weights[index][pass])?;
        Some(PartState { index, cost, tight: None })
    }

    /// Raises the cost of a part's cheapest decisions up to a target, as far as weights do.
    fn raise_part(
        &mut self,
        index: usize,
        searched: &SearchedPass,
        neighbours: Neighbours,
        target: f64,
    ) -> PartState {
        let pass = searched.pass;
        let costs = self.step_costs(index, searched);
        let of = PassOfPart { passes: &self.passes, index, pass, neighbours };
        let mut program = PartProgram::new(of, &costs);
        let mut tried: SlotWeights = self.weights[index][pass].clone();
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
        self.weights[index][pass] = weights;
        PartState { index, cost, tight: (cost < target).then_some(tight) }
    }

    /// The node with the longest collective by which a part can be divided: one that some of these decisions have and others have not,
    /// or else one that they have and other decisions of the part may not.
    fn uncertain_collective(
        &self,
        (index, pass): (usize, usize),
        tight: &[Vec<u32>],
    ) -> Option<NodeOfPass> {
        let part = &self.passes.parts()[index];
        let times = &part.passes[pass];
        let [mut disputed, mut undecided] = [(0.0, None); 2];
        for node in 0..times.nodes.len() {
            let of_pass = NodeOfPass { pass, node };
            let times = tight.iter().map(|of| times.collectives[node][of[node] as usize]);
            let (least, most) =
                times.fold((f64::INFINITY, 0.0_f64), |(a, b), time| (a.min(time), b.max(time)));
            if part.is_decided(of_pass) {
                continue;
            }
            if least == 0.0 && most > disputed.0 {
                disputed = (most, Some(of_pass));
            }
            if most > undecided.0 {
                undecided = (most, Some(of_pass));
            }
        }
        disputed.1.or(undecided.1)
    }
}

/// Parts with equal costs besides passes.
type PartKey = (SegmentSpec, Grouping);

/// Weights at a share of the way between others.
fn weights_between(begin: &[[f64; 2]], end: &[[f64; 2]], share: f64) -> SlotWeights {
    let of_slot = |(begin, end): (&[f64; 2], &[f64; 2])| {
        [0, 1].map(|side| begin[side] + share * (end[side] - begin[side]))
    };
    begin.iter().zip(end).map(of_slot).collect()
}
