//! Errors of checkpoints: the file, the location in it, the problem, and what to try.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::RunError;

/// An error of a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}{fault}", path.display(), location_prefix(fault))]
pub struct CheckpointError {
    /// The file, or the folder of the checkpoint.
    pub path: PathBuf,
    /// The problem.
    pub fault: CheckpointFault,
}

/// The problem of a checkpoint. Its message follows the path and the location.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointFault {
    /// A device or a process of the session failed.
    #[error("{_0}")]
    Session(Box<RunError>),
    /// An operation of the file system failed.
    #[error("cannot be {action}: {source}")]
    Io {
        /// The operation, as a past participle.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another run has locked the folder.
    #[error("is locked by another run that has not ended")]
    Locked,
    /// The folder or its lock file was removed or renamed while the run held the lock.
    #[error("is no longer the folder that this run has locked: {}", lock_loss(present.as_deref()))]
    LockLost {
        /// The folder with the locked file, where it has another name now.
        present: Option<PathBuf>,
    },
    /// Another process could not write its part of a checkpoint.
    #[error("process {rank} cannot write its part: {reason}")]
    OtherProcess {
        /// The rank.
        rank: u64,
        /// The error of that process, with its file.
        reason: String,
        /// Kind of the error, where the operating system of that process reported one.
        kind: Option<io::ErrorKind>,
    },
    /// A process writes into another folder than the first one, on a disk of its own.
    #[error("is not the same folder for process {rank} as for process 0")]
    NotShared {
        /// The rank.
        rank: u64,
    },
    /// A file that another process has written is not in the folder of the first process.
    #[error("has no `{file}`, which another process has written into its folder of that name")]
    ShardNotShared {
        /// Name of the file.
        file: String,
    },
    /// The file does not exist.
    #[error("is missing")]
    Missing,
    /// The path is a folder, a pipe or a device.
    #[error("is not a regular file")]
    NotRegularFile,
    /// The file is larger than such a file can be.
    #[error("has {actual} bytes, and no such file has more than {bytes_max}")]
    TooLong {
        /// Bytes of the file.
        actual: u64,
        /// Largest possible size.
        bytes_max: u64,
    },
    /// A field of a JSON file is invalid.
    #[error("{problem}")]
    InvalidField {
        /// Path of the field; `.` is the file itself.
        field: String,
        /// Reason why the field is invalid.
        problem: String,
    },
    /// The `format` field is not that of a checkpoint.
    #[error("{actual} is not the format of a checkpoint")]
    UnknownFormat {
        /// Value of the field.
        actual: String,
    },
    /// The checkpoint was written by a later version of this program.
    #[error("the checkpoint has format {actual}, and this program reads {expected}")]
    NewerFormat {
        /// Version that this program reads.
        expected: u64,
        /// Version of the checkpoint.
        actual: u64,
    },
    /// The file has another size than the manifest says.
    #[error("the file has {actual} bytes, and the manifest says {expected}")]
    LengthMismatch {
        /// Size in the manifest.
        expected: u64,
        /// Size of the file.
        actual: u64,
    },
    /// The file does not have the checksum of the manifest.
    #[error("the file has SHA-256 {actual}, and the manifest says {expected}")]
    ChecksumMismatch {
        /// Checksum in the manifest.
        expected: String,
        /// Checksum of the file.
        actual: String,
    },
    /// The file has no valid safetensors header.
    #[error("{problem}")]
    InvalidHeader {
        /// Reason why the header is invalid.
        problem: String,
    },
    /// A tensor does not fit the model.
    #[error("{fault}")]
    Tensor {
        /// Name in the file, or logical name when there is no file.
        tensor: String,
        /// The problem.
        fault: TensorFault,
    },
    /// The checkpoint belongs to another model.
    #[error("the checkpoint is of the model {checkpoint}, and this is {model}")]
    ModelMismatch {
        /// Name and fingerprint of the checkpoint's model.
        checkpoint: String,
        /// Name and fingerprint of the run's model.
        model: String,
    },
}

