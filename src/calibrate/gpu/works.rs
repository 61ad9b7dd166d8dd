//! What is run to measure GPUs: the same divisions as on processors, of models as large as one trains there, on
//! one device and on all.
//!
//! On one GPU the shapes of shards cannot be had from a program for several. But a model whose width, heads and
//! inner width are a t-th of another's, with the same ranks, has on one device the products, attention and passes
//! that a t-th of the other has where its weights are sharded on them.

use narrows_cost_model::Profile;
use narrows_plan::model::{Model, Weight};
use narrows_planner::MemoryLimit;

use super::super::works::{
    ALONE, BLOCKS, Benchmark, BenchmarkExtent, DULL, ModelSplit, TELLING, alone, preset, together,
    work,
};
use crate::errors::CommandResult;

/// Blocks of the models that are compared with.
const BLOCKS_COMPARED: usize = 4;
/// Shards whose shapes are measured on one device.
const SHARDS: [u64; 2] = [2, 4];
/// Tokens of a sequence of a model that is measured besides.
const LENGTH: u64 = 4096;
/// And so many of them.
const BATCH: u64 = 4;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkSelection<'a> {
    /// How much.
    pub amount: BenchmarkExtent,
    /// A model besides.
    pub also: Option<&'a Model>,
    /// GPUs, one a process.
    pub devices: u64,
    /// Sequences of every step, instead of those of each model.
    pub global_batch: Option<u64>,
    /// Tokens of every sequence.
    pub sequence_length: Option<u64>,
    /// What plans are searched on.
    pub profile: &'a Profile,
}

/// Every way on one device and on all: on some of them, where they are many.
fn divisions(devices: u64, low_rank: bool) -> Vec<ModelSplit> {
    let mut all = alone();
    if devices > 1 {
        all.extend(together(devices, low_rank));
    }
    if devices > 2 && devices.is_multiple_of(2) {
        let half = devices / 2;
        all.extend([
            ModelSplit { what: "tensor, two replicas", tensor: half, data: 2, ..ALONE },
            ModelSplit { what: "pairs, data", tensor: 2, data: half, ..ALONE },
            ModelSplit { what: "tensor, two stages", tensor: half, pipeline: 2, turns: 2, ..ALONE },
        ]);
    }
    all
}

impl BenchmarkSelection<'_> {
    /// Plans of some blocks of a model. Every replica has the batch of one device.
    fn of(
        &self,
        model: &Model,
        blocks: usize,
        (batch, length): (u64, u64),
        divisions: &[ModelSplit],
    ) -> Vec<Benchmark> {
        let mut model = model.clone();
        model.blocks.truncate(blocks);
        let length = self.sequence_length.unwrap_or(length).min(model.max_sequence_length);
        let batch = self.global_batch.unwrap_or(batch);
        let limit = MemoryLimit::Auto;
        let of = |d: &ModelSplit| work(&model, (batch * d.data, length), d, self.profile, limit);
        divisions.iter().filter_map(of).collect()
    }

    /// What is run to measure.
    ///
    /// # Errors
    /// When a preset is not there.
    pub fn measured(&self) -> CommandResult<Vec<Benchmark>> {
        let mut works = vec![];
        let mut add = |model: &Model, sizes: (u64, u64), all: bool| {
            let mut ways = divisions(self.devices, model.is_low_rank());
            if !all {
                ways.retain(|division| !DULL.contains(&division.what));
            }
            works.extend(self.of(model, BLOCKS, sizes, &ways));
        };
        match self.amount {
            BenchmarkExtent::Quick => add(&preset("cola-tiny")?, (8, 128), false),
            BenchmarkExtent::Whole => {
                let (medium, large) = (preset("cola-1b")?, preset("cola-7b")?);
                add(&medium, (4, 4096), true);
                add(&medium, (4, 1024), false);
                add(&medium.dense_counterpart(), (2, 2048), false);
                add(&large, (2, 4096), false);
                add(&preset("cola-60m")?, (16, 256), false);
                for shard in SHARDS {
                    for model in [&medium, &large] {
                        narrower(model, shard).iter().for_each(|of| add(of, (4, 4096), false));
                    }
                }
            }
        }
        if let Some(model) = self.also {
            add(model, (BATCH, LENGTH), self.amount == BenchmarkExtent::Whole);
            for shard in SHARDS {
                narrower(model, shard).iter().for_each(|of| add(of, (BATCH, LENGTH), false));
            }
        }
        // A narrower model stands for a shard on one device, and of several it would be a shard's shard.
        works.retain(|of: &Benchmark| !of.name.contains('/') || of.request.devices == 1);
        Ok(works)
    }

    /// The plans to hold a profile against.
    ///
    /// # Errors
    /// When a preset is not there.
    pub fn compared(&self) -> CommandResult<Vec<Benchmark>> {
        let mut works = vec![];
        let mut add = |model: &Model, (batch, length): (u64, u64), familiar: bool| {
            let mut ways = divisions(self.devices, model.is_low_rank());
            ways.retain(|division| TELLING.contains(&division.what));
            let made = self.of(model, BLOCKS_COMPARED, (batch, length), &ways);
            works.extend(made.into_iter().map(|work| Benchmark { familiar, ..work }));
        };
        match self.amount {
            BenchmarkExtent::Quick => {
                let tiny = preset("cola-tiny")?;
                [(4, 128), (4, 96), (8, 64)].into_iter().for_each(|sizes| add(&tiny, sizes, true));
            }
            BenchmarkExtent::Whole => {
                let medium = preset("cola-1b")?;
                add(&medium, (2, 4096), true);
                add(&medium, (6, 1024), true);
                add(&medium.dense_counterpart(), (2, 1536), true);
                add(&preset("cola-3b")?, (2, 2048), false);
                add(&preset("cola-350m")?, (8, 1024), false);
            }
        }
        Ok(works)
    }
}

