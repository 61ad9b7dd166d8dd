//! Training: steps on the processor backend, one after the other, on the sequences of a token file.
//!
//! Step s, counted from 1, of a run with G sequences a step is made of the sequences
//! G(s − 1) … Gs − 1 of its [`Sampler`], handed to the [`Session`] in that order, so it is the same
//! step under every plan. A [`Trainer`] draws, prints and writes nothing: what came of a step is a
//! [`TrainedStep`], for whoever watches.
//!
//! What a checkpoint needs is there: [`Trainer::session`] gives weights and moments as whole tensors
//! and the steps made, [`Trainer::cursor`] says where in the tokens the run stands;
//! [`Trainer::session_mut`] and [`Trainer::resume`] put them back.

mod metrics;

use std::time::{Duration, Instant};

use crate::data::{Cursor, DataError, Sampler};
use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::session::{Session, StepInput};
use crate::time_breakdown::TimeCategory;

pub use metrics::{MetricsRecord, StepPrediction, TrainedStep};

/// A run: a program with its memory, where its tokens come from, and how its weights change.
pub struct Trainer {
    session: Session,
    sampler: Sampler,
    optimizer: Optimizer,
    next_sequence: u64,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

/// Whether a run goes on after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainControl {
    /// With the next step, if there is one.
    Continue,
    /// Not any more.
    Stop,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainEnd {
    /// All steps were made.
    Completed,
    /// Whoever watches wanted no more.
    Stopped,
}

/// Why a step was not made. The weights are those of the step before.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Its tokens could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// It could not be executed, or its gradients were no numbers.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The sampler cuts sequences of another length than the program runs.
    #[error("the program runs sequences of {program} tokens, and the sampler cuts {sampler}")]
    SequenceLengthMismatch {
        /// Tokens of a sequence of the program.
        program: u64,
        /// Tokens of a sequence of the sampler.
        sampler: u64,
    },
}

impl Trainer {
    /// A run from its first sequence on. The session's weights are those it begins with.
    ///
    /// # Errors
    /// When the sampler's sequences are not as long as the program's.
    pub fn new(
        session: Session,
        sampler: Sampler,
        optimizer: Optimizer,
    ) -> Result<Trainer, TrainError> {
        let work = session.program().context.workload;
        let (program, cut) = (work.sequence_length, sampler.sequence_length());
        if program != cut {
            return Err(TrainError::SequenceLengthMismatch { program, sampler: cut });
        }
        let count = (work.global_batch * program) as usize;
        let (tokens, targets) = (vec![0; count], vec![0; count]);
        Ok(Trainer { session, sampler, optimizer, next_sequence: 0, tokens, targets })
    }

    /// One step.
    ///
    /// # Errors
    /// When its tokens cannot be read, or loss or gradients are no numbers: then no weight has
    /// changed, and the run stands where it stood.
    pub fn step(&mut self) -> Result<TrainedStep, TrainError> {
        let begin = Instant::now();
        let first_sequence = self.next_sequence;
        self.sampler.fill(first_sequence, &mut self.tokens, &mut self.targets)?;
        let read = begin.elapsed();
        let input = StepInput { tokens: &self.tokens, targets: &self.targets };
        let done = self.session.step(&self.optimizer, input)?;
        self.next_sequence += self.session.program().context.workload.global_batch;
        let step = self.session.steps();
        // A clock that stood still would make infinitely many tokens a second.
        let time = begin.elapsed().max(Duration::from_nanos(1));
        let mut parts = done.time_breakdown;
        parts.add(TimeCategory::Other, time.saturating_sub(parts.total()));
        Ok(TrainedStep {
            step,
            loss: done.loss,
            gradient_norm: done.gradient_norm,
            learning_rate: self.optimizer.learning_rate(step),
            tokens: self.tokens.len() as u64,
            epoch: self.sampler.epoch(first_sequence),
            data_time: read,
            step_time: time,
            time_breakdown: parts,
            report: done.report,
            scratch_bytes: done.scratch_bytes,
        })
    }

    /// Steps until so many were made, those before a [`resume`](Trainer::resume) included. `watch`
    /// sees the run after each. In a run of many processes it must want the same in all of them, which
    /// [`Session::anyone`] finds out.
    ///
    /// # Errors
    /// As [`step`](Trainer::step), or the first that `watch` gives.
    pub fn train<E: From<TrainError>>(
        &mut self,
        until: u64,
        mut watch: impl FnMut(&Trainer, &TrainedStep) -> Result<TrainControl, E>,
    ) -> Result<TrainEnd, E> {
        while self.session.steps() < until {
            let trained = self.step()?;
            let next = watch(self, &trained)?;
            if next == TrainControl::Stop && self.session.steps() < until {
                return Ok(TrainEnd::Stopped);
            }
        }
        Ok(TrainEnd::Completed)
    }

    /// The program and its memory: weights, moments, steps made.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The same, to put back what a checkpoint holds.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Where the tokens come from.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// How the weights change.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Where in the tokens the run stands.
    pub fn cursor(&self) -> Cursor {
        self.sampler.cursor(self.next_sequence)
    }

    /// Goes on at a cursor, as if so many steps had been made. Weights and moments are the session's.
    ///
    /// # Errors
    /// When the cursor is of other tokens, or of another order of them.
    pub fn resume(&mut self, cursor: &Cursor, steps: u64) -> Result<(), DataError> {
        self.next_sequence = self.sampler.sequence_to_resume(cursor)?;
        self.session.set_steps(steps);
        Ok(())
    }
}
