//! The linear program of the best [weights of ops](super::op_weights) for decisions of a part.
//!
//! With given decisions, the cost of a part is linear in the weights of its computation and of its collectives. Over the decisions that
//! are known,
//!
//! ```text
//! maximise    z
//! subject to  z ≤ c(d) − Σᵤ a(d,u)·w(u) + Σₖ b(d,k)·y(k)   for all known decisions d
//!             y(k) ≤ w(u)                                    for all computation u that can be beside collectives k
//!             0 ≤ w, y ≤ 1
//! ```
//! gives the best weights if no other decisions were possible, and z is an upper bound on the least cost with any weights. Computation
//! that no collective can divide has one weight. Neighbouring segments have either the weights of the part itself, as in a sequence of
//! equal blocks, or given ones. In that case the part has no smaller weights at its ends, on which its neighbours count.

use std::ops::RangeInclusive;

use narrows_plan::graph::SegmentKind;

use super::op_weights::{Beside, NeighbourWeights, PartWeights, WeightedForward};
use crate::segment::{ForwardNode, ForwardParts};
use crate::solve::{LinearProgram, LinearRow, solve_relaxation};

/// The value of a program whose decisions cost the unit: numbers near it suit the tolerances of the library.
const SCALE: f64 = 1e3;
/// Relative difference of costs at which decisions count as equally cheap.
const TIGHT: f64 = 1e-6;

/// Costs of a part in a step, besides those of forward passes of one microbatch.
pub(super) struct StepCosts {
    /// Of all choices, those of all nodes one after the other.
    pub besides: Vec<f64>,
    /// The number of forward passes.
    pub passes: f64,
}

impl StepCosts {
    /// The cheapest decisions of a part with these weights, and their cost in seconds; `None` without legal decisions.
    pub(super) fn cheapest(
        &self,
        (forward, index): (&WeightedForward, usize),
        weights: &[[f64; 2]],
        neighbours: Neighbours,
    ) -> Option<(f64, Vec<u32>)> {
        let neighbours = match neighbours {
            Neighbours::Given(weights) => weights,
            Neighbours::Same => forward.end_weights(index, weights),
        };
        let of_pass = forward.part_costs(index, weights, &neighbours);
        let all = of_pass.iter().zip(&self.besides);
        let all = all.map(|(of_pass, besides)| self.passes * of_pass + besides);
        forward.parts()[index].cheapest(&all.collect::<Vec<_>>())
    }
}

/// Weights of the segments around a part.
#[derive(Clone, Copy, Debug)]
pub(super) enum Neighbours {
    /// The same as those of the part at its own ends.
    Same,
    /// Given ones.
    Given(NeighbourWeights),
}

/// The cost of decisions as a function of the weights.
struct Cut {
    choice: Vec<u32>,
    constant: f64,
    terms: Vec<(usize, f64)>,
}

/// The program of a part.
pub(super) struct PartProgram<'a> {
    forward: &'a WeightedForward,
    index: usize,
    costs: &'a StepCosts,
    neighbours: Neighbours,
    /// The variable of the computation in each slot, in bounds by collectives that follow. `None` where no decisions compute anything.
    computation: Vec<Option<usize>>,
    /// Number of these variables. As many are those in bounds by collectives that precede.
    computations: usize,
    /// Slots in which some decisions have collectives.
    communicating: Vec<usize>,
    upper_bounds: Vec<f64>,
    rows: Vec<LinearRow>,
    cuts: Vec<Cut>,
}

/// The weights that are best over the known decisions.
pub(super) struct ProgramSolution {
    pub weights: PartWeights,
    /// The least cost that the known decisions have with them, in seconds.
    pub value: f64,
    /// The choices of the decisions that have that cost.
    pub tight: Vec<Vec<u32>>,
}

