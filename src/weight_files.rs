//! Folders of weights: reading checkpoints and other formats, and writing the files beside the weights.

use std::io;
use std::path::{Path, PathBuf};

use narrows_plan::model::Model;
use narrows_runtime::interchange::{WeightFormat, WeightsError, import_weights, write_weights};
use narrows_runtime::session::ModelTensors;
use narrows_runtime::{AtomicFolder, checkpoint};

use crate::checkpoint_folder::last_complete;
use crate::errors::{CommandResult, Failure, Problem};
use crate::output::{write_atomically, write_failure};

/// The weights of a checkpoint, of the last checkpoint of a run, or in another format.
///
/// # Errors
/// Files that cannot be read or do not fit the model.
pub fn read_weights(path: &Path, model: &Model) -> CommandResult<ModelTensors> {
    let folder = if checkpoint::is_checkpoint(path) {
        Some(path.to_path_buf())
    } else if path.is_dir() {
        last_complete(path, "the weights are those of")?
    } else {
        None
    };
    match folder {
        Some(folder) => Ok(checkpoint::load(&folder, model).map_err(Failure::checkpoint)?.weights),
        None => Ok(import_weights(path, model).map_err(Failure::weights)?.weights),
    }
}

/// A folder of weights that appears under its name when all of its files are written, and not at all where one cannot be.
pub struct WeightsFolder(AtomicFolder);

impl WeightsFolder {
    /// Starts a folder that will be `target`, whose parents are created.
    ///
    /// # Errors
    /// A folder that cannot be written into.
    pub fn create(target: &Path) -> CommandResult<WeightsFolder> {
        AtomicFolder::create(target).map(WeightsFolder).map_err(|error| unwritable(target, &error))
    }

    /// Writes the weights of a model. Returns the path that they have in the end.
    ///
    /// # Errors
    /// A model for which the format has no names, and files that cannot be written.
    pub fn write_weights(
        &self,
        model: &Model,
        weights: &ModelTensors,
        format: WeightFormat,
    ) -> CommandResult<PathBuf> {
        match write_weights(self.0.path(), model, weights, format) {
            Ok(written) => Ok(self.0.final_path(&written)),
            Err(error) => {
                let path = self.0.final_path(&error.path);
                Err(Failure::weights(WeightsError { path, ..error }))
            }
        }
    }

    /// Writes a file beside the weights. Returns the path that it has in the end.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_text(&self, name: &str, text: &str) -> CommandResult<PathBuf> {
        let file = self.0.path().join(name);
        let path = self.0.final_path(&file);
        write_atomically(&file, text.as_bytes()).map_err(|error| unwritable(&path, &error))?;
        Ok(path)
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// A name that is in use by now.
    pub fn finish(self) -> CommandResult<()> {
        let target = self.0.final_path(self.0.path());
        self.0.finish().map_err(|error| unwritable(&target, &error))
    }
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
    write_failure(&path.display().to_string(), error)
}
