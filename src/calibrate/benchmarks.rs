//! Plans for the measurement of a machine, and plans to compare its profile with.
//!
//! Kernels are measured in steps of small models under plans of every kind. Two blocks of a model have the shapes of all
//! its equal blocks. The plans for comparison are of whole models with other batches and lengths, one of them with
//! widths that are not measured.

use narrows_cost_model::Profile;
use narrows_plan::model::{Model, presets, read};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules, WeightRule};
use narrows_planner::{GroupingRule, MemoryLimit, Request};

use crate::errors::{CommandResult, Failure};

/// Number of blocks of the measured models.
pub(super) const BLOCKS: usize = 2;

/// A width that no preset has, with a dense block among low-rank ones.
const OTHER_WIDTHS: &str = r#"{
  "format": "narrows-model/1", "name": "cola-384", "hidden": 384, "vocab": 512, "heads": 6, "kv_heads": 6,
  "d_ff": 1024, "max_sequence_length": 1024, "norm_epsilon": 1e-5, "rope_theta": 10000, "tied": false,
  "blocks": {"count": 3, "default": {"product": "plain", "all": {"rank": 96, "activation": "silu"}}}
}"#;

/// Mesh and rules of a plan for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlanVariant {
    /// The end of a benchmark's name.
    pub label: &'static str,
    pub tensor: u64,
    pub pipeline: u64,
    pub data: u64,
    pub rules: Rules,
    pub grouping: GroupingRule,
    pub microbatches: u64,
    /// Whether other variants launch the same kernels. Quick calibrations skip such variants.
    pub is_redundant: bool,
    /// Whether the variant is part of every comparison.
    pub is_compared: bool,
}

/// A plan to run: a request that fixes the mesh.
#[derive(Clone, Debug)]
pub struct Benchmark {
    /// The name in reports: the task, the devices and the variant.
    pub name: String,
    /// Model, batch and length.
    pub task: String,
    /// Whether kernels of the model's widths are measured.
    pub widths_measured: bool,
    /// The request.
    pub request: Request,
}

/// Extent of a calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchmarkExtent {
    /// A few seconds: the default model of `run`.
    Quick,
    /// Some minutes.
    Full,
}

pub(super) const ONE_DEVICE: PlanVariant = PlanVariant {
    label: "one device",
    tensor: 1,
    pipeline: 1,
    data: 1,
    rules: Rules::ALL,
    grouping: GroupingRule::Auto,
    microbatches: 1,
    is_redundant: false,
    is_compared: false,
};

/// Variants on one device that launch different kernels.
pub(super) fn one_device_variants() -> Vec<PlanVariant> {
    let compared = PlanVariant { is_compared: true, ..ONE_DEVICE };
    let rules = Rules { recompute: Recompute::Latents, ..Rules::ALL };
    vec![
        PlanVariant { label: "grouped", grouping: GroupingRule::On, ..compared },
        PlanVariant { label: "ungrouped", grouping: GroupingRule::Off, ..compared },
        PlanVariant { label: "latents kept", rules, is_redundant: true, ..ONE_DEVICE },
        PlanVariant { label: "2 microbatches", microbatches: 2, ..ONE_DEVICE },
    ]
}

/// Variants on several devices.
pub(super) fn multi_device_variants(devices: u64, low_rank: bool) -> Vec<PlanVariant> {
    let (on, off) = (GroupingRule::On, GroupingRule::Off);
    let tensor = PlanVariant { tensor: devices, ..ONE_DEVICE };
    let sharded = Rules { weights: WeightRule::Sharded, ..Rules::ALL };
    let baseline = |baseline| Rules { baseline, ..Rules::ALL };
    let btp = |norm| Rules { norm, ..baseline(Baseline::Btp) };
    let mut variants = vec![
        PlanVariant { label: "tensor", is_redundant: true, is_compared: true, ..tensor },
        PlanVariant { label: "tensor, weights sharded", rules: sharded, ..tensor },
        PlanVariant { label: "data", data: devices, is_compared: true, ..ONE_DEVICE },
        PlanVariant { label: "pipeline", pipeline: devices, microbatches: 2, ..ONE_DEVICE },
    ];
    if low_rank {
        variants.extend([
            PlanVariant { label: "vanilla-tp", rules: baseline(Baseline::VanillaTp), ..tensor },
            PlanVariant {
                label: "vanilla-tp-published",
                rules: baseline(Baseline::VanillaTpPublished),
                is_redundant: true,
                ..tensor
            },
            PlanVariant {
                label: "btp, online",
                rules: btp(NormRule::Online),
                grouping: on,
                is_compared: true,
                ..tensor
            },
            PlanVariant { label: "btp, sync", rules: btp(NormRule::Sync), grouping: on, ..tensor },
            PlanVariant {
                label: "btp, ungrouped",
                rules: btp(NormRule::Auto),
                grouping: off,
                is_redundant: true,
                ..tensor
            },
        ]);
    } else {
        let rules = baseline(Baseline::FullrankTp);
        variants.push(PlanVariant { label: "fullrank-tp", rules, is_compared: true, ..tensor });
    }
    variants
}

