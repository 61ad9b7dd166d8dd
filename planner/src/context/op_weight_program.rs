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

use super::op_weights::{Beside, NeighbourWeights, SlotWeights, WeightedPasses, neighbours};
use crate::segment::{PassNode, PassParts, PassTimes, Recomputation};
use crate::solve::{LinearProgram, LinearRow, Relaxation};

/// The value of a program whose decisions cost the unit: numbers near it suit the tolerances of the library.
const SCALE: f64 = 1e3;
/// Relative difference of costs at which decisions count as equally cheap.
const TIGHT: f64 = 1e-6;

/// Costs of a part in a step.
pub(super) struct StepCosts {
    /// Of all choices, besides those of one of the passes of a microbatch. Those of all nodes follow one after the other.
    pub besides: Vec<f64>,
    /// The number of these passes.
    pub passes: f64,
}

/// Weights of the segments around a part in a pass.
#[derive(Clone, Copy, Debug)]
pub(super) enum Neighbours {
    /// The same as those of the part at its own ends.
    Same,
    /// Given ones.
    Given(NeighbourWeights),
}

/// A pass of a part.
#[derive(Clone, Copy)]
pub(super) struct PassOfPart<'a> {
    pub passes: &'a WeightedPasses,
    /// The part.
    pub index: usize,
    /// Forward (0) or backward (1).
    pub pass: usize,
    pub neighbours: Neighbours,
}

impl<'a> PassOfPart<'a> {
    fn part(self) -> &'a PassParts {
        &self.passes.parts()[self.index]
    }

    fn times(self) -> &'a PassTimes {
        &self.part().passes[self.pass]
    }

    fn slots_at_end(self, side: usize, gemm: bool) -> RangeInclusive<usize> {
        self.passes.slots_at_end((self.index, self.pass), side, gemm)
    }

    /// The cheapest decisions with these weights, and their cost in seconds; `None` without legal decisions.
    pub(super) fn cheapest(
        self,
        costs: &StepCosts,
        weights: &[[f64; 2]],
    ) -> Option<(f64, Vec<u32>)> {
        let of_pass = (self.index, self.pass);
        let neighbours = match self.neighbours {
            Neighbours::Given(weights) => weights,
            Neighbours::Same => self.passes.end_weights(of_pass, weights),
        };
        let of_pass = self.passes.pass_costs(of_pass, weights, &neighbours);
        let all = of_pass.iter().zip(&costs.besides);
        let all = all.map(|(of_pass, besides)| costs.passes * of_pass + besides);
        self.part().cheapest(&all.collect::<Vec<_>>())
    }
}

/// The cost of decisions as a function of the weights.
struct Cut {
    choice: Vec<u32>,
    constant: f64,
    terms: Vec<(usize, f64)>,
}

/// The program of a pass of a part.
pub(super) struct PartProgram<'a> {
    of: PassOfPart<'a>,
    costs: &'a StepCosts,
    /// The variable of the computation in each slot, in bounds by collectives that follow. `None` where no decisions compute anything.
    computation: Vec<Option<usize>>,
    /// Number of these variables. As many are those in bounds by collectives that precede.
    computations: usize,
    /// Slots in which some decisions have collectives.
    communicating: Vec<usize>,
    upper_bounds: Vec<f64>,
    rows: Vec<LinearRow>,
    cuts: Vec<Cut>,
    /// The factor of all costs in the program.
    scale: f64,
    /// The program of the first so many cuts, once it is solved.
    relaxation: Option<Relaxation>,
    solved: usize,
}

/// The weights that are best over the known decisions.
pub(super) struct ProgramSolution {
    pub weights: SlotWeights,
    /// The least cost that the known decisions have with them, in seconds.
    pub value: f64,
    /// The choices of the decisions that have that cost.
    pub tight: Vec<Vec<u32>>,
}

