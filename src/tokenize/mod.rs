//! From texts to tokens: bytes as they are, or a Hugging Face tokenizer.
//!
//! A document is read in pieces, so that its size does not matter. For bytes a piece is anything;
//! for a tokenizer it ends where tokenizers end a token as well ([`mod@pieces`]).

mod hugging_face;
mod pieces;

use std::io::{self, Read};

use narrows_runtime::data::{DataError, TokenFileInfo, TokenWriter};

pub use hugging_face::HuggingFace;
use pieces::TextPieces;

/// Bytes that are read in one go where every byte is a token.
const BYTES_AT_ONCE: usize = 64 << 10;

/// Pieces that are tokenized side by side.
const PIECES_AT_ONCE: usize = 8;

/// What turns texts into tokens.
#[derive(Debug)]
pub enum Tokenizer {
    /// Every byte is a token.
    Bytes,
    /// A `tokenizer.json`.
    HuggingFace(Box<HuggingFace>),
}

/// Why a document has no tokens.
#[derive(Debug)]
pub enum TokenizeError {
    /// It cannot be read.
    Unreadable(io::Error),
    /// A tokenizer needs text, and the byte at this place is not UTF-8.
    NotText(u64),
    /// The tokenizer refuses a piece, said with its words.
    Refused {
        /// Where the pieces begin that were given to it.
        first_byte: u64,
        /// What it says.
        problem: String,
    },
    /// The token file cannot be written.
    Unwritable(DataError),
}

impl From<DataError> for TokenizeError {
    fn from(error: DataError) -> TokenizeError {
        TokenizeError::Unwritable(error)
    }
}

impl Tokenizer {
    /// What its tokens are.
    pub fn description(&self) -> TokenFileInfo {
        match self {
            Tokenizer::Bytes => TokenFileInfo::bytes(),
            Tokenizer::HuggingFace(tokenizer) => tokenizer.description().clone(),
        }
    }

    /// The text of the token between documents.
    pub fn end_of_text(&self) -> Option<&'static str> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(tokenizer) => tokenizer.end_of_text(),
        }
    }

    /// Writes the tokens of one document, and tells of the bytes that are done.
    pub fn tokenize(
        &self,
        document: impl Read,
        writer: &mut TokenWriter,
        done: impl FnMut(u64),
    ) -> Result<(), TokenizeError> {
        match self {
            Tokenizer::Bytes => bytes(document, writer, done),
            Tokenizer::HuggingFace(tokenizer) => pieces(tokenizer, document, writer, done),
        }
    }
}

fn bytes(
    mut document: impl Read,
    writer: &mut TokenWriter,
    mut done: impl FnMut(u64),
) -> Result<(), TokenizeError> {
    let mut buffer = vec![0; BYTES_AT_ONCE];
    let mut tokens = Vec::with_capacity(BYTES_AT_ONCE);
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
        done(read as u64);
    }
}

fn pieces(
    tokenizer: &HuggingFace,
    document: impl Read,
    writer: &mut TokenWriter,
    mut done: impl FnMut(u64),
) -> Result<(), TokenizeError> {
    let mut pieces = TextPieces::new(document);
    let mut first_byte = 0;
    loop {
        let mut texts = vec![];
        while texts.len() < PIECES_AT_ONCE
            && let Some(text) = pieces.next_piece()?
        {
            texts.push(text);
        }
        if texts.is_empty() {
            return Ok(());
        }
        let length: usize = texts.iter().map(String::len).sum();
        let refused = |problem| TokenizeError::Refused { first_byte, problem };
        for tokens in tokenizer.encode(texts).map_err(refused)? {
            writer.push(&tokens)?;
        }
        first_byte += length as u64;
        done(length as u64);
    }
}
