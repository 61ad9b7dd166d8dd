//! Least time of a step whose collectives over the data axis take longer than the passes that they overlap with, on one stage.
//!
//! Without sharded gradients, the reductions begin when the head's backward pass has ended, and run one after the other. While
//! they overlap, a reduction takes k times as long and computation c times. Let R be the time of the reductions, F and B the
//! times of a microbatch's passes, and H the part of B that the head takes. Then the last reduction ends at
//!
//! ```text
//! m·F + (m − 1)·B + H + R + c·(1 − 1/k)·(B − H)
//! ```
//! or later: all computation after H overlaps with reductions or runs between two of them, and the latter costs more as
//! long as c·(1 − 1/k) is below 1. The gathers of updated weights mirror that: the first forward pass ends with the part H that
//! follows all of them, and takes at least G + H + c·(1 − 1/k)·(F − H) for gathers of G seconds. Where passes run two
//! microbatches, F, B and H are times of two, and m is the number of pairs.
//!
//! The reductions of blocks begin when the backward pass of the last block has ended too, and the forward pass of the last block
//! follows all gathers but those of the head. That block may therefore count with H, and the collectives of the head with the
//! k·(1 − 1/c) of their time that they add at least. A model of one block is excepted: parts of its bucket overlap with its own
//! passes. A pass of two microbatches may begin the block before while the second microbatch is still in the last one: what is
//! computed until all gradients of the last block are complete counts in full, so that the sum is a bound all the same.
//!
//! With sharded parameters (ZeRO-2 and ZeRO-3), the weights of a block are gathered during the forward pass of the segment before
//! it. During the backward pass of a segment, the weights of the block before it are gathered and the gradients of the block
//! after it are reduced. Every pass of f seconds takes at least g + c·(1 − 1/k)·f for the collectives of g seconds beside it.
//! The head's backward pass counts in full, and the gather beside it with the least that it adds. So may the last block's: no gradients
//! are reduced beside it, and other collectives begin after it.
//!
//! Where the collectives of one direction are hidden, those at the ends of a pass add more than the least, as in other bounds: the
//! first gather, which the embedding alone hides, and the last reduction, which follows the backward pass.
//!
//! The last two reductions, of the second and of the first block, begin when the backward pass of the second block has ended. They may
//! take longer than the rest of the pass, which is that of the first block and of the embedding, while all others are hidden. The
//! first two gathers mirror that.
//!
//! The last reductions of the first block follow the last backward pass, and the embedding alone hides the first gather of that
//! block. How much these are depends on how the block's gradients and weights are divided into buckets, and on the same decisions as
//! the passes. Where all other collectives are hidden, or those of sharded gradients take longer than every backward pass, the
//! reductions count in full. Where all others are hidden, a gather of G seconds beside the E seconds before its weights are read adds
//! G − (1 − c·(1 − 1/k))·E.
//!
//! All of these times depend on the same decisions: the bound is the least of their sum over all decisions of each segment.

use std::cell::RefCell;

use narrows_cost_model::StepWeights;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{BucketSplit, Context};

use super::collective_cases::{FirstBuckets, Longer, Place};
use crate::pipeline::{PipelineOverheads, in_flight_in_chunk};
use crate::segment::{PassCosts, SegmentSolver, SegmentSpec};

/// A segment, the weights of its times, and the multiplier of its bytes.
type LeastCostKey = (SegmentSpec, StepWeights, Option<f64>);

/// The segments of a model on one stage, and the collectives beside them.
pub(super) struct CollectiveStep<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    /// c·(1 − 1/k), at most 1.
    overlapped: f64,
    /// Least time that a hidden collective adds to a step, over its time alone.
    hidden_cost: f64,
    /// Distinct segments with their numbers of instances.
    parts: Vec<(SegmentSpec, Place, f64)>,
    /// Whether the last block counts with the head in the first forward (0) and the last backward pass (1), and the head's
    /// collectives with the least that they add.
    last_block_counts: [bool; 2],
    /// Whether the last block's backward passes count in full where collectives take longer than every such pass, and the gather beside
    /// each with the least that it adds.
    last_block_hides_gather: bool,
    /// Time that the collectives at the ends of all forward (0) and all backward passes (1) add where the others are hidden, with
    /// the additions of reduced parts, in seconds.
    at_ends: [f64; 2],
    /// The part of that time for the first gather and the last reductions of the first block.
    of_first_block: [f64; 2],
    /// Time of the step phase besides the segments, in seconds.
    step_phase: f64,
    /// Most time of a first forward pass through the first block before it reads a weight that is gathered during it, in seconds.
    before_first_gather: f64,
    /// Costs of passes besides those of the segments.
    pass_costs: Option<PassCosts>,
    /// The [least costs](CollectiveStep::least) that are known: places and cases share most of them.
    known: RefCell<Vec<(LeastCostKey, [f64; 2])>>,
}

