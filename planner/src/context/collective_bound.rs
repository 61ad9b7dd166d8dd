//! Lower bounds on the steps of one stage whose collectives over the data axis take longer than the passes that they overlap with.
//!
//! Each case of a [step](super::collective_step) is the least of a sum over the decisions of all segments. Where the blocks of such
//! decisions have more bytes than fit, a multiplier λ of bytes gives a bound: the least of the sum with λ times the bytes, less λ times
//! those that fit. As a function of λ it is concave, and the bytes are its slope: the best λ is sought where the lines at too few
//! and at too many bytes meet.

use narrows_plan::{Bytes, Context};

use super::collective_step::{CollectiveStep, Longer};
use crate::pipeline::PipelineOverheads;
use crate::segment::SegmentSolver;

/// Multipliers that are tried for a case.
const MULTIPLIERS_MAX: usize = 8;
/// Cases that are bounded within the memory: those with the largest bounds without a limit.
const LIMITED_CASES: usize = 2;
/// Relative difference of bounds that ends the search for a multiplier.
const TOLERANCE: f64 = 1e-3;

/// Bounds on the plans of a context with one layout, on one stage.
pub(super) struct CollectiveBounds<'a> {
    step: Option<CollectiveStep<'a>>,
    /// The bounds of the cases without a memory limit in seconds, from the largest to the least.
    cases: Vec<(f64, [Longer; 2])>,
}

impl<'a> CollectiveBounds<'a> {
    /// The bounds with the layouts of these overheads.
    pub(super) fn new(
        segments: &'a SegmentSolver,
        context: &'a Context,
        overheads: &PipelineOverheads,
    ) -> CollectiveBounds<'a> {
        let step = CollectiveStep::new(segments, context, overheads);
        let of_step = |step: &CollectiveStep| -> Vec<(f64, [Longer; 2])> {
            let bound = |longer| Some((step.bound(longer)?, longer));
            step.cases().into_iter().filter_map(bound).collect()
        };
        let mut cases = step.as_ref().map(of_step).unwrap_or_default();
        cases.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        CollectiveBounds { step, cases }
    }

    /// The largest bound without a memory limit; 0 without collectives that may take longer than the passes that they overlap with,
    /// and with several stages.
    pub(super) fn largest(&self) -> f64 {
        self.cases.first().map_or(0.0, |(bound, _)| *bound)
    }

    /// The same where the blocks have at most `budget` bytes. Bounds of `incumbent` or more are not raised further.
    pub(super) fn largest_within(
        &self,
        budget: Bytes,
        incumbent: f64,
        is_interrupted: impl Fn() -> bool,
    ) -> f64 {
        let mut largest = self.largest();
        let cases = self.step.iter().flat_map(|step| self.cases.iter().map(move |of| (step, of)));
        for (step, (_, longer)) in cases.take(LIMITED_CASES) {
            if largest >= incumbent || is_interrupted() {
                break;
            }
            let limited = within_budget(step, *longer, budget.as_f64(), incumbent);
            largest = largest.max(limited.unwrap_or(0.0));
        }
        largest
    }
}

/// The largest bound of a case at the multipliers that are tried; `None` when a segment has no legal decisions.
fn within_budget(
    step: &CollectiveStep,
    longer: [Longer; 2],
    budget: f64,
    incumbent: f64,
) -> Option<f64> {
    // A bound and its slope.
    let at = |multiplier: f64| {
        let [cost, bytes] = step.bound_with_bytes(longer, multiplier)?;
        Some((multiplier, cost - multiplier * budget, bytes - budget))
    };
    let mut too_many = at(0.0)?;
    let mut largest = too_many.1;
    // The decisions fit.
    if too_many.2 <= 0.0 {
        return Some(largest);
    }
    // The blocks take about as long with a tenth more bytes or fewer.
    let mut multiplier = 0.1 * too_many.1 / budget;
    let mut too_few: Option<(f64, f64, f64)> = None;
    for _ in 0..MULTIPLIERS_MAX {
        let tried = at(multiplier)?;
        largest = largest.max(tried.1);
        if largest >= incumbent {
            break;
        }
        if tried.2 > 0.0 {
            too_many = tried
        } else {
            too_few = Some(tried)
        }
        let Some(too_few) = too_few else {
            multiplier *= 4.0;
            continue;
        };
        multiplier = (too_few.1 - too_few.2 * too_few.0 - too_many.1 + too_many.2 * too_many.0)
            / (too_many.2 - too_few.2);
        let meet = too_many.1 + too_many.2 * (multiplier - too_many.0);
        if meet <= largest * (1.0 + TOLERANCE) {
            break;
        }
    }
    Some(largest)
}

