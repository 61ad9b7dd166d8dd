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
//! The head's backward pass counts in full, and the gather beside it with the least that it adds.
//!
//! Where the collectives of one direction are hidden, those at the ends of a pass add more than the least, as in other bounds: the
//! first gather, which the embedding alone hides, and the last reduction, which follows the backward pass.
//!
//! The last two reductions, of the second and of the first block, begin when the backward pass of the second block has ended. They may
//! take longer than the rest of the pass, which is that of the first block and of the embedding, while all others are hidden. The
//! first two gathers mirror that.
//!
//! All of these times depend on the same decisions: the bound is the least of their sum over all decisions of each segment.

use std::cell::RefCell;

use narrows_cost_model::StepWeights;
use narrows_plan::Context;
use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};

use crate::pipeline::{PipelineOverheads, StageOverhead, in_flight_in_chunk};
use crate::segment::{ForwardCosts, SegmentSolver, SegmentSpec};

/// The passes in one direction whose collectives take longer than they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Longer {
    Never,
    /// In the first forward pass before the second block, or in the last backward pass after it.
    BesideFirstBlock,
    /// In the first forward pass, or in the last backward pass.
    InOnePass,
    /// In every pass, beside the blocks.
    InEveryPass,
}

impl Longer {
    /// The cases that a context has in forward (0) and in backward (1) passes.
    fn cases(context: &Context) -> [Vec<Longer>; 2] {
        let overlaps = context.overlap_grad_reduce;
        let of_passes = [
            (context.gathers_in_forward(), context.shards_weights() && overlaps),
            (overlaps, context.shards_gradients() && overlaps),
        ];
        of_passes.map(|(in_one, in_every)| {
            let one = in_one.then_some(Longer::InOnePass);
            let beside_first =
                (in_one && !context.shards_gradients()).then_some(Longer::BesideFirstBlock);
            let every = in_every.then_some(Longer::InEveryPass);
            [Some(Longer::Never), beside_first, one, every].into_iter().flatten().collect()
        })
    }
}

/// A segment's place in the passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Embedding,
    FirstBlock,
    SecondBlock,
    Block,
    SecondToLastBlock,
    LastBlock,
    Head,
}

