//! Walks the passes of one stage and applies the transfer function of every instruction.

use crate::program::{Action, ChunkPhase, Instr, Phase};

use super::error::CheckResult;
use super::operands::InstrOperands;
use super::stage::{BufferContents, StageChecker};
use super::{attention, collective, fused, gemm, transfer};

impl<'a> StageChecker<'a> {
    /// Walks a pass. Unless it directly follows the previous pass of its microbatch through the same chunk, other passes
    /// run between them.
    pub fn walk(&mut self, at: ChunkPhase) {
        self.at = at;
        let is_forward = at.phase == Phase::Forward;
        self.graph.recompute_only = !is_forward;
        if is_forward || !self.stage.follows_at_once(at) {
            self.expire();
        }
        for (at, instr) in self.stage.instructions(at).iter().enumerate() {
            if self.errors.is_full() {
                return;
            }
            if let Err(fault) = self.instruction(at, instr) {
                self.report(at, instr, fault);
                for access in &instr.writes {
                    self.contents[access.buffer.0 as usize] = BufferContents::Unknown;
                }
            }
        }
    }

    fn instruction(&mut self, at: usize, instr: &'a Instr) -> CheckResult {
        if let Some(checked) = self.sharded_parameters(at, instr) {
            return checked;
        }
        let mut reads = Vec::with_capacity(instr.reads.len());
        for (port, access) in instr.reads.iter().enumerate() {
            match self.read(instr, port, access)? {
                Some(state) => reads.push(state),
                // After a reported error, the results are unknown too.
                None => {
                    for access in &instr.writes {
                        self.store(at, access.buffer, BufferContents::Unknown);
                    }
                    return Ok(());
                }
            }
        }
        let mut operands = InstrOperands { checker: self, instr, reads };
        let writes = match &instr.action {
            Action::Gemm(gemm) => gemm::transfer(&mut operands, gemm)?,
            Action::Attention(attention) => attention::transfer(&mut operands, attention)?,
            Action::Fused(op) => fused::transfer(&mut operands, *op)?,
            Action::Collective(collective) => collective::transfer(&mut operands, collective)?,
            Action::Send(transfer) => transfer::send(&mut operands, transfer)?,
            Action::Receive(transfer) => match transfer::receive(&mut operands, transfer)? {
                Some(writes) => writes,
                None => {
                    for access in &instr.writes {
                        self.store(at, access.buffer, BufferContents::Unknown);
                    }
                    return Ok(());
                }
            },
        };
        self.write_all(at, instr, writes)
    }
}
