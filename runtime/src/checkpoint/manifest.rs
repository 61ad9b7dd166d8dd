//! `manifest.json`: the files of a checkpoint. It is written last, so that its presence implies theirs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, CheckpointFault};
use super::format::{MANIFEST, MODEL, OPTIMIZER, STATE, format_field, parse_json};
use crate::digest::sha256;

/// Larger than any manifest or state.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// Contents of the file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    files: BTreeMap<String, FileEntry>,
}

/// Size and checksum of a file when it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub bytes: u64,
    pub sha256: String,
}

impl Manifest {
    pub fn new(model: FileEntry, optimizer: FileEntry, state: FileEntry) -> Manifest {
        let files = [(MODEL, model), (OPTIMIZER, optimizer), (STATE, state)];
        let files = files.into_iter().map(|(name, entry)| (name.to_string(), entry)).collect();
        Manifest { format: format_field(), files }
    }

    /// Reads the manifest of a checkpoint, and checks that all files exist and have their sizes.
    pub fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let path = folder.join(MANIFEST);
        let manifest: Manifest = parse_json(&path, &read_regular(&path, JSON_BYTES_MAX)?)?;
        let field_error = |name: &str, problem: &str| {
            let field = format!("files.{name}");
            Err(CheckpointError::new(
                &path,
                CheckpointFault::InvalidField { field, problem: problem.into() },
            ))
        };
        let names = [MODEL, OPTIMIZER, STATE];
        if let Some(other) = manifest.files.keys().find(|name| !names.contains(&name.as_str())) {
            return field_error(other, "is not a file of a checkpoint");
        }
        for name in names {
            let Some(entry) = manifest.files.get(name) else {
                return field_error(name, "is missing");
            };
            let path = folder.join(name);
            let actual = regular_file_bytes(&path)?;
            if actual != entry.bytes {
                let fault = CheckpointFault::LengthMismatch { expected: entry.bytes, actual };
                return Err(CheckpointError::new(&path, fault));
            }
        }
        Ok(manifest)
    }

    /// Reads one of the files, and verifies its checksum.
    pub fn read_file(&self, folder: &Path, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = folder.join(name);
        let bytes = read_regular(&path, if name == STATE { JSON_BYTES_MAX } else { u64::MAX })?;
        let expected = self.files.get(name).map(|entry| entry.sha256.clone()).unwrap_or_default();
        let actual = hex::encode(sha256(&bytes));
        if actual != expected {
            return Err(CheckpointError::new(
                &path,
                CheckpointFault::ChecksumMismatch { expected, actual },
            ));
        }
        Ok(bytes)
    }
}

fn regular_file_bytes(path: &Path) -> Result<u64, CheckpointError> {
    let metadata = fs::metadata(path).map_err(CheckpointError::unreadable(path))?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(CheckpointError::new(path, CheckpointFault::NotRegularFile))
    }
}

fn read_regular(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
    let actual = regular_file_bytes(path)?;
    if actual > bytes_max {
        return Err(CheckpointError::new(path, CheckpointFault::TooLong { actual, bytes_max }));
    }
    fs::read(path).map_err(CheckpointError::unreadable(path))
}
