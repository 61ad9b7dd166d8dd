//! An instruction on a device, and the launches it becomes.

use std::collections::HashMap;

use narrows_plan::Context;
use narrows_plan::program::{Access, BufferId, FusedOp, ModelConstants, StageProgram};
use narrows_runtime::session::{MeshCoordinates, TokenRows};
use narrows_runtime::{ScheduledInstruction, UpdateGroup, replica_operand_range};

use super::operand::{Argument, LaunchResult, MatrixOperand, MemorySpace};
use crate::kernel_source::KernelFamily;

/// Context of launches: the device and its program.
#[derive(Clone, Copy, Debug)]
pub struct LaunchContext<'a> {
    /// Mesh, workload and formats.
    pub context: &'a Context,
    /// Sizes and constants of the model.
    pub constants: &'a ModelConstants,
    /// The program of the device's pipeline stage.
    pub stage: &'a StageProgram,
    /// Position of the device on the mesh.
    pub coordinates: MeshCoordinates,
    /// The group of a weight, by weight buffer of the stage.
    pub update_groups: &'a HashMap<BufferId, UpdateGroup>,
    /// Streaming multiprocessors of the GPU of process 0, on which the order of sums depends.
    pub multiprocessors: u32,
}

/// One launch of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The family that the kernel belongs to.
    pub family: KernelFamily,
    /// Name of the kernel.
    pub kernel: String,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes. Above 48 KiB a kernel needs an attribute set first.
    pub shared_bytes: u32,
    /// Arguments in the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
    /// Words of 8 bytes of the structure that is the kernel's last parameter, each with an argument in its low bytes. Empty
    /// where the kernel has no such parameter.
    pub table: Vec<Argument>,
}

/// The launches that execute one instruction on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launches {
    /// Launches in their order on one stream.
    pub launches: Vec<Launch>,
    /// Size of the scratch memory that they share, in bytes. It carries nothing between instructions.
    pub scratch_bytes: u64,
}

/// An instruction on a device.
#[derive(Clone, Copy)]
pub(super) struct InstrSite<'a, Op = FusedOp> {
    pub device: &'a LaunchContext<'a>,
    pub scheduled: &'a ScheduledInstruction<'a>,
    pub op: Op,
}

impl<Op> InstrSite<'_, Op> {
    /// The read operand of a port.
    pub fn input(&self, port: usize) -> LaunchResult<MatrixOperand> {
        let reads = &self.scheduled.instr.reads;
        let access = reads.get(port).ok_or_else(|| format!("it reads {} operands", reads.len()))?;
        Ok(self.operand(access))
    }

    /// The written operand of a port.
    pub fn output(&self, port: usize) -> LaunchResult<MatrixOperand> {
        let writes = &self.scheduled.instr.writes;
        let access =
            writes.get(port).ok_or_else(|| format!("it writes {} operands", writes.len()))?;
        Ok(self.operand(access))
    }

    /// An operand in this device's arena. Of a parameter that this replica updates in part, the operand is that
    /// part.
    pub fn operand(&self, access: &Access) -> MatrixOperand {
        let InstrSite { device, scheduled, .. } = self;
        let replica = (device.context, device.coordinates.replica);
        let begin = replica_operand_range(device.stage, replica, (scheduled, access)).start;
        let shape = (access.extent.rows, access.extent.columns);
        MatrixOperand::contiguous(MemorySpace::Arena, begin, shape, access.extent.dtype)
    }

    /// The tokens of an operand with this many rows.
    pub fn token_rows(&self, rows: u64) -> TokenRows {
        TokenRows::of_device(self.device.context, &self.device.coordinates, rows)
    }
}

impl Launch {
    /// A launch of one block of one thread, to be enlarged by the other constructors.
    pub(super) fn new(
        family: KernelFamily,
        kernel: impl Into<String>,
        arguments: Vec<Argument>,
    ) -> Launch {
        let one = [1, 1, 1];
        let table = vec![];
        let kernel = kernel.into();
        Launch { family, kernel, grid: one, block: one, shared_bytes: 0, arguments, table }
    }

    /// The arguments, those in the table included.
    pub fn all_arguments(&self) -> impl Iterator<Item = &Argument> {
        self.arguments.iter().chain(&self.table)
    }

    pub(super) fn table(mut self, words: Vec<Argument>) -> Launch {
        self.table = words;
        self
    }

    pub(super) fn grid(mut self, grid: [u32; 3]) -> Launch {
        self.grid = grid;
        self
    }

    pub(super) fn block(mut self, block: [u32; 3]) -> Launch {
        self.block = block;
        self
    }

    pub(super) fn shared(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }
}

impl From<Launch> for Launches {
    fn from(launch: Launch) -> Launches {
        Launches { launches: vec![launch], scratch_bytes: 0 }
    }
}
