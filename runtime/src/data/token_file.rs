//! Reading token files: checked when opened, copied out as `u32`.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::{DataError, DataFault};
use super::header::{LLM_C_HEADER_BYTES, MAGIC, TokenFileHeader, TokenFileLayout, TokenWidth};
use super::llm_c;
use super::token_bytes::TokenBytes;
use super::token_writer::TokenFileInfo;
use crate::digest::{Sha256Digest, sha256};

/// Tokens that a validation reads at once.
const VALIDATION_CHUNK: usize = 16 << 10;

/// Bytes that are converted to tokens at once.
const READ_BYTES: usize = 8 << 10;

/// An open token file.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    header: TokenFileHeader,
    /// Byte range of the tokens.
    payload: Range<u64>,
    bytes: TokenBytes,
}

impl TokenFile {
    /// Whether the first bytes of a file are those of a token file, in any layout and maybe damaged.
    pub fn is_beginning(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC) || !matches!(llm_c::decode(bytes), Ok(None))
    }

    /// Opens a file, and checks its header and its length. The tokens are not checked: see
    /// [`TokenFile::verify_checksum`] and [`TokenFile::validate_tokens`].
    ///
    /// # Errors
    /// The first problem.
    pub fn open(path: &Path) -> Result<TokenFile, DataError> {
        let bytes = TokenBytes::open(path).map_err(|fault| DataError::new(path, fault))?;
        TokenFile::new(path, bytes)
    }

    /// A token file in memory; `name` is for messages.
    ///
    /// # Errors
    /// As for [`TokenFile::open`].
    pub fn from_bytes(name: &Path, bytes: Vec<u8>) -> Result<TokenFile, DataError> {
        TokenFile::new(name, TokenBytes::of_memory(bytes))
    }

    /// A text as a token file in memory, with every byte as a token.
    ///
    /// # Errors
    /// As for [`TokenFile::open`], though no text causes any.
    pub fn from_text(name: &Path, text: &[u8]) -> Result<TokenFile, DataError> {
        let TokenFileInfo { vocabulary, end_of_text, tokenizer } = TokenFileInfo::bytes();
        let tokens: Vec<u8> = text.iter().flat_map(|byte| u16::from(*byte).to_le_bytes()).collect();
        let header = TokenFileHeader {
            layout: TokenFileLayout::Narrows,
            width: TokenWidth::narrowest_for(vocabulary),
            token_count: text.len() as u64,
            vocabulary: Some(vocabulary),
            end_of_text,
            checksum: Some(sha256(&tokens)),
            tokenizer: Some(tokenizer),
        };
        TokenFile::from_bytes(name, [&header.encode()[..], &tokens].concat())
    }

    fn new(path: &Path, bytes: TokenBytes) -> Result<TokenFile, DataError> {
        let (header, payload) =
            decode_header(&bytes).map_err(|fault| DataError::new(path, fault))?;
        Ok(TokenFile { path: path.to_path_buf(), header, payload, bytes })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Header of the file.
    pub fn header(&self) -> &TokenFileHeader {
        &self.header
    }

    /// Number of tokens.
    pub fn token_count(&self) -> u64 {
        self.header.token_count
    }

    /// Copies `target.len()` tokens from index `first` on. Ids are checked after they were copied, so
    /// that a change of the file meanwhile cannot let an invalid one through.
    ///
    /// # Errors
    /// When the file does not have these tokens, or an id is not below `vocabulary`; the contents of
    /// `target` are then unspecified.
    pub fn read_tokens(
        &self,
        first: u64,
        vocabulary: u32,
        target: &mut [u32],
    ) -> Result<(), DataError> {
        self.copy_tokens(first, vocabulary, target)
            .map_err(|fault| DataError::new(&self.path, fault))
    }

    fn copy_tokens(
        &self,
        first: u64,
        vocabulary: u32,
        target: &mut [u32],
    ) -> Result<(), DataFault> {
        let (length, tokens) = (target.len() as u64, self.header.token_count);
        if first.checked_add(length).is_none_or(|end| end > tokens) {
            return Err(DataFault::OutOfRange { first, length, tokens });
        }
        let width = self.header.width.bytes();
        let mut buffer = [0; READ_BYTES];
        let mut offset = self.payload.start + first * width;
        for chunk in target.chunks_mut(READ_BYTES / width as usize) {
            let bytes = &mut buffer[..chunk.len() * width as usize];
            self.bytes.read(offset, bytes)?;
            offset += bytes.len() as u64;
            match self.header.width {
                TokenWidth::U16 => {
                    for (token, bytes) in chunk.iter_mut().zip(bytes.as_chunks().0) {
                        *token = u16::from_le_bytes(*bytes).into();
                    }
                }
                TokenWidth::U32 => {
                    for (token, bytes) in chunk.iter_mut().zip(bytes.as_chunks().0) {
                        *token = u32::from_le_bytes(*bytes);
                    }
                }
            }
        }
        let invalid = target.iter().position(|token| *token >= vocabulary);
        let Some(index) = invalid else { return Ok(()) };
        let position = first + index as u64;
        let offset = self.header.offset_of(position);
        Err(DataFault::OutOfVocabulary { position, offset, token: target[index], vocabulary })
    }

    /// Checks all tokens against the vocabulary of the file, or against `vocabulary` where the file
    /// does not state one. Returns the largest id.
    ///
    /// # Errors
    /// The first id that is not below it.
    pub fn validate_tokens(&self, vocabulary: u32) -> Result<Option<u32>, DataError> {
        let vocabulary = self.header.vocabulary.unwrap_or(vocabulary);
        let mut buffer = vec![0; VALIDATION_CHUNK];
        let (mut first, mut largest) = (0, None);
        while first < self.token_count() {
            let length = (self.token_count() - first).min(VALIDATION_CHUNK as u64);
            let chunk = &mut buffer[..length as usize];
            self.read_tokens(first, vocabulary, chunk)?;
            largest = largest.max(chunk.iter().copied().max());
            first += length;
        }
        Ok(largest)
    }

    /// Checks all bytes of the tokens against the checksum. A file without one passes.
    ///
    /// # Errors
    /// [`DataFault::ChecksumMismatch`], or a file that cannot be read.
    pub fn verify_checksum(&self) -> Result<(), DataError> {
        let Some(expected) = self.header.checksum else { return Ok(()) };
        let actual = self.payload_sha256()?;
        if actual == expected {
            return Ok(());
        }
        let offset = self.header.payload_offset();
        let (expected, actual) = (hex::encode(expected), hex::encode(actual));
        Err(DataError::new(&self.path, DataFault::ChecksumMismatch { offset, expected, actual }))
    }

    /// SHA-256 of the tokens' bytes as the header claims it. For files without a checksum, all tokens are read.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn fingerprint(&self) -> Result<Sha256Digest, DataError> {
        self.header.checksum.map_or_else(|| self.payload_sha256(), Ok)
    }

    fn payload_sha256(&self) -> Result<Sha256Digest, DataError> {
        let digest = self.bytes.sha256(self.payload.clone());
        digest.map_err(|fault| DataError::new(&self.path, fault))
    }
}

/// Decodes the header of either format, and checks the length of the file.
fn decode_header(bytes: &TokenBytes) -> Result<(TokenFileHeader, Range<u64>), DataFault> {
    let actual = bytes.length();
    let mut head = vec![0; actual.min(LLM_C_HEADER_BYTES) as usize];
    bytes.read(0, &mut head)?;
    let header = match llm_c::decode(&head)? {
        Some(header) => header,
        None => TokenFileHeader::decode(&head)?,
    };
    let expected = header.file_bytes().unwrap_or(u64::MAX);
    if expected != actual {
        return Err(DataFault::LengthMismatch { expected, actual });
    }
    let start = header.payload_offset();
    Ok((header, start..actual))
}
