//! Memory that the blocks of a plan with one stage may keep, besides the working set of a backward pass.
//!
//! When the backward pass of the last block or of the head begins, all blocks have what they keep, besides the working set of this
//! pass. At the backward pass of one of the last k blocks, the working set is larger, and the other blocks have what they keep.
//! With ρ bytes of weights and optimizer states of a block, M bytes of memory besides embedding and head, and a working set of W
//! bytes, the first blocks of a stage have M − k·ρ − W bytes or fewer.

use narrows_cost_model::WorkingSet;
use narrows_plan::{Bytes, Context};

use super::average_stage::evenly_split_bytes;
use super::solver::ContextSolver;
use crate::pipeline::EmbeddingAndHead;
use crate::request::MemoryLimit;

/// Memory of the blocks of a stage besides its last ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BlockRoom {
    /// Number of blocks at the end of the stage that are left out.
    pub last_blocks: u64,
    /// Bytes of the other blocks at most; negative where nothing fits.
    pub bytes: f64,
}

impl ContextSolver<'_> {
    /// The rooms of a plan with one stage: those that working sets leave, and that of all blocks. Empty without a limit, and where
    /// embedding and head do not fit.
    pub(super) fn block_rooms(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
    ) -> Vec<BlockRoom> {
        if self.request.memory_limit == MemoryLimit::None {
            return vec![];
        }
        let segments = self.segments;
        let Ok(budgets) = self.block_budgets(context, embedding_and_head, &[Bytes(0)]) else {
            return vec![];
        };
        let all = budgets[0].as_f64();
        let besides_head = all + embedding_and_head.freed_by_head(segments, context).as_f64();
        let parameters = match segments.shape_count() {
            1 => segments.block_parameters(),
            _ => segments.block_parameters_min(),
        };
        let resident = evenly_split_bytes(parameters, context);
        let of_set = |WorkingSet { last_blocks, bytes }| {
            let used = resident * last_blocks + bytes;
            BlockRoom { last_blocks, bytes: besides_head - used.as_f64() }
        };
        let layouts = (embedding_and_head.boundary, embedding_and_head.tied_weight);
        let sets = segments.working_sets(layouts, context).into_iter();
        sets.map(of_set).chain([BlockRoom { last_blocks: 0, bytes: all }]).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use narrows_cost_model::profile;
    use narrows_plan::model::{Model, presets};

    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::pipeline::in_flight_in_chunks;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::{SegmentSolver, SolvedSegment};

    use super::*;

    /// Every arena holds what the working sets and the other blocks, embedding and head need, for plans with much and with
    /// little memory.
    #[test]
    fn no_arena_is_smaller_than_a_working_set() {
        let profile = profile::preset("a100-80gb").expect("a preset");
        let (mut checked, mut in_pairs, mut bounded) = (0, 0, 0.0_f64);
        // With few logits, more than these is needed during backward passes of blocks; with many, in that of the head. LaX has
        // two shapes of blocks.
        for (name, gib, vocab) in [
            ("cola-350m", 3, 2048),
            ("cola-350m", 60, 2048),
            ("llama-130m", 2, 2048),
            ("svd-130m", 3, 2048),
            ("llama-130m", 3, 32000),
            ("lax-350m", 3, 2048),
            ("lax-130m", 3, 32000),
        ] {
            let model = Model { vocab, ..presets::find(name).expect("a preset") };
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
                let in_flight = in_flight_in_chunks(&context, 0)[0];
                let kept = |of: &[Arc<SolvedSegment>]| -> Bytes {
                    of.iter().map(|block| block.bytes.kept * in_flight.kept).sum()
                };
                let resident: Bytes = blocks.iter().map(|block| block.bytes.resident).sum();
                let all = ends + resident + kept(&blocks);
                assert!(all <= arena, "{name}, {context:?}: {all} in {arena}");
                let counted = all.as_f64();
                let layouts = (embedding_and_head.boundary, embedding_and_head.tied_weight);
                for set in segments.working_sets(layouts, &context) {
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
