//! Lower bound on a step of one stage from a mean of cases, and from prices of memory.
//!
//! A step takes at least the time of each case of its [collectives](super::collective_step), and of any mean of them. In a mean, the
//! decisions of a segment are the same in all cases, while the [bounds of single cases](super::collective_bound) take other ones for
//! each: short reductions where these take longer than the backward pass, and fast passes where they do not. All
//! [rooms](super::block_room) of the blocks have a price too. The best shares and prices are those of a [linear
//! program](MeanProgram) over the decisions that are known so far; the best decisions at these are added (cutting planes; Kelley,
//! 1960).

use narrows_cost_model::{PartTimes, StepWeights};
use narrows_plan::Context;

use super::block_room::BlockRoom;
use super::collective_cases::{FirstBuckets, Longer};
use super::collective_step::CollectiveStep;
use crate::pipeline::in_flight_in_chunk;
use crate::segment::{CheapestDecisions, SegmentSolver};
use crate::solve::{MEAN_TOLERANCE, MEANS_MAX, MeanDecisions, MeanMultipliers, MeanProgram};

/// Cases that a mean begins with: those with the largest bounds.
const FIRST_CASES: usize = 3;

/// Decisions of a part of the step.
struct Candidate {
    part: usize,
    buckets: FirstBuckets,
    decisions: CheapestDecisions,
    times: PartTimes,
}

/// Bounds on the plans of a context with one layout, on one stage.
pub(super) struct CollectiveMean<'a, 's> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    step: &'s CollectiveStep<'a>,
    cases: Vec<[Longer; 2]>,
    rooms: Vec<BlockRoom>,
    known: Vec<Candidate>,
}

