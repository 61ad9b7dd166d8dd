//! The times of one instance of a segment.

use narrows_plan::emit::InstrTemplate;
use narrows_plan::{BucketSplit, Seconds};

use crate::price::KernelPrice;

/// The times of one instance of a segment under a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SegmentTime {
    /// Forward pass of one microbatch.
    pub forward: Seconds,
    /// Backward pass of one microbatch, recomputation included.
    pub backward: Seconds,
    /// The part of `backward` that a zero-bubble schedule runs in weight-gradient passes.
    pub weight_gradient: Seconds,
    /// Step phase: gradient reductions and updates, once a step. A lower bound: see `uncounted`.
    pub step_phase: Seconds,
    /// Time of the step phase that `step_phase` leaves out, because the time of collectives that ops share is no sum over ops.
    pub uncounted: Seconds,
    /// The part of `step_phase` that needs the norm of all gradients: the updates.
    pub update: Seconds,
    /// Gradient reductions that run during the last pass of a stage. `step_phase` has the least that they add to a
    /// step.
    pub overlapped: Seconds,
    /// Gathers of updated weights that run during the first pass of a stage in the next step. `step_phase` has the least
    /// that they add to a step.
    pub gathered: Seconds,
}

impl SegmentTime {
    pub(crate) fn add(&mut self, other: SegmentTime) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.weight_gradient += other.weight_gradient;
        self.step_phase += other.step_phase;
        self.uncounted += other.uncounted;
        self.update += other.update;
        self.overlapped += other.overlapped;
        self.gathered += other.gathered;
    }

    /// Forward and backward pass of one microbatch, without the weight gradients that may have passes of their own.
    pub(crate) fn without_weight_gradients(&self) -> Seconds {
        self.forward + self.backward - self.weight_gradient
    }

    /// The time in a step of `microbatches`.
    pub fn total(&self, microbatches: u64) -> Seconds {
        (self.forward + self.backward) * microbatches as f64 + self.step_phase
    }
}

/// Number of the parts of a step that are weighed.
const PARTS: usize = 9 + 2 * BucketSplit::SPLITS.len();

/// Weights of the parts of a step in a bound.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWeights {
    /// Computation and collectives of activations in forward passes.
    pub forward: f64,
    /// Computation and collectives of activations in backward passes.
    pub backward: f64,
    /// Weight gradients that may have passes of their own, beyond `backward`.
    pub weight_gradient: f64,
    /// The step phase.
    pub step_phase: f64,
    /// Updates, beyond `step_phase`.
    pub update: f64,
    /// Gathers during the first forward pass, beyond the least that they add to a step.
    pub gathered: f64,
    /// Gradient reductions during the last pass, beyond the least that they add to a step.
    pub overlapped: f64,
    /// Gathers of sharded weights for one pass, alone.
    pub sharded_gathers: f64,
    /// Reductions of sharded gradients of one microbatch, alone.
    pub sharded_reductions: f64,
    /// Gathers during the first forward pass of a block in each of [`BucketSplit::SPLITS`]: the first alone, and the least that the
    /// others add to a step.
    pub split_gathers: [f64; BucketSplit::SPLITS.len()],
    /// Gradient reductions of a block in each of [`BucketSplit::SPLITS`]: the last alone, and the least that the others add to a
    /// step.
    pub split_reductions: [f64; BucketSplit::SPLITS.len()],
}

impl StepWeights {
    /// These weights and `count` times the others.
    #[must_use]
    pub fn plus(mut self, other: StepWeights, count: f64) -> StepWeights {
        let parts = self.parts_mut().into_iter().zip(other.by_part());
        parts.for_each(|(own, other)| *own += count * other);
        self
    }

    fn by_part(mut self) -> [f64; PARTS] {
        self.parts_mut().map(|weight| *weight)
    }

    fn parts_mut(&mut self) -> [&mut f64; PARTS] {
        let StepWeights {
            forward,
            backward,
            weight_gradient,
            step_phase,
            update,
            gathered,
            overlapped,
            sharded_gathers,
            sharded_reductions,
            split_gathers: [gathers_at_attention, gathers_by_linear],
            split_reductions: [reductions_at_attention, reductions_by_linear],
        } = self;
        [
            forward,
            backward,
            weight_gradient,
            step_phase,
            update,
            gathered,
            overlapped,
            sharded_gathers,
            sharded_reductions,
            gathers_at_attention,
            gathers_by_linear,
            reductions_at_attention,
            reductions_by_linear,
        ]
    }
}

/// The times of decisions by part of a step, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartTimes([f64; PARTS]);

impl PartTimes {
    /// The times of decisions whose weighted time is `time`.
    pub fn of(time: impl Fn(&StepWeights) -> f64) -> PartTimes {
        PartTimes(std::array::from_fn(|part| {
            let mut weights = StepWeights::default();
            *weights.parts_mut()[part] = 1.0;
            time(&weights)
        }))
    }

    /// These times and `count` times the others.
    #[must_use]
    pub fn plus(self, other: PartTimes, count: f64) -> PartTimes {
        PartTimes(std::array::from_fn(|part| self.0[part] + count * other.0[part]))
    }

    /// Their weighted time.
    pub fn weighted(&self, weights: &StepWeights) -> f64 {
        self.0.iter().zip(weights.by_part()).map(|(time, weight)| time * weight).sum()
    }
}

/// Lower bounds on the passes of one microbatch, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassTimesMin {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass with all weight gradients.
    pub backward: f64,
    /// Forward and backward pass together, without the weight gradients that may have passes of their own.
    pub without_weight_gradients: f64,
}

impl PassTimesMin {
    /// The sums of two.
    pub fn plus(self, other: PassTimesMin) -> PassTimesMin {
        PassTimesMin {
            forward: self.forward + other.forward,
            backward: self.backward + other.backward,
            without_weight_gradients: self.without_weight_gradients
                + other.without_weight_gradients,
        }
    }
}

/// The time of instructions one after the other.
pub(crate) fn sum(templates: &[InstrTemplate], price: KernelPrice) -> Seconds {
    templates.iter().map(|template| price(&template.kernel())).sum()
}