/// The problem of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// The checkpoint lacks a tensor of the model.
    #[error("is missing")]
    Missing,
    /// The checkpoint has a tensor that the model lacks.
    #[error("is not a tensor of the model")]
    Unknown,
    /// The tensor is not in single precision.
    #[error("has elements of type {actual}, not F32")]
    NotF32 {
        /// Type of the elements.
        actual: String,
    },
    /// The tensor has another shape than the model's.
    #[error("has the shape {actual:?}, and the model's is {expected:?}")]
    ShapeMismatch {
        /// Shape of the model's.
        expected: Vec<u64>,
        /// Shape in the checkpoint.
        actual: Vec<u64>,
    },
    /// The slices of the tensor are not each of its elements once, or lie outside of it.
    #[error("has slices that do not make up the model's tensor")]
    Incomplete,
    /// The tensor has another number of elements than the model's.
    #[error("has {actual} elements, and the model's has {expected}")]
    ElementCountMismatch {
        /// Elements of the model's.
        expected: u64,
        /// Elements of the checkpoint's.
        actual: u64,
    },
}

/// Present name of a folder whose lock is lost, in words.
fn lock_loss(present: Option<&Path>) -> String {
    match present {
        Some(present) => format!("that one is now {}", present.display()),
        None => "it, or `.narrows-lock` in it, was removed or renamed".into(),
    }
}

fn location_prefix(fault: &CheckpointFault) -> String {
    fault.location().map_or(String::new(), |location| format!("{location}: "))
}

impl CheckpointError {
    /// An error of a file or a folder.
    pub fn new(path: &Path, fault: CheckpointFault) -> CheckpointError {
        CheckpointError { path: path.to_path_buf(), fault }
    }

    /// Converts an error of the operating system; `action` is a past participle.
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| CheckpointError { path, fault: CheckpointFault::Io { action, source } }
    }

    /// Converts an error of reading a file that a checkpoint must have.
    pub(super) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| {
            let fault = match source.kind() {
                io::ErrorKind::NotFound => CheckpointFault::Missing,
                _ => CheckpointFault::Io { action: "read", source },
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
    /// Location in the file; `None` for faults of the whole file.
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

    /// Whether the checkpoint is corrupted, so that an older one may be loaded instead.
    pub fn is_corruption(&self) -> bool {
        matches!(
            self,
            CheckpointFault::Missing
                | CheckpointFault::NotRegularFile
                | CheckpointFault::TooLong { .. }
                | CheckpointFault::InvalidField { .. }
                | CheckpointFault::UnknownFormat { .. }
                | CheckpointFault::LengthMismatch { .. }
                | CheckpointFault::ChecksumMismatch { .. }
                | CheckpointFault::InvalidHeader { .. }
        )
    }

    /// Whether a process could not write because its disk or its quota is full.
    pub fn is_full_disk(&self) -> bool {
        let kind = match self {
            CheckpointFault::Io { source, .. } => Some(source.kind()),
            CheckpointFault::OtherProcess { kind, .. } => *kind,
            _ => None,
        };
        matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            CheckpointFault::Missing => Some(
                "the folder of one checkpoint, such as `step-00000100`; if this is one, its \
                 manifest.json or a file named there is lost: copy it again, or resume from an older one",
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
                Some("another folder, or the same one after that run has ended")
            }
            CheckpointFault::LockLost { .. } => Some(
                "put the folder back and resume from its last checkpoint; leave both in place while a run uses \
                 them",
            ),
            CheckpointFault::NotShared { .. } | CheckpointFault::ShardNotShared { .. } => {
                Some("a folder that all nodes share, since every process writes its part")
            }
            CheckpointFault::UnknownFormat { .. } => {
                Some("a folder that `narrows run --checkpoint-dir` wrote")
            }
            CheckpointFault::NewerFormat { .. } => {
                Some("the version of this program that wrote it, or a later one")
            }
            CheckpointFault::Tensor { .. } | CheckpointFault::ModelMismatch { .. } => Some(
                "the model that the checkpoint was made with: model.json in its folder, unless that was changed",
            ),
            CheckpointFault::Session(error) => return error.hint(),
            CheckpointFault::Io { .. } | CheckpointFault::OtherProcess { .. } => None,
        };
        hint.map(str::to_owned)
    }

    pub(super) fn tensor(tensor: impl Into<String>, fault: TensorFault) -> CheckpointFault {
        CheckpointFault::Tensor { tensor: tensor.into(), fault }
    }
}
