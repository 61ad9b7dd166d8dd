//! Bounds of passes of two microbatches that count what computation cannot hide of the collectives.
//!
//! The bound of a division counts each collective as if computation hid it. Other weights of computation and
//! collectives give other bounds of the same plans. The largest is sought on a grid, one weight after the other: as the least of sums
//! that are linear in each weight, the bound is concave in it. It counts the weights for a whole pass, and not what each
//! collective has beside it.

use narrows_plan::Context;

use super::bounds::LayoutBound;
use super::pair_segments::STEPS;
use super::solver::ContextSolver;
use crate::pipeline::EmbeddingAndHead;

impl ContextSolver<'_> {
    /// Raises the bound of a layout with pairs of microbatches.
    pub(super) fn raise_pair_bound(
        &self,
        context: &Context,
        layout: &EmbeddingAndHead,
        bound: LayoutBound,
        incumbent: f64,
    ) -> LayoutBound {
        let LayoutBound::Bound { time, .. } = bound else { return bound };
        let mut largest = time.0;
        let mut known = [[None; STEPS + 1]; STEPS + 1];
        known[0][0] = Some(largest);
        let mut weights = [0; 2];
        loop {
            let before = weights;
            for (axis, is_up) in [(0, true), (0, false), (1, true), (1, false)] {
                while let Some(next) = moved(weights, axis, is_up)
                    && largest < incumbent
                    && !self.out_of_time()
                {
                    let known = &mut known[next[0]][next[1]];
                    let of_weights = || self.weighted_bound(context, layout, next, incumbent);
                    if *known.get_or_insert_with(of_weights) <= largest {
                        break;
                    }
                    (largest, weights) = (known.unwrap_or(largest), next);
                }
            }
            if weights == before {
                break;
            }
        }
        if largest >= incumbent {
            return LayoutBound::NoImprovement;
        }
        bound.raised_to(largest)
    }

    /// Lower bound on the plans of a layout with these weights, in seconds; 0 where none is known.
    fn weighted_bound(
        &self,
        context: &Context,
        layout: &EmbeddingAndHead,
        weights: [usize; 2],
        incumbent: f64,
    ) -> f64 {
        let segments = self.pair_segments.weighted(self.segments, weights);
        let solver = ContextSolver::new(self.request, segments);
        let fastest =
            EmbeddingAndHead::fastest(segments, context, (layout.boundary, layout.tied_weight));
        let Some(fastest) = fastest else { return 0.0 };
        match solver.layout_bound(context, &solver.relaxed_layout(context, &fastest), incumbent) {
            LayoutBound::Bound { time, .. } => time.0,
            LayoutBound::NoImprovement => incumbent,
            LayoutBound::Infeasible(_) => 0.0,
        }
    }
}

/// The weights one step further along an axis.
fn moved(mut weights: [usize; 2], axis: usize, is_up: bool) -> Option<[usize; 2]> {
    let weight = weights[axis];
    weights[axis] = if is_up { weight + 1 } else { weight.checked_sub(1)? };
    (weights[axis] <= STEPS).then_some(weights)
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::{Prices, instruction_spans};
    use narrows_plan::Seconds;
    use narrows_plan::program::{Instr, Phase};

    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::feasible_plan::FeasiblePlan;
    use crate::request::Request;
    use crate::segment::{PairPrices, PairWeights, SegmentSolver};
    use crate::slower_links;

    use super::*;

    /// Plans of the context that are best with each of the prices of pairs.
    fn plans(solver: &ContextSolver, context: &Context) -> Vec<FeasiblePlan> {
        let plan = |segments: &SegmentSolver| {
            let other = ContextSolver::new(solver.request, segments);
            let (_, _, ends, partition) = other.even_partition(*context, f64::INFINITY)?;
            solver.complete_within_limit(solver.size(context, &ends, partition))
        };
        let segments = &solver.pair_segments;
        segments.exposed(solver.segments).for_each(drop);
        segments.iter().filter_map(plan).collect()
    }

    /// Time of a pass alone, and with each weight the sum of its kernels.
    fn pass(instructions: &[Instr], phase: Phase, prices: &Prices) -> (f64, [f64; STEPS + 1]) {
        let alone = |kernel: &narrows_plan::Kernel| prices.kernel_time(kernel);
        let spans = instruction_spans(instructions, prices.streams(&alone));
        let end = spans.iter().map(|[_, end]| end.0).fold(0.0, f64::max);
        let slowdown = prices.overlap_slowdown().expect("a profile with overlap");
        let sums = std::array::from_fn(|step| {
            let weight = step as f64 / STEPS as f64;
            let weights = PairPrices::Bound(PairWeights { forward: weight, backward: weight });
            let time =
                |instr: &Instr| weights.kernel_time(&instr.kernel(), phase, slowdown, prices);
            instructions.iter().map(time).sum::<Seconds>().0
        });
        (end, sums)
    }

    /// Weights raise bounds where links are slow; no pass takes less than a sum of its kernels, and no step less than the bound.
    #[test]
    fn no_plan_in_pairs_is_faster_than_the_raised_bound() {
        let (mut checked, mut raised, mut tightest) = (0, 0, f64::INFINITY);
        for (name, slower) in [("llama-350m", 4.0), ("cola-350m", 4.0), ("llama-350m", 1.0)] {
            let request = slower_links::request(name, [slower, 1.0], [4, 32, 2048]);
            let request = Request { tensor: Some(4), ..request };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            let in_pairs = |context: &Context| context.overlap_microbatch_pairs;
            for context in contexts(&request).into_iter().filter(in_pairs) {
                let bounds = solver.bounds(&context, f64::INFINITY);
                raised += bounds
                    .layouts
                    .iter()
                    .filter(|(_, bound)| {
                        matches!(bound, LayoutBound::Bound { beyond_division, .. } if beyond_division.0 > 0.0)
                    })
                    .count();
                let bound = bounds.bound(f64::INFINITY).expect("a plan").0;
                for plan in plans(&solver, &context) {
                    assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}");
                    let chunk = &plan.program.program().stages[0].chunks[0];
                    for phase in [Phase::Forward, Phase::Backward] {
                        let instructions = chunk.instructions(phase);
                        let (end, sums) = pass(instructions, phase, segments.prices(&context));
                        for sum in sums {
                            assert!(sum <= end * (1.0 + 1e-9), "{name}, {context:?}: {sum}, {end}");
                            tightest = tightest.min(end / sum);
                        }
                    }
                    checked += 1;
                }
            }
        }
        assert!(checked > 50 && raised > 5, "{checked} plans, {raised} bounds");
        assert!(tightest < 1.01, "no pass within {tightest} of a sum");
    }
}
