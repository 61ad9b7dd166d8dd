//! The blocks of a miniature.

use narrows_plan::graph::BlockShape;
use narrows_plan::model::Model;
use narrows_plan::{BlockRun, Plan, StagePlan};

/// Number of consecutive blocks of equal shape that are kept: two, so that one precedes another.
const BLOCKS_KEPT: u64 = 2;

/// Returns the stages of the miniature and the indices of the kept blocks, in order. The plan must be
/// resolvable against the model.
///
/// The shape of a block includes the latents that it receives from the previous block and sends to the
/// next, so leaving out a neighbour of equal shape does not change a block.
pub(super) fn shrink_stages(plan: &Plan, model: &Model) -> (Vec<StagePlan>, Vec<usize>) {
    let shapes = BlockShape::all(model);
    let mut layers = vec![];
    let stages = plan.stages.iter().map(|stage| {
        let runs = stage.runs.iter().map(|run| {
            let first = layers.len() as u64;
            let (from, to) = (run.first as usize, (run.first + run.count) as usize);
            let mut next = from;
            for equal_blocks in shapes[from..to].chunk_by(PartialEq::eq) {
                let kept = equal_blocks.len().min(BLOCKS_KEPT as usize);
                layers.extend(next..next + kept);
                next += equal_blocks.len();
            }
            BlockRun { first, count: layers.len() as u64 - first, ..run.clone() }
        });
        StagePlan { runs: runs.collect() }
    });
    let stages = stages.collect();
    (stages, layers)
}
