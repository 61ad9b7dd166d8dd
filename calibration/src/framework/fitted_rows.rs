//! Recognises the steps of GPTs that a table was fitted to, which must not count as predicted.
//!
//! The rows are not part of the repository. `data/fits/gpt-a100-rows.txt` has a digest of each row: of the sizes of its
//! model, its mesh, its workload, and the logarithmic bin of its time t,
//!
//! ```text
//! ⌊ln t / ln 1.05⌋
//! ```
//! A time rounded by less than 5 % lies in the same bin or in a neighbouring one. Properties that the fit assumed because
//! the rows do not state them are not part of the digests; they head each section of the file as [`FitConditions`].

use std::collections::HashMap;
use std::sync::LazyLock;

use narrows_cost_model::profile::{Profile, preset};
use narrows_plan::Mesh;
use sha2::{Digest, Sha256};

use crate::measurements::{StepRecompute, TrainedModel, TrainingStep};

const ROWS: &str = include_str!("../../data/fits/gpt-a100-rows.txt");

/// The table that was fitted to the rows.
const FRAMEWORK: &str = "megatron-deepspeed";

/// Relative width of a bin of times.
const TIME_BIN: f64 = 0.05;

/// Properties that the fit assumed because the rows do not state them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitConditions {
    /// The name of a preset.
    pub hardware: String,
    /// Recomputation in the backward pass.
    pub recompute: StepRecompute,
    /// Rows of the embedding.
    pub vocabulary: u64,
}

impl FitConditions {
    /// Parses a heading of the digests: the three labels, separated by spaces.
    fn parse(line: &str) -> Option<FitConditions> {
        let mut words = line.split_whitespace();
        let hardware = words.next()?.to_owned();
        let recompute = match words.next()? {
            "none" => StepRecompute::None,
            "block" => StepRecompute::Block,
            _ => return None,
        };
        Some(FitConditions { hardware, recompute, vocabulary: words.next()?.parse().ok()? })
    }

    /// Hardware, recomputation and vocabulary, as in the heading of the digests and in messages.
    pub fn labels(&self) -> [String; 3] {
        let recompute = if self.recompute == StepRecompute::None { "none" } else { "block" };
        [self.hardware.clone(), recompute.to_owned(), self.vocabulary.to_string()]
    }

    /// Whether a step on a profile has these conditions, which include `fullrank-tp` and one chunk per stage. The profile
    /// must equal the preset, not only in name.
    pub fn apply_to(&self, step: &TrainingStep, profile: &Profile) -> bool {
        let TrainedModel::Gpt(gpt) = step.model else { return false };
        let is_fitted = step.decoder().is_some_and(|(_, framework)| framework == FRAMEWORK);
        let hardware = preset(&self.hardware);
        hardware.is_ok_and(|hardware| hardware.fingerprint() == profile.fingerprint())
            && step.recompute == self.recompute
            && step.has_fitted_sharding_and_schedule()
            && is_fitted
            && gpt.vocabulary == self.vocabulary
    }
}

/// The bin of a time.
fn time_bin(time_s: f64) -> i64 {
    (time_s.ln() / TIME_BIN.ln_1p()).floor() as i64
}

/// Identifies a measured step; `None` for a model that is not a GPT.
#[cfg(test)]
pub(super) fn row_digest(step: &TrainingStep, mesh: Mesh, measured_s: f64) -> Option<String> {
    digest(step, mesh, time_bin(measured_s))
}

fn digest(step: &TrainingStep, mesh: Mesh, time_bin: i64) -> Option<String> {
    let TrainedModel::Gpt(gpt) = step.model else { return None };
    let (Mesh { tensor, pipeline, data, .. }, work) = (mesh, step.workload);
    let (batch, length, micro) = (work.global_batch, work.sequence_length, work.micro_batch);
    let sizes = [gpt.layers, gpt.hidden, gpt.heads, tensor, pipeline, data, batch, length, micro];
    // The shipped digests depend on every byte of this text.
    let sizes = sizes.map(|size| size.to_string()).join(", ");
    let digest = Sha256::digest(format!("[{sizes}] {time_bin}").as_bytes());
    Some(hex::encode(&digest[..6]))
}

/// The conditions under which the coefficients were fitted to this step, whose time may be rounded; `None` for a step
/// that is not part of the fit.
pub(crate) fn fit_conditions_of(
    step: &TrainingStep,
    mesh: Mesh,
    measured_s: f64,
) -> Option<&'static FitConditions> {
    static KNOWN: LazyLock<HashMap<&str, FitConditions>> = LazyLock::new(known_digests);
    let bin = time_bin(measured_s);
    let mut bins = [bin, bin.saturating_sub(1), bin.saturating_add(1)].into_iter();
    bins.find_map(|bin| KNOWN.get(digest(step, mesh, bin)?.as_str()))
}

/// Every digest with the conditions of its section.
fn known_digests() -> HashMap<&'static str, FitConditions> {
    let mut known = HashMap::new();
    let mut conditions = None;
    for line in ROWS.lines() {
        if let Some(heading) = FitConditions::parse(line) {
            conditions = Some(heading);
        } else if let Some(conditions) = &conditions {
            known.insert(line, conditions.clone());
        }
    }
    known
}

#[cfg(test)]
mod tests {
    use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
    use narrows_plan::{Workload, Zero};

    use super::*;
    use crate::measurements::{GptModel, StepLinears};

    fn step() -> TrainingStep {
        let model = GptModel { layers: 24, hidden: 2048, heads: 16, vocabulary: 51_200 };
        TrainingStep {
            model: TrainedModel::Gpt(model),
            workload: Workload { global_batch: 16, sequence_length: 1024, micro_batch: 2 },
            strategy: Baseline::FullrankTp,
            recompute: StepRecompute::None,
            framework: None,
            interleaving: 1,
            norm: NormRule::Auto,
            weights: WeightRule::Any,
            zero: Zero::Off,
            overlap_tensor_collectives: false,
            linears: StepLinears::Any,
            accumulate_grad_in_fp32: None,
        }
    }

    #[test]
    fn conditions_of_the_fit_include_sharding_and_schedule() {
        let hardware = "a100-80gb-8".to_owned();
        let profile = preset(&hardware).unwrap();
        let conditions =
            FitConditions { hardware, recompute: StepRecompute::None, vocabulary: 51_200 };
        assert!(conditions.apply_to(&step(), &profile));
        for strategy in Baseline::ALL.into_iter().filter(|other| other.is_for_dense_models()) {
            let same = strategy == Baseline::FullrankTp;
            let step = TrainingStep { strategy, ..step() };
            assert_eq!(conditions.apply_to(&step, &profile), same, "{strategy:?}");
        }
        assert!(!conditions.apply_to(&TrainingStep { interleaving: 2, ..step() }, &profile));
        let selective = TrainingStep { recompute: StepRecompute::Selective, ..step() };
        assert!(!conditions.apply_to(&selective, &profile));
    }

    #[test]
    fn digests_do_not_change() {
        let step = step();
        let mesh = Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 };
        assert_eq!(time_bin(0.5), -15);
        assert_eq!(row_digest(&step, mesh, 0.5).as_deref(), Some("99c87ab439e3"));
    }
}
