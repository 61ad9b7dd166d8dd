//! Lower bound on the memory of a session, known from its program before anything is allocated.
//!
//! ```text
//! arenas of all devices
//! + buffers for transfers between neighbouring stages, in both directions
//! + whole weights while they are drawn or loaded; with moments three times as much, for a checkpoint
//! ```
//! all in f32. Left out are small amounts: tables of positions, scratch memory of each thread, and
//! the tokens of a step.

use std::ops::Range;

use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_plan::program::Program;
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
/// program. `ranks` are those processes; rank 0 also holds the gathered tensors.
pub fn node_memory_lower_bound(
    model: &Model,
    program: &Program,
    gathered: GatheredTensors,
    ranks: Range<u64>,
) -> Bytes {
    let mesh = program.context.mesh;
    let has_rank_0 = ranks.start == 0;
    let ranks = ranks.start..ranks.end.min(mesh.devices());
    let arena = |rank: u64| program.stages[DeviceId(rank).stage(&mesh)].arena.0;
    let arenas: u128 = ranks.map(|rank| u128::from(arena(rank))).sum();
    let gathered = if has_rank_0 { gathered_bytes(model, gathered) } else { 0 };
    Bytes(u64::try_from(arenas + gathered).unwrap_or(u64::MAX))
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
