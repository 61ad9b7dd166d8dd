//! One device: its memory, its links to the others of its groups, and its way through a step.

use std::collections::HashMap;
use std::ops::Range;

use narrows_plan::program::{
    Access, Action, BufferId, Instr, ModelConstants, P2pTransfer, Phase, StageProgram,
};
use narrows_plan::strategy::Context;

use super::arena::{Arena, ArenaOperands};
use super::barrier::Aborted;
use super::clock::DeviceClock;
use super::execute;
use super::links::DeviceLinks;
use crate::kernels::{Parallel, RopeTable};
use narrows_runtime::session::{MeshCoordinates, StepRequest, TokenRows};
use narrows_runtime::{
    DeviceReport, RunError, TimeCategory, microbatch_slot, replica_operand_range,
};

/// One device.
pub struct CpuDevice<'a> {
    pub at: MeshCoordinates,
    pub context: Context,
    pub constants: ModelConstants,
    pub tied: bool,
    pub stage: &'a StageProgram,
    pub arena: &'a mut Arena,
    pub scratch: &'a mut Vec<f32>,
    pub rotary: Option<&'a RopeTable>,
    /// Whether weight decay applies, by the buffer of the weight.
    pub decays: &'a HashMap<BufferId, bool>,
    pub links: &'a DeviceLinks,
    /// What the time of each instruction counts as.
    pub parts: &'a StageCategories,
    pub clock: &'a mut DeviceClock,
    pub parallel: Parallel,
    pub step: StepRequest<'a>,
    pub report: &'a mut DeviceReport,
    /// The mean loss over the step's tokens, as far as this device has seen it.
    pub loss: f64,
}

/// What the time of a stage's instructions counts as: forward, backward and step.
pub struct StageCategories([Vec<TimeCategory>; 3]);

impl StageCategories {
    pub fn new(stage: &StageProgram) -> StageCategories {
        let phases = [Phase::Forward, Phase::Backward, Phase::Step];
        StageCategories(phases.map(|phase| {
            stage.instructions(phase).iter().map(TimeCategory::of_instruction).collect()
        }))
    }

    fn phase(&self, phase: Phase) -> &[TimeCategory] {
        match phase {
            Phase::Forward => &self.0[0],
            Phase::Backward => &self.0[1],
            Phase::Step => &self.0[2],
        }
    }
}

/// Why a device stopped.
pub enum Stop {
    /// Another device failed first.
    Aborted,
    /// This one did.
    Failed(Box<RunError>),
}

impl From<Aborted> for Stop {
    fn from(_: Aborted) -> Stop {
        Stop::Aborted
    }
}

/// An instruction with the ranges of its operands, ready to run.
pub struct ResolvedInstr<'i> {
    pub instr: &'i Instr,
    pub phase: Phase,
    pub microbatch: u64,
    slot: u64,
}

impl<'a> CpuDevice<'a> {
    /// Executes the whole step.
    pub fn run(&mut self) -> Result<(), Stop> {
        let stage = self.stage;
        for turn in &stage.schedule {
            self.load_tokens(turn.microbatch);
            self.clock.read(TimeCategory::Other);
            self.pass(turn.phase, turn.microbatch, microbatch_slot(stage, turn.microbatch))?;
        }
        self.pass(Phase::Step, 0, 0)
    }

    fn pass(&mut self, phase: Phase, microbatch: u64, slot: u64) -> Result<(), Stop> {
        let (stage, parts) = (self.stage, self.parts);
        for (instr, part) in stage.instructions(phase).iter().zip(parts.phase(phase)) {
            let begun = self.clock.last();
            self.execute(&ResolvedInstr { instr, phase, microbatch, slot })?;
            self.clock.end_instruction(*part, begun);
        }
        Ok(())
    }

    fn execute(&mut self, ready: &ResolvedInstr) -> Result<(), Stop> {
        let instr = ready.instr;
        match &instr.action {
            Action::Gemm(product) => execute::product::run(self, ready, product)?,
            Action::Attention(attention) => execute::attention::run(self, ready, attention)?,
            Action::Fused(pass) => execute::pass::run(self, ready, *pass)?,
            Action::Collective(exchange) => execute::collective::run(self, ready, exchange)?,
            Action::Send(hop) => self.send(ready, hop)?,
            Action::Receive(hop) => self.receive(ready, hop)?,
        }
        self.report.count_instruction(instr.action.name());
        Ok(())
    }

    fn send(&mut self, ready: &ResolvedInstr, hop: &P2pTransfer) -> Result<(), Stop> {
        let to = u64::from(hop.peer_stage);
        let Some(way) = self.links.way(&self.at, self.at.stage, to) else {
            return Err(self.unfit(ready, "names a stage that is no neighbour"));
        };
        let ranges = || ready.instr.reads.iter().map(|access| self.range(ready, access));
        let sent: u64 = ranges().map(|range| 4 * range.len() as u64).sum();
        self.links.send(way, ranges().map(|range| self.arena.slice(range)))?;
        self.report.sent.0 += sent;
        Ok(())
    }

