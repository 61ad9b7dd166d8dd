//! A device of a program on a GPU, as a session's engine.

use std::borrow::Cow;
use std::collections::BTreeMap;
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

use super::super::compile::CubinCache;
use super::super::error::CudaError;
use super::super::launch::{COEFFICIENTS, LaunchContext, rotary_table};
use super::super::libraries::CudaLibrary;
use super::super::machine;
use super::super::products::{
    self, AlgorithmStore, MatmulAlgorithm, MatmulKey, MatmulSetting, Platform,
};
use super::super::tape::{DeviceSchedule, ScheduleItem};
use super::blas::{CublasLt, MatmulPointers};
use super::communicators::NcclCommunicators;
use super::gpu::{DeviceMemory, OpenGpu};
use super::inputs::TokenInputs;
use super::laps::InstructionTimers;
use super::modules::{DeviceBuffers, KernelModules};
use super::player::{ExecutorResources, GraphExecutor};
use narrows_runtime::DeviceReport;
use narrows_runtime::RunError;
use narrows_runtime::process_group::{ProcessGroup, agree};
use narrows_runtime::session::{
    DeviceStep, Engine, LocalStepResult, MeshCoordinates, ModelProgram, Session, StepRequest,
};
use narrows_runtime::{InstructionSpan, TimeBreakdown, TimeCategory};

/// How a session uses a GPU.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// Which, counted from 0 among those that this process sees.
    pub ordinal: u64,
    /// Whether every step goes instruction by instruction, and no graph is captured.
    pub eager: bool,
    /// Where compiled kernels are kept.
    pub cubins: PathBuf,
    /// Where the fastest algorithms of products are kept.
    pub algorithms: PathBuf,
    /// How long a GPU that is alone may be at one part of a step before it is given up; of many, the cluster says.
    pub deadline: Duration,
}

/// One device, on a GPU.
struct GpuEngine {
    subject: Arc<ModelProgram>,
    device: u64,
    at: MeshCoordinates,
    /// Left behind where what is under way on it may never end.
    player: ManuallyDrop<GraphExecutor>,
    report: DeviceReport,
    /// Whether somebody wants to see the laps that are taken.
    keeps_laps: bool,
}

/// Allocates a device's arena on a GPU: of a cluster, the device whose number this process has, and
/// without one the only device of the program. Weights, gradients and moments are zeros. Processes
/// must make the same calls of the session, in the same order. What the caller may want to be told
/// is given to `warn`.
///
/// # Errors
/// When the program is not of this model or for another number of devices, a library does not load, an
/// instruction has no kernel, or memory does not suffice.
pub fn session(
    model: &Model,
    program: CheckedProgram,
    options: &GpuOptions,
    cluster: Option<Arc<dyn ProcessGroup>>,
    warn: &mut dyn FnMut(&str),
) -> Result<Session, RunError> {
    let subject = Arc::new(ModelProgram::new(model, program)?);
    let devices = subject.program().context.mesh.devices();
    let device = match &cluster {
        None if devices > 1 => return Err(CudaError::OneProcess { devices }.into()),
        Some(cluster) if cluster.world_size() != devices => {
            return Err(RunError::ProcessCountMismatch {
                devices,
                processes: cluster.world_size(),
            });
        }
        cluster => cluster.as_ref().map_or(0, |cluster| cluster.rank()),
    };
    let opened = GpuEngine::open(subject.clone(), device, options, cluster.clone(), warn);
    // The others wait in NCCL or for an agreement, and should learn why nobody comes.
    if let (Err(error), Some(cluster)) = (&opened, &cluster) {
        error.abort_run(&**cluster);
    }
    Ok(Session::new(subject, Box::new(opened?), cluster))
}

