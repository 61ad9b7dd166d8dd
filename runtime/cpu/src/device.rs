//! One device during a step, and the operands of its instructions.

use std::collections::HashMap;
use std::ops::Range;

use narrows_plan::program::{Access, BufferId, ChunkPhase, Program, StageProgram};
use narrows_runtime::session::{MeshCoordinates, StepRequest, TokenRows};
use narrows_runtime::{
    DeviceReport, GemmDtype, RunError, ScheduledInstruction, TimeCategory, UpdateGroup,
    replica_operand_range,
};

use crate::abort::StopReason;
use crate::arena::{Arena, ArenaOperands, OPERANDS_MAX};
use crate::communication::CommunicationThread;
use crate::device_clock::DeviceClock;
use crate::device_links::DeviceLinks;
use crate::kernels::{GemmMode, Parallel, RopeTable};

/// One device during a step.
pub(crate) struct CpuDevice<'a> {
    pub coordinates: MeshCoordinates,
    pub program: &'a Program,
    pub stage: &'a StageProgram,
    pub arena: &'a mut Arena,
    /// Scratch memory of kernels, which grows to what they need.
    pub scratch: &'a mut Vec<f32>,
    pub report: &'a mut DeviceReport,
    pub clock: &'a mut DeviceClock,
    pub links: &'a DeviceLinks,
    /// The thread that executes collectives beside computation; `None` where the program allows none.
    pub communication: Option<&'a mut CommunicationThread>,
    /// `None` when the model has no attention heads.
    pub rope_table: Option<&'a RopeTable>,
    /// The group of a weight, by its buffer.
    pub update_groups: &'a HashMap<BufferId, UpdateGroup>,
    pub categories: &'a InstructionCategories,
    pub parallel: Parallel,
    /// Format to which the operands of GEMMs are rounded.
    pub gemm_dtype: GemmDtype,
    pub step: StepRequest<'a>,
    /// Contribution of this device to the mean loss over the step's tokens.
    pub loss: f64,
}

/// The place of a device in its program, and its links to others: what a collective needs besides memory.
#[derive(Clone, Copy)]
pub(crate) struct DeviceSite<'a> {
    pub coordinates: MeshCoordinates,
    pub program: &'a Program,
    pub stage: &'a StageProgram,
    pub links: &'a DeviceLinks,
}

impl DeviceSite<'_> {
    /// Elements of an operand in the arena. With ZeRO, a part of a parameter is that of this replica.
    pub fn operand_range(&self, scheduled: &ScheduledInstruction, access: &Access) -> Range<usize> {
        let replica = (&self.program.context, self.coordinates.replica);
        let bytes = replica_operand_range(self.stage, replica, (scheduled, access));
        let element = |byte: u64| usize::try_from(byte / 4).unwrap_or(usize::MAX);
        element(bytes.start)..element(bytes.end)
    }

    /// The error of an instruction that this backend cannot execute.
    pub fn unsupported(
        &self,
        scheduled: &ScheduledInstruction,
        reason: &'static str,
    ) -> StopReason {
        StopReason::Failed(Box::new(RunError::Unsupported {
            stage: self.coordinates.stage as usize,
            pass: scheduled.pass,
            origin: scheduled.instr.origin.to_string(),
            reason,
        }))
    }

    /// The error of an instruction whose operands the arena refuses.
    pub fn invalid_operands(&self, scheduled: &ScheduledInstruction) -> StopReason {
        self.unsupported(scheduled, "its operands overlap or are outside the arena")
    }
}

/// Time categories of the instructions of a stage, by phase of its chunks.
pub(crate) struct InstructionCategories(HashMap<ChunkPhase, Vec<TimeCategory>>);

impl InstructionCategories {
    pub fn new(stage: &StageProgram) -> InstructionCategories {
        let of_phase = |at: ChunkPhase| {
            (at, stage.instructions(at).iter().map(TimeCategory::of_instruction).collect())
        };
        InstructionCategories(stage.chunk_phases().map(of_phase).collect())
    }

    pub fn of(&self, at: ChunkPhase) -> &[TimeCategory] {
        self.0.get(&at).map_or(&[], Vec::as_slice)
    }
}

