//! A session: a checked program with the memory of its devices.
//!
//! Weights, gradients and moments go in and out as whole tensors under logical names; where their
//! shards lie is known from the program. Steps are executed by an [`Engine`]: the CPU or the CUDA
//! backend.
//!
//! | file | contents |
//! |---|---|
//! | `engine` | the trait that backends implement |
//! | `exact_step` | exact steps of LORO |
//! | `model_program` | a program with the properties of its model's parameters |
//! | `step_result` | the result of a step, combined over devices and processes |
//! | `targets` | the tokens of a step that are predicted |
//! | `tensors` | whole parameters, gradients and moments, into and out of the arenas |
//! | `slices` | what one device holds of a parameter, for checkpoints that all processes write |
//! | `sharded_parameter` | which elements of which logical parameters a buffer holds |
//! | `coordinates` | positions on the mesh and members of device groups |
//! | `position_runs` | the positions of a sequence that a device has |
//! | `token_rows` | the tokens that a device computes on |

mod coordinates;
mod engine;
mod exact_step;
mod model_program;
mod position_runs;
mod sharded_parameter;
mod slices;
mod step_result;
mod targets;
mod tensors;
mod token_rows;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use narrows_plan::model::{Model, ParameterId};
use narrows_plan::program::{BufferRole, Program};

use crate::error::RunError;
use crate::gemm_dtype::GemmDtype;
use crate::optimizer::Optimizer;
use crate::parameters::{LogicalParameter, logical_parameters};
use crate::process_group::{ProcessGroup, gather_and_broadcast};
use crate::random::fnv1a;
use crate::report::DeviceId;
use crate::time_breakdown::InstructionSpan;

pub use coordinates::{MeshCoordinates, collective_groups, peers};
pub use engine::{Engine, OptimizerUpdate, StepRequest, StepTask};
pub use model_program::ModelProgram;
pub use position_runs::PositionRuns;
pub use slices::{LocalSlice, TensorSlice, saved_elements};
pub use step_result::{DeviceStep, LocalStepResult, StepResult};
pub use targets::IGNORED_TARGET;
pub use tensors::{ModelTensors, TensorKind};
pub use token_rows::TokenRows;

use tensors::{gather_tensors, local_tensors, repeated_values, set_tensors};

/// A program with the memory of the devices that this process runs: all of them, or one.
pub struct Session {
    program: Arc<ModelProgram>,
    engine: Box<dyn Engine>,
    process_group: Option<Arc<dyn ProcessGroup>>,
    steps: u64,
    /// Factor on the gradients in the buffers of the engine.
    gradient_scale: f64,
}

/// Token ids of a step: the global batch, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Input ids.
    pub tokens: &'a [u32],
    /// The id to predict at each of them, or [`IGNORED_TARGET`].
    pub targets: &'a [u32],
}

/// The loss of a batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchLoss {
    /// Mean cross-entropy over the predicted tokens, in nats; 0 without any.
    pub loss: f64,
    /// Number of predicted tokens.
    pub predicted_tokens: u64,
}

impl Session {
    /// A session on the devices of an engine. Weights, gradients and moments are zeros.
    /// `process_group` is `None` when all devices belong to this process.
    pub fn new(
        program: Arc<ModelProgram>,
        engine: Box<dyn Engine>,
        process_group: Option<Arc<dyn ProcessGroup>>,
    ) -> Session {
        Session { program, engine, process_group, steps: 0, gradient_scale: 1.0 }
    }

