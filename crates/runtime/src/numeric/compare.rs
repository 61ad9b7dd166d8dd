//! One step of a twin against the reference interpreter.

use narrows_plan::lower::lower;
use narrows_plan::model::Model;
use narrows_plan::{CheckErrors, CheckedProgram, Defects};

use super::Twin;
use crate::backend::RunError;
use crate::cpu::{Session, StepInput, Tensors};
use crate::parameters::Stream;
use crate::reference::{Batch, Parameters, Reference, ReferenceError};

/// What the loss may be off by, relatively.
pub const LOSS_TOLERANCE: f64 = 1e-5;

/// What every gradient may be off by, in norm. Those of keys are sums that nearly cancel: at small
/// widths drawn plans were seen to be off by 1.02e-5.
pub const GRADIENT_TOLERANCE: f64 = 1e-4;

/// How far a twin is from the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The twin's loss.
    pub loss: f64,
    /// The reference's.
    pub reference_loss: f64,
    /// ‖a−b‖/‖b‖ of every gradient, the largest first.
    pub gradients: Vec<(String, f64)>,
}

/// Why a twin could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum NumericError {
    /// Its plan does not fit its model.
    #[error(transparent)]
    Plan(#[from] Defects),
    /// Its program is refused.
    #[error(transparent)]
    Program(#[from] CheckErrors),
    /// It could not be run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The reference could not be run.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
}

impl Comparison {
    /// The losses' difference, over the reference's.
    pub fn loss_off(&self) -> f64 {
        (self.loss - self.reference_loss).abs() / self.reference_loss.abs()
    }

    /// The largest difference of a gradient.
    pub fn gradient_off(&self) -> f64 {
        self.gradients.first().map_or(0.0, |(_, off)| *off)
    }

    /// Whether all differences are within [`LOSS_TOLERANCE`] and [`GRADIENT_TOLERANCE`].
    pub fn is_equal(&self) -> bool {
        self.loss_off() <= LOSS_TOLERANCE && self.gradient_off() <= GRADIENT_TOLERANCE
    }
}

impl Twin {
    /// Runs a step of random tokens on random weights.
    ///
    /// # Errors
    /// When it cannot be run at all; differences are no error.
    pub fn compare(&self, seed: u64) -> Result<Comparison, NumericError> {
        self.compare_with(&self.model, seed)
    }

    /// The same against the reference of another model with the same parameters: a comparison that
    /// tells them apart is worth something.
    ///
    /// # Errors
    /// As [`compare`](Twin::compare).
    pub fn compare_with(&self, other: &Model, seed: u64) -> Result<Comparison, NumericError> {
        let Twin { model, plan } = self;
        let program = CheckedProgram::check(lower(&plan.resolve(model)?))?;
        let mut session = Session::new(model, program, 1)?;
        session.initialise(model, seed);
        let work = plan.workload;
        let ids = |what: &str| -> Vec<u32> {
            let stream = Stream::new(seed, what);
            let count = work.global_batch * work.sequence_length;
            (0..count).map(|n| (stream.bits(n) % model.vocab) as u32).collect()
        };
        let (tokens, targets) = (ids("tokens"), ids("targets"));
        let done = session.gradients_only(StepInput { tokens: &tokens, targets: &targets })?;
        let found = session.gather(Tensors::Gradients);

        let reference = Reference::new(other, Parameters::<f64>::initial(other, seed))?;
        let batch = Batch {
            tokens: &tokens,
            targets: &targets,
            sequences: work.global_batch as usize,
            length: work.sequence_length as usize,
        };
        let (reference_loss, wanted) = reference.loss_and_gradients(&[batch])?;
        let mut gradients: Vec<(String, f64)> = wanted
            .iter()
            .map(|(name, wanted)| {
                let found = found.get(name).map_or(&[][..], Vec::as_slice);
                (name.to_owned(), apart(found, wanted.elements()))
            })
            .collect();
        // What is no number is the largest difference of all.
        gradients.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        Ok(Comparison { loss: done.loss, reference_loss, gradients })
    }
}

/// ‖a−b‖/‖b‖; infinite when a has another size.
fn apart(found: &[f32], wanted: &[f64]) -> f64 {
    if found.len() != wanted.len() {
        return f64::INFINITY;
    }
    let off: f64 = found.iter().zip(wanted).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let size: f64 = wanted.iter().map(|b| b * b).sum();
    if off == 0.0 { 0.0 } else { (off / size).sqrt() }
}
