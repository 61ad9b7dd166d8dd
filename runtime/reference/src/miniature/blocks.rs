//! Which blocks a twin keeps.

use narrows_plan::Plan;
use narrows_plan::graph::BlockShape;
use narrows_plan::model::Model;
use narrows_plan::{BlockRun, StagePlan};

/// Alike blocks in a row that stay: two, so that one hands to its like.
const ALIKE: u64 = 2;

/// The stages of the twin, and the model's blocks that they hold, in order. The plan was resolved
/// against the model.
///
/// Blocks are alike when they have one shape: what enters from the block before and what leaves to
/// the block after is part of it. So a block's neighbours may be left out when they are its like,
/// and it remains what it was.
pub(super) fn kept(plan: &Plan, model: &Model) -> (Vec<StagePlan>, Vec<usize>) {
    let shapes = BlockShape::all(model);
    let mut layers = vec![];
    let stages = plan.stages.iter().map(|stage| {
        let runs = stage.runs.iter().map(|run| {
            let first = layers.len() as u64;
            let (from, to) = (run.first as usize, (run.first + run.count) as usize);
            let mut next = from;
            for alike in shapes[from..to].chunk_by(PartialEq::eq) {
                let some = alike.len().min(ALIKE as usize);
                layers.extend(next..next + some);
                next += alike.len();
            }
            BlockRun { first, count: layers.len() as u64 - first, ..run.clone() }
        });
        StagePlan { runs: runs.collect() }
    });
    let stages = stages.collect();
    (stages, layers)
}
