//! One instruction on one device: its operands in an arena, its launches run by the shim.
//!
//! Around every operand lies memory that is not a number, and must still be afterwards; operands
//! that are only written are not numbers either. Everything runs twice, with blocks and threads in
//! opposite orders, and must give the same bits.

use std::collections::HashMap;

use narrows_cuda::bounds::TouchedBytes;
use narrows_cuda::launch::COEFFICIENTS;
use narrows_cuda::{Argument, LaunchContext, Launches, MemorySpace, bounds, launch};
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::program::{
    Access, Action, Buffer, BufferId, Extent, FusedOp, Instr, ModelConstants, Phase, Program,
    Region, StageProgram,
};
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{Bytes, DType, Precision};
use narrows_runtime::{ScheduledInstruction, scheduled_instructions};

use super::numbers::{bf16_bits, of_bf16};
use super::shim::{self, Memories, Order};

/// Bytes around every operand.
const ROOM: u64 = 256;
/// What is not a number in any format.
const NOTHING: u8 = 0xff;

/// An instruction and what it works on.
pub struct Case {
    pub context: Context,
    pub constants: ModelConstants,
    pub tensor: u64,
    pub data: u64,
    pub phase: Phase,
    pub decays: HashMap<BufferId, bool>,
    pub stage: StageProgram,
    pub rotary: Vec<f32>,
    pub coefficients: [f32; COEFFICIENTS as usize],
    action: Action,
    reads: Vec<Access>,
    writes: Vec<Access>,
    arena: Vec<u8>,
}

/// The arena afterwards.
#[derive(PartialEq)]
pub struct Outcome {
    arena: Vec<u8>,
    buffers: Vec<Buffer>,
    /// The step's loss, which was 1 before.
    pub loss: f64,
}

impl Case {
    /// On one of `tensor` devices, of microbatches of `sequences` by `length` tokens.
    pub fn new(op: FusedOp, tensor: u64, tokens: (u64, u64)) -> Case {
        Case::of(Action::Fused(op), tensor, tokens)
    }

    /// The same for any instruction.
    pub fn of(action: Action, tensor: u64, (sequences, length): (u64, u64)) -> Case {
        let mesh = Mesh { tensor, pipeline: 1, data: 1 };
        let workload =
            Workload { global_batch: sequences, sequence_length: length, micro_batch: sequences };
        let context = Context { mesh, workload, precision: Precision::MixedBf16, zero: Zero::Off };
        let constants =
            ModelConstants { hidden: 1, vocab: 1, norm_epsilon: 1e-5, rope_theta: 10_000.0 };
        let stage = StageProgram {
            buffers: vec![],
            forward: vec![],
            backward: vec![],
            step: vec![],
            schedule: vec![],
            slots: 1,
            slot_stride: 0,
            arena: Bytes(0),
        };
        Case {
            context,
            constants,
            tensor: 0,
            data: 0,
            phase: Phase::Forward,
            decays: HashMap::new(),
            stage,
            rotary: vec![],
            coefficients: [f32::NAN; COEFFICIENTS as usize],
            action,
            reads: vec![],
            writes: vec![],
            arena: vec![],
        }
    }

    /// A buffer of so many rows and columns, with these numbers in it, or none.
    pub fn buffer(&mut self, shape: (u64, u64), dtype: DType, numbers: Option<&[f32]>) -> BufferId {
        let bytes: Option<Vec<u8>> = numbers.map(|numbers| match dtype {
            DType::Bf16 => numbers.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect(),
            _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        });
        self.place(shape, dtype, bytes)
    }

    /// A buffer of token ids, one a row.
    pub fn ids(&mut self, ids: &[u32]) -> BufferId {
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
        let offset = self.stage.arena.0 + ROOM;
        let end = (offset + extent.bytes().0 + ROOM).next_multiple_of(256);
        self.arena.resize(end as usize, NOTHING);
        if let Some(bytes) = bytes {
            assert_eq!(bytes.len(), size, "as many numbers as the buffer has");
            self.arena[offset as usize..][..size].copy_from_slice(&bytes);
        }
        self.stage.arena = Bytes(end);
        let id = BufferId(self.stage.buffers.len() as u32);
        self.stage.buffers.push(Buffer {
            name: format!("operand {}", id.0),
            extent,
            region: Region::Activation,
            offset,
            per_microbatch: false,
            shard: None,
            sections: vec![],
        });
        id
    }

    /// All of a buffer.
    pub fn whole(&self, buffer: BufferId) -> Access {
        Access { buffer, extent: self.stage.buffer(buffer).extent }
    }

    /// What the instruction reads, each a whole buffer.
    pub fn reads(&mut self, buffers: &[BufferId]) -> &mut Case {
        self.reads = buffers.iter().map(|buffer| self.whole(*buffer)).collect();
        self
    }

    /// What it writes.
    pub fn writes(&mut self, buffers: &[BufferId]) -> &mut Case {
        self.writes = buffers.iter().map(|buffer| self.whole(*buffer)).collect();
        self
    }

    /// The same with extents of their own.
    pub fn accesses(&mut self, reads: Vec<Access>, writes: Vec<Access>) -> &mut Case {
        (self.reads, self.writes) = (reads, writes);
        self
    }

    fn instr(&self) -> Instr {
        Instr {
            action: self.action.clone(),
            reads: self.reads.clone(),
            writes: self.writes.clone(),
            origin: "a test".into(),
        }
    }

