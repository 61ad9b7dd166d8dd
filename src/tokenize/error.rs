//! Errors of tokenization.

use std::io;

use narrows_runtime::data::DataError;

/// The error of a document that cannot be tokenized.
#[derive(Debug)]
pub enum TokenizeError {
    /// The document cannot be read.
    Unreadable(io::Error),
    /// The document is not UTF-8 at this byte, and the tokenizer requires UTF-8.
    NotText(u64),
    /// The tokenizer rejects a part of the document.
    Rejected {
        /// The first byte of the rejected chunks.
        first_byte: u64,
        /// The message of the tokenizer.
        message: String,
    },
    /// The token file cannot be written.
    Unwritable(DataError),
}

impl From<DataError> for TokenizeError {
    fn from(error: DataError) -> TokenizeError {
        TokenizeError::Unwritable(error)
    }
}
