//! Evaluation: the loss of a held-out token file, by forward passes alone.
//!
//! The first windows of the file are evaluated in their order, in batches of the program's size; the tokens of
//! an incomplete last batch repeat and are not predicted. The loss is the mean over all predicted tokens, so
//! that it does not depend on the batch. Weights, moments, gradients and the position in the training tokens
//! stay as they are, so that training gives the same bits with and without evaluations.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::data::{DataError, Sampler};
use crate::serde_default::is_default;
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

/// Outcome of an evaluation, alike in all processes of a run.
#[derive(Debug)]
pub enum EvaluationOutcome {
    /// The evaluation.
    Evaluated(Evaluation),
    /// A process could not read its tokens: the error of this process, if it is that one.
    Unreadable(Option<DataError>),
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

    /// Tokens and windows that are evaluated.
    pub fn set(&self) -> EvaluationSet {
        let tokens_sha256 = self.sampler.tokens_sha256().to_owned();
        EvaluationSet { tokens_sha256, windows: self.windows }
    }

    /// Evaluates the weights of a session. All processes of a run must call this method. One that cannot read its tokens stays
    /// in the evaluation, where the others would wait for it, and all learn of it at the end.
    ///
    /// # Errors
    /// A lost device or process, and tokens of which none is predicted.
    pub fn evaluate(&mut self, session: &mut Session) -> Result<EvaluationOutcome, TrainError> {
        let start = Instant::now();
        let (mut loss_sum, mut predicted_tokens) = (0.0, 0);
        let mut unreadable = None;
        for first in (0..self.windows).step_by(self.windows_per_batch()) {
            if unreadable.is_none() {
                unreadable = self.fill(first).err();
            }
            if unreadable.is_some() {
                self.tokens.fill(0);
                self.targets.fill(IGNORED_TARGET);
            }
            let input = StepInput { tokens: &self.tokens, targets: &self.targets };
            let batch = session.evaluate(input)?;
            loss_sum += batch.loss * batch.predicted_tokens as f64;
            predicted_tokens += batch.predicted_tokens;
        }
        if session.any_rank(unreadable.is_some())? {
            return Ok(EvaluationOutcome::Unreadable(unreadable));
        }
        if predicted_tokens == 0 {
            return Err(TrainError::NoPredictedToken);
        }
        let loss = loss_sum / predicted_tokens as f64;
        let evaluation = Evaluation { loss, predicted_tokens, time: start.elapsed() };
        Ok(EvaluationOutcome::Evaluated(evaluation))
    }

    fn windows_per_batch(&self) -> usize {
        self.tokens.len() / self.sampler.sequence_length() as usize
    }

    /// Fills a batch with windows from `first` on.
    fn fill(&mut self, first: u64) -> Result<(), DataError> {
        let length = self.sampler.sequence_length() as usize;
        let inputs = self.tokens.chunks_exact_mut(length);
        let targets = self.targets.chunks_exact_mut(length);
        for (window, (inputs, targets)) in (first..).zip(inputs.zip(targets)) {
            self.sampler.fill_window(window.min(self.windows - 1), inputs, targets)?;
            if window >= self.windows {
                targets.fill(IGNORED_TARGET);
            }
        }
        Ok(())
    }
}

/// Tokens and windows of an evaluation. Losses over others are not comparable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationSet {
    /// SHA-256 of the tokens of the file, in hexadecimal digits.
    pub tokens_sha256: String,
    /// Number of windows that are evaluated, from the first one on.
    pub windows: u64,
}

/// The best evaluation of a run, and how many evaluations followed it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluationHistory {
    /// Lowest loss; `None` before the first evaluation.
    pub best_loss: Option<f64>,
    /// Step after which it was evaluated. Earlier versions did not record the step, nor the set.
    #[serde(default, skip_serializing_if = "is_default")]
    pub best_step: Option<u64>,
    /// Evaluations since then.
    pub since_best: u64,
    /// Tokens and windows that were evaluated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub set: Option<EvaluationSet>,
}

impl EvaluationHistory {
    /// Prepares the history for evaluations of this set. Returns whether it starts anew, because those so far were of another
    /// set.
    pub fn begin(&mut self, set: EvaluationSet) -> bool {
        let is_other = self.set.as_ref().is_some_and(|before| *before != set);
        if is_other {
            *self = EvaluationHistory::default();
        }
        self.set = Some(set);
        is_other
    }

    /// Adds the evaluation after a step. Returns whether its loss is the lowest so far. One that is not finite never is.
    pub fn push(&mut self, loss: f64, step: u64) -> bool {
        let is_best = loss.is_finite() && self.best_loss.is_none_or(|best| loss < best);
        if is_best {
            (self.best_loss, self.best_step, self.since_best) = (Some(loss), Some(step), 0);
        } else {
            self.since_best += 1;
        }
        is_best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_of_other_sets_are_not_compared() {
        let set = |tokens: &str, windows| EvaluationSet { tokens_sha256: tokens.into(), windows };
        let mut history = EvaluationHistory::default();
        assert!(!history.begin(set("a", 8)));
        assert!(history.push(2.0, 10) && !history.push(3.0, 20) && !history.push(f64::NAN, 30));
        assert_eq!((history.best_step, history.since_best), (Some(10), 2));
        assert!(!history.begin(set("a", 8)), "a run that resumes evaluates the same");
        assert_eq!(history.since_best, 2);
        for other in [set("a", 7), set("b", 7)] {
            assert!(history.begin(other.clone()));
            assert_eq!(history, EvaluationHistory { set: Some(other), ..Default::default() });
            assert!(history.push(9.0, 40), "the first evaluation of a set is its best");
        }
        // Written before sets were recorded.
        let mut earlier: EvaluationHistory =
            serde_json::from_str(r#"{"best_loss": 1.5, "since_best": 4}"#).unwrap();
        assert!(!earlier.begin(set("a", 8)));
        assert_eq!((earlier.best_loss, earlier.since_best), (Some(1.5), 4));
    }
}
