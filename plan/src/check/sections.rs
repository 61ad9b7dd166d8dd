//! Sections: tensors side by side in a buffer. A shard of the features is a shard of each section, so
//! all instructions that shard, pack or read a buffer must agree on the sections.

use crate::program::BufferId;

use super::error::{CheckResult, ensure};
use super::lattice::{AbstractState, AbstractValue};
use super::operands::InstrOperands;
use super::stage::StageChecker;

impl StageChecker<'_> {
    /// Widths of the sections of a buffer whose rows have `columns` columns.
    pub fn sections(&self, id: BufferId, columns: u64) -> Vec<u64> {
        match &self.stage.buffer(id).sections[..] {
            [] => vec![columns],
            sections => sections.to_vec(),
        }
    }

    /// Checks that a value and its gradient have the same sections wherever they are written.
    pub fn keep_sections(&mut self, id: BufferId, state: &AbstractState) -> CheckResult {
        let (AbstractValue::Value(of) | AbstractValue::Gradient { of, .. }) = state.meaning else {
            return Ok(());
        };
        let name = &self.stage.buffer(id).name;
        let found = self.sections(id, state.columns.size);
        let total = found.iter().try_fold(0_u64, |sum, width| sum.checked_add(*width));
        ensure(total == Some(state.columns.size), || {
            format!("writes {state} to `{name}`, which has sections {found:?}")
        })?;
        let known = self.known_sections.entry(of).or_insert_with(|| found.clone());
        ensure(*known == found, || {
            format!(
                "writes a value with sections {known:?} to `{name}`, which has sections {found:?}"
            )
        })
    }
}

impl InstrOperands<'_, '_> {
    /// The sections of an operand.
    pub fn operand_sections(&self, port: usize) -> Vec<u64> {
        self.check.sections(self.instr.reads[port].buffer, self.reads[port].columns.size)
    }

    /// Checks the sections of several operands, one after the other.
    pub fn operands_are(&self, ports: std::ops::Range<usize>, wanted: &[u64]) -> CheckResult {
        let found: Vec<u64> = ports.flat_map(|port| self.operand_sections(port)).collect();
        ensure(found == wanted, || {
            format!("expects operands with sections {wanted:?}, but they have {found:?}")
        })
    }

    /// Checks that the result of a GEMM has a section for each weight of its buffer, and that each GEMM
    /// of a batch reads one section of the input.
    pub fn gemm_sections(&self, batch: u64) -> CheckResult {
        let weight = self.check.stage.buffer(self.instr.reads[1].buffer);
        let Some(shard) = &weight.shard else { return Ok(()) };
        let wanted: Vec<u64> = shard.members.iter().map(|member| member.columns).collect();
        if batch > 1 {
            let each: Vec<u64> = shard.members.iter().map(|member| member.rows).collect();
            self.operands_are(0..1, &each)?;
        }
        let columns = wanted.iter().sum();
        let found = self.check.sections(self.instr.writes[0].buffer, columns);
        ensure(found == wanted, || {
            format!("computes sections {wanted:?}, but writes to a buffer with sections {found:?}")
        })
    }

    /// Checks that the sections of the results, one after the other, are those of the operand.
    pub fn split_sections(&self, port: usize, widths: &[u64]) -> CheckResult {
        let results = self.instr.writes.iter().zip(widths);
        let made: Vec<u64> = results
            .flat_map(|(access, width)| self.check.sections(access.buffer, *width))
            .collect();
        self.operands_are(port..port + 1, &made)
    }
}
