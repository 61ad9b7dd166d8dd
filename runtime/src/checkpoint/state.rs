//! `state.json`: everything of a checkpoint that is no tensor.

use std::path::Path;

use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Context, Zero};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::{CheckpointError, Fault};
use super::{Checkpoint, FORMAT_VERSION};
use crate::data::Cursor;
use crate::optimizer::Optimizer;

const FORMAT_PREFIX: &str = "narrows-checkpoint/";

/// What a checkpoint was made under. For people: nothing depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MadeUnder {
    /// The devices.
    pub mesh: Mesh,
    /// The work of a step.
    pub workload: Workload,
    /// Whether moments were sharded.
    pub zero: Zero,
}

impl From<Context> for MadeUnder {
    fn from(context: Context) -> MadeUnder {
        let Context { mesh, workload, zero, .. } = context;
        MadeUnder { mesh, workload, zero }
    }
}

/// The file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    format: String,
    pub step: u64,
    pub seed: u64,
    pub model: ModelName,
    pub cursor: Cursor,
    pub optimizer: Figures,
    pub made_under: Option<MadeUnder>,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelName {
    name: String,
    pub fingerprint: String,
}

impl State {
    pub fn of(checkpoint: &Checkpoint, model: &Model) -> State {
        State {
            format: format(),
            step: checkpoint.step,
            seed: checkpoint.seed,
            model: ModelName {
                name: model.name.clone(),
                fingerprint: checkpoint.model_fingerprint.clone(),
            },
            cursor: checkpoint.cursor.clone(),
            optimizer: Figures::of(&checkpoint.optimizer),
            made_under: checkpoint.made_under,
        }
    }

    /// That the checkpoint is of this model, whatever the model is called.
    pub fn is_of(&self, model: &Model) -> Result<(), Fault> {
        let fingerprint = model.fingerprint();
        if self.model.fingerprint == fingerprint {
            return Ok(());
        }
        let describe = |name: &str, fingerprint: &str| format!("`{name}` ({fingerprint})");
        Err(Fault::OtherModel {
            checkpoint: describe(&self.model.name, &self.model.fingerprint),
            model: describe(&model.name, &fingerprint),
        })
    }
}

/// The optimizer's hyper-parameters, under the names they have in [`Optimizer`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figures {
    peak_learning_rate: Figure,
    warm_up_steps: u64,
    total_steps: u64,
    final_fraction: Figure,
    beta1: Figure,
    beta2: Figure,
    epsilon: Figure,
    weight_decay: Figure,
    clip_norm: Figure,
}

impl Figures {
    fn of(optimizer: &Optimizer) -> Figures {
        Figures {
            peak_learning_rate: Figure(optimizer.peak_learning_rate),
            warm_up_steps: optimizer.warm_up_steps,
            total_steps: optimizer.total_steps,
            final_fraction: Figure(optimizer.final_fraction),
            beta1: Figure(optimizer.beta1),
            beta2: Figure(optimizer.beta2),
            epsilon: Figure(optimizer.epsilon),
            weight_decay: Figure(optimizer.weight_decay),
            clip_norm: Figure(optimizer.clip_norm),
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
struct Figure(f64);

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Figure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Figure, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number, or \"inf\", \"-inf\" or \"NaN\"")]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(number) => Ok(Figure(number)),
            Written::Text(text) => text
                .parse()
                .map(Figure)
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
    let field = |field: String, problem: String| refuse(Fault::Field { field, problem });
    let value: serde_json::Value = serde_json::from_slice(bytes)
        .map_err(|error| field(".".into(), format!("is not JSON: {error}")))?;
    let written = value.get("format").and_then(|format| format.as_str());
    let version = written.and_then(|format| format.strip_prefix(FORMAT_PREFIX));
    match version.and_then(|version| version.parse().ok()) {
        Some(FORMAT_VERSION) if written == Some(&format()) => {}
        Some(found) if found > FORMAT_VERSION => return Err(refuse(Fault::Newer { found })),
        _ => {
            let found = match value.get("format") {
                None => "nothing".into(),
                Some(other) => {
                    format!("`{}`", other.to_string().chars().take(60).collect::<String>())
                }
            };
            return Err(refuse(Fault::Foreign { found }));
        }
    }
    let deserializer = &mut serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(deserializer)
        .map_err(|error| field(error.path().to_string(), error.inner().to_string()))
}
