//! `state.json`: the state of a run without its tensors.

use std::num::NonZeroU64;

use narrows_plan::model::Model;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::contents::{Checkpoint, CheckpointOrigin};
use super::error::CheckpointFault;
use super::format::{SHARDS_VERSION, WHOLE_VERSION, format_field};
use crate::data::Cursor;
use crate::gemm_dtype::GemmDtype;
use crate::learning_rate::{LearningRateSchedule, StepCount};
use crate::loro::{FactorRateScale, Loro};
use crate::optimizer::{DecayedWeights, Optimizer};
use crate::serde_default::is_default;
use crate::train::{EvaluationHistory, Trainer};

/// Contents of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunState {
    pub format: String,
    pub step: u64,
    pub seed: u64,
    pub model: ModelName,
    pub cursor: Cursor,
    pub optimizer: HyperParameters,
    /// Absent where operands of GEMMs were not rounded.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gemm_dtype: GemmDtype,
    #[serde(rename = "made_under")]
    pub origin: Option<CheckpointOrigin>,
    /// Absent in runs without evaluations.
    #[serde(default, skip_serializing_if = "is_default")]
    pub evaluations: EvaluationHistory,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelName {
    name: String,
    pub fingerprint: String,
}

impl RunState {
    pub fn new(checkpoint: &Checkpoint, model: &Model) -> RunState {
        RunState {
            format: format_field(WHOLE_VERSION),
            step: checkpoint.step,
            seed: checkpoint.seed,
            model: ModelName {
                name: model.name.clone(),
                fingerprint: checkpoint.model_fingerprint.clone(),
            },
            cursor: checkpoint.cursor.clone(),
            optimizer: HyperParameters::of(&checkpoint.optimizer),
            gemm_dtype: checkpoint.gemm_dtype,
            origin: checkpoint.origin,
            evaluations: checkpoint.evaluations.clone(),
        }
    }

    /// The state of a run whose tensors are in shards.
    pub fn of_trainer(trainer: &Trainer, model: &Model, seed: u64) -> RunState {
        RunState {
            format: format_field(SHARDS_VERSION),
            step: trainer.session().steps(),
            seed,
            model: ModelName { name: model.name.clone(), fingerprint: model.fingerprint() },
            cursor: trainer.cursor(),
            optimizer: HyperParameters::of(trainer.optimizer()),
            gemm_dtype: trainer.session().gemm_dtype().unwrap_or_default(),
            origin: Some(trainer.session().program().context.into()),
            evaluations: trainer.evaluations().clone(),
        }
    }

    /// Checks that the checkpoint belongs to this model, regardless of the model's name.
    pub fn check_model(&self, model: &Model) -> Result<(), CheckpointFault> {
        let fingerprint = model.fingerprint();
        if self.model.fingerprint == fingerprint {
            return Ok(());
        }
        let describe = |name: &str, fingerprint: &str| format!("`{name}` ({fingerprint})");
        Err(CheckpointFault::ModelMismatch {
            checkpoint: describe(&self.model.name, &self.model.fingerprint),
            model: describe(&model.name, &fingerprint),
        })
    }
}

/// Hyper-parameters, under the names of the fields of [`Optimizer`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HyperParameters {
    #[serde(deserialize_with = "non_negative")]
    peak_learning_rate: ExactF64,
    warm_up_steps: u64,
    total_steps: u64,
    #[serde(deserialize_with = "non_negative")]
    final_fraction: ExactF64,
    #[serde(deserialize_with = "below_one")]
    beta1: ExactF64,
    #[serde(deserialize_with = "below_one")]
    beta2: ExactF64,
    #[serde(deserialize_with = "non_negative")]
    epsilon: ExactF64,
    #[serde(deserialize_with = "non_negative")]
    weight_decay: ExactF64,
    #[serde(deserialize_with = "positive_or_infinite")]
    clip_norm: ExactF64,
    // Fields that earlier versions did not write are absent where they have the value of those versions.
    #[serde(default, skip_serializing_if = "is_default")]
    schedule: LearningRateSchedule,
    #[serde(default, skip_serializing_if = "is_default")]
    step_count: StepCount,
    #[serde(default, skip_serializing_if = "is_default")]
    decayed: DecayedWeights,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loro: Option<LoroSettings>,
}

/// Settings of LORO, under the names of the fields of [`Loro`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LoroSettings {
    exact_every: NonZeroU64,
    refresh_every: u64,
    /// `null` for the rank over the width of the hidden state.
    rate_scale: Option<ExactF64>,
}

impl From<Loro> for LoroSettings {
    fn from(loro: Loro) -> LoroSettings {
        let Loro { exact_every, refresh_every, rate_scale } = loro;
        LoroSettings {
            exact_every,
            refresh_every,
            rate_scale: match rate_scale {
                FactorRateScale::RankOverHidden => None,
                FactorRateScale::Constant(scale) => Some(ExactF64(scale)),
            },
        }
    }
}

