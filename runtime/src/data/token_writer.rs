//! Writes token files.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::error::{DataError, DataFault};
use super::header::{TokenFileHeader, TokenFileLayout, TokenWidth, TokenizerId};
use crate::atomic_file::AtomicFile;

/// Tokens that are turned into bytes in one go.
const TOKENS_AT_ONCE: usize = 16 << 10;

/// What is known about tokens before the first one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFileInfo {
    /// Every id is below it.
    pub vocabulary: u32,
    /// The token between documents.
    pub end_of_text: Option<u32>,
    /// Which tokenizer makes them.
    pub tokenizer: TokenizerId,
}

impl TokenFileInfo {
    /// Bytes as tokens.
    pub fn bytes() -> TokenFileInfo {
        TokenFileInfo { vocabulary: 256, end_of_text: None, tokenizer: TokenizerId::bytes() }
    }
}

/// A token file that is being written. Nothing is seen under its name until it is
/// [finished](TokenWriter::finish), and nothing is left when it is dropped before.
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    file: AtomicFile,
    header: TokenFileHeader,
    checksum: Sha256,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Begins a file. What is there already under its name is replaced at the end.
    ///
    /// # Errors
    /// When the folder cannot be written to, or the name is that of something else than a file.
    pub fn create(path: &Path, description: TokenFileInfo) -> Result<TokenWriter, DataError> {
        let TokenFileInfo { vocabulary, end_of_text, tokenizer } = description;
        let header = TokenFileHeader {
            layout: TokenFileLayout::Narrows,
            width: TokenWidth::narrowest_for(vocabulary),
            token_count: 0,
            vocabulary: Some(vocabulary),
            end_of_text,
            checksum: None,
            tokenizer: Some(tokenizer),
        };
        let unwritable = |source| DataError::new(path, DataFault::Io { action: "written", source });
        let mut file = AtomicFile::create(path).map_err(unwritable)?;
        // Its place is kept: the counts are known when all tokens are.
        file.write(&header.encode()).map_err(unwritable)?;
        let (path, checksum) = (path.to_path_buf(), Sha256::new());
        Ok(TokenWriter { path, file, header, checksum, bytes: vec![] })
    }

    /// Tokens so far.
    pub fn token_count(&self) -> u64 {
        self.header.token_count
    }

    /// Writes tokens behind those that are there.
    ///
    /// # Errors
    /// When an id is not below the vocabulary, or the disk is full.
    pub fn push(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        for tokens in tokens.chunks(TOKENS_AT_ONCE) {
            self.push_few(tokens).map_err(|fault| DataError::new(&self.path, fault))?;
        }
        Ok(())
    }

    fn push_few(&mut self, tokens: &[u32]) -> Result<(), DataFault> {
        let vocabulary = self.header.vocabulary.unwrap_or(u32::MAX);
        if let Some(at) = tokens.iter().position(|token| *token >= vocabulary) {
            let position = self.header.token_count + at as u64;
            return Err(DataFault::OutOfVocabulary {
                position,
                offset: 0,
                token: tokens[at],
                vocabulary,
            });
        }
        self.bytes.clear();
        match self.header.width {
            // Every id is below the vocabulary, and the width follows from that.
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

    /// Writes the header, makes sure that everything is on the disk, and gives the file its name.
    ///
    /// # Errors
    /// When the system refuses. Then what was there before is still there.
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
