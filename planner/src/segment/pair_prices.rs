//! Prices of kernels in passes of two microbatches.
//!
//! Of a pass, or any part of it, let C be the time of all computation and X that of all collectives of activations, each alone. While
//! a collective and computation overlap for o seconds, o/c seconds of computation and o/x of the collective are done, with c and x
//! the factors by which they slow each other. The pass takes at least C + X − o/c − o/x + o, with o ≤ x·X and o ≤ c·C, so that
//!
//! ```text
//! pass ≥ C + h·X     with h = min(1, x·(1 − 1/c))       all collectives are hidden
//! pass ≥ X + h'·C    with h' = min(1, c·(1 − 1/x))      all computation is
//! ```
//! Each mean of the two with weights 1 − θ and θ is a bound, and a sum of times of kernels. Forward and backward passes may have
//! different weights: collectives limit the first and computation limits the second where forward passes have equally many
//! collectives with half of the computation.

use narrows_cost_model::{OverlapSlowdown, Prices};
use narrows_plan::Seconds;
use narrows_plan::kernel::{Collective, CollectiveKind, Kernel};

/// Times that kernels count with in passes of two microbatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PairPrices {
    /// The least that computation and collectives can take: no pass takes less than the sum of its kernels.
    Bound(PairWeights),
    /// Computation with its time, and collectives with shares of their time more than in the bound without weights.
    Exposed(ExposedShares),
    /// The kernels of one class in one kind of work with their time, and all others with none.
    Only(KernelClass, PassWork),
}

/// Work of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassWork {
    /// Forward passes.
    Forward,
    /// Backward passes, but for recomputation and for zeroing sums of gradients.
    Backward,
    /// Recomputation of values in backward passes, and zeroing sums of gradients: its place depends on all choices.
    Recompute,
}

/// Kernels of one of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelClass {
    /// All but collectives of activations.
    Computation,
    /// Collectives of activations.
    Collectives,
}

/// Weights θ of the bound by collectives; that by computation has the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PairWeights {
    /// Weight in forward passes.
    pub forward: f64,
    /// Weight in backward passes.
    pub backward: f64,
}

/// Shares of the time of collectives in pairs of microbatches that count as exposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExposedShares {
    /// Share of an all-reduce.
    pub all_reduce: f64,
    /// Share of a reduce-scatter, an all-gather, or an all-to-all. Where these divide an all-reduce into two, there is little
    /// computation between them, so that more of them is exposed.
    pub others: f64,
}

impl Default for PairPrices {
    fn default() -> PairPrices {
        PairPrices::Bound(PairWeights::default())
    }
}

impl PairPrices {
    /// The time that a kernel counts with in a forward or backward pass.
    pub(crate) fn kernel_time(
        self,
        kernel: &Kernel,
        work: PassWork,
        slowdown: OverlapSlowdown,
        prices: &Prices,
    ) -> Seconds {
        let hidden_cost = slowdown.hidden_cost();
        let exposed = |share: f64| hidden_cost + share * (1.0 - hidden_cost);
        let class = KernelClass::of(kernel);
        let factor = match (self, class) {
            (PairPrices::Bound(weights), KernelClass::Collectives) => exposed(weights.of(work)),
            (PairPrices::Bound(_), KernelClass::Computation)
                if matches!(kernel, Kernel::Collective(_)) =>
            {
                1.0
            }
            (PairPrices::Bound(weights), KernelClass::Computation) => {
                1.0 - weights.of(work) * (1.0 - slowdown.hidden_computation_cost())
            }
            (PairPrices::Exposed(shares), KernelClass::Collectives) => match kernel {
                Kernel::Collective(Collective { kind: CollectiveKind::AllReduce, .. }) => {
                    exposed(shares.all_reduce)
                }
                _ => exposed(shares.others),
            },
            (PairPrices::Exposed(_), KernelClass::Computation) => 1.0,
            (PairPrices::Only(of_class, of_work), class) => {
                if (of_class, of_work) == (class, work) { 1.0 } else { 0.0 }
            }
        };
        prices.kernel_time(kernel) * factor
    }
}

impl KernelClass {
    fn of(kernel: &Kernel) -> KernelClass {
        match kernel {
            Kernel::Collective(collective) if collective.group.axis.shards_activations() => {
                KernelClass::Collectives
            }
            _ => KernelClass::Computation,
        }
    }
}

impl PairWeights {
    fn of(self, work: PassWork) -> f64 {
        if work == PassWork::Forward { self.forward } else { self.backward }
    }
}

impl ExposedShares {
    /// The shares that searches try, in this order.
    pub(crate) const TRIED: [ExposedShares; 4] = [
        ExposedShares { all_reduce: 0.5, others: 0.5 },
        ExposedShares { all_reduce: 0.25, others: 0.25 },
        ExposedShares { all_reduce: 0.1, others: 0.1 },
        ExposedShares { all_reduce: 0.0, others: 0.5 },
    ];
}
