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

use crate::Bytes;
use crate::decisions::ResolvedPlan;
use crate::program::{Program, StageProgram};

use stage::lower_stage;

/// Lowers every stage of a plan.
pub fn lower(plan: &ResolvedPlan) -> Program {
    let all = (0..stage_count(plan)).map(|stage| lower_stage(plan, stage)).collect();
    program(plan, all)
}

/// Lowers every stage of a plan whose arenas have at most `arena_max` bytes.
///
/// # Errors
/// The arenas of the stages up to the first whose arena is larger. Later stages are not lowered.
pub fn lower_within(plan: &ResolvedPlan, arena_max: Bytes) -> Result<Program, Vec<Bytes>> {
    let mut stages = vec![];
    for stage in 0..stage_count(plan) {
        let lowered = lower_stage(plan, stage);
        let is_too_large = lowered.arena > arena_max;
        stages.push(lowered);
        if is_too_large {
            return Err(stages.iter().map(|stage| stage.arena).collect());
        }
    }
    Ok(program(plan, stages))
}

fn stage_count(plan: &ResolvedPlan) -> usize {
    plan.context.mesh.pipeline as usize
}

fn program(plan: &ResolvedPlan, stages: Vec<StageProgram>) -> Program {
    let constants = plan.constants.clone();
    Program { context: plan.context, constants, tied: plan.tied, stages }
}