impl Place {
    /// Number of blocks after the last ones, which have a place of their own.
    fn blocks_after(self) -> Option<u64> {
        match self {
            Place::LastBlock => Some(0),
            Place::SecondToLastBlock => Some(1),
            _ => None,
        }
    }
}

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
    /// Time that the collectives at the ends of all forward (0) and all backward passes (1) add where the others are hidden, with
    /// the additions of reduced parts, in seconds.
    at_ends: [f64; 2],
    /// Time that reductions of the first block add which follow the last backward pass, in seconds.
    after_backward: f64,
    /// Costs of forward passes besides those of the segments.
    forward_costs: Option<ForwardCosts>,
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
            at_ends: [0.0; 2],
            forward_costs: None,
            known: RefCell::default(),
            after_backward: 0.0,
        };
        if !before.is_empty() {
            step.last_block_counts = [0, 1].map(|at| {
                step.least_pass(last, at) * (1.0 - step.overlapped)
                    > step.most_in_one_pass(head, at) * (1.0 - step.hidden_cost)
            });
        }
        Some(step)
    }

    /// A step with what its ends add with these overheads of the layouts, and with these costs of forward passes where there are
    /// such; `None` with several stages.
    pub(super) fn with_overheads(
        segments: &'a SegmentSolver,
        context: &'a Context,
        overheads: &PipelineOverheads,
        forward_costs: Option<ForwardCosts>,
    ) -> Option<CollectiveStep<'a>> {
        let mut step = CollectiveStep::new(segments, context, overheads.layouts())?;
        step.forward_costs = forward_costs;
        step.count_ends(overheads);
        Some(step)
    }

    /// Costs of forward passes besides those of the segments.
    pub(super) fn forward_costs(&self) -> Option<&ForwardCosts> {
        self.forward_costs.as_ref()
    }

    /// Counts what the ends of the passes add with these overheads of the same layouts.
    pub(super) fn count_ends(&mut self, overheads: &PipelineOverheads) {
        let overhead = &overheads.of(&[self.segments.layer_shapes().len()])[0];
        self.at_ends = at_ends(overhead, self.context);
        self.after_backward = overhead.first_block_min.0;
    }

    /// The part of a segment's forward (0) or backward (1) pass that counts.
    fn part(&self, place: Place, at: usize, longer: Longer) -> f64 {
        match (place, longer) {
            (_, Longer::Never) | (Place::Head, _) => 1.0,
            (Place::Embedding | Place::FirstBlock, Longer::BesideFirstBlock) => self.overlapped,
            (_, Longer::BesideFirstBlock) => 1.0,
            // Nothing is beside it: no weights are gathered for a later block, and no gradients of one are reduced.
            (Place::LastBlock, Longer::InEveryPass)
                if at == 0 || !self.context.shards_weights() =>
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
            let of_part = self.least(*spec, self.weights(*place, longer), multiplier)?;
            total = [0, 1].map(|at| total[at] + count * of_part[at]);
        }
        Some(total)
    }

    /// The time of a step in a case besides the weighted times of its parts, in seconds.
    pub(super) fn besides_segments(&self, longer: [Longer; 2]) -> f64 {
        let hidden = [0, 1].into_iter().filter(|at| longer[*at] == Longer::Never);
        let at_ends: f64 = hidden.map(|at| self.at_ends[at]).sum();
        // Those of sharded gradients follow the reductions of every pass.
        let after_backward =
            if longer[1] == Longer::InEveryPass { self.after_backward } else { 0.0 };
        at_ends + after_backward + self.additions(longer[1])
    }

    /// The parts of a step: distinct segments in each place, with their numbers of instances.
    pub(super) fn parts(&self) -> impl Iterator<Item = (SegmentSpec, f64)> {
        self.parts.iter().map(|(spec, _, count)| (*spec, *count))
    }

    /// The weights of the times of a part in a case.
    pub(super) fn part_weights(&self, part: usize, longer: [Longer; 2]) -> StepWeights {
        self.weights(self.parts[part].1, longer)
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
        let costs = (&weights, self.forward_costs.as_ref());
        let least = segments.min_weighted_cost(spec, context, costs, memory)?;
        self.known.borrow_mut().push((key, least));
        Some(least)
    }

    /// Whether a segment's collectives during the first forward (0) or the last backward pass (1) count with all of their time.
    fn counts_in_full(&self, place: Place, at: usize, longer: Longer) -> bool {
        match longer {
            Longer::InOnePass => place != Place::Head || !self.last_block_counts[at],
            Longer::BesideFirstBlock => matches!(place, Place::FirstBlock | Place::SecondBlock),
            Longer::Never | Longer::InEveryPass => false,
        }
    }

    fn weights(&self, place: Place, longer: [Longer; 2]) -> StepWeights {
        let (passes, in_pass) =
            (self.context.passes() as f64, self.context.pass_microbatches() as f64);
        let beyond_hidden = 1.0 - self.hidden_cost;
        let [forward, backward] = [0, 1].map(|at| {
            let part = self.part(place, at, longer[at]);
            match longer[at] {
                Longer::InEveryPass => in_pass * passes * part,
                _ => in_pass * (passes - 1.0 + part),
            }
        });
        let [gathered, overlapped] = [0, 1]
            .map(|at| if self.counts_in_full(place, at, longer[at]) { beyond_hidden } else { 0.0 });
        // A collective beside the passes in one direction counts as hidden, as these passes do, or in full.
        let [beside_forward, beside_backward] =
            [(0, forward), (1, backward)].map(|(at, counted)| match longer[at] {
                Longer::InEveryPass => in_pass * passes,
                _ => counted * self.hidden_cost,
            });
        // The head hides the backward gather of the last block.
        let of_backward_gather = match (place, longer[1]) {
            (Place::LastBlock, Longer::InEveryPass) => in_pass * passes * self.hidden_cost,
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

/// Time that the collectives at the ends of the passes of a stage add in a step, in seconds.
fn at_ends(overhead: &StageOverhead, context: &Context) -> [f64; 2] {
    let microbatches = context.workload.microbatches(&context.mesh);
    let [forward, backward, _] = overhead.besides_ends.map(|time| time * microbatches as f64);
    [overhead.first_gather_min + forward, overhead.first_block_min + backward].map(|time| time.0)
}
