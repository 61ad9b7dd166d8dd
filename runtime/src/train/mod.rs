//! Training: steps of a [`Session`] on the sequences of a token file, one after the other.
//!
//! Step s, counted from 1, of a run with G sequences a step consists of the sequences
//! G(s − 1) … Gs − 1 of its [`Sampler`], in that order, so it is the same step under every plan. A
//! [`Trainer`] prints and writes nothing; the caller receives a [`TrainedStep`] after each step.
//!
//! For checkpoints, [`Trainer::session`] gives weights and moments as whole tensors and the number of
//! steps, and [`Trainer::cursor`] the position in the tokens; [`Trainer::session_mut`] and
//! [`Trainer::resume`] restore them.

mod collapse;
mod evaluation;
mod metrics;

use std::time::{Duration, Instant};

use crate::data::{Cursor, DataError, Sampler};
use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::session::{Session, StepInput};
use crate::time_breakdown::TimeCategory;

pub use collapse::{Collapse, CollapseWatch};
pub use evaluation::{Evaluation, EvaluationHistory, EvaluationOutcome, EvaluationSet, Evaluator};
pub use metrics::{MetricsRecord, StepPrediction, TrainedStep};

/// A training run: a session, a sampler of its tokens, and an optimizer.
pub struct Trainer {
    session: Session,
    sampler: Sampler,
    optimizer: Optimizer,
    next_sequence: u64,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    /// Time that reading the tokens of the next step has taken, if they have been read.
    read_ahead: Option<Duration>,
    evaluations: EvaluationHistory,
}

/// Whether a run continues after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainControl {
    /// Continue with the next step, if there is one.
    Continue,
    /// Stop after this step.
    Stop,
    /// Stop after this step, because evaluations no longer improve.
    StopEarly,
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainEnd {
    /// All steps were executed.
    Completed,
    /// The caller stopped the run.
    Stopped,
    /// The caller stopped the run, because evaluations no longer improve.
    StoppedEarly,
}

/// Error of a step. The weights are those of the previous step, unless its exact step failed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The tokens could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The step could not be executed, or its gradients were not finite.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Every target of an evaluation is ignored.
    #[error("the evaluation predicts no token")]
    NoPredictedToken,
    /// The sequences of the sampler have another length than those of the program.
    #[error(
        "the program runs sequences of {program} tokens, and the sampler reads sequences of {sampler}"
    )]
    SequenceLengthMismatch {
        /// Tokens in a sequence of the program.
        program: u64,
        /// Tokens in a sequence of the sampler.
        sampler: u64,
    },
}

impl Trainer {
    /// A run that starts with the first sequence and with the session's weights.
    ///
    /// # Errors
    /// [`TrainError::SequenceLengthMismatch`], and an optimizer that cannot train the program.
    pub fn new(
        session: Session,
        sampler: Sampler,
        optimizer: Optimizer,
    ) -> Result<Trainer, TrainError> {
        session.model_program().check_optimizer(&optimizer)?;
        let work = session.program().context.workload;
        let (program, sampled) = (work.sequence_length, sampler.sequence_length());
        if program != sampled {
            return Err(TrainError::SequenceLengthMismatch { program, sampler: sampled });
        }
        let count = (work.global_batch * program) as usize;
        let (tokens, targets) = (vec![0; count], vec![0; count]);
        Ok(Trainer {
            session,
            sampler,
            optimizer,
            next_sequence: 0,
            tokens,
            targets,
            read_ahead: None,
            evaluations: EvaluationHistory::default(),
        })
    }

    /// Reads the tokens of the next step, so that the step itself need not. In a run of many processes, one that cannot read
    /// them can tell the others before they are in the step, where they would wait for it.
    ///
    /// # Errors
    /// When the tokens cannot be read; nothing has changed.
    pub fn read_ahead(&mut self) -> Result<(), DataError> {
        if self.read_ahead.is_none() {
            let start = Instant::now();
            self.sampler.fill(self.next_sequence, &mut self.tokens, &mut self.targets)?;
            self.read_ahead = Some(start.elapsed());
        }
        Ok(())
    }

