//! Plans for the measurement of GPUs: the variants of the CPU benchmarks on one device and on all devices, with models as
//! large as those trained on GPUs.
//!
//! One GPU cannot run a program for t devices. A model with 1/t of the width, heads and d_ff and the same ranks stands in
//! for a shard: on one device it launches the GEMMs, attention and fused ops of a block that is sharded t ways along these
//! axes.

use narrows_cost_model::Profile;
use narrows_plan::model::{Model, Weight};
use narrows_planner::MemoryLimit;

use super::super::benchmarks::{
    BLOCKS, Benchmark, BenchmarkExtent, ONE_DEVICE, PlanVariant, benchmark, multi_device_variants,
    one_device_variants, preset,
};
use crate::errors::CommandResult;

/// Blocks of the models in a comparison.
const BLOCKS_COMPARED: usize = 4;
/// Numbers of shards whose shapes are measured with narrower models on one device.
const SHARDS: [u64; 2] = [2, 4];
/// Tokens in a sequence of the extra model.
const LENGTH: u64 = 4096;
/// Sequences in a step of the extra model.
const BATCH: u64 = 4;
/// Batches and lengths that a quick calibration measures. Efficiency depends on the size of a kernel: with short sequences
/// of a small model, launches would be all that is measured.
const QUICK_SIZES: [(u64, u64); 2] = [(BATCH, LENGTH), (BATCH, LENGTH / 4)];
/// Batches and lengths that a quick calibration compares.
const QUICK_SIZES_COMPARED: [(u64, u64); 2] = [(2, LENGTH), (6, LENGTH / 4)];

/// Selection of the benchmarks for GPUs.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkSelection<'a> {
    /// Extent of the calibration.
    pub extent: BenchmarkExtent,
    /// A model that is measured too.
    pub extra_model: Option<&'a Model>,
    /// Number of GPUs, one per process.
    pub devices: u64,
    /// Sequences in every step; `None` for a default of each model.
    pub global_batch: Option<u64>,
    /// Tokens in every sequence; `None` for a default of each model.
    pub sequence_length: Option<u64>,
    /// The profile for the search of plans.
    pub profile: &'a Profile,
}

/// Variants on one device, on all devices, and on meshes with several axes.
fn variants(devices: u64, low_rank: bool) -> Vec<PlanVariant> {
    let mut variants = one_device_variants();
    if devices > 1 {
        variants.extend(multi_device_variants(devices, low_rank));
    }
    if devices > 2 && devices.is_multiple_of(2) {
        let half = PlanVariant { tensor: devices / 2, ..ONE_DEVICE };
        variants.extend([
            PlanVariant { label: "tensor, two replicas", data: 2, ..half },
            PlanVariant { label: "pairs, data", tensor: 2, data: devices / 2, ..ONE_DEVICE },
            PlanVariant { label: "tensor, two stages", pipeline: 2, microbatches: 2, ..half },
        ]);
    }
    variants
}

