//! The token files of llm.c (`dev/data/data_common.py` there writes them, `llmc/dataloader.h` reads
//! them): 256 little-endian int32 (1,024 bytes), of which three mean something, then the tokens.
//!
//! | int32 | GPT-2 | LLaMA 3 |
//! |---|---|---|
//! | 0: magic | 20240520 | 20240801 |
//! | 1: version | 1 | 7 |
//! | 2: token count | below 2³¹ | below 2³¹ |
//! | tokens | uint16 | uint32 |
//!
//! They have no checksum and do not say their vocabulary.

use super::error::DataFault;
use super::header::{TokenFileHeader, TokenFileLayout, TokenWidth};

/// Bytes of the header.
pub const HEADER_BYTES: u64 = 1024;

const MAGIC_GPT2: i32 = 20_240_520;
const MAGIC_LLAMA3: i32 = 20_240_801;
/// Multiple-choice questions, which are no token stream.
const MAGIC_EVALUATION: i32 = 20_240_522;

/// The header, if the file begins as llm.c's do.
///
/// # Errors
/// The field that makes no sense.
pub fn decode(bytes: &[u8]) -> Result<Option<TokenFileHeader>, DataFault> {
    let field = |index: usize| {
        let bytes = bytes.get(4 * index..)?.first_chunk()?;
        Some(i32::from_le_bytes(*bytes))
    };
    let (layout, width, version) = match field(0) {
        Some(MAGIC_GPT2) => (TokenFileLayout::LlmCGpt2, TokenWidth::U16, 1),
        Some(MAGIC_LLAMA3) => (TokenFileLayout::LlmCLlama3, TokenWidth::U32, 7),
        Some(MAGIC_EVALUATION) => {
            let problem = "this is a file of multiple-choice questions for llm.c, not of tokens";
            return Err(DataFault::field(0, "magic", problem));
        }
        _ => return Ok(None),
    };
    let found = bytes.len() as u64;
    let too_short = || DataFault::LengthMismatch { expected: HEADER_BYTES, found };
    if found < HEADER_BYTES {
        return Err(too_short());
    }
    let stated = field(1).ok_or_else(too_short)?;
    if stated != version {
        let problem = format!("{} has version {version}, not {stated}", layout.name());
        return Err(DataFault::field(4, "version", problem));
    }
    let count = field(2).ok_or_else(too_short)?;
    let tokens = u64::try_from(count)
        .map_err(|_| DataFault::field(8, "token count", format!("{count} is less than none")))?;
    Ok(Some(TokenFileHeader {
        layout,
        width,
        token_count: tokens,
        vocabulary: None,
        end_of_text: None,
        checksum: None,
        tokenizer: None,
    }))
}
