//! Checkpoints of sessions of the processor backend.

use narrows_plan::model::Model;

use super::Checkpoint;
use super::error::Fault;
use super::tensors::check_sizes;
use crate::cpu::{Session, Tensors};
use crate::data::Cursor;
use crate::optimizer::Optimizer;

impl Checkpoint {
    /// Where a session stands. `cursor` says what it reads next, `seed` what it was
    /// [initialised](Session::initialise) with, and `model` is the one it was made for.
    pub fn of(
        session: &Session,
        model: &Model,
        optimizer: &Optimizer,
        cursor: Cursor,
        seed: u64,
    ) -> Checkpoint {
        Checkpoint {
            step: session.steps(),
            cursor,
            seed,
            optimizer: *optimizer,
            model_fingerprint: model.fingerprint(),
            made_under: Some(session.program().context.into()),
            weights: session.gather(Tensors::Weights),
            first_moments: session.gather(Tensors::FirstMoments),
            second_moments: session.gather(Tensors::SecondMoments),
        }
    }

    /// Puts a session where the checkpoint stands. It may be under any plan of the model.
    ///
    /// # Errors
    /// When the session's model has other parameters: then nothing was changed.
    pub fn apply(&self, session: &mut Session) -> Result<(), Fault> {
        let kinds = [
            (Tensors::Weights, &self.weights),
            (Tensors::FirstMoments, &self.first_moments),
            (Tensors::SecondMoments, &self.second_moments),
        ];
        for (_, whole) in kinds {
            let sizes = session.sizes().iter();
            check_sizes(whole, sizes.map(|(name, size)| (&**name, *size as u64)))?;
        }
        for (tensors, whole) in kinds {
            session.load(tensors, whole);
        }
        session.set_steps(self.step);
        Ok(())
    }
}
