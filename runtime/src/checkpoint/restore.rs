//! Checkpoints of sessions, and of runs on them.

use narrows_plan::model::Model;

use super::Checkpoint;
use super::error::CheckpointFault;
use super::tensors::check_sizes;
use crate::data::{Cursor, DataError};
use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::session::{Session, TensorKind};
use crate::train::Trainer;

/// Why a run does not go on from a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The checkpoint is of another model.
    #[error("{}{_0}", _0.location().map_or(String::new(), |place| format!("{place}: ")))]
    Checkpoint(CheckpointFault),
    /// The run reads other tokens, or in another order.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl Checkpoint {
    /// Where a run stands; `seed` is what its session was initialised with, and `model` the one it
    /// was made for. Of a run of many processes it comes together in the first; others get `None`, and
    /// must ask as well.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn of_trainer(
        trainer: &Trainer,
        model: &Model,
        seed: u64,
    ) -> Result<Option<Checkpoint>, RunError> {
        let (session, optimizer) = (trainer.session(), trainer.optimizer());
        Checkpoint::of_session(session, model, optimizer, trainer.cursor(), seed)
    }

    /// Puts a run where the checkpoint stands. It may be under any plan of the model, and it keeps
    /// the hyper-parameters it was begun with: those of the checkpoint are in
    /// [`optimizer`](Checkpoint::optimizer).
    ///
    /// # Errors
    /// When the run's model has other parameters, or its tokens are others or in another order: then
    /// nothing was changed.
    pub fn resume(&self, trainer: &mut Trainer) -> Result<(), ResumeError> {
        trainer.sampler().sequence_to_resume(&self.cursor)?;
        self.restore(trainer.session_mut()).map_err(ResumeError::Checkpoint)?;
        trainer.resume(&self.cursor, self.step)?;
        Ok(())
    }

    /// Where a session stands. `cursor` says what it reads next, `seed` what it was
    /// [initialised](Session::initialise) with, and `model` is the one it was made for. For processes see
    /// [`of_run`](Checkpoint::of_run).
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn of_session(
        session: &Session,
        model: &Model,
        optimizer: &Optimizer,
        cursor: Cursor,
        seed: u64,
    ) -> Result<Option<Checkpoint>, RunError> {
        let weights = session.gather_tensors(TensorKind::Weights)?;
        let first_moments = session.gather_tensors(TensorKind::FirstMoments)?;
        let second_moments = session.gather_tensors(TensorKind::SecondMoments)?;
        if session.cluster().is_some_and(|cluster| cluster.rank() != 0) {
            return Ok(None);
        }
        Ok(Some(Checkpoint {
            step: session.steps(),
            cursor,
            seed,
            optimizer: *optimizer,
            model_fingerprint: model.fingerprint(),
            origin: Some(session.program().context.into()),
            weights,
            first_moments,
            second_moments,
        }))
    }

    /// Puts a session where the checkpoint stands. It may be under any plan of the model.
    ///
    /// # Errors
    /// When the session's model has other parameters: then nothing was changed. Or a device is lost.
    pub fn restore(&self, session: &mut Session) -> Result<(), CheckpointFault> {
        let kinds = [
            (TensorKind::Weights, &self.weights),
            (TensorKind::FirstMoments, &self.first_moments),
            (TensorKind::SecondMoments, &self.second_moments),
        ];
        for (_, whole) in kinds {
            let sizes = session.parameter_elements().iter();
            check_sizes(whole, sizes.map(|(name, size)| (&**name, *size as u64)))?;
        }
        for (tensors, whole) in kinds {
            session.load_tensors(tensors, whole)?;
        }
        session.set_steps(self.step);
        Ok(())
    }
}
