//! Microbatches in flight.

use narrows_plan::Context;
use narrows_plan::program::StageSchedule;

/// Number of microbatches whose activations each chunk of a stage stores at once, at least.
pub(crate) fn in_flight_in_chunks(context: &Context, stage: usize) -> Vec<u64> {
    (0..context.chunks).map(|chunk| in_flight_in_chunk(context, stage, chunk)).collect()
}

/// Number of microbatches whose activations a chunk of a stage stores at once, at least.
pub(crate) fn in_flight_in_chunk(context: &Context, stage: usize, chunk: u64) -> u64 {
    let schedule = StageSchedule::of(context, stage as u64);
    schedule.microbatches_in_flight(chunk) * context.pass_microbatches()
}
