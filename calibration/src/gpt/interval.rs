//! The interval of a GPT's step, from the fit's draws and residuals.
//!
//! Residuals are those of steps of the same kind, within a node or across nodes, of a model that others of its
//! steps of that kind were measured of, recomputing the same, or of another one (a "Mondrian" prediction, as conformal prediction calls it):
//! the network, and a model that nobody saw, make steps less certain by more than the draws of some
//! numbers say. For the former rows are drawn, for the latter whole models. Their scale grows with the
//! distance in octaves from the box of sizes that were measured; the rows themselves are not needed, and lie beside the
//! repository.
//!
//! All of that is of the hardware and the hosts that were fitted to. On others a draw has besides an error of that
//! profile's products, passes and links, and one of its steps:
//!
//! ```text
//! T_b = step(factors · exp(e_b,class))  ·  exp(e_b,step)
//! ```

use std::collections::BTreeSet;

use narrows_plan::strategy::Recompute;
use narrows_plan::{Defect, Defects, Mesh};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::fit::{Coefficients, StepRows, framework, numbers, with_network};
use super::{Framework, StepCounts};
use crate::measurements::{GptModel, TrainedModel, TrainingStep};
use narrows_cost_model::interval::{Bootstrap, SplitMix64, around, error_drawn, thinned};
use narrows_cost_model::price::shapes::{NEAR, scale};
use narrows_cost_model::profile::{Profile, Provenance, RelativeError, preset};

/// More residuals than these are thinned out.
const RESIDUALS_MAX: usize = 99;
/// Draws of other hardware's errors.
const HARDWARE_DRAWS: usize = 400;
const SEED: u64 = 0x6770_7400;

/// How certain a framework is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntervalModel {
    /// Where it comes from.
    pub provenance: Provenance,
    /// The profiles of the hardware that was measured.
    pub hardware: BTreeSet<String>,
    /// Digests of the models that were measured within a node.
    pub models_within_a_node: BTreeSet<String>,
    /// The same of those across nodes.
    pub models_across_nodes: BTreeSet<String>,
    /// What was recomputed in steps within a node.
    pub recomputed_within_a_node: Vec<Recompute>,
    /// The same across nodes.
    pub recomputed_across_nodes: Vec<Recompute>,
    /// Of steps of these models that recompute the same.
    pub known: BootstrapFit,
    /// Of other steps.
    pub other: BootstrapFit,
    /// The smallest and the largest logarithm, base two, of each of a step's sizes.
    pub sizes: Vec<[f64; 2]>,
}

/// What draws say of the rows they have not seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootstrapFit {
    /// Every draw's numbers over those of the fit, in the order of [`NAMES`](super::fit::NAMES).
    pub draws: Vec<Coefficients>,
    /// ln(measured / predicted) of steps that the fit had not seen, on one node.
    pub within_a_node: Vec<f64>,
    /// The same on several nodes.
    pub across_nodes: Vec<f64>,
}

impl BootstrapFit {
    fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        bootstrap: &Bootstrap<Coefficients>,
    ) -> BootstrapFit {
        let over = |draw: &Coefficients| std::array::from_fn(|index| draw[index] / fitted[index]);
        let of = |across: bool| {
            let own =
                bootstrap.residuals.iter().filter(|(row, _)| rows.rows()[*row].across() == across);
            thinned(own.map(|(_, residual)| *residual).collect(), RESIDUALS_MAX)
        };
        let draws = bootstrap.draws.iter().map(over).collect();
        BootstrapFit { draws, within_a_node: of(false), across_nodes: of(true) }
    }
}