impl BenchmarkSelection<'_> {
    /// Benchmarks of the first blocks of a model. Every replica has the batch of one device.
    fn of_model(
        &self,
        model: &Model,
        blocks: usize,
        (batch, length): (u64, u64),
        variants: &[PlanVariant],
    ) -> Vec<Benchmark> {
        let mut model = model.clone();
        model.blocks.truncate(blocks);
        let length = self.sequence_length.unwrap_or(length).min(model.max_sequence_length);
        let batch = self.global_batch.unwrap_or(batch);
        let of_variant = |variant: &PlanVariant| {
            let sizes = (batch * variant.data, length);
            benchmark(&model, sizes, variant, self.profile, MemoryLimit::Auto)
        };
        variants.iter().filter_map(of_variant).collect()
    }

    /// Benchmarks of the variants of a model's first blocks.
    fn variants_of(
        &self,
        model: &Model,
        sizes: (u64, u64),
        skip_redundant: bool,
    ) -> Vec<Benchmark> {
        let mut variants = variants(self.devices, model.is_low_rank());
        variants.retain(|variant| !skip_redundant || !variant.is_redundant);
        self.of_model(model, BLOCKS, sizes, &variants)
    }

    /// Benchmarks of narrower models on one device, which stand in for shards of `models`.
    fn shards_of(&self, models: &[&Model], sizes: (u64, u64)) -> Vec<Benchmark> {
        let mut variants = one_device_variants();
        variants.retain(|variant| !variant.is_redundant);
        let narrowed = SHARDS
            .into_iter()
            .flat_map(|shards| models.iter().filter_map(move |model| narrower(model, shards)));
        narrowed.flat_map(|model| self.of_model(&model, BLOCKS, sizes, &variants)).collect()
    }

    /// The benchmarks to measure.
    ///
    /// # Errors
    /// A missing preset.
    pub fn measured(&self) -> CommandResult<Vec<Benchmark>> {
        let mut benchmarks = match self.extent {
            BenchmarkExtent::Quick => {
                let model = self.quick_model()?;
                QUICK_SIZES
                    .iter()
                    .flat_map(|sizes| self.variants_of(&model, *sizes, true))
                    .collect()
            }
            BenchmarkExtent::Full => {
                let (medium, large) = (preset("cola-1b")?, preset("cola-7b")?);
                [
                    self.variants_of(&medium, (4, 4096), false),
                    self.variants_of(&medium, (4, 1024), true),
                    self.variants_of(&medium.dense_counterpart(), (2, 2048), true),
                    self.variants_of(&large, (2, 4096), true),
                    self.variants_of(&preset("cola-60m")?, (16, 256), true),
                    self.shards_of(&[&medium, &large], (4, 4096)),
                ]
                .concat()
            }
        };
        if let (Some(model), BenchmarkExtent::Full) = (self.extra_model, self.extent) {
            benchmarks.extend(self.variants_of(model, (BATCH, LENGTH), false));
            benchmarks.extend(self.shards_of(&[model], (BATCH, LENGTH)));
        }
        Ok(without_repetitions(benchmarks))
    }

    /// The benchmarks to compare a profile with.
    ///
    /// # Errors
    /// A missing preset.
    pub fn compared(&self) -> CommandResult<Vec<Benchmark>> {
        let of_model = |model: &Model, sizes: (u64, u64), widths_measured: bool| {
            let mut variants = variants(self.devices, model.is_low_rank());
            variants.retain(|variant| variant.is_compared);
            let benchmarks = self.of_model(model, BLOCKS_COMPARED, sizes, &variants);
            benchmarks.into_iter().map(move |benchmark| Benchmark { widths_measured, ..benchmark })
        };
        let benchmarks = match self.extent {
            BenchmarkExtent::Quick => {
                let model = self.quick_model()?;
                let sizes = QUICK_SIZES_COMPARED.iter();
                sizes.flat_map(|sizes| of_model(&model, *sizes, true)).collect()
            }
            BenchmarkExtent::Full => {
                let medium = preset("cola-1b")?;
                of_model(&medium, (2, 4096), true)
                    .chain(of_model(&medium, (6, 1024), true))
                    .chain(of_model(&medium.dense_counterpart(), (2, 1536), true))
                    .chain(of_model(&preset("cola-3b")?, (2, 2048), false))
                    .chain(of_model(&preset("cola-350m")?, (8, 1024), false))
                    .collect()
            }
        };
        Ok(without_repetitions(benchmarks))
    }

    /// The model of a quick calibration.
    fn quick_model(&self) -> CommandResult<Model> {
        self.extra_model.map_or_else(|| preset("cola-1b"), |model| Ok(model.clone()))
    }
}

/// Benchmarks without those that repeat another: with a batch and a length of the user, sizes are equal.
fn without_repetitions(benchmarks: Vec<Benchmark>) -> Vec<Benchmark> {
    let mut kept: Vec<Benchmark> = vec![];
    for benchmark in benchmarks {
        // Another model may have the name of a preset.
        let repeats = |other: &Benchmark| {
            other.name == benchmark.name && other.request.model == benchmark.request.model
        };
        if !kept.iter().any(repeats) {
            kept.push(benchmark);
        }
    }
    kept
}