impl<'a> CollectiveStep<'a> {
    /// `None` with several stages.
    pub(super) fn new(
        segments: &'a SegmentSolver,
        context: &'a Context,
        (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Option<CollectiveStep<'a>> {
        let slowdown = segments.prices(context).overlap_slowdown();
        let slowdown =
            slowdown.filter(|_| context.overlap_grad_reduce || context.gathers_in_forward());
        (context.mesh.pipeline == 1).then_some(())?;
        let end = |kind| SegmentSpec::embedding_or_head(kind, boundary, tied_weight);
        let head = end(SegmentKind::Head);
        let (last, before) = segments.layer_shapes().split_last()?;
        let last = SegmentSpec::block(*last, boundary);
        let mut parts = vec![
            (end(SegmentKind::Embedding), Place::Embedding, 1.0),
            (head, Place::Head, 1.0),
            (last, Place::LastBlock, 1.0),
        ];
        let mut others = before;
        // It has the bounds of other blocks, but memory may leave it out.
        if let ([first @ .., second_to_last], true) = (before, before.len() > 2) {
            let spec = SegmentSpec::block(*second_to_last, boundary);
            parts.push((spec, Place::SecondToLastBlock, 1.0));
            others = first;
        }
        if let [first, second, rest @ ..] = others {
            parts.push((SegmentSpec::block(*first, boundary), Place::FirstBlock, 1.0));
            parts.push((SegmentSpec::block(*second, boundary), Place::SecondBlock, 1.0));
            others = rest;
        }
        for shape in 0..segments.shape_count() {
            let count = others.iter().filter(|other| **other == shape).count();
            if count > 0 {
                parts.push((SegmentSpec::block(shape, boundary), Place::Block, count as f64));
            }
        }
        let mut step = CollectiveStep {
            segments,
            context,
            overlapped: slowdown.map_or(1.0, |slowdown| slowdown.hidden_computation_cost()),
            hidden_cost: slowdown.map_or(1.0, |slowdown| slowdown.hidden_cost()),
            parts,
            last_block_counts: [false; 2],
            last_block_hides_gather: false,
            at_ends: [0.0; 2],
            of_first_block: [0.0; 2],
            step_phase: 0.0,
            before_first_gather: 0.0,
            pass_costs: None,
            known: RefCell::default(),
        };
        if context.gathers_in_forward() {
            let first = SegmentSpec::block(segments.layer_shapes()[0], boundary);
            step.before_first_gather = segments.forward_before_gathers_max(first, context)
                * context.pass_microbatches() as f64;
        }
        if !before.is_empty() {
            step.last_block_counts = [0, 1].map(|at| {
                step.least_pass(last, at) * (1.0 - step.overlapped)
                    > step.most_in_one_pass(head, at) * (1.0 - step.hidden_cost)
            });
        }
        let second_to_last =
            step.parts.iter().find(|(_, place, _)| *place == Place::SecondToLastBlock);
        if let (Some((gathered, _, _)), true) = (second_to_last, context.shards_weights()) {
            let gather = step.segments.sharded_max(*gathered, context)[0];
            step.last_block_hides_gather = step.least_pass(last, 1) * (1.0 - step.overlapped)
                > gather * (1.0 - step.hidden_cost);
        }
        Some(step)
    }

    /// A step with what its ends add with these overheads of the layouts, and with these costs of passes where there are
    /// such; `None` with several stages.
    pub(super) fn with_overheads(
        segments: &'a SegmentSolver,
        context: &'a Context,
        overheads: &PipelineOverheads,
        pass_costs: Option<PassCosts>,
    ) -> Option<CollectiveStep<'a>> {
        let mut step = CollectiveStep::new(segments, context, overheads.layouts())?;
        step.pass_costs = pass_costs;
        step.count_ends(overheads);
        Some(step)
    }

    /// Costs of passes besides those of the segments.
    pub(super) fn pass_costs(&self) -> Option<&PassCosts> {
        self.pass_costs.as_ref()
    }

