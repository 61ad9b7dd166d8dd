//! Intervals of GPT step times, from the draws and residuals of a fit.
//!
//! Residuals are taken from steps of the same category: within a node or across nodes, and with the same recomputation
//! ("Mondrian" conformal prediction). No step of the fit has sequence parallelism or interleaved stages. For a measured
//! model they are leave-row-out residuals, for an unseen model leave-model-out residuals: the network and an unseen model
//! make a step less certain than the draws of a few coefficients show. Residuals are scaled by the distance, in octaves, from
//! the box of measured sizes. The rows themselves are not needed, and are not part of the repository.
//!
//! These intervals are valid on the hardware and hosts of the fit. On other hardware a draw also contains errors of that
//! profile's GEMMs, fused ops and links, and of its steps:
//!
//! ```text
//! T_b = step(factors · exp(e_b,class))  ·  exp(e_b,step)
//! ```

use std::collections::BTreeSet;

use narrows_cost_model::interval::{draw_error, prediction_interval, small_sample_factor};
use narrows_cost_model::profile::{Profile, Provenance, RelativeError, preset};
use narrows_cost_model::{NEAR_OCTAVES, error_scale};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Defects, Mesh, json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::coefficients::{Coefficients, NETWORK, with_network_efficiency};
use super::model::{FrameworkModel, StepWork};
use crate::measurements::{GptModel, StepRecompute, TrainedModel, TrainingStep};

/// Number of draws on hardware without measured steps.
const HARDWARE_DRAWS: usize = 400;
const SEED: u64 = 0x6770_7400;

/// The uncertainty of a fitted framework.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct IntervalModel {
    /// Source of the rows of the fit.
    pub provenance: Provenance,
    /// Names of the profiles of the measured hardware.
    pub hardware: BTreeSet<String>,
    /// Digests of the models measured within a node.
    pub models_within_a_node: BTreeSet<String>,
    /// Digests of the models measured across nodes.
    pub models_across_nodes: BTreeSet<String>,
    /// Recomputation of the steps within a node.
    pub recomputed_within_a_node: Vec<StepRecompute>,
    /// Recomputation of the steps across nodes.
    pub recomputed_across_nodes: Vec<StepRecompute>,
    /// Fit for steps of measured models with measured recomputation, sharding and schedule: draws that leave out rows.
    #[serde(rename = "known")]
    pub by_row: BootstrapFit,
    /// Fit for all other steps: draws that leave out models.
    #[serde(rename = "other")]
    pub by_model: BootstrapFit,
    /// The smallest and the largest base-2 logarithm of each of a step's sizes.
    #[serde(rename = "sizes")]
    pub log_size_ranges: Vec<[f64; 2]>,
}

/// A bootstrap of the rows of a fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BootstrapFit {
    /// Ratio of the coefficients of every draw to those of the fit.
    pub draws: Vec<Coefficients>,
    /// ln(measured / predicted) of steps within a node that a draw left out.
    pub within_a_node: Vec<f64>,
    /// ln(measured / predicted) of steps across nodes that a draw left out.
    pub across_nodes: Vec<f64>,
}

/// Identifies a model without revealing its sizes, which are part of the unpublished rows.
pub(super) fn model_digest(gpt: &GptModel) -> String {
    let text = format!("{} {} {}", gpt.layers, gpt.hidden, gpt.heads);
    let digest = Sha256::digest(text.as_bytes());
    hex::encode(&digest[..4])
}

/// Base-2 logarithms of width, blocks, tokens of a sequence and of a microbatch, and the mesh.
pub(super) fn log_sizes(step: &TrainingStep, mesh: Mesh) -> Option<[f64; 7]> {
    let TrainedModel::Gpt(gpt) = step.model else { return None };
    let tokens = step.workload.micro_batch * step.workload.sequence_length;
    let (Mesh { tensor, pipeline, data, .. }, length) = (mesh, step.workload.sequence_length);
    let sizes = [gpt.hidden, gpt.layers, length, tokens, tensor, pipeline, data];
    Some(sizes.map(|size| (size as f64).log2()))
}

impl IntervalModel {
    /// Distance of a step from the box of measured sizes, in octaves.
    fn distance_octaves(&self, step: &TrainingStep, mesh: Mesh) -> f64 {
        let sizes = log_sizes(step, mesh).into_iter().flatten();
        let square = |(range, size): (&[f64; 2], f64)| {
            (range[0] - size).max(size - range[1]).max(0.0).powi(2)
        };
        self.log_size_ranges.iter().zip(sizes).map(square).sum::<f64>().sqrt()
    }

    /// Whether a profile describes the measured hardware: it equals a preset of the fit except for the efficiency of the
    /// network, which is fitted.
    fn is_measured(&self, profile: &Profile) -> bool {
        let own = preset(profile.name()).ok().filter(|own| self.hardware.contains(own.name()));
        own.is_some_and(|own| {
            let efficiency = own.file().links.inter_node.efficiency;
            with_network_efficiency(profile.file(), efficiency) == *own.file()
        })
    }

