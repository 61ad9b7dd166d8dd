//! Microbatches in flight.

use narrows_plan::Context;

/// Number of microbatches whose activations a stage stores at once, at least; with several chunks the average over these,
/// rounded down.
pub(crate) fn in_flight(context: &Context, stage: usize) -> u64 {
    let of_chunk = |chunk| in_flight_in_chunk(context, stage, chunk);
    (0..context.chunks).map(of_chunk).sum::<u64>() / context.chunks
}

/// Number of microbatches whose activations a chunk of a stage stores at once, at least.
pub(crate) fn in_flight_in_chunk(context: &Context, stage: usize, chunk: u64) -> u64 {
    context.stage_schedule(stage as u64).microbatches_in_flight(chunk)
}
