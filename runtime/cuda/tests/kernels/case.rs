//! One instruction on one device: its operands in an arena, and its launches run by the shim.
//!
//! Every operand is surrounded by guard bytes that are NaN in every format and must not change; operands that are only
//! written are NaN before. Everything runs twice, with blocks and threads in opposite orders, and must give the same
//! bits.

use std::collections::HashMap;
use std::ops::Range;

use narrows_cuda::{
    Argument, Launch, LaunchContext, Launches, MemoryAccess, MemorySpace, OPTIMIZER_COEFFICIENTS,
    RingAttention, kernel_launches, ring_attention,
};
use narrows_plan::model::Rope;
use narrows_plan::program::{
    Access, Action, Buffer, BufferId, BufferRole, Extent, FusedOp, Instr, MicrobatchPass,
    ModelChunk, ModelConstants, Phase, Program, StageProgram,
};
use narrows_plan::{Bytes, Context, DType, Mesh, Precision, Workload, Zero};
use narrows_runtime::session::MeshCoordinates;
use narrows_runtime::{ScheduledInstruction, UpdateGroup, scheduled_instructions};

use super::bounds_check::{AccessedBytes, check_launches};
use super::formats::{decode, encode};
use super::shim::{self, ExecutionOrder, ShimMemory};

/// Guard bytes around every operand.
const GUARD_BYTES: u64 = 256;
/// Streaming multiprocessors of the GPU that launches are for, as an A100 has.
pub const MULTIPROCESSORS: u32 = 108;
/// Value of guard bytes, which is NaN in every format.
const POISON: u8 = 0xff;

/// An instruction with its device and operands.
pub struct KernelCase {
    pub context: Context,
    pub constants: ModelConstants,
    pub tensor: u64,
    pub replica: u64,
    pub phase: Phase,
    pub update_groups: HashMap<BufferId, UpdateGroup>,
    pub stage: StageProgram,
    pub rotary: Vec<f32>,
    pub coefficients: [f32; OPTIMIZER_COEFFICIENTS as usize],
    action: Action,
    reads: Vec<Access>,
    writes: Vec<Access>,
    arena: Vec<u8>,
}

/// Memory that an instruction accesses.
pub struct CaseMemory {
    pub arena: AlignedBytes,
    scratch: AlignedBytes,
    scratch_bytes: u64,
    loss: [f64; 1],
}

/// The arena after the instruction.
#[derive(PartialEq)]
pub struct Outcome {
    arena: Vec<u8>,
    buffers: Vec<Buffer>,
    /// The loss of the step, which was 1 before.
    pub loss: f64,
}

impl KernelCase {
    /// A fused op on one of `tensor` devices, with microbatches of `sequences` × `length` tokens.
    pub fn new(op: FusedOp, tensor: u64, tokens: (u64, u64)) -> KernelCase {
        KernelCase::of(Action::Fused(op), tensor, tokens)
    }

    /// Any instruction.
    pub fn of(action: Action, tensor: u64, (sequences, length): (u64, u64)) -> KernelCase {
        let mesh = Mesh { tensor, pipeline: 1, data: 1, context: 1 };
        let workload =
            Workload { global_batch: sequences, sequence_length: length, micro_batch: sequences };
        let context = Context::new(mesh, workload, Precision::MixedBf16, Zero::Off);
        let constants = ModelConstants {
            hidden: 1,
            vocab: 1,
            norm_epsilon: 1e-5,
            latent_norm_epsilon: 1e-6,
            rope: Rope::plain(10_000.0, 2),
            padding_token: None,
        };
        let stage = StageProgram {
            buffers: vec![],
            chunks: vec![ModelChunk::empty()],
            step: vec![],
            gradient_buckets: vec![],
            gather_buckets: vec![],
            exact_step: Default::default(),
            schedule: vec![],
            arena: Bytes(0),
        };
        KernelCase {
            context,
            constants,
            tensor: 0,
            replica: 0,
            phase: Phase::Forward,
            update_groups: HashMap::new(),
            stage,
            rotary: vec![],
            coefficients: [f32::NAN; OPTIMIZER_COEFFICIENTS as usize],
            action,
            reads: vec![],
            writes: vec![],
            arena: vec![],
        }
    }

    /// Adds a buffer with these elements, or NaNs.
    pub fn buffer(
        &mut self,
        shape: (u64, u64),
        dtype: DType,
        elements: Option<&[f32]>,
    ) -> BufferId {
        self.place(shape, dtype, elements.map(|elements| encode(elements, dtype)))
    }

    /// Adds a buffer of token ids, one per row.
    pub fn token_ids(&mut self, ids: &[u32]) -> BufferId {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.place((ids.len() as u64, 1), DType::U32, Some(bytes))
    }

