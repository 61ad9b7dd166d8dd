//! The header of a token file, version 1: 256 bytes, integers little-endian, then the tokens.
//!
//! | byte | size | field | meaning |
//! |---|---|---|---|
//! | 0 | 8 | magic | `NRWTOKEN` |
//! | 8 | 4 | version | 1 |
//! | 12 | 4 | token width | bytes of a token: 2 or 4 |
//! | 16 | 4 | vocabulary size | every id is below it |
//! | 20 | 4 | end of text | id of the token between documents; `0xffffffff` for none |
//! | 24 | 8 | token count | |
//! | 32 | 32 | checksum | SHA-256 of the tokens' bytes |
//! | 64 | 32 | tokenizer fingerprint | SHA-256 of the `tokenizer.json`; zeros for bytes |
//! | 96 | 96 | tokenizer name | UTF-8, padded with zeros |
//! | 192 | 32 | reserved | zeros |
//! | 224 | 32 | header checksum | SHA-256 of bytes 0 to 223 |
//!
//! The header's checksum is verified whenever a file is opened, and covers the checksum of the tokens.
//! The tokens' own checksum is verified on request, because that reads all of them.

use super::error::DataFault;
use crate::digest::{Sha256Digest, sha256};

/// The first bytes of the format.
pub(crate) const MAGIC: [u8; 8] = *b"NRWTOKEN";

/// The version that is written and read.
pub(crate) const VERSION: u32 = 1;

/// Bytes of a header in the Narrows layout.
pub(crate) const NARROWS_HEADER_BYTES: u64 = 256;

/// Bytes of a header in the layouts of llm.c.
pub(crate) const LLM_C_HEADER_BYTES: u64 = 1024;

/// Longest name of a tokenizer, in bytes.
const NAME_BYTES_MAX: usize = 96;

const NO_END_OF_TEXT: u32 = u32::MAX;

mod offset {
    pub const VERSION: usize = 8;
    pub const WIDTH: usize = 12;
    pub const VOCABULARY: usize = 16;
    pub const END_OF_TEXT: usize = 20;
    pub const COUNT: usize = 24;
    pub const CHECKSUM: usize = 32;
    pub const FINGERPRINT: usize = 64;
    pub const NAME: usize = 96;
    pub const RESERVED: usize = 192;
    pub const HEADER_CHECKSUM: usize = 224;
}

/// Width of a token id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// The narrowest width that holds every id of a vocabulary.
    pub fn narrowest_for(vocabulary: u32) -> TokenWidth {
        if vocabulary <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// Bytes of a token.
    pub fn bytes(self) -> u64 {
        match self {
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }
}

/// Layout of a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFileLayout {
    /// The layout of this module.
    Narrows,
    /// llm.c's layout for GPT-2's tokens.
    LlmCGpt2,
    /// llm.c's layout for LLaMA 3's tokens.
    LlmCLlama3,
}

impl TokenFileLayout {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            TokenFileLayout::Narrows => "narrows-tokens/1",
            TokenFileLayout::LlmCGpt2 => "llm.c GPT-2",
            TokenFileLayout::LlmCLlama3 => "llm.c LLaMA 3",
        }
    }

    /// Bytes of the header.
    pub fn header_bytes(self) -> u64 {
        match self {
            TokenFileLayout::Narrows => NARROWS_HEADER_BYTES,
            TokenFileLayout::LlmCGpt2 | TokenFileLayout::LlmCLlama3 => LLM_C_HEADER_BYTES,
        }
    }
}

/// The tokenizer that produced the tokens of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerId {
    /// Display name; `bytes` without a tokenizer.
    pub name: String,
    /// SHA-256 of the tokenizer's file; zeros without one.
    pub fingerprint: Sha256Digest,
}

impl TokenizerId {
    /// No tokenizer: every byte is a token.
    pub fn bytes() -> TokenizerId {
        TokenizerId { name: "bytes".into(), fingerprint: Sha256Digest::default() }
    }
}

/// Header of a token file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFileHeader {
    /// Layout of the file.
    pub layout: TokenFileLayout,
    /// Width of a token.
    pub width: TokenWidth,
    /// Number of tokens.
    pub token_count: u64,
    /// Size of the vocabulary; `None` for files of llm.c.
    pub vocabulary: Option<u32>,
    /// Id of the token between documents.
    pub end_of_text: Option<u32>,
    /// SHA-256 of the tokens' bytes; `None` for files of llm.c.
    pub checksum: Option<Sha256Digest>,
    /// The tokenizer; `None` for files of llm.c, whose layout implies it.
    pub tokenizer: Option<TokenizerId>,
}

