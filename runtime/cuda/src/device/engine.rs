//! The engine of a session whose device is a GPU.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::bf16;
use narrows_plan::model::Model;
use narrows_plan::program::{Buffer, Program};
use narrows_plan::{Bytes, CheckedProgram, DType};

use super::communicators::NcclCommunicators;
use super::cublaslt::{CublasLt, MatmulPointers};
use super::cudnn::Cudnn;
use super::gpu::{DeviceMemory, OpenGpu};
use super::graph_executor::{ExecutorResources, GraphExecutor};
use super::inputs::TokenInputs;
use super::modules::{DeviceBuffers, KernelModules};
use super::timers::InstructionTimers;
use crate::compile::CubinCache;
use crate::discovery;
use crate::error::CudaError;
use crate::launch::{AttentionKey, LaunchContext, OPTIMIZER_COEFFICIENTS, rotary_table};
use crate::libraries::CudaLibrary;
use crate::matmul::{self, AlgorithmStore, MatmulAlgorithm, MatmulContext, MatmulKey, Platform};
use crate::schedule::{DeviceSchedule, P2pKind, ScheduleItem};
use narrows_runtime::process_group::{ProcessGroup, gather_and_broadcast};
use narrows_runtime::session::{
    DeviceStep, Engine, LocalStepResult, MeshCoordinates, ModelProgram, Session, StepRequest,
};
use narrows_runtime::{DeviceReport, InstructionSpan, RunError, TimeBreakdown, TimeCategory};

/// Options of a session on a GPU.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Index of the GPU among those that the process sees.
    pub ordinal: u64,
    /// Whether instructions are launched one by one in every step, and no graph is captured.
    pub eager: bool,
    /// Which kernels compute attention.
    pub attention: AttentionKernels,
    /// Folder of the cubin cache.
    pub cubin_folder: PathBuf,
    /// Folder of the files with the fastest matmul algorithms.
    pub algorithm_folder: PathBuf,
    /// Maximum time without progress in a step of a single GPU; with several processes, their collective timeout
    /// applies.
    pub timeout: Duration,
}

/// Choice of the kernels of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernels {
    /// cuDNN's where it has some, whose gradients of the queries may differ in the last bits between runs.
    Fastest,
    /// Own kernels, which compute the same bits in every run.
    Deterministic,
}

/// Executes one device of a program on a GPU.
struct GpuEngine {
    model_program: Arc<ModelProgram>,
    device: u64,
    coordinates: MeshCoordinates,
    /// Leaked after a failure, since work on the GPU may never end.
    executor: ManuallyDrop<GraphExecutor>,
    report: DeviceReport,
    /// Whether spans of instructions are reported.
    keeps_spans: bool,
}

/// Opens a session on a GPU: for the device with the rank of this process or, without a process group, for the
/// only device of the program. Weights, gradients and moments are zeros. All processes must make the same calls of
/// the session in the same order. `warn` receives warnings.
///
/// # Errors
/// When the program belongs to another model or has another number of devices, a library does not load, an
/// instruction has no kernel, or memory does not suffice.
pub fn session(
    model: &Model,
    program: CheckedProgram,
    options: &GpuOptions,
    processes: Option<Arc<dyn ProcessGroup>>,
    warn: &mut dyn FnMut(&str),
) -> Result<Session, RunError> {
    let model_program = Arc::new(ModelProgram::new(model, program)?);
    let devices = model_program.program().context.mesh.devices();
    let device = match &processes {
        None if devices > 1 => return Err(CudaError::OneGpuPerProcess { devices }.into()),
        Some(processes) if processes.world_size() != devices => {
            return Err(RunError::ProcessCountMismatch {
                devices,
                processes: processes.world_size(),
            });
        }
        processes => processes.as_ref().map_or(0, |processes| processes.rank()),
    };
    let engine = GpuEngine::open(model_program.clone(), device, options, processes.clone(), warn);
    // The other processes wait in NCCL or in a control exchange; tell them why this one does not join.
    if let (Err(error), Some(processes)) = (&engine, &processes) {
        error.abort_run(&**processes);
    }
    Ok(Session::new(model_program, Box::new(engine?), processes))
}