    /// Counts what the ends of the passes add with these overheads of the same layouts.
    pub(super) fn count_ends(&mut self, overheads: &PipelineOverheads) {
        let overhead = &overheads.of(&[self.segments.layer_shapes().len()])[0];
        self.of_first_block = [overhead.first_gather_min.0, overhead.first_block_min.0];
        let microbatches = self.context.workload.microbatches(&self.context.mesh) as f64;
        self.at_ends =
            [0, 1].map(|at| self.of_first_block[at] + overhead.besides_ends[at].0 * microbatches);
        self.step_phase = overhead.besides_ends[2].0 - self.of_first_block.iter().sum::<f64>();
    }

    /// Whether every forward (0) or every backward pass (1) has collectives of sharded parameters.
    fn is_sharded(&self, at: usize) -> bool {
        [self.context.shards_weights(), self.context.shards_gradients()][at]
    }

    /// The part of a segment's forward (0) or backward (1) pass that counts.
    fn part(&self, place: Place, at: usize, longer: Longer) -> f64 {
        match (place, longer) {
            (_, Longer::Never) | (Place::Head, _) => 1.0,
            (Place::Embedding, Longer::AtEnd) if at == 0 || self.is_sharded(at) => self.overlapped,
            (_, Longer::AtEnd) => 1.0,
            (Place::Embedding | Place::FirstBlock, Longer::BesideFirstBlock) => self.overlapped,
            (_, Longer::BesideFirstBlock) => 1.0,
            // Nothing is beside it, or the gather of the block before: no weights are gathered for a later block, and no gradients of
            // one are reduced.
            (Place::LastBlock, Longer::InEveryPass)
                if at == 0 || !self.context.shards_weights() || self.last_block_hides_gather =>
            {
                1.0
            }
            (Place::LastBlock, Longer::InOnePass) if self.last_block_counts[at] => 1.0,
            _ => self.overlapped,
        }
    }

    /// Least time of a segment's forward (0) or backward (1) pass of one microbatch, in seconds.
    fn least_pass(&self, spec: SegmentSpec, at: usize) -> f64 {
        let least = self.segments.min_pass_times(spec, self.context);
        [least.forward, least.backward][at]
    }

    /// Most time of a segment's collectives during the first forward (0) or the last backward pass (1), in seconds.
    fn most_in_one_pass(&self, spec: SegmentSpec, at: usize) -> f64 {
        match at {
            0 => self.segments.gathered_max(spec, self.context),
            _ => self.segments.overlapped_range(spec, self.context)[1],
        }
    }

    /// Whether some plan may have such collectives beside forward (0) or backward (1) passes.
    fn is_possible(&self, at: usize, longer: Longer) -> bool {
        let in_pass = match longer {
            Longer::Never => return true,
            // Short models have no part of its own for the first block.
            Longer::AtEnd => {
                return self.parts.iter().any(|(_, place, _)| *place == Place::FirstBlock);
            }
            Longer::BesideFirstBlock | Longer::InOnePass => self.context.pass_microbatches() as f64,
            Longer::InEveryPass => 1.0,
        };
        let (mut hidden, mut collectives) = (0.0, 0.0);
        for (spec, place, count) in &self.parts {
            let pass = in_pass * self.least_pass(*spec, at);
            hidden += count * (1.0 - self.part(*place, at, longer)) * pass;
            let most = match longer {
                Longer::InEveryPass => self.segments.sharded_max(*spec, self.context)[at],
                _ if self.counts_in_full(*place, at, longer) => self.most_in_one_pass(*spec, at),
                _ => 0.0,
            };
            collectives += count * most;
        }
        if longer == Longer::BesideFirstBlock {
            hidden += self.at_ends[at];
        }
        collectives * (1.0 - self.hidden_cost) > hidden
    }

    /// The cases that some plan may have in forward and in backward passes, but for that without such collectives.
    pub(super) fn cases(&self) -> Vec<[Longer; 2]> {
        let mut cases = Longer::cases(self.context);
        for (at, cases) in cases.iter_mut().enumerate() {
            cases.retain(|longer| self.is_possible(at, *longer));
        }
        let [forward, backward] = cases;
        let both = forward.iter().flat_map(|forward| backward.iter().map(|back| [*forward, *back]));
        both.filter(|longer| *longer != [Longer::Never; 2]).collect()
    }

    /// Lower bound in seconds on a step with such collectives beside forward and backward passes; `None` when a segment has no
    /// legal decisions.
    pub(super) fn bound(&self, longer: [Longer; 2]) -> Option<f64> {
        Some(self.total(longer, None)?[0])
    }

    /// Lower bound in seconds on the same with `multiplier` seconds for each byte of the blocks but for so many last ones, and the
    /// bytes of these decisions.
    pub(super) fn bound_with_bytes(
        &self,
        longer: [Longer; 2],
        (multiplier, last_blocks): (f64, u64),
    ) -> Option<[f64; 2]> {
        self.total(longer, Some((multiplier, last_blocks)))
    }

