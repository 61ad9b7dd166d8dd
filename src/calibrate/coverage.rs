//! What a profile has measured of the kernels that presets' plans need.
//!
//! Every preset is planned as `narrows run --model NAME --devices N` does it, but with two of its blocks: they are
//! alike. A kernel counts as measured where something like it was, within a factor of two in its sizes.

use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::model::{Model, presets};
use narrows_planner::{MemoryLimit, Request, kernels, search};
use serde::Serialize;

use crate::args::run::{GLOBAL_BATCH, SEQUENCE_LENGTH};

/// Blocks of the models that are planned.
const BLOCKS: usize = 2;

/// One preset.
#[derive(Clone, Debug, Serialize)]
pub struct PresetCoverage {
    /// Its name.
    pub model: String,
    /// Devices it is planned for.
    pub devices: u64,
    /// Kernels of its plan, alike ones once.
    pub kernels: usize,
    /// Those with something like them among what was measured.
    pub measured: usize,
    /// Their share of the step's time.
    pub measured_share: f64,
}

/// All presets, in the order of their names in lists.
pub fn of_presets(profile: &Profile, devices: u64) -> Vec<PresetCoverage> {
    let models = presets::names().into_iter().filter_map(|name| presets::find(&name).ok());
    models.filter_map(|model| needed(model, profile, devices)).collect()
}

/// `None` where a preset has no plan for so many devices.
fn needed(mut model: Model, profile: &Profile, devices: u64) -> Option<PresetCoverage> {
    let name = model.name.clone();
    model.blocks.truncate(BLOCKS);
    let length = SEQUENCE_LENGTH.min(model.max_sequence_length);
    let batch = GLOBAL_BATCH.next_multiple_of(devices);
    let request = Request {
        memory_limit: MemoryLimit::None,
        ..Request::new(model, profile.clone(), devices, batch, length)
    };
    request.validate().ok()?;
    let program = search(&request).best?.program;
    let mesh = program.program().context.mesh;
    let all = kernels(program.program());
    let prices = Prices::new(profile, Executor::Captured, &mesh);
    let launched = all.iter().filter(|(kernel, _)| prices.kernel(kernel).0 > 0.0).count();
    let unmeasured = ErrorModel::new(profile, Executor::Captured, &mesh).unmeasured(&all);
    let far: f64 = unmeasured.iter().map(|one| one.share).sum();
    Some(PresetCoverage {
        model: name,
        devices,
        kernels: launched,
        measured: launched - unmeasured.len(),
        measured_share: (1.0 - far).clamp(0.0, 1.0),
    })
}
