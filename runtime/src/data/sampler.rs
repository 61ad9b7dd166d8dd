//! Which tokens a sequence of a run is.
//!
//! With sequences of L tokens, a file of T tokens has n = ⌊(T − 1) / L⌋ *windows*: window w is the
//! tokens wL … wL + L, L inputs and the target of the last. Neighbours share one token, so every
//! token but the first and fewer than L at the end is a target once. The sequences of a run are
//! counted through, over steps and epochs: sequence g is
//!
//! ```text
//! window π(g mod n) of the permutation π of epoch ⌊g / n⌋
//! ```
//!
//! and where a run stands is one number. No mesh is in this: with G sequences in a step, sequence i
//! of step s is g = sG + i, and [`Sampler::first_of`] says which i the microbatches of a replica are.

use std::sync::Arc;

use narrows_plan::mesh::{Mesh, Workload};
use serde::{Deserialize, Serialize};

use super::error::{DataError, DataFault};
use super::permutation::Permutation;
use super::token_file::TokenFile;

/// What the order of sequences depends on, besides the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// Ids the model has: a token that is not below is an error.
    pub vocabulary: u32,
    /// Any number.
    pub seed: u64,
}

/// Where a run stands, for its checkpoints: small, and enough to go on with the sequence that would
/// have come next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// Sequences that were read; the next one's number.
    pub next_sequence: u64,
    /// The run's seed.
    pub seed: u64,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// SHA-256 of the tokens, in hex.
    pub tokens_sha256: String,
}

/// Reads the sequences of a run.
#[derive(Clone, Debug)]
pub struct Sampler {
    file: Arc<TokenFile>,
    sampling: SamplerConfig,
    windows: u64,
}

impl Sampler {
    /// A sampler of a file.
    ///
    /// # Errors
    /// When the file has less than one sequence, or says of itself that it has ids the model lacks.
    pub fn new(file: Arc<TokenFile>, sampling: SamplerConfig) -> Result<Sampler, DataError> {
        let windows =
            windows(&file, sampling).map_err(|fault| DataError::new(file.path(), fault))?;
        Ok(Sampler { file, sampling, windows })
    }

    /// The file.
    pub fn file(&self) -> &TokenFile {
        &self.file
    }

    /// Tokens of a sequence.
    pub fn sequence_length(&self) -> u64 {
        self.sampling.sequence_length
    }

    /// Sequences of an epoch.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// How often all windows were read before a sequence.
    pub fn epoch(&self, sequence: u64) -> u64 {
        sequence / self.windows
    }

    /// Which window a sequence is.
    pub fn window(&self, sequence: u64) -> u64 {
        let epoch = self.epoch(sequence);
        Permutation::new(self.windows, self.sampling.seed, epoch).at(sequence % self.windows)
    }

    /// The number of the first sequence that a microbatch of a replica reads, in the step that
    /// begins with sequence `step_first`. A step's sequences go to the replicas in runs, and a
    /// replica's to its microbatches in runs; the others of the microbatch follow the first.
    pub fn first_sequence_of(
        step_first: u64,
        (workload, mesh): (&Workload, &Mesh),
        replica: u64,
        microbatch: u64,
    ) -> u64 {
        let of_replica = workload.global_batch / mesh.data;
        step_first + replica * of_replica + microbatch * workload.micro_batch
    }

    /// Fills buffers with as many sequences as they have room for, from number `first` on, one
    /// behind the other: the inputs, and for each the token that follows it. Allocates nothing.
    ///
    /// # Errors
    /// When a token is not below the model's vocabulary.
    ///
    /// # Panics
    /// When the buffers do not hold the same whole number of sequences.
    pub fn fill(
        &self,
        first: u64,
        inputs: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let length = self.sampling.sequence_length as usize;
        assert_eq!(inputs.len(), targets.len(), "every input has a target");
        assert!(inputs.len().is_multiple_of(length), "a part of a sequence");
        let count = (inputs.len() / length) as u64;
        if first.checked_add(count).is_none() {
            return Err(DataError::new(
                self.file.path(),
                DataFault::SequenceNumberOverflow { sequence: first },
            ));
        }
        let rows = inputs.chunks_exact_mut(length).zip(targets.chunks_exact_mut(length));
        for ((inputs, targets), sequence) in rows.zip(first..) {
            let begin = self.window(sequence) * length as u64;
            let vocabulary = self.sampling.vocabulary;
            self.file.read_tokens(begin, vocabulary, inputs)?;
            let (shared, last) = targets.split_at_mut(length - 1);
            shared.copy_from_slice(&inputs[1..]);
            self.file.read_tokens(begin + length as u64, vocabulary, last)?;
        }
        Ok(())
    }

    /// The cursor of a run that will read sequence `next_sequence` next.
    pub fn cursor(&self, next_sequence: u64) -> Cursor {
        Cursor {
            next_sequence,
            seed: self.sampling.seed,
            sequence_length: self.sampling.sequence_length,
            tokens_sha256: hex::encode(self.file.fingerprint()),
        }
    }

    /// The sequence that a run which is resumed reads next.
    ///
    /// # Errors
    /// When the cursor is of other tokens, or of another order of them.
    pub fn sequence_to_resume(&self, cursor: &Cursor) -> Result<u64, DataError> {
        let here = self.cursor(cursor.next_sequence);
        let differences = [
            ("seed", cursor.seed.to_string(), here.seed.to_string()),
            (
                "sequences of length",
                cursor.sequence_length.to_string(),
                here.sequence_length.to_string(),
            ),
            ("tokens with SHA-256", cursor.tokens_sha256.clone(), here.tokens_sha256),
        ];
        match differences.into_iter().find(|(_, cursor, here)| cursor != here) {
            None => Ok(cursor.next_sequence),
            Some((what, cursor, here)) => {
                let fault = DataFault::CursorMismatch { what, cursor, here };
                Err(DataError::new(self.file.path(), fault))
            }
        }
    }
}

fn windows(file: &TokenFile, sampling: SamplerConfig) -> Result<u64, DataFault> {
    let SamplerConfig { sequence_length, vocabulary, .. } = sampling;
    if sequence_length == 0 {
        return Err(DataFault::ZeroSequenceLength);
    }
    let tokens = file.tokens();
    let windows = tokens.saturating_sub(1) / sequence_length;
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
