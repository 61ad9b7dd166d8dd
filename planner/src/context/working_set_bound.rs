//! Time that the working set of a backward pass costs, where memory binds and a plan has one stage.
//!
//! The bound of a context gives the blocks all memory besides embedding and head. At the backward pass of one of the last k
//! blocks, a part of it holds the [working set](WorkingSet) of that pass, while the other blocks hold what they keep. With L
//! blocks of ρ bytes of weights and optimizer states, M bytes of memory and a working set of W bytes, the step takes at least
//!
//! ```text
//! k·(fastest block) + (least time of L − k blocks within M − k·ρ − W bytes)
//! ```
//! When the backward pass of the last block begins, all blocks still have what they keep, besides V bytes of gathered weights.
//! Let v(λ) be the least of a block's time plus λ times its bytes. With multipliers λ of the bytes of the first L − k blocks
//! and κ ≤ λ of those of the last k, the two conditions together give the bound
//!
//! ```text
//! (L − k)·v(λ) − λ·(M − k·ρ − W) + k·v(κ) − κ·(W − V + k·ρ)
//! ```
//! since it counts κ times the bytes of all blocks, at most M − V, and λ − κ times those of the first ones. At κ = 0 it is the
//! bound above.

use narrows_cost_model::WorkingSet;
use narrows_plan::{Bytes, Context, Seconds};

use super::average_stage::evenly_split_bytes;
use super::solver::ContextSolver;
use crate::pipeline::{EmbeddingAndHead, in_flight_in_chunks};
use crate::segment::SegmentSpec;
use crate::solve::SupportingLine;

/// Relative error of sums of times.
const ROUNDING: f64 = 1e-9;

