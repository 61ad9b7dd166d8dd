//! Lower bounds on the steps of one stage, whose collectives over the data axis may take longer than the passes that they overlap with.
//!
//! Each case of a [step](super::collective_step) is the least of a sum over the decisions of all segments. Where the blocks of such
//! decisions have more bytes than their [room](super::block_room), a multiplier λ of bytes gives a bound: the least of the sum with
//! λ times the bytes, less λ times those that fit. As a function of λ it is concave, and the bytes are its slope: the best λ is sought
//! where the lines at too few and at too many bytes meet. Within memory, steps without such collectives are a case too: the division of
//! the blocks knows no working sets.

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};

use super::block_room::BlockRoom;
use super::collective_cases::Longer;
use super::collective_step::CollectiveStep;
use crate::pipeline::PipelineOverheads;
use crate::segment::{PassCosts, SegmentSolver, SegmentSpec};

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
    /// The bounds with these layouts, without what the ends of the passes add.
    pub(super) fn new(
        segments: &'a SegmentSolver,
        context: &'a Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> CollectiveBounds<'a> {
        let step = CollectiveStep::new(segments, context, layouts);
        let mut bounds = CollectiveBounds { step, cases: vec![] };
        bounds.find_cases();
        bounds
    }

    /// The bounds with these overheads of the layouts, and these costs of passes where there are such.
    pub(super) fn with_overheads(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        overheads: &PipelineOverheads,
        passes: Option<PassCosts>,
    ) -> CollectiveBounds<'a> {
        let step = CollectiveStep::with_overheads(segments, context, overheads, passes);
        let mut bounds = CollectiveBounds { step, cases: vec![] };
        bounds.find_cases();
        bounds
    }

    /// Counts what the ends of the passes add with these overheads of the same layouts.
    pub(super) fn count_ends(&mut self, overheads: &PipelineOverheads) {
        if let Some(step) = &mut self.step {
            step.count_ends(overheads);
            self.find_cases();
        }
    }

    fn find_cases(&mut self) {
        let Some(step) = &self.step else { return };
        let bound = |longer| Some((step.bound(longer)?, longer));
        let never = step.pass_costs().map(|_| [Longer::Never; 2]);
        self.cases = step.cases().into_iter().chain(never).filter_map(bound).collect();
        self.cases.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    }

    /// The largest bound without a memory limit; 0 without collectives that may take longer than the passes that they overlap with,
    /// and with several stages.
    pub(super) fn largest(&self) -> f64 {
        self.cases.first().map_or(0.0, |(bound, _)| *bound)
    }

    /// The same within these rooms of the blocks, steps without such collectives included. Bounds of `incumbent` or more are not
    /// raised further, and those that cannot exceed `known`, another bound on the same plans, are not sought.
    pub(super) fn largest_within(&self, rooms: &[BlockRoom], sought: [f64; 2]) -> f64 {
        self.largest_priced(rooms, sought).0
    }

    /// The same, with the case, the room and the price of a byte that have this bound, if it is that of a room.
    pub(super) fn largest_priced(
        &self,
        rooms: &[BlockRoom],
        [known, incumbent]: [f64; 2],
    ) -> (f64, Option<PricedRoom>) {
        let mut largest = (self.largest(), None);
        let never = (0.0, [Longer::Never; 2]);
        for (_, longer) in self.cases.iter().take(LIMITED_CASES).chain([&never]) {
            for room in rooms.iter().filter(|room| self.has_bound_within(room)) {
                if largest.0 >= incumbent {
                    return largest;
                }
                let mut priced = PricedRoom { longer: *longer, room: *room, price: 0.0 };
                let bound = priced
                    .raise([known.max(largest.0), incumbent], None, |priced| self.line(priced));
                if let Some(bound) = bound.filter(|bound| *bound > largest.0) {
                    largest = (bound, Some(priced));
                }
            }
        }
        largest
    }

    fn has_bound_within(&self, room: &BlockRoom) -> bool {
        let can_leave_out = |step: &CollectiveStep<'_>| step.can_leave_out(room.last_blocks);
        room.bytes > 0.0 && self.step.as_ref().is_some_and(can_leave_out)
    }

    /// The weights of the times of a segment in the middle of the model, where no collectives take longer than passes.
    pub(super) fn hidden_weights(&self, spec: SegmentSpec) -> StepWeights {
        self.step.as_ref().map_or_else(StepWeights::default, |step| step.hidden_weights(spec))
    }

    /// The bound of a case within a room at its price; `None` when a segment has no legal decisions.
    pub(super) fn line(&self, priced: &PricedRoom) -> Option<BudgetLine> {
        let PricedRoom { longer, room: BlockRoom { last_blocks, bytes: budget }, price } = *priced;
        let [cost, bytes] = self.step.as_ref()?.bound_with_bytes(longer, (price, last_blocks))?;
        let bound = cost - price * budget;
        Some(BudgetLine { multiplier: price, bound, beyond_budget: bytes - budget })
    }
}