    /// Whether a bound can leave out the bytes of so many last blocks.
    pub(super) fn can_leave_out(&self, last_blocks: u64) -> bool {
        let places = self.parts.iter().filter(|(_, place, _)| place.blocks_after().is_some());
        last_blocks as usize <= places.count()
    }

    /// The sums of the [least costs](CollectiveStep::least) of all segments, the first one with what the segments do not count.
    fn total(&self, longer: [Longer; 2], memory: Option<(f64, u64)>) -> Option<[f64; 2]> {
        let mut total = [self.besides_segments(longer), 0.0];
        for (part, (spec, place, count)) in self.parts.iter().enumerate() {
            let counted = memory.filter(|(_, last_blocks)| self.is_counted(part, *last_blocks));
            let multiplier = counted.map(|(multiplier, _)| multiplier);
            let of_buckets =
                self.buckets(part, longer.map(|longer| longer == Longer::AtEnd)).filter_map(
                    |buckets| self.least(*spec, self.weights(*place, longer, buckets), multiplier),
                );
            let of_part = of_buckets.min_by(|a, b| a[0].total_cmp(&b[0]))?;
            total = [0, 1].map(|at| total[at] + count * of_part[at]);
        }
        Some(total)
    }

    /// The time of a step in a case besides the weighted times of its parts, in seconds.
    pub(super) fn besides_segments(&self, longer: [Longer; 2]) -> f64 {
        let at_end = |at: usize| match longer[at] {
            Longer::Never => self.at_ends[at],
            Longer::AtEnd if self.is_sharded(at) => 0.0,
            Longer::AtEnd => self.at_ends[at] - self.of_first_block[at],
            _ => 0.0,
        };
        let at_ends = at_end(0) + at_end(1);
        let before_gather = match longer[0] {
            Longer::AtEnd if !self.is_sharded(0) => {
                (1.0 - self.overlapped) * self.before_first_gather
            }
            _ => 0.0,
        };
        self.step_phase + at_ends + self.additions(longer[1]) - before_gather
    }

    /// The parts of a step: distinct segments in each place, with their numbers of instances.
    pub(super) fn parts(&self) -> impl Iterator<Item = (SegmentSpec, f64)> {
        self.parts.iter().map(|(spec, _, count)| (*spec, *count))
    }

    /// The weights of the times of a part in a case.
    pub(super) fn part_weights(
        &self,
        part: usize,
        longer: [Longer; 2],
        buckets: FirstBuckets,
    ) -> StepWeights {
        self.weights(self.parts[part].1, longer, buckets)
    }

    /// The weights of the times of a segment in most of its places, where no collectives take longer than passes.
    pub(super) fn hidden_weights(&self, spec: SegmentSpec) -> StepWeights {
        let of_spec = self.parts.iter().filter(|(other, _, _)| *other == spec);
        let place = of_spec.max_by(|a, b| a.2.total_cmp(&b.2)).map(|(_, place, _)| *place);
        let buckets = FirstBuckets::all(self.context, [false; 2]).next();
        match (place, buckets) {
            (Some(place), Some(buckets)) => self.weights(place, [Longer::Never; 2], buckets),
            _ => StepWeights::default(),
        }
    }

    /// The buckets on which the time of a part depends, where those of gathers (0) and of reductions (1) count.
    pub(super) fn buckets(
        &self,
        part: usize,
        count: [bool; 2],
    ) -> impl Iterator<Item = FirstBuckets> {
        let is_first = self.parts[part].1 == Place::FirstBlock;
        FirstBuckets::all(self.context, count.map(|count| is_first && count))
    }

    /// Whether the bytes of a part count where so many last blocks are left out: memory is that of the blocks.
    pub(super) fn is_counted(&self, part: usize, last_blocks: u64) -> bool {
        let (spec, place, _) = &self.parts[part];
        spec.kind == SegmentKind::Block
            && place.blocks_after().is_none_or(|after| after >= last_blocks)
    }

    /// Least weighted time of a segment in seconds, with a multiplier of bytes that of time and bytes, and the bytes.
    fn least(
        &self,
        spec: SegmentSpec,
        weights: StepWeights,
        multiplier: Option<f64>,
    ) -> Option<[f64; 2]> {
        let key = (spec, weights, multiplier);
        let known = self.known.borrow().iter().find(|(other, _)| *other == key).map(|of| of.1);
        if known.is_some() {
            return known;
        }
        let (segments, context) = (self.segments, self.context);
        let memory = multiplier.map(|multiplier| (multiplier, in_flight_in_chunk(context, 0, 0)));
        let costs = (&weights, self.pass_costs.as_ref());
        let least = segments.min_weighted_cost(spec, context, costs, memory)?;
        self.known.borrow_mut().push((key, least));
        Some(least)
    }

