//! A session: a program, the memory of its devices, and what can be done with it.
//!
//! It is given weights by logical name and gives them back so; what lies where is the program's
//! business alone. What executes is an [`Engine`]: processors or a
//! GPU.
//!
//! | file | what it holds |
//! |---|---|
//! | `engine` | what a session asks of what executes |
//! | `subject` | a program and what of its model must be known |
//! | `share` | what came of a step, here and in other processes |
//! | [`tensors`] | whole parameters, gradients and moments, in and out |
//! | `weights` | which element of which logical parameter lies where |
//! | `coordinates`, `tokens` | where devices are, and which tokens they see |

mod coordinates;
mod engine;
mod model_program;
mod sharded_parameter;
mod step_result;
mod tensors;
mod token_rows;

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::program::{Program, Region};

use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::process_group::{ProcessGroup, agree};
use crate::random::fnv1a;
use crate::report::{DeviceId, StepReport};
use crate::time_breakdown::{InstructionSpan, TimeBreakdown};

pub use coordinates::{MeshCoordinates, group_sizes, peers};
pub use engine::{Engine, StepRequest};
pub use model_program::ModelProgram;
pub use step_result::{DeviceStep, LocalStepResult};
pub use tensors::{NamedTensors, TensorKind};
pub use token_rows::TokenRows;

/// A program with the memory of the devices that this process runs: all of them, or one.
pub struct Session {
    subject: Arc<ModelProgram>,
    engine: Box<dyn Engine>,
    /// The processes that the devices are, if they are not all of this one.
    process_group: Option<Arc<dyn ProcessGroup>>,
    steps: u64,
}

/// The token ids of a step: the global batch, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Inputs.
    pub tokens: &'a [u32],
    /// What is to be predicted at each of them.
    pub targets: &'a [u32],
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy over the step's tokens, in nats.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// What each device did.
    pub report: StepReport,
    /// What its time was spent on: means over the devices, which add up to all of it.
    pub time_breakdown: TimeBreakdown,
    /// Bytes that each device holds besides its arena, see [`Session::scratch`].
    pub scratch_bytes: Vec<u64>,
}

impl Session {
    /// A session of what an engine executes. Its weights, gradients and moments are zeros.
    pub fn new(
        subject: Arc<ModelProgram>,
        engine: Box<dyn Engine>,
        process_group: Option<Arc<dyn ProcessGroup>>,
    ) -> Session {
        Session { subject, engine, process_group, steps: 0 }
    }

