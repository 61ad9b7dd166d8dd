//! Folders of weights: reading checkpoints and other formats, and writing the files beside the weights.

use std::fs;
use std::io;
use std::path::Path;

use narrows_plan::model::Model;
use narrows_runtime::checkpoint;
use narrows_runtime::interchange::import_weights;
use narrows_runtime::session::ModelTensors;

use crate::errors::{CommandResult, Failure, Problem};

/// The weights of a checkpoint, of the last checkpoint of a run, or in another format.
///
/// # Errors
/// Files that cannot be read or do not fit the model.
pub fn read_weights(path: &Path, model: &Model) -> CommandResult<ModelTensors> {
    let folder = if checkpoint::is_checkpoint(path) {
        Some(path.to_path_buf())
    } else if path.is_dir() {
        checkpoint::latest(path).map_err(Failure::checkpoint)?
    } else {
        None
    };
    match folder {
        Some(folder) => Ok(checkpoint::load(&folder, model).map_err(Failure::checkpoint)?.weights),
        None => Ok(import_weights(path, model).map_err(Failure::weights)?.weights),
    }
}

/// Creates a folder for weights.
///
/// # Errors
/// A folder that cannot be created.
pub fn create_folder(path: &Path) -> CommandResult<()> {
    fs::create_dir_all(path).map_err(|error| unwritable(path, &error))
}

/// Writes a file beside the weights.
///
/// # Errors
/// A file that cannot be written.
pub fn write_text(path: &Path, text: &str) -> CommandResult<()> {
    fs::write(path, text).map_err(|error| unwritable(path, &error))
}

/// Rejects an output that exists, unless it is an empty folder.
///
/// # Errors
/// Such an output.
pub fn require_new_folder(path: &Path) -> CommandResult<()> {
    let is_occupied = match path.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => path.exists(),
    };
    if is_occupied {
        let message = format!("`{}` exists and is not an empty folder", path.display());
        return Err(Failure::input(Problem::new("--output", message).hint("a new folder")));
    }
    Ok(())
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    Failure::input(Problem::new(path.display().to_string(), format!("cannot be written: {error}")))
}
