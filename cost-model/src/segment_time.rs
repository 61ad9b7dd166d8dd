//! The times of one instance of a segment.

use narrows_plan::Seconds;
use narrows_plan::emit::InstrTemplate;

use crate::price::KernelPrice;

/// The times of one instance of a segment under a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SegmentTime {
    /// Forward pass of one microbatch.
    pub forward: Seconds,
    /// Backward pass of one microbatch, recomputation included.
    pub backward: Seconds,
    /// Step phase: gradient reductions and updates, once a step.
    pub step_phase: Seconds,
    /// The part of `step_phase` that needs the norm of all gradients: the updates.
    pub update: Seconds,
    /// Gradient reductions that run beside the last backward pass. `step_phase` has the least that they add to a step.
    pub overlapped: Seconds,
}

impl SegmentTime {
    pub(crate) fn add(&mut self, other: SegmentTime) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.step_phase += other.step_phase;
        self.update += other.update;
        self.overlapped += other.overlapped;
    }

    /// The time in a step of `microbatches`.
    pub fn total(&self, microbatches: u64) -> Seconds {
        (self.forward + self.backward) * microbatches as f64 + self.step_phase
    }
}

/// The time of instructions one after the other.
pub(crate) fn sum(templates: &[InstrTemplate], price: KernelPrice) -> Seconds {
    templates.iter().map(|template| price(&template.kernel())).sum()
}