#[cfg(test)]
mod tests {
    use crate::context::ContextSolver;
    use crate::context::bounds::LayoutBound;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::pipeline::EmbeddingAndHead;
    use crate::request::{MemoryLimit, Request};
    use crate::slower_links;

    use super::*;

    /// Collectives take longer than passes where replicas share slow links, with every ZeRO stage. Whichever rules choose the
    /// decisions, no plan is faster than the bound, and some are hardly slower.
    #[test]
    fn no_plan_is_faster_than_its_collectives() {
        let (mut checked, mut waiting, mut tightest) = (0, [0; 2], [f64::INFINITY; 2]);
        for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0)] {
            let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
            let requests = slower_links::with_sharded_weights(request);
            let solver = |request| SegmentSolver::new(request, Deadline::none());
            let all = requests.each_ref().map(solver);
            let in_one_stage = |context: &Context| context.mesh.pipeline == 1;
            for context in contexts(&requests[0]).into_iter().filter(in_one_stage).step_by(2) {
                for (request, segments) in requests.iter().zip(&all) {
                    let solver = ContextSolver::new(request, segments);
                    let Some((_, _, ends, partition)) =
                        solver.even_partition(context, f64::INFINITY)
                    else {
                        continue;
                    };
                    let first = ContextSolver::new(&requests[0], &all[0]);
                    let relaxed = first.relaxed_layout(&context, &ends);
                    let bounds = CollectiveBounds::new(&all[0], &context, &relaxed.overheads);
                    let bound = bounds.largest();
                    let sized = solver.size(&context, &ends, partition);
                    let plan = solver.complete_within_limit(sized).expect("no limit");
                    assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}");
                    let every_pass = usize::from(context.shards_gradients());
                    waiting[every_pass] += usize::from(bound > 0.9 * plan.time.0);
                    tightest[every_pass] = tightest[every_pass].min(plan.time.0 / bound);
                    checked += 1;
                }
            }
        }
        assert!(checked > 50 && waiting.iter().all(|count| *count > 20), "{checked} {waiting:?}");
        assert!(tightest.iter().all(|ratio| *ratio < 1.03), "{tightest:?}");
    }

    /// Within a memory limit, no plan is faster than the bound, which memory raises, and some are hardly slower.
    #[test]
    fn no_plan_within_the_memory_is_faster_than_its_collectives() {
        let (mut checked, mut raised, mut tightest) = (0, 0, f64::INFINITY);
        for (name, slower, limit_gib) in [("llama-350m", 1.0, 3), ("cola-350m", 8.0, 2)] {
            let unlimited = slower_links::request(name, [1.0, slower], [16, 64, 1024]);
            let memory_limit = MemoryLimit::Bytes(Bytes(limit_gib << 30));
            let request = Request { memory_limit, ..unlimited };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            let in_one_stage = |context: &Context| context.mesh.pipeline == 1;
            for context in contexts(&request).into_iter().filter(in_one_stage).step_by(9) {
                let bounds = solver.bounds(&context, f64::INFINITY);
                let limited = |(ends, _): &(EmbeddingAndHead, LayoutBound)| {
                    let relaxed = solver.relaxed_layout(&context, ends);
                    let bounds = CollectiveBounds::new(&segments, &context, &relaxed.overheads);
                    let limited = solver.within_memory(&bounds, &context, &relaxed, f64::INFINITY);
                    [bounds.largest(), limited]
                };
                let least = |[a, b]: [f64; 2], [c, d]: [f64; 2]| [a.min(c), b.min(d)];
                let [free, limited] =
                    bounds.layouts.iter().map(limited).reduce(least).unwrap_or_default();
                let Ok(Some(plan)) = solver.solve(&context, &bounds, f64::INFINITY).best else {
                    continue;
                };
                assert!(limited <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}: {limited}");
                checked += 1;
                if limited > free * 1.005 {
                    raised += 1;
                    tightest = tightest.min(plan.time.0 / limited);
                }
            }
        }
        assert!(checked > 30 && raised > 5, "{checked} checked, {raised} raised");
        assert!(tightest < 1.02, "{tightest}");
    }
}