    /// Calls `work` with the instruction on its device.
    fn on_device<R>(&self, work: impl FnOnce(&LaunchContext, &ScheduledInstruction) -> R) -> R {
        let instr = self.instr();
        let moment =
            ScheduledInstruction { instr: &instr, phase: self.phase, microbatch: 0, slot: 0 };
        let device = LaunchContext {
            context: &self.context,
            constants: &self.constants,
            stage: &self.stage,
            tensor: self.tensor,
            data: self.data,
            decays: &self.decays,
        };
        work(&device, &moment)
    }

    /// What launches of this instruction touch.
    pub fn check(&self, launches: &Launches) -> Result<TouchedBytes, String> {
        let check = |device: &LaunchContext, moment: &ScheduledInstruction| {
            bounds::check(device, moment, launches)
        };
        self.on_device(check).map_err(|error| error.to_string())
    }

    /// The launches, which are within bounds.
    pub fn launches(&self) -> Result<Launches, String> {
        let made = self.on_device(launch::pass).map_err(|error| error.to_string())?;
        self.check(&made).unwrap_or_else(|error| panic!("{error}"));
        Ok(made)
    }

    /// The arena after the instruction; `None` where no compiler makes kernels for processors.
    #[track_caller]
    pub fn run(&self) -> Option<Outcome> {
        let launches = self.launches().unwrap_or_else(|error| panic!("{error}"));
        let ascending = self.execute(&launches, Order::Ascending)?;
        let descending = self.execute(&launches, Order::Descending)?;
        for buffer in &self.stage.buffers {
            let bytes = bytes_of(buffer);
            let same = ascending.arena[bytes.clone()] == descending.arena[bytes];
            assert!(same, "{} depends on the order of threads", buffer.name);
        }
        assert!(ascending == descending);
        self.assert_untouched(&launches, &ascending.arena);
        Some(ascending)
    }

    fn execute(&self, launches: &Launches, order: Order) -> Option<Outcome> {
        let mut arena = Aligned::of(&self.arena);
        let mut scratch = Aligned::of(&vec![NOTHING; (launches.scratch_bytes + ROOM) as usize]);
        let mut rotary = Aligned::of(bytemuck::cast_slice(&self.rotary));
        let mut coefficients = self.coefficients;
        let mut loss = [1.0];
        for launch in &launches.launches {
            let kernels = shim::kernels(launch.family)?;
            let mut memory = Memories {
                arena: arena.bytes(),
                scratch: scratch.bytes(),
                rotary: bytemuck::cast_slice_mut(rotary.bytes()),
                coefficients: &mut coefficients,
                loss: &mut loss,
            };
            let done = kernels.run(launch, &mut memory, order);
            done.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
        }
        let beyond = &scratch.bytes()[launches.scratch_bytes as usize..];
        assert!(beyond.iter().all(|byte| *byte == NOTHING), "more scratch memory is written");
        let (arena, buffers) = (arena.bytes().to_vec(), self.stage.buffers.clone());
        Some(Outcome { arena, buffers, loss: loss[0] })
    }

    /// That nothing changed but what the launches say they write.
    fn assert_untouched(&self, launches: &Launches, after: &[u8]) {
        let mut may = vec![false; after.len()];
        let arguments = launches.launches.iter().flat_map(|launch| &launch.arguments);
        for argument in arguments {
            let Argument::Memory(span) = argument else { continue };
            if span.memory == MemorySpace::Arena && span.touch != launch::MemoryAccess::Read {
                for row in 0..span.rows {
                    let bytes = span.row(row);
                    may[bytes.start as usize..bytes.end as usize].fill(true);
                }
            }
        }
        let changed = (0..after.len()).find(|at| !may[*at] && after[*at] != self.arena[*at]);
        assert_eq!(changed, None, "a byte outside of what is written has changed");
    }
}

/// Calls `visit` with every instruction of a program on every device that executes it.
pub fn each_moment(
    program: &Program,
    mut visit: impl FnMut(&LaunchContext, &ScheduledInstruction),
) {
    let Program { context, constants, .. } = program;
    let decays = HashMap::new();
    for stage in &program.stages {
        for at in 0..context.tensor_size() * context.mesh.data {
            let (tensor, data) = (at % context.tensor_size(), at / context.tensor_size());
            let device = LaunchContext { context, constants, stage, tensor, data, decays: &decays };
            scheduled_instructions(stage).for_each(|moment| visit(&device, &moment));
        }
    }
}

fn bytes_of(buffer: &Buffer) -> std::ops::Range<usize> {
    let begin = buffer.offset as usize;
    begin..begin + buffer.extent.bytes().0 as usize
}

/// Memory that begins where device memory does.
pub struct Aligned {
    held: Vec<u128>,
    size: usize,
}

impl Aligned {
    pub fn of(bytes: &[u8]) -> Aligned {
        let mut aligned = Aligned { held: vec![0; bytes.len().div_ceil(16)], size: bytes.len() };
        aligned.bytes().copy_from_slice(bytes);
        aligned
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.held)[..self.size]
    }

    pub fn held(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.held)[..self.size]
    }
}

impl Outcome {
    /// The numbers of a buffer.
    pub fn numbers(&self, buffer: BufferId) -> Vec<f32> {
        let buffer = &self.buffers[buffer.0 as usize];
        let bytes = &self.arena[bytes_of(buffer)];
        match buffer.extent.dtype {
            DType::Bf16 => {
                bytes.chunks_exact(2).map(|b| of_bf16(u16::from_le_bytes([b[0], b[1]]))).collect()
            }
            _ => {
                let four = bytes.chunks_exact(4);
                four.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
        }
    }
}