/// A case within a room, at a price of its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct PricedRoom {
    longer: [Longer; 2],
    room: BlockRoom,
    /// In seconds.
    pub price: f64,
}

/// The bound at a multiplier of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetLine {
    multiplier: f64,
    /// In seconds.
    pub bound: f64,
    /// The slope: bytes beyond the budget.
    beyond_budget: f64,
}

impl BudgetLine {
    /// Upper bound on the bound at another multiplier.
    fn at(&self, multiplier: f64) -> f64 {
        self.bound + self.beyond_budget * (multiplier - self.multiplier)
    }
}

impl PricedRoom {
    /// Seeks the price with the largest of the bounds that `line` gives, after 0 with `first` if there is such; returns that bound.
    /// `None` where there is no line. The search ends with a bound of `incumbent` or more, and where none exceeds `known`.
    pub(super) fn raise(
        &mut self,
        [known, incumbent]: [f64; 2],
        first: Option<f64>,
        mut line: impl FnMut(&PricedRoom) -> Option<BudgetLine>,
    ) -> Option<f64> {
        let mut tried = PricedRoom { price: 0.0, ..*self };
        let mut too_many = line(&tried)?;
        let mut largest = too_many.bound;
        self.price = 0.0;
        // The decisions fit.
        if too_many.beyond_budget <= 0.0 {
            return Some(largest);
        }
        // Where a tenth fewer bytes take a hundredth more time.
        tried.price = first.unwrap_or(0.1 * too_many.bound / self.room.bytes);
        let mut too_few: Option<BudgetLine> = None;
        for _ in 0..MULTIPLIERS_MAX {
            let next = line(&tried)?;
            if next.bound > largest {
                (largest, self.price) = (next.bound, tried.price);
            }
            if largest >= incumbent {
                break;
            }
            match next.beyond_budget > 0.0 {
                true => too_many = next,
                false => too_few = Some(next),
            }
            let Some(too_few) = too_few else {
                tried.price *= 4.0;
                continue;
            };
            // The lines meet at the multiplier whose bound may be the largest.
            tried.price = (too_few.at(0.0) - too_many.at(0.0))
                / (too_many.beyond_budget - too_few.beyond_budget);
            if too_many.at(tried.price) <= largest.max(known) * (1.0 + TOLERANCE) {
                break;
            }
        }
        Some(largest)
    }
}

#[cfg(test)]
mod tests {
    use crate::context::bound_checks::{HasBound, check_within_memory, for_each_plan};
    use crate::context::partition_bounds::RelaxedLayout;
    use crate::request::Request;
    use crate::slower_links;

    use super::*;