/// What tells a model from others; its sizes themselves are the rows'.
fn digest(gpt: &GptModel) -> String {
    let text = format!("{} {} {}", gpt.layers, gpt.hidden, gpt.heads);
    let digest = Sha256::digest(text.as_bytes());
    digest[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Width, blocks, tokens of a sequence and of a microbatch, and the mesh.
fn sizes(step: &TrainingStep, mesh: Mesh) -> Option<[f64; 7]> {
    let TrainedModel::Gpt(gpt) = step.model else { return None };
    let tokens = step.workload.micro_batch * step.workload.sequence_length;
    let (Mesh { tensor, pipeline, data }, length) = (mesh, step.workload.sequence_length);
    let sizes = [gpt.hidden, gpt.layers, length, tokens, tensor, pipeline, data];
    Some(sizes.map(|size| (size as f64).log2()))
}

impl IntervalModel {
    /// From the rows that `fitted` was fitted to, and draws of them by row and by model.
    pub fn of(
        rows: &StepRows,
        fitted: &Coefficients,
        by_row: &Bootstrap<Coefficients>,
        by_model: &Bootstrap<Coefficients>,
        provenance: Provenance,
    ) -> IntervalModel {
        let mut ranges = vec![[f64::INFINITY, f64::NEG_INFINITY]; 7];
        let (mut hardware, mut models) = (BTreeSet::new(), [BTreeSet::new(), BTreeSet::new()]);
        let mut recomputed = [vec![], vec![]];
        for row in rows.rows() {
            let sizes = sizes(row.step, row.mesh).into_iter().flatten();
            for (range, size) in ranges.iter_mut().zip(sizes) {
                *range = [range[0].min(size), range[1].max(size)];
            }
            if let TrainedModel::Gpt(gpt) = &row.step.model {
                models[usize::from(row.across())].insert(digest(gpt));
            }
            let recomputed = &mut recomputed[usize::from(row.across())];
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
            known: BootstrapFit::of(rows, fitted, by_row),
            other: BootstrapFit::of(rows, fitted, by_model),
            sizes: ranges,
        }
    }

    /// How far a step lies outside of what was measured, in octaves.
    fn outside(&self, step: &TrainingStep, mesh: Mesh) -> f64 {
        let sizes = sizes(step, mesh).into_iter().flatten();
        let beyond = |(range, size): (&[f64; 2], f64)| {
            (range[0] - size).max(size - range[1]).max(0.0).powi(2)
        };
        self.sizes.iter().zip(sizes).map(beyond).sum::<f64>().sqrt()
    }

    /// Whether a profile is of hardware that was measured, besides the network's share, which is fitted. One that
    /// is merely called so is not.
    fn is_measured(&self, profile: &Profile) -> bool {
        let own = preset(profile.name()).ok().filter(|own| self.hardware.contains(own.name()));
        own.is_some_and(|own| {
            let share = own.file().links.inter_node.efficiency;
            with_network(profile.file(), share) == *own.file()
        })
    }

    /// The step's 90 % interval in seconds; `None` when the step is no GPT's.
    pub fn interval_s(
        &self,
        step: &TrainingStep,
        mesh: Mesh,
        profile: &Profile,
        own: &Framework,
    ) -> Option<[f64; 2]> {
        let TrainedModel::Gpt(gpt) = &step.model else { return None };
        let fitted = numbers(own, profile);
        let counted = StepCounts::new(step, mesh, profile)?;
        let predicted_s = counted.step_s(own);
        let across = mesh.devices() > profile.devices_per_node();
        let (models, recomputed) = match across {
            true => (&self.models_across_nodes, &self.recomputed_across_nodes),
            false => (&self.models_within_a_node, &self.recomputed_within_a_node),
        };
        let recomputed = recomputed.contains(&step.recompute);
        let known = recomputed && models.contains(&digest(gpt));
        let held = if known { &self.known } else { &self.other };
        let drawn = |factors: &Coefficients| {
            let drawn: Coefficients = std::array::from_fn(|index| fitted[index] * factors[index]);
            let other = if across {
                StepCounts::of(step, mesh, &with_network(profile.file(), drawn[8]))?
            } else {
                counted.clone()
            };
            Some((other, framework(&drawn)))
        };
        let draws: Vec<(StepCounts, Framework)> = held.draws.iter().filter_map(drawn).collect();
        let logarithm = |step_s: f64| (step_s / predicted_s).ln();
        let logarithms = if self.is_measured(profile) {
            draws.iter().map(|(counted, own)| logarithm(counted.step_s(own))).collect()
        } else {
            let mut random = SplitMix64::new(SEED);
            let mut one = |index: usize| {
                let (counted, own) = draws.get(index % draws.len().max(1))?;
                let (own, step) = elsewhere(own, profile, across, &mut random);
                Some(logarithm(counted.step_s(&own)) + step)
            };
            (0..HARDWARE_DRAWS).filter_map(&mut one).collect::<Vec<f64>>()
        };
        let residuals = match (recomputed, across) {
            (true, true) => held.across_nodes.clone(),
            (true, false) => held.within_a_node.clone(),
            // Nobody measured such a step here: it is as uncertain as the worse of both kinds.
            (false, _) => wider(&held.within_a_node, &held.across_nodes).to_vec(),
        };
        let scale = scale(NEAR + self.outside(step, mesh));
        Some(around(&logarithms, &residuals, scale).map(|logarithm| predicted_s * logarithm.exp()))
    }
}

/// Of two lists of residuals that which is spread further.
fn wider<'a>(a: &'a [f64], b: &'a [f64]) -> &'a [f64] {
    let mean = |residuals: &[f64]| {
        residuals.iter().map(|residual| residual.abs()).sum::<f64>() / residuals.len().max(1) as f64
    };
    if mean(a) > mean(b) { a } else { b }
}

/// The framework on hardware that nothing was fitted on, and an error of its steps.
fn elsewhere(
    own: &Framework,
    profile: &Profile,
    across: bool,
    random: &mut SplitMix64,
) -> (Framework, f64) {
    let file = profile.file();
    let links =
        if across { &file.links.inter_node.relative_error } else { &file.links.relative_error };
    let mut drawn = |error: &RelativeError| error_drawn(error, random);
    let own = Framework {
        product_factor: own.product_factor * drawn(&file.gemm.relative_error).exp(),
        pass_factor: own.pass_factor * drawn(&file.passes.relative_error).exp(),
        collective_factor: own.collective_factor * drawn(links).exp(),
        ..*own
    };
    let step = file.executors.eager.step_error.as_ref().map_or(0.0, drawn);
    (own, step)
}

/// The certainty of [`FRAMEWORK`](super::FRAMEWORK).
///
/// # Errors
/// None, unless the program was built with a damaged file.
pub fn certainty() -> Result<IntervalModel, Defects> {
    const TEXT: &str = include_str!("../../data/fits/gpt-a100.json");
    serde_json::from_str(TEXT)
        .map_err(|error| Defect::new("", format!("data/fits/gpt-a100.json: {error}")).into())
}