    /// The name of what executes, on the command line.
    pub fn backend(&self) -> &'static str {
        self.engine.name()
    }

    /// The processes that one must be connected with, to run a program as the device of this number.
    pub fn peers(program: &Program, device: u64) -> Vec<u64> {
        peers(device, &program.context.mesh)
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.subject.program()
    }

    /// The devices of this process.
    pub fn devices(&self) -> Range<u64> {
        self.engine.devices()
    }

    /// The processes that the devices are, if they are not all of this one.
    pub fn cluster(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.process_group.as_ref()
    }

    /// Whether any process wants something.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn any_process(&self, wants: bool) -> Result<bool, RunError> {
        match self.cluster() {
            None => Ok(wants),
            Some(cluster) => {
                Ok(agree(&**cluster, wants, |all| all.into_iter().any(|wants| wants))?)
            }
        }
    }

    /// Bytes allocated for the buffers of each device of this process.
    pub fn allocated_bytes(&self) -> Vec<u64> {
        self.engine.allocated_bytes()
    }

    /// Bytes that each device of this process holds besides: to compute, and to send with.
    pub fn scratch_bytes(&self) -> Vec<u64> {
        self.engine.scratch_bytes()
    }

    /// Optimizer steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Keeps when every instruction of a step was executed, from now on.
    pub fn record_instruction_spans(&mut self) {
        self.engine.record_instruction_spans();
    }

    /// Whether steps are made in another way while laps are kept, and take another time: instruction by instruction,
    /// and not as the graphs that they otherwise are.
    pub fn recording_changes_execution(&self) -> bool {
        self.engine.recording_changes_execution()
    }

    /// When a device executed the instructions of the last step, in the [order](crate::schedule::step) in
    /// which it met them; empty unless they are [kept](Session::keep_laps), and of other processes.
    pub fn instruction_spans(&self, device: DeviceId) -> &[InstructionSpan] {
        match self.devices().contains(&device.0) {
            true => self.engine.instruction_spans(device.0),
            false => &[],
        }
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// When the batch does not fit the program, a token is outside the vocabulary, or the gradients
    /// are not finite: then no weight has changed.
    pub fn step(
        &mut self,
        optimizer: &Optimizer,
        input: StepInput,
    ) -> Result<StepResult, RunError> {
        let number = self.steps + 1;
        let update = Some((optimizer, optimizer.coefficients(number), number));
        let done =
            self.run(StepRequest { tokens: input.tokens, targets: input.targets, update })?;
        if !done.gradient_norm.is_finite() || !done.loss.is_finite() {
            self.clear_gradients()?;
            return Err(RunError::NonFiniteGradients { step: number, loss: done.loss });
        }
        self.steps = number;
        Ok(done)
    }

    /// Loss and gradients of a batch, reduced over all axes; no weight changes, and the gradients
    /// stay where they are until [`clear_gradients`](Session::clear_gradients).
    ///
    /// # Errors
    /// As [`step`](Session::step).
    pub fn compute_gradients(&mut self, input: StepInput) -> Result<StepResult, RunError> {
        self.clear_gradients()?;
        self.run(StepRequest { tokens: input.tokens, targets: input.targets, update: None })
    }

    /// Zeroes all gradients.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn clear_gradients(&mut self) -> Result<(), RunError> {
        let program = self.subject.program();
        let mesh = program.context.mesh;
        for device in self.engine.devices() {
            let stage = &program.stages[DeviceId(device).stage(&mesh)];
            for buffer in stage.buffers.iter().filter(|b| b.region == Region::Gradient) {
                self.engine.zero_buffer(device, buffer)?;
            }
        }
        Ok(())
    }

    fn check_batch(&self, step: &StepRequest) -> Result<(), RunError> {
        let program = self.program();
        let work = program.context.workload;
        let wanted = work.global_batch * work.sequence_length;
        let found = (step.tokens.len(), step.targets.len());
        if found != (wanted as usize, wanted as usize) {
            return Err(RunError::BatchSizeMismatch {
                expected: wanted,
                tokens: found.0,
                targets: found.1,
            });
        }
        let vocab = program.constants.vocab;
        let outside = |ids: &[u32]| ids.iter().position(|id| u64::from(*id) >= vocab);
        let tokens = outside(step.tokens).map(|at| (at, step.tokens[at]));
        match tokens.or_else(|| outside(step.targets).map(|at| (at, step.targets[at]))) {
            Some((position, token)) => {
                Err(RunError::TokenOutOfVocabulary { token, position, vocab })
            }
            None => Ok(()),
        }
    }

    fn run(&mut self, step: StepRequest) -> Result<StepResult, RunError> {
        let own = self.run_local(step);
        let Some(cluster) = &self.process_group else { return Ok(own?.into_result()) };
        let done = own.and_then(|share| share.reduce(&**cluster, self.program()));
        done.inspect_err(|error| cluster.abort(error))
    }

    /// Runs the devices of this process.
    fn run_local(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        self.check_batch(&step)?;
        let mut share = self.engine.run_step(step)?;
        share.scratch_bytes = self.scratch_bytes();
        if self.process_group.is_some() {
            let ids = step.tokens.iter().chain(step.targets);
            share.token_hash = fnv1a(ids.flat_map(|id| id.to_le_bytes()));
        }
        Ok(share)
    }
}
