//! What can be wrong with token files: which file, where in it, what, and what to try.

use std::io;
use std::path::{Path, PathBuf};

/// Something wrong with a token file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}{fault}", file.display(), prefix(fault))]
pub struct DataError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub fault: DataFault,
}

/// What is wrong, as a sentence that follows the file's name.
#[derive(Debug, thiserror::Error)]
pub enum DataFault {
    /// The system refused.
    #[error("cannot be {action}: {source}")]
    Io {
        /// What was tried, as a participle.
        action: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// A folder, a pipe or a device.
    #[error("is not a plain file")]
    NotRegularFile,
    /// The first bytes are those of no token file.
    #[error("{found} is not how a token file begins")]
    NotTokenFile {
        /// The first bytes, printable.
        found: String,
    },
    /// A field of the header makes no sense.
    #[error("{problem}")]
    InvalidField {
        /// Where the field begins.
        offset: u64,
        /// Its name in the documented layout.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The file ends before its header does, or is longer or shorter than the header says.
    #[error("the file has {found} bytes, and its header says {expected}")]
    LengthMismatch {
        /// Bytes that the header and its tokens need.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The payload is not what was written.
    #[error("the tokens have SHA-256 {found}, and the header says {expected}")]
    ChecksumMismatch {
        /// Where the tokens begin.
        offset: u64,
        /// What the header says.
        expected: String,
        /// What the bytes have.
        found: String,
    },
    /// A token that the vocabulary does not have.
    #[error("id {token} is not below the vocabulary size {vocabulary}")]
    OutOfVocabulary {
        /// Its place among the tokens.
        position: u64,
        /// Where it begins in the file; 0 for one that is being written.
        offset: u64,
        /// Its id.
        token: u32,
        /// The first id there is not.
        vocabulary: u32,
    },
    /// Tokens that the file does not have.
    #[error("tokens {first} to {first} + {length} are beyond its {tokens} tokens")]
    OutOfRange {
        /// The first one asked for.
        first: u64,
        /// How many.
        length: u64,
        /// How many there are.
        tokens: u64,
    },
    /// Less than one sequence.
    #[error(
        "has {tokens} tokens, too few for one sequence of {sequence_length} and its last target"
    )]
    TooFewTokens {
        /// Tokens there are.
        tokens: u64,
        /// Tokens of a sequence.
        sequence_length: u64,
    },
    /// Sequences without tokens.
    #[error("cannot be cut into sequences of no tokens")]
    ZeroSequenceLength,
    /// Tokens of one vocabulary for a model of a smaller one.
    #[error("was made with a vocabulary of {file}, and the model has {model}")]
    VocabularyMismatch {
        /// The file's vocabulary.
        file: u32,
        /// The model's.
        model: u32,
    },
    /// A cursor of another order of sequences.
    #[error("the cursor is for {what} {cursor}, and this run has {here}")]
    CursorMismatch {
        /// What differs.
        what: &'static str,
        /// The cursor's.
        cursor: String,
        /// This run's.
        here: String,
    },
    /// More sequences than can be counted.
    #[error("sequence {sequence} is beyond what can be counted")]
    SequenceNumberOverflow {
        /// The first one asked for.
        sequence: u64,
    },
}

fn prefix(fault: &DataFault) -> String {
    fault.location().map_or(String::new(), |place| format!("{place}: "))
}

impl DataError {
    /// A fault of a file.
    pub fn new(file: &Path, fault: DataFault) -> DataError {
        DataError { file: file.to_path_buf(), fault }
    }
}

impl DataFault {
    /// Where in the file; `None` for the whole of it.
    pub fn location(&self) -> Option<String> {
        match self {
            DataFault::NotTokenFile { .. } => Some("byte 0 (magic)".into()),
            DataFault::InvalidField { offset, field, .. } => {
                Some(format!("byte {offset} ({field})"))
            }
            DataFault::ChecksumMismatch { offset, .. } => Some(format!("byte {offset} (tokens)")),
            DataFault::OutOfVocabulary { position, offset: 0, .. } => {
                Some(format!("token {position}"))
            }
            DataFault::OutOfVocabulary { position, offset, .. } => {
                Some(format!("byte {offset} (token {position})"))
            }
            _ => None,
        }
    }

    /// What to try.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            DataFault::NotRegularFile => "a file on a disk: it is mapped into memory",
            DataFault::NotTokenFile { .. } => {
                "`narrows data TEXT --output FILE` makes token files of texts"
            }
            DataFault::InvalidField { .. } | DataFault::ChecksumMismatch { .. } => {
                "the file is damaged or of another program: make it again, or copy it again"
            }
            DataFault::LengthMismatch { expected, found } if found < expected => {
                "the file is cut off: copy it again, or make it again"
            }
            DataFault::LengthMismatch { .. } => {
                "something was appended to the file: copy it or make it again"
            }
            DataFault::OutOfVocabulary { .. } | DataFault::VocabularyMismatch { .. } => {
                "a model with this vocabulary, or the same text through the model's tokenizer"
            }
            DataFault::TooFewTokens { tokens: 0 | 1, .. } => "more text",
            DataFault::TooFewTokens { tokens, .. } => {
                return Some(format!("more text, or sequences of at most {} tokens", tokens - 1));
            }
            DataFault::ZeroSequenceLength => "a sequence length of at least 1",
            DataFault::CursorMismatch { .. } => "resume with what the checkpoint was made with",
            DataFault::Io { .. }
            | DataFault::OutOfRange { .. }
            | DataFault::SequenceNumberOverflow { .. } => {
                return None;
            }
        };
        Some(hint.into())
    }

    /// A fault of a header's field.
    pub(crate) fn field(offset: u64, field: &'static str, problem: impl Into<String>) -> DataFault {
        DataFault::InvalidField { offset, field, problem: problem.into() }
    }
}