impl<'a> CpuDevice<'a> {
    /// The place of the device.
    pub fn site(&self) -> DeviceSite<'a> {
        let CpuDevice { coordinates, program, stage, links, .. } = *self;
        DeviceSite { coordinates, program, stage, links }
    }

    /// Threads and operand format of GEMMs.
    pub fn gemm_mode(&self) -> GemmMode {
        GemmMode { parallel: self.parallel, dtype: self.gemm_dtype }
    }

    /// The operands of an instruction.
    pub fn operands(
        &mut self,
        scheduled: &ScheduledInstruction,
    ) -> Result<ArenaOperands<'_>, StopReason> {
        self.operands_at(scheduled, |device, access| device.operand_range(scheduled, access))
    }

    /// The operands of an instruction, at the ranges of elements that `range` returns.
    pub fn operands_at(
        &mut self,
        scheduled: &ScheduledInstruction,
        range: impl Fn(&CpuDevice, &Access) -> Range<usize>,
    ) -> Result<ArenaOperands<'_>, StopReason> {
        let accesses = (&scheduled.instr.reads[..], &scheduled.instr.writes[..]);
        self.some_operands_at(scheduled, accesses, range)
    }

    /// Some operands of an instruction, read and written, at the ranges of elements that `range` returns.
    pub fn some_operands_at(
        &mut self,
        scheduled: &ScheduledInstruction,
        (read, written): (&[Access], &[Access]),
        range: impl Fn(&CpuDevice, &Access) -> Range<usize>,
    ) -> Result<ArenaOperands<'_>, StopReason> {
        let reads = OperandRanges::of(read, |access| range(self, access));
        let writes = OperandRanges::of(written, |access| range(self, access));
        // Checked before the call whose result is returned: the borrow checker does not accept an
        // error that uses `self` after a borrow which another path returns.
        if self.arena.operands(reads.as_slice(), writes.as_slice()).is_none() {
            return Err(self.site().invalid_operands(scheduled));
        }
        match self.arena.operands(reads.as_slice(), writes.as_slice()) {
            Some(operands) => Ok(operands),
            None => Err(StopReason::Aborted),
        }
    }

    /// As [`DeviceSite::operand_range`].
    pub fn operand_range(&self, scheduled: &ScheduledInstruction, access: &Access) -> Range<usize> {
        self.site().operand_range(scheduled, access)
    }

    /// Elements of the whole buffer of an operand.
    pub fn buffer_range(&self, scheduled: &ScheduledInstruction, access: &Access) -> Range<usize> {
        let extent = self.stage.buffer(access.buffer).extent;
        self.operand_range(scheduled, &Access { extent, ..*access })
    }

    /// As [`DeviceSite::unsupported`].
    pub fn unsupported(
        &self,
        scheduled: &ScheduledInstruction,
        reason: &'static str,
    ) -> StopReason {
        self.site().unsupported(scheduled, reason)
    }

    /// The tokens of a microbatch that a buffer of `rows` rows holds on this device.
    pub fn token_rows(&self, rows: u64) -> TokenRows {
        TokenRows::of_device(&self.program.context, &self.coordinates, rows)
    }
}

/// Ranges of the operands on one side of an instruction, without an allocation.
pub(crate) struct OperandRanges {
    ranges: [Range<usize>; OPERANDS_MAX],
    count: usize,
}

impl Default for OperandRanges {
    fn default() -> OperandRanges {
        OperandRanges { ranges: std::array::from_fn(|_| 0..0), count: 0 }
    }
}

impl OperandRanges {
    /// The ranges of some accesses.
    pub fn of(accesses: &[Access], range: impl Fn(&Access) -> Range<usize>) -> OperandRanges {
        let mut ranges = OperandRanges::default();
        accesses.iter().for_each(|access| ranges.push(range(access)));
        ranges
    }

    /// Adds a range. One too many makes the first invalid, so that the arena refuses all of them.
    fn push(&mut self, range: Range<usize>) {
        match self.ranges.get_mut(self.count) {
            Some(slot) => *slot = range,
            None => self.ranges[0] = usize::MAX..usize::MAX,
        }
        self.count = (self.count + 1).min(self.ranges.len());
    }

    pub fn as_slice(&self) -> &[Range<usize>] {
        &self.ranges[..self.count]
    }
}
