//! Microbatches in flight.

use narrows_cost_model::InFlight;
use narrows_plan::Context;
use narrows_plan::program::StageSchedule;

/// Microbatches whose activations each chunk of a stage stores at once, at least.
pub(crate) fn in_flight_in_chunks(context: &Context, stage: usize) -> Vec<InFlight> {
    (0..context.chunks).map(|chunk| in_flight_in_chunk(context, stage, chunk)).collect()
}

/// Microbatches whose activations a chunk of a stage stores at once, at least.
pub(crate) fn in_flight_in_chunk(context: &Context, stage: usize, chunk: u64) -> InFlight {
    let schedule = StageSchedule::of(context, stage as u64);
    let in_pass = context.pass_microbatches();
    InFlight {
        kept: schedule.microbatches_in_flight(chunk) * in_pass,
        deferred: schedule.microbatches_deferred() * in_pass,
        written: schedule.weight_gradients_waiting() * in_pass,
    }
}
