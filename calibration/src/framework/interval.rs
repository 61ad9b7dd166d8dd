//! The interval of a GPT's step, from the draws and residuals of a fit.
//!
//! Residuals are those of steps of the same kind, within a node or across nodes, with the same recomputation. For a
//! model that steps of this kind were measured of they are by rows that a draw left out, for an unseen model by
//! models that a draw left out ("Mondrian" conformal prediction): the network and an unseen model make a step less
//! certain by more than the draws of a few coefficients show. Residuals are scaled by the distance, in octaves, from the
//! box of measured sizes. The rows themselves are not needed, and are not part of the repository.
//!
//! All of this holds for the hardware and the hosts of the fit. On other hardware a draw also contains an error of that
//! profile's GEMMs, fused ops and links, and one of its steps:
//!
//! ```text
//! T_b = step(factors · exp(e_b,class))  ·  exp(e_b,step)
//! ```

use std::collections::BTreeSet;

use narrows_cost_model::interval::{draw_error, prediction_interval, thin_to_quantiles};
use narrows_cost_model::profile::{Profile, Provenance, RelativeError, preset};
use narrows_cost_model::{NEAR_OCTAVES, error_scale};
use narrows_plan::random::SplitMix64;
use narrows_plan::strategy::Recompute;
use narrows_plan::{Defects, Mesh, json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::fit::{Coefficients, NETWORK, StepRows, with_network_efficiency};
use super::model::{Framework, StepWork};
use crate::bootstrap::Bootstrap;
use crate::measurements::{GptModel, TrainedModel, TrainingStep};

/// More residuals than these are replaced by their quantiles.
const RESIDUALS_MAX: usize = 99;
/// Draws on hardware that the fit did not see.
const HARDWARE_DRAWS: usize = 400;
const SEED: u64 = 0x6770_7400;

/// The uncertainty of a fitted framework.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntervalModel {
    /// The rows of the fit.
    pub provenance: Provenance,
    /// Names of the profiles of the measured hardware.
    pub hardware: BTreeSet<String>,
    /// Digests of the models measured within a node.
    pub models_within_a_node: BTreeSet<String>,
    /// Digests of the models measured across nodes.
    pub models_across_nodes: BTreeSet<String>,
    /// Recomputation of the steps within a node.
    pub recomputed_within_a_node: Vec<Recompute>,
    /// Recomputation of the steps across nodes.
    pub recomputed_across_nodes: Vec<Recompute>,
    /// For steps of these models with this recomputation: rows left out.
    #[serde(rename = "known")]
    pub by_row: BootstrapFit,
    /// For all other steps: models left out.
    #[serde(rename = "other")]
    pub by_model: BootstrapFit,
    /// The smallest and the largest base-2 logarithm of each of a step's sizes.
    #[serde(rename = "sizes")]
    pub log_size_ranges: Vec<[f64; 2]>,
}

/// A bootstrap of the rows of a fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootstrapFit {
    /// The coefficients of every draw over those of the fit.
    pub draws: Vec<Coefficients>,
    /// ln(measured / predicted) of steps within a node that the fit had not seen.
    pub within_a_node: Vec<f64>,
    /// The same of steps across nodes.
    pub across_nodes: Vec<f64>,
}

impl BootstrapFit {
    fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        bootstrap: &Bootstrap<Coefficients>,
    ) -> BootstrapFit {
        let ratios = |draw: &Coefficients| std::array::from_fn(|index| draw[index] / fitted[index]);
        let residuals = |across: bool| {
            let residuals = bootstrap.residuals.iter();
            let own = residuals.filter(|(row, _)| rows.rows()[*row].crosses_nodes() == across);
            thin_to_quantiles(own.map(|(_, residual)| *residual).collect(), RESIDUALS_MAX)
        };
        BootstrapFit {
            draws: bootstrap.draws.iter().map(ratios).collect(),
            within_a_node: residuals(false),
            across_nodes: residuals(true),
        }
    }
}

/// Identifies a model without revealing its sizes, which belong to the rows.
fn model_digest(gpt: &GptModel) -> String {
    let text = format!("{} {} {}", gpt.layers, gpt.hidden, gpt.heads);
    let digest = Sha256::digest(text.as_bytes());
    hex::encode(&digest[..4])
}

/// Base-2 logarithms of width, blocks, tokens of a sequence and of a microbatch, and the mesh.
fn log_sizes(step: &TrainingStep, mesh: Mesh) -> Option<[f64; 7]> {
    let TrainedModel::Gpt(gpt) = step.model else { return None };
    let tokens = step.workload.micro_batch * step.workload.sequence_length;
    let (Mesh { tensor, pipeline, data }, length) = (mesh, step.workload.sequence_length);
    let sizes = [gpt.hidden, gpt.layers, length, tokens, tensor, pipeline, data];
    Some(sizes.map(|size| (size as f64).log2()))
}

