//! The reference interpreter: runs the unsharded [`Model`], one op after the other, on one device.
//!
//! It is the oracle for every backend: the loss, every gradient and the weights after some steps of
//! AdamW must come out equal, within rounding, for every plan of the search space on every backend.
//! So it is written to be believed: one file for each kind of op, with its formula, its forward pass
//! and its gradient derived by hand; no mesh, no layouts, no recomputation, no arena, and no code
//! shared with `emit`, `lower` or a backend. What it shares with them is what they must agree on:
//! the names and first values of the [parameters](narrows_runtime::logical_parameters) and the
//! [optimizer](narrows_runtime::Optimizer)'s figures.
//!
//! It computes in f32 or f64 throughout ([`Float`]); sums are plain sums in that format. In f64 its
//! gradients agree with central differences, and logits, gradients and ten losses with an
//! independent implementation by automatic differentiation: `tests/golden/README.md` in the
//! repository says which, and how well.
//!
//! ```
//! use narrows_plan::model::presets;
//! use narrows_runtime::Optimizer;
//! use narrows_reference::{Batch, Parameters, Reference};
//!
//! let model = presets::find("cola-tiny").unwrap();
//! let mut reference = Reference::new(&model, Parameters::<f32>::initial(&model, 17)).unwrap();
//! let (tokens, targets) = ([3, 1, 4, 1, 5, 9], [1, 4, 1, 5, 9, 2]);
//! let batch = Batch { tokens: &tokens, targets: &targets, sequences: 2, length: 3 };
//! let before = reference.step(&Optimizer::new(1e-3, 0, 10), &[batch]).unwrap().loss;
//! assert!(reference.loss(&[batch]).unwrap() < before);
//! ```

mod activation;
mod adamw;
mod attention;
mod block;
mod crossing_gate;
mod embedding_and_loss;
mod error;
mod float;
mod gated_product;
mod linear;
mod matrix;
mod miniature;
mod model_pass;
mod norm;
mod parameters;
mod rope;

use narrows_plan::model::Model;

use narrows_runtime::Optimizer;

pub use adamw::ReferenceStep;
pub use error::ReferenceError;
pub use float::Float;
pub use matrix::Matrix;
pub use miniature::{
    Comparison, GRADIENT_TOLERANCE, GRADIENT_TOLERANCE_MAX, LOSS_TOLERANCE, Miniature,
    NumericError, OpenSession,
};
pub use parameters::Parameters;

/// The tokens of one microbatch: whole sequences of equal length, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// `sequences × length` token ids.
    pub tokens: &'a [u32],
    /// The token that is to be predicted at each of them.
    pub targets: &'a [u32],
    /// How many sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
}

/// A model with its weights and, once it has made a step, AdamW's moments.
#[derive(Clone, Debug)]
pub struct Reference<T> {
    model: Model,
    parameters: Parameters<T>,
    /// Of the steps made so far; none before the first.
    moments: Option<adamw::AdamWMoments<T>>,
}

impl<T: Float> Reference<T> {
    /// A model with these weights, before its first step.
    ///
    /// # Errors
    /// When the names or shapes are not those of [`logical_parameters`].
    ///
    /// [`logical_parameters`]: narrows_runtime::logical_parameters
    pub fn new(model: &Model, parameters: Parameters<T>) -> Result<Self, ReferenceError> {
        parameters.check(model)?;
        Ok(Reference { model: model.clone(), parameters, moments: None })
    }

    /// The weights as they are now.
    pub fn parameters(&self) -> &Parameters<T> {
        &self.parameters
    }

    /// The logits of every token: tokens × vocab. Targets are not used.
    ///
    /// # Errors
    /// When the batch is empty, its sizes do not fit, or a token is outside the vocabulary.
    pub fn logits(&self, batch: Batch<'_>) -> Result<Matrix<T>, ReferenceError> {
        self.tokens_in(&[batch])?;
        Ok(model_pass::forward(&self.model, &self.parameters, batch).logits)
    }

    /// The mean cross-entropy over all tokens of all microbatches, in nats.
    ///
    /// # Errors
    /// As [`logits`](Self::logits), and when there is no microbatch.
    pub fn loss(&self, microbatches: &[Batch<'_>]) -> Result<T, ReferenceError> {
        let tokens = self.tokens_in(microbatches)?;
        let of = |batch: &Batch<'_>| {
            let logits = model_pass::forward(&self.model, &self.parameters, *batch).logits;
            embedding_and_loss::cross_entropy(&logits, batch.targets, tokens).0
        };
        Ok(microbatches.iter().map(of).sum())
    }

    /// The same loss with its gradients by all parameters.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    pub fn loss_and_gradients(
        &self,
        microbatches: &[Batch<'_>],
    ) -> Result<(T, Parameters<T>), ReferenceError> {
        let tokens = self.tokens_in(microbatches)?;
        let (model, parameters) = (&self.model, &self.parameters);
        let mut loss = T::zero();
        let mut gradients = Parameters::zeros(model);
        for batch in microbatches {
            let trace = model_pass::forward(model, parameters, *batch);
            let (summand, dlogits) =
                embedding_and_loss::cross_entropy(&trace.logits, batch.targets, tokens);
            loss += summand;
            model_pass::backward(model, parameters, *batch, &trace, &dlogits, &mut gradients);
        }
        Ok((loss, gradients))
    }

    /// One step of training on the microbatches together.
    ///
    /// # Errors
    /// As [`loss`](Self::loss); then nothing has changed.
    pub fn step(
        &mut self,
        optimizer: &Optimizer,
        microbatches: &[Batch<'_>],
    ) -> Result<ReferenceStep<T>, ReferenceError> {
        let (loss, gradients) = self.loss_and_gradients(microbatches)?;
        let model = &self.model;
        let moments = self.moments.get_or_insert_with(|| adamw::AdamWMoments::zeros(model));
        let (gradient_norm, learning_rate) =
            moments.update(model, optimizer, &mut self.parameters, &gradients);
        Ok(ReferenceStep { loss, gradient_norm, learning_rate })
    }

    /// Checks the microbatches of a step and counts their tokens.
    fn tokens_in(&self, microbatches: &[Batch<'_>]) -> Result<usize, ReferenceError> {
        if microbatches.is_empty() {
            return Err(ReferenceError::NoMicrobatch);
        }
        microbatches.iter().try_for_each(|batch| batch.check(self.model.vocab))?;
        Ok(microbatches.iter().map(|batch| batch.tokens.len()).sum())
    }
}

impl Batch<'_> {
    fn check(&self, vocab: u64) -> Result<(), ReferenceError> {
        let Batch { tokens, targets, sequences, length } = *self;
        let expected = sequences.checked_mul(length);
        if tokens.is_empty() || expected != Some(tokens.len()) || tokens.len() != targets.len() {
            let (tokens, targets) = (tokens.len(), targets.len());
            return Err(ReferenceError::BatchSizeMismatch { sequences, length, tokens, targets });
        }
        for (what, ids) in [("token", tokens), ("target", targets)] {
            if let Some(position) = ids.iter().position(|id| u64::from(*id) >= vocab) {
                let token = ids[position];
                return Err(ReferenceError::TokenOutOfVocabulary { what, position, token, vocab });
            }
        }
        Ok(())
    }
}
