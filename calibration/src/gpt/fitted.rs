//! Which steps [`FRAMEWORK`](super::FRAMEWORK) was fitted to, so that none of them is called predicted.
//!
//! The rows lie beside the repository and not in it; `data/fits/gpt-a100-rows.txt` has a digest of
//! each: of the model's sizes, the mesh, the workload, and which twentieth its time lies in,
//!
//! ```text
//! ⌊ln t / ln 1.05⌋
//! ```
//! so that a time which somebody rounded, by less than 5 %, lies in the same one or in its neighbour. What
//! rows do not say and somebody assumed is not in the digests: it stands above them, as the [`FitConditions`] of
//! that part of the fit.

use std::collections::HashMap;
use std::sync::LazyLock;

use narrows_plan::Mesh;
use narrows_plan::strategy::Recompute;
use sha2::{Digest, Sha256};

use crate::measurements::{TrainedModel, TrainingStep};
use narrows_cost_model::profile::{Profile, preset};

const ROWS: &str = include_str!("../../data/fits/gpt-a100-rows.txt");

/// Times no further apart than this are those of one row.
pub const APART: f64 = 0.05;

/// What rows do not say of themselves, as the fit assumed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitConditions {
    /// The name of a preset.
    pub hardware: String,
    /// What the backward pass computed again.
    pub recompute: Recompute,
    /// Rows of the embedding.
    pub vocabulary: u64,
}

impl FitConditions {
    /// From a heading of the digests: the three, with blanks between.
    fn read(line: &str) -> Option<FitConditions> {
        let mut words = line.split_whitespace();
        let hardware = words.next()?.to_owned();
        let recompute = match words.next()? {
            "none" => Recompute::None,
            "block" => Recompute::Block,
            _ => return None,
        };
        Some(FitConditions { hardware, recompute, vocabulary: words.next()?.parse().ok()? })
    }

    /// As the heading of digests, and in messages.
    pub fn words(&self) -> [String; 3] {
        let recompute = if self.recompute == Recompute::None { "none" } else { "block" };
        [self.hardware.clone(), recompute.to_owned(), self.vocabulary.to_string()]
    }

    /// Whether a step is looked at on the terms of the fit, on the same hardware above all.
    pub fn hold(&self, step: &TrainingStep, profile: &Profile) -> bool {
        let TrainedModel::Gpt(gpt) = step.model else { return false };
        let own = preset(&self.hardware);
        own.is_ok_and(|own| own.fingerprint() == profile.fingerprint())
            && step.recompute == self.recompute
            && gpt.vocabulary == self.vocabulary
    }
}

/// Which twentieth a time lies in.
fn twentieth(time_s: f64) -> i64 {
    (time_s.ln() / APART.ln_1p()).floor() as i64
}

/// What tells a measured step from all others; `None` when the step is no GPT's.
pub fn digest(step: &TrainingStep, mesh: Mesh, measured_s: f64) -> Option<String> {
    digest_of(step, mesh, twentieth(measured_s))
}

fn digest_of(step: &TrainingStep, mesh: Mesh, twentieth: i64) -> Option<String> {
    let TrainedModel::Gpt(gpt) = step.model else { return None };
    let (Mesh { tensor, pipeline, data }, work) = (mesh, step.workload);
    let (batch, length, micro) = (work.global_batch, work.sequence_length, work.micro_batch);
    let sizes = [gpt.layers, gpt.hidden, gpt.heads, tensor, pipeline, data, batch, length, micro];
    let digest = Sha256::digest(format!("{sizes:?} {twentieth}").as_bytes());
    Some(digest[..6].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The terms on which the constants were fitted to this step, whose time may have been rounded; `None`
/// where they were not.
pub fn fitted_to(
    step: &TrainingStep,
    mesh: Mesh,
    measured_s: f64,
) -> Option<&'static FitConditions> {
    static KNOWN: LazyLock<HashMap<&str, FitConditions>> = LazyLock::new(known);
    let middle = twentieth(measured_s);
    let mut near = [middle, middle.saturating_sub(1), middle.saturating_add(1)].into_iter();
    near.find_map(|twentieth| KNOWN.get(digest_of(step, mesh, twentieth)?.as_str()))
}

/// Every digest, with the heading above it.
fn known() -> HashMap<&'static str, FitConditions> {
    let mut known = HashMap::new();
    let mut terms = None;
    for line in ROWS.lines() {
        if let Some(heading) = FitConditions::read(line) {
            terms = Some(heading);
        } else if let Some(terms) = &terms {
            known.insert(line, terms.clone());
        }
    }
    known
}