impl From<LoroSettings> for Loro {
    fn from(settings: LoroSettings) -> Loro {
        let LoroSettings { exact_every, refresh_every, rate_scale } = settings;
        let rate_scale = rate_scale
            .map_or(FactorRateScale::RankOverHidden, |scale| FactorRateScale::Constant(scale.0));
        Loro { exact_every, refresh_every, rate_scale }
    }
}

impl HyperParameters {
    fn of(optimizer: &Optimizer) -> HyperParameters {
        HyperParameters {
            peak_learning_rate: ExactF64(optimizer.peak_learning_rate),
            warm_up_steps: optimizer.warm_up_steps,
            total_steps: optimizer.total_steps,
            final_fraction: ExactF64(optimizer.final_fraction),
            beta1: ExactF64(optimizer.beta1),
            beta2: ExactF64(optimizer.beta2),
            epsilon: ExactF64(optimizer.epsilon),
            weight_decay: ExactF64(optimizer.weight_decay),
            clip_norm: ExactF64(optimizer.clip_norm),
            schedule: optimizer.schedule,
            step_count: optimizer.step_count,
            decayed: optimizer.decayed,
            loro: optimizer.loro.map(LoroSettings::from),
        }
    }

    pub fn to_optimizer(self) -> Optimizer {
        Optimizer {
            peak_learning_rate: self.peak_learning_rate.0,
            warm_up_steps: self.warm_up_steps,
            total_steps: self.total_steps,
            final_fraction: self.final_fraction.0,
            beta1: self.beta1.0,
            beta2: self.beta2.0,
            epsilon: self.epsilon.0,
            weight_decay: self.weight_decay.0,
            clip_norm: self.clip_norm.0,
            schedule: self.schedule,
            step_count: self.step_count,
            decayed: self.decayed,
            loro: self.loro.map(Loro::from),
        }
    }
}

/// An f64 that round-trips bit for bit. Infinity, the clipping norm of runs without clipping, is not
/// valid JSON, so non-finite values are written as strings.
#[derive(Clone, Copy)]
struct ExactF64(f64);

impl Serialize for ExactF64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for ExactF64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ExactF64, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number, \"inf\", \"-inf\" or \"NaN\"")]
        enum ExactF64Json {
            Number(f64),
            Text(String),
        }
        match ExactF64Json::deserialize(deserializer)? {
            ExactF64Json::Number(number) => Ok(ExactF64(number)),
            ExactF64Json::Text(text) => text
                .parse()
                .map(ExactF64)
                .map_err(|_| D::Error::custom(format!("`{text}` is not a number"))),
        }
    }
}

/// A number for which `is_valid`, which `expected` says in words.
fn in_range<'de, D: Deserializer<'de>>(
    deserializer: D,
    is_valid: impl Fn(f64) -> bool,
    expected: &str,
) -> Result<ExactF64, D::Error> {
    let number = ExactF64::deserialize(deserializer)?;
    match is_valid(number.0) {
        true => Ok(number),
        false => Err(D::Error::custom(format!("expected {expected}, found {}", number.0))),
    }
}

fn non_negative<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ExactF64, D::Error> {
    in_range(deserializer, |number| (0.0..f64::INFINITY).contains(&number), "a non-negative number")
}

fn below_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ExactF64, D::Error> {
    in_range(deserializer, |number| (0.0..1.0).contains(&number), "a number from 0 to below 1")
}

fn positive_or_infinite<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ExactF64, D::Error> {
    in_range(deserializer, |number| number > 0.0, "a number above 0 or \"inf\"")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn hyper_parameters_outside_the_ranges_of_their_flags_are_refused() {
        let optimizer = Optimizer { clip_norm: f64::INFINITY, ..Optimizer::new(1e-3, 1, 4) };
        let written = serde_json::to_value(HyperParameters::of(&optimizer)).expect("JSON");
        let read = |value: Value| serde_json::from_value::<HyperParameters>(value);
        assert_eq!(read(written.clone()).expect("as written").to_optimizer(), optimizer);
        for (field, value, message) in [
            ("peak_learning_rate", json!(-1), "expected a non-negative number, found -1"),
            ("beta1", json!(1), "expected a number from 0 to below 1, found 1"),
            ("beta2", json!(3), "expected a number from 0 to below 1, found 3"),
            ("epsilon", json!("inf"), "expected a non-negative number, found inf"),
            ("clip_norm", json!("nan"), "expected a number above 0 or \"inf\", found NaN"),
            ("clip_norm", json!([1]), "expected a number, \"inf\", \"-inf\" or \"NaN\""),
        ] {
            let mut edited = written.clone();
            edited[field] = value;
            let error = read(edited).err().expect("a refused value").to_string();
            assert_eq!(error, message, "{field}");
        }
    }
}
