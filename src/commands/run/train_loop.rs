//! The loop of steps: what a run does after each step, and how it ends.

use narrows_runtime::train::{EvaluationOutcome, TrainControl, TrainEnd, TrainError, TrainedStep};
use narrows_runtime::{RunError, Trainer};

use super::checkpoints::CheckpointKeeper;
use super::data_check::DataCheck;
use super::step_log::StepLog;
use super::trace::Tracer;
use super::validation::Validation;
use crate::errors::{CommandResult, Failure};
use crate::signals::StopRequests;

/// Parts of a run that act after each of its steps.
pub struct TrainLoop<'a> {
    /// Number of the last step.
    pub steps: u64,
    /// Records of the steps.
    pub log: StepLog<'a>,
    /// The trace, if one is written.
    pub tracer: Option<Tracer<'a>>,
    /// Evaluations on a held-out token file, if there is one.
    pub validation: Option<Validation<'a>>,
    /// Verification of the token files.
    pub data_check: DataCheck,
    /// The checkpoints.
    pub keeper: CheckpointKeeper<'a>,
    /// Signals that ask the run to stop.
    pub stop: StopRequests,
    /// Failure of this process beside a step. The run then stops in order, with a checkpoint, so that no step is lost.
    pub fault: Option<Failure>,
}

/// Error that ends the loop of steps.
enum LoopError {
    /// A step failed.
    Step(TrainError),
    /// A checkpoint or an evaluation failed.
    Ended(Failure),
}

impl From<TrainError> for LoopError {
    fn from(error: TrainError) -> LoopError {
        LoopError::Step(error)
    }
}

impl TrainLoop<'_> {
    /// Trains until the last step or until the run stops, and writes its last checkpoint.
    ///
    /// # Errors
    /// A failed step, evaluation, checkpoint or record.
    pub fn run(&mut self, trainer: &mut Trainer) -> CommandResult<TrainEnd> {
        let had_stopped_early = trainer.session().steps() < self.steps
            && self.validation.as_ref().is_some_and(|validation| validation.ends(trainer));
        let ended = match had_stopped_early {
            true => Ok(TrainEnd::StoppedEarly),
            false => {
                trainer.train(self.steps, |trainer, trained| self.after_step(trainer, trained))
            }
        };
        self.log.finish();
        match ended {
            Ok(end) => self.save_last(end, trainer),
            Err(LoopError::Step(error)) => Err(self.step_failure(error, trainer)),
            Err(LoopError::Ended(failure)) => Err(self.with_cause(failure, trainer)),
        }
    }

    /// Writes the last checkpoint.
    ///
    /// # Errors
    /// The fault that stopped the run, and a checkpoint that cannot be written.
    fn save_last(&mut self, end: TrainEnd, trainer: &Trainer) -> CommandResult<TrainEnd> {
        if end == TrainEnd::Stopped {
            self.fault = self.fault.take().or_else(|| self.stop.fault());
        }
        match self.keeper.save(trainer) {
            Ok(()) => self.fault.take().map_or(Ok(end), Err),
            Err(failure) => Err(self.with_cause(failure, trainer)),
        }
    }

    /// A failure while the run stops, after the reason why it stops. The status is that of this reason.
    fn with_cause(&mut self, mut failure: Failure, trainer: &Trainer) -> Failure {
        if let Some(mut fault) = self.fault.take() {
            fault.problems.extend(failure.problems);
            return fault;
        }
        if let (true, Some(problem)) = (self.stop.are_pending(), failure.problems.first_mut()) {
            let step = trainer.session().steps();
            problem.causes.push(format!("a signal stopped the run after step {step}"));
        }
        failure
    }

    fn after_step(
        &mut self,
        trainer: &mut Trainer,
        trained: &TrainedStep,
    ) -> Result<TrainControl, LoopError> {
        if let Some(tracer) = &mut self.tracer {
            tracer.record(trainer, trained);
        }
        let outcome = match &mut self.validation {
            Some(validation) => validation.evaluate_if_due(trainer, self.steps),
            None => Ok(None),
        };
        let evaluation = match &outcome {
            Ok(Some(EvaluationOutcome::Evaluated(evaluation))) => Some(*evaluation),
            _ => None,
        };
        let recorded = self.log.record(trained, evaluation.as_ref());
        if let Some(EvaluationOutcome::Unreadable(error)) = outcome? {
            self.fault = error.map(Failure::token_file);
        }
        let judged = self.validation.as_mut().zip(evaluation);
        let verdict = judged.map(|(validation, evaluation)| validation.judge(evaluation, trainer));
        let line = verdict.as_ref().map_or(String::new(), |verdict| verdict.line(trained.step));
        let printed = self.log.print(trained, &line);
        let control = verdict.as_ref().map_or(TrainControl::Continue, |verdict| verdict.control);
        let tokens = match control == TrainControl::Continue && trained.step < self.steps {
            true => trainer.read_ahead().map_err(Failure::token_file),
            false => Ok(()),
        };
        self.fault = self
            .fault
            .take()
            .or(recorded.and(printed).and(tokens).err())
            .or_else(|| self.data_check.fault())
            .or_else(|| self.stop.fault());
        let is_best = verdict.is_some_and(|verdict| verdict.is_best);
        self.save_or_stop(trainer, control, is_best).map_err(LoopError::Ended)
    }

    /// Writes the checkpoints that are due after a step, unless a process stops the run.
    fn save_or_stop(
        &mut self,
        trainer: &Trainer,
        control: TrainControl,
        is_best: bool,
    ) -> CommandResult<TrainControl> {
        if is_best {
            self.keeper.save_best(trainer)?;
        }
        // Processes write checkpoints together, so they first agree whether to continue.
        let stop = self.stop.are_pending() || self.fault.is_some();
        if self.keeper.agree(trainer, stop)? {
            return Ok(TrainControl::Stop);
        }
        if control == TrainControl::Continue {
            self.keeper.save_if_due(trainer, self.steps)?;
        }
        Ok(control)
    }

    /// The failure of a step, after completing the checkpoint that is being written if all processes do so.
    fn step_failure(&mut self, error: TrainError, trainer: &Trainer) -> Failure {
        // Other processes complete the checkpoint if they have failed in the same way.
        let is_common = matches!(error, TrainError::Run(RunError::NonFiniteGradients { .. }));
        let saved = match is_common || trainer.session().process_group().is_none() {
            true => self.keeper.finish_pending(),
            false => Ok(()),
        };
        let mut failure = Failure::from(error);
        failure.problems.extend(saved.err().into_iter().flat_map(|failed| failed.problems));
        failure
    }
}
