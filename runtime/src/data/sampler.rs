//! The tokens of each sequence of a run.
//!
//! With sequences of L tokens, a file of T tokens has n = ⌊(T − 1) / L⌋ *windows*: window w is the
//! tokens wL … wL + L: L inputs, and the target of the last. Consecutive windows share one token, so
//! every token but the first, and fewer than L at the end, is a target once. Sequences are numbered
//! consecutively over all steps and epochs of a run; sequence g is
//!
//! ```text
//! window π(g mod n) of the permutation π of epoch ⌊g / n⌋
//! ```
//!
//! With [`LastTarget::Ignored`], windows have no token in common: n = ⌊T / L⌋, and the last input of a window
//! has no target. The position of a run is one number. The order does not depend on the mesh: with G sequences in a
//! step, sequence i of step s is g = sG + i.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::error::{DataError, DataFault};
use super::permutation::Permutation;
use super::token_file::TokenFile;
use crate::serde_default::is_default;
use crate::session::IGNORED_TARGET;

/// Target of the last input of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastTarget {
    /// The token that follows in the file: all L inputs of a sequence have a target.
    #[default]
    Next,
    /// None, as where labels are the inputs themselves and are shifted within the sequence: L − 1 inputs
    /// have a target.
    Ignored,
}

/// The inputs of a sequence whose next token is predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetRule {
    /// Target of the last input.
    pub last: LastTarget,
    /// Token that is never a target: that with which short documents are padded.
    pub pad_id: Option<u32>,
}

impl fmt::Display for TargetRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.last {
            LastTarget::Next => "for every input",
            LastTarget::Ignored => "for every input but the last",
        })?;
        self.pad_id.map_or(Ok(()), |id| write!(f, ", except token {id}"))
    }
}

/// Everything that the sequences depend on, besides the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Vocabulary size of the model; a token that is not below it is an error.
    pub vocabulary: u32,
    /// Seed of the order.
    pub seed: u64,
    /// The inputs whose next token is predicted.
    pub targets: TargetRule,
}

/// Position of a run in its tokens, for checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// Number of the sequence that is read next.
    pub next_sequence: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// SHA-256 of the tokens, in hexadecimal digits.
    pub tokens_sha256: String,
    /// The inputs whose next token is predicted. Absent where all are, as in files of earlier versions.
    #[serde(default, skip_serializing_if = "is_default")]
    pub targets: TargetRule,
}

/// Reads the sequences of a run.
#[derive(Clone, Debug)]
pub struct Sampler {
    file: Arc<TokenFile>,
    config: SamplerConfig,
    windows: u64,
    /// SHA-256 of the tokens, in hexadecimal digits.
    tokens_sha256: String,
}

impl Sampler {
    /// A sampler of a file.
    ///
    /// # Errors
    /// When the file cannot be read, is shorter than one sequence, or has a larger vocabulary than the model.
    pub fn new(file: Arc<TokenFile>, config: SamplerConfig) -> Result<Sampler, DataError> {
        let windows =
            window_count(&file, config).map_err(|fault| DataError::new(file.path(), fault))?;
        let tokens_sha256 = hex::encode(file.fingerprint()?);
        Ok(Sampler { file, config, windows, tokens_sha256 })
    }

    /// The file.
    pub fn file(&self) -> &Arc<TokenFile> {
        &self.file
    }

    /// SHA-256 of the tokens, in hexadecimal digits: where the header of the file has one, what it claims, which
    /// [`TokenFile::verify_checksum`] verifies.
    pub fn tokens_sha256(&self) -> &str {
        &self.tokens_sha256
    }

    /// Tokens of a sequence.
    pub fn sequence_length(&self) -> u64 {
        self.config.sequence_length
    }

    /// Number of sequences of an epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Epoch of a sequence: how often all windows are read before it.
    pub fn epoch(&self, sequence: u64) -> u64 {
        sequence / self.windows
    }

    /// The window that a sequence reads.
    pub fn window(&self, sequence: u64) -> u64 {
        let epoch = self.epoch(sequence);
        Permutation::new(self.windows, self.config.seed, epoch).at(sequence % self.windows)
    }

