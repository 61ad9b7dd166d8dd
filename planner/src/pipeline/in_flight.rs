//! Microbatches in flight.

use narrows_plan::Context;
use narrows_plan::program::microbatches_in_flight;

/// Number of microbatches whose activations a stage stores at once.
pub(crate) fn in_flight(context: &Context, stage: usize) -> u64 {
    let microbatches = context.workload.microbatches(&context.mesh);
    microbatches_in_flight(stage as u64, context.mesh.pipeline, microbatches)
}