    fn receive(&mut self, ready: &ResolvedInstr, hop: &P2pTransfer) -> Result<(), Stop> {
        let from = u64::from(hop.peer_stage);
        let links = self.links;
        let Some(way) = links.way(&self.at, from, self.at.stage) else {
            return Err(self.unfit(ready, "names a stage that is no neighbour"));
        };
        let mut fits = true;
        links.receive(way, |numbers| {
            self.clock.read(TimeCategory::Bubble);
            let mut rest = numbers;
            for access in &ready.instr.writes {
                let range = self.range(ready, access);
                let Some((mine, others)) = rest.split_at_checked(range.len()) else {
                    fits = false;
                    return;
                };
                self.report.received.0 += 4 * range.len() as u64;
                self.arena.slice_mut(range).copy_from_slice(mine);
                rest = others;
            }
            fits &= rest.is_empty();
        })?;
        if fits { Ok(()) } else { Err(self.unfit(ready, "receives another number of bytes")) }
    }

    /// The operands of an instruction.
    pub fn operands(&mut self, ready: &ResolvedInstr) -> Result<ArenaOperands<'_>, Stop> {
        self.operands_as(ready, |device, access| device.range(ready, access))
    }

    /// The same with other ranges than those the instruction names.
    pub fn operands_as(
        &mut self,
        ready: &ResolvedInstr,
        range: impl Fn(&CpuDevice, &Access) -> Range<usize>,
    ) -> Result<ArenaOperands<'_>, Stop> {
        let (mut reads, mut writes) = (OperandRanges::default(), OperandRanges::default());
        ready.instr.reads.iter().for_each(|access| reads.push(range(self, access)));
        ready.instr.writes.iter().for_each(|access| writes.push(range(self, access)));
        if self.arena.operands(reads.list(), writes.list()).is_none() {
            return Err(self.unfit(ready, "works on operands that overlap or lie outside"));
        }
        // Asked twice, because a borrow that may be returned cannot also be given up.
        match self.arena.operands(reads.list(), writes.list()) {
            Some(operands) => Ok(operands),
            None => Err(Stop::Aborted),
        }
    }

    /// The numbers of an operand, from the beginning of the arena. Parameters of which this
    /// replica updates a part are seen as that part.
    pub fn range(&self, ready: &ResolvedInstr, access: &Access) -> Range<usize> {
        let seen = (access, ready.phase, ready.slot);
        let bytes = replica_operand_range(self.stage, (&self.context, self.at.data), seen);
        let number = |byte: u64| usize::try_from(byte / 4).unwrap_or(usize::MAX);
        number(bytes.start)..number(bytes.end)
    }

    /// The whole buffer of an operand.
    pub fn whole(&self, ready: &ResolvedInstr, access: &Access) -> Range<usize> {
        let extent = self.stage.buffer(access.buffer).extent;
        self.range(ready, &Access { extent, ..*access })
    }

    /// An instruction that this backend cannot execute.
    pub fn unfit(&self, ready: &ResolvedInstr, why: &'static str) -> Stop {
        Stop::Failed(Box::new(RunError::Unsupported {
            stage: self.at.stage as usize,
            phase: ready.phase,
            microbatch: ready.microbatch,
            origin: ready.instr.origin.clone(),
            reason: why,
        }))
    }

    /// Which tokens of each microbatch `rows` rows of this device are.
    pub fn tokens(&self, rows: u64) -> TokenRows {
        TokenRows::of_device(&self.context, &self.at, rows)
    }

    /// Token ids and targets of this device's rows of a microbatch.
    fn load_tokens(&mut self, microbatch: u64) {
        for buffer in &self.stage.buffers {
            let Some(ids) = self.step.input_ids(buffer) else { continue };
            let tokens = self.tokens(buffer.extent.rows);
            let begin = (buffer.offset / 4) as usize;
            let target = self.arena.slice_mut(begin..begin + buffer.extent.rows as usize);
            let rows = bytemuck::cast_slice_mut(target).chunks_exact_mut(tokens.positions);
            for (row, mine) in rows.zip(tokens.id_ranges(&self.context, &self.at, microbatch)) {
                row.copy_from_slice(&ids[mine]);
            }
        }
    }
}

/// A few ranges, without an allocation.
struct OperandRanges {
    held: [Range<usize>; super::arena::OPERANDS_MAX],
    count: usize,
}

impl Default for OperandRanges {
    fn default() -> OperandRanges {
        OperandRanges { held: std::array::from_fn(|_| 0..0), count: 0 }
    }
}

impl OperandRanges {
    /// One too many makes the arena refuse them all.
    fn push(&mut self, range: Range<usize>) {
        match self.held.get_mut(self.count) {
            Some(held) => *held = range,
            None => self.held[0] = usize::MAX..usize::MAX,
        }
        self.count = (self.count + 1).min(self.held.len());
    }

    fn list(&self) -> &[Range<usize>] {
        &self.held[..self.count]
    }
}