    /// Executes one step.
    ///
    /// # Errors
    /// When the tokens cannot be read, or loss or gradients are not finite: then neither the weights
    /// nor the position in the tokens have changed.
    pub fn step(&mut self) -> Result<TrainedStep, TrainError> {
        self.read_ahead()?;
        let data_time = self.read_ahead.take().unwrap_or_default();
        let (start, first_sequence) = (Instant::now(), self.next_sequence);
        let input = StepInput { tokens: &self.tokens, targets: &self.targets };
        let result = self.session.step(&self.optimizer, input)?;
        self.next_sequence += self.session.program().context.workload.global_batch;
        let step = self.session.steps();
        // Never zero, because metrics divide by it.
        let step_time = (data_time + start.elapsed()).max(Duration::from_nanos(1));
        let mut time_breakdown = result.time_breakdown;
        let other = step_time.saturating_sub(time_breakdown.total());
        time_breakdown.add(TimeCategory::Other, other);
        Ok(TrainedStep {
            step,
            loss: result.loss,
            gradient_norm: result.gradient_norm,
            learning_rate: self.optimizer.learning_rate(step),
            tokens: self.tokens.len() as u64,
            epoch: self.sampler.epoch(first_sequence),
            data_time,
            step_time,
            time_breakdown,
            report: result.report,
            scratch_bytes: result.scratch_bytes,
        })
    }

    /// Executes steps until their number, including those before a [`resume`](Trainer::resume), is
    /// `last_step`. `on_step` is called after each step. In a run of many processes it must return the
    /// same in all of them: see [`Session::any_rank`].
    ///
    /// # Errors
    /// As [`step`](Trainer::step), or the first error of `on_step`.
    pub fn train<E: From<TrainError>>(
        &mut self,
        last_step: u64,
        mut on_step: impl FnMut(&mut Trainer, &TrainedStep) -> Result<TrainControl, E>,
    ) -> Result<TrainEnd, E> {
        while self.session.steps() < last_step {
            let trained = self.step()?;
            let control = on_step(self, &trained)?;
            let end = match control {
                TrainControl::Continue => continue,
                TrainControl::Stop => TrainEnd::Stopped,
                TrainControl::StopEarly => TrainEnd::StoppedEarly,
            };
            if self.session.steps() < last_step {
                return Ok(end);
            }
        }
        Ok(TrainEnd::Completed)
    }

    /// Evaluates the current weights. An evaluation joins [`evaluations`](Trainer::evaluations). All processes of a run must
    /// call this method.
    ///
    /// # Errors
    /// As [`Evaluator::evaluate`].
    pub fn evaluate(&mut self, evaluator: &mut Evaluator) -> Result<EvaluationOutcome, TrainError> {
        let outcome = evaluator.evaluate(&mut self.session)?;
        if let EvaluationOutcome::Evaluated(evaluation) = &outcome {
            self.evaluations.push(evaluation.loss, self.session.steps());
        }
        Ok(outcome)
    }

    /// The evaluations of the run so far.
    pub fn evaluations(&self) -> &EvaluationHistory {
        &self.evaluations
    }

    /// Prepares the run for an evaluator. Returns whether the evaluations so far were of other windows or tokens: then
    /// their lowest loss no longer counts.
    pub fn begin_evaluations(&mut self, evaluator: &Evaluator) -> bool {
        self.evaluations.begin(evaluator.set())
    }

    /// Sets the evaluations so far, to resume a run.
    pub fn set_evaluations(&mut self, evaluations: EvaluationHistory) {
        self.evaluations = evaluations;
    }

    /// The session: weights, moments, and the number of steps.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The session, to restore a checkpoint.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// The sampler of the tokens.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Position in the tokens.
    pub fn cursor(&self) -> Cursor {
        self.sampler.cursor(self.next_sequence)
    }

    /// Continues at a cursor, after `steps` steps. Weights and moments must be restored separately.
    ///
    /// # Errors
    /// When the cursor belongs to other tokens, or to another order of them.
    pub fn resume(&mut self, cursor: &Cursor, steps: u64) -> Result<(), DataError> {
        self.next_sequence = self.sampler.sequence_to_resume(cursor)?;
        self.read_ahead = None;
        self.session.set_steps(steps);
        Ok(())
    }
}
