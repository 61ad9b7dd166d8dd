//! Errors of token files: the file, the location in it, the problem, and what to try.

use std::io;
use std::path::{Path, PathBuf};

use narrows_plan::counts::plural;

/// An error of a token file.
#[derive(Debug, thiserror::Error)]
#[error("{}: {}{fault}", file.display(), location_prefix(fault))]
pub struct DataError {
    /// The file.
    pub file: PathBuf,
    /// The problem.
    pub fault: DataFault,
}

/// The problem of a token file. Its message follows the name of the file.
#[derive(Debug, thiserror::Error)]
pub enum DataFault {
    /// An operation of the file system failed.
    #[error("cannot be {action}: {source}")]
    Io {
        /// The operation, as a past participle.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file has become shorter since it was opened.
    #[error("has been truncated: it had {opened} bytes when it was opened")]
    Truncated {
        /// Bytes of the file when it was opened.
        opened: u64,
    },
    /// The path is a folder, a pipe or a device.
    #[error("is not a regular file")]
    NotRegularFile,
    /// The file has no known magic number.
    #[error("{start} is not the magic number of a token file")]
    NotTokenFile {
        /// The first bytes, printable.
        start: String,
    },
    /// A field of the header is invalid.
    #[error("{problem}")]
    InvalidField {
        /// Offset of the field in bytes.
        offset: u64,
        /// Name of the field in the documented layout.
        field: &'static str,
        /// Reason why the field is invalid.
        problem: String,
    },
    /// The file has no bytes.
    #[error("is empty")]
    Empty,
    /// The file ends within its header.
    #[error("the file ends within its header: it has {actual} of {expected} bytes")]
    IncompleteHeader {
        /// Bytes of the header.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// The file is longer or shorter than its header says.
    #[error("the file has {actual} bytes, and its header says {expected}")]
    LengthMismatch {
        /// Bytes of the header and its tokens.
        expected: u64,
        /// Bytes of the file.
        actual: u64,
    },
    /// The tokens do not have the checksum of the header.
    #[error("the tokens have SHA-256 {actual}, and the header says {expected}")]
    ChecksumMismatch {
        /// Offset of the tokens in bytes.
        offset: u64,
        /// Checksum in the header.
        expected: String,
        /// Checksum of the tokens.
        actual: String,
    },
    /// A token id is outside the vocabulary.
    #[error("id {token} is not below the vocabulary size {vocabulary}")]
    OutOfVocabulary {
        /// Index of the token.
        position: u64,
        /// Offset of the token in bytes; 0 in a file that is being written.
        offset: u64,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// A read reaches beyond the last token.
    #[error("{} from {first} on exceed its {}", plural(*length, "token"), plural(*tokens, "token"))]
    OutOfRange {
        /// Index of the first token to read.
        first: u64,
        /// Number of tokens to read.
        length: u64,
        /// Tokens of the file.
        tokens: u64,
    },
    /// The file is shorter than one sequence.
    #[error(
        "has {}, too few for one sequence of {sequence_length} and its last target",
        plural(*tokens, "token")
    )]
    TooFewTokens {
        /// Tokens of the file.
        tokens: u64,
        /// Tokens of a sequence.
        sequence_length: u64,
    },
    /// The sequence length is 0.
    #[error("cannot be split into sequences of length 0")]
    ZeroSequenceLength,
    /// The file has a larger vocabulary than the model.
    #[error("was made with a vocabulary of {file}, and the model has {model}")]
    VocabularyMismatch {
        /// Vocabulary size of the file.
        file: u32,
        /// Vocabulary size of the model.
        model: u32,
    },
    /// A cursor belongs to other tokens or another order of sequences.
    #[error("the cursor is for {property} {cursor}, and this run has {run}")]
    CursorMismatch {
        /// The property that differs.
        property: &'static str,
        /// Value of the property in the cursor.
        cursor: String,
        /// Value of the property in this run.
        run: String,
    },
    /// A sequence number exceeds the range of u64.
    #[error("sequence number {sequence} is too large")]
    SequenceNumberOverflow {
        /// The first sequence to read.
        sequence: u64,
    },
}

fn location_prefix(fault: &DataFault) -> String {
    fault.location().map_or(String::new(), |location| format!("{location}: "))
}

impl DataError {
    /// An error of a file.
    pub fn new(file: &Path, fault: DataFault) -> DataError {
        DataError { file: file.to_path_buf(), fault }
    }
}

impl DataFault {
    /// An invalid field of a header.
    pub(crate) fn field(offset: u64, field: &'static str, problem: impl Into<String>) -> DataFault {
        DataFault::InvalidField { offset, field, problem: problem.into() }
    }

    /// Location in the file; `None` for faults of the whole file.
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

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            DataFault::NotRegularFile => "a regular file, which can be read at any position",
            DataFault::Empty | DataFault::NotTokenFile { .. } => {
                "`narrows data TEXT --output FILE` makes token files of texts"
            }
            DataFault::InvalidField { .. } | DataFault::ChecksumMismatch { .. } => {
                "the file is damaged or of another program: make it again, or copy it again"
            }
            DataFault::Truncated { .. } => "copy the file again, or make it again, and resume",
            DataFault::IncompleteHeader { .. } => {
                "the file is truncated: copy it again, or make it again"
            }
            DataFault::LengthMismatch { expected, actual } if actual < expected => {
                "the file is truncated: copy it again, or make it again"
            }
            DataFault::LengthMismatch { .. } => {
                "something was appended to the file: copy it again, or make it again"
            }
            DataFault::OutOfVocabulary { .. } | DataFault::VocabularyMismatch { .. } => {
                "a model with this vocabulary, or the same text through the model's tokenizer"
            }
            DataFault::TooFewTokens { tokens: 0 | 1, .. } => "more text",
            DataFault::TooFewTokens { tokens, .. } => {
                return Some(format!(
                    "more text, or sequences of at most {}",
                    plural(tokens - 1, "token")
                ));
            }
            DataFault::ZeroSequenceLength => "a sequence length of at least 1",
            DataFault::CursorMismatch { .. } => {
                "the seed, sequence length and tokens of the checkpoint"
            }
            DataFault::Io { .. }
            | DataFault::OutOfRange { .. }
            | DataFault::SequenceNumberOverflow { .. } => {
                return None;
            }
        };
        Some(hint.into())
    }
}
