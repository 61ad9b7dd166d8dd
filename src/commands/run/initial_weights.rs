//! Initial weights of a run from a file.

use narrows_plan::model::Model;
use narrows_runtime::session::TensorKind;
use narrows_runtime::{Trainer, sha256};

use crate::args::TrainSettings;
use crate::errors::{CommandResult, Failure};
use crate::weight_files::{ModelOrigin, WeightFiles};

/// Replaces the random initial weights by those of `--init-from`, if any. Every process reads the files. Returns a digest of
/// the weights where other processes compare it, else nothing.
pub fn load_initial_weights(
    trainer: &mut Trainer,
    model: &Model,
    training: &TrainSettings,
) -> CommandResult<String> {
    let Some(path) = &training.init_from else { return Ok(String::new()) };
    let files = WeightFiles::find(path)?;
    let weights = files.read_initial(model)?;
    files.require_same_function(model, ModelOrigin::Run)?;
    let session = trainer.session_mut();
    session
        .load_tensors(TensorKind::Weights, &weights)
        .map_err(|error| Failure::execution(&error))?;
    if training.process.is_none() {
        return Ok(String::new());
    }
    let digest = |elements: &Vec<f32>| {
        sha256(&elements.iter().flat_map(|element| element.to_le_bytes()).collect::<Vec<u8>>())
    };
    let digests: Vec<u8> = weights.values().flat_map(digest).collect();
    Ok(hex::encode(sha256(&digests)))
}
