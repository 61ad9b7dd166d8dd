//! The interface between a session and the backend that executes its steps.

use std::borrow::Cow;
use std::ops::Range;

use narrows_plan::program::{Buffer, BufferRole, Phase};

use super::step_result::LocalStepResult;
use crate::error::RunError;
use crate::gemm_dtype::GemmDtype;
use crate::optimizer::{Optimizer, StepCoefficients};
use crate::time_breakdown::InstructionSpan;

/// The devices of a process: their memory, and the execution of steps on them. Every backend that
/// trains implements this trait.
pub trait Engine: Send {
    /// Name of the backend on the command line.
    fn name(&self) -> &'static str;

    /// Format to which operands of GEMMs are rounded; `None` where they are multiplied in the format of the program.
    fn gemm_dtype(&self) -> Option<GemmDtype> {
        None
    }

    /// The devices of this process.
    fn devices(&self) -> Range<u64>;

    /// Executes a step. The session has checked that it has as many tokens as the program takes.
    ///
    /// # Errors
    /// The first error of any device.
    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError>;

    /// The elements of a resident buffer of weights, gradients or moments, converted to f32.
    ///
    /// # Errors
    /// When the device is lost.
    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError>;

    /// Calls `modify` with the elements of a resident buffer, and stores the result.
    ///
    /// # Errors
    /// When the device is lost.
    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        modify: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError>;

    /// Sets the elements of a resident buffer to zero.
    ///
    /// # Errors
    /// When the device is lost.
    fn zero_buffer(&mut self, device: u64, buffer: &Buffer) -> Result<(), RunError> {
        self.modify_buffer(device, buffer, &mut |elements| elements.fill(0.0))
    }

    /// Bytes allocated for the buffers of each device.
    fn allocated_bytes(&self) -> Vec<u64>;

    /// Bytes that each device holds outside its arena.
    fn scratch_bytes(&self) -> Vec<u64>;

    /// From the next step on, records when every instruction was executed.
    fn record_instruction_spans(&mut self);

    /// Whether recording changes how steps are executed, and so the time that they take.
    fn recording_changes_execution(&self) -> bool {
        false
    }

    /// Spans of the instructions of the last step of a device, in the order of
    /// [`scheduled_instructions`](crate::scheduled_instructions); empty unless they are recorded.
    fn instruction_spans(&self, device: u64) -> &[InstructionSpan];
}

/// A step, as all devices see it.
#[derive(Clone, Copy)]
pub struct StepRequest<'a> {
    /// Token ids of the global batch, sequence after sequence.
    pub tokens: &'a [u32],
    /// The id to predict at each of them, or [`IGNORED_TARGET`](super::IGNORED_TARGET).
    pub targets: &'a [u32],
    /// Results of the step.
    pub task: StepTask<'a>,
}

/// Results that a step computes.
#[derive(Clone, Copy)]
pub enum StepTask<'a> {
    /// The loss: forward passes alone. Weights, gradients and moments are neither read beyond that nor
    /// written.
    Loss,
    /// Loss and gradients, reduced over all axes. Weights and gradients stay as they are.
    Gradients,
    /// Loss, gradients and new weights.
    Update(OptimizerUpdate<'a>),
}

impl StepTask<'_> {
    /// Whether passes of a phase are executed.
    pub fn includes(self, phase: Phase) -> bool {
        !matches!(self, StepTask::Loss) || phase == Phase::Forward
    }
}

/// The optimizer update of a step.
#[derive(Clone, Copy)]
pub struct OptimizerUpdate<'a> {
    /// Hyper-parameters.
    pub optimizer: &'a Optimizer,
    /// Coefficients of this step.
    pub coefficients: StepCoefficients,
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Factor that turns the gradients of the program, those of the loss summed over predicted tokens
    /// and divided by all tokens, into those of the mean over predicted tokens.
    pub gradient_scale: f64,
}

impl OptimizerUpdate<'_> {
    /// Factor on every gradient, for the norm of all gradients together as the program computes them.
    pub fn gradient_factor(&self, norm: f64) -> f64 {
        self.optimizer.gradient_factor(norm, self.gradient_scale)
    }
}

impl<'a> StepRequest<'a> {
    /// The update of the weights, if there is one.
    pub fn update(&self) -> Option<&OptimizerUpdate<'a>> {
        match &self.task {
            StepTask::Update(update) => Some(update),
            StepTask::Loss | StepTask::Gradients => None,
        }
    }

    /// The ids that an input buffer is filled from; `None` for other buffers.
    pub fn input_ids(&self, buffer: &Buffer) -> Option<&'a [u32]> {
        match buffer.role {
            BufferRole::Tokens => Some(self.tokens),
            BufferRole::Targets => Some(self.targets),
            _ => None,
        }
    }
}
