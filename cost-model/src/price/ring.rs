//! The price of ring attention.
//!
//! ```text
//! time = Σ over steps (attention + merging + copies and additions without a shift + what the shift adds)
//! ```
//! A shift overlaps with the kernels beside it, with the slowdown of both, and adds its whole time at most: also on
//! hardware without overlap. Attention is that of causal sequences as long as the positions of a device, which have as many scores as a
//! step ([`narrows_plan::ring`]), each with the fixed costs of a kernel. The shift is a transfer to the neighbour over the
//! slowest link of the ring.

use std::collections::HashMap;

use narrows_plan::ring::RingSteps;
use narrows_plan::{Kernel, Seconds};

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
    let of_steps = |steps: &RingSteps| computation(steps, &price) * steps.count as f64;
    Some(ring_steps(kernel)?.iter().map(of_steps).sum())
}

/// The time of the steps of a ring with these prices of kernels.
pub(super) fn ring_time(
    steps: &[RingSteps],
    slowdown: Option<OverlapSlowdown>,
    price: impl Fn(&Kernel) -> Seconds,
) -> Seconds {
    let of_steps = |steps: &RingSteps| {
        let beside_shift = total(&steps.beside_shift, &price);
        let shift = shift(steps).map_or(Seconds(0.0), |shift| price(&shift));
        let added = match slowdown {
            Some(slowdown) if beside_shift.0 > 0.0 => {
                Seconds(slowdown.exposed(shift, beside_shift).0.min(shift.0))
            }
            _ => shift,
        };
        (computation(steps, &price) + added) * steps.count as f64
    };
    steps.iter().map(of_steps).sum()
}

/// The time of the steps of a ring in each of several draws of the times of its kernels. `None` where a kernel has none.
pub(super) fn resampled_ring_times_s(
    steps: &[RingSteps],
    slowdown: Option<OverlapSlowdown>,
    (draws, resampled): (usize, impl Fn(&Kernel) -> Option<Vec<f64>>),
) -> Option<Vec<f64>> {
    let all = steps
        .iter()
        .flat_map(|steps| kernels(steps).map(|(_, kernel)| kernel.clone()).chain(shift(steps)));
    let times = all.map(|kernel| {
        let times = resampled(&kernel)?;
        Some((kernel, times))
    });
    let times: HashMap<Kernel, Vec<f64>> = times.collect::<Option<_>>()?;
    let price = |kernel: &Kernel, draw: usize| Seconds(times[kernel][draw]);
    Some(
        (0..draws).map(|draw| ring_time(steps, slowdown, |kernel| price(kernel, draw)).0).collect(),
    )
}

/// Launches of the kernels and shifts of a ring.
pub(super) fn ring_launches(steps: &[RingSteps], launches: impl Fn(&Kernel) -> u32) -> u32 {
    let of_steps = |steps: &RingSteps| {
        let of_kernels = kernels(steps)
            .map(|(count, kernel)| launches(kernel).saturating_mul(saturated(*count)));
        let of_step = of_kernels.fold(u32::from(steps.shift.is_some()), u32::saturating_add);
        of_step.saturating_mul(saturated(steps.count))
    };
    steps.iter().map(of_steps).fold(0, u32::saturating_add)
}

/// The shift of a ring whose shifts take longer than its computation.
pub(super) fn longer_shift(
    steps: &[RingSteps],
    price: impl Fn(&Kernel) -> Seconds,
) -> Option<Kernel> {
    let total = |time_s: &dyn Fn(&RingSteps) -> f64| -> f64 {
        steps.iter().map(|steps| time_s(steps) * steps.count as f64).sum()
    };
    let computed_s = total(&|steps| computation(steps, &price).0);
    let shifted_s = total(&|steps| shift(steps).map_or(0.0, |shift| price(&shift).0));
    steps.iter().find_map(shift).filter(|_| shifted_s > computed_s)
}

fn computation(steps: &RingSteps, price: impl Fn(&Kernel) -> Seconds) -> Seconds {
    total(kernels(steps), price)
}

/// The time of kernels, each with its number.
fn total<'a>(
    kernels: impl IntoIterator<Item = &'a (u64, Kernel)>,
    price: impl Fn(&Kernel) -> Seconds,
) -> Seconds {
    kernels.into_iter().map(|(count, kernel)| price(kernel) * *count as f64).sum()
}

fn kernels(steps: &RingSteps) -> impl Iterator<Item = &(u64, Kernel)> {
    steps.beside_shift.iter().chain(&steps.without_shift)
}

fn saturated(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn shift(steps: &RingSteps) -> Option<Kernel> {
    steps.shift.clone().map(Kernel::Collective)
}