impl<'a> PartProgram<'a> {
    /// The program without decisions.
    pub(super) fn new(of: PassOfPart<'a>, costs: &'a StepCosts) -> PartProgram<'a> {
        let is_between_ops = |node: &PassNode| matches!(node, PassNode::Reshards(_));
        let mut communicating = of.part().communicating_slots(of.pass, is_between_ops);
        let computation = computation_variables(of.times(), &communicating);
        let computations = computation.iter().flatten().max().map_or(0, |last| last + 1);
        if takes_time(of.times(), |of| &of.collectives) {
            communicating.push(of.times().slot_of_recomputation());
        }
        let mut program = PartProgram {
            of,
            costs,
            computation,
            computations,
            upper_bounds: vec![1.0; 2 * (computations + communicating.len())],
            communicating,
            rows: vec![],
            cuts: vec![],
            scale: 1.0,
            relaxation: None,
            solved: 0,
        };
        program.limit_collectives();
        program.limit_ends();
        for slots in &of.times().residual_sums {
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
            let beside =
                self.of.passes.beside((self.of.index, self.of.pass), self.communicating[at]);
            for (side, Beside { slots, neighbour }) in beside.into_iter().enumerate() {
                let collectives = self.collectives_at(side, at);
                self.limit_by(collectives, side, slots);
                match (neighbour, self.of.neighbours) {
                    (Some(gemm), Neighbours::Given(weights)) => {
                        self.upper_bounds[collectives] = weights.of(side)[usize::from(gemm)];
                    }
                    (Some(gemm), Neighbours::Same) => {
                        let slots = self.of.slots_at_end(side, gemm);
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
        let Neighbours::Given(weights) = self.of.neighbours else { return };
        for side in sides_with_neighbours(self.of.part(), self.of.pass) {
            for gemm in [false, true] {
                let least = weights.of(side)[usize::from(gemm)];
                if least == 0.0 {
                    continue;
                }
                for variable in self.computations_in(side, self.of.slots_at_end(side, gemm)) {
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

    /// The variables of computation in some slots, and of recomputation.
    fn computations_in(&self, side: usize, slots: RangeInclusive<usize>) -> Vec<usize> {
        let slots = self.of.times().with_recomputation(slots);
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
        self.of.cheapest(self.costs, weights)
    }

    /// Whether decisions are known.
    pub(super) fn knows(&self, choice: &[u32]) -> bool {
        self.cuts.iter().any(|cut| cut.choice == choice)
    }

    /// Adds decisions to those that are known.
    pub(super) fn add(&mut self, choice: Vec<u32>) {
        let times = self.of.times();
        let (constant, terms) = (0.0, vec![0.0; self.upper_bounds.len()]);
        let mut cut = CutTerms { of: self, constant, terms };
        let mut first = 0;
        for (node, place) in times.nodes.iter().enumerate() {
            let chosen = |of: &[Vec<f64>]| of[node][choice[node] as usize];
            cut.constant += self.costs.besides[first + choice[node] as usize];
            first += times.computation[node].len();
            let computation = chosen(&times.computation);
            // A residual sum in a GEMM saves time of the linear.
            let slot = match place {
                PassNode::Reshards(slot) if computation < 0.0 => slot.saturating_sub(1),
                _ => place.slot(),
            };
            cut.add_computation(slot, computation);
            let is_between_ops = matches!(place, PassNode::Reshards(_));
            let slot = is_between_ops.then_some(place.slot());
            cut.add_collectives(slot, chosen(&times.collectives));
            if let Some(recomputation) = &times.recomputation {
                let slot = times.slot_of_recomputation();
                match chosen(&recomputation.computation) {
                    saved if saved < 0.0 => cut.constant += saved * self.costs.passes,
                    time => cut.add_computation(slot, time),
                }
                cut.add_collectives(Some(slot), chosen(&recomputation.collectives));
            }
        }
        let CutTerms { constant, terms, .. } = cut;
        let terms = terms.into_iter().enumerate().filter(|(_, term)| *term != 0.0).collect();
        self.cuts.push(Cut { choice, constant, terms });
    }

    /// The best weights over the known decisions; `None` without costs, and where the library fails. The first decisions cost about
    /// `unit` seconds.
    pub(super) fn solve(&mut self, unit: f64) -> Option<ProgramSolution> {
        let relaxation = match self.relaxation.take() {
            Some(relaxation) => relaxation,
            None if unit > 0.0 => {
                (self.scale, self.solved) = (SCALE / unit, self.cuts.len());
                Relaxation::solve(&self.program())?
            }
            None => return None,
        };
        let new = &self.cuts[self.solved..];
        let relaxation =
            new.iter().try_fold(relaxation, |solved, cut| solved.with_row(&self.row(cut)))?;
        self.solved = self.cuts.len();
        let values = relaxation.values();
        self.relaxation = Some(relaxation);
        let of_slot = |slot: usize| {
            [0, 1].map(|side| {
                let weight = self.computation_in(side, slot).map(|variable| values[variable]);
                weight.map_or(1.0, |weight| weight.clamp(0.0, 1.0))
            })
        };
        let least = values[self.upper_bounds.len()] / self.scale;
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

    /// The program of the known decisions, whose last variable is z.
    fn program(&self) -> LinearProgram {
        let mut rows = self.rows.clone();
        rows.extend(self.cuts.iter().map(|cut| self.row(cut)));
        let mut costs = vec![0.0; self.upper_bounds.len()];
        costs.push(-1.0);
        let mut upper_bounds = self.upper_bounds.clone();
        upper_bounds.push(SCALE * SCALE);
        LinearProgram { costs, upper_bounds, rows }
    }

    fn row(&self, cut: &Cut) -> LinearRow {
        let scaled = cut.terms.iter().map(|(variable, term)| (*variable, -term * self.scale));
        LinearRow {
            terms: scaled.chain([(self.upper_bounds.len(), 1.0)]).collect(),
            is_equality: false,
            rhs: cut.constant * self.scale,
        }
    }
}

/// The constant and the terms of a cut, as far as they are known.
struct CutTerms<'a> {
    of: &'a PartProgram<'a>,
    constant: f64,
    terms: Vec<f64>,
}

impl CutTerms<'_> {
    fn add_computation(&mut self, slot: usize, seconds: f64) {
        let seconds = seconds * self.of.costs.passes;
        self.constant += seconds;
        let hidden = self.of.of.passes.slowdown().hidden_computation_cost();
        let saved = seconds * (1.0 - hidden) / 2.0;
        for side in [0, 1] {
            match self.of.computation_in(side, slot) {
                Some(variable) => self.terms[variable] -= saved,
                // Its weight is one.
                None => self.constant -= saved,
            }
        }
    }

    /// Collectives in a slot, or within an op.
    fn add_collectives(&mut self, slot: Option<usize>, seconds: f64) {
        let seconds = seconds * self.of.costs.passes;
        let hidden = self.of.of.passes.slowdown().hidden_cost();
        self.constant += hidden * seconds;
        let at =
            slot.and_then(|slot| self.of.communicating.iter().position(|of_slot| *of_slot == slot));
        if let Some(at) = at {
            for side in [0, 1] {
                self.terms[self.of.collectives_at(side, at)] += seconds * (1.0 - hidden) / 2.0;
            }
        }
    }
}

/// The sides on which a segment has neighbours in a pass: the next one (0), which counts on the weights at its end, and the one before
/// (1).
pub(super) fn sides_with_neighbours(part: &PassParts, pass: usize) -> impl Iterator<Item = usize> {
    let kind = part.spec.kind;
    [0, 1].into_iter().filter(move |side| !neighbours(kind, pass, 1 - side).is_empty())
}

/// Whether some decisions have recomputation with such times.
fn takes_time(times: &PassTimes, of: impl Fn(&Recomputation) -> &[Vec<f64>]) -> bool {
    let recomputation = times.recomputation.as_ref();
    recomputation.is_some_and(|all| of(all).iter().flatten().any(|time| *time > 0.0))
}

/// The variable of the computation in each slot: one for all that no collective can divide, and one for recomputation.
fn computation_variables(times: &PassTimes, communicating: &[usize]) -> Vec<Option<usize>> {
    let mut computes = vec![false; times.slots];
    for (node, times) in times.nodes.iter().zip(times.computation.iter()) {
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
    let mut of_slots: Vec<Option<usize>> = computes.into_iter().enumerate().map(of_slot).collect();
    let is_recomputed = takes_time(times, |of| &of.computation);
    of_slots.resize(times.all_slots(), is_recomputed.then_some(variables));
    of_slots
}
