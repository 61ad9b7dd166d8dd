//! Faster solutions for the last blocks of a plan that fits.
//!
//! With one stage, the arena of a plan is fullest during the backward pass of one of its last blocks, when all blocks before
//! it keep activations. The last block has no reduced gradients beside its backward pass, and what it keeps is no longer there
//! during other backward passes; what a block keeps for its own backward pass is often what it would recompute there. So the
//! last blocks may keep more than other blocks in the same arena, which the bytes of a stage do not show.

use std::sync::Arc;

use narrows_plan::Context;

use super::sized_plan::SizedPlan;
use super::solver::ContextSolver;
use crate::feasible_plan::FeasiblePlan;
use crate::pipeline::{
    AssignmentMethod, EmbeddingAndHead, Partition, StageAssignment, in_flight_in_chunks,
};
use crate::segment::{SegmentSpec, SolvedSegment};

/// Largest number of partitions that are lowered.
const LOWERED_MAX: usize = 8;

impl ContextSolver<'_> {
    /// The plan of a partition that fits, with the fastest solutions for its last blocks with which the arena does not exceed the
    /// limit; `None` with several stages, where memory does not bind, or where no block has a faster one.
    pub(super) fn with_faster_last_blocks(
        &self,
        context: &Context,
        embedding_and_head: &EmbeddingAndHead,
        partition: &Partition,
    ) -> Option<FeasiblePlan> {
        let [stage] = partition.stages.as_slice() else { return None };
        if stage.method == AssignmentMethod::Elimination {
            return None;
        }
        let in_flight = in_flight_in_chunks(context, 0)[0];
        let microbatches = context.workload.microbatches(&context.mesh);
        let time = |solved: &SolvedSegment| solved.time.total(microbatches);
        let with_block = |blocks: &[Arc<SolvedSegment>], block: usize, solved| {
            let mut blocks = blocks.to_vec();
            blocks[block] = solved;
            let all_in_flight = blocks.iter().map(|_| in_flight);
            let assignment = StageAssignment::new(blocks.clone(), all_in_flight);
            let stages = vec![Arc::new(StageAssignment { method: stage.method, ..assignment })];
            let counts = partition.counts.clone();
            let sized = self.size(
                context,
                embedding_and_head,
                Partition { bound: partition.bound, counts, stages },
            );
            (sized.peak_arena() <= self.request.arena_limit()).then_some((blocks, sized))
        };
        let (mut blocks, mut fastest) = (stage.blocks.clone(), None::<SizedPlan>);
        let (mut lowered, mut next) = (0, None);
        for (block, shape) in self.segments.layer_shapes().iter().enumerate().rev() {
            let spec = SegmentSpec::block(*shape, embedding_and_head.boundary);
            let hull = self.segments.hull(spec, context, in_flight, None);
            // Of the faster solutions, the fastest first, those before `too_large` need too much, and that at `fits` does not.
            let faster =
                hull.iter().take_while(|solved| time(solved) < time(&blocks[block])).count();
            let (mut too_large, mut fits) = (0, faster);
            while too_large < fits && lowered < LOWERED_MAX && !self.segments.out_of_time() {
                let middle = (too_large + fits) / 2;
                lowered += 1;
                match with_block(&blocks, block, hull[middle].clone()) {
                    Some((changed, sized)) => {
                        (fits, next) = (middle, Some((changed, sized)));
                    }
                    None => too_large = middle + 1,
                }
            }
            match next.take() {
                Some((changed, sized)) => (blocks, fastest) = (changed, Some(sized)),
                None if faster > 0 => break,
                None => {}
            }
        }
        fastest.map(|sized| self.complete(sized))
    }
}
