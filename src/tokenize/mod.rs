//! Converts texts into tokens: bytes, or the tokens of a Hugging Face tokenizer.
//!
//! Documents of any size are streamed, in chunks that end where a token of the whole text ends ([`chunks`]).

mod chunks;
mod error;
mod hugging_face;

use std::io::{self, Read};

use narrows_runtime::data::TokenFileInfo;

pub use error::TokenizeError;
pub use hugging_face::HuggingFace;

use chunks::TextChunks;

use crate::corpus::DocumentWriter;

/// Bytes per read where every byte is a token.
const READ_BYTES: usize = 64 << 10;

/// Chunks that are tokenized in parallel.
const CHUNKS_IN_PARALLEL: usize = 8;

/// A tokenizer.
#[derive(Debug)]
pub enum Tokenizer {
    /// Every byte is a token.
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    HuggingFace(Box<HuggingFace>),
}

impl Tokenizer {
    /// Vocabulary and name, as a token file states them.
    pub fn description(&self) -> TokenFileInfo {
        match self {
            Tokenizer::Bytes => TokenFileInfo::bytes(),
            Tokenizer::HuggingFace(tokenizer) => tokenizer.description().clone(),
        }
    }

    /// The text of the token between documents, if there is one.
    pub fn end_of_text(&self) -> Option<&'static str> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(tokenizer) => tokenizer.end_of_text(),
        }
    }

    /// The tokens of each text.
    ///
    /// # Errors
    /// The message of the tokenizer.
    pub fn encode(&self, texts: Vec<String>) -> Result<Vec<Vec<u32>>, String> {
        match self {
            Tokenizer::Bytes => {
                let tokens = |text: String| text.bytes().map(u32::from).collect();
                Ok(texts.into_iter().map(tokens).collect())
            }
            Tokenizer::HuggingFace(tokenizer) => tokenizer.encode(texts),
        }
    }

    /// The text of tokens. What is no character is U+FFFD.
    ///
    /// # Errors
    /// The message of the tokenizer.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        match self {
            Tokenizer::Bytes => {
                // No character has the byte that stands for tokens which are no bytes.
                let bytes = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(u8::MAX));
                Ok(String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned())
            }
            Tokenizer::HuggingFace(tokenizer) => tokenizer.decode(tokens),
        }
    }

    /// Writes the tokens of one document, and counts its text.
    ///
    /// # Errors
    /// A document that cannot be read or tokenized, and a token file that cannot be written.
    pub fn tokenize(
        &self,
        document: impl Read,
        writer: &mut DocumentWriter,
    ) -> Result<(), TokenizeError> {
        match self {
            Tokenizer::Bytes => write_bytes(document, writer),
            Tokenizer::HuggingFace(tokenizer) => write_tokens(tokenizer, document, writer),
        }
    }
}

fn write_bytes(mut document: impl Read, writer: &mut DocumentWriter) -> Result<(), TokenizeError> {
    let mut buffer = vec![0; READ_BYTES];
    let mut tokens = Vec::with_capacity(READ_BYTES);
    loop {
        let read = match document.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(TokenizeError::Unreadable(error)),
        };
        tokens.clear();
        tokens.extend(buffer[..read].iter().map(|byte| u32::from(*byte)));
        writer.push(&tokens)?;
        writer.count_text(read as u64);
    }
}

fn write_tokens(
    tokenizer: &HuggingFace,
    document: impl Read,
    writer: &mut DocumentWriter,
) -> Result<(), TokenizeError> {
    let mut chunks = TextChunks::new(document);
    let mut first_byte = 0;
    loop {
        let mut texts = vec![];
        while texts.len() < CHUNKS_IN_PARALLEL
            && let Some(text) = chunks.next_chunk()?
        {
            texts.push(text);
        }
        if texts.is_empty() {
            return Ok(());
        }
        let length: usize = texts.iter().map(String::len).sum();
        let rejected = |message| TokenizeError::Rejected { first_byte, message };
        for tokens in tokenizer.encode(texts).map_err(rejected)? {
            writer.push(&tokens)?;
        }
        first_byte += length as u64;
        writer.count_text(length as u64);
    }
}
