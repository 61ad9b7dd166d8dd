//! Microbatches in flight.

use narrows_plan::Context;

/// Number of microbatches whose activations a stage stores at once, at least.
pub(crate) fn in_flight(context: &Context, stage: usize) -> u64 {
    context.stage_schedule(stage as u64).microbatches_in_flight(0)
}
