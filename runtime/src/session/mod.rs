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
mod share;
mod subject;
pub mod tensors;
mod tokens;
mod weights;

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::program::{Program, Region};

use crate::error::RunError;
use crate::optimizer::Optimizer;
use crate::parameters::fnv1a;
use crate::parts::{InstructionSpan, TimeBreakdown};
use crate::process_group::{ProcessGroup, agree};
use crate::report::{DeviceId, StepReport};

pub use coordinates::{MeshCoordinates, group_sizes, neighbours};
pub use engine::{Engine, StepRequest};
pub use share::{DeviceStep, StepShare};
pub use subject::ModelProgram;
pub use tensors::{NamedTensors, TensorKind};
pub use tokens::TokenRows;

/// A program with the memory of the devices that this process runs: all of them, or one.
pub struct Session {
    subject: Arc<ModelProgram>,
    engine: Box<dyn Engine>,
    /// The processes that the devices are, if they are not all of this one.
    cluster: Option<Arc<dyn ProcessGroup>>,
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
    pub time: TimeBreakdown,
    /// Bytes that each device holds besides its arena, see [`Session::scratch`].
    pub scratch: Vec<u64>,
}

impl Session {
    /// A session of what an engine executes. Its weights, gradients and moments are zeros.
    pub fn with(
        subject: Arc<ModelProgram>,
        engine: Box<dyn Engine>,
        cluster: Option<Arc<dyn ProcessGroup>>,
    ) -> Session {
        Session { subject, engine, cluster, steps: 0 }
    }

    /// The name of what executes, on the command line.
    pub fn backend(&self) -> &'static str {
        self.engine.name()
    }

    /// The processes that one must be connected with, to run a program as the device of this number.
    pub fn neighbours(program: &Program, device: u64) -> Vec<u64> {
        neighbours(device, &program.context.mesh)
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
        self.cluster.as_ref()
    }

    /// Whether any process wants something.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn anyone(&self, wants: bool) -> Result<bool, RunError> {
        match self.cluster() {
            None => Ok(wants),
            Some(cluster) => {
                Ok(agree(&**cluster, wants, |all| all.into_iter().any(|wants| wants))?)
            }
        }
    }

    /// Bytes allocated for the buffers of each device of this process.
    pub fn allocated(&self) -> Vec<u64> {
        self.engine.allocated()
    }

    /// Bytes that each device of this process holds besides: to compute, and to send with.
    pub fn scratch(&self) -> Vec<u64> {
        self.engine.scratch()
    }

    /// Optimizer steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Keeps when every instruction of a step was executed, from now on.
    pub fn keep_laps(&mut self) {
        self.engine.keep_laps();
    }

    /// Whether steps are made in another way while laps are kept, and take another time: instruction by instruction,
    /// and not as the graphs that they otherwise are.
    pub fn steps_otherwise_when_timed(&self) -> bool {
        self.engine.steps_otherwise_when_timed()
    }

    /// When a device executed the instructions of the last step, in the [order](crate::order::step) in
    /// which it met them; empty unless they are [kept](Session::keep_laps), and of other processes.
    pub fn laps(&self, device: DeviceId) -> &[InstructionSpan] {
        match self.devices().contains(&device.0) {
            true => self.engine.laps(device.0),
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
            return Err(RunError::NotFinite { step: number, loss: done.loss });
        }
        self.steps = number;
        Ok(done)
    }

    /// Loss and gradients of a batch, reduced over all axes; no weight changes, and the gradients
    /// stay where they are until [`clear_gradients`](Session::clear_gradients).
    ///
    /// # Errors
    /// As [`step`](Session::step).
    pub fn gradients_only(&mut self, input: StepInput) -> Result<StepResult, RunError> {
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
                self.engine.clear(device, buffer)?;
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
            return Err(RunError::BatchSize { wanted, tokens: found.0, targets: found.1 });
        }
        let vocab = program.constants.vocab;
        let outside = |ids: &[u32]| ids.iter().position(|id| u64::from(*id) >= vocab);
        let tokens = outside(step.tokens).map(|at| (at, step.tokens[at]));
        match tokens.or_else(|| outside(step.targets).map(|at| (at, step.targets[at]))) {
            Some((position, token)) => Err(RunError::Token { token, position, vocab }),
            None => Ok(()),
        }
    }

    fn run(&mut self, step: StepRequest) -> Result<StepResult, RunError> {
        let own = self.run_own(step);
        let Some(cluster) = &self.cluster else { return Ok(own?.done()) };
        let done = own.and_then(|share| share.agree(&**cluster, self.program()));
        done.inspect_err(|error| cluster.abort(error))
    }

    /// Runs the devices of this process.
    fn run_own(&mut self, step: StepRequest) -> Result<StepShare, RunError> {
        self.check_batch(&step)?;
        let mut share = self.engine.run(step)?;
        share.scratch = self.scratch();
        if self.cluster.is_some() {
            let ids = step.tokens.iter().chain(step.targets);
            share.tokens = fnv1a(ids.flat_map(|id| id.to_le_bytes()));
        }
        Ok(share)
    }
}
