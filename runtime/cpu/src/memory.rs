//! What a session will allocate, known from its program before anything is.
//!
//! ```text
//! arenas of all devices                                        what the plan says
//! + transfers, either way between neighbouring stages: one for each microbatch in flight
//! + whole weights, and twice as many moments, while they are drawn, loaded or gathered
//! ```
//! all in f32. Left out is what is small beside them: tables of positions, a few rows of scratch memory
//! for each thread, the tokens of a step.

use std::ops::Range;

use narrows_plan::Bytes;
use narrows_plan::model::Model;
use narrows_plan::program::Program;

use super::links::traffic;
use narrows_runtime::DeviceId;
use narrows_runtime::logical_parameters;

/// Whole tensors that are in memory at once besides the arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatheredTensors {
    /// The weights, when they are drawn.
    Weights,
    /// Weights and moments too, for a checkpoint.
    WeightsAndMoments,
}

/// Bytes that the processes of a node take at least, each of which is one device of a program. `ranks`
/// are those processes; rank 0 also holds the tensors that are gathered.
pub fn node_memory_lower_bound(
    model: &Model,
    program: &Program,
    gathered: GatheredTensors,
    ranks: Range<u64>,
) -> Bytes {
    let mesh = program.context.mesh;
    let (first, ranks) = (ranks.start, ranks.start..ranks.end.min(mesh.devices()));
    let arena = |rank: u64| program.stages[DeviceId(rank).stage(&mesh)].arena.0;
    let arenas: u128 = ranks.map(|rank| u128::from(arena(rank))).sum();
    let copies = if first == 0 { copied(model, gathered) } else { 0 };
    Bytes(u64::try_from(arenas + copies).unwrap_or(u64::MAX))
}

/// Bytes of whole tensors.
fn copied(model: &Model, gathered: GatheredTensors) -> u128 {
    let parameters = logical_parameters(model);
    let elements: u128 = parameters.iter().map(|parameter| u128::from(parameter.elements())).sum();
    let copies = match gathered {
        GatheredTensors::Weights => 1,
        GatheredTensors::WeightsAndMoments => 3,
    };
    copies * 4 * elements
}

/// Bytes that running a program takes at least.
pub fn memory_lower_bound(model: &Model, program: &Program, gathered: GatheredTensors) -> Bytes {
    let mesh = program.context.mesh;
    let devices = u128::from(mesh.tensor) * u128::from(mesh.data);
    let arenas: u128 = program.stages.iter().map(|stage| u128::from(stage.arena.0)).sum();
    let transfers: u128 = traffic(program).map(|traffic| u128::from(traffic.bytes())).sum();
    let all = devices * (arenas + transfers) + copied(model, gathered);
    Bytes(u64::try_from(all).unwrap_or(u64::MAX))
}