impl<'a, 's> CollectiveMean<'a, 's> {
    /// The bounds of a step within these rooms of its blocks.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        step: &'s CollectiveStep<'a>,
        rooms: Vec<BlockRoom>,
    ) -> CollectiveMean<'a, 's> {
        let mut cases = step.cases();
        cases.push([Longer::Never; 2]);
        let is_priced = |room: &BlockRoom| room.bytes > 0.0 && step.can_leave_out(room.last_blocks);
        let rooms = rooms.into_iter().filter(is_priced).collect();
        CollectiveMean { segments, context, step, cases, rooms, known: vec![] }
    }

    /// The largest bound that is found, in seconds; one of `cutoff` or more ends the search.
    pub(super) fn bound(&mut self, cutoff: f64, is_interrupted: &dyn Fn() -> bool) -> f64 {
        let mut largest = 0.0_f64;
        for case in self.largest_cases() {
            let Some(bound) = self.evaluate(&self.of_one_case(case)) else { return largest };
            largest = largest.max(bound);
        }
        for _ in 0..MEANS_MAX {
            if largest >= cutoff || largest <= 0.0 || is_interrupted() {
                break;
            }
            let Some(next) = self.program(largest).multipliers() else { break };
            if next.value <= largest * (1.0 + MEAN_TOLERANCE) {
                break;
            }
            let Some(bound) = self.evaluate(&next) else { break };
            largest = largest.max(bound);
        }
        largest
    }

    /// The numbers of the cases with the largest bounds of their own.
    fn largest_cases(&self) -> Vec<usize> {
        let bound = |case: usize| Some((self.step.bound(self.cases[case])?, case));
        let mut bounds: Vec<_> = (0..self.cases.len()).filter_map(bound).collect();
        bounds.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        bounds.into_iter().take(FIRST_CASES).map(|(_, case)| case).collect()
    }

    /// Multipliers by which one case counts alone.
    fn of_one_case(&self, case: usize) -> MeanMultipliers {
        let mut shares = vec![0.0; self.cases.len()];
        shares[case] = 1.0;
        MeanMultipliers { value: 0.0, shares: vec![shares], prices: vec![0.0; self.rooms.len()] }
    }

    /// The bound at these multipliers in seconds; the best decisions become known. `None` where a segment has no legal decisions or is
    /// too wide for elimination.
    fn evaluate(&mut self, multipliers: &MeanMultipliers) -> Option<f64> {
        let MeanMultipliers { shares, prices, .. } = multipliers;
        let shares = &shares[0];
        let of_cases = self.cases.iter().zip(shares);
        let of_rooms = self.rooms.iter().zip(prices);
        let mut bound =
            of_cases.map(|(case, share)| share * self.step.besides_segments(*case)).sum::<f64>()
                - of_rooms.map(|(room, price)| room.bytes * price).sum::<f64>();
        let in_flight = in_flight_in_chunk(self.context, 0, 0);
        let in_buckets = [0, 1].map(|at| {
            let mut of_cases = self.cases.iter().zip(shares);
            of_cases.any(|(case, share)| case[at] == Longer::AtEnd && *share != 0.0)
        });
        for (part, (spec, count)) in self.step.parts().enumerate() {
            let price: f64 = self.rooms_of(part).map(|room| prices[room]).sum();
            let passes = self.step.pass_costs();
            let with_buckets = |buckets: FirstBuckets| {
                let of_cases = self.cases.iter().zip(shares).filter(|(_, share)| **share != 0.0);
                let weights = of_cases.fold(StepWeights::default(), |sum, (case, share)| {
                    sum.plus(self.step.part_weights(part, *case, buckets), *share)
                });
                let (costs, memory) = ((&weights, passes), Some((price, in_flight)));
                Some((
                    buckets,
                    self.segments.cheapest_decisions(spec, self.context, costs, memory)?,
                ))
            };
            let of_buckets = self.step.buckets(part, in_buckets).filter_map(with_buckets);
            let (buckets, decisions) =
                of_buckets.min_by(|(_, a), (_, b)| a.cost.total_cmp(&b.cost))?;
            bound += count * decisions.cost;
            let mut known =
                self.known.iter().filter(|known| (known.part, known.buckets) == (part, buckets));
            if known.any(|known| known.decisions.are_those_of(&decisions)) {
                continue;
            }
            let times = self.segments.part_times(spec, self.context, &decisions, passes)?;
            self.known.push(Candidate { part, buckets, decisions, times });
        }
        Some(bound)
    }

    /// The rooms that count the bytes of a part.
    fn rooms_of(&self, part: usize) -> impl Iterator<Item = usize> {
        let counts = move |room: &usize| self.step.is_counted(part, self.rooms[*room].last_blocks);
        (0..self.rooms.len()).filter(counts)
    }

    /// The program of the shares of cases and the prices of rooms.
    fn program(&self, unit: f64) -> MeanProgram {
        let of_candidate = |candidate: &Candidate| {
            let Candidate { part, buckets, decisions, times } = candidate;
            let of_case = |case: &[Longer; 2]| {
                times.weighted(&self.step.part_weights(*part, *case, *buckets))
            };
            MeanDecisions {
                part: *part,
                times: self.cases.iter().map(of_case).collect(),
                uses: self.rooms_of(*part).map(|room| (room, decisions.bytes)).collect(),
            }
        };
        let constants = self.cases.iter().map(|case| self.step.besides_segments(*case));
        MeanProgram {
            groups: vec![constants.collect()],
            limits: self.rooms.iter().map(|room| room.bytes).collect(),
            counts: self.step.parts().map(|(_, count)| count).collect(),
            decisions: self.known.iter().map(of_candidate).collect(),
            unit,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::context::bound_checks::{check_within_memory, for_each_plan};
    use crate::slower_links;

    use super::*;

    /// Whichever rules choose the decisions, no plan is faster than the mean, which is often larger than all cases.
    #[test]
    fn no_plan_is_faster_than_a_mean_of_its_cases() {
        let (mut checked, mut raised, mut tightest) = (0, 0, f64::INFINITY);
        for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0), ("lax-130m", 4.0)] {
            let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
            for_each_plan(request, (|_| true, 3), |solver, context, relaxed, plan| {
                let overheads = &relaxed.overheads;
                let step =
                    CollectiveStep::with_overheads(solver.segments, context, overheads, None)
                        .expect("one stage");
                let cases = step.cases().into_iter().chain([[Longer::Never; 2]]);
                let largest = cases.filter_map(|of| step.bound(of)).fold(0.0, f64::max);
                let mut mean = CollectiveMean::new(solver.segments, context, &step, vec![]);
                let mean = mean.bound(f64::INFINITY, &|| false);
                assert!(mean >= largest * (1.0 - 1e-9), "{name}, {context:?}");
                assert!(mean <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}");
                checked += 1;
                if mean > largest * 1.01 {
                    raised += 1;
                    tightest = tightest.min(plan.time.0 / mean);
                }
            });
        }
        assert!(checked > 50 && raised > 5, "{checked} checked, {raised} raised");
        assert!(tightest < 1.02, "{tightest}");
    }

    /// Within a memory limit, no plan is faster than the mean, which memory raises.
    #[test]
    fn no_plan_within_the_memory_is_faster_than_a_mean_of_its_cases() {
        let (checked, raised, tightest) = check_within_memory(
            |_| true,
            |solvers, context, ends| {
                solvers.map(|solver| {
                    let relaxed = solver.relaxed_layout(context, ends);
                    let segments = solver.segments;
                    solver.mean_of_collectives(segments, context, (&relaxed, None), f64::INFINITY)
                })
            },
        );
        assert!(checked > 30 && raised > 5, "{checked} checked, {raised} raised");
        assert!(tightest < 1.01, "{tightest}");
    }
}