    fn place(
        &mut self,
        (rows, columns): (u64, u64),
        dtype: DType,
        bytes: Option<Vec<u8>>,
    ) -> BufferId {
        let extent = Extent { rows, columns, dtype };
        let size = extent.bytes().0 as usize;
        let offset = self.stage.arena.0 + GUARD_BYTES;
        let end = (offset + extent.bytes().0 + GUARD_BYTES).next_multiple_of(256);
        self.arena.resize(end as usize, POISON);
        if let Some(bytes) = bytes {
            assert_eq!(bytes.len(), size, "the number of elements");
            self.arena[offset as usize..][..size].copy_from_slice(&bytes);
        }
        self.stage.arena = Bytes(end);
        let id = BufferId(self.stage.buffers.len() as u32);
        self.stage.buffers.push(Buffer {
            name: format!("operand {}", id.0),
            extent,
            role: BufferRole::Activation,
            offset,
            copies: 1,
            shard: None,
            sections: vec![],
        });
        id
    }

    /// An access to a whole buffer.
    pub fn whole_buffer(&self, buffer: BufferId) -> Access {
        Access { buffer, extent: self.stage.buffer(buffer).extent }
    }

    /// Sets the buffers that the instruction reads.
    pub fn reads(&mut self, buffers: &[BufferId]) -> &mut KernelCase {
        self.reads = buffers.iter().map(|buffer| self.whole_buffer(*buffer)).collect();
        self
    }

    /// Sets the buffers that the instruction writes.
    pub fn writes(&mut self, buffers: &[BufferId]) -> &mut KernelCase {
        self.writes = buffers.iter().map(|buffer| self.whole_buffer(*buffer)).collect();
        self
    }

    /// Sets operands with their own extents.
    pub fn accesses(&mut self, reads: Vec<Access>, writes: Vec<Access>) -> &mut KernelCase {
        (self.reads, self.writes) = (reads, writes);
        self
    }

    fn instr(&self) -> Instr {
        Instr {
            action: self.action.clone(),
            reads: self.reads.clone(),
            writes: self.writes.clone(),
            origin: "a test".into(),
            overlapped_instrs: 0,
        }
    }

    /// Calls `work` with the device and the instruction.
    fn on_device<R>(&self, work: impl FnOnce(&LaunchContext, &ScheduledInstruction) -> R) -> R {
        let instr = self.instr();
        let scheduled = ScheduledInstruction {
            instr: &instr,
            pass: MicrobatchPass { phase: self.phase, chunk: 0, microbatch: 0 },
            slot: 0,
        };
        let device = LaunchContext {
            context: &self.context,
            constants: &self.constants,
            stage: &self.stage,
            coordinates: MeshCoordinates { tensor: self.tensor, replica: self.replica, stage: 0 },
            update_groups: &self.update_groups,
            multiprocessors: MULTIPROCESSORS,
        };
        work(&device, &scheduled)
    }

    /// Checks launches of this instruction and counts the bytes they access.
    pub fn check(&self, launches: &Launches) -> Result<AccessedBytes, String> {
        let check = |device: &LaunchContext, scheduled: &ScheduledInstruction| {
            check_launches(device, scheduled, launches)
        };
        self.on_device(check).map_err(|error| error.to_string())
    }

    /// The launches of the instruction, after a bounds check.
    pub fn launches(&self) -> Result<Launches, String> {
        let launches = self.on_device(kernel_launches).map_err(|error| error.to_string())?;
        self.check(&launches).unwrap_or_else(|error| panic!("{error}"));
        Ok(launches)
    }

    /// Runs the instruction; `None` where kernels cannot be compiled for the CPU.
    #[track_caller]
    pub fn run(&self) -> Option<Outcome> {
        let launches = self.launches().unwrap_or_else(|error| panic!("{error}"));
        let execute = |order| {
            let mut memory = self.memory(launches.scratch_bytes);
            self.execute(&launches.launches, &mut memory, order)?;
            Some(self.outcome(memory))
        };
        let ascending = execute(ExecutionOrder::Ascending)?;
        let descending = execute(ExecutionOrder::Descending)?;
        for buffer in &self.stage.buffers {
            let bytes = bytes_of(buffer);
            let same = ascending.arena[bytes.clone()] == descending.arena[bytes];
            assert!(same, "{} depends on the order of execution", buffer.name);
        }
        assert!(ascending == descending);
        self.assert_untouched(&launches.launches, &[], &ascending);
        Some(ascending)
    }

    /// The steps of the instruction, which is ring attention, after a bounds check of their launches.
    pub fn ring(&self) -> Result<RingAttention, String> {
        let ring = self.on_device(ring_attention).map_err(|error| error.to_string())?;
        let ring = ring.expect("ring attention");
        let launches = ring_launches(&ring);
        self.check(&Launches { launches, scratch_bytes: ring.scratch_bytes })?;
        Ok(ring)
    }

