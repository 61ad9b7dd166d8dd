//! Lowers a resolved plan to one instruction list per pipeline stage, deterministically and without
//! search.
//!
//! In the forward pass, an op's template is followed by the reshards of its outputs. In the backward
//! pass, each op is preceded by the recomputation of the operands that it reads, each once, and by the
//! summation and resharding of its output gradients. Buffers are placed in the arena last, by lifetime.

mod backward;
mod exact_step;
mod forward;
mod microbatch_pairs;
mod sharded_parameters;
mod stage;
mod stage_lowering;
mod step;

use crate::decisions::ResolvedPlan;
use crate::program::Program;

use stage::lower_stage;

/// Lowers every stage of a plan.
pub fn lower(plan: &ResolvedPlan) -> Program {
    let stages = (0..plan.context.mesh.pipeline as usize).map(|stage| lower_stage(plan, stage));
    let stages = stages.collect();
    let constants = plan.constants.clone();
    Program { context: plan.context, constants, tied: plan.tied, stages }
}