impl TokenFileHeader {
    /// Decodes a header in the Narrows layout from the first bytes of a file.
    ///
    /// # Errors
    /// The first invalid field. The length of the file is not checked.
    pub(super) fn decode(bytes: &[u8]) -> Result<TokenFileHeader, DataFault> {
        if bytes.is_empty() {
            return Err(DataFault::Empty);
        }
        if !bytes.starts_with(&MAGIC) {
            let start = bytes[..bytes.len().min(MAGIC.len())].escape_ascii();
            return Err(DataFault::NotTokenFile { start: format!("\"{start}\"") });
        }
        let actual = bytes.len() as u64;
        let incomplete = || DataFault::IncompleteHeader { expected: NARROWS_HEADER_BYTES, actual };
        let header = bytes.first_chunk::<256>().ok_or_else(incomplete)?;
        let version = u32_at(header, offset::VERSION);
        if version != VERSION {
            let problem = format!("{version} is not {VERSION}, the only known version");
            return Err(DataFault::field(offset::VERSION as u64, "version", problem));
        }
        let (fields, checksum) = header.split_at(offset::HEADER_CHECKSUM);
        if sha256(fields) != checksum {
            let problem = "the header does not have this checksum";
            let offset = offset::HEADER_CHECKSUM as u64;
            return Err(DataFault::field(offset, "header checksum", problem));
        }
        decode_fields(header)
    }

    /// Encodes the header in the Narrows layout.
    pub(super) fn encode(&self) -> [u8; 256] {
        let mut bytes = [0; 256];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(offset::VERSION, &VERSION.to_le_bytes());
        put(offset::WIDTH, &(self.width.bytes() as u32).to_le_bytes());
        put(offset::VOCABULARY, &self.vocabulary.unwrap_or(u32::MAX).to_le_bytes());
        put(offset::END_OF_TEXT, &self.end_of_text.unwrap_or(NO_END_OF_TEXT).to_le_bytes());
        put(offset::COUNT, &self.token_count.to_le_bytes());
        put(offset::CHECKSUM, &self.checksum.unwrap_or_default());
        if let Some(tokenizer) = &self.tokenizer {
            put(offset::FINGERPRINT, &tokenizer.fingerprint);
            put(offset::NAME, truncate_name(&tokenizer.name).as_bytes());
        }
        let checksum = sha256(&bytes[..offset::HEADER_CHECKSUM]);
        bytes[offset::HEADER_CHECKSUM..].copy_from_slice(&checksum);
        bytes
    }

    /// Offset of the first token in bytes.
    pub fn payload_offset(&self) -> u64 {
        self.layout.header_bytes()
    }

    /// Bytes of the whole file; `None` when they exceed the range of u64.
    pub fn file_bytes(&self) -> Option<u64> {
        self.token_count.checked_mul(self.width.bytes())?.checked_add(self.payload_offset())
    }

    /// Offset of a token in bytes.
    pub fn offset_of(&self, position: u64) -> u64 {
        self.payload_offset().saturating_add(position.saturating_mul(self.width.bytes()))
    }
}

/// Decodes the fields of a header whose checksum is right.
fn decode_fields(header: &[u8; 256]) -> Result<TokenFileHeader, DataFault> {
    let width = match u32_at(header, offset::WIDTH) {
        2 => TokenWidth::U16,
        4 => TokenWidth::U32,
        other => {
            let problem = format!("tokens have 2 or 4 bytes, not {other}");
            return Err(DataFault::field(offset::WIDTH as u64, "token width", problem));
        }
    };
    let vocabulary = u32_at(header, offset::VOCABULARY);
    if vocabulary == 0 {
        let problem = "a vocabulary has at least one token";
        return Err(DataFault::field(offset::VOCABULARY as u64, "vocabulary size", problem));
    }
    let end_of_text = u32_at(header, offset::END_OF_TEXT);
    if end_of_text != NO_END_OF_TEXT && end_of_text >= vocabulary {
        let problem = format!("id {end_of_text} is not below the vocabulary size {vocabulary}");
        return Err(DataFault::field(offset::END_OF_TEXT as u64, "end of text", problem));
    }
    if let Some(at) = (offset::RESERVED..offset::HEADER_CHECKSUM).find(|at| header[*at] != 0) {
        return Err(DataFault::field(at as u64, "reserved", "is not zero"));
    }
    let name = without_padding(&header[offset::NAME..offset::RESERVED]);
    let name = std::str::from_utf8(name).map_err(|error| {
        let at = offset::NAME + error.valid_up_to();
        DataFault::field(at as u64, "tokenizer name", "is not UTF-8")
    })?;
    Ok(TokenFileHeader {
        layout: TokenFileLayout::Narrows,
        width,
        token_count: u64::from_le_bytes(array_at(header, offset::COUNT)),
        vocabulary: Some(vocabulary),
        end_of_text: (end_of_text != NO_END_OF_TEXT).then_some(end_of_text),
        checksum: Some(array_at(header, offset::CHECKSUM)),
        tokenizer: Some(TokenizerId {
            name: name.into(),
            fingerprint: array_at(header, offset::FINGERPRINT),
        }),
    })
}

fn without_padding(name: &[u8]) -> &[u8] {
    let end = name.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &name[..end]
}

/// The longest prefix of a name that fits the header and ends between two characters.
fn truncate_name(name: &str) -> &str {
    let longest = name.len().min(NAME_BYTES_MAX);
    let end = (0..=longest).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    &name[..end]
}

fn array_at<const N: usize>(header: &[u8; 256], at: usize) -> [u8; N] {
    std::array::from_fn(|index| header[at + index])
}

fn u32_at(header: &[u8; 256], at: usize) -> u32 {
    u32::from_le_bytes(array_at(header, at))
}
