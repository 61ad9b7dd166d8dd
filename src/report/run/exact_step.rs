//! Predicted cost of the exact steps of LORO, which run on the processors of the host between two steps.
//!
//! With F floating-point operations, p threads that compute, and n elements in all factors:
//!
//! ```text
//! time = F / (p · 10e9/s) + 16·n bytes / (10 GB/s)
//! ```
//!
//! Weights and both moments leave the devices, and weights return, in fp32. At most as many threads compute as a block has
//! pairs, in each stage of its own process. Both rates are assumed: a core of an AMD EPYC reached 17e9/s in the decompositions and
//! products of a pair with 512 features and rank 128, and 11e9/s with 2048 features and rank 512, in a release build.

use narrows_plan::model::{Block, Model};
use narrows_plan::{Bytes, Seconds};
use narrows_runtime::{Loro, PairShape};
use serde::Serialize;

use crate::text;

/// Assumed floating-point operations of a thread in a second, in f64.
const FLOPS_PER_S: f64 = 1e10;

/// Assumed bytes between devices and host in a second.
const BYTES_PER_S: f64 = 1e10;

/// The host that computes exact steps.
#[derive(Clone, Copy, Debug)]
pub struct ExactStepHost {
    /// Threads of all machines.
    pub threads: u64,
    /// Blocks that are computed at once: one for each stage with processes of its own.
    pub blocks_at_once: u64,
}

/// Predicted cost of exact steps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExactStepCost {
    /// Steps from one exact step to the next.
    pub every: u64,
    /// Floating-point operations on the host.
    pub host_flops: f64,
    /// Bytes between devices and host.
    pub bytes: u64,
    /// Time that an exact step adds.
    pub time_s: f64,
    /// Time that exact steps add to a step on average.
    pub per_step_s: f64,
    /// Provenance of the rates.
    pub rates: &'static str,
}

impl ExactStepCost {
    /// The cost of the exact steps of a model.
    pub fn new(model: &Model, loro: Loro, host: ExactStepHost) -> ExactStepCost {
        let pairs = |block: &Block| -> Vec<PairShape> {
            block.linears().into_iter().filter_map(|(_, linear)| PairShape::of(linear)).collect()
        };
        let blocks: Vec<Vec<PairShape>> = model.blocks.iter().map(pairs).collect();
        let pairs_of_block = blocks.iter().map(Vec::len).max().unwrap_or(0) as u64;
        let threads = host.threads.min(pairs_of_block * host.blocks_at_once).max(1);
        let pairs = || blocks.iter().flatten();
        let host_flops: f64 = pairs().map(PairShape::exact_step_flops).sum();
        let bytes = 16 * pairs().map(|pair| pair.elements() as u64).sum::<u64>();
        let time_s = host_flops / (threads as f64 * FLOPS_PER_S) + bytes as f64 / BYTES_PER_S;
        let every = loro.exact_every.get();
        let per_step_s = time_s / every as f64;
        ExactStepCost { every, host_flops, bytes, time_s, per_step_s, rates: "assumed" }
    }

    /// The cost as text.
    pub fn text(&self) -> String {
        let ExactStepCost { every, host_flops, bytes, time_s, per_step_s, rates } = self;
        format!(
            "an exact step {} takes {} more ({host_flops:.1e} operations on the host, {} moved, at {rates} rates), \
             {} per step on average",
            text::every(*every, "step"),
            Seconds(*time_s),
            Bytes(*bytes),
            Seconds(*per_step_s),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use narrows_plan::model::presets;
    use narrows_runtime::FactorRateScale;

    use super::*;

    #[test]
    fn the_cost_falls_with_threads_until_every_pair_of_a_block_has_one() {
        let loro = Loro {
            exact_every: NonZeroU64::new(500).unwrap(),
            refresh_every: 500,
            rate_scale: FactorRateScale::RankOverHidden,
        };
        let model = presets::find("svd-60m").unwrap();
        let cost = |threads, blocks_at_once| {
            ExactStepCost::new(&model, loro, ExactStepHost { threads, blocks_at_once })
        };
        let one = cost(1, 1);
        // Eight blocks with four pairs of 512 to 512, and three of 512 and 1376.
        let side = f64::from(4 * 1024 + 3 * (512 + 1376));
        let rank = 128.0_f64;
        let flops = 8.0 * (17.0 * side * rank.powi(2) + 7.0 * 88.0 * rank.powi(3));
        assert!((one.host_flops / flops - 1.0).abs() < 1e-12, "{one:?}");
        assert_eq!(one.bytes, 16 * 8 * side as u64 * 128);
        assert_eq!(one.per_step_s, one.time_s / 500.0);
        assert!(cost(7, 1).time_s < one.time_s && cost(8, 1) == cost(7, 1));
        assert!(cost(14, 2).time_s < cost(14, 1).time_s);
    }
}