impl GpuEngine {
    fn open(
        subject: Arc<ModelProgram>,
        device: u64,
        options: &GpuOptions,
        cluster: Option<Arc<dyn ProcessGroup>>,
        warn: &mut dyn FnMut(&str),
    ) -> Result<GpuEngine, RunError> {
        let program = subject.program();
        let at = MeshCoordinates::of_device(device, &program.context.mesh);
        let stage = &program.stages[at.stage as usize];
        let gpu = OpenGpu::open(options.ordinal)?;
        let place = LaunchContext {
            context: &program.context,
            constants: &program.constants,
            stage,
            tensor: at.tensor,
            data: at.data,
            decays: subject.weight_decay_applies(at.stage as usize),
        };
        let workspace = products::workspace(gpu.capability);
        let setting = MatmulSetting { device: &place, tied: program.tied, workspace };
        let tape = DeviceSchedule::new(&setting, at.stage).map_err(CudaError::from)?;
        // The largest first: what does not fit is known at once.
        let arena = DeviceMemory::new(&gpu, "the program's memory", stage.arena.0)?;
        let memories = memories(&gpu, program, &tape, arena)?;
        let mut cubins = CubinCache::open(&options.cubins).map_err(CudaError::from)?;
        let modules = KernelModules::load(&gpu, &tape.kernels(), &mut cubins)?;
        let mut products = CublasLt::open(&gpu, workspace.0)?;
        let keys = places(&tape, &memories.arena);
        let mut store = algorithms(&gpu, &keys, &products, options, warn)?;
        if let Some(cluster) = &cluster {
            // Replicas compute the same bits when they use the same algorithms.
            let found = |key: &MatmulKey| Some((*key, *store.get(key)?));
            let mine: Vec<_> = keys.keys().filter_map(found).collect();
            let chosen = agree(&**cluster, mine, first_of_each)?;
            chosen.into_iter().for_each(|(key, algorithm)| store.insert(key, algorithm));
        }
        products.prepare(&gpu, &keys, |key| store.get(key).copied())?;
        if let Err(error) = store.save() {
            let path = store.path().display();
            warn(&format!("{path}: the algorithms of products are not kept: {error}"));
        }
        let inputs = TokenInputs::new(&gpu, program, at)?;
        let deadline =
            cluster.as_ref().map_or(options.deadline, |cluster| cluster.collective_timeout());
        let others = match cluster {
            None => None,
            Some(cluster) => {
                let met = NcclCommunicators::new(&gpu, program, at, &*cluster, deadline)?;
                Some((cluster, met))
            }
        };
        let set = ExecutorResources { products, memories, inputs, modules, others, deadline };
        let mut player = GraphExecutor::new(gpu, tape, set, program, at, options.eager)?;
        if options.eager {
            // Beside single launches, events cost little.
            player.time_instructions()?;
        }
        let report = DeviceReport::with_arena(Bytes(stage.arena.0));
        let player = ManuallyDrop::new(player);
        Ok(GpuEngine { subject, device, at, player, report, keeps_laps: false })
    }

    fn memory(&self) -> &DeviceMemory {
        &self.player.stage.memories.arena
    }

    /// Counts what a step did.
    fn count(&mut self) {
        self.report.reset_counts();
        let tape = &self.player.tape;
        for leg in tape.turns.iter().flat_map(|turn| &turn.legs) {
            match leg {
                ScheduleItem::Piece(piece) => tape.pieces[*piece].count(&mut self.report),
                ScheduleItem::Transfer(transfer) => {
                    self.report.count_instruction(transfer.name());
                    let bytes = Bytes(transfer.bytes());
                    match transfer.sends {
                        true => self.report.sent += bytes,
                        false => self.report.received += bytes,
                    }
                }
            }
        }
    }
}

/// What launches point into, besides the arena.
fn memories(
    gpu: &OpenGpu,
    program: &Program,
    tape: &DeviceSchedule,
    arena: DeviceMemory,
) -> Result<DeviceBuffers, CudaError> {
    let rotary = match program.head_dim() {
        None => vec![],
        Some(head_dim) => {
            let positions = program.context.workload.sequence_length;
            rotary_table(positions, head_dim, program.constants.rope_theta)
        }
    };
    let bytes: &[u8] = bytemuck::cast_slice(&rotary);
    let memories = DeviceBuffers {
        arena,
        scratch: DeviceMemory::new(gpu, "scratch memory", tape.scratch_bytes)?,
        rotary: DeviceMemory::new(gpu, "the table of rotations", bytes.len() as u64)?,
        coefficients: DeviceMemory::new(gpu, "the optimizer's numbers", 4 * COEFFICIENTS)?,
        loss: DeviceMemory::new(gpu, "the loss", 8)?,
    };
    let written = memories.rotary.write(0..bytes.len() as u64, bytes);
    gpu.said("the table of rotations", written)?;
    Ok(memories)
}

/// The products of a tape, and a place where each is made.
fn places(tape: &DeviceSchedule, arena: &DeviceMemory) -> BTreeMap<MatmulKey, MatmulPointers> {
    let mut keys = BTreeMap::new();
    for matmul in tape.products() {
        let places = [matmul.a, matmul.b, matmul.c].map(|at| arena.at(at.offset));
        keys.entry(matmul.key).or_insert(places);
    }
    keys
}

