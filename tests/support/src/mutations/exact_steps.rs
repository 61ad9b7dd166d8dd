//! Mutations of exact steps of LORO.

use narrows_plan::program::{HostAction, Program, StageProgram};

use super::overlap::random_stage;
use crate::plans::TestRng;

/// Removes, repeats or moves an instruction of an exact step, leaves a pair or a buffer out of one, gives a pair to a device that
/// the stage does not have or another size, or sums over another group.
pub(super) fn change_exact_step(rng: &mut TestRng, program: &mut Program) -> Option<String> {
    let has_exact_step = |stage: &StageProgram| !stage.exact_step.is_empty();
    let index = random_stage(rng, program, has_exact_step)?;
    let owners = program.context.mesh.devices_per_stage();
    let exact_step = &mut program.stages[index].exact_step;
    let at = rng.below(exact_step.instrs.len());
    let pair = rng.below(exact_step.pairs.len());
    let variant = rng.below(8);
    match variant {
        0 => drop(exact_step.instrs.remove(at)),
        1 => exact_step.instrs.insert(at, exact_step.instrs[at].clone()),
        2 if at > 0 && exact_step.instrs[at].pairs == exact_step.instrs[at - 1].pairs => {
            // Sums over two axes commute.
            let kind = |at: usize| std::mem::discriminant(&exact_step.instrs[at].action);
            if kind(at) == kind(at - 1) {
                return None;
            }
            exact_step.instrs.swap(at, at - 1);
        }
        3 => exact_step.instrs[at].pairs.end -= 1,
        4 => match &mut exact_step.instrs[at].action {
            HostAction::Read(buffers) | HostAction::Write(buffers) => {
                buffers.swap_remove(rng.below(buffers.len()));
            }
            HostAction::SumFactors(group) | HostAction::SumUpdates(group) => group.size += 1,
            HostAction::Keep | HostAction::Decompose | HostAction::Place => return None,
        },
        5 => exact_step.pairs[pair].owner = owners,
        6 => exact_step.pairs[pair].d_in += 1,
        7 => drop(exact_step.pairs.pop()),
        _ => return None,
    }
    Some(format!("stage {index} exact step {at}, pair {pair}, variant {variant}"))
}
