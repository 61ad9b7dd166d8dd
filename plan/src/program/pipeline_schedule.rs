//! Pipeline schedules: the order in which a stage runs the passes of its microbatches.
//!
//! Programs state the passes of every stage, and engines, the check and the simulation run what is stated. Microbatches in
//! flight (`planner/src/pipeline/in_flight.rs`) and bounds on the step time (`planner/src/pipeline/partition.rs`) assume
//! 1F1B.

use super::{MicrobatchPass, Phase};

/// The 1F1B schedule: stage s of S runs min(m, S − s − 1) forward passes, then one forward and one
/// backward pass in turn, then the remaining backward passes.
pub fn one_forward_one_backward(stage: u64, stages: u64, microbatches: u64) -> Vec<MicrobatchPass> {
    let forward = |microbatch| MicrobatchPass { phase: Phase::Forward, microbatch };
    let backward = |microbatch| MicrobatchPass { phase: Phase::Backward, microbatch };
    let warm_up = (stages - stage - 1).min(microbatches);
    let mut passes: Vec<MicrobatchPass> = (0..warm_up).map(forward).collect();
    for microbatch in warm_up..microbatches {
        passes.push(forward(microbatch));
        passes.push(backward(microbatch - warm_up));
    }
    passes.extend((microbatches - warm_up..microbatches).map(backward));
    passes
}

/// Microbatches in flight on stage s of a 1F1B schedule: min(m, S − s).
pub fn microbatches_in_flight(stage: u64, stages: u64, microbatches: u64) -> u64 {
    (stages - stage).min(microbatches)
}
