//! The contents of a checkpoint, taken from and restored into sessions and training runs.

use narrows_plan::model::Model;
use narrows_plan::{Context, Mesh, Workload, Zero};
use serde::{Deserialize, Serialize};

use super::error::{CheckpointError, CheckpointFault};
use super::tensors::check_sizes;
use crate::data::{Cursor, DataError, TargetRule};
use crate::error::RunError;
use crate::gemm_dtype::GemmDtype;
use crate::optimizer::Optimizer;
use crate::session::{ModelTensors, Session, TensorKind};
use crate::train::{EvaluationHistory, Trainer};

/// The state of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    /// Number of optimizer steps.
    pub step: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Position in the tokens.
    pub cursor: Cursor,
    /// Hyper-parameters of the run.
    pub optimizer: Optimizer,
    /// Evaluations of the run so far.
    pub evaluations: EvaluationHistory,
    /// [`Model::fingerprint`] of the run's model.
    pub model_fingerprint: String,
    /// Format to which the operands of GEMMs were rounded.
    pub gemm_dtype: GemmDtype,
    /// Outline of the plan. A run that resumes takes its batch from there.
    pub origin: Option<CheckpointOrigin>,
    /// Weights.
    pub weights: ModelTensors,
    /// AdamW's first moments.
    pub first_moments: ModelTensors,
    /// AdamW's second moments.
    pub second_moments: ModelTensors,
}

/// The state of a run without its tensors: the values with which the run continues.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointOutline {
    /// Number of optimizer steps.
    pub step: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Tokens of a sequence.
    pub sequence_length: u64,
    /// The inputs whose next token is predicted.
    pub targets: TargetRule,
    /// Hyper-parameters of the run.
    pub optimizer: Optimizer,
    /// Format to which the operands of GEMMs were rounded.
    pub gemm_dtype: GemmDtype,
    /// Sequences of a step, where the checkpoint has its plan.
    pub global_batch: Option<u64>,
}

/// Outline of the plan of the run that wrote a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointOrigin {
    /// Mesh of devices.
    pub mesh: Mesh,
    /// Workload of a step.
    pub workload: Workload,
    /// ZeRO stage.
    pub zero: Zero,
}

impl From<Context> for CheckpointOrigin {
    fn from(context: Context) -> CheckpointOrigin {
        let Context { mesh, workload, zero, .. } = context;
        CheckpointOrigin { mesh, workload, zero }
    }
}

/// Error of resuming a run from a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The checkpoint does not fit the model.
    #[error("{}{_0}", _0.location().map_or(String::new(), |location| format!("{location}: ")))]
    Checkpoint(CheckpointFault),
    /// A file of the checkpoint cannot be read, or is damaged.
    #[error(transparent)]
    File(#[from] CheckpointError),
    /// The run reads other tokens, or in another order.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl Checkpoint {
    /// The state of a run. `seed` is that of [`Session::initialise`], and `model` the run's model. In a
    /// run of many processes, all must call this function; rank 0 returns the checkpoint, other ranks
    /// `None`.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn of_trainer(
        trainer: &Trainer,
        model: &Model,
        seed: u64,
    ) -> Result<Option<Checkpoint>, RunError> {
        let (session, optimizer) = (trainer.session(), trainer.optimizer());
        let evaluations = trainer.evaluations().clone();
        let checkpoint = Checkpoint::of_session(session, model, optimizer, trainer.cursor(), seed)?;
        Ok(checkpoint.map(|checkpoint| Checkpoint { evaluations, ..checkpoint }))
    }

    /// The state of a session. `cursor` is its position in the tokens, `seed` that of
    /// [`Session::initialise`], and `model` the session's model. For runs of many processes see
    /// [`of_trainer`](Checkpoint::of_trainer).
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
        if session.process_group().is_some_and(|group| group.rank() != 0) {
            return Ok(None);
        }
        Ok(Some(Checkpoint {
            step: session.steps(),
            cursor,
            seed,
            optimizer: *optimizer,
            evaluations: EvaluationHistory::default(),
            model_fingerprint: model.fingerprint(),
            gemm_dtype: session.gemm_dtype().unwrap_or_default(),
            origin: Some(session.program().context.into()),
            weights,
            first_moments,
            second_moments,
        }))
    }

    /// Puts a run, under any plan of the model, into the state of the checkpoint. The run keeps its own
    /// hyper-parameters; those of the checkpoint are in [`optimizer`](Checkpoint::optimizer).
    ///
    /// # Errors
    /// When the run's model has other parameters, or the run reads other tokens or in another order:
    /// then nothing has changed.
    pub fn resume(&self, trainer: &mut Trainer) -> Result<(), ResumeError> {
        trainer.sampler().sequence_to_resume(&self.cursor)?;
        self.restore(trainer.session_mut()).map_err(ResumeError::Checkpoint)?;
        trainer.resume(&self.cursor, self.step)?;
        trainer.set_evaluations(self.evaluations.clone());
        Ok(())
    }

    /// Puts a session, under any plan of the model, into the state of the checkpoint.
    ///
    /// # Errors
    /// When the session's model has other parameters, in which case nothing has changed, or a device
    /// is lost.
    pub fn restore(&self, session: &mut Session) -> Result<(), CheckpointFault> {
        let tensors = [
            (TensorKind::Weights, &self.weights),
            (TensorKind::FirstMoments, &self.first_moments),
            (TensorKind::SecondMoments, &self.second_moments),
        ];
        for (_, whole) in tensors {
            let sizes = session.model_program().parameter_elements().iter();
            check_sizes(whole, sizes.map(|(id, size)| (*id, *size as u64)))?;
        }
        for (kind, whole) in tensors {
            session.load_tensors(kind, whole)?;
        }
        session.set_steps(self.step);
        Ok(())
    }
}
