//! Checks of sections: tensors side by side in a buffer. A shard of the features is a shard of each
//! section, so all instructions that shard, pack or read a buffer must agree on the sections.

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

    /// Checks that a value and its gradient have the same sections in all buffers.
    pub fn record_sections(&mut self, id: BufferId, state: &AbstractState) -> CheckResult {
        let (AbstractValue::Value(of) | AbstractValue::Gradient { of, .. }) = state.value else {
            return Ok(());
        };
        let name = &self.stage.buffer(id).name;
        let sections = self.sections(id, state.columns.size);
        let total = sections.iter().try_fold(0_u64, |sum, width| sum.checked_add(*width));
        ensure(total == Some(state.columns.size), || {
            format!("writes {state} to `{name}`, which has sections {sections:?}")
        })?;
        let known = self.known_sections.entry(of).or_insert_with(|| sections.clone());
        ensure(*known == sections, || {
            format!(
                "writes a value with sections {known:?} to `{name}`, which has sections {sections:?}"
            )
        })
    }
}

impl InstrOperands<'_, '_> {
    /// The sections of an operand.
    pub fn operand_sections(&self, port: usize) -> Vec<u64> {
        self.checker.sections(self.instr.reads[port].buffer, self.reads[port].columns.size)
    }

    /// Checks the concatenated sections of several operands.
    pub fn check_sections(&self, ports: std::ops::Range<usize>, expected: &[u64]) -> CheckResult {
        let found: Vec<u64> = ports.flat_map(|port| self.operand_sections(port)).collect();
        ensure(found == expected, || {
            format!("expects operands with sections {expected:?}, but they have {found:?}")
        })
    }

    /// Checks that the result of a GEMM has a section for each weight of its buffer, and that each GEMM
    /// of a batch reads one section of the input.
    pub fn check_gemm_sections(&self, batch: u64) -> CheckResult {
        let weight = self.checker.stage.buffer(self.instr.reads[1].buffer);
        let Some(shard) = &weight.shard else { return Ok(()) };
        let expected: Vec<u64> = shard.members.iter().map(|member| member.columns).collect();
        if batch > 1 {
            let input_sections: Vec<u64> = shard.members.iter().map(|member| member.rows).collect();
            self.check_sections(0..1, &input_sections)?;
        }
        let columns = expected.iter().sum();
        let found = self.checker.sections(self.instr.writes[0].buffer, columns);
        ensure(found == expected, || {
            format!(
                "computes sections {expected:?}, but writes to a buffer with sections {found:?}"
            )
        })
    }

    /// Checks that the concatenated sections of the results are those of the operand.
    pub fn check_split_sections(&self, port: usize, widths: &[u64]) -> CheckResult {
        let results = self.instr.writes.iter().zip(widths);
        let sections: Vec<u64> = results
            .flat_map(|(access, width)| self.checker.sections(access.buffer, *width))
            .collect();
        self.check_sections(port..port + 1, &sections)
    }
}