    /// The 90 % interval of a step in seconds; `None` for a model that is not a GPT.
    pub fn interval_s(
        &self,
        step: &TrainingStep,
        mesh: Mesh,
        profile: &Profile,
        framework: &FrameworkModel,
    ) -> Option<[f64; 2]> {
        let TrainedModel::Gpt(gpt) = &step.model else { return None };
        let fitted = framework.coefficients(profile);
        let work = StepWork::new(step, mesh, profile)?;
        let predicted_s = work.step_time_s(framework);
        let across = mesh.devices() > profile.devices_per_node();
        let (models, recomputed) = match across {
            true => (&self.models_across_nodes, &self.recomputed_across_nodes),
            false => (&self.models_within_a_node, &self.recomputed_within_a_node),
        };
        let known_execution =
            recomputed.contains(&step.recompute) && step.has_fitted_sharding_and_schedule();
        let known_model = models.contains(&model_digest(gpt));
        // Rows of one model err together, so that the errors of an unmeasured model are as few as the models.
        let (fit, widening) = match known_execution && known_model {
            true => (&self.by_row, 1.0),
            false => (&self.by_model, small_sample_factor(models.len())),
        };
        let draw = |ratios: &Coefficients| {
            let drawn: Coefficients = std::array::from_fn(|index| fitted[index] * ratios[index]);
            let work = if across {
                let file = with_network_efficiency(profile.file(), drawn[NETWORK]);
                StepWork::from_file(step, mesh, &file)?
            } else {
                work.clone()
            };
            Some((work, FrameworkModel::from_coefficients(&drawn)))
        };
        let draws: Vec<(StepWork, FrameworkModel)> = fit.draws.iter().filter_map(draw).collect();
        let log_ratio = |step_s: f64| (step_s / predicted_s).ln();
        let log_ratios = if self.is_measured(profile) {
            draws.iter().map(|(work, framework)| log_ratio(work.step_time_s(framework))).collect()
        } else {
            let mut random = SplitMix64::new(SEED);
            let mut draw_on_other_hardware = |index: usize| {
                let (work, framework) = draws.get(index % draws.len().max(1))?;
                let (framework, step_error) =
                    draw_hardware_errors(framework, profile, across, &mut random);
                Some(log_ratio(work.step_time_s(&framework)) + step_error)
            };
            (0..HARDWARE_DRAWS).filter_map(&mut draw_on_other_hardware).collect::<Vec<f64>>()
        };
        let residuals = match (known_execution, across) {
            (true, true) => fit.across_nodes.as_slice(),
            (true, false) => &fit.within_a_node,
            // No step with this recomputation, sharding and schedule was measured in this category: take the wider of
            // the two lists.
            (false, _) => wider(&fit.within_a_node, &fit.across_nodes),
        };
        let scale = widening * error_scale(NEAR_OCTAVES + self.distance_octaves(step, mesh));
        let interval = prediction_interval(&log_ratios, residuals, scale);
        Some(interval.map(|logarithm| predicted_s * logarithm.exp()))
    }
}

/// The list with the larger mean absolute residual.
fn wider<'a>(a: &'a [f64], b: &'a [f64]) -> &'a [f64] {
    let mean = |residuals: &[f64]| {
        residuals.iter().map(|residual| residual.abs()).sum::<f64>() / residuals.len().max(1) as f64
    };
    if mean(a) > mean(b) { a } else { b }
}

/// Draws the factors of a framework on hardware without measured steps, and a step error.
fn draw_hardware_errors(
    framework: &FrameworkModel,
    profile: &Profile,
    across: bool,
    random: &mut SplitMix64,
) -> (FrameworkModel, f64) {
    let file = profile.file();
    let links =
        if across { &file.links.inter_node.relative_error } else { &file.links.relative_error };
    let mut draw = |error: &RelativeError| draw_error(error, random);
    let framework = FrameworkModel {
        gemm_factor: framework.gemm_factor * draw(&file.gemm.relative_error).exp(),
        elementwise_factor: framework.elementwise_factor * draw(&file.fused.relative_error).exp(),
        collective_factor: framework.collective_factor * draw(links).exp(),
        ..*framework
    };
    let step_error = file.executors.eager.step_error.as_ref().map_or(0.0, draw);
    (framework, step_error)
}

/// The uncertainty of [`FITTED_FRAMEWORK`](super::FITTED_FRAMEWORK).
///
/// # Errors
/// A built-in file that is damaged; the tests read it.
pub(crate) fn built_in_interval_model() -> Result<IntervalModel, Defects> {
    const TEXT: &str = include_str!("../../data/fits/gpt-a100.json");
    json::read(TEXT).map_err(Defects::single)
}
