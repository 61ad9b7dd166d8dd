//! The header of a token file, version 1: 256 bytes, numbers little-endian, then the tokens.
//!
//! | byte | size | field | meaning |
//! |---|---|---|---|
//! | 0 | 8 | magic | `NRWTOKEN` |
//! | 8 | 4 | version | 1 |
//! | 12 | 4 | token width | bytes of a token: 2 or 4 |
//! | 16 | 4 | vocabulary size | every id is below it |
//! | 20 | 4 | end of text | id of the token between documents; `0xffffffff`: there is none |
//! | 24 | 8 | token count | |
//! | 32 | 32 | checksum | SHA-256 of the tokens' bytes |
//! | 64 | 32 | tokenizer fingerprint | SHA-256 of the `tokenizer.json`; zeros for bytes |
//! | 96 | 96 | tokenizer name | UTF-8, filled up with zeros |
//! | 192 | 32 | reserved | zeros |
//! | 224 | 32 | header checksum | SHA-256 of bytes 0 to 223 |
//!
//! The header's checksum is read whenever a file is opened: it is small, and covers the checksum of
//! the tokens. That of the tokens is read on request, because it means reading all of them.

use super::error::DataFault;
use super::llm_c;
use crate::digest::{Sha256Digest, sha256};

/// The first bytes of our format.
pub const MAGIC: [u8; 8] = *b"NRWTOKEN";

/// The version that is written.
pub const VERSION: u32 = 1;

/// Bytes of our header; the tokens begin here.
pub const HEADER_BYTES: u64 = 256;

/// The longest name of a tokenizer, in bytes.
pub const NAME_BYTES_MAX: usize = 96;

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

/// Bytes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
}

impl TokenWidth {
    /// The narrowest that holds every id of a vocabulary.
    pub fn narrowest_for(vocabulary: u32) -> TokenWidth {
        if vocabulary <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// How many bytes.
    pub fn bytes(self) -> u64 {
        match self {
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }
}

/// Whose layout a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFileLayout {
    /// Ours.
    Narrows,
    /// llm.c's, with GPT-2's tokens.
    LlmCGpt2,
    /// llm.c's, with LLaMA 3's tokens.
    LlmCLlama3,
}

impl TokenFileLayout {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            TokenFileLayout::Narrows => "narrows-tokens/1",
            TokenFileLayout::LlmCGpt2 => "llm.c GPT-2",
            TokenFileLayout::LlmCLlama3 => "llm.c LLaMA 3",
        }
    }
}

/// Which tokenizer made the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerId {
    /// What people call it; `bytes` for none.
    pub name: String,
    /// SHA-256 of its file; zeros where there is none.
    pub fingerprint: Sha256Digest,
}

impl TokenizerId {
    /// Bytes as they are: 256 of them.
    pub fn bytes() -> TokenizerId {
        TokenizerId { name: "bytes".into(), fingerprint: Sha256Digest::default() }
    }
}

/// What a file says about its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenFileHeader {
    /// Whose layout it is.
    pub layout: TokenFileLayout,
    /// Bytes of a token.
    pub width: TokenWidth,
    /// Tokens in the file.
    pub token_count: u64,
    /// Every id is below it. llm.c's files do not say.
    pub vocabulary: Option<u32>,
    /// The token between documents.
    pub end_of_text: Option<u32>,
    /// SHA-256 of the tokens' bytes. llm.c's files have none.
    pub checksum: Option<Sha256Digest>,
    /// Which tokenizer made them. llm.c's files only imply it.
    pub tokenizer: Option<TokenizerId>,
}

impl TokenFileHeader {
    /// Reads the header of either kind of file from its first bytes.
    ///
    /// # Errors
    /// The first field that makes no sense. Whether the file is as long as it says is not asked here.
    pub fn decode(bytes: &[u8]) -> Result<TokenFileHeader, DataFault> {
        if let Some(header) = llm_c::decode(bytes)? {
            return Ok(header);
        }
        if !bytes.starts_with(&MAGIC) {
            return Err(DataFault::NotTokenFile { found: first_bytes(bytes) });
        }
        let found = bytes.len() as u64;
        let too_short = || DataFault::LengthMismatch { expected: HEADER_BYTES, found };
        let header = bytes.first_chunk::<256>().ok_or_else(too_short)?;
        let version = number(header, offset::VERSION);
        if version != VERSION {
            let problem = format!("{version} is not {VERSION}, the one version there is");
            return Err(DataFault::field(offset::VERSION as u64, "version", problem));
        }
        let (fields, stated) = header.split_at(offset::HEADER_CHECKSUM);
        if sha256(fields) != stated {
            let (at, problem) = (offset::HEADER_CHECKSUM as u64, "the header was changed");
            return Err(DataFault::field(at, "header checksum", problem));
        }
        fields_of(header)
    }

