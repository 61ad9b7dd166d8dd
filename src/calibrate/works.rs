//! What is run to measure a machine, and to hold its profile against.
//!
//! Kernels are measured where plans have them: in steps of small models under plans of every kind. A
//! model's blocks are alike, so two of them have the shapes of all. The plans to compare with are of
//! whole models, of other batches and lengths, and of a model whose widths were not measured.

use narrows_plan::model::{Model, presets, read};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules, WeightRule};
use narrows_planner::{GroupingRule, MemoryLimit, Request};

use narrows_cost_model::Profile;

use crate::errors::{CommandResult, Failure};

/// Blocks of the models that are measured.
pub(super) const BLOCKS: usize = 2;

/// A width that no preset has, with a dense block among low-rank ones.
const OTHER_WIDTHS: &str = r#"{
  "format": "narrows-model/1", "name": "cola-384", "hidden": 384, "vocab": 512, "heads": 6, "kv_heads": 6,
  "d_ff": 1024, "max_sequence_length": 1024, "norm_epsilon": 1e-5, "rope_theta": 10000, "tied": false,
  "blocks": {"count": 3, "default": {"product": "plain", "all": {"rank": 96, "activation": "silu"}}}
}"#;

/// How a model is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelSplit {
    pub what: &'static str,
    pub tensor: u64,
    pub pipeline: u64,
    pub data: u64,
    pub rules: Rules,
    pub grouping: GroupingRule,
    /// Microbatches of a step.
    pub turns: u64,
}