    /// Memory before the instruction, with scratch memory of this size.
    pub fn memory(&self, scratch_bytes: u64) -> CaseMemory {
        CaseMemory {
            arena: AlignedBytes::of(&self.arena),
            scratch: AlignedBytes::of(&vec![POISON; (scratch_bytes + GUARD_BYTES) as usize]),
            scratch_bytes,
            loss: [1.0],
        }
    }

    /// Runs launches; `None` where kernels cannot be compiled for the CPU.
    pub fn execute(
        &self,
        launches: &[Launch],
        memory: &mut CaseMemory,
        order: ExecutionOrder,
    ) -> Option<()> {
        let mut rotary = AlignedBytes::of(bytemuck::cast_slice(&self.rotary));
        let mut coefficients = self.coefficients;
        for launch in launches {
            let kernels = shim::kernels(launch.family)?;
            let mut memory = ShimMemory {
                arena: memory.arena.as_mut_slice(),
                scratch: memory.scratch.as_mut_slice(),
                rotary: bytemuck::cast_slice_mut(rotary.as_mut_slice()),
                coefficients: &mut coefficients,
                loss: &mut memory.loss,
            };
            let result = kernels.run(launch, &mut memory, order);
            result.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
        }
        Some(())
    }

    /// The outcome in memory.
    pub fn outcome(&self, mut memory: CaseMemory) -> Outcome {
        let beyond = &memory.scratch.as_mut_slice()[memory.scratch_bytes as usize..];
        assert!(
            beyond.iter().all(|byte| *byte == POISON),
            "a launch writes beyond its scratch memory"
        );
        let (arena, buffers) = (memory.arena.as_slice().to_vec(), self.stage.buffers.clone());
        Outcome { arena, buffers, loss: memory.loss[0] }
    }

    /// Asserts that nothing changed outside of the accesses that the launches declare, and of these bytes.
    pub fn assert_untouched(&self, launches: &[Launch], others: &[Range<u64>], after: &Outcome) {
        let after = &after.arena;
        let mut writable = vec![false; after.len()];
        for bytes in others {
            writable[bytes.start as usize..bytes.end as usize].fill(true);
        }
        let arguments = launches.iter().flat_map(Launch::all_arguments);
        for argument in arguments {
            let Argument::Pointer(span) = argument else { continue };
            if span.memory == MemorySpace::Arena && span.access != MemoryAccess::Read {
                for row in 0..span.rows {
                    let bytes = span.row_range(row);
                    writable[bytes.start as usize..bytes.end as usize].fill(true);
                }
            }
        }
        let changed = (0..after.len()).find(|at| !writable[*at] && after[*at] != self.arena[*at]);
        assert_eq!(changed, None, "a byte outside of the declared writes has changed");
    }
}

/// The launches of all steps of a ring.
pub fn ring_launches(ring: &RingAttention) -> Vec<Launch> {
    let steps = ring.steps.iter();
    steps
        .flat_map(|step| [&step.before, &step.beside, &step.after].into_iter().flatten())
        .cloned()
        .collect()
}

/// Calls `visit` with every instruction of a program on every device that executes it.
pub fn for_each_instruction(
    program: &Program,
    mut visit: impl FnMut(&LaunchContext, &ScheduledInstruction),
) {
    let Program { context, constants, .. } = program;
    for device in 0..context.mesh.devices() {
        let coordinates = MeshCoordinates::of_device(device, &context.mesh);
        let stage = &program.stages[coordinates.stage as usize];
        let weights = stage.buffers.iter().zip(0..);
        let weights = weights.filter(|(buffer, _)| buffer.role == BufferRole::Weight);
        let update_groups = weights.map(|(_, id)| (BufferId(id), UpdateGroup::Vector)).collect();
        let device = LaunchContext {
            context,
            constants,
            stage,
            coordinates,
            update_groups: &update_groups,
            multiprocessors: MULTIPROCESSORS,
        };
        scheduled_instructions(stage).for_each(|scheduled| visit(&device, &scheduled));
    }
}

fn bytes_of(buffer: &Buffer) -> std::ops::Range<usize> {
    let begin = buffer.offset as usize;
    begin..begin + buffer.extent.bytes().0 as usize
}

/// Bytes that are aligned as device memory is.
pub struct AlignedBytes {
    words: Vec<u128>,
    size: usize,
}

impl AlignedBytes {
    pub fn of(bytes: &[u8]) -> AlignedBytes {
        let mut aligned =
            AlignedBytes { words: vec![0; bytes.len().div_ceil(16)], size: bytes.len() };
        aligned.as_mut_slice().copy_from_slice(bytes);
        aligned
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.size]
    }

    pub fn as_slice(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.size]
    }
}

impl Outcome {
    /// Elements of a buffer.
    pub fn elements(&self, buffer: BufferId) -> Vec<f32> {
        let buffer = &self.buffers[buffer.0 as usize];
        decode(&self.arena[bytes_of(buffer)], buffer.extent.dtype)
    }
}