/// The benchmarks for measuring the CPU with at most `devices` devices. `extra_model` is measured too.
///
/// # Errors
/// A missing preset.
pub fn cpu_benchmarks(
    extent: BenchmarkExtent,
    extra_model: Option<&Model>,
    devices: u64,
    profile: &Profile,
) -> CommandResult<Vec<Benchmark>> {
    let tiny = preset("cola-tiny")?;
    let mut benchmarks = vec![];
    let mut add = |model: &Model, batch: u64, length: u64, skip_redundant: bool| {
        let mut model = model.clone();
        model.blocks.truncate(BLOCKS);
        let mut variants = one_device_variants();
        for count in powers_of_two(devices) {
            variants.extend(multi_device_variants(count, model.is_low_rank()));
        }
        variants.retain(|variant| !skip_redundant || !variant.is_redundant);
        let limit = MemoryLimit::None;
        let of_variant = |v: &PlanVariant| benchmark(&model, (batch, length), v, profile, limit);
        benchmarks.extend(variants.iter().filter_map(of_variant));
    };
    match extent {
        BenchmarkExtent::Quick => add(&tiny, 8, 128, true),
        BenchmarkExtent::Full => {
            add(&tiny, 8, 128, false);
            add(&tiny, 2, 128, true);
            add(&tiny.dense_counterpart(), 2, 128, true);
            add(&preset("cola-60m")?, 2, 64, true);
        }
    }
    if let Some(model) = extra_model {
        add(model, 4, 256.min(model.max_sequence_length), extent == BenchmarkExtent::Quick);
    }
    Ok(benchmarks)
}

/// Blocks of CoLA-60M between an embedding and a head of few tokens, which need little memory.
fn wide_blocks(count: usize) -> CommandResult<Model> {
    let mut model = preset("cola-60m")?;
    model.vocab = 512;
    model.blocks.truncate(count);
    Ok(model)
}

/// The benchmark for measuring GEMMs whose operands are rounded to bf16, on one device.
///
/// # Errors
/// A missing preset.
pub fn bf16_benchmark(profile: &Profile) -> CommandResult<Option<Benchmark>> {
    let model = wide_blocks(BLOCKS)?;
    Ok(benchmark(&model, (4, 64), &ONE_DEVICE, profile, MemoryLimit::None))
}

/// The benchmarks to compare a CPU profile with.
///
/// # Errors
/// A missing preset.
pub fn cpu_comparison(
    extent: BenchmarkExtent,
    devices: u64,
    profile: &Profile,
) -> CommandResult<Vec<Benchmark>> {
    let tiny = preset("cola-tiny")?;
    let other = read("cola-384", OTHER_WIDTHS).map_err(|d| Failure::file("cola-384", d))?;
    let mut small = preset("cola-60m")?;
    small.blocks.truncate(4);
    let mut benchmarks = vec![];
    let mut add =
        |model: &Model, batch: u64, length: u64, widths_measured: bool, every_variant: bool| {
            let mut variants = one_device_variants();
            if devices >= 2 {
                variants.extend(multi_device_variants(2, model.is_low_rank()));
            }
            variants.retain(|variant| every_variant || variant.is_compared);
            let limit = MemoryLimit::None;
            let of_variant = |v: &PlanVariant| benchmark(model, (batch, length), v, profile, limit);
            let added = variants.iter().filter_map(of_variant);
            benchmarks.extend(added.map(|benchmark| Benchmark { widths_measured, ..benchmark }));
        };
    add(&tiny, 4, 128, true, extent == BenchmarkExtent::Full);
    add(&tiny, 4, 96, true, false);
    add(&tiny, 8, 64, true, false);
    if extent == BenchmarkExtent::Quick {
        return Ok(benchmarks);
    }
    add(&tiny.dense_counterpart(), 2, 128, true, false);
    add(&other, 4, 96, false, true);
    add(&small, 2, 64, true, false);
    Ok(benchmarks)
}

/// The benchmark of a variant; `None` if the batch or the model is not divisible, or the request is invalid.
pub(super) fn benchmark(
    model: &Model,
    (batch, length): (u64, u64),
    variant: &PlanVariant,
    profile: &Profile,
    memory_limit: MemoryLimit,
) -> Option<Benchmark> {
    let PlanVariant { label, tensor, pipeline, data, rules, grouping, microbatches, .. } = *variant;
    let divisor = data * microbatches;
    let micro_batch = batch.checked_div(divisor).filter(|size| size * divisor == batch)?;
    if micro_batch == 0 || pipeline > model.blocks.len() as u64 {
        return None;
    }
    let devices = tensor * pipeline * data;
    let request = Request {
        micro_batch: Some(micro_batch),
        tensor: Some(tensor),
        pipeline: Some(pipeline),
        data: Some(data),
        rules,
        grouping,
        memory_limit,
        ..Request::new(model.clone(), profile.clone(), devices, batch, length)
    };
    request.validate().ok()?;
    let task = format!("{} {batch}×{length}", model.name);
    let name = format!("{task} on {devices}: {label}");
    Some(Benchmark { name, task, widths_measured: true, request })
}

/// The powers of two from 2 up to `max`.
fn powers_of_two(max: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(2), |count: &u64| count.checked_mul(2))
        .take_while(move |count| *count <= max)
}

pub(super) fn preset(name: &str) -> CommandResult<Model> {
    presets::find(name).map_err(|defect| Failure::flag("--model", defect.into()))
}