impl GpuEngine {
    fn open(
        model_program: Arc<ModelProgram>,
        device: u64,
        options: &GpuOptions,
        processes: Option<Arc<dyn ProcessGroup>>,
        warn: &mut dyn FnMut(&str),
    ) -> Result<GpuEngine, RunError> {
        let program = model_program.program();
        let coordinates = MeshCoordinates::of_device(device, &program.context.mesh);
        let stage = &program.stages[coordinates.stage as usize];
        let gpu = OpenGpu::open(options.ordinal)?;
        // Sums over rows have the same order, and replicas the same bits, where GPUs differ.
        let multiprocessors = match &processes {
            None => gpu.multiprocessors,
            Some(processes) => gather_and_broadcast(&**processes, gpu.multiprocessors, |all| {
                all.into_iter().next().unwrap_or_default()
            })?,
        };
        let launch_context = LaunchContext {
            context: &program.context,
            constants: &program.constants,
            stage,
            coordinates,
            update_groups: model_program.update_groups(coordinates.stage as usize),
            multiprocessors,
        };
        let workspace = matmul::recommended_workspace(gpu.capability);
        let matmul_context =
            MatmulContext { device: &launch_context, tied: program.tied, workspace };
        let schedule =
            DeviceSchedule::new(&matmul_context, coordinates.stage).map_err(CudaError::from)?;
        // The largest allocation first, so that it fails early.
        let arena = DeviceMemory::new(&gpu, "the program's memory", stage.arena.0)?;
        let buffers = allocate_buffers(&gpu, program, &schedule, arena)?;
        let mut cubins = CubinCache::open(&options.cubin_folder).map_err(CudaError::from)?;
        let modules = KernelModules::load(&gpu, &schedule.kernels(), &mut cubins)?;
        let mut cublaslt = CublasLt::open(&gpu, workspace.0)?;
        let matmuls = matmul_pointers(&schedule, &buffers.arena);
        let mut store =
            select_algorithms(&gpu, (&buffers.arena, &matmuls), &cublaslt, options, warn)?;
        if let Some(processes) = &processes {
            // Replicas compute the same bits only with the same algorithms.
            let stored = |key: &MatmulKey| Some((*key, *store.get(key)?));
            let local: Vec<_> = matmuls.keys().filter_map(stored).collect();
            let chosen = gather_and_broadcast(&**processes, local, lowest_rank_wins)?;
            chosen.into_iter().for_each(|(key, algorithm)| store.insert(key, algorithm));
        }
        cublaslt.prepare(&gpu, &matmuls, |key| store.get(key).copied())?;
        if let Err(error) = store.save() {
            let path = store.path().display();
            warn(&format!("{path}: the algorithms of matmuls cannot be saved: {error}"));
        }
        let attentions: BTreeSet<AttentionKey> = match options.attention {
            AttentionKernels::Fastest => {
                schedule.fused_attentions().map(|fused| fused.key).collect()
            }
            AttentionKernels::Deterministic => BTreeSet::new(),
        };
        let cudnn = Cudnn::open(&gpu, attentions, warn)?;
        let inputs = TokenInputs::new(&gpu, program, coordinates)?;
        let timeout =
            processes.as_ref().map_or(options.timeout, |processes| processes.collective_timeout());
        let peers = match processes {
            None => None,
            Some(processes) => {
                let communicators =
                    NcclCommunicators::new(&gpu, program, coordinates, &*processes, timeout)?;
                Some((processes, communicators))
            }
        };
        let resources =
            ExecutorResources { cublaslt, cudnn, buffers, inputs, modules, peers, timeout };
        let mut executor =
            GraphExecutor::new(gpu, schedule, resources, program, coordinates, options.eager)?;
        if options.eager {
            // Events add little to the cost of single launches.
            executor.time_instructions()?;
        }
        let report = DeviceReport::with_arena(Bytes(stage.arena.0));
        let executor = ManuallyDrop::new(executor);
        Ok(GpuEngine { model_program, device, coordinates, executor, report, keeps_spans: false })
    }

    fn arena(&self) -> &DeviceMemory {
        &self.executor.resources.buffers.arena
    }

    /// Counts the instructions and traffic of a step in the report.
    fn count_step(&mut self) {
        self.report.reset_counts();
        let schedule = &self.executor.schedule;
        for item in schedule.passes.iter().flat_map(|pass| &pass.items) {
            if let Some(segment) = item.segment() {
                schedule.segments[segment].count(&mut self.report);
            }
            if let ScheduleItem::Transfer(transfer) = item {
                self.report.count_instruction(transfer.name());
                let bytes = Bytes(transfer.bytes());
                match transfer.kind {
                    P2pKind::Send => self.report.sent += bytes,
                    P2pKind::Recv => self.report.received += bytes,
                }
            }
        }
    }
}

/// Allocates the buffers besides the arena.
fn allocate_buffers(
    gpu: &OpenGpu,
    program: &Program,
    schedule: &DeviceSchedule,
    arena: DeviceMemory,
) -> Result<DeviceBuffers, CudaError> {
    let rotary = match program.head_dim() {
        None => vec![],
        Some(_) => rotary_table(program.context.workload.sequence_length, &program.constants.rope),
    };
    let bytes: &[u8] = bytemuck::cast_slice(&rotary);
    let buffers = DeviceBuffers {
        arena,
        scratch: DeviceMemory::new(gpu, "scratch memory", schedule.scratch_bytes)?,
        rotary: DeviceMemory::new(gpu, "the rotary table", bytes.len() as u64)?,
        coefficients: DeviceMemory::new(
            gpu,
            "the optimizer's coefficients",
            4 * OPTIMIZER_COEFFICIENTS,
        )?,
        loss: DeviceMemory::new(gpu, "the loss", 8)?,
    };
    let copied = buffers.rotary.write(0..bytes.len() as u64, bytes);
    gpu.check("the rotary table", copied)?;
    Ok(buffers)
}