    /// Fills buffers with as many sequences as they hold, from sequence `first` on: the inputs, and for
    /// each the token that follows, or [`IGNORED_TARGET`]. Allocates nothing.
    ///
    /// # Errors
    /// When the file cannot be read, or a token is not below the model's vocabulary.
    ///
    /// # Panics
    /// When the buffers do not hold the same whole number of sequences.
    pub fn fill(
        &self,
        first: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let length = self.config.sequence_length as usize;
        assert_eq!(inputs.len(), targets.len(), "every input has a target");
        assert!(inputs.len().is_multiple_of(length), "buffers hold whole sequences");
        let count = (inputs.len() / length) as u64;
        if first.checked_add(count).is_none() {
            return Err(DataError::new(
                self.file.path(),
                DataFault::SequenceNumberOverflow { sequence: first },
            ));
        }
        let rows = inputs.chunks_exact_mut(length).zip(targets.chunks_exact_mut(length));
        for ((inputs, targets), sequence) in rows.zip(first..) {
            self.fill_window(self.window(sequence), inputs, targets)?;
        }
        Ok(())
    }

    /// Fills the inputs and targets of one sequence with a window.
    ///
    /// # Errors
    /// When a token is not below the model's vocabulary.
    ///
    /// # Panics
    /// When there is no such window, or the buffers do not hold one sequence.
    pub fn fill_window(
        &self,
        window: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let SamplerConfig { sequence_length, vocabulary, targets: rule, .. } = self.config;
        assert!(window < self.windows, "the file has the window");
        let start = window * sequence_length;
        self.file.read_tokens(start, vocabulary, inputs)?;
        let (shared, last) = targets.split_at_mut(inputs.len() - 1);
        shared.copy_from_slice(&inputs[1..]);
        match rule.last {
            LastTarget::Next => {
                self.file.read_tokens(start + sequence_length, vocabulary, last)?;
            }
            LastTarget::Ignored => last.fill(IGNORED_TARGET),
        }
        if let Some(pad_id) = rule.pad_id {
            let padding = targets.iter_mut().filter(|target| **target == pad_id);
            padding.for_each(|target| *target = IGNORED_TARGET);
        }
        Ok(())
    }

    /// The cursor of a run that will read sequence `next_sequence` next.
    pub fn cursor(&self, next_sequence: u64) -> Cursor {
        Cursor {
            next_sequence,
            seed: self.config.seed,
            sequence_length: self.config.sequence_length,
            tokens_sha256: self.tokens_sha256.clone(),
            targets: self.config.targets,
        }
    }

    /// The sequence that a resumed run reads next.
    ///
    /// # Errors
    /// [`DataFault::CursorMismatch`] when the cursor belongs to other tokens or another order of them.
    pub fn sequence_to_resume(&self, cursor: &Cursor) -> Result<u64, DataError> {
        let own = self.cursor(cursor.next_sequence);
        let differences = [
            ("seed", cursor.seed.to_string(), own.seed.to_string()),
            (
                "sequences of length",
                cursor.sequence_length.to_string(),
                own.sequence_length.to_string(),
            ),
            ("tokens with SHA-256", cursor.tokens_sha256.clone(), own.tokens_sha256),
            (
                "a run with",
                format!("targets {}", cursor.targets),
                format!("targets {}", own.targets),
            ),
        ];
        match differences.into_iter().find(|(_, cursor, own)| cursor != own) {
            None => Ok(cursor.next_sequence),
            Some((property, cursor, run)) => {
                let fault = DataFault::CursorMismatch { property, cursor, run };
                Err(DataError::new(self.file.path(), fault))
            }
        }
    }
}

fn window_count(file: &TokenFile, config: SamplerConfig) -> Result<u64, DataFault> {
    let SamplerConfig { sequence_length, vocabulary, targets, .. } = config;
    if sequence_length == 0 {
        return Err(DataFault::ZeroSequenceLength);
    }
    let tokens = file.token_count();
    let windows = match targets.last {
        LastTarget::Next => tokens.saturating_sub(1) / sequence_length,
        LastTarget::Ignored => tokens / sequence_length,
    };
    if windows == 0 {
        return Err(DataFault::TooFewTokens { tokens, sequence_length });
    }
    match file.header().vocabulary {
        Some(stated) if stated > vocabulary => {
            Err(DataFault::VocabularyMismatch { file: stated, model: vocabulary })
        }
        _ => Ok(windows),
    }
}
