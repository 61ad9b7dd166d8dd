//! Token files of llm.c (written by its `dev/data/data_common.py`, read by its `llmc/dataloader.h`):
//! a header of 256 little-endian int32 (1,024 bytes), of which three are used, then the tokens.
//!
//! | int32 | GPT-2 | LLaMA 3 |
//! |---|---|---|
//! | 0: magic | 20240520 | 20240801 |
//! | 1: version | 1 | 7 |
//! | 2: token count | below 2³¹ | below 2³¹ |
//! | tokens | uint16 | uint32 |
//!
//! The header has neither a checksum nor the size of the vocabulary.

use super::error::DataFault;
use super::header::{LLM_C_HEADER_BYTES, TokenFileHeader, TokenFileLayout, TokenWidth};

const MAGIC_GPT2: i32 = 20_240_520;
const MAGIC_LLAMA3: i32 = 20_240_801;
/// Files of multiple-choice questions, which are not token streams.
const MAGIC_EVALUATION: i32 = 20_240_522;

/// Decodes the header; `None` for files without a magic number of llm.c.
///
/// # Errors
/// The first invalid field.
pub(super) fn decode(bytes: &[u8]) -> Result<Option<TokenFileHeader>, DataFault> {
    let field = |index: usize| {
        let bytes = bytes.get(4 * index..)?.first_chunk()?;
        Some(i32::from_le_bytes(*bytes))
    };
    let (layout, width, expected_version) = match field(0) {
        Some(MAGIC_GPT2) => (TokenFileLayout::LlmCGpt2, TokenWidth::U16, 1),
        Some(MAGIC_LLAMA3) => (TokenFileLayout::LlmCLlama3, TokenWidth::U32, 7),
        Some(MAGIC_EVALUATION) => {
            let problem = "llm.c's multiple-choice questions are not a token file";
            return Err(DataFault::field(0, "magic", problem));
        }
        _ => return Ok(None),
    };
    let actual = bytes.len() as u64;
    let incomplete = || DataFault::IncompleteHeader { expected: LLM_C_HEADER_BYTES, actual };
    if actual < LLM_C_HEADER_BYTES {
        return Err(incomplete());
    }
    let version = field(1).ok_or_else(incomplete)?;
    if version != expected_version {
        let problem = format!("{} has version {expected_version}, not {version}", layout.name());
        return Err(DataFault::field(4, "version", problem));
    }
    let count = field(2).ok_or_else(incomplete)?;
    let token_count = u64::try_from(count)
        .map_err(|_| DataFault::field(8, "token count", format!("{count} is negative")))?;
    Ok(Some(TokenFileHeader {
        layout,
        width,
        token_count,
        vocabulary: None,
        end_of_text: None,
        checksum: None,
        tokenizer: None,
    }))
}