    /// The 256 bytes of a file in our layout.
    pub(crate) fn encode(&self) -> [u8; 256] {
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
            put(offset::NAME, cut_name(&tokenizer.name).as_bytes());
        }
        let checksum = sha256(&bytes[..offset::HEADER_CHECKSUM]);
        bytes[offset::HEADER_CHECKSUM..].copy_from_slice(&checksum);
        bytes
    }

    /// Where the tokens begin.
    pub fn payload_offset(&self) -> u64 {
        match self.layout {
            TokenFileLayout::Narrows => HEADER_BYTES,
            TokenFileLayout::LlmCGpt2 | TokenFileLayout::LlmCLlama3 => llm_c::HEADER_BYTES,
        }
    }

    /// The length of the whole file; `None` when it is more than can be counted.
    pub fn file_bytes(&self) -> Option<u64> {
        self.token_count.checked_mul(self.width.bytes())?.checked_add(self.payload_offset())
    }

    /// Where a token of the file begins.
    pub fn offset_of(&self, position: u64) -> u64 {
        self.payload_offset().saturating_add(position.saturating_mul(self.width.bytes()))
    }
}

/// The fields of a header whose checksum is right.
fn fields_of(header: &[u8; 256]) -> Result<TokenFileHeader, DataFault> {
    let width = match number(header, offset::WIDTH) {
        2 => TokenWidth::U16,
        4 => TokenWidth::U32,
        other => {
            let problem = format!("tokens have 2 or 4 bytes, not {other}");
            return Err(DataFault::field(offset::WIDTH as u64, "token width", problem));
        }
    };
    let vocabulary = number(header, offset::VOCABULARY);
    if vocabulary == 0 {
        let (at, problem) = (offset::VOCABULARY as u64, "no token has an id below 0");
        return Err(DataFault::field(at, "vocabulary size", problem));
    }
    let end_of_text = number(header, offset::END_OF_TEXT);
    if end_of_text != NO_END_OF_TEXT && end_of_text >= vocabulary {
        let problem = format!("id {end_of_text} is not below the vocabulary size {vocabulary}");
        return Err(DataFault::field(offset::END_OF_TEXT as u64, "end of text", problem));
    }
    if let Some(at) = (offset::RESERVED..offset::HEADER_CHECKSUM).find(|at| header[*at] != 0) {
        return Err(DataFault::field(at as u64, "reserved", "is not zero"));
    }
    let name = without_filling(&header[offset::NAME..offset::RESERVED]);
    let name = std::str::from_utf8(name).map_err(|error| {
        let at = offset::NAME + error.valid_up_to();
        DataFault::field(at as u64, "tokenizer name", "is not UTF-8")
    })?;
    Ok(TokenFileHeader {
        layout: TokenFileLayout::Narrows,
        width,
        token_count: u64::from_le_bytes(array(header, offset::COUNT)),
        vocabulary: Some(vocabulary),
        end_of_text: (end_of_text != NO_END_OF_TEXT).then_some(end_of_text),
        checksum: Some(array(header, offset::CHECKSUM)),
        tokenizer: Some(TokenizerId {
            name: name.into(),
            fingerprint: array(header, offset::FINGERPRINT),
        }),
    })
}

fn without_filling(name: &[u8]) -> &[u8] {
    let end = name.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &name[..end]
}

/// As much of a name as has room, without cutting a character.
fn cut_name(name: &str) -> &str {
    let longest = name.len().min(NAME_BYTES_MAX);
    let end = (0..=longest).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    &name[..end]
}

fn array<const N: usize>(header: &[u8; 256], at: usize) -> [u8; N] {
    std::array::from_fn(|index| header[at + index])
}

fn number(header: &[u8; 256], at: usize) -> u32 {
    u32::from_le_bytes(array(header, at))
}

/// The beginning of a file, for messages.
fn first_bytes(bytes: &[u8]) -> String {
    match bytes {
        [] => "an empty file".into(),
        _ => format!("\"{}\"", bytes[..bytes.len().min(MAGIC.len())].escape_ascii()),
    }
}
