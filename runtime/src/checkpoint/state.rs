//! `state.json`: everything of a checkpoint that is no tensor.

use std::path::Path;

use narrows_plan::json;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Context, Zero};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::{CheckpointError, CheckpointFault};
use super::{Checkpoint, FORMAT_VERSION};
use crate::data::Cursor;
use crate::optimizer::Optimizer;

const FORMAT_PREFIX: &str = "narrows-checkpoint/";

/// What a checkpoint was made under. For people: nothing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointOrigin {
    /// The devices.
    pub mesh: Mesh,
    /// The work of a step.
    pub workload: Workload,
    /// Whether moments were sharded.
    pub zero: Zero,
}

impl From<Context> for CheckpointOrigin {
    fn from(context: Context) -> CheckpointOrigin {
        let Context { mesh, workload, zero, .. } = context;
        CheckpointOrigin { mesh, workload, zero }
    }
}

/// The file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RunState {
    format: String,
    pub step: u64,
    pub seed: u64,
    pub model: ModelName,
    pub cursor: Cursor,
    pub optimizer: HyperParameters,
    pub made_under: Option<CheckpointOrigin>,
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
            format: format(),
            step: checkpoint.step,
            seed: checkpoint.seed,
            model: ModelName {
                name: model.name.clone(),
                fingerprint: checkpoint.model_fingerprint.clone(),
            },
            cursor: checkpoint.cursor.clone(),
            optimizer: HyperParameters::of(&checkpoint.optimizer),
            made_under: checkpoint.origin,
        }
    }

    /// That the checkpoint is of this model, whatever the model is called.
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

/// The optimizer's hyper-parameters, under the names they have in [`Optimizer`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HyperParameters {
    peak_learning_rate: ExactF64,
    warm_up_steps: u64,
    total_steps: u64,
    final_fraction: ExactF64,
    beta1: ExactF64,
    beta2: ExactF64,
    epsilon: ExactF64,
    weight_decay: ExactF64,
    clip_norm: ExactF64,
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
        }
    }

    pub fn optimizer(&self) -> Optimizer {
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
        }
    }
}

/// Any f64, bit by bit. JSON has no infinity, and a norm that is never clipped at is one: what is
/// not finite is written as text.
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
        #[serde(untagged, expecting = "a number, or \"inf\", \"-inf\" or \"NaN\"")]
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

/// The format that is written.
pub(super) fn format() -> String {
    format!("{FORMAT_PREFIX}{FORMAT_VERSION}")
}

/// Reads a JSON file of a checkpoint. Its format is looked at first: in a later one, fields may be
/// others.
pub(super) fn read_json<T: DeserializeOwned>(
    path: &Path,
    bytes: &[u8],
) -> Result<T, CheckpointError> {
    let refuse = |fault| CheckpointError::new(path, fault);
    let field =
        |field: String, problem: String| refuse(CheckpointFault::InvalidField { field, problem });
    let value: serde_json::Value = serde_json::from_slice(bytes)
        .map_err(|error| field(".".into(), format!("is not JSON: {error}")))?;
    let written = value.get("format").and_then(|format| format.as_str());
    let version = written.and_then(|format| format.strip_prefix(FORMAT_PREFIX));
    match version.and_then(|version| version.parse().ok()) {
        Some(FORMAT_VERSION) if written == Some(&format()) => {}
        Some(found) if found > FORMAT_VERSION => {
            return Err(refuse(CheckpointFault::NewerFormat { found }));
        }
        _ => {
            let found = match value.get("format") {
                None => "nothing".into(),
                Some(other) => {
                    format!("`{}`", other.to_string().chars().take(60).collect::<String>())
                }
            };
            return Err(refuse(CheckpointFault::UnknownFormat { found }));
        }
    }
    json::read_value(&mut serde_json::Deserializer::from_slice(bytes)).map_err(|defect| {
        let path = if defect.field.is_empty() { ".".into() } else { defect.field };
        field(path, defect.problem)
    })
}
