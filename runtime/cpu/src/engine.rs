//! The engine of the CPU backend: all devices of a program as threads of this process, or the one
//! device that a process of a cluster is.

use std::borrow::Cow;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use narrows_plan::model::Model;
use narrows_plan::program::{Action, Buffer, StageProgram};
use narrows_plan::{Bytes, CheckedProgram, Precision};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::{
    Engine, LocalStepResult, MeshCoordinates, ModelProgram, Session, StepRequest,
};
use narrows_runtime::{
    DeviceId, DeviceReport, GemmDtype, InstructionSpan, RunError, ScheduledInstruction,
    TimeCategory, scheduled_instructions,
};

use crate::abort::StopReason;
use crate::arena::Arena;
use crate::communication::CommunicationThread;
use crate::device::{CpuDevice, InstructionCategories};
use crate::device_clock::DeviceClock;
use crate::device_links::DeviceLinks;
use crate::device_threads::{DeviceOutcome, DeviceThreads};
use crate::execute::{self, CommunicationContext};
use crate::kernels::{Parallel, RopeTable, supports_bf16};

/// The devices of a process.
pub(crate) struct CpuEngine {
    model_program: Arc<ModelProgram>,
    /// Number of the first device of this process.
    first_device: u64,
    devices: Vec<DeviceState>,
    threads: DeviceThreads,
    rope_table: Option<RopeTable>,
    /// Indexed by pipeline stage.
    categories: Vec<InstructionCategories>,
    /// Parallelism of the kernels of one device.
    parallel: Parallel,
    gemm_dtype: GemmDtype,
}

/// The state of a device between steps.
struct DeviceState {
    arena: Arena,
    scratch: Vec<f32>,
    report: DeviceReport,
    clock: DeviceClock,
    links: Arc<DeviceLinks>,
    /// `None` where the program allows no collective beside computation.
    communication: Option<CommunicationThread>,
}

/// Execution of steps on the devices.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Threads of each device.
    pub threads: usize,
    /// Format to which the operands of GEMMs are rounded.
    pub gemm_dtype: GemmDtype,
    /// Execution of the collectives that a program allows beside computation.
    pub collective_order: CollectiveOrder,
}

/// Execution of the collectives that a program allows beside computation. Both compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveOrder {
    /// Beside computation, on a communication thread for each device.
    Overlapped,
    /// In order with all other instructions, on the thread of the device.
    InOrder,
}

impl CpuOptions {
    /// Devices with this many threads each that compute in f32, with overlapped collectives.
    pub fn new(threads: usize) -> CpuOptions {
        let (gemm_dtype, collective_order) = (GemmDtype::F32, CollectiveOrder::Overlapped);
        CpuOptions { threads, gemm_dtype, collective_order }
    }

    /// Opens a session. Without a group its devices are all threads of this process; with one it has the device whose number
    /// is this process's rank, and all processes must make the same calls of their sessions in the same order. Weights,
    /// gradients and moments are zero.
    ///
    /// # Errors
    /// When the program is not in f32, was not lowered from a plan of this model, or has not one device for each process;
    /// and when this processor cannot multiply the format of GEMMs.
    pub fn open(
        self,
        model: &Model,
        program: CheckedProgram,
        group: Option<Arc<dyn ProcessGroup>>,
    ) -> Result<Session, RunError> {
        let program = Arc::new(ModelProgram::new(model, program)?);
        let engine = match &group {
            None => CpuEngine::in_memory(program.clone(), self)?,
            Some(group) => CpuEngine::of_process(program.clone(), self, &**group)?,
        };
        Ok(Session::new(program, Box::new(engine), group))
    }
}

/// Opens a session in f32 whose devices are all threads of this process, each with `threads` threads.
///
/// # Errors
/// As [`CpuOptions::open`].
pub fn session(
    model: &Model,
    program: CheckedProgram,
    threads: usize,
) -> Result<Session, RunError> {
    CpuOptions::new(threads).open(model, program, None)
}

/// Opens a session in f32 of the one device whose number is this process's rank.
///
/// # Errors
/// As [`CpuOptions::open`].
pub fn session_of_process(
    model: &Model,
    program: CheckedProgram,
    threads: usize,
    group: Arc<dyn ProcessGroup>,
) -> Result<Session, RunError> {
    CpuOptions::new(threads).open(model, program, Some(group))
}

impl CpuEngine {
    /// An engine whose devices are all in this process.
    pub fn in_memory(
        model_program: Arc<ModelProgram>,
        options: CpuOptions,
    ) -> Result<CpuEngine, RunError> {
        let links = DeviceLinks::in_memory(model_program.program());
        CpuEngine::new(model_program, options, 0, links)
    }

