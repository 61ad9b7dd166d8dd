//! `manifest.json`: which files a checkpoint has. Written last, so where it is, they are.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, CheckpointFault};
use super::state::{format, read_json};
use super::{MANIFEST, MODEL, OPTIMIZER, STATE};
use crate::digest::sha256;

/// More than any manifest or state has.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// The file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    files: BTreeMap<String, FileEntry>,
}

/// What a file was when it was written.
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
        Manifest { format: format(), files }
    }

    /// The manifest of a checkpoint, all of whose files are there and as long as it says.
    pub fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let path = folder.join(MANIFEST);
        let manifest: Manifest = read_json(&path, &read_plain(&path, JSON_BYTES_MAX)?)?;
        let refuse = |name: &str, problem: &str| {
            let field = format!("files.{name}");
            Err(CheckpointError::new(
                &path,
                CheckpointFault::InvalidField { field, problem: problem.into() },
            ))
        };
        let names = [MODEL, OPTIMIZER, STATE];
        if let Some(other) = manifest.files.keys().find(|name| !names.contains(&name.as_str())) {
            return refuse(other, "no checkpoint has such a file");
        }
        for name in names {
            let Some(entry) = manifest.files.get(name) else {
                return refuse(name, "is missing");
            };
            let path = folder.join(name);
            let found = plain_length(&path)?;
            if found != entry.bytes {
                let fault = CheckpointFault::LengthMismatch { expected: entry.bytes, found };
                return Err(CheckpointError::new(&path, fault));
            }
        }
        Ok(manifest)
    }

    /// The bytes of one of its files, which are those that were written.
    pub fn open(&self, folder: &Path, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = folder.join(name);
        let bytes = read_plain(&path, if name == STATE { JSON_BYTES_MAX } else { u64::MAX })?;
        let expected = self.files.get(name).map(|entry| entry.sha256.clone()).unwrap_or_default();
        let found = hex::encode(sha256(&bytes));
        if found != expected {
            return Err(CheckpointError::new(
                &path,
                CheckpointFault::ChecksumMismatch { expected, found },
            ));
        }
        Ok(bytes)
    }
}

fn plain_length(path: &Path) -> Result<u64, CheckpointError> {
    let metadata = fs::metadata(path).map_err(CheckpointError::io(path, "read"))?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(CheckpointError::new(path, CheckpointFault::NotRegularFile))
    }
}

fn read_plain(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
    let found = plain_length(path)?;
    if found > bytes_max {
        return Err(CheckpointError::new(path, CheckpointFault::TooLong { found, bytes_max }));
    }
    fs::read(path).map_err(CheckpointError::io(path, "read"))
}
