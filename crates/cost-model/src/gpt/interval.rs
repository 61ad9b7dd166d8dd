//! The interval of a GPT's step, from the fit's draws and residuals.
//!
//! Residuals are those of steps of the same kind, within a node or across nodes (a "Mondrian"
//! prediction, as conformal prediction calls it): the network makes steps less certain by more than the
//! draws of its one number say. Their scale grows with the distance in octaves from the box of
//! sizes that were measured; the rows themselves are not needed, and lie beside the repository.

use narrows_plan::{Defect, Defects, Mesh};
use serde::{Deserialize, Serialize};

use super::fit::{Numbers, Rows, framework, numbers, with_network};
use super::{Counted, Framework};
use crate::interval::{Bootstrap, around, thinned};
use crate::measured::{Step, Subject};
use crate::price::shapes::{NEAR, scale};
use crate::profile::{Profile, Provenance};

/// More residuals than these are thinned out.
const RESIDUALS_MAX: usize = 99;

/// How certain a framework is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Certainty {
    /// Where it comes from.
    pub provenance: Provenance,
    /// Every draw's numbers over those of the fit, in the order of [`NAMES`](super::fit::NAMES).
    pub draws: Vec<Numbers>,
    /// ln(measured / predicted) of steps that the fit had not seen, on one node.
    pub within_a_node: Vec<f64>,
    /// The same on several nodes.
    pub across_nodes: Vec<f64>,
    /// The smallest and the largest logarithm, base two, of each of a step's sizes.
    pub sizes: Vec<[f64; 2]>,
}

/// Width, blocks, tokens of a sequence and of a microbatch, and the mesh.
fn sizes(step: &Step, mesh: Mesh) -> Option<[f64; 7]> {
    let Subject::Gpt(gpt) = step.model else { return None };
    let tokens = step.workload.micro_batch * step.workload.sequence_length;
    let (Mesh { tensor, pipeline, data }, length) = (mesh, step.workload.sequence_length);
    let sizes = [gpt.hidden, gpt.layers, length, tokens, tensor, pipeline, data];
    Some(sizes.map(|size| (size as f64).log2()))
}

impl Certainty {
    /// From the rows that `fitted` was fitted to.
    pub fn of(
        rows: &Rows,
        fitted: &Numbers,
        bootstrap: &Bootstrap<Numbers>,
        provenance: Provenance,
    ) -> Certainty {
        let over = |draw: &Numbers| std::array::from_fn(|index| draw[index] / fitted[index]);
        let of = |across: bool| {
            let own =
                bootstrap.residuals.iter().filter(|(row, _)| rows.rows()[*row].across() == across);
            thinned(own.map(|(_, residual)| *residual).collect(), RESIDUALS_MAX)
        };
        let mut ranges = vec![[f64::INFINITY, f64::NEG_INFINITY]; 7];
        for row in rows.rows() {
            let sizes = sizes(row.step, row.mesh).into_iter().flatten();
            for (range, size) in ranges.iter_mut().zip(sizes) {
                *range = [range[0].min(size), range[1].max(size)];
            }
        }
        Certainty {
            provenance,
            draws: bootstrap.draws.iter().map(over).collect(),
            within_a_node: of(false),
            across_nodes: of(true),
            sizes: ranges,
        }
    }

    /// How far a step lies outside of what was measured, in octaves.
    fn outside(&self, step: &Step, mesh: Mesh) -> f64 {
        let sizes = sizes(step, mesh).into_iter().flatten();
        let beyond = |(range, size): (&[f64; 2], f64)| {
            (range[0] - size).max(size - range[1]).max(0.0).powi(2)
        };
        self.sizes.iter().zip(sizes).map(beyond).sum::<f64>().sqrt()
    }

    /// The step's 90 % interval in seconds; `None` when the step is no GPT's.
    pub fn interval_s(
        &self,
        step: &Step,
        mesh: Mesh,
        profile: &Profile,
        own: &Framework,
    ) -> Option<[f64; 2]> {
        let fitted = numbers(own, profile);
        let counted = Counted::new(step, mesh, profile)?;
        let predicted_s = counted.step_s(own);
        let across = mesh.devices() > profile.devices_per_node();
        let drawn = |factors: &Numbers| {
            let drawn: Numbers = std::array::from_fn(|index| fitted[index] * factors[index]);
            let other = if across {
                Counted::of(step, mesh, &with_network(profile.file(), drawn[8]))?
            } else {
                counted.clone()
            };
            Some((other.step_s(&framework(&drawn)) / predicted_s).ln())
        };
        let draws: Vec<f64> = self.draws.iter().filter_map(drawn).collect();
        let residuals = if across { &self.across_nodes } else { &self.within_a_node };
        let scale = scale(NEAR + self.outside(step, mesh));
        Some(around(&draws, residuals, scale).map(|logarithm| predicted_s * logarithm.exp()))
    }
}

/// The certainty of [`FRAMEWORK`](super::FRAMEWORK).
///
/// # Errors
/// None, unless the program was built with a damaged file.
pub fn certainty() -> Result<Certainty, Defects> {
    const TEXT: &str = include_str!("../../../../data/fits/gpt-a100.json");
    serde_json::from_str(TEXT)
        .map_err(|error| Defect::new("", format!("data/fits/gpt-a100.json: {error}")).into())
}
