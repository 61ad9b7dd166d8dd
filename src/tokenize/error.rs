//! Errors of tokenization.

use std::io;

use narrows_runtime::data::DataError;

/// Why a document could not be tokenized.
#[derive(Debug)]
pub enum TokenizeError {
    /// The document cannot be read.
    Unreadable(io::Error),
    /// The tokenizer needs UTF-8, which the document is not at this byte.
    NotText(u64),
    /// The tokenizer rejects a part of the document.
    Rejected {
        /// The first byte of the chunks that were passed to it.
        first_byte: u64,
        /// Its message.
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