    /// An engine of the one device whose number is this process's rank.
    fn of_process(
        model_program: Arc<ModelProgram>,
        options: CpuOptions,
        group: &dyn ProcessGroup,
    ) -> Result<CpuEngine, RunError> {
        let devices = model_program.program().context.mesh.devices();
        let processes = group.world_size();
        if devices != processes {
            return Err(RunError::ProcessCountMismatch { devices, processes });
        }
        let links = DeviceLinks::of_process(model_program.program(), group);
        CpuEngine::new(model_program, options, group.rank(), vec![links])
    }

    /// An engine for the devices from `first_device`, with the links of each.
    fn new(
        model_program: Arc<ModelProgram>,
        CpuOptions { threads, gemm_dtype, collective_order }: CpuOptions,
        first_device: u64,
        links: Vec<DeviceLinks>,
    ) -> Result<CpuEngine, RunError> {
        let program = model_program.program();
        if program.context.precision != Precision::Fp32 {
            return Err(RunError::UnsupportedPrecision);
        }
        if gemm_dtype == GemmDtype::Bf16 && !supports_bf16() {
            return Err(RunError::UnsupportedGemmDtype);
        }
        let threads_fault =
            |error: &dyn Error| RunError::DeviceThreads { reason: error.to_string() };
        let devices = (first_device..).zip(links).map(|(device, links)| {
            let coordinates = MeshCoordinates::of_device(device, &program.context.mesh);
            let stage = &program.stages[coordinates.stage as usize];
            let arena = Arena::new(stage.arena.0);
            let links = Arc::new(links);
            let is_overlapped =
                collective_order == CollectiveOrder::Overlapped && allows_overlap(stage);
            let communication = is_overlapped.then(|| {
                let mut context = CommunicationContext {
                    model_program: model_program.clone(),
                    coordinates,
                    links: links.clone(),
                    arena: arena.share(),
                };
                let run = move |job| execute::run_job(&mut context, job);
                CommunicationThread::start(stage, links.abort.clone(), run)
            });
            let communication = communication.transpose();
            let communication = communication.map_err(|error| threads_fault(&error))?;
            let report = DeviceReport::with_arena(Bytes(arena.bytes()));
            let (scratch, clock) = (vec![], DeviceClock::new());
            Ok(DeviceState { arena, scratch, report, clock, links, communication })
        });
        let devices: Vec<DeviceState> = devices.collect::<Result<_, RunError>>()?;
        let device_threads =
            DeviceThreads::new(devices.len(), threads).map_err(|error| threads_fault(&error))?;
        let rope_table = program.head_dim().map(|head_dim| {
            let positions = program.context.workload.sequence_length as usize;
            RopeTable::new(positions, head_dim as usize, &program.constants.rope)
        });
        let categories = program.stages.iter().map(InstructionCategories::new).collect();
        Ok(CpuEngine {
            model_program,
            first_device,
            devices,
            threads: device_threads,
            rope_table,
            categories,
            parallel: Parallel::new(threads),
            gemm_dtype,
        })
    }

    /// The arena of a device, once no collective accesses it.
    pub fn arena_mut(&mut self, device: u64) -> Result<&mut Arena, RunError> {
        self.wait_for_collectives()?;
        let index = self.index(device);
        Ok(&mut self.devices[index].arena)
    }

    /// Waits for the gathers of the last step.
    fn wait_for_collectives(&self) -> Result<(), RunError> {
        let threads = self.devices.iter().filter_map(|device| device.communication.as_ref());
        let mut result = Ok(());
        for thread in threads {
            match thread.wait() {
                Ok(()) => {}
                // Of a device that failed, which reports why unless it panicked.
                Err(StopReason::Aborted) => result = Err(RunError::DeviceThreadPanicked),
                Err(StopReason::Failed(error)) => return Err(*error),
            }
        }
        result
    }

