//! Initial weights of a run from a file.

use narrows_plan::model::{self, Model};
use narrows_runtime::session::TensorKind;
use narrows_runtime::{Trainer, sha256};

use crate::args::TrainSettings;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::weight_files::WeightFiles;
use crate::{input, output};

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
    require_same_function(&files, model)?;
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

/// Compares the model with that of the file beside the weights, where there is one: rejects another function, and warns of one
/// to which weights are adapted on purpose, and of a file that cannot be read.
fn require_same_function(files: &WeightFiles, model: &Model) -> CommandResult<()> {
    let Some(file) = files.model_file() else { return Ok(()) };
    let (name, text) = input::text(file.as_os_str())?;
    let stored = match model::read(&name, &text) {
        Ok(stored) => stored,
        Err(defects) => {
            let defect = &defects.0[0];
            output::warn(&format!(
                "--init-from {name}: cannot be compared with the model of this run: {defect}"
            ));
            return Ok(());
        }
    };
    let mut problems = vec![];
    for difference in model.function_differences(&stored) {
        let ([own, stored], field) = (&difference.values, &difference.field);
        let message = format!("is {stored}, and {own} in the model {} of this run", model.name);
        match difference.is_adaptation {
            true => output::warn(&format!(
                "--init-from {name}: {field}: {message}: the run adapts the weights to it"
            )),
            false => {
                let message = format!("{message}: the weights would compute another function");
                let hint = format!("--model {name}, the model of these weights");
                problems.push(Problem::new(&name, message).field(field).hint(hint));
            }
        }
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Failure { status: ExitStatus::BadInput, problems }),
    }
}
