//! Decisions that all frameworks treat alike.

use narrows_plan::model::{AttentionMask, Model, Positions};
use narrows_plan::strategy::Strategy;
use narrows_plan::{BucketSplit, Executor};

use super::decision::Translation;
use super::exported_plan::ExportedPlan;

/// Difference between the positions of a model and those of a framework that rotates queries and keys in all blocks.
pub fn other_positions(model: &Model) -> Option<String> {
    if model.blocks.iter().any(|block| block.positions == Positions::None) {
        return Some("would rotate queries and keys in all blocks".to_owned());
    }
    other_rope(model)
}

/// Difference between the RoPE of a model and the exported one, which rotates whole heads by unscaled frequencies.
pub fn other_rope(model: &Model) -> Option<String> {
    let (dim, head_dim) = (model.rope.dim, model.head_dim);
    if dim != head_dim {
        return Some(format!("would rotate all {head_dim} features of a head, not {dim}"));
    }
    model.rope.scaling.is_some().then(|| "would not scale the frequencies of RoPE".to_owned())
}

/// Difference between the sliding windows of a model and the exported attention, which has none.
pub fn ignored_window(model: &Model) -> Option<String> {
    let has_window = model.blocks.iter().any(|block| block.attention != AttentionMask::Full);
    has_window.then(|| "would attend over whole sequences, without the sliding window".to_owned())
}

/// Difference between initial factors with a latent residual and those of a framework.
pub fn ignored_residual(model: &Model) -> Option<String> {
    let residual = model.latent_residual.filter(|_| model.is_low_rank());
    residual.map(|_| "would start without the latent residual in the factors".to_owned())
}

/// Layouts of crossing latents.
pub fn crossing_layout(exported: &ExportedPlan) -> Translation {
    match exported.plan.crossing_layout {
        None => Translation::implied(),
        Some(_) => Translation::not_expressible("has no crossing latents"),
    }
}

/// Two microbatches of a pass.
pub fn overlap_microbatch_pairs(exported: &ExportedPlan) -> Translation {
    match exported.plan.overlap_microbatch_pairs {
        true => Translation::approximated([], "microbatches run one after the other"),
        false => Translation::implied(),
    }
}

/// Gradient buckets of a stage's first block.
pub fn last_gradient_bucket(exported: &ExportedPlan) -> Translation {
    let is_divided = exported.context().can_split_gradient_bucket();
    first_block_buckets(exported.plan.last_gradient_bucket, is_divided)
}

/// Gather buckets of a stage's first block.
pub fn first_gather_bucket(exported: &ExportedPlan) -> Translation {
    let is_divided = exported.context().gathers_in_forward();
    first_block_buckets(exported.plan.first_gather_bucket, is_divided)
}

/// The optimizer LORO.
pub fn loro_every(exported: &ExportedPlan) -> Translation {
    match exported.plan.loro_every {
        Some(_) => Translation::not_expressible("has no optimizer LORO"),
        None => Translation::implied(),
    }
}

fn first_block_buckets(split: BucketSplit, is_divided: bool) -> Translation {
    match split != BucketSplit::Whole && is_divided {
        true => Translation::approximated([], "buckets of the first block are as those of others"),
        false => Translation::implied(),
    }
}

/// Split of the embedding over the tensor axis.
pub fn embedding(exported: &ExportedPlan) -> Translation {
    match exported.embedding_strategy() {
        _ if exported.plan.mesh.tensor == 1 => Translation::implied(),
        Strategy::Vocabulary => Translation::implied(),
        _ => Translation::approximated([], "the embedding is always split on the vocabulary"),
    }
}

/// Split of head and loss over the tensor axis.
pub fn head(exported: &ExportedPlan) -> Translation {
    match exported.head_strategies() {
        _ if exported.plan.mesh.tensor == 1 => Translation::implied(),
        [_, Strategy::Column, Strategy::Vocabulary] => Translation::implied(),
        _ => Translation::approximated([], "head and loss are always split on the vocabulary"),
    }
}

/// Launches of kernels in a framework that captures none.
pub fn executor(exported: &ExportedPlan) -> Translation {
    match exported.plan.executor {
        Executor::Captured => Translation::approximated([], "kernels are launched one by one"),
        _ => Translation::implied(),
    }
}