/// A model of a t-th of the widths; `None` where these do not divide, or leave less than a rank.
fn narrower(model: &Model, by: u64) -> Option<Model> {
    let mut narrow = model.clone();
    narrow.name = format!("{}/{by}", model.name);
    let divide = |width: &mut u64| match width.is_multiple_of(by) {
        true => {
            *width /= by;
            Some(())
        }
        false => None,
    };
    for width in [&mut narrow.hidden, &mut narrow.heads, &mut narrow.kv_heads] {
        divide(width)?;
    }
    for block in &mut narrow.blocks {
        let linears = [
            &mut block.q,
            &mut block.k,
            &mut block.v,
            &mut block.o,
            &mut block.gate,
            &mut block.up,
            &mut block.down,
        ];
        for linear in linears {
            divide(&mut linear.d_in)?;
            divide(&mut linear.d_out)?;
            let widest = linear.d_in.min(linear.d_out);
            if matches!(&linear.weight, Weight::Pair(pair) if pair.rank > widest) {
                return None;
            }
        }
    }
    Some(narrow)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use narrows_cost_model::profile;
    use narrows_plan::Kernel;
    use narrows_plan::strategy::Baseline;
    use narrows_planner::search;

    use super::*;
    use crate::calibrate::PlannedBenchmark;

    fn products(subject: &PlannedBenchmark) -> HashSet<[u64; 3]> {
        let instructions = subject.program.program().instructions();
        let of = |kernel| match kernel {
            Kernel::Gemm(gemm) => Some([gemm.m, gemm.n, gemm.k]),
            _ => None,
        };
        instructions.filter_map(|instr| of(instr.kernel())).collect()
    }

    /// What a shard of BTP multiplies in its blocks, a narrower model multiplies on one device.
    #[test]
    fn a_narrower_model_has_the_shapes_of_a_shard() {
        let profile = profile::preset("h200-sxm").unwrap();
        let model = preset("cola-1b").unwrap();
        let limit = MemoryLimit::None;
        let plan = |model: &Model, division: ModelSplit| {
            let mut model = model.clone();
            model.blocks.truncate(BLOCKS);
            PlannedBenchmark::plan(work(&model, (1, 512), &division, &profile, limit).unwrap())
                .unwrap()
        };
        let off = narrows_planner::GroupingRule::Off;
        let one = ModelSplit { grouping: off, ..ALONE };
        let narrow = products(&plan(&narrower(&model, 4).unwrap(), one));
        let rules = narrows_plan::strategy::Rules { baseline: Baseline::Btp, ..ALONE.rules };
        let shard = products(&plan(&model, ModelSplit { tensor: 4, rules, ..one }));
        let of_blocks = |sizes: &&[u64; 3]| {
            !sizes.contains(&model.vocab) && !sizes.contains(&(model.vocab / 4))
        };
        let missing: Vec<_> =
            shard.iter().filter(of_blocks).filter(|of| !narrow.contains(*of)).collect();
        assert!(shard.iter().filter(of_blocks).count() >= 4, "{shard:?}");
        assert!(missing.is_empty(), "{missing:?} of {shard:?} are not in {narrow:?}");
        assert!(narrower(&model, 3).is_none() && narrower(&model, 8).is_none());
    }

    /// On one GPU and on eight every work has a plan for so many devices, and all ways of a shard are there.
    #[test]
    fn works_are_for_the_gpus_that_there_are() {
        let profile = profile::preset("h200-sxm").unwrap();
        for devices in [1, 2, 8] {
            for amount in [BenchmarkExtent::Quick, BenchmarkExtent::Whole] {
                let asked = BenchmarkSelection {
                    amount,
                    also: None,
                    devices,
                    global_batch: None,
                    sequence_length: None,
                    profile: &profile,
                };
                let (measured, compared) = (asked.measured().unwrap(), asked.compared().unwrap());
                for of in measured.iter().chain(&compared) {
                    assert!([1, devices].contains(&of.request.devices), "{}", of.name);
                }
                let several = measured.iter().filter(|of| of.request.devices > 1).count();
                assert_eq!(several > 3, devices > 1, "{devices}, {amount:?}");
                let shards = measured.iter().filter(|of| of.name.contains('/')).count();
                assert_eq!(shards > 3, amount == BenchmarkExtent::Whole);
                let known: HashSet<&str> = measured.iter().map(|of| of.name.as_str()).collect();
                assert_eq!(known.len(), measured.len(), "each once");
                assert!(compared.iter().all(|of| !known.contains(of.name.as_str())), "unlike them");
            }
        }
        let asked = BenchmarkSelection {
            amount: BenchmarkExtent::Quick,
            also: None,
            devices: 2,
            global_batch: Some(2),
            sequence_length: Some(16),
            profile: &profile,
        };
        for of in asked.measured().unwrap() {
            assert_eq!(of.request.sequence_length, 16);
            assert!(search(&of.request).best.is_some(), "{}", of.name);
        }
    }
}
