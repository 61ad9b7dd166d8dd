//! Files beside the tensors of a checkpoint, with which other programs load it: the model, its configuration and its tokenizer.
//!
//! | file | contents |
//! |---|---|
//! | `model.json` | the model, exactly |
//! | `config.json` | the model for the class of Hugging Face or CoLA that has it; absent where no class has |
//! | others | the tokenizer, as the run was given it |
//!
//! A run that resumes copies the tokenizer and reads no other of them, and the manifest does not list them.

use std::io;
use std::path::Path;

use narrows_plan::model::{ConfigClass, Model, ModelFile};

use super::error::CheckpointError;
use super::folder::Retention;
use super::storage::write_json;
use super::tensors::HashingWriter;

/// Name of the file with the model.
pub const MODEL_FILE: &str = "model.json";

/// Name of the file with the configuration of a published class.
pub const CONFIG_FILE: &str = "config.json";

/// A file of a tokenizer, which is copied into checkpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerFile {
    /// Name, without folders.
    pub name: String,
    /// Contents.
    pub contents: Vec<u8>,
}

/// Files that are written beside a checkpoint, and earlier checkpoints that remain.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions<'a> {
    /// Earlier checkpoints that remain.
    pub retention: Retention,
    /// Files of the tokenizer.
    pub tokenizer: &'a [TokenizerFile],
}

impl<T: Into<Retention>> From<T> for SaveOptions<'_> {
    fn from(retention: T) -> Self {
        SaveOptions { retention: retention.into(), tokenizer: &[] }
    }
}

/// Writes the files into the folder of a checkpoint that becomes `target`, and flushes them to the disk.
pub(super) fn write(
    (folder, target): (&Path, &Path),
    model: &Model,
    tokenizer: &[TokenizerFile],
) -> Result<(), CheckpointError> {
    let failed = |name: &str| CheckpointError::io(&target.join(name), "written");
    let file = ModelFile::from(model);
    write_json(&folder.join(MODEL_FILE), &file).map_err(failed(MODEL_FILE))?;
    let class = if model.is_low_rank() { ConfigClass::Cola } else { ConfigClass::Llama };
    if let Ok(config) = model.hugging_face_config(class) {
        write_json(&folder.join(CONFIG_FILE), &config).map_err(failed(CONFIG_FILE))?;
    }
    for TokenizerFile { name, contents } in tokenizer {
        write_bytes(&folder.join(name), contents).map_err(failed(name))?;
    }
    Ok(())
}

fn write_bytes(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = HashingWriter::create(path)?;
    file.write(contents)?;
    file.finish().map(drop)
}
