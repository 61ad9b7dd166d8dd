//! Generation: the forward pass of one sequence, a few tokens at a time.
//!
//! A [`CachedModel`] holds whole, unsharded weights, and the keys and values of the tokens so far, so that each new
//! token costs one pass over the weights. It computes the function of the model with the kernels of training, on
//! one device: the forms of a norm, which differ in their communication, are one form here.
//!
//! | file | contents |
//! |---|---|
//! | `block`, `block_context` | one block |
//! | `linear` | a linear: dense, or a factor pair with or without a latent crossing |
//! | `norm` | RMSNorm |
//! | `cache` | keys and values |

mod block;
mod block_context;
mod cache;
mod linear;
mod norm;

use narrows_plan::model::{Model, ParameterId, WeightId};
use narrows_runtime::session::ModelTensors;

use crate::kernels::{
    MatrixView, MatrixViewMut, Parallel, RopeTable, WriteMode, embedding_gather, gemm_forward,
};

use block_context::BlockContext;
use cache::KvCache;
use norm::norm;

/// Tokens that pass through a block at once, at most: scratch memory grows with them.
const CHUNK_TOKENS: usize = 128;

/// A sequence, and the model that continues it.
pub struct CachedModel {
    model: Model,
    weights: ModelTensors,
    rope: RopeTable,
    /// Longest sequence, in tokens.
    positions: usize,
    /// For each block.
    caches: Vec<KvCache>,
    parallel: Parallel,
}

/// Error of adding tokens to a sequence, which is then unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// A token is not in the vocabulary.
    #[error("token {token} is not in the vocabulary of {vocab}")]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// The sequence would be longer than announced.
    #[error("{tokens} tokens do not fit into {positions} positions")]
    TooManyTokens {
        /// Tokens of the sequence with the new ones.
        tokens: usize,
        /// Longest sequence.
        positions: usize,
    },
}

impl CachedModel {
    /// An empty sequence of at most `positions` tokens.
    ///
    /// # Panics
    /// When a parameter of the model has no weights, or of another size.
    pub fn new(
        model: &Model,
        weights: ModelTensors,
        positions: usize,
        parallel: Parallel,
    ) -> CachedModel {
        for parameter in narrows_runtime::logical_parameters(model) {
            let actual = weights.get(&parameter.id).map(|tensor| tensor.len() as u64);
            assert_eq!(actual, Some(parameter.elements()), "elements of {}", parameter.id);
        }
        let rope = RopeTable::new(positions, model.head_dim as usize, &model.rope);
        let caches = vec![KvCache::default(); model.blocks.len()];
        CachedModel { model: model.clone(), weights, rope, positions, caches, parallel }
    }

    /// Number of tokens of the sequence.
    pub fn tokens(&self) -> usize {
        let width = self.model.kv_heads * self.model.head_dim;
        self.caches.first().map_or(0, |cache| cache.tokens(width as usize))
    }

    /// Adds tokens to the sequence. Returns the logits of the token after the last one, one for each token of the
    /// vocabulary; none without tokens.
    ///
    /// # Errors
    /// A token outside the vocabulary, and a sequence that becomes too long.
    pub fn push(&mut self, tokens: &[u32]) -> Result<Vec<f32>, SequenceError> {
        self.check(tokens)?;
        let mut last = vec![];
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            let hidden = self.forward(chunk);
            let width = self.model.hidden as usize;
            last = hidden[hidden.len() - width..].to_vec();
        }
        Ok(self.logits(&last))
    }

    /// As [`push`](Self::push); returns the logits after every token, `[tokens, vocab]`.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_with_all_logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>, SequenceError> {
        self.check(tokens)?;
        let mut logits = vec![];
        for chunk in tokens.chunks(CHUNK_TOKENS) {
            let hidden = self.forward(chunk);
            logits.extend(self.logits(&hidden));
        }
        Ok(logits)
    }

    fn check(&self, tokens: &[u32]) -> Result<(), SequenceError> {
        let vocab = self.model.vocab;
        if let Some(&token) = tokens.iter().find(|token| u64::from(**token) >= vocab) {
            return Err(SequenceError::TokenOutOfVocabulary { token, vocab });
        }
        let (tokens, positions) = (self.tokens() + tokens.len(), self.positions);
        if tokens > positions {
            return Err(SequenceError::TooManyTokens { tokens, positions });
        }
        Ok(())
    }

    /// The output of the last block for new tokens, `[tokens, hidden]`.
    fn forward(&mut self, tokens: &[u32]) -> Vec<f32> {
        let first_position = self.tokens();
        let CachedModel { model, weights, rope, parallel, caches, .. } = self;
        let (rows, width) = (tokens.len(), model.hidden as usize);
        let mut x = vec![0.0; rows * width];
        let table = MatrixView::new(&weights[&EMBEDDING], model.vocab as usize, width);
        embedding_gather(tokens, table, 0, MatrixViewMut::new(&mut x, rows, width), *parallel);
        let mut latents = Default::default();
        for (index, cache) in caches.iter_mut().enumerate() {
            let (tokens, parallel) = (rows, *parallel);
            let block =
                BlockContext { model, index, weights, rope, first_position, tokens, parallel };
            x = block.forward(x, cache, &mut latents);
        }
        x
    }

    /// Logits `[tokens, vocab]` for outputs of the last block, `[tokens, hidden]`.
    fn logits(&self, x: &[f32]) -> Vec<f32> {
        let CachedModel { model, weights, parallel, .. } = self;
        let (hidden, vocab) = (model.hidden as usize, model.vocab as usize);
        let rows = x.len() / hidden;
        let normed = norm(x, &weights[&FINAL_NORM], model.norm_epsilon, *parallel);
        let weight = match model.tied {
            true => MatrixView::new(&weights[&EMBEDDING], vocab, hidden).transposed(),
            false => MatrixView::new(&weights[&HEAD], hidden, vocab).into(),
        };
        let mut logits = vec![0.0; rows * vocab];
        let y = MatrixViewMut::new(&mut logits, rows, vocab);
        let normed = MatrixView::new(&normed, rows, hidden);
        gemm_forward(normed, weight, y, 1, WriteMode::Replace, *parallel);
        logits
    }
}

const EMBEDDING: ParameterId = ParameterId { block: None, weight: WeightId::Embedding };
const FINAL_NORM: ParameterId = ParameterId { block: None, weight: WeightId::FinalNorm };
const HEAD: ParameterId = ParameterId { block: None, weight: WeightId::Head };
