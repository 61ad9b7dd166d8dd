//! Folders of weights: reading checkpoints and other formats, and writing the files beside the weights.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use narrows_plan::model::{self, Model};
use narrows_runtime::checkpoint::{self, CONFIG_FILE, MODEL_FILE};
use narrows_runtime::interchange::import_weights;
use narrows_runtime::session::ModelTensors;

use crate::checkpoint_folder::last_complete;
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::input;
use crate::output;

/// Name of the configuration in the folder of a Nanotron checkpoint.
pub const NANOTRON_CONFIG_FILE: &str = "model_config.json";

/// Origin of a model that weights are read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelOrigin {
    /// The flag `--model` of a command that uses the weights as they are, or the file beside them.
    Argument,
    /// A run that begins with the weights of `--init-from`, and trains them further.
    Run,
}

/// Weights of a model on disk.
#[derive(Debug)]
pub enum WeightFiles {
    /// The folder of a checkpoint.
    Checkpoint(PathBuf),
    /// A file or folder in another format.
    Other(PathBuf),
}

impl WeightFiles {
    /// A checkpoint, the last checkpoint of a run, or weights in another format.
    ///
    /// # Errors
    /// Standard input, a folder that cannot be read, and checkpoints of which none is complete.
    pub fn find(path: &Path) -> CommandResult<WeightFiles> {
        if input::is_stdin(path.as_os_str()) {
            let message = "weights are read at any position, which a stream cannot be";
            let hint = "the name of a file or folder, such as `./-` for one called `-`";
            return Err(Failure::input(Problem::new("-", message).hint(hint)));
        }
        let last = match path.is_dir() && !checkpoint::is_checkpoint(path) {
            true => last_complete(path, "the weights are those of")?,
            false => None,
        };
        Ok(match last {
            Some(last) => WeightFiles::Checkpoint(last),
            None if is_without_files(path) => {
                let problem = Problem::new(path.display().to_string(), "has no checkpoint");
                let hint = "a checkpoint folder or a file of weights";
                return Err(Failure::input(problem.hint(hint)));
            }
            None if checkpoint::is_checkpoint(path) => WeightFiles::Checkpoint(path.to_path_buf()),
            None => WeightFiles::Other(path.to_path_buf()),
        })
    }

    /// The folder or the file.
    pub fn path(&self) -> &Path {
        let (WeightFiles::Checkpoint(path) | WeightFiles::Other(path)) = self;
        path
    }

    /// A file beside the weights, if it exists.
    pub fn companion(&self, name: &str) -> Option<PathBuf> {
        Some(self.folder()?.join(name)).filter(|file| file.is_file())
    }

    /// The folder of the weights.
    pub fn folder(&self) -> Option<&Path> {
        let path = self.path();
        if path.is_dir() { Some(path) } else { path.parent() }
    }

    /// The file of the model beside the weights, if there is one.
    pub fn model_file(&self) -> Option<PathBuf> {
        let names = [MODEL_FILE, CONFIG_FILE, NANOTRON_CONFIG_FILE];
        names.into_iter().find_map(|name| self.companion(name))
    }

    /// The model that `--model` names, or else the one that lies beside the weights.
    ///
    /// # Errors
    /// A model that cannot be read, or that neither has.
    pub fn model(&self, argument: Option<&OsStr>) -> CommandResult<Model> {
        if let Some(argument) = argument {
            return input::model(argument);
        }
        match self.model_file() {
            Some(file) => input::model(file.as_os_str()),
            None => {
                let (message, hint) = match self.path().exists() {
                    true => {
                        let message = format!("has no {MODEL_FILE} and no {CONFIG_FILE}");
                        (message, "--model, the model of these weights")
                    }
                    false => {
                        ("does not exist".to_owned(), "a checkpoint folder or a file of weights")
                    }
                };
                let problem = Problem::new(self.path().display().to_string(), message);
                Err(Failure::input(problem.hint(hint)))
            }
        }
    }

    /// Reads the weights.
    ///
    /// # Errors
    /// Files that cannot be read or do not fit the model, and a model of another function than the file beside the weights has.
    pub fn read(&self, model: &Model) -> CommandResult<ModelTensors> {
        match self {
            WeightFiles::Checkpoint(folder) => {
                checkpoint::load_weights(folder, model).map_err(Failure::checkpoint)
            }
            WeightFiles::Other(path) => {
                self.require_same_function(model, ModelOrigin::Argument)?;
                import(path, model)
            }
        }
    }

    /// Compares the model with that of the file beside the weights, where there is one: rejects another function, and warns of
    /// one that weights may be adapted to on purpose, and of a file that cannot be read.
    ///
    /// # Errors
    /// Every value with which equal weights compute another function.
    pub fn require_same_function(&self, model: &Model, origin: ModelOrigin) -> CommandResult<()> {
        let Some(file) = self.model_file() else { return Ok(()) };
        let (name, text) = input::text(file.as_os_str())?;
        let (prefix, owner, consequence) = match origin {
            ModelOrigin::Run => ("--init-from ", "of this run", "the run adapts the weights to it"),
            ModelOrigin::Argument => ("", "of --model", "the weights were not trained with it"),
        };
        let stored = match model::read(&name, &text) {
            Ok(stored) => stored,
            Err(defects) => {
                let defect = &defects.0[0];
                output::warn(&format!(
                    "{prefix}{name}: cannot be compared with the model {owner}: {defect}"
                ));
                return Ok(());
            }
        };
        let mut problems = vec![];
        for difference in model.function_differences(&stored) {
            let ([own, stored], field) = (&difference.values, &difference.field);
            let message = format!("is {stored}, and {own} in the model {} {owner}", model.name);
            if difference.is_adaptation {
                output::warn(&format!("{prefix}{name}: {field}: {message}: {consequence}"));
                continue;
            }
            let message = format!("{message}: the weights would compute another function");
            let hint = format!("--model {name}, the model of these weights");
            problems.push(Problem::new(&name, message).field(field).hint(hint));
        }
        match problems.is_empty() {
            true => Ok(()),
            false => Err(Failure { status: ExitStatus::BadInput, problems }),
        }
    }

    /// Reads the weights as the initial ones of a run. The model of a checkpoint may differ in all but its parameters.
    ///
    /// # Errors
    /// As [`read`](WeightFiles::read).
    pub fn read_initial(&self, model: &Model) -> CommandResult<ModelTensors> {
        match self {
            WeightFiles::Checkpoint(folder) => {
                checkpoint::load_initial_weights(folder, model).map_err(Failure::checkpoint)
            }
            WeightFiles::Other(path) => import(path, model),
        }
    }
}

/// Whether a folder has nothing but hidden files.
fn is_without_files(path: &Path) -> bool {
    let is_hidden = |entry: fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    path.read_dir().is_ok_and(|mut entries| entries.all(|entry| entry.is_ok_and(is_hidden)))
}

fn import(path: &Path, model: &Model) -> CommandResult<ModelTensors> {
    Ok(import_weights(path, model).map_err(Failure::weights)?.weights)
}
