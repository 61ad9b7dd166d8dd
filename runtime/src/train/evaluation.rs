//! Evaluation: the loss of a held-out token file, by forward passes alone.
//!
//! The first windows of the file are evaluated in their order, in batches of the program's size; the tokens of
//! an incomplete last batch repeat and are not predicted. The loss is the mean over all predicted tokens, so
//! that it does not depend on the batch. Weights, moments, gradients and the position in the training tokens
//! stay as they are, so that training gives the same bits with and without evaluations.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::data::Sampler;
use crate::session::{IGNORED_TARGET, Session, StepInput};

/// Evaluates the weights of a session on the first windows of a token file.
pub struct Evaluator {
    sampler: Sampler,
    /// Number of windows that are evaluated.
    windows: u64,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean cross-entropy over the predicted tokens, in nats.
    pub loss: f64,
    /// Number of predicted tokens.
    pub predicted_tokens: u64,
    /// Time of the evaluation.
    pub time: Duration,
}

impl Evaluation {
    /// Perplexity: e to the power of the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

impl Evaluator {
    /// Evaluates at least `tokens` tokens of the sampler's file, in whole windows, or all of them.
    ///
    /// # Errors
    /// [`TrainError::SequenceLengthMismatch`].
    pub fn new(
        sampler: Sampler,
        session: &Session,
        tokens: Option<u64>,
    ) -> Result<Evaluator, TrainError> {
        let work = session.program().context.workload;
        let (program, sampled) = (work.sequence_length, sampler.sequence_length());
        if program != sampled {
            return Err(TrainError::SequenceLengthMismatch { program, sampler: sampled });
        }
        let all = sampler.windows();
        let windows = tokens.map_or(all, |tokens| tokens.div_ceil(sampled).clamp(1, all));
        let count = (work.global_batch * program) as usize;
        Ok(Evaluator { sampler, windows, tokens: vec![0; count], targets: vec![0; count] })
    }

    /// The sampler of the file.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Evaluates the weights of a session. All processes of a run must call this method.
    ///
    /// # Errors
    /// When the tokens cannot be read, or a device or process is lost.
    pub fn evaluate(&mut self, session: &mut Session) -> Result<Evaluation, TrainError> {
        let start = Instant::now();
        let (mut loss_sum, mut predicted_tokens, mut first) = (0.0, 0, 0);
        while first < self.windows {
            first = self.fill(first)?;
            let input = StepInput { tokens: &self.tokens, targets: &self.targets };
            let batch = session.evaluate(input)?;
            loss_sum += batch.loss * batch.predicted_tokens as f64;
            predicted_tokens += batch.predicted_tokens;
        }
        if predicted_tokens == 0 {
            return Err(TrainError::NoPredictedToken);
        }
        let loss = loss_sum / predicted_tokens as f64;
        Ok(Evaluation { loss, predicted_tokens, time: start.elapsed() })
    }

    /// Fills a batch with windows from `first` on. Returns the window after them.
    fn fill(&mut self, first: u64) -> Result<u64, TrainError> {
        let length = self.sampler.sequence_length() as usize;
        let inputs = self.tokens.chunks_exact_mut(length);
        let mut window = first;
        for (inputs, targets) in inputs.zip(self.targets.chunks_exact_mut(length)) {
            self.sampler.fill_window(window.min(self.windows - 1), inputs, targets)?;
            if window >= self.windows {
                targets.fill(IGNORED_TARGET);
            }
            window += 1;
        }
        Ok(window)
    }
}

/// The best evaluation of a run, and how many evaluations followed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationHistory {
    /// Lowest loss; `None` before the first evaluation.
    pub best_loss: Option<f64>,
    /// Evaluations since then.
    pub since_best: u64,
}

impl EvaluationHistory {
    /// Adds an evaluation. Returns whether its loss is the lowest so far. One that is not finite never is.
    pub fn push(&mut self, loss: f64) -> bool {
        let is_best = loss.is_finite() && self.best_loss.is_none_or(|best| loss < best);
        *self = match is_best {
            true => EvaluationHistory { best_loss: Some(loss), since_best: 0 },
            false => EvaluationHistory { since_best: self.since_best + 1, ..*self },
        };
        is_best
    }
}