/// The fastest algorithm of every product: those that are kept, and those that are found now.
fn algorithms(
    gpu: &OpenGpu,
    keys: &BTreeMap<MatmulKey, MatmulPointers>,
    products: &CublasLt,
    options: &GpuOptions,
    warn: &mut dyn FnMut(&str),
) -> Result<AlgorithmStore, CudaError> {
    let cublaslt = machine::version(CudaLibrary::CublasLt).unwrap_or_default();
    let platform = Platform { gpu: gpu.name.clone(), cublaslt };
    let (mut store, unusable) = AlgorithmStore::load(&options.algorithms, platform);
    if let Some(unusable) = unusable {
        warn(&unusable.to_string());
    }
    let stream = gpu.stream(false)?;
    products.find(gpu, keys, &mut store, &stream)?;
    Ok(store)
}

/// Of each product the algorithm of the first process that has it.
fn first_of_each(all: Vec<Vec<(MatmulKey, MatmulAlgorithm)>>) -> Vec<(MatmulKey, MatmulAlgorithm)> {
    let mut chosen = BTreeMap::new();
    for (key, algorithm) in all.into_iter().flatten() {
        chosen.entry(key).or_insert(algorithm);
    }
    chosen.into_iter().collect()
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.player.let_go();
        if !self.player.gpu.lost.load(Ordering::Relaxed) {
            // SAFETY: nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.player) };
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
        let program = self.subject.program();
        let played = self.player.play(&step, program, self.at)?;
        self.count();
        let program = self.subject.program();
        let left = DeviceStep {
            coordinates: self.at,
            loss: played.loss,
            gradient_square_sum: played.squares,
            report: &self.report,
        };
        let mut share = LocalStepResult::from_devices(program, [left]);
        let mut parts =
            self.player.laps.as_ref().map_or(TimeBreakdown::default(), InstructionTimers::parts);
        // A graph's time is one number.
        parts.add(TimeCategory::Other, played.time.saturating_sub(parts.total()));
        share.time_breakdown.add_all(&parts);
        Ok(share)
    }

    fn read_buffer(&self, _: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        let bytes = buffer.extent.bytes().0;
        let range = buffer.offset..buffer.offset + bytes;
        let gpu = &self.player.gpu;
        let read = |into: &mut [u8]| gpu.said("reading weights", self.memory().read(range, into));
        Ok(match buffer.extent.dtype {
            DType::Bf16 => {
                let mut bits = vec![0_u16; (bytes / 2) as usize];
                read(bytemuck::cast_slice_mut(&mut bits))?;
                bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
            }
            _ => {
                let mut numbers = vec![0.0_f32; (bytes / 4) as usize];
                read(bytemuck::cast_slice_mut(&mut numbers))?;
                numbers.into()
            }
        })
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        let mut numbers = self.read_buffer(device, buffer)?.into_owned();
        change(&mut numbers);
        let range = buffer.offset..buffer.offset + buffer.extent.bytes().0;
        let gpu = &self.player.gpu;
        let write = |from: &[u8]| gpu.said("writing weights", self.memory().write(range, from));
        match buffer.extent.dtype {
            DType::Bf16 => {
                let bits: Vec<u16> = numbers.iter().map(|x| bf16::from_f32(*x).to_bits()).collect();
                write(bytemuck::cast_slice(&bits))?;
            }
            _ => write(bytemuck::cast_slice(&numbers))?,
        }
        Ok(())
    }

    fn zero_buffer(&mut self, _: u64, buffer: &Buffer) -> Result<(), RunError> {
        let range = buffer.offset..buffer.offset + buffer.extent.bytes().0;
        Ok(self.player.gpu.said("zeroing gradients", self.memory().clear(range))?)
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        vec![self.memory().bytes()]
    }

    fn scratch_bytes(&self) -> Vec<u64> {
        vec![self.player.scratch_bytes()]
    }

    fn record_instruction_spans(&mut self) {
        // Without events nothing is kept, and steps go on as they did.
        self.keeps_laps = self.player.time_instructions().is_ok();
    }

    fn recording_changes_execution(&self) -> bool {
        // No graph is replayed while instructions are timed.
        self.player.laps.is_none()
    }

    fn instruction_spans(&self, _: u64) -> &[InstructionSpan] {
        self.player.laps.as_ref().filter(|_| self.keeps_laps).map_or(&[], InstructionTimers::laps)
    }
}
