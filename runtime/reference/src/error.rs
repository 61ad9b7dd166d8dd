//! What the interpreter refuses.

use thiserror::Error;

/// Why a model cannot be run on these numbers.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReferenceError {
    /// A parameter of the model is not among those given.
    #[error("the parameter `{name}` is missing")]
    MissingParameter {
        /// Its name.
        name: String,
    },
    /// A parameter has another shape than the model says.
    #[error("the parameter `{name}` is {found:?} (rows, columns), the model has {expected:?}")]
    ShapeMismatch {
        /// Its name.
        name: String,
        /// Rows and columns that were given.
        found: (usize, usize),
        /// Rows and columns of the model.
        expected: (usize, usize),
    },
    /// A parameter that the model does not have.
    #[error("the model has no parameter `{name}`")]
    UnknownParameter {
        /// Its name.
        name: String,
    },
    /// A batch whose parts do not fit each other, or that is empty.
    #[error(
        "{sequences} sequences of {length} tokens need as many tokens and targets, at least one; \
         there are {tokens} tokens and {targets} targets"
    )]
    BatchSizeMismatch {
        /// Sequences that were said.
        sequences: usize,
        /// Tokens of each.
        length: usize,
        /// Tokens there are.
        tokens: usize,
        /// Targets there are.
        targets: usize,
    },
    /// A step without microbatches.
    #[error("a step needs at least one microbatch")]
    NoMicrobatch,
    /// A token outside the vocabulary.
    #[error("{what} {position} is {token}, the vocabulary has {vocab} tokens")]
    TokenOutOfVocabulary {
        /// `token` or `target`.
        what: &'static str,
        /// Where in the batch, from 0.
        position: usize,
        /// The token.
        token: u32,
        /// Tokens in the vocabulary.
        vocab: u64,
    },
}
