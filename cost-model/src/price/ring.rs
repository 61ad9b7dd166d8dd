//! The price of ring attention.
//!
//! ```text
//! time = Σ over steps (attention + merging + what the shift adds)
//! ```
//! A shift overlaps with the computation of its step, with the slowdown of both. On hardware without overlap it adds its
//! whole time. Attention is that of causal sequences as long as the positions of a device, which have as many scores as a
//! step ([`narrows_plan::ring`]), each with the fixed costs of a kernel. The shift is a transfer to the neighbour over the
//! slowest link of the ring.

use std::collections::HashMap;

use narrows_plan::ring::RingSteps;
use narrows_plan::{Kernel, Seconds};

use super::{PriceSource, Prices};
use crate::overlap::OverlapSlowdown;

/// The steps of a kernel that is ring attention.
pub(super) fn ring_steps(kernel: &Kernel) -> Option<Vec<RingSteps>> {
    match kernel {
        Kernel::Attention(attention) => attention.ring_steps(),
        _ => None,
    }
}

/// The part of the time of ring attention that is computation; `None` for other kernels.
pub(crate) fn ring_computation(
    kernel: &Kernel,
    price: impl Fn(&Kernel) -> Seconds,
) -> Option<Seconds> {
    let of_steps = |steps: RingSteps| {
        steps.computation.iter().map(&price).sum::<Seconds>() * steps.count as f64
    };
    Some(ring_steps(kernel)?.into_iter().map(of_steps).sum())
}

impl Prices {
    /// The time of the steps of a ring with these prices of kernels.
    pub(super) fn ring_time(
        &self,
        steps: &[RingSteps],
        price: impl Fn(&Kernel) -> Seconds,
    ) -> Seconds {
        let of_steps = |RingSteps { count, computation, shift }: &RingSteps| {
            let computation: Seconds = computation.iter().map(&price).sum();
            let shift =
                shift.clone().map_or(Seconds(0.0), |shift| price(&Kernel::Collective(shift)));
            (computation + added(self.overlap_slowdown(), shift, computation)) * *count as f64
        };
        steps.iter().map(of_steps).sum()
    }

    /// Launches of the kernels and shifts of a ring.
    pub(super) fn ring_launches(&self, steps: &[RingSteps]) -> u32 {
        let of_steps = |steps: &RingSteps| {
            let computation: u32 =
                steps.computation.iter().map(|kernel| self.launches(kernel)).sum();
            let shift = u32::from(steps.shift.is_some());
            (computation + shift).saturating_mul(u32::try_from(steps.count).unwrap_or(u32::MAX))
        };
        steps.iter().map(of_steps).fold(0, u32::saturating_add)
    }

    /// As [`resampled_kernel_times_s`](Prices::resampled_kernel_times_s), for the steps of a ring.
    pub(super) fn resampled_ring_times_s(
        &self,
        steps: &[RingSteps],
        draws: usize,
    ) -> Option<Vec<f64>> {
        let kernels = steps.iter().flat_map(|steps| {
            let shift = steps.shift.clone().map(Kernel::Collective);
            steps.computation.iter().cloned().chain(shift)
        });
        let resampled = |kernel: Kernel| {
            let times = self.resampled_kernel_times_s(&kernel, draws)?;
            Some((kernel, times))
        };
        let times: HashMap<Kernel, Vec<f64>> = kernels.map(resampled).collect::<Option<_>>()?;
        let of_draw = |draw: usize| self.ring_time(steps, |kernel| Seconds(times[kernel][draw])).0;
        Some((0..draws).map(of_draw).collect())
    }

    /// The source of most of the time of ring attention: attention, or the links of its shifts.
    pub(super) fn ring_source(&self, steps: &[RingSteps]) -> PriceSource {
        let total = |kernels: &dyn Fn(&RingSteps) -> Seconds| -> f64 {
            steps.iter().map(|steps| kernels(steps).0 * steps.count as f64).sum()
        };
        let computation = total(&|steps| {
            steps.computation.iter().map(|kernel| self.kernel_time(kernel)).sum::<Seconds>()
        });
        let shifts = steps.iter().filter_map(|steps| steps.shift.clone()).map(Kernel::Collective);
        let links = shifts.map(|shift| self.source(&shift)).next();
        let shifted = total(&|steps| {
            let shift = steps.shift.clone().map(Kernel::Collective);
            shift.map_or(Seconds(0.0), |shift| self.kernel_time(&shift))
        });
        links.filter(|_| shifted > computation).unwrap_or(PriceSource::Attention)
    }
}

/// What a collective adds to the time of computation beside it.
fn added(slowdown: Option<OverlapSlowdown>, collective: Seconds, computation: Seconds) -> Seconds {
    match slowdown {
        Some(slowdown) if computation.0 > 0.0 => slowdown.exposed(collective, computation),
        _ => collective,
    }
}
