//! Bounds of passes of two microbatches that count what computation cannot hide of the collectives.
//!
//! The bound of a division counts each collective as if computation hid it. Other weights of computation and
//! collectives give other bounds of the same plans. The largest is sought on a grid, one weight after the other: as the least of sums
//! that are linear in each weight, the bound is concave in it. These are weights of whole passes. From the largest bound on the grid,
//! [weights of their own](super::op_weights) for each op are [sought](super::op_weight_search), with each price of
//! memory. With the best of these, [means of cases](super::collective_mean) of the collectives over the data axis are bounds too.

use std::mem;

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::graph::SegmentKind;

use super::bounds::LayoutBound;
use super::collective_bound::CollectiveBounds;
use super::op_weight_search::{OpWeightSearch, PartCosts};
use super::op_weights::WeightedPasses;
use super::pair_segments::STEPS;
use super::solver::ContextSolver;
use crate::pipeline::{EmbeddingAndHead, in_flight_in_chunk};
use crate::segment::{PASSES, PassCosts, PassParts, SegmentSolver};

/// Times of blocks are raised by this multiple of what the incumbent has more than the bound with one weight.
const SLACK: f64 = 1.5;
/// Share of the incumbent from which on a bound is raised by weights of their own for each op.
const OP_WEIGHTS_FROM: f64 = 0.8;