impl<'a> PartProgram<'a> {
    /// The program without decisions.
    pub(super) fn new(
        forward: &'a WeightedForward,
        index: usize,
        costs: &'a StepCosts,
        neighbours: Neighbours,
    ) -> PartProgram<'a> {
        let part = &forward.parts()[index];
        let communicating =
            part.communicating_slots(|node| matches!(node, ForwardNode::Reshards(_)));
        let computation = computation_variables(part, &communicating);
        let computations = computation.iter().flatten().max().map_or(0, |last| last + 1);
        let mut program = PartProgram {
            forward,
            index,
            costs,
            neighbours,
            computation,
            computations,
            upper_bounds: vec![1.0; 2 * (computations + communicating.len())],
            communicating,
            rows: vec![],
            cuts: vec![],
        };
        program.limit_collectives();
        program.limit_ends();
        for slots in &part.residual_sums {
            for side in [0, 1] {
                if let [Some(linear), Some(add)] =
                    slots.map(|slot| program.computation_in(side, slot))
                    && linear != add
                {
                    program.add_no_larger(linear, add);
                }
            }
        }
        program
    }

    /// The weights of collectives are no larger than those of any computation that can be beside them.
    fn limit_collectives(&mut self) {
        for at in 0..self.communicating.len() {
            let beside = self.forward.beside(self.index, self.communicating[at]);
            for (side, Beside { slots, neighbour }) in beside.into_iter().enumerate() {
                let collectives = self.collectives_at(side, at);
                self.limit_by(collectives, side, slots);
                match (neighbour, self.neighbours) {
                    (Some(gemm), Neighbours::Given(weights)) => {
                        self.upper_bounds[collectives] = weights.of(side)[usize::from(gemm)];
                    }
                    (Some(gemm), Neighbours::Same) => {
                        let slots = self.forward.slots_at_end(self.index, side, gemm);
                        self.limit_by(collectives, side, slots);
                    }
                    (None, _) => {}
                }
            }
        }
    }

    fn limit_by(&mut self, collectives: usize, side: usize, slots: RangeInclusive<usize>) {
        for variable in self.computations_in(side, slots) {
            self.add_no_larger(collectives, variable);
        }
    }

    /// The weights at the ends of the part are no smaller than those that its neighbours count on.
    fn limit_ends(&mut self) {
        let Neighbours::Given(weights) = self.neighbours else { return };
        for side in sides_with_neighbours(&self.forward.parts()[self.index]) {
            for gemm in [false, true] {
                let least = weights.of(side)[usize::from(gemm)];
                if least == 0.0 {
                    continue;
                }
                let slots = self.forward.slots_at_end(self.index, side, gemm);
                for variable in self.computations_in(side, slots) {
                    self.add_row(vec![(variable, -1.0)], -least);
                }
            }
        }
    }

    fn add_no_larger(&mut self, smaller: usize, larger: usize) {
        self.add_row(vec![(smaller, 1.0), (larger, -1.0)], 0.0);
    }

    fn add_row(&mut self, terms: Vec<(usize, f64)>, rhs: f64) {
        self.rows.push(LinearRow { terms, is_equality: false, rhs });
    }

    fn computation_in(&self, side: usize, slot: usize) -> Option<usize> {
        Some(side * self.computations + self.computation[slot]?)
    }

    /// The variables of computation in some slots.
    fn computations_in(&self, side: usize, slots: RangeInclusive<usize>) -> Vec<usize> {
        let mut all: Vec<usize> =
            slots.filter_map(|slot| self.computation_in(side, slot)).collect();
        all.dedup();
        all
    }

    fn collectives_at(&self, side: usize, at: usize) -> usize {
        2 * self.computations + side * self.communicating.len() + at
    }

    /// The cheapest decisions with these weights, and their cost in seconds; `None` without legal decisions.
    pub(super) fn cheapest(&self, weights: &[[f64; 2]]) -> Option<(f64, Vec<u32>)> {
        self.costs.cheapest((self.forward, self.index), weights, self.neighbours)
    }

    /// Whether decisions are known.
    pub(super) fn knows(&self, choice: &[u32]) -> bool {
        self.cuts.iter().any(|cut| cut.choice == choice)
    }

    /// Adds decisions to those that are known.
    pub(super) fn add(&mut self, choice: Vec<u32>) {
        let part = &self.forward.parts()[self.index];
        let slowdown = self.forward.slowdown();
        let [hidden, hidden_computation] =
            [slowdown.hidden_cost(), slowdown.hidden_computation_cost()];
        let StepCosts { besides, passes } = self.costs;
        let mut terms = vec![0.0; self.upper_bounds.len()];
        let (mut constant, mut first) = (0.0, 0);
        for (number, node) in part.nodes.iter().enumerate() {
            let chosen = choice[number] as usize;
            let [computation, collective] =
                [&part.computation, &part.collectives].map(|of| of[number][chosen] * passes);
            constant += besides[first + chosen] + computation + hidden * collective;
            first += part.computation[number].len();
            // A residual sum in a GEMM saves time of the linear.
            let counted = match node {
                ForwardNode::Reshards(slot) if computation < 0.0 => slot.saturating_sub(1),
                _ => node.slot(),
            };
            let saved = computation * (1.0 - hidden_computation) / 2.0;
            for side in [0, 1] {
                match self.computation_in(side, counted) {
                    Some(variable) => terms[variable] -= saved,
                    // Its weight is one.
                    None => constant -= saved,
                }
            }
            let at = self.communicating.iter().position(|slot| *slot == node.slot());
            if let (ForwardNode::Reshards(_), Some(at)) = (node, at) {
                for side in [0, 1] {
                    terms[self.collectives_at(side, at)] += collective * (1.0 - hidden) / 2.0;
                }
            }
        }
        let terms = terms.into_iter().enumerate().filter(|(_, term)| *term != 0.0).collect();
        self.cuts.push(Cut { choice, constant, terms });
    }

    /// The best weights over the known decisions, whose costs are about `unit` seconds; `None` without costs, and where the library fails.
    pub(super) fn solve(&self, unit: f64) -> Option<ProgramSolution> {
        if unit <= 0.0 {
            return None;
        }
        let value = self.upper_bounds.len();
        let scale = SCALE / unit;
        let mut rows = self.rows.clone();
        rows.extend(self.cuts.iter().map(|cut| {
            let scaled = cut.terms.iter().map(|(variable, term)| (*variable, -term * scale));
            LinearRow {
                terms: scaled.chain([(value, 1.0)]).collect(),
                is_equality: false,
                rhs: cut.constant * scale,
            }
        }));
        let mut costs = vec![0.0; value + 1];
        costs[value] = -1.0;
        let mut upper_bounds = self.upper_bounds.clone();
        upper_bounds.push(SCALE * SCALE);
        let values = solve_relaxation(&LinearProgram { costs, upper_bounds, rows })?;
        let of_slot = |slot: usize| {
            [0, 1].map(|side| {
                let weight = self.computation_in(side, slot).map(|variable| values[variable]);
                weight.map_or(1.0, |weight| weight.clamp(0.0, 1.0))
            })
        };
        let least = values[value] / scale;
        let cost = |cut: &Cut| {
            let terms = cut.terms.iter().map(|(variable, term)| term * values[*variable]);
            cut.constant + terms.sum::<f64>()
        };
        let tight = self.cuts.iter().filter(|cut| cost(cut) <= least * (1.0 + TIGHT));
        Some(ProgramSolution {
            weights: (0..self.computation.len()).map(of_slot).collect(),
            value: least,
            tight: tight.map(|cut| cut.choice.clone()).collect(),
        })
    }
}

/// The sides on which a segment has neighbours: the next one (0), which counts on the weights at its end, and the one before (1).
pub(super) fn sides_with_neighbours(part: &ForwardParts) -> RangeInclusive<usize> {
    match part.spec.kind {
        SegmentKind::Embedding => 0..=0,
        SegmentKind::Block => 0..=1,
        SegmentKind::Head => 1..=1,
    }
}

/// The variable of the computation in each slot: one for all that no collective can divide.
fn computation_variables(part: &ForwardParts, communicating: &[usize]) -> Vec<Option<usize>> {
    let mut computes = vec![false; part.slots()];
    for (node, times) in part.nodes.iter().zip(part.computation.iter()) {
        computes[node.slot()] |= times.iter().any(|time| *time != 0.0);
    }
    let (mut variables, mut is_divided) = (0, true);
    let of_slot = |(slot, computes): (usize, bool)| {
        let communicates = communicating.binary_search(&slot).is_ok();
        is_divided |= communicates;
        if computes && is_divided {
            variables += 1;
            is_divided = false;
        }
        is_divided |= communicates;
        computes.then(|| variables - 1)
    };
    computes.into_iter().enumerate().map(of_slot).collect()
}
