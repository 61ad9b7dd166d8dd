//! What can be wrong with checkpoints: which file, where in it, what, and what to try.

use std::io;
use std::path::{Path, PathBuf};

use super::FORMAT_VERSION;
use crate::error::RunError;

/// Something wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}{fault}", path.display(), prefix(fault))]
pub struct CheckpointError {
    /// The file, or the folder when it is about the whole of it.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: CheckpointFault,
}

/// What is wrong, as a sentence that follows the file's name and the place in it.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointFault {
    /// What it was to be put into, or taken from, cannot be reached.
    #[error("{_0}")]
    Session(Box<RunError>),
    /// The system refused.
    #[error("cannot be {action}: {source}")]
    Io {
        /// What was tried, as a participle.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Another run holds the folder.
    #[error("another run keeps its checkpoints there, and has not ended")]
    Locked,
    /// A file of a checkpoint that is not there.
    #[error("is missing")]
    Missing,
    /// A folder, a pipe or a device where a file should be.
    #[error("is not a plain file")]
    NotRegularFile,
    /// More bytes than such a file can have.
    #[error("has {found} bytes, and no such file has more than {bytes_max}")]
    TooLong {
        /// Bytes that are there.
        found: u64,
        /// The most there can be.
        bytes_max: u64,
    },
    /// A field of a JSON file makes no sense.
    #[error("{problem}")]
    InvalidField {
        /// The path to the field; `.` is the file itself.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Not a checkpoint's file.
    #[error("{found} is no format of checkpoints")]
    UnknownFormat {
        /// What stands in the place of the format.
        found: String,
    },
    /// A checkpoint of a later version of this program.
    #[error("the checkpoint has format {found}, and this program knows {FORMAT_VERSION}")]
    NewerFormat {
        /// Its version.
        found: u64,
    },
    /// Another number of bytes than the manifest says.
    #[error("the file has {found} bytes, and the manifest says {expected}")]
    LengthMismatch {
        /// What the manifest says.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// Not the bytes that were written.
    #[error("the file has SHA-256 {found}, and the manifest says {expected}")]
    ChecksumMismatch {
        /// What the manifest says.
        expected: String,
        /// What the bytes have.
        found: String,
    },
    /// Not a safetensors file.
    #[error("{problem}")]
    InvalidHeader {
        /// What is wrong with its header.
        problem: String,
    },
    /// A tensor that is not as the model has it.
    #[error("{fault}")]
    Tensor {
        /// Its name in the file, or its logical name when there is no file.
        tensor: String,
        /// What is wrong with it.
        fault: TensorFault,
    },
    /// A checkpoint of another model.
    #[error("the checkpoint is of the model {checkpoint}, and this is {model}")]
    ModelMismatch {
        /// Name and fingerprint in the checkpoint.
        checkpoint: String,
        /// Name and fingerprint of the model at hand.
        model: String,
    },
}

/// What is wrong with a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// The model has it, the checkpoint does not.
    #[error("is missing")]
    Missing,
    /// The checkpoint has it, the model does not.
    #[error("is none of the model's")]
    Unknown,
    /// Not in single precision.
    #[error("has elements of type {found}, and not F32")]
    NotF32 {
        /// Its type.
        found: String,
    },
    /// Not of the model's size.
    #[error("has the shape {found:?}, and the model's is {expected:?}")]
    ShapeMismatch {
        /// The model's.
        expected: Vec<u64>,
        /// The checkpoint's.
        found: Vec<u64>,
    },
    /// Not of the model's size.
    #[error("has {found} elements, and the model's has {expected}")]
    ElementCountMismatch {
        /// The model's.
        expected: u64,
        /// The checkpoint's.
        found: u64,
    },
}

fn prefix(fault: &CheckpointFault) -> String {
    fault.location().map_or(String::new(), |place| format!("{place}: "))
}

impl CheckpointError {
    /// A fault of a file or a folder.
    pub fn new(path: &Path, fault: CheckpointFault) -> CheckpointError {
        CheckpointError { path: path.to_path_buf(), fault }
    }

    /// Turns what the system says into an error about `path`.
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| {
            let fault = match source.kind() {
                io::ErrorKind::NotFound if action == "read" => CheckpointFault::Missing,
                _ => CheckpointFault::Io { action, source },
            };
            CheckpointError { path, fault }
        }
    }
}

impl From<RunError> for CheckpointFault {
    fn from(error: RunError) -> CheckpointFault {
        CheckpointFault::Session(Box::new(error))
    }
}

impl CheckpointFault {
    /// Where in the file; `None` for the whole of it.
    pub fn location(&self) -> Option<String> {
        match self {
            CheckpointFault::InvalidField { field, .. } if field == "." => None,
            CheckpointFault::InvalidField { field, .. } => Some(format!("field `{field}`")),
            CheckpointFault::UnknownFormat { .. } | CheckpointFault::NewerFormat { .. } => {
                Some("field `format`".into())
            }
            CheckpointFault::InvalidHeader { .. } => Some("header".into()),
            CheckpointFault::Tensor { tensor, .. } => Some(format!("tensor `{tensor}`")),
            CheckpointFault::ModelMismatch { .. } => Some("field `model`".into()),
            _ => None,
        }
    }

    /// Whether the files are not as they were written, so that an older checkpoint may do.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            CheckpointFault::Missing
                | CheckpointFault::NotRegularFile
                | CheckpointFault::TooLong { .. }
                | CheckpointFault::InvalidField { .. }
                | CheckpointFault::LengthMismatch { .. }
                | CheckpointFault::ChecksumMismatch { .. }
                | CheckpointFault::InvalidHeader { .. }
        )
    }

    /// What to try.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            CheckpointFault::Missing => Some(
                "the folder of one checkpoint, such as `step-00000100`; if it is that, the \
                 checkpoint is incomplete: copy it again, or resume from an older one",
            ),
            CheckpointFault::NotRegularFile
            | CheckpointFault::TooLong { .. }
            | CheckpointFault::InvalidField { .. }
            | CheckpointFault::LengthMismatch { .. }
            | CheckpointFault::ChecksumMismatch { .. }
            | CheckpointFault::InvalidHeader { .. } => Some(
                "the checkpoint is damaged or was edited: copy it again, or resume from an older \
                 one",
            ),
            CheckpointFault::Locked => {
                Some("another folder, or the same one when that run has ended")
            }
            CheckpointFault::UnknownFormat { .. } => {
                Some("a folder that `narrows run --checkpoint-dir` wrote")
            }
            CheckpointFault::NewerFormat { .. } => {
                Some("the version of this program that wrote it, or a later one")
            }
            CheckpointFault::Tensor { .. } | CheckpointFault::ModelMismatch { .. } => {
                Some("the model that the checkpoint was made with")
            }
            CheckpointFault::Io { .. } | CheckpointFault::Session(_) => None,
        }
    }

    pub(super) fn tensor(tensor: impl Into<String>, fault: TensorFault) -> CheckpointFault {
        CheckpointFault::Tensor { tensor: tensor.into(), fault }
    }
}