impl ContextSolver<'_> {
    /// Raises the bounds of layouts with pairs of microbatches, which are sorted: the least first. Those after one that stays less than
    /// the incumbent only need to be no less than it, and none are raised after one that stays at a `known` bound of the context.
    pub(super) fn raise_pair_bounds(
        &self,
        context: &Context,
        layouts: &mut [(EmbeddingAndHead, LayoutBound)],
        [known, incumbent]: [f64; 2],
    ) {
        let mut enough = incumbent;
        for (layout, bound) in layouts {
            let time = bound.seconds();
            if time >= enough {
                break;
            }
            let raised = self.raised_pair_bound(context, layout, [time, enough]);
            *bound = match raised < incumbent {
                true => mem::replace(bound, LayoutBound::NoImprovement).raised_to(raised),
                false => LayoutBound::NoImprovement,
            };
            enough = enough.min(raised);
            if enough <= known {
                break;
            }
        }
    }

    /// A larger bound of a layout with pairs of microbatches than the largest so far, in seconds. It is not raised beyond the second of
    /// these.
    fn raised_pair_bound(
        &self,
        context: &Context,
        layout: &EmbeddingAndHead,
        [mut largest, enough]: [f64; 2],
    ) -> f64 {
        let mut known = [[None; STEPS + 1]; STEPS + 1];
        known[0][0] = Some(largest);
        let mut weights = [0; 2];
        loop {
            let before = weights;
            for (axis, is_up) in [(0, true), (0, false), (1, true), (1, false)] {
                while let Some(next) = moved(weights, axis, is_up)
                    && largest < enough
                    && !self.out_of_time()
                {
                    let known = &mut known[next[0]][next[1]];
                    let of_weights = || self.weighted_bound(context, layout, next, enough);
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
        if largest >= enough {
            return largest;
        }
        let segments = self.pair_segments.weighted(self.segments, weights);
        let weights = weights.map(|weight| weight as f64 / STEPS as f64);
        self.bound_with_op_weights(context, (layout, segments, weights), [largest, enough])
    }

    /// The largest of bounds with weights of their own for each op, or a known one if that is larger, in seconds. The search begins with
    /// one weight for all in each direction.
    fn bound_with_op_weights(
        &self,
        context: &Context,
        (layout, segments, weights): (&EmbeddingAndHead, &SegmentSolver, [f64; PASSES]),
        [known, incumbent]: [f64; 2],
    ) -> f64 {
        let Some(slowdown) = segments.prices(context).overlap_slowdown() else { return known };
        if !incumbent.is_finite() || known < OP_WEIGHTS_FROM * incumbent {
            return known;
        }
        let specs = layout.specs(segments.shape_count());
        let Some(parts) = segments.pass_parts(&specs, context) else { return known };
        let is_interrupted = || self.out_of_time();
        let passes = WeightedPasses::new(parts, slowdown);
        let mut search = OpWeightSearch::new(passes, weights, &is_interrupted);
        let relaxed = self.relaxed_layout(context, layout);
        let rooms = self.block_rooms(context, &relaxed.embedding_and_head);
        let bounds = |costs| {
            CollectiveBounds::with_overheads(segments, context, &relaxed.overheads, Some(costs))
        };
        let of_one_weight = bounds(search.costs());
        let (bound, priced) = of_one_weight.largest_priced(&rooms, [0.0, incumbent]);
        let blocks = segments.layer_shapes().len() as f64;
        let in_flight = in_flight_in_chunk(context, 0, 0);
        let mut raised_at = |pass: usize, price: f64, bound: f64| {
            let part_costs = |part: &PassParts| {
                let weights = of_one_weight.hidden_weights(part.spec);
                let besides = StepWeights { forward: 0.0, backward: 0.0, ..weights };
                let price = if part.spec.kind == SegmentKind::Block { price } else { 0.0 };
                let segment = (part.spec, part.grouping);
                let besides = segments.choice_costs(segment, context, &besides, (price, in_flight));
                PartCosts { besides, passes: [weights.forward, weights.backward] }
            };
            search.raise(pass, part_costs, SLACK * (incumbent - bound) / blocks);
            search.costs()
        };
        let (mut largest, mut price) = ((known, None), 0.0);
        let mut consider = |bound: f64, costs: PassCosts| {
            if bound > largest.0 {
                largest = (bound, Some(costs));
            }
            largest.0
        };
        let largest_of_forward = match priced {
            None => {
                let costs = raised_at(0, price, bound);
                let bound = bounds(costs.clone()).largest_within(&rooms, [known, incumbent]);
                consider(bound, costs)
            }
            Some(mut room) => {
                let mut largest = known;
                room.raise([known, incumbent], Some(room.price), |room| {
                    if self.out_of_time() {
                        return None;
                    }
                    let costs = raised_at(0, room.price, bound);
                    let line = bounds(costs.clone()).line(room)?;
                    largest = consider(line.bound, costs);
                    Some(line)
                });
                price = room.price;
                largest
            }
        };
        if largest_of_forward < incumbent && !self.out_of_time() {
            let costs = raised_at(1, price, largest_of_forward);
            let within = [largest_of_forward, incumbent];
            consider(bounds(costs.clone()).largest_within(&rooms, within), costs);
        }
        let (largest, costs) = largest;
        if largest >= incumbent || self.out_of_time() || costs.is_none() {
            return largest;
        }
        largest.max(self.mean_of_collectives(segments, context, (&relaxed, costs), incumbent))
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
        let relaxed = solver.relaxed_layout(context, &fastest);
        match solver.layout_bound(context, &relaxed, incumbent) {
            LayoutBound::Bound { time, .. } => {
                let overheads = &relaxed.overheads;
                let collectives =
                    CollectiveBounds::with_overheads(segments, context, overheads, None);
                time.0.max(collectives.largest())
            }
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
    use narrows_plan::program::{Instr, Phase};
    use narrows_plan::strategy::{Baseline, Rules, Save, SegmentChoice};
    use narrows_plan::{Bytes, Seconds};

    use crate::context::bound_checks::{HasBound, for_each_plan};
    use crate::context::op_weights::OpWeights;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::feasible_plan::{FeasiblePlan, ModelDecisions};
    use crate::request::{MemoryLimit, Request};
    use crate::segment::{
        NodeOfPass, PairPrices, PairWeights, PassWork, SegmentSpec, SolvedSegment,
    };
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
            let work = match phase {
                Phase::Forward => PassWork::Forward,
                _ => PassWork::Backward,
            };
            let time = |instr: &Instr| weights.kernel_time(&instr.kernel(), work, slowdown, prices);
            instructions.iter().map(time).sum::<Seconds>().0
        });
        (end, sums)
    }

    /// The times of a plan's passes with these weights, for both microbatches.
    fn weighted_passes(
        passes: &WeightedPasses,
        weights: &OpWeights,
        plan: &FeasiblePlan,
        specs: &[SegmentSpec],
    ) -> [f64; PASSES] {
        let ModelDecisions { embedding, stages, head, .. } = &plan.decisions;
        let of_segment = |spec: SegmentSpec, solved: &SolvedSegment| {
            passes.times(weights, (spec, solved.grouping), &solved.choice).expect("a decision")
        };
        let [block, embedding_spec, head_spec] = specs else { panic!("blocks of one shape") };
        let blocks = stages[0].iter().map(|solved| of_segment(*block, solved));
        let ends = [of_segment(*embedding_spec, embedding), of_segment(*head_spec, head)];
        blocks.chain(ends).fold([0.0; PASSES], |sum, of_segment| {
            [0, 1].map(|pass| sum[pass] + 2.0 * of_segment[pass])
        })
    }

    /// Whatever weights the ops have, and however the decisions are divided, no pass takes less than the weighted sum of its kernels.
    /// With the weights that the search finds, some take hardly more.
    #[test]
    fn no_pass_is_faster_than_with_weights_of_its_ops() {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let (mut checked, mut recomputing) = (0, 0);
        let (mut tightest, mut gain) = ([f64::INFINITY; PASSES], [0.0_f64; PASSES]);
        let all = Baseline::Auto;
        let with_sharded_tokens = Baseline::of_dense_model(true);
        let unlimited = MemoryLimit::None;
        let limit = |mib: u64| MemoryLimit::Bytes(Bytes(mib << 20));
        for (name, slower, baseline, memory_limit) in [
            ("llama-350m", 4.0, all, unlimited),
            ("llama-350m", 1.0, with_sharded_tokens, limit(4000)),
            ("cola-350m", 4.0, all, limit(3000)),
            ("cola-350m", 12.0, all, unlimited),
            ("cola-350m", 1.0, all, unlimited),
        ] {
            let request = slower_links::request(name, [slower, 1.0], [4, 32, 2048]);
            let rules = Rules { baseline, ..request.rules };
            let request = Request { tensor: Some(4), memory_limit, rules, ..request };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            let in_pairs = |context: &Context| context.overlap_microbatch_pairs;
            for context in contexts(&request).into_iter().filter(in_pairs) {
                let prices = segments.prices(&context);
                let slowdown = prices.overlap_slowdown().expect("a profile with overlap");
                for weight in [0, 2, STEPS] {
                    solver.pair_segments.weighted(&segments, [weight, 0]);
                }
                for plan in plans(&solver, &context) {
                    let layout = (plan.decisions.boundary, None);
                    let layout = EmbeddingAndHead::fastest(&segments, &context, layout);
                    let specs = layout.expect("a layout").specs(segments.shape_count());
                    let parts = segments.pass_parts(&specs, &context).expect("narrow segments");
                    let mut passes = WeightedPasses::new(parts, slowdown);
                    // Divided by some collectives, the bounds of the decisions with and without these are tighter.
                    for _ in 0..next(6) {
                        let index = next(passes.parts().len() as u64) as usize;
                        let pass = next(2) as usize;
                        let nodes = passes.parts()[index].passes[pass].nodes.len() as u64;
                        passes.divide(index, NodeOfPass { pass, node: next(nodes) as usize });
                    }
                    let chunk = &plan.program.program().stages[0].chunks[0];
                    let ends = [Phase::Forward, Phase::Backward]
                        .map(|phase| pass(chunk.instructions(phase), phase, prices).0);
                    let mut all: Vec<OpWeights> = (0..=2)
                        .map(|weight| passes.uniform([f64::from(weight) / 2.0; PASSES]))
                        .collect();
                    for _ in 0..24 {
                        let (changes, mut weights) = (1 + next(8), passes.uniform([0.0; PASSES]));
                        let mut last = [1.0; 2];
                        for of_slot in weights.iter_mut().flatten().flatten() {
                            if next(24) < changes {
                                last = [next(3), next(3)].map(|weight| weight as f64 / 2.0);
                            }
                            *of_slot = last;
                        }
                        all.push(weights);
                    }
                    let sums = |passes: &WeightedPasses, weights: &OpWeights| {
                        let sums = weighted_passes(passes, weights, &plan, &specs);
                        for (sum, end) in sums.iter().zip(ends) {
                            let is_bound = *sum <= end * (1.0 + 1e-9);
                            assert!(is_bound, "{name}, {context:?}: {sums:?}, {ends:?}");
                        }
                        sums
                    };
                    let of_all: Vec<[f64; PASSES]> =
                        all.iter().map(|weights| sums(&passes, weights)).collect();
                    let saves = plan.decisions.stages[0].iter().map(|solved| &solved.choice);
                    let recomputes = |choice: &SegmentChoice| {
                        choice.flows.iter().any(|flow| flow.saves.contains(&Save::Recomputed))
                    };
                    recomputing += usize::from(saves.into_iter().any(|choice| recomputes(choice)));
                    let part_costs = |part: &PassParts| {
                        let choices: usize = part.passes[0].computation.iter().map(Vec::len).sum();
                        PartCosts { besides: vec![0.0; choices], passes: [1.0; PASSES] }
                    };
                    let mut search = OpWeightSearch::new(passes, [0.5; PASSES], &|| false);
                    for (pass, end) in ends.into_iter().enumerate() {
                        search.raise(pass, part_costs, 0.1 * end);
                    }
                    let (passes, weights) = search.into_weights();
                    let raised = sums(&passes, &weights);
                    for pass in 0..PASSES {
                        let largest = |sums: &[[f64; PASSES]]| {
                            sums.iter().map(|sums| sums[pass]).fold(0.0, f64::max)
                        };
                        let best = largest(&of_all).max(raised[pass]);
                        tightest[pass] = tightest[pass].min(ends[pass] / best);
                        gain[pass] = gain[pass].max(raised[pass] / largest(&of_all[..3]));
                    }
                    checked += 1;
                }
            }
        }
        assert!(checked > 20 && recomputing > 5, "{checked} plans, {recomputing} recompute");
        assert!(tightest.iter().all(|of| *of < 1.01), "no pass within {tightest:?} of a sum");
        let is_raised = gain[0] > 1.05 && gain[1] > 1.02;
        assert!(is_raised, "weights of their own for ops raise no sum by more than {gain:?}");
    }

    /// Whatever collectives over the data axis take longer than the passes that they overlap with, no plan in pairs is faster than
    /// with weights of its ops, and some are hardly slower.
    #[test]
    fn no_plan_in_pairs_is_faster_than_with_weights_of_its_ops_and_collectives() {
        let (mut checked, mut raised, mut tightest) = (0, 0, f64::INFINITY);
        for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0), ("llama-350m", 4.0)] {
            let request = slower_links::request(name, [2.0, slower], [16, 32, 512]);
            let in_pairs: HasBound = |context| context.overlap_microbatch_pairs;
            for_each_plan(request, (in_pairs, 2), |solver, context, relaxed, plan| {
                let layout = EmbeddingAndHead::fastest(
                    solver.segments,
                    context,
                    relaxed.overheads.layouts(),
                );
                let layout = layout.expect("the layout of a plan");
                for step in [0, STEPS] {
                    let segments = solver.pair_segments.weighted(solver.segments, [step, 0]);
                    let start = (&layout, segments, [step as f64 / STEPS as f64, 0.0]);
                    let [known, incumbent] = [0.85, 1.05].map(|share| share * plan.time.0);
                    let bound = solver.bound_with_op_weights(context, start, [known, incumbent]);
                    assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}: {bound}");
                    checked += 1;
                    raised += usize::from(bound > known);
                    tightest = tightest.min(plan.time.0 / bound);
                }
            });
        }
        assert!(checked > 30 && raised > 15, "{checked} checked, {raised} raised");
        assert!(tightest < 1.02, "{tightest}");
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
                let bounds = solver.bounds(&context, [0.0, f64::INFINITY]);
                let bound = bounds.bound(f64::INFINITY).expect("a plan").0;
                let of_layouts = bounds.layouts.iter().map(|(layout, bound)| {
                    let known = bound.seconds();
                    let raised = solver.raised_pair_bound(&context, layout, [known, f64::INFINITY]);
                    [known, raised]
                });
                let of_layouts: Vec<[f64; 2]> = of_layouts.collect();
                raised += of_layouts.iter().filter(|[known, raised]| raised > known).count();
                let of_layouts = of_layouts.into_iter().map(|[_, raised]| raised);
                let bound = bound.max(of_layouts.fold(f64::INFINITY, f64::min));
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