/// One plan to run: a request that fixes everything about its mesh.
#[derive(Clone, Debug)]
pub struct Benchmark {
    /// The name in reports: the task, the devices and the split.
    pub name: String,
    /// Model, batch and length.
    pub task: String,
    /// Whether its model is one whose widths are measured.
    pub familiar: bool,
    /// What is planned.
    pub request: Request,
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchmarkExtent {
    /// A few seconds: the default model of `run`.
    Quick,
    /// Some minutes.
    Whole,
}

pub(super) const ALONE: ModelSplit = ModelSplit {
    what: "one device",
    tensor: 1,
    pipeline: 1,
    data: 1,
    rules: Rules::ALL,
    grouping: GroupingRule::Auto,
    turns: 1,
};

/// Ways whose kernels others have too.
pub(super) const DULL: [&str; 4] =
    ["latents kept", "vanilla-tp-published", "btp, ungrouped", "tensor"];
/// Ways that are unlike each other.
pub(super) const TELLING: [&str; 6] =
    ["grouped", "ungrouped", "tensor", "btp, online", "fullrank-tp", "data"];

/// Every way on one device that changes kernels.
pub(super) fn alone() -> Vec<ModelSplit> {
    let (on, off) = (GroupingRule::On, GroupingRule::Off);
    let redo = |recompute| Rules { recompute, ..Rules::ALL };
    vec![
        ModelSplit { what: "grouped", grouping: on, ..ALONE },
        ModelSplit { what: "ungrouped", grouping: off, ..ALONE },
        ModelSplit { what: "latents kept", rules: redo(Recompute::Latents), ..ALONE },
        ModelSplit { what: "2 microbatches", turns: 2, ..ALONE },
    ]
}

/// Every way on several devices.
pub(super) fn together(devices: u64, low_rank: bool) -> Vec<ModelSplit> {
    let (on, off) = (GroupingRule::On, GroupingRule::Off);
    let along = ModelSplit { tensor: devices, ..ALONE };
    let sharded = Rules { weights: WeightRule::Sharded, ..Rules::ALL };
    let named = |baseline| Rules { baseline, ..Rules::ALL };
    let btp = |norm| Rules { norm, ..named(Baseline::Btp) };
    let mut all = vec![
        ModelSplit { what: "tensor", ..along },
        ModelSplit { what: "tensor, weights sharded", rules: sharded, ..along },
        ModelSplit { what: "data", data: devices, ..ALONE },
        ModelSplit { what: "pipeline", pipeline: devices, turns: 2, ..ALONE },
    ];
    if low_rank {
        let published = named(Baseline::VanillaTpPublished);
        all.extend([
            ModelSplit { what: "vanilla-tp", rules: named(Baseline::VanillaTp), ..along },
            ModelSplit { what: "vanilla-tp-published", rules: published, ..along },
            ModelSplit { what: "btp, online", rules: btp(NormRule::Online), grouping: on, ..along },
            ModelSplit { what: "btp, sync", rules: btp(NormRule::Sync), grouping: on, ..along },
            ModelSplit {
                what: "btp, ungrouped",
                rules: btp(NormRule::Auto),
                grouping: off,
                ..along
            },
        ]);
    } else {
        let rules = named(Baseline::FullrankTp);
        all.push(ModelSplit { what: "fullrank-tp", rules, ..along });
    }
    all
}

/// What is run to measure, with up to so many devices.
///
/// # Errors
/// When a preset is not there.
pub fn to_measure(
    amount: BenchmarkExtent,
    also: Option<&Model>,
    devices: u64,
    profile: &Profile,
) -> CommandResult<Vec<Benchmark>> {
    let tiny = preset("cola-tiny")?;
    let mut works = vec![];
    let mut add = |model: &Model, batch: u64, length: u64, quick: bool| {
        let mut model = model.clone();
        model.blocks.truncate(BLOCKS);
        let mut divisions = alone();
        for count in powers_of_two(devices) {
            divisions.extend(together(count, model.is_low_rank()));
        }
        if quick {
            divisions.retain(|division| !DULL.contains(&division.what));
        }
        let limit = MemoryLimit::None;
        let of = |d: &ModelSplit| work(&model, (batch, length), d, profile, limit);
        works.extend(divisions.iter().filter_map(of));
    };
    match amount {
        BenchmarkExtent::Quick => add(&tiny, 8, 128, true),
        BenchmarkExtent::Whole => {
            add(&tiny, 8, 128, false);
            add(&tiny, 2, 128, true);
            add(&tiny.dense_counterpart(), 2, 128, true);
            add(&preset("cola-60m")?, 2, 64, true);
        }
    }
    if let Some(model) = also {
        add(model, 4, 256.min(model.max_sequence_length), amount == BenchmarkExtent::Quick);
    }
    Ok(works)
}

/// The plans to hold a profile against: in a quick measurement some of the small ones.
///
/// # Errors
/// When a preset is not there.
pub fn to_compare(
    amount: BenchmarkExtent,
    devices: u64,
    profile: &Profile,
) -> CommandResult<Vec<Benchmark>> {
    let tiny = preset("cola-tiny")?;
    let other = read("cola-384", OTHER_WIDTHS).map_err(|d| Failure::file("cola-384", d))?;
    let mut small = preset("cola-60m")?;
    small.blocks.truncate(4);
    let mut works = vec![];
    let mut add = |model: &Model, batch: u64, length: u64, familiar: bool, all: bool| {
        let mut divisions = alone();
        divisions.extend(together(2.min(devices), model.is_low_rank()));
        if devices < 2 {
            divisions.truncate(alone().len());
        }
        if !all {
            divisions.retain(|division| TELLING.contains(&division.what));
        }
        let limit = MemoryLimit::None;
        let of = |d: &ModelSplit| work(model, (batch, length), d, profile, limit);
        let made = divisions.iter().filter_map(of);
        works.extend(made.map(|work| Benchmark { familiar, ..work }));
    };
    add(&tiny, 4, 128, true, amount == BenchmarkExtent::Whole);
    add(&tiny, 4, 96, true, false);
    add(&tiny, 8, 64, true, false);
    if amount == BenchmarkExtent::Quick {
        return Ok(works);
    }
    add(&tiny.dense_counterpart(), 2, 128, true, false);
    add(&other, 4, 96, false, true);
    add(&small, 2, 64, true, false);
    Ok(works)
}

pub(super) fn work(
    model: &Model,
    (batch, length): (u64, u64),
    division: &ModelSplit,
    profile: &Profile,
    memory_limit: MemoryLimit,
) -> Option<Benchmark> {
    let ModelSplit { what, tensor, pipeline, data, rules, grouping, turns } = *division;
    let micro_batch =
        batch.checked_div(data * turns).filter(|size| size * data * turns == batch)?;
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
    let name = format!("{task} on {devices}: {what}");
    Some(Benchmark { name, task, familiar: true, request })
}

fn powers_of_two(most: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(2), |count: &u64| count.checked_mul(2))
        .take_while(move |c| *c <= most)
}

pub(super) fn preset(name: &str) -> CommandResult<Model> {
    presets::find(name).map_err(|defect| Failure::flags(defect.into()))
}