    /// Whether a segment's collectives during the first forward (0) or the last backward pass (1) count with all of their time.
    fn counts_in_full(&self, place: Place, at: usize, longer: Longer) -> bool {
        match longer {
            Longer::InOnePass => place != Place::Head || !self.last_block_counts[at],
            Longer::BesideFirstBlock => matches!(place, Place::FirstBlock | Place::SecondBlock),
            Longer::Never | Longer::AtEnd | Longer::InEveryPass => false,
        }
    }

    /// Whether the first gather (0) or the last reductions (1) of a segment count with all of their time: with sharded gradients,
    /// these follow the reductions of every pass.
    fn counts_at_end(&self, place: Place, at: usize, longer: Longer) -> bool {
        let ends_step = longer == Longer::AtEnd || at == 1 && longer == Longer::InEveryPass;
        place == Place::FirstBlock && ends_step
    }

    fn weights(&self, place: Place, longer: [Longer; 2], buckets: FirstBuckets) -> StepWeights {
        let (passes, in_pass) =
            (self.context.passes() as f64, self.context.pass_microbatches() as f64);
        let beyond_hidden = 1.0 - self.hidden_cost;
        let [forward, backward] = [0, 1].map(|at| {
            let part = self.part(place, at, longer[at]);
            match longer[at] {
                Longer::InEveryPass => in_pass * passes * part,
                Longer::AtEnd if self.is_sharded(at) => in_pass * passes * part,
                _ => in_pass * (passes - 1.0 + part),
            }
        });
        let mut in_full = [0, 1]
            .map(|at| if self.counts_in_full(place, at, longer[at]) { beyond_hidden } else { 0.0 });
        // The first gather and the last reductions count in full, the others as hidden.
        let mut of_splits = [[0.0; BucketSplit::SPLITS.len()]; 2];
        for (at, split) in [buckets.gather, buckets.reduction].into_iter().enumerate() {
            if !self.counts_at_end(place, at, longer[at]) {
                continue;
            }
            match BucketSplit::SPLITS.into_iter().position(|of| of == split) {
                None => in_full[at] = beyond_hidden,
                Some(split) => {
                    in_full[at] = -self.hidden_cost;
                    of_splits[at][split] = 1.0;
                }
            }
        }
        let [gathered, overlapped] = in_full;
        let [split_gathers, split_reductions] = of_splits;
        // A collective beside the passes in one direction counts as hidden, as these passes do, or in full.
        let [beside_forward, beside_backward] =
            [(0, forward), (1, backward)].map(|(at, counted)| match longer[at] {
                Longer::InEveryPass => in_pass * passes,
                Longer::AtEnd if place == Place::FirstBlock && self.is_sharded(at) => {
                    in_pass * passes
                }
                _ => counted * self.hidden_cost,
            });
        // The head hides the backward gather of the last block, and the second block that of the first; the last block may hide one.
        let is_hidden = match place {
            Place::LastBlock => true,
            Place::SecondToLastBlock => self.last_block_hides_gather,
            _ => false,
        };
        let of_backward_gather = match (place, longer[1]) {
            (_, Longer::InEveryPass) if is_hidden => in_pass * passes * self.hidden_cost,
            (Place::FirstBlock, Longer::AtEnd) => backward * self.hidden_cost,
            _ => beside_backward,
        };
        StepWeights {
            forward,
            backward,
            weight_gradient: 0.0,
            step_phase: 1.0,
            update: 0.0,
            gathered,
            overlapped,
            sharded_gathers: beside_forward + of_backward_gather,
            sharded_reductions: beside_backward,
            split_gathers,
            split_reductions,
        }
    }

    /// Lower bound in seconds on additions of reduced parts, which follow their reductions, where these take longer than backward
    /// passes.
    fn additions(&self, longer: Longer) -> f64 {
        if !self.context.accumulates_parts() || longer == Longer::Never {
            return 0.0;
        }
        let passes = self.context.passes() as f64;
        let alone = if longer == Longer::InOnePass { passes - 1.0 } else { passes };
        let of_part = |(spec, _, count): &(SegmentSpec, Place, f64)| {
            count * self.segments.sharding_min(*spec, self.context).additions.0
        };
        alone * self.parts.iter().map(of_part).sum::<f64>()
    }
}
