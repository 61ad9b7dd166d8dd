//! Plans that measure GPUs: the variants of the benchmarks of processors, of models as large as those trained on GPUs,
//! on one device and on all.
//!
//! One GPU cannot run the kernels of a shard in a program for several. But a model whose width, heads and inner width
//! are a t-th of another's, with the same ranks, launches on one device the GEMMs, attention and fused ops that a t-th
//! of the other launches where its weights are sharded along them.

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
/// Numbers of shards whose shapes are measured on one device.
const SHARDS: [u64; 2] = [2, 4];
/// Tokens in a sequence of the extra model.
const LENGTH: u64 = 4096;
/// Sequences in a step of the extra model.
const BATCH: u64 = 4;

/// Which benchmarks measure GPUs.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkSelection<'a> {
    /// How much is measured.
    pub extent: BenchmarkExtent,
    /// A model that is measured besides.
    pub extra_model: Option<&'a Model>,
    /// GPUs, one per process.
    pub devices: u64,
    /// Sequences in every step, instead of those of each model.
    pub global_batch: Option<u64>,
    /// Tokens in every sequence, instead of those of each model.
    pub sequence_length: Option<u64>,
    /// The profile that plans are searched with.
    pub profile: &'a Profile,
}

/// The variants on one device, on all, and on parts of many.
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
    /// Plans of the first blocks of a model. Every replica has the batch of one device.
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

    /// The variants of a model's first blocks; without redundant ones if `short`.
    fn variants_of(&self, model: &Model, sizes: (u64, u64), short: bool) -> Vec<Benchmark> {
        let mut variants = variants(self.devices, model.is_low_rank());
        variants.retain(|variant| !short || !variant.is_redundant);
        self.of_model(model, BLOCKS, sizes, &variants)
    }

    /// Narrower models on one device, which stand for shards of these.
    fn shards_of(&self, models: &[&Model], sizes: (u64, u64)) -> Vec<Benchmark> {
        let mut variants = one_device_variants();
        variants.retain(|variant| !variant.is_redundant);
        let narrowed = SHARDS
            .into_iter()
            .flat_map(|shards| models.iter().filter_map(move |model| narrower(model, shards)));
        narrowed.flat_map(|model| self.of_model(&model, BLOCKS, sizes, &variants)).collect()
    }

    /// The benchmarks that measure.
    ///
    /// # Errors
    /// A missing preset.
    pub fn measured(&self) -> CommandResult<Vec<Benchmark>> {
        let mut benchmarks = match self.extent {
            BenchmarkExtent::Quick => self.variants_of(&preset("cola-tiny")?, (8, 128), true),
            BenchmarkExtent::Whole => {
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
        if let Some(model) = self.extra_model {
            let short = self.extent == BenchmarkExtent::Quick;
            benchmarks.extend(self.variants_of(model, (BATCH, LENGTH), short));
            benchmarks.extend(self.shards_of(&[model], (BATCH, LENGTH)));
        }
        Ok(benchmarks)
    }

    /// The benchmarks that a profile is compared with.
    ///
    /// # Errors
    /// A missing preset.
    pub fn compared(&self) -> CommandResult<Vec<Benchmark>> {
        let of_model = |model: &Model, sizes: (u64, u64), familiar: bool| {
            let mut variants = variants(self.devices, model.is_low_rank());
            variants.retain(|variant| variant.is_compared);
            let benchmarks = self.of_model(model, BLOCKS_COMPARED, sizes, &variants);
            benchmarks.into_iter().map(move |benchmark| Benchmark { familiar, ..benchmark })
        };
        Ok(match self.extent {
            BenchmarkExtent::Quick => {
                let tiny = preset("cola-tiny")?;
                let sizes = [(4, 128), (4, 96), (8, 64)].into_iter();
                sizes.flat_map(|sizes| of_model(&tiny, sizes, true)).collect()
            }
            BenchmarkExtent::Whole => {
                let medium = preset("cola-1b")?;
                of_model(&medium, (2, 4096), true)
                    .chain(of_model(&medium, (6, 1024), true))
                    .chain(of_model(&medium.dense_counterpart(), (2, 1536), true))
                    .chain(of_model(&preset("cola-3b")?, (2, 2048), false))
                    .chain(of_model(&preset("cola-350m")?, (8, 1024), false))
                    .collect()
            }
        })
    }
}

/// A model with a t-th of the widths; `None` if they do not divide, or become less than a rank.
fn narrower(model: &Model, by: u64) -> Option<Model> {
    let mut narrow = model.clone();
    narrow.name = format!("{}/{by}", model.name);
    let divide = |width: &mut u64| {
        let divides = width.is_multiple_of(by);
        divides.then(|| *width /= by)
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
            for extent in [BenchmarkExtent::Quick, BenchmarkExtent::Whole] {
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
                assert_eq!(shards > 3, extent == BenchmarkExtent::Whole);
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