    /// The bounds of a layout, with what the ends of the passes add.
    fn with_ends<'a>(
        segments: &'a SegmentSolver,
        context: &'a Context,
        layout: &RelaxedLayout,
    ) -> CollectiveBounds<'a> {
        CollectiveBounds::with_overheads(segments, context, &layout.overheads, None)
    }

    /// Collectives take longer than passes where replicas share slow links, with every ZeRO stage. Whichever rules choose the
    /// decisions, no plan is faster than the bound, and some are hardly slower.
    #[test]
    fn no_plan_is_faster_than_its_collectives() {
        let (mut checked, mut waiting, mut tightest) = (0, [0; 2], [f64::INFINITY; 2]);
        for (name, slower) in [("llama-350m", 1.0), ("cola-350m", 8.0)] {
            let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
            for_each_plan(request, (|_| true, 2), |solver, context, relaxed, plan| {
                let bound = with_ends(solver.segments, context, relaxed).largest();
                assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {context:?}");
                let every_pass = usize::from(context.shards_gradients());
                waiting[every_pass] += usize::from(bound > 0.9 * plan.time.0);
                tightest[every_pass] = tightest[every_pass].min(plan.time.0 / bound);
                checked += 1;
            });
        }
        assert!(checked > 50 && waiting.iter().all(|count| *count > 20), "{checked} {waiting:?}");
        assert!(tightest.iter().all(|ratio| *ratio < 1.03), "{tightest:?}");
    }

    /// Collectives at the ends of the passes are exposed, with every division of the first block's buckets. No plan is faster than
    /// the bound that counts them, which is often larger than with the least that any decisions leave exposed.
    #[test]
    fn no_plan_is_faster_than_its_ends() {
        let (mut checked, mut raised, mut tightest) = (0, [0; 2], f64::INFINITY);
        for (name, slower) in [("llama-130m", 1.0), ("cola-350m", 2.0), ("lax-130m", 2.0)] {
            let request = slower_links::request(name, [1.0, slower], [16, 32, 512]);
            for_each_plan(request, (|_| true, 3), |solver, context, relaxed, plan| {
                let (segments, overheads) = (solver.segments, &relaxed.overheads);
                let step = CollectiveStep::with_overheads(segments, context, overheads, None);
                let step = step.expect("one stage");
                let bound = |longer| step.bound(longer).expect("legal decisions");
                let hidden = bound([Longer::Never; 2]);
                for longer in step.cases().into_iter().filter(|of| of.contains(&Longer::AtEnd)) {
                    let bound = bound(longer);
                    assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{name}, {longer:?}, {context:?}");
                    checked += 1;
                    if bound > hidden * 1.002 {
                        raised[usize::from(longer[1] == Longer::AtEnd)] += 1;
                        tightest = tightest.min(plan.time.0 / bound);
                    }
                }
            });
        }
        assert!(checked > 50 && raised.iter().all(|count| *count > 5), "{checked} {raised:?}");
        assert!(tightest < 1.01, "{tightest}");
    }

    /// With ZeRO-2 in groups of shards, the first block's gradients are reduced over the groups after the last reduction within one.
    /// Where these take longer than the passes, plans are hardly slower than the bound that counts both.
    #[test]
    fn reductions_over_groups_of_shards_follow_those_of_every_pass() {
        let has_groups: HasBound = |context| {
            let is_zero_2 = context.shards_gradients() && !context.shards_weights();
            is_zero_2 && context.shard_size < context.mesh.replicas() && context.passes() == 1
        };
        let (mut checked, mut tightest) = (0, f64::INFINITY);
        let request = slower_links::request("llama-350m", [8.0, 8.0], [64, 64, 1024]);
        let request = Request { tensor: Some(4), ..request };
        for_each_plan(request, (has_groups, 1), |solver, context, relaxed, plan| {
            let (segments, overheads) = (solver.segments, &relaxed.overheads);
            let step = CollectiveStep::with_overheads(segments, context, overheads, None);
            let step = step.expect("one stage");
            for longer in step.cases().into_iter().filter(|of| of[1] == Longer::InEveryPass) {
                let bound = step.bound(longer).expect("legal decisions");
                assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{longer:?}, {context:?}");
                tightest = tightest.min(plan.time.0 / bound);
                checked += 1;
            }
        });
        assert!(checked > 10 && tightest < 1.001, "{checked} checked, {tightest}");
    }

    /// Within a memory limit, no plan is faster than the bound, which memory raises, and some are hardly slower.
    #[test]
    fn no_plan_within_the_memory_is_faster_than_its_collectives() {
        let (checked, raised, tightest) = check_within_memory(
            |_| true,
            |[_, solver], context, ends| {
                let relaxed = solver.relaxed_layout(context, ends);
                let bounds = with_ends(solver.segments, context, &relaxed);
                let limited =
                    solver.within_memory(&bounds, context, &relaxed, [0.0, f64::INFINITY]);
                [bounds.largest(), limited]
            },
        );
        assert!(checked > 30 && raised > 5, "{checked} checked, {raised} raised");
        assert!(tightest < 1.02, "{tightest}");
    }
}