    /// Index of a device among those of this process.
    fn index(&self, device: u64) -> usize {
        (device - self.first_device) as usize
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn gemm_dtype(&self) -> Option<GemmDtype> {
        Some(self.gemm_dtype)
    }

    fn devices(&self) -> Range<u64> {
        self.first_device..self.first_device + self.devices.len() as u64
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        let start = Instant::now();
        let program = self.model_program.program();
        let devices: Vec<CpuDevice> = (self.first_device..)
            .zip(&mut self.devices)
            .map(|(device, state)| {
                let coordinates = MeshCoordinates::of_device(device, &program.context.mesh);
                let stage = coordinates.stage as usize;
                state.report.reset_counts();
                state.clock.start_step(start);
                CpuDevice {
                    coordinates,
                    program,
                    stage: &program.stages[stage],
                    arena: &mut state.arena,
                    scratch: &mut state.scratch,
                    report: &mut state.report,
                    clock: &mut state.clock,
                    links: &state.links,
                    communication: state.communication.as_mut(),
                    rope_table: self.rope_table.as_ref(),
                    update_groups: self.model_program.update_groups(stage),
                    categories: &self.categories[stage],
                    parallel: self.parallel,
                    gemm_dtype: self.gemm_dtype,
                    step,
                    loss: 0.0,
                }
            })
            .collect();
        let mut outcomes = self.threads.run(devices)?;
        let end = Instant::now();
        if let Some(error) = outcomes.iter_mut().find_map(DeviceOutcome::take_failure) {
            return Err(error);
        }
        // Devices that were aborted because another process failed have no result.
        let complete = outcomes.into_iter().filter(|outcome| outcome.stop_reason.is_none());
        let steps = complete.map(|outcome| outcome.step);
        let mut result = LocalStepResult::from_devices(program, steps);
        let waiting =
            if self.devices.len() > 1 { TimeCategory::Bubble } else { TimeCategory::Other };
        for device in &mut self.devices {
            result.time_breakdown.add_all(&device.clock.end_step(waiting, end));
        }
        Ok(result)
    }

    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        self.wait_for_collectives()?;
        Ok(self.devices[self.index(device)].arena.slice(element_range(buffer)).into())
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        modify: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        modify(self.arena_mut(device)?.slice_mut(element_range(buffer)));
        Ok(())
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        self.devices.iter().map(|device| device.arena.bytes()).collect()
    }

    /// Scratch memory of the kernels, which the first step grows to what they need, and buffers of
    /// transfers to other stages.
    fn scratch_bytes(&self) -> Vec<u64> {
        let bytes = |device: &DeviceState| {
            4 * device.scratch.capacity() as u64 + device.links.buffer_bytes()
        };
        self.devices.iter().map(bytes).collect()
    }

    fn record_instruction_spans(&mut self) {
        let program = self.model_program.program();
        for (device, state) in (self.first_device..).zip(&mut self.devices) {
            let stage = &program.stages[DeviceId(device).stage(&program.context.mesh)];
            state.clock.record_spans(scheduled_instructions(stage).count());
            if let Some(communication) = &state.communication {
                let is_collective = |scheduled: &ScheduledInstruction| {
                    matches!(scheduled.instr.action, Action::Collective(_))
                };
                communication
                    .reserve_spans(scheduled_instructions(stage).filter(is_collective).count());
            }
        }
    }

    /// Steps whose spans are recorded end with their gathers.
    fn recording_changes_execution(&self) -> bool {
        self.devices.iter().any(|device| {
            let gathers =
                device.communication.as_ref().is_some_and(CommunicationThread::has_gathers);
            gathers && !device.clock.records_spans()
        })
    }

    fn instruction_spans(&self, device: u64) -> &[InstructionSpan] {
        self.devices[self.index(device)].clock.spans()
    }
}

impl Drop for CpuEngine {
    /// Ends the communication threads before any arena is freed: they access the arenas of all devices of the process.
    fn drop(&mut self) {
        let devices = &mut self.devices;
        let threads = devices.iter_mut().filter_map(|device| device.communication.as_mut());
        let mut threads: Vec<&mut CommunicationThread> = threads.collect();
        threads.iter().for_each(|thread| thread.close());
        // A process that panics leaves the thread of its device alone: it accesses no other arena, and its collectives may wait
        // for processes that wait for this one to end.
        if threads.len() == 1 && std::thread::panicking() {
            return;
        }
        threads.iter_mut().for_each(|thread| thread.join());
    }
}

/// Whether a stage has collectives that may run beside computation.
fn allows_overlap(stage: &StageProgram) -> bool {
    !stage.gradient_buckets.is_empty()
        || !stage.gather_buckets.is_empty()
        || stage.all_instructions().any(|instr| instr.overlapped_instrs > 0)
}

/// Elements of a resident buffer in its arena.
fn element_range(buffer: &Buffer) -> Range<usize> {
    let start = (buffer.offset / 4) as usize;
    start..start + (buffer.extent.bytes().0 / 4) as usize
}

#[cfg(test)]
mod tests;
