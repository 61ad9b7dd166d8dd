//! What executes the steps of a session, and where its memory is.

use std::borrow::Cow;
use std::ops::Range;

use narrows_plan::program::{Buffer, Region};

use super::step_result::LocalStepResult;
use crate::error::RunError;
use crate::optimizer::{Optimizer, StepCoefficients};
use crate::time_breakdown::InstructionSpan;

/// The devices of a process: their memory, and what runs on them.
///
/// A backend that trains is one implementation of this, and a constructor of a
/// [`Session`](super::Session).
pub trait Engine: Send {
    /// The name on the command line.
    fn name(&self) -> &'static str;

    /// The devices of this process.
    fn devices(&self) -> Range<u64>;

    /// Executes a step on them, whose tokens are as many as the program takes.
    ///
    /// # Errors
    /// The first thing that went wrong on any of them.
    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError>;

    /// The numbers of a resident buffer of weights, gradients or moments, whatever its format.
    ///
    /// # Errors
    /// When the device is lost.
    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError>;

    /// Lets `change` work on the numbers of such a buffer.
    ///
    /// # Errors
    /// When the device is lost.
    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError>;

    /// Zeroes such a buffer.
    ///
    /// # Errors
    /// When the device is lost.
    fn zero_buffer(&mut self, device: u64, buffer: &Buffer) -> Result<(), RunError> {
        self.modify_buffer(device, buffer, &mut |numbers| numbers.fill(0.0))
    }

    /// Bytes allocated for the buffers of each device.
    fn allocated_bytes(&self) -> Vec<u64>;

    /// Bytes that each device holds besides.
    fn scratch_bytes(&self) -> Vec<u64>;

    /// Keeps when every instruction of a step was executed, from now on.
    fn record_instruction_spans(&mut self);

    /// Whether steps are made in another way while laps are kept, and take another time.
    fn recording_changes_execution(&self) -> bool {
        false
    }

    /// When a device executed the instructions of the last step; empty unless they are kept.
    fn instruction_spans(&self, device: u64) -> &[InstructionSpan];
}

/// What all devices know in a step.
#[derive(Clone, Copy)]
pub struct StepRequest<'a> {
    /// The global batch's token ids, sequence after sequence.
    pub tokens: &'a [u32],
    /// What is to be predicted.
    pub targets: &'a [u32],
    /// How weights are updated, and the number of the step; `None` leaves them, and the gradients, as
    /// they are.
    pub update: Option<(&'a Optimizer, StepCoefficients, u64)>,
}

impl<'a> StepRequest<'a> {
    /// The ids that an input buffer is filled from; `None` for other buffers.
    pub fn input_ids(&self, buffer: &Buffer) -> Option<&'a [u32]> {
        match (buffer.region, buffer.name.as_str()) {
            (Region::Input, "tokens") => Some(self.tokens),
            (Region::Input, "targets") => Some(self.targets),
            _ => None,
        }
    }
}
