//! `manifest.json`: the files of a checkpoint. It is written last, so that its presence implies theirs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error::{CheckpointError, CheckpointFault};
use super::format::{
    MANIFEST, MODEL, OPTIMIZER, SHARDS_VERSION, STATE, format_field, is_shard, parse_json,
};
use crate::digest::sha256;
use crate::error::RunError;
use crate::process_group::StorageUse;

/// Larger than any manifest or state.
const JSON_BYTES_MAX: u64 = 1 << 20;

/// Contents of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    files: BTreeMap<String, FileEntry>,
    /// Whether the checksums of all files have been verified, so that reading a file does not compute its checksum again.
    #[serde(skip)]
    is_verified: bool,
}

/// Size and checksum of a file when it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub bytes: u64,
    pub sha256: String,
}

impl Manifest {
    /// The manifest of these files and of a state with this format.
    pub fn new(format: &str, mut files: BTreeMap<String, FileEntry>, state: FileEntry) -> Manifest {
        files.insert(STATE.to_owned(), state);
        Manifest { format: format.to_owned(), files, is_verified: false }
    }

    /// Whether the checkpoint is one of shards.
    pub fn is_of_shards(&self) -> bool {
        self.format == format_field(SHARDS_VERSION)
    }

    /// Whether another manifest has the same files.
    pub fn has_files_of(&self, other: &Manifest) -> bool {
        (&self.format, &self.files) == (&other.format, &other.files)
    }

    /// Names of the files.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
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
        let required: &[&str] =
            if manifest.is_of_shards() { &[STATE] } else { &[MODEL, OPTIMIZER, STATE] };
        let is_known =
            |name: &str| required.contains(&name) || (manifest.is_of_shards() && is_shard(name));
        if let Some(other) = manifest.files.keys().find(|name| !is_known(name)) {
            return field_error(other, "is not a file of a checkpoint");
        }
        if let Some(name) = required.iter().find(|name| !manifest.files.contains_key(**name)) {
            return field_error(name, "is missing");
        }
        for (name, entry) in &manifest.files {
            let path = folder.join(name);
            let actual = regular_file_bytes(&path)?;
            if actual != entry.bytes {
                let fault = CheckpointFault::LengthMismatch { expected: entry.bytes, actual };
                return Err(CheckpointError::new(&path, fault));
            }
        }
        Ok(manifest)
    }

    /// Verifies the checksums of the files that are this process's part: of all in a run of one process. The files of the
    /// result count as verified, which is true only where every process of the group has verified its part.
    pub fn verify_part(
        self,
        folder: &Path,
        storage: &StorageUse,
    ) -> Result<Manifest, CheckpointError> {
        self.part(storage).try_for_each(|file| self.verify_file(folder, file, storage))?;
        Ok(Manifest { is_verified: true, ..self })
    }

    /// Names of the files that are this process's part.
    pub fn part(&self, storage: &StorageUse) -> impl Iterator<Item = &str> {
        let part =
            storage.group().map(|group| (group.rank() as usize, group.world_size() as usize));
        let (rank, world_size) = part.unwrap_or((0, 1));
        self.files().skip(rank).step_by(world_size)
    }

    /// Verifies the checksum of one of the files, which is read in parts.
    pub fn verify_file(
        &self,
        folder: &Path,
        name: &str,
        storage: &StorageUse,
    ) -> Result<(), CheckpointError> {
        if self.is_verified {
            return Ok(());
        }
        let path = folder.join(name);
        let actual = sha256_of(&path, storage)?;
        let expected = self.files.get(name).map(|entry| entry.sha256.clone()).unwrap_or_default();
        match actual == expected {
            true => Ok(()),
            false => {
                let fault = CheckpointFault::ChecksumMismatch { expected, actual };
                Err(CheckpointError::new(&path, fault))
            }
        }
    }

    /// Reads one of the files, and verifies its checksum.
    pub fn read_file(&self, folder: &Path, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = folder.join(name);
        let bytes = read_regular(&path, if name == STATE { JSON_BYTES_MAX } else { u64::MAX })?;
        if self.is_verified {
            return Ok(bytes);
        }
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

/// Bytes that are hashed at once.
const HASH_CHUNK: usize = 1 << 20;

/// SHA-256 of a file, in hexadecimal digits.
fn sha256_of(path: &Path, storage: &StorageUse) -> Result<String, CheckpointError> {
    let unreadable = || CheckpointError::unreadable(path);
    let (mut file, mut hash) = (File::open(path).map_err(unreadable())?, Sha256::new());
    let mut buffer = vec![0; HASH_CHUNK];
    loop {
        check_run(path, storage)?;
        match file.read(&mut buffer).map_err(unreadable())? {
            0 => return Ok(hex::encode(hash.finalize())),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// Checks that no other process has ended the run while this one reads a file.
pub(super) fn check_run(path: &Path, storage: &StorageUse) -> Result<(), CheckpointError> {
    let ended = |error| CheckpointError::new(path, RunError::Cluster(error).into());
    storage.check("reading a checkpoint").map_err(ended)
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