impl ContextSolver<'_> {
    /// Lower bound on the time by which the blocks of a plan with one stage take longer than those that fit into all memory
    /// besides embedding and head; infinite where no plan fits. 0 with several stages or shapes of blocks.
    pub(super) fn working_set_cost(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> Seconds {
        let segments = self.segments;
        if context.mesh.pipeline > 1 || segments.shape_count() > 1 {
            return Seconds(0.0);
        }
        let budgets = self.block_budgets(context, embedding_and_head, &[Bytes(0)]).ok();
        let spec = SegmentSpec::block(0, embedding_and_head.boundary);
        let kept_by_head = embedding_and_head.kept_by_head(context);
        let cost = budgets.and_then(|of| self.cost_within(context, spec, of[0], kept_by_head));
        cost.unwrap_or_default()
    }

    /// The cost where the blocks have these bytes, and those that the head keeps once its backward pass has ended; `None` where
    /// memory does not bind, or too little is known.
    fn cost_within(
        &self,
        context: &Context,
        spec: SegmentSpec,
        budget: Bytes,
        kept_by_head: Bytes,
    ) -> Option<Seconds> {
        let segments = self.segments;
        let blocks = segments.layer_shapes().len() as u64;
        let in_flight = in_flight_in_chunks(context, 0)[0];
        let resident = evenly_split_bytes(segments.block_parameters(), context);
        let sets = segments.working_sets(spec, context).into_iter();
        // Of each set, the last blocks, the others, and the bytes that are left to these.
        let rooms: Vec<(u64, u64, f64)> = sets
            .filter(|set| set.last_blocks < blocks)
            .map(|WorkingSet { last_blocks, bytes }| {
                let left =
                    (budget + kept_by_head).as_f64() - (resident * last_blocks + bytes).as_f64();
                (last_blocks, blocks - last_blocks, left)
            })
            .collect();
        let fastest = segments.fastest(spec, context)?.bytes.total(in_flight);
        if rooms.iter().all(|(_, others, left)| (fastest * *others).as_f64() <= *left) {
            return None;
        }
        // The line below the time of a block that is best for this many blocks within so many bytes; `Err` where none fits.
        let line = |count: u64, bytes: f64| {
            let average = Bytes((bytes.max(0.0) / count as f64) as u64);
            let line = segments.supporting_line(spec, context, in_flight, average)?;
            Some(if count as f64 * line.bytes_min > bytes { Err(line) } else { Ok(line) })
        };
        let below = |line: &SupportingLine, count: u64, bytes: f64| {
            count as f64 * line.intercept - line.multiplier * bytes
        };
        let within_budget = line(blocks, budget.as_f64())?.ok()?;
        let within_budget = below(&within_budget, blocks, budget.as_f64());
        let all = rooms.iter().find(|(last_blocks, ..)| *last_blocks == 0)?.2;
        let least = rooms.iter().filter_map(|(last_blocks, others, left)| {
            let Ok(first) = line(*others, *left)? else { return Some(f64::INFINITY) };
            if *last_blocks == 0 {
                return Some(below(&first, *others, *left));
            }
            let rest = all - left;
            let last = match line(*last_blocks, rest)? {
                Ok(last) if last.multiplier <= first.multiplier => last,
                _ => first,
            };
            Some(below(&first, *others, *left) + below(&last, *last_blocks, rest))
        });
        let least = least.fold(within_budget, f64::max);
        Some(Seconds((least * (1.0 - ROUNDING) - within_budget).max(0.0)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use narrows_cost_model::profile;
    use narrows_plan::model::{Model, presets};

    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::{SegmentSolver, SolvedSegment};

    use super::*;

    /// Every arena holds what the working sets and the other blocks, embedding and head need, for plans with much and with
    /// little memory.
    #[test]
    fn no_arena_is_smaller_than_a_working_set() {
        let profile = profile::preset("a100-80gb").expect("a preset");
        let (mut checked, mut in_pairs, mut bounded) = (0, 0, 0.0_f64);
        for (name, gib) in [("cola-350m", 3), ("cola-350m", 60), ("llama-130m", 2), ("svd-130m", 3)]
        {
            // With fewer logits than in the presets, more than these is needed during backward passes of blocks.
            let model = Model { vocab: 2048, ..presets::find(name).expect("a preset") };
            let request = Request {
                memory_limit: MemoryLimit::Bytes(Bytes(gib << 30)),
                ..Request::new(model, profile.clone(), 4, 16, 2048)
            };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            let of_one_stage = |context: &Context| context.mesh.pipeline == 1;
            for context in contexts(&request).into_iter().filter(of_one_stage).step_by(3) {
                let Some((_, context, embedding_and_head, partition)) =
                    solver.even_partition(context, f64::INFINITY)
                else {
                    continue;
                };
                let kept_by_head = embedding_and_head.kept_by_head(&context);
                let ends = embedding_and_head.bytes(&context, 0);
                let blocks = partition.stages[0].blocks.clone();
                let arena = solver.size(&context, &embedding_and_head, partition).arenas[0];
                let spec = SegmentSpec::block(0, embedding_and_head.boundary);
                let in_flight = in_flight_in_chunks(&context, 0)[0];
                let kept = |of: &[Arc<SolvedSegment>]| -> Bytes {
                    of.iter().map(|block| block.bytes.kept * in_flight.kept).sum()
                };
                let resident: Bytes = blocks.iter().map(|block| block.bytes.resident).sum();
                let all = ends + resident + kept(&blocks);
                assert!(all <= arena, "{name}, {context:?}: {all} in {arena}");
                let counted = all.as_f64();
                for set in segments.working_sets(spec, &context) {
                    let others = blocks.len() - set.last_blocks as usize;
                    let needed = ends.saturating_sub(kept_by_head)
                        + resident
                        + kept(&blocks[..others])
                        + set.bytes;
                    assert!(needed <= arena, "{name}, {context:?}: {set:?} in {arena}");
                    let share = (needed.as_f64() - counted) / (arena.as_f64() - counted);
                    bounded = bounded.max(share);
                    in_pairs += usize::from(context.overlap_microbatch_pairs);
                    checked += 1;
                }
            }
        }
        assert!(checked > 60 && in_pairs > 0, "{checked} working sets, {in_pairs} in pairs");
        assert!(bounded > 0.1, "at most {bounded} of what no block counts");
    }
}
