//! The input of a transfer function: an instruction with the abstract states of its operands.

use crate::program::Instr;

use super::error::{CheckResult, ensure, fault};
use super::lattice::{
    AbstractState, AbstractValue, ForwardValueId, OperandWrite, PendingReduction, WriteTarget,
};
use super::stage::StageChecker;
use super::values::ForwardOpKind;

/// An instruction with the states of its operands.
pub(super) struct InstrOperands<'c, 'a> {
    pub checker: &'c mut StageChecker<'a>,
    pub instr: &'a Instr,
    pub reads: Vec<AbstractState>,
}

impl InstrOperands<'_, '_> {
    pub fn devices(&self) -> u64 {
        self.checker.context.tensor_size()
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
                (min, max) if min == max => min.to_string(),
                (min, usize::MAX) => format!("at least {min}"),
                (min, max) => format!("{min} to {max}"),
            };
            format!(
                "has {operands} operands and {results} results, but takes {expected} and {writes}"
            )
        })
    }

    /// The forward value of an operand; an error for gradients and zeros.
    pub fn value(&self, port: usize) -> CheckResult<ForwardValueId> {
        match self.reads[port].value {
            AbstractValue::Value(value) => Ok(value),
            other => fault(format!(
                "needs a forward value at operand {port}, but reads {}",
                self.checker.graph.describe(other)
            )),
        }
    }

    /// The outputs of an operation, named after the buffers that they are written to.
    pub fn apply(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<ForwardValueId>,
    ) -> CheckResult<Vec<ForwardValueId>> {
        self.apply_to(kind, inputs, 0..self.instr.writes.len())
    }

    /// As [`apply`](Self::apply), for an operation whose outputs are only some of the writes.
    pub fn apply_to(
        &mut self,
        kind: ForwardOpKind,
        inputs: Vec<ForwardValueId>,
        writes: std::ops::Range<usize>,
    ) -> CheckResult<Vec<ForwardValueId>> {
        let stage = self.checker.stage;
        let written = self.instr.writes.get(writes).unwrap_or_default();
        let names: Vec<&str> =
            written.iter().map(|access| stage.buffer(access.buffer).name.as_str()).collect();
        self.checker.graph.apply(kind, inputs, &names)
    }

    /// Checks that no operand has a pending reduction.
    pub fn check_all_reduced(&self) -> CheckResult {
        (0..self.reads.len()).try_for_each(|port| self.check_reduced(port))
    }

    /// Checks that an operand has no pending reduction.
    pub fn check_reduced(&self, port: usize) -> CheckResult {
        let state = &self.reads[port];
        ensure(state.pending == PendingReduction::None, || {
            format!(
                "needs {} reduced, but each device has only a partial sum or maximum ({state})",
                self.operand_name(port)
            )
        })
    }

    /// Checks that no operand has a pending division by a norm.
    pub fn check_no_pending_norm(&self) -> CheckResult {
        match self.reads.iter().position(|state| state.pending_norm.is_some()) {
            None => Ok(()),
            Some(port) => fault(format!(
                "reads {} before the division by its norm's root mean square",
                self.operand_name(port)
            )),
        }
    }

    pub fn operand_name(&self, port: usize) -> String {
        let buffer = self.instr.reads[port].buffer;
        format!("`{}`", self.checker.stage.buffer(buffer).name)
    }

    /// Checks that two operands have the same layout.
    pub fn check_same_layout(&self, one: usize, two: usize) -> CheckResult {
        let (first, second) = (&self.reads[one], &self.reads[two]);
        ensure(first.same_layout(second), || {
            format!(
                "needs {} and {} in the same layout, but they are {first} and {second}",
                self.operand_name(one),
                self.operand_name(two)
            )
        })
    }

    /// The write of a gradient contribution, added to operand `onto` where there is one.
    pub fn accumulate(
        &self,
        onto: Option<usize>,
        contribution: AbstractState,
    ) -> CheckResult<OperandWrite> {
        let Some(port) = onto else {
            return Ok(OperandWrite { state: contribution, target: WriteTarget::Fresh });
        };
        let sum = self.reads[port];
        if sum.value == AbstractValue::Zero {
            let summed = self.checker.stage.buffer(self.instr.reads[port].buffer);
            let parameter = summed.role.is_gradient();
            let same_extent =
                sum.extent(self.checker.context) == contribution.extent(self.checker.context);
            let same_sides =
                !parameter || (sum.rows, sum.columns) == (contribution.rows, contribution.columns);
            ensure(same_extent && same_sides, || format!("accumulates {contribution} onto {sum}"))?;
            return Ok(OperandWrite { state: contribution, target: WriteTarget::InPlace(port) });
        }
        ensure(sum.same_layout(&contribution), || {
            format!("accumulates {contribution} onto {}, which is {sum}", self.operand_name(port))
        })?;
        let value = self.checker.graph.sum(sum.value, contribution.value)?;
        Ok(OperandWrite {
            state: contribution.with_value(value),
            target: WriteTarget::InPlace(port),
        })
    }
}
