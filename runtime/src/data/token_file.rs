//! Token files as they are read: mapped into memory, checked at opening, copied out as `u32`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use memmap2::Mmap;

use super::error::{DataError, DataFault};
use super::header::{TokenFileHeader, TokenFileLayout, TokenWidth};
use super::token_writer::TokenFileInfo;
use crate::digest::{Sha256Digest, sha256};

/// Tokens that a validation looks at in one go.
const VALIDATED_AT_ONCE: usize = 16 << 10;

/// An open token file.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    header: TokenFileHeader,
    /// Where the tokens are among the bytes.
    payload: Range<usize>,
    bytes: FileBytes,
    fingerprint: OnceLock<Sha256Digest>,
}

#[derive(Debug)]
enum FileBytes {
    Mapped(Mmap),
    Held(Vec<u8>),
}

impl TokenFile {
    /// Opens a file: its header makes sense, and the file is as long as the header says.
    ///
    /// # Errors
    /// The first thing that is wrong. The tokens themselves are not looked at: see
    /// [`TokenFile::verify`] and [`TokenFile::validate`].
    pub fn open(path: &Path) -> Result<TokenFile, DataError> {
        let bytes = mapped(path).map_err(|fault| DataError::new(path, fault))?;
        TokenFile::new(path, bytes)
    }

    /// A token file that is in memory already; `name` is for messages.
    ///
    /// # Errors
    /// As for [`TokenFile::open`].
    pub fn from_bytes(name: &Path, bytes: Vec<u8>) -> Result<TokenFile, DataError> {
        TokenFile::new(name, FileBytes::Held(bytes))
    }

    /// A text as a token file in memory: every byte is a token.
    ///
    /// # Errors
    /// As for [`TokenFile::open`]; none that a text can cause.
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

    fn new(path: &Path, bytes: FileBytes) -> Result<TokenFile, DataError> {
        let (header, payload) =
            header_and_payload(bytes.all()).map_err(|fault| DataError::new(path, fault))?;
        let (path, fingerprint) = (path.to_path_buf(), OnceLock::new());
        Ok(TokenFile { path, header, payload, bytes, fingerprint })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says about itself.
    pub fn header(&self) -> &TokenFileHeader {
        &self.header
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> u64 {
        self.header.token_count
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.bytes.all().len() as u64
    }

    /// Copies the tokens from `first` on. Ids are looked at after they were copied, so that none
    /// gets through that is not below `vocabulary`, whatever happens to the file meanwhile.
    ///
    /// # Errors
    /// When there are no such tokens, or one is not below `vocabulary`; then what `into` holds means
    /// nothing.
    pub fn read_tokens(
        &self,
        first: u64,
        vocabulary: u32,
        into: &mut [u32],
    ) -> Result<(), DataError> {
        self.copy(first, vocabulary, into).map_err(|fault| DataError::new(&self.path, fault))
    }

    fn copy(&self, first: u64, vocabulary: u32, into: &mut [u32]) -> Result<(), DataFault> {
        let (length, tokens) = (into.len() as u64, self.header.token_count);
        if first.checked_add(length).is_none_or(|end| end > tokens) {
            return Err(DataFault::OutOfRange { first, length, tokens });
        }
        let width = self.header.width.bytes() as usize;
        let begin = first as usize * width;
        let bytes = &self.payload()[begin..begin + into.len() * width];
        match self.header.width {
            TokenWidth::U16 => {
                for (token, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
                    *token = u16::from_le_bytes(*bytes).into();
                }
            }
            TokenWidth::U32 => {
                for (token, bytes) in into.iter_mut().zip(bytes.as_chunks().0) {
                    *token = u32::from_le_bytes(*bytes);
                }
            }
        }
        let Some(at) = into.iter().position(|token| *token >= vocabulary) else { return Ok(()) };
        let position = first + at as u64;
        let offset = self.header.offset_of(position);
        Err(DataFault::OutOfVocabulary { position, offset, token: into[at], vocabulary })
    }

    /// Reads every token, holds it against the file's own vocabulary, or `vocabulary` where the file
    /// does not say, and gives the largest id there is.
    ///
    /// # Errors
    /// The first id that is not below it.
    pub fn validate_tokens(&self, vocabulary: u32) -> Result<Option<u32>, DataError> {
        let vocabulary = self.header.vocabulary.unwrap_or(vocabulary);
        let mut buffer = vec![0; VALIDATED_AT_ONCE];
        let (mut first, mut largest) = (0, None);
        while first < self.tokens() {
            let length = (self.tokens() - first).min(VALIDATED_AT_ONCE as u64);
            let part = &mut buffer[..length as usize];
            self.read_tokens(first, vocabulary, part)?;
            largest = largest.max(part.iter().copied().max());
            first += length;
        }
        Ok(largest)
    }

    /// Reads every byte and holds it against the checksum. A file without one passes.
    ///
    /// # Errors
    /// When the tokens are not what was written.
    pub fn verify_checksum(&self) -> Result<(), DataError> {
        let Some(expected) = self.header.checksum else { return Ok(()) };
        let found = sha256(self.payload());
        if found == expected {
            return Ok(());
        }
        let offset = self.header.payload_offset();
        let (expected, found) = (hex::encode(expected), hex::encode(found));
        Err(DataError::new(&self.path, DataFault::ChecksumMismatch { offset, expected, found }))
    }

    /// SHA-256 of the tokens' bytes: as stated, or computed once where the file does not state it.
    pub fn fingerprint(&self) -> Sha256Digest {
        *self
            .fingerprint
            .get_or_init(|| self.header.checksum.unwrap_or_else(|| sha256(self.payload())))
    }

    fn payload(&self) -> &[u8] {
        &self.bytes.all()[self.payload.clone()]
    }
}

impl FileBytes {
    fn all(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(map) => map,
            FileBytes::Held(bytes) => bytes,
        }
    }
}

fn header_and_payload(bytes: &[u8]) -> Result<(TokenFileHeader, Range<usize>), DataFault> {
    let header = TokenFileHeader::decode(bytes)?;
    let found = bytes.len() as u64;
    let expected = header.file_bytes().unwrap_or(u64::MAX);
    if expected != found {
        return Err(DataFault::LengthMismatch { expected, found });
    }
    let begin = header.payload_offset() as usize;
    Ok((header, begin..bytes.len()))
}

fn mapped(path: &Path) -> Result<FileBytes, DataFault> {
    let unreadable = |source: io::Error| DataFault::Io { action: "read", source };
    // Asked of the name first: opening a pipe would wait for somebody to write into it.
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(DataFault::NotRegularFile);
    }
    let file = File::open(path).map_err(unreadable)?;
    map(&file).map(FileBytes::Mapped).map_err(|source| DataFault::Io { action: "mapped", source })
}

#[allow(unsafe_code)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is private to this process and never written to. Another process may still
    // change or cut off the file: our own writers never do, they put a new file in its place, and
    // this map keeps the old one. Where somebody else does it, no value is trusted that could
    // hurt: the header was copied out before it was checked, and ids are checked after they are
    // copied. Cutting off a mapped file ends the process, as it does for every program that maps.
    unsafe { Mmap::map(file) }
}
