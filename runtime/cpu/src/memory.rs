//! Lower bound on the memory of a session, known from its program before anything is allocated.
//!
//! ```text
//! arenas of all devices
//! + buffers for transfers between neighbouring stages, in both directions
//! + whole weights while they are drawn or loaded; with moments three times as much, for a checkpoint
//! ```
//! all in f32. Of several processes, each saves from its device, or copies what it saves first if steps go on meanwhile. Left out are small amounts: tables of positions, scratch memory of each thread, and
//! the tokens of a step.

use std::ops::Range;

use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_plan::program::Program;
use narrows_runtime::checkpoint::SaveMode;
use narrows_runtime::session::saved_elements;
use narrows_runtime::{DeviceId, logical_parameters};

use crate::stage_traffic::stage_traffic;

/// Whole, unsharded tensors that are in memory at the same time besides the arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatheredTensors {
    /// Weights, while they are drawn.
    Weights,
    /// Weights and both moments, for a checkpoint.
    WeightsAndMoments,
}

/// Lower bound on the memory of the processes of one node, each of which is one device of the
/// program. `ranks` are those processes; rank 0 also holds the whole weights while they are drawn.
pub fn node_memory_lower_bound(
    model: &Model,
    program: &Program,
    mode: Option<SaveMode>,
    ranks: Range<u64>,
) -> Bytes {
    let mesh = program.context.mesh;
    let drawn = if ranks.start == 0 { gathered_bytes(model, GatheredTensors::Weights) } else { 0 };
    let devices = || (ranks.start..ranks.end.min(mesh.devices())).map(DeviceId);
    let arenas: u128 =
        devices().map(|device| u128::from(program.stages[device.stage(&mesh)].arena.0)).sum();
    let copied: u128 = match mode {
        Some(SaveMode::Background) => {
            devices().map(|device| 4 * u128::from(saved_elements(program, device))).sum()
        }
        Some(SaveMode::Blocking) | None => 0,
    };
    Bytes(u64::try_from(arenas + drawn.max(copied)).unwrap_or(u64::MAX))
}

/// Lower bound on the memory of a session whose devices are all in this process.
pub fn memory_lower_bound(model: &Model, program: &Program, gathered: GatheredTensors) -> Bytes {
    let mesh = program.context.mesh;
    let devices_per_stage = u128::from(mesh.tensor) * u128::from(mesh.replicas());
    let arenas: u128 = program.stages.iter().map(|stage| u128::from(stage.arena.0)).sum();
    let transfers: u128 = stage_traffic(program).map(|traffic| u128::from(traffic.bytes())).sum();
    let total = devices_per_stage * (arenas + transfers) + gathered_bytes(model, gathered);
    Bytes(u64::try_from(total).unwrap_or(u64::MAX))
}

fn gathered_bytes(model: &Model, gathered: GatheredTensors) -> u128 {
    let parameters = logical_parameters(model);
    let elements: u128 = parameters.iter().map(|parameter| u128::from(parameter.elements())).sum();
    let tensors = match gathered {
        GatheredTensors::Weights => 1,
        GatheredTensors::WeightsAndMoments => 3,
    };
    tensors * 4 * elements
}

#[cfg(test)]
mod tests {
    use narrows_test_support::small_models::small_models;

    use super::*;

    /// The copies of all processes are weights and moments once, whatever the plan.
    #[test]
    fn processes_that_save_beside_steps_hold_copies() {
        use narrows_plan::Precision;
        use narrows_test_support::plans::{TestRng, draw_plan};
        use narrows_test_support::small_models::small_context;
        let mut rng = TestRng::new(3);
        let mut several = 0;
        for model in small_models() {
            let context = small_context(&mut rng, Precision::Fp32);
            let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
            let program = narrows_plan::lower(&plan.resolve(&model).expect("a plan"));
            let devices = program.context.mesh.devices();
            let bound = |mode, ranks| node_memory_lower_bound(&model, &program, mode, ranks).0;
            let arenas: u64 = (0..devices).map(|rank| bound(None, rank..rank + 1)).sum();
            let arenas = arenas - gathered_bytes(&model, GatheredTensors::Weights) as u64;
            let all = gathered_bytes(&model, GatheredTensors::WeightsAndMoments) as u64;
            assert_eq!(
                bound(Some(SaveMode::Background), 0..devices),
                arenas + all,
                "{}",
                model.name
            );
            several += usize::from(devices > 1);
        }
        assert!(several > 3, "{several} plans for several devices");
    }
}