/// A model with 1/`divisor` of the widths; `None` if they are not divisible, or become less than a rank.
fn narrower(model: &Model, divisor: u64) -> Option<Model> {
    let mut narrow = model.clone();
    narrow.name = format!("{}/{divisor}", model.name);
    let divide = |width: &mut u64| width.is_multiple_of(divisor).then(|| *width /= divisor);
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
            let rank_max = linear.d_in.min(linear.d_out);
            if matches!(&linear.weight, Weight::Pair(pair) if pair.rank > rank_max) {
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
    use narrows_plan::strategy::{Baseline, Rules};
    use narrows_planner::{GroupingRule, search};

    use super::*;
    use crate::calibrate::PlannedBenchmark;

    fn gemm_shapes(planned: &PlannedBenchmark) -> HashSet<[u64; 3]> {
        let instructions = planned.program.program().instructions();
        let shape = |kernel| match kernel {
            Kernel::Gemm(gemm) => Some([gemm.m, gemm.n, gemm.k]),
            _ => None,
        };
        instructions.filter_map(|instr| shape(instr.kernel())).collect()
    }

    /// A narrower model on one device has the GEMM shapes of a BTP shard's blocks.
    #[test]
    fn a_narrower_model_has_the_shapes_of_a_shard() {
        let profile = profile::preset("h200-sxm").unwrap();
        let model = preset("cola-1b").unwrap();
        let plan = |model: &Model, variant: PlanVariant| {
            let mut model = model.clone();
            model.blocks.truncate(BLOCKS);
            let benchmark = benchmark(&model, (1, 512), &variant, &profile, MemoryLimit::None);
            PlannedBenchmark::plan(benchmark.unwrap()).unwrap()
        };
        let ungrouped = PlanVariant { grouping: GroupingRule::Off, ..ONE_DEVICE };
        let narrow = gemm_shapes(&plan(&narrower(&model, 4).unwrap(), ungrouped));
        let rules = Rules { baseline: Baseline::Btp, ..ONE_DEVICE.rules };
        let shard = gemm_shapes(&plan(&model, PlanVariant { tensor: 4, rules, ..ungrouped }));
        let is_of_block = |sizes: &&[u64; 3]| {
            !sizes.contains(&model.vocab) && !sizes.contains(&(model.vocab / 4))
        };
        let missing: Vec<_> =
            shard.iter().filter(is_of_block).filter(|shape| !narrow.contains(*shape)).collect();
        assert!(shard.iter().filter(is_of_block).count() >= 4, "{shard:?}");
        assert!(missing.is_empty(), "{missing:?} of {shard:?} are not in {narrow:?}");
        assert!(narrower(&model, 3).is_none() && narrower(&model, 8).is_none());
    }

    #[test]
    fn benchmarks_are_for_one_device_or_all() {
        let profile = profile::preset("h200-sxm").unwrap();
        for devices in [1, 2, 8] {
            for extent in [BenchmarkExtent::Quick, BenchmarkExtent::Full] {
                let selection = BenchmarkSelection {
                    extent,
                    extra_model: None,
                    devices,
                    global_batch: None,
                    sequence_length: None,
                    profile: &profile,
                };
                let measured = selection.measured().unwrap();
                let compared = selection.compared().unwrap();
                for benchmark in measured.iter().chain(&compared) {
                    let Benchmark { name, request, .. } = benchmark;
                    assert!([1, devices].contains(&request.devices), "{name}");
                }
                let multi_device = measured.iter().filter(|b| b.request.devices > 1).count();
                assert_eq!(multi_device > 3, devices > 1, "{devices}, {extent:?}");
                let shards = measured.iter().filter(|b| b.name.contains('/')).count();
                assert_eq!(shards > 3, extent == BenchmarkExtent::Full);
                let names: HashSet<&str> = measured.iter().map(|b| b.name.as_str()).collect();
                assert_eq!(names.len(), measured.len(), "names are unique");
                assert!(compared.iter().all(|b| !names.contains(b.name.as_str())));
            }
        }
        let selection = BenchmarkSelection {
            extent: BenchmarkExtent::Quick,
            extra_model: None,
            devices: 2,
            global_batch: Some(2),
            sequence_length: Some(16),
            profile: &profile,
        };
        for benchmark in selection.measured().unwrap() {
            assert_eq!(benchmark.request.sequence_length, 16);
            assert!(search(&benchmark.request).best.is_some(), "{}", benchmark.name);
        }
    }
}
