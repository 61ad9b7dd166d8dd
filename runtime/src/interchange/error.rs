//! Errors of weights in other formats.

use std::io;
use std::path::{Path, PathBuf};

use narrows_plan::{Defect, Defects};

/// The defects of a file or folder of weights. The field of a defect is the name of a tensor, or empty.
#[derive(Debug, thiserror::Error)]
#[error("{}: {defects}", path.display())]
pub struct WeightsError {
    /// The file or folder.
    pub path: PathBuf,
    /// Every defect.
    pub defects: Defects,
    /// Kind of the error, where the operating system reported one.
    pub io: Option<io::ErrorKind>,
}

impl WeightsError {
    pub(super) fn new(path: &Path, defects: impl Into<Defects>) -> WeightsError {
        WeightsError { path: path.to_path_buf(), defects: defects.into(), io: None }
    }

    /// A defect of the whole file or folder.
    pub(super) fn of_file(path: &Path, problem: impl Into<String>, hint: &str) -> WeightsError {
        WeightsError::new(path, Defect::new("", problem).hint(hint))
    }

    /// Converts an error of the operating system; `action` is a past participle.
    pub(super) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |error| {
            let defect = Defect::new("", format!("cannot be {action}: {error}"));
            WeightsError { io: Some(error.kind()), ..WeightsError::new(&path, defect) }
        }
    }
}
