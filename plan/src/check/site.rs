//! One instruction: what its operands hold, and what its transfer function may say of its results.

use crate::program::{BufferRole, Instr};

use super::error::{CheckResult, ensure, fault};
use super::lattice::{AbstractState, AbstractValue, PendingSum};
use super::stage::StageChecker;
use super::values::{ForwardOpKind, SymbolId};

/// A result, and which operand it takes the place of.
pub(super) struct OperandWrite {
    pub state: AbstractState,
    pub place: WriteTarget,
}

/// Where a result may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteTarget {
    /// To a buffer that the instruction does not read.
    Fresh,
    /// In place of the operand with this number.
    Over(usize),
    /// Either.
    Either(usize),
}

/// One instruction with what its operands hold.
pub(super) struct InstrOperands<'c, 'a> {
    pub check: &'c mut StageChecker<'a>,
    pub instr: &'a Instr,
    pub reads: Vec<AbstractState>,
}

impl InstrOperands<'_, '_> {
    pub fn devices(&self) -> u64 {
        self.check.context.tensor_size()
    }

    /// Exactly so many operands, or with the optional one more.
    pub fn operands(&self, reads: std::ops::RangeInclusive<usize>, writes: usize) -> CheckResult {
        let found = (self.reads.len(), self.instr.writes.len());
        ensure(reads.contains(&found.0) && writes == found.1, || {
            format!(
                "has {} operands and {} results, not {} to {} and {writes}",
                found.0,
                found.1,
                reads.start(),
                reads.end()
            )
        })
    }

    /// The value an operand holds.
    pub fn value(&self, port: usize) -> CheckResult<SymbolId> {
        match self.reads[port].meaning {
            AbstractValue::Value(value) => Ok(value),
            other => fault(format!(
                "wants a value at operand {port} but reads {}",
                self.check.values.describe(other)
            )),
        }
    }

    /// The results of an operation, named after the buffers written.
    pub fn apply(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<SymbolId>,
    ) -> CheckResult<Vec<SymbolId>> {
        self.apply_to(kind, inputs, 0..self.instr.writes.len())
    }

    /// The same when only some of what is written are results of this operation.
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

    /// Operands must be whole sums; what cannot wait for a sum says so here.
    pub fn all_summed(&self) -> CheckResult {
        (0..self.reads.len()).try_for_each(|port| self.summed(port))
    }

    /// This operand must be whole.
    pub fn summed(&self, port: usize) -> CheckResult {
        let state = &self.reads[port];
        ensure(state.tensor == PendingSum::Done, || {
            format!(
                "needs {} whole, but each device holds only its own part of a sum or maximum \
                 ({state})",
                self.operand_name(port)
            )
        })
    }

    /// The statistic of a norm may be owed only where it can wait.
    pub fn none_owes_norm(&self) -> CheckResult {
        match self.reads.iter().position(|state| state.norm.is_some()) {
            None => Ok(()),
            Some(port) => fault(format!(
                "reads {}, which a norm has still to be divided out of",
                self.operand_name(port)
            )),
        }
    }

    pub fn operand_name(&self, port: usize) -> String {
        let buffer = self.instr.reads[port].buffer;
        format!("`{}`", self.check.stage.buffer(buffer).name)
    }

    /// Two operands lie the same way.
    pub fn same_layout(&self, one: usize, two: usize) -> CheckResult {
        let (first, second) = (&self.reads[one], &self.reads[two]);
        ensure(first.lies_as(second), || {
            format!(
                "needs {} and {} laid out alike, but they are {first} and {second}",
                self.operand_name(one),
                self.operand_name(two)
            )
        })
    }

    /// A contribution on top of what an operand holds, or alone.
    pub fn accumulated(
        &self,
        onto: Option<usize>,
        made: AbstractState,
    ) -> CheckResult<OperandWrite> {
        let Some(port) = onto else {
            return Ok(OperandWrite { state: made, place: WriteTarget::Fresh });
        };
        let held = self.reads[port];
        if held.meaning == AbstractValue::Zero {
            let parameter = self.check.stage.buffer(self.instr.reads[port].buffer).role
                == BufferRole::WeightGradient;
            let fits = held.extent(self.devices()) == made.extent(self.devices());
            let alike = !parameter || (held.rows, held.columns) == (made.rows, made.columns);
            ensure(fits && alike, || format!("adds {made} to {held}"))?;
            return Ok(OperandWrite { state: made, place: WriteTarget::Over(port) });
        }
        ensure(held.lies_as(&made), || {
            format!("adds {made} to {}, which is {held}", self.operand_name(port))
        })?;
        let meaning = self.check.values.sum(held.meaning, made.meaning)?;
        Ok(OperandWrite { state: made.with(meaning), place: WriteTarget::Over(port) })
    }
}