    /// Name of the backend on the command line.
    pub fn backend(&self) -> &'static str {
        self.engine.name()
    }

    /// Format to which the operands of GEMMs are rounded; `None` where they are multiplied in the format of the program.
    pub fn gemm_dtype(&self) -> Option<GemmDtype> {
        self.engine.gemm_dtype()
    }

    /// Ranks that a process must be connected with to run this device of a program.
    pub fn peers(program: &Program, device: u64) -> Vec<u64> {
        peers(device, &program.context.mesh)
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// The program with the properties of its parameters.
    pub fn model_program(&self) -> &ModelProgram {
        &self.program
    }

    /// The devices of this process.
    pub fn devices(&self) -> Range<u64> {
        self.engine.devices()
    }

    /// All processes of the run; `None` when all devices belong to this process.
    pub fn process_group(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.process_group.as_ref()
    }

    /// Whether `value` is true in any process. All processes must call this method.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn any_rank(&self, value: bool) -> Result<bool, RunError> {
        match self.process_group() {
            None => Ok(value),
            Some(group) => {
                Ok(gather_and_broadcast(&**group, value, |all| all.into_iter().any(|value| value))?)
            }
        }
    }

    /// Bytes allocated for the buffers of each device of this process.
    pub fn allocated_bytes(&self) -> Vec<u64> {
        self.engine.allocated_bytes()
    }

    /// Bytes that each device of this process holds outside its arena, to compute and to send.
    pub fn scratch_bytes(&self) -> Vec<u64> {
        self.engine.scratch_bytes()
    }

    /// Number of optimizer steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of optimizer steps so far, to resume a run.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// From the next step on, records when every instruction is executed.
    pub fn record_instruction_spans(&mut self) {
        self.engine.record_instruction_spans();
    }

    /// Whether recording changes how steps are executed, and so the time that they take: launches one
    /// by one instead of captured graphs.
    pub fn recording_changes_execution(&self) -> bool {
        self.engine.recording_changes_execution()
    }

    /// Spans of the instructions of the last step of a device, in the order of
    /// [`scheduled_instructions`](crate::scheduled_instructions). Empty for devices of other processes,
    /// and unless they are [recorded](Session::record_instruction_spans).
    pub fn instruction_spans(&self, device: DeviceId) -> &[InstructionSpan] {
        match self.devices().contains(&device.0) {
            true => self.engine.instruction_spans(device.0),
            false => &[],
        }
    }

    /// Executes one optimizer step.
    ///
    /// # Errors
    /// When the batch does not fit the program, a token is outside the vocabulary, or the gradients
    /// are not finite: then no weight has changed. After an exact step of LORO that failed, and the loss of a device or a process,
    /// some weights can be those of the step, and some those before it.
    pub fn step(
        &mut self,
        optimizer: &Optimizer,
        input: StepInput,
    ) -> Result<StepResult, RunError> {
        self.program.check_optimizer(optimizer)?;
        let step = self.steps + 1;
        let coefficients = optimizer.coefficients(step);
        let update = OptimizerUpdate {
            optimizer,
            coefficients,
            step,
            gradient_scale: targets::gradient_scale(input.targets),
        };
        let result = self.run(input, StepTask::Update(update))?;
        if !result.gradient_norm.is_finite() || !result.loss.is_finite() {
            self.clear_gradients()?;
            return Err(RunError::NonFiniteGradients { step, loss: result.loss });
        }
        if let Some(loro) = optimizer.loro {
            if loro.is_exact(step) {
                let ended = self.exact_step(&coefficients, step);
                if let (Err(error), Some(group)) = (&ended, &self.process_group) {
                    error.abort_run(&**group);
                }
                ended?;
            }
            if loro.refreshes_after(step) {
                self.clear_moments()?;
            }
        }
        self.steps = step;
        Ok(result)
    }

    /// Computes loss and gradients of a batch, reduced over all axes. No weight changes; the gradients
    /// stay in their buffers until [`clear_gradients`](Session::clear_gradients).
    ///
    /// # Errors
    /// As [`step`](Session::step).
    pub fn compute_gradients(&mut self, input: StepInput) -> Result<StepResult, RunError> {
        self.clear_gradients()?;
        self.gradient_scale = targets::gradient_scale(input.targets);
        self.run(input, StepTask::Gradients)
    }

    /// Computes the loss of a batch by the forward passes of the program alone. Nothing that a later step
    /// reads changes. All processes must call this method.
    ///
    /// # Errors
    /// When the batch does not fit the program, a token is outside the vocabulary, or a device or process
    /// is lost.
    pub fn evaluate(&mut self, input: StepInput) -> Result<BatchLoss, RunError> {
        let predicted_tokens = targets::predicted_tokens(input.targets);
        let result = self.run(input, StepTask::Loss)?;
        Ok(BatchLoss { loss: result.loss, predicted_tokens })
    }

    /// Sets all gradients to zero.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn clear_gradients(&mut self) -> Result<(), RunError> {
        let program = self.program.program();
        let mesh = program.context.mesh;
        for device in self.engine.devices() {
            let stage = &program.stages[DeviceId(device).stage(&mesh)];
            for buffer in stage.buffers.iter().filter(|b| b.role == BufferRole::WeightGradient) {
                self.engine.zero_buffer(device, buffer)?;
            }
        }
        Ok(())
    }

    /// Sets every weight to its initial value, in a run with this seed. The values depend on the model
    /// alone and are equal under every plan.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn initialise(&mut self, model: &Model, seed: u64) -> Result<(), RunError> {
        self.initialise_with(model, |parameter| parameter.initial_fill(seed))
    }

    /// Sets weights for a measurement: the initial values of each parameter repeat after some of its elements. Drawing all
    /// of them would take longer than the measurement.
    ///
    /// # Errors
    /// When a device is lost.
    pub fn initialise_for_measurement(&mut self, model: &Model) -> Result<(), RunError> {
        self.initialise_with(model, |parameter| repeated_values(parameter, 1))
    }

    fn initialise_with<F>(
        &mut self,
        model: &Model,
        values: impl Fn(&LogicalParameter) -> F,
    ) -> Result<(), RunError>
    where
        F: Fn(u64, &mut [f32]) + Sync,
    {
        let parameters = logical_parameters(model);
        let parameters: HashMap<ParameterId, &LogicalParameter> =
            parameters.iter().map(|parameter| (parameter.id, parameter)).collect();
        let fill_of = |id: ParameterId| Some(values(parameters.get(&id)?));
        set_tensors(self.program.program(), &mut *self.engine, TensorKind::Weights, fill_of)
    }

    /// Sets tensors from whole ones; tensors that are not in `whole` stay unchanged.
    ///
    /// # Errors
    /// When a device is lost.
    ///
    /// # Panics
    /// When a tensor has fewer elements than its parameter.
    pub fn load_tensors(&mut self, kind: TensorKind, whole: &ModelTensors) -> Result<(), RunError> {
        let fill_of = |id: ParameterId| {
            whole.get(&id).map(|whole| {
                |first: u64, target: &mut [f32]| {
                    target.copy_from_slice(&whole[first as usize..][..target.len()]);
                }
            })
        };
        set_tensors(self.program.program(), &mut *self.engine, kind, fill_of)
    }

    /// Whole tensors with the shards that the devices of this process hold; other
    /// elements are zero. Gradients are those of the last
    /// [`compute_gradients`](Session::compute_gradients).
    ///
    /// # Errors
    /// When a device is lost.
    pub fn local_tensors(&self, kind: TensorKind) -> Result<ModelTensors, RunError> {
        Ok(self.scaled(kind, local_tensors(&self.program, &*self.engine, kind)?))
    }

    /// Whole tensors of all processes, gathered at rank 0; other ranks return none. All processes must
    /// call this method.
    ///
    /// # Errors
    /// When a device is lost, or a process is gone or late.
    pub fn gather_tensors(&self, kind: TensorKind) -> Result<ModelTensors, RunError> {
        match self.process_group() {
            None => self.local_tensors(kind),
            Some(group) => {
                let whole = gather_tensors(&self.program, &*self.engine, &**group, kind)?;
                Ok(self.scaled(kind, whole))
            }
        }
    }

    /// Gradients of the mean over predicted tokens, from those in the buffers; other tensors unchanged.
    fn scaled(&self, kind: TensorKind, mut tensors: ModelTensors) -> ModelTensors {
        if kind == TensorKind::Gradients && self.gradient_scale != 1.0 {
            let factor = self.gradient_scale as f32;
            tensors.values_mut().flatten().for_each(|element| *element *= factor);
        }
        tensors
    }

    fn check_batch(&self, step: &StepRequest) -> Result<(), RunError> {
        let program = self.program();
        let work = program.context.workload;
        let expected = work.global_batch * work.sequence_length;
        let (tokens, targets) = (step.tokens.len(), step.targets.len());
        if (tokens, targets) != (expected as usize, expected as usize) {
            return Err(RunError::BatchSizeMismatch { expected, tokens, targets });
        }
        let vocab = program.constants.vocab;
        for (ids, ignored) in [(step.tokens, None), (step.targets, Some(IGNORED_TARGET))] {
            let is_valid = |id: u32| u64::from(id) < vocab || Some(id) == ignored;
            if let Some(position) = ids.iter().position(|id| !is_valid(*id)) {
                return Err(RunError::TokenOutOfVocabulary {
                    token: ids[position],
                    position,
                    vocab,
                });
            }
        }
        Ok(())
    }

    /// Runs a step on the devices of all processes. Loss and gradient norm of the result are those of the
    /// mean over predicted tokens.
    fn run(&mut self, input: StepInput, task: StepTask) -> Result<StepResult, RunError> {
        let StepInput { tokens, targets } = input;
        let local = self.run_local(StepRequest { tokens, targets, task });
        let mut result = match &self.process_group {
            None => local?.into_result(),
            Some(group) => {
                let result = local.and_then(|local| local.reduce(&**group, self.program()));
                result.inspect_err(|error| error.abort_run(&**group))?
            }
        };
        let scale = targets::gradient_scale(targets);
        result.loss *= scale;
        result.gradient_norm *= scale;
        Ok(result)
    }

    /// Runs a step on the devices of this process.
    fn run_local(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        self.check_batch(&step)?;
        let mut local = self.engine.run_step(step)?;
        local.scratch_bytes = self.scratch_bytes();
        if self.process_group.is_some() {
            let ids = step.tokens.iter().chain(step.targets);
            local.token_hash = fnv1a(ids.flat_map(|id| id.to_le_bytes()));
        }
        Ok(local)
    }
}
