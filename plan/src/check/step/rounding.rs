//! Checks of gradients that are rounded for their reduction over the data axis, and widened after it.
//!
//! While a gradient is rounded, its bf16 copy has its layouts: reductions over the data axis change these, and nothing else
//! accesses the gradient or its copy.

use crate::Layout;
use crate::mesh::Axis;
use crate::program::{Access, BufferId, BufferRole, CollectiveOp, Instr};

use super::super::error::{CheckResult, ensure, fault};
use super::{GradientState, StepChecker};

impl StepChecker<'_, '_> {
    /// The gradient whose rounded copy a buffer holds.
    pub(super) fn gradient_in(&self, rounded: BufferId) -> Option<BufferId> {
        self.rounded_of.get(&rounded).copied()
    }

    /// Checks that a gradient is reduced over the data axis in the format of the context, and over others in fp32.
    pub(super) fn check_format(
        &self,
        gradient: BufferId,
        operand: BufferId,
        collective: &CollectiveOp,
    ) -> CheckResult {
        let Some(state) = self.gradients.get(&gradient) else { return Ok(()) };
        let rounds = collective.axis == Axis::Data && self.checker.context.rounds_gradients();
        let is_current = state.rounded.unwrap_or(gradient) == operand;
        ensure(is_current && state.rounded.is_some() == rounds, || {
            let dtype = self.checker.stage.buffer(operand).extent.dtype.name();
            format!(
                "reduces {} over the {} axis in {dtype}, or while another copy of it is reduced",
                self.name(operand),
                collective.axis.name()
            )
        })
    }

    /// Rounds a gradient, or widens the reduced copy.
    pub(super) fn cast(&mut self, instr: &Instr) -> CheckResult {
        let ([read], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs one operand and one result");
        };
        ensure(self.shard(read.buffer)? == self.shard(written.buffer)?, || {
            format!("mixes {} with {}", self.name(read.buffer), self.name(written.buffer))
        })?;
        let role = |access: &Access| self.checker.stage.buffer(access.buffer).role;
        match (role(read), role(written)) {
            (BufferRole::WeightGradient, BufferRole::RoundedGradient) => self.round(read, written),
            (BufferRole::RoundedGradient, BufferRole::WeightGradient) => self.widen(read, written),
            _ => fault("neither rounds a gradient for its reduction, nor widens a reduced one"),
        }
    }

    fn round(&mut self, read: &Access, written: &Access) -> CheckResult {
        let (id, name) = (read.buffer, self.name(read.buffer));
        ensure(self.checker.context.rounds_gradients(), || {
            format!("rounds {name}, but gradients are reduced in fp32")
        })?;
        for access in [read, written] {
            let whole = self.checker.stage.buffer(access.buffer).extent;
            self.check_elements(access, whole.rows * whole.columns)?;
        }
        let elements = written.extent.rows * written.extent.columns;
        self.check_elements(read, elements)?;
        let Some(GradientState { layouts, rounded, zeroed, .. }) = self.gradients.get(&id) else {
            return fault(format!("reads {name} as a gradient"));
        };
        let is_whole = |layout: Layout| layout == Layout::Replicated;
        ensure(is_whole(layouts.tensor) && is_whole(layouts.pipeline), || {
            format!("rounds {name} before its reductions over other axes than data")
        })?;
        let is_partial = [layouts.shards, layouts.replicas].contains(&Layout::Partial);
        ensure(is_partial && rounded.is_none() && !zeroed, || {
            format!("rounds {name}, which needs no reduction over the data axis")
        })?;
        for lost in self.owners.claim(self.checker.stage.buffer(written.buffer), written.buffer) {
            ensure(self.gradient_in(lost).is_none(), || {
                format!("overwrites {}, which has not been widened", self.name(lost))
            })?;
        }
        self.set_rounded(id, Some(written.buffer));
        Ok(())
    }

    fn widen(&mut self, read: &Access, written: &Access) -> CheckResult {
        let name = self.name(read.buffer);
        let gradient = self.gradient_in(read.buffer).filter(|id| *id == written.buffer);
        let Some(state) = gradient.and_then(|id| self.gradients.get(&id)) else {
            return fault(format!(
                "reads {name}, which holds no copy of {}",
                self.name(written.buffer)
            ));
        };
        if let Some(axis) = self.unreduced_axis(state) {
            let axis = axis.name();
            return fault(format!("widens {name} before its reduction over the {axis} axis"));
        }
        let elements = self.updated_elements(self.shard(written.buffer)?);
        for access in [read, written] {
            self.check_elements(access, elements)?;
        }
        self.set_rounded(written.buffer, None);
        Ok(())
    }

    fn set_rounded(&mut self, gradient: BufferId, rounded: Option<BufferId>) {
        let Some(state) = self.gradients.get_mut(&gradient) else { return };
        if let Some(copy) = std::mem::replace(&mut state.rounded, rounded) {
            self.rounded_of.remove(&copy);
        }
        if let Some(copy) = rounded {
            self.rounded_of.insert(copy, gradient);
        }
    }
}
