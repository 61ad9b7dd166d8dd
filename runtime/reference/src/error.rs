//! Errors of the reference interpreter.

use narrows_plan::model::LinearKind;
use narrows_runtime::ExactStepFault;
use thiserror::Error;

/// Parameters or a batch that do not fit the model.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReferenceError {
    /// A parameter of the model is missing.
    #[error("the parameter `{name}` is missing")]
    MissingParameter {
        /// Name of the parameter.
        name: String,
    },
    /// A parameter has another shape than in the model.
    #[error("the parameter `{name}` is {actual:?} (rows, columns), the model has {expected:?}")]
    ShapeMismatch {
        /// Name of the parameter.
        name: String,
        /// Rows and columns of the parameter.
        actual: (usize, usize),
        /// Rows and columns of the model.
        expected: (usize, usize),
    },
    /// A parameter that the model does not have.
    #[error("the model has no parameter `{name}`")]
    UnknownParameter {
        /// Name of the parameter.
        name: String,
    },
    /// A batch that is empty, or whose sizes do not match.
    #[error(
        "{sequences} sequences of {length} tokens need as many tokens and targets, at least one; \
         there are {tokens} tokens and {targets} targets"
    )]
    BatchSizeMismatch {
        /// Number of sequences.
        sequences: usize,
        /// Tokens of each sequence.
        length: usize,
        /// Number of tokens.
        tokens: usize,
        /// Number of targets.
        targets: usize,
    },
    /// A step without microbatches.
    #[error("a step needs at least one microbatch")]
    NoMicrobatch,
    /// A token outside the vocabulary.
    #[error("{kind} {position} is {token}, the vocabulary has {vocab} tokens")]
    TokenOutOfVocabulary {
        /// `token` or `target`.
        kind: &'static str,
        /// Index in the batch.
        position: usize,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// The exact step of a factor pair has no result.
    #[error("the exact step of LORO on layer {block} {kind} has no result: {fault}")]
    ExactStep {
        /// The block.
        block: u64,
        /// The linear.
        kind: LinearKind,
        /// Reason.
        fault: ExactStepFault,
    },
}
