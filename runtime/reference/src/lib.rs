//! The reference interpreter: runs the unsharded [`Model`], one op after the other, on one device.
//!
//! The interpreter is the test oracle of every backend: the loss, every gradient and the weights after
//! some steps of AdamW must be equal, within rounding, for every plan of the search space on every
//! backend. It is written for correctness that can be verified by reading: one file for each kind of
//! op, with its formula, its forward pass and its gradient derived by hand; no mesh, no layouts, no
//! recomputation, no arena, and no code shared with `emit`, `lower` or a backend. It shares with them
//! only the names and initial values of the [parameters](narrows_runtime::logical_parameters) and the
//! coefficients of the [optimizer](narrows_runtime::Optimizer), with the exact step of LORO, which is compared with PyTorch and
//! with whole matrices.
//!
//! All arithmetic is in f32 or in f64 ([`Float`]). In f64, gradients agree with central differences,
//! and logits, gradients and ten losses with an independent implementation by automatic
//! differentiation: see `tests/golden/README.md` in the repository.
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
mod linear_id;
mod matrix;
mod miniature;
mod model_pass;
mod norm;
mod parameters;
mod rope;

use narrows_plan::model::Model;

use narrows_runtime::{IGNORED_TARGET, Optimizer};

pub use adamw::ReferenceStep;
pub use error::ReferenceError;
pub use float::Float;
pub use matrix::Matrix;
pub use miniature::{
    GRADIENT_TOLERANCE, LOSS_TOLERANCE, Miniature, NumericComparison, NumericError, OpenSession,
};
pub use parameters::Parameters;

/// The tokens of one microbatch: whole sequences of equal length, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// `sequences × length` token ids.
    pub tokens: &'a [u32],
    /// The token to predict at each position, or [`IGNORED_TARGET`],
    /// `sequences × length`.
    pub targets: &'a [u32],
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens of each sequence.
    pub length: usize,
}

/// A model with its weights and the state of AdamW.
#[derive(Clone, Debug)]
pub struct Reference<T> {
    model: Model,
    parameters: Parameters<T>,
    /// `None` before the first step.
    moments: Option<adamw::AdamWMoments<T>>,
}

impl<T: Float> Reference<T> {
    /// A model with these weights, before the first step.
    ///
    /// # Errors
    /// When the ids or shapes of the parameters are not those of [`logical_parameters`].
    ///
    /// [`logical_parameters`]: narrows_runtime::logical_parameters
    pub fn new(model: &Model, parameters: Parameters<T>) -> Result<Self, ReferenceError> {
        parameters.validate(model)?;
        Ok(Reference { model: model.clone(), parameters, moments: None })
    }

    /// The current weights.
    pub fn parameters(&self) -> &Parameters<T> {
        &self.parameters
    }

    /// The logits, tokens × vocabulary. Targets are not used.
    ///
    /// # Errors
    /// When the batch is empty, its sizes do not match, or a token is outside the vocabulary.
    pub fn logits(&self, batch: Batch<'_>) -> Result<Matrix<T>, ReferenceError> {
        self.count_predicted(&[batch])?;
        Ok(model_pass::forward(&self.model, &self.parameters, batch).logits)
    }

    /// The mean cross-entropy over the predicted tokens of all microbatches, in nats; 0 without any.
    ///
    /// # Errors
    /// As [`logits`](Self::logits), and when there are no microbatches.
    pub fn loss(&self, microbatches: &[Batch<'_>]) -> Result<T, ReferenceError> {
        let predicted = self.count_predicted(microbatches)?;
        let microbatch_loss = |batch: &Batch<'_>| {
            let logits = model_pass::forward(&self.model, &self.parameters, *batch).logits;
            embedding_and_loss::cross_entropy(&logits, batch.targets, predicted).0
        };
        Ok(microbatches.iter().map(microbatch_loss).sum())
    }

    /// The mean loss, and its gradients with respect to all parameters.
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    pub fn loss_and_gradients(
        &self,
        microbatches: &[Batch<'_>],
    ) -> Result<(T, Parameters<T>), ReferenceError> {
        let predicted = self.count_predicted(microbatches)?;
        let (model, parameters) = (&self.model, &self.parameters);
        let mut loss = T::zero();
        let mut gradients = Parameters::zeros(model);
        for batch in microbatches {
            let tape = model_pass::forward(model, parameters, *batch);
            let (microbatch_loss, dlogits) =
                embedding_and_loss::cross_entropy(&tape.logits, batch.targets, predicted);
            loss += microbatch_loss;
            model_pass::backward(model, parameters, *batch, &tape, &dlogits, &mut gradients);
        }
        Ok((loss, gradients))
    }

    /// One training step on a batch of several microbatches.
    ///
    /// # Errors
    /// As [`loss`](Self::loss), with the state unchanged; and an exact step of LORO without a result.
    pub fn step(
        &mut self,
        optimizer: &Optimizer,
        microbatches: &[Batch<'_>],
    ) -> Result<ReferenceStep<T>, ReferenceError> {
        let (loss, gradients) = self.loss_and_gradients(microbatches)?;
        let model = &self.model;
        let moments = self.moments.get_or_insert_with(|| adamw::AdamWMoments::zeros(model));
        let (gradient_norm, learning_rate) =
            moments.update(model, optimizer, &mut self.parameters, &gradients)?;
        Ok(ReferenceStep { loss, gradient_norm, learning_rate })
    }

    /// Checks the microbatches of a step and counts their predicted tokens, at least one.
    fn count_predicted(&self, microbatches: &[Batch<'_>]) -> Result<usize, ReferenceError> {
        if microbatches.is_empty() {
            return Err(ReferenceError::NoMicrobatch);
        }
        microbatches.iter().try_for_each(|batch| batch.validate(self.model.vocab))?;
        let targets = microbatches.iter().flat_map(|batch| batch.targets);
        Ok(targets.filter(|target| **target != IGNORED_TARGET).count().max(1))
    }
}

impl Batch<'_> {
    fn validate(&self, vocab: u64) -> Result<(), ReferenceError> {
        let Batch { tokens, targets, sequences, length } = *self;
        let expected = sequences.checked_mul(length);
        if tokens.is_empty() || expected != Some(tokens.len()) || tokens.len() != targets.len() {
            let (tokens, targets) = (tokens.len(), targets.len());
            return Err(ReferenceError::BatchSizeMismatch { sequences, length, tokens, targets });
        }
        for (kind, ids, may_be_ignored) in [("token", tokens, false), ("target", targets, true)] {
            let is_valid =
                |id: u32| u64::from(id) < vocab || may_be_ignored && id == IGNORED_TARGET;
            if let Some(position) = ids.iter().position(|id| !is_valid(*id)) {
                let token = ids[position];
                return Err(ReferenceError::TokenOutOfVocabulary { kind, position, token, vocab });
            }
        }
        Ok(())
    }
}
