//! The bytes of a token file, read at any position.
//!
//! Files are read and not mapped into memory: a map of a file that another program truncates ends the process with
//! SIGBUS, whereas a read returns an error, after which a run can still save its state.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

use super::error::DataFault;
use crate::digest::Sha256Digest;

/// Bytes that are hashed at once.
const HASH_CHUNK: usize = 1 << 20;

/// Bytes of a token file.
#[derive(Debug)]
pub(super) struct TokenBytes {
    source: Source,
    /// Length when the file was opened.
    length: u64,
}

#[derive(Debug)]
enum Source {
    /// The lock is held for one read, which moves the position of the file.
    File(Mutex<File>),
    Memory(Vec<u8>),
}

impl TokenBytes {
    /// Opens a regular file.
    pub fn open(path: &Path) -> Result<TokenBytes, DataFault> {
        let unreadable = |source: io::Error| DataFault::Io { action: "read", source };
        // Checked before opening, because opening a pipe waits for a writer.
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if !metadata.is_file() {
            return Err(DataFault::NotRegularFile);
        }
        let file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        Ok(TokenBytes { source: Source::File(Mutex::new(file)), length })
    }

    /// Bytes in memory.
    pub fn of_memory(bytes: Vec<u8>) -> TokenBytes {
        let length = bytes.len() as u64;
        TokenBytes { source: Source::Memory(bytes), length }
    }

    /// Length when the file was opened.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Fills a buffer with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`DataFault::Truncated`] when the bytes lie within the [length](TokenBytes::length) and the file has become
    /// shorter; otherwise an error of the operating system.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), DataFault> {
        let result = match &self.source {
            Source::File(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(target))
            }
            Source::Memory(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let found = bytes.get(start..).and_then(|rest| rest.get(..target.len()));
                match found {
                    Some(found) => {
                        target.copy_from_slice(found);
                        Ok(())
                    }
                    None => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
        };
        result.map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => DataFault::Truncated { opened: self.length },
            _ => DataFault::Io { action: "read", source },
        })
    }

    /// SHA-256 of a range.
    ///
    /// # Errors
    /// As [`read`](TokenBytes::read).
    pub fn sha256(&self, range: Range<u64>) -> Result<Sha256Digest, DataFault> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; HASH_CHUNK.min((range.end - range.start) as usize)];
        let mut offset = range.start;
        while offset < range.end {
            let count = (range.end - offset).min(HASH_CHUNK as u64) as usize;
            self.read(offset, &mut buffer[..count])?;
            hash.update(&buffer[..count]);
            offset += count as u64;
        }
        Ok(hash.finalize().into())
    }
}
