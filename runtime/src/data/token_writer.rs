//! Writing token files.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::error::{DataError, DataFault};
use super::header::{TokenFileHeader, TokenFileLayout, TokenWidth, TokenizerId};
use crate::atomic_file::AtomicFile;

/// Tokens that are encoded at once.
const CHUNK_TOKENS: usize = 16 << 10;

/// Properties of a token file that are known before its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFileInfo {
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// Id of the token between documents.
    pub end_of_text: Option<u32>,
    /// The tokenizer.
    pub tokenizer: TokenizerId,
}

impl TokenFileInfo {
    /// A file whose tokens are bytes.
    pub fn bytes() -> TokenFileInfo {
        TokenFileInfo { vocabulary: 256, end_of_text: None, tokenizer: TokenizerId::bytes() }
    }
}

/// A token file that is being written. It appears under its name when it is
/// [finished](TokenWriter::finish); if it is dropped before, nothing remains.
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    file: AtomicFile,
    header: TokenFileHeader,
    checksum: Sha256,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Starts a file. An existing file of this name is replaced at the end.
    ///
    /// # Errors
    /// When the folder cannot be written to, or the path exists and is not a regular file.
    pub fn create(path: &Path, info: TokenFileInfo) -> Result<TokenWriter, DataError> {
        let TokenFileInfo { vocabulary, end_of_text, tokenizer } = info;
        let header = TokenFileHeader {
            layout: TokenFileLayout::Narrows,
            width: TokenWidth::narrowest_for(vocabulary),
            token_count: 0,
            vocabulary: Some(vocabulary),
            end_of_text,
            checksum: None,
            tokenizer: Some(tokenizer),
        };
        let unwritable = |source| DataError::new(path, unwritable(source));
        let mut file = AtomicFile::create_long(path).map_err(unwritable)?;
        // A placeholder: count and checksum are known at the end.
        file.write(&header.encode()).map_err(unwritable)?;
        let (path, checksum) = (path.to_path_buf(), Sha256::new());
        Ok(TokenWriter { path, file, header, checksum, bytes: vec![] })
    }

    /// The temporary name until the file is [finished](TokenWriter::finish).
    pub fn temporary_path(&self) -> &Path {
        self.file.temporary_path()
    }

    /// Number of tokens written so far.
    pub fn token_count(&self) -> u64 {
        self.header.token_count
    }

    /// Appends tokens.
    ///
    /// # Errors
    /// When an id is not below the vocabulary, or the disk is full.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            self.push_chunk(chunk).map_err(|fault| DataError::new(&self.path, fault))?;
        }
        Ok(())
    }

    fn push_chunk(&mut self, tokens: &[u32]) -> Result<(), DataFault> {
        let vocabulary = self.header.vocabulary.unwrap_or(u32::MAX);
        if let Some(index) = tokens.iter().position(|token| *token >= vocabulary) {
            let position = self.header.token_count + index as u64;
            let token = tokens[index];
            return Err(DataFault::OutOfVocabulary { position, offset: 0, token, vocabulary });
        }
        self.bytes.clear();
        match self.header.width {
            // Lossless: the width was chosen for the vocabulary, and every id is below it.
            TokenWidth::U16 => {
                tokens.iter().for_each(|t| self.bytes.extend((*t as u16).to_le_bytes()))
            }
            TokenWidth::U32 => tokens.iter().for_each(|t| self.bytes.extend(t.to_le_bytes())),
        }
        self.checksum.update(&self.bytes);
        self.file.write(&self.bytes).map_err(unwritable)?;
        self.header.token_count += tokens.len() as u64;
        Ok(())
    }

    /// Writes the header, flushes the file to the disk, and gives it its name.
    ///
    /// # Errors
    /// When flushing or renaming fails; an existing file of that name is then unchanged.
    pub fn finish(self) -> Result<TokenFileHeader, DataError> {
        let TokenWriter { path, file, mut header, checksum, .. } = self;
        header.checksum = Some(checksum.finalize().into());
        file.finish(&header.encode())
            .map_err(|source| DataError::new(&path, unwritable(source)))?;
        Ok(header)
    }
}

fn unwritable(source: io::Error) -> DataFault {
    DataFault::Io { action: "written", source }
}