/// The matmuls of a schedule, each with the pointers of one occurrence.
fn matmul_pointers(
    schedule: &DeviceSchedule,
    arena: &DeviceMemory,
) -> BTreeMap<MatmulKey, MatmulPointers> {
    let mut matmuls = BTreeMap::new();
    for matmul in schedule.matmuls() {
        let pointers =
            [matmul.a, matmul.b, matmul.c, matmul.d].map(|matrix| arena.address(matrix.offset));
        matmuls.entry(matmul.key).or_insert(pointers);
    }
    matmuls
}

/// The fastest algorithm of every matmul, from the file or selected now.
fn select_algorithms(
    gpu: &OpenGpu,
    (arena, matmuls): (&DeviceMemory, &BTreeMap<MatmulKey, MatmulPointers>),
    cublaslt: &CublasLt,
    options: &GpuOptions,
    warn: &mut dyn FnMut(&str),
) -> Result<AlgorithmStore, CudaError> {
    let version = discovery::library_version(CudaLibrary::CublasLt).unwrap_or_default();
    let platform = Platform { gpu: gpu.name.clone(), cublaslt: version };
    let (mut store, unusable) = AlgorithmStore::load(&options.algorithm_folder, platform);
    if let Some(unusable) = unusable {
        warn(&unusable.to_string());
    }
    let stream = gpu.stream(false)?;
    cublaslt.tune(gpu, arena, matmuls, &mut store, &stream)?;
    Ok(store)
}

/// Merges the algorithms of all processes; for each matmul the lowest rank wins.
fn lowest_rank_wins(
    all: Vec<Vec<(MatmulKey, MatmulAlgorithm)>>,
) -> Vec<(MatmulKey, MatmulAlgorithm)> {
    let mut chosen = BTreeMap::new();
    for (key, algorithm) in all.into_iter().flatten() {
        chosen.entry(key).or_insert(algorithm);
    }
    chosen.into_iter().collect()
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.executor.shut_down();
        if !self.executor.gpu.abandoned.load(Ordering::Relaxed) {
            // SAFETY: the executor is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.executor) };
        }
    }
}

impl Engine for GpuEngine {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn devices(&self) -> Range<u64> {
        self.device..self.device + 1
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        let program = self.model_program.program();
        let result = self.executor.run_step(&step, program, self.coordinates)?;
        self.count_step();
        let program = self.model_program.program();
        let device_step = DeviceStep {
            coordinates: self.coordinates,
            loss: result.loss,
            gradient_square_sum: result.gradient_square_sum,
            report: &self.report,
        };
        let mut local = LocalStepResult::from_devices(program, [device_step]);
        let mut breakdown = self
            .executor
            .timers
            .as_ref()
            .map_or(TimeBreakdown::default(), InstructionTimers::breakdown);
        // The time of graphs is not broken down.
        breakdown.add(TimeCategory::Other, result.time.saturating_sub(breakdown.total()));
        local.time_breakdown.add_all(&breakdown);
        Ok(local)
    }

    fn read_buffer(&self, _: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        self.executor.wait_for_gathers()?;
        let bytes = buffer.extent.bytes().0;
        let range = buffer.offset..buffer.offset + bytes;
        let gpu = &self.executor.gpu;
        let read = |into: &mut [u8]| gpu.check("reading weights", self.arena().read(range, into));
        Ok(match buffer.extent.dtype {
            DType::Bf16 => {
                let mut bits = vec![0_u16; (bytes / 2) as usize];
                read(bytemuck::cast_slice_mut(&mut bits))?;
                bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
            }
            _ => {
                let mut values = vec![0.0_f32; (bytes / 4) as usize];
                read(bytemuck::cast_slice_mut(&mut values))?;
                values.into()
            }
        })
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        let mut values = self.read_buffer(device, buffer)?.into_owned();
        change(&mut values);
        let range = buffer.offset..buffer.offset + buffer.extent.bytes().0;
        let gpu = &self.executor.gpu;
        let write = |from: &[u8]| gpu.check("writing weights", self.arena().write(range, from));
        match buffer.extent.dtype {
            DType::Bf16 => {
                let bits: Vec<u16> = values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
                write(bytemuck::cast_slice(&bits))?;
            }
            _ => write(bytemuck::cast_slice(&values))?,
        }
        Ok(())
    }

    fn zero_buffer(&mut self, _: u64, buffer: &Buffer) -> Result<(), RunError> {
        let range = buffer.offset..buffer.offset + buffer.extent.bytes().0;
        Ok(self.executor.gpu.check("zeroing memory", self.arena().zero(range))?)
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        vec![self.arena().bytes()]
    }

    fn scratch_bytes(&self) -> Vec<u64> {
        vec![self.executor.scratch_bytes()]
    }

    fn record_instruction_spans(&mut self) {
        // Without events there are no spans, and steps run as before.
        self.keeps_spans = self.executor.time_instructions().is_ok();
    }

    fn recording_changes_execution(&self) -> bool {
        // Graphs are not replayed while instructions are timed.
        self.executor.timers.is_none()
    }

    fn instruction_spans(&self, _: u64) -> &[InstructionSpan] {
        self.executor
            .timers
            .as_ref()
            .filter(|_| self.keeps_spans)
            .map_or(&[], InstructionTimers::instruction_spans)
    }
}
