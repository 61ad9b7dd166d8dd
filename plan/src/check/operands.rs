//! One instruction with the abstract states of its operands: the input of a transfer function.

use crate::program::{BufferRole, Instr};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{
    AbstractState, AbstractValue, OperandWrite, PendingSum, SymbolId, WriteTarget,
};
use super::stage::StageChecker;
use super::values::ForwardOpKind;

/// One instruction with the states of its operands.
pub(super) struct InstrOperands<'c, 'a> {
    pub check: &'c mut StageChecker<'a>,
    pub instr: &'a Instr,
    pub reads: Vec<AbstractState>,
}

impl InstrOperands<'_, '_> {
    pub fn devices(&self) -> u64 {
        self.check.context.tensor_size()
    }

    /// Checks the numbers of operands and results.
    pub fn check_arity(
        &self,
        reads: std::ops::RangeInclusive<usize>,
        writes: usize,
    ) -> CheckResult {
        let (operands, results) = (self.reads.len(), self.instr.writes.len());
        ensure(reads.contains(&operands) && writes == results, || {
            let expected = match (*reads.start(), *reads.end()) {
                (least, most) if least == most => least.to_string(),
                (least, usize::MAX) => format!("at least {least}"),
                (least, most) => format!("{least} to {most}"),
            };
            format!(
                "has {operands} operands and {results} results, but takes {expected} and {writes}"
            )
        })
    }

    /// The forward value that an operand is.
    pub fn value(&self, port: usize) -> CheckResult<SymbolId> {
        match self.reads[port].meaning {
            AbstractValue::Value(value) => Ok(value),
            other => fault(format!(
                "needs a forward value at operand {port}, but reads {}",
                self.check.values.describe(other)
            )),
        }
    }

    /// The results of an operation, named after the buffers they are written to.
    pub fn apply(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<SymbolId>,
    ) -> CheckResult<Vec<SymbolId>> {
        self.apply_to(kind, inputs, 0..self.instr.writes.len())
    }

    /// As [`apply`](Self::apply), for an operation whose results are only some of the writes.
    pub fn apply_to(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<SymbolId>,
        writes: std::ops::Range<usize>,
    ) -> CheckResult<Vec<SymbolId>> {
        let stage = self.check.stage;
        let written = self.instr.writes.get(writes).unwrap_or_default();
        let names: Vec<&str> =
            written.iter().map(|access| stage.buffer(access.buffer).name.as_str()).collect();
        self.check.values.apply(kind, inputs, &names)
    }

    /// Checks that no operand has a pending sum or maximum.
    pub fn all_summed(&self) -> CheckResult {
        (0..self.reads.len()).try_for_each(|port| self.summed(port))
    }

    /// Checks that an operand has no pending sum or maximum.
    pub fn summed(&self, port: usize) -> CheckResult {
        let state = &self.reads[port];
        ensure(state.tensor == PendingSum::Done, || {
            format!(
                "needs {} reduced, but each device has only a partial sum or maximum ({state})",
                self.operand_name(port)
            )
        })
    }

    /// Checks that no operand has a pending division by a norm.
    pub fn none_owes_norm(&self) -> CheckResult {
        match self.reads.iter().position(|state| state.norm.is_some()) {
            None => Ok(()),
            Some(port) => fault(format!(
                "reads {} before the division by its norm's root mean square",
                self.operand_name(port)
            )),
        }
    }

    pub fn operand_name(&self, port: usize) -> String {
        let buffer = self.instr.reads[port].buffer;
        format!("`{}`", self.check.stage.buffer(buffer).name)
    }

    /// Checks that two operands have the same layout.
    pub fn same_layout(&self, one: usize, two: usize) -> CheckResult {
        let (first, second) = (&self.reads[one], &self.reads[two]);
        ensure(first.lies_as(second), || {
            format!(
                "needs {} and {} in the same layout, but they are {first} and {second}",
                self.operand_name(one),
                self.operand_name(two)
            )
        })
    }

    /// A gradient contribution, accumulated onto an operand or alone.
    pub fn accumulated(
        &self,
        onto: Option<usize>,
        contribution: AbstractState,
    ) -> CheckResult<OperandWrite> {
        let Some(port) = onto else {
            return Ok(OperandWrite { state: contribution, target: WriteTarget::Fresh });
        };
        let sum = self.reads[port];
        if sum.meaning == AbstractValue::Zero {
            let parameter = self.check.stage.buffer(self.instr.reads[port].buffer).role
                == BufferRole::WeightGradient;
            let same_extent = sum.extent(self.devices()) == contribution.extent(self.devices());
            let same_sides =
                !parameter || (sum.rows, sum.columns) == (contribution.rows, contribution.columns);
            ensure(same_extent && same_sides, || format!("accumulates {contribution} onto {sum}"))?;
            return Ok(OperandWrite { state: contribution, target: WriteTarget::Over(port) });
        }
        ensure(sum.lies_as(&contribution), || {
            format!("accumulates {contribution} onto {}, which is {sum}", self.operand_name(port))
        })?;
        let meaning = self.check.values.sum(sum.meaning, contribution.meaning)?;
        Ok(OperandWrite { state: contribution.with(meaning), target: WriteTarget::Over(port) })
    }
}
