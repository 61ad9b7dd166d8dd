//! Share of the kernels of the presets' plans that a profile has measured.
//!
//! Every preset is planned as by `narrows run --model NAME --devices N`, with two of its equal blocks. A kernel counts as
//! measured when the nearest measured shape is within a factor of two in its sizes.

use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::model::{Model, presets};
use narrows_planner::{MemoryLimit, Request, kernels, search};
use serde::Serialize;

/// Blocks of the models that are planned.
const BLOCKS: usize = 2;

/// The measured kernels of one preset's plan.
#[derive(Clone, Debug, Serialize)]
pub struct PresetCoverage {
    /// The preset's name.
    pub model: String,
    /// Devices of the plan.
    pub devices: u64,
    /// Distinct kernels of the plan.
    pub kernels: usize,
    /// Kernels near a measured shape.
    pub measured: usize,
    /// Fraction of the step's time in these kernels.
    pub measured_share: f64,
}

/// Coverage of all presets that have a plan, in their order, for steps of `global_batch` sequences of `sequence_length`
/// tokens. The batch is rounded up to a multiple of the devices, and the length limited to the model's maximum.
pub fn preset_coverage(
    profile: &Profile,
    devices: u64,
    global_batch: u64,
    sequence_length: u64,
) -> Vec<PresetCoverage> {
    let models = presets::names().into_iter().filter_map(|name| presets::find(&name).ok());
    let coverage = |model: Model| {
        let length = sequence_length.min(model.max_sequence_length);
        model_coverage(model, profile, devices, global_batch.next_multiple_of(devices), length)
    };
    models.filter_map(coverage).collect()
}

/// `None` for a model without a plan.
fn model_coverage(
    mut model: Model,
    profile: &Profile,
    devices: u64,
    batch: u64,
    length: u64,
) -> Option<PresetCoverage> {
    let name = model.name.clone();
    model.blocks.truncate(BLOCKS);
    let request = Request {
        memory_limit: MemoryLimit::None,
        ..Request::new(model, profile.clone(), devices, batch, length)
    };
    request.validate().ok()?;
    let program = search(&request).best?.program;
    let mesh = program.program().context.mesh;
    let kernels = kernels(program.program());
    let prices = Prices::new(profile, Executor::Captured, &mesh);
    let launched = kernels.iter().filter(|(kernel, _)| prices.kernel_time(kernel).0 > 0.0).count();
    let unmeasured =
        ErrorModel::new(profile, Executor::Captured, &mesh).unmeasured_kernels(&kernels);
    let unmeasured_share: f64 = unmeasured.iter().map(|kernel| kernel.share).sum();
    Some(PresetCoverage {
        model: name,
        devices,
        kernels: launched,
        measured: launched - unmeasured.len(),
        measured_share: (1.0 - unmeasured_share).clamp(0.0, 1.0),
    })
}