impl IntervalModel {
    /// The uncertainty of `fitted`, from the rows of the fit and bootstraps of them by row and by model.
    pub fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        by_row: &Bootstrap<Coefficients>,
        by_model: &Bootstrap<Coefficients>,
        provenance: Provenance,
    ) -> IntervalModel {
        let mut log_size_ranges = vec![[f64::INFINITY, f64::NEG_INFINITY]; 7];
        let (mut hardware, mut models) = (BTreeSet::new(), [BTreeSet::new(), BTreeSet::new()]);
        let mut recomputed = [vec![], vec![]];
        for row in rows.rows() {
            let sizes = log_sizes(row.step, row.mesh).into_iter().flatten();
            for (range, size) in log_size_ranges.iter_mut().zip(sizes) {
                *range = [range[0].min(size), range[1].max(size)];
            }
            if let TrainedModel::Gpt(gpt) = &row.step.model {
                models[usize::from(row.crosses_nodes())].insert(model_digest(gpt));
            }
            let recomputed = &mut recomputed[usize::from(row.crosses_nodes())];
            if !recomputed.contains(&row.step.recompute) {
                recomputed.push(row.step.recompute);
            }
            hardware.insert(row.profile.name().to_owned());
        }
        let [recomputed_within_a_node, recomputed_across_nodes] = recomputed;
        let [models_within_a_node, models_across_nodes] = models;
        IntervalModel {
            provenance,
            hardware,
            models_within_a_node,
            models_across_nodes,
            recomputed_within_a_node,
            recomputed_across_nodes,
            by_row: BootstrapFit::of(rows, fitted, by_row),
            by_model: BootstrapFit::of(rows, fitted, by_model),
            log_size_ranges,
        }
    }

    /// Distance of a step from the box of measured sizes, in octaves.
    fn distance_octaves(&self, step: &TrainingStep, mesh: Mesh) -> f64 {
        let sizes = log_sizes(step, mesh).into_iter().flatten();
        let square = |(range, size): (&[f64; 2], f64)| {
            (range[0] - size).max(size - range[1]).max(0.0).powi(2)
        };
        self.log_size_ranges.iter().zip(sizes).map(square).sum::<f64>().sqrt()
    }

    /// Whether a profile is one of the measured hardware: a preset with its own numbers, except for the network's
    /// efficiency, which is fitted.
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
        framework: &Framework,
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
        let known_recompute = recomputed.contains(&step.recompute);
        let known_model = models.contains(&model_digest(gpt));
        let fit = if known_recompute && known_model { &self.by_row } else { &self.by_model };
        let draw = |ratios: &Coefficients| {
            let drawn: Coefficients = std::array::from_fn(|index| fitted[index] * ratios[index]);
            let work = if across {
                let file = with_network_efficiency(profile.file(), drawn[NETWORK]);
                StepWork::from_file(step, mesh, &file)?
            } else {
                work.clone()
            };
            Some((work, Framework::from_coefficients(&drawn)))
        };
        let draws: Vec<(StepWork, Framework)> = fit.draws.iter().filter_map(draw).collect();
        let log_ratio = |step_s: f64| (step_s / predicted_s).ln();
        let log_ratios = if self.is_measured(profile) {
            draws.iter().map(|(work, framework)| log_ratio(work.step_time_s(framework))).collect()
        } else {
            let mut random = SplitMix64::new(SEED);
            let mut draw_elsewhere = |index: usize| {
                let (work, framework) = draws.get(index % draws.len().max(1))?;
                let (framework, step_error) =
                    draw_hardware_errors(framework, profile, across, &mut random);
                Some(log_ratio(work.step_time_s(&framework)) + step_error)
            };
            (0..HARDWARE_DRAWS).filter_map(&mut draw_elsewhere).collect::<Vec<f64>>()
        };
        let residuals = match (known_recompute, across) {
            (true, true) => fit.across_nodes.as_slice(),
            (true, false) => &fit.within_a_node,
            // No step with this recomputation was measured here: take the wider residuals of the two kinds.
            (false, _) => wider(&fit.within_a_node, &fit.across_nodes),
        };
        let scale = error_scale(NEAR_OCTAVES + self.distance_octaves(step, mesh));
        let interval = prediction_interval(&log_ratios, residuals, scale);
        Some(interval.map(|logarithm| predicted_s * logarithm.exp()))
    }
}

/// The list of residuals with the larger mean size.
fn wider<'a>(a: &'a [f64], b: &'a [f64]) -> &'a [f64] {
    let mean = |residuals: &[f64]| {
        residuals.iter().map(|residual| residual.abs()).sum::<f64>() / residuals.len().max(1) as f64
    };
    if mean(a) > mean(b) { a } else { b }
}

/// Draws the framework's factors on hardware that the fit did not see, and an error of its steps.
fn draw_hardware_errors(
    framework: &Framework,
    profile: &Profile,
    across: bool,
    random: &mut SplitMix64,
) -> (Framework, f64) {
    let file = profile.file();
    let links =
        if across { &file.links.inter_node.relative_error } else { &file.links.relative_error };
    let mut draw = |error: &RelativeError| draw_error(error, random);
    let framework = Framework {
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
/// Only in a program that was built with a damaged file.
pub fn shipped_interval_model() -> Result<IntervalModel, Defects> {
    const TEXT: &str = include_str!("../../data/fits/gpt-a100.json");
    json::read(TEXT).map_err(Defects::single)
}
