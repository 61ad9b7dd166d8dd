//! The step phase: every gradient is reduced over all axes on which it is partial, its square is
//! counted once, and every weight is updated once.
//!
//! A gradient starts as the backward pass left it: partial over the tensor axis where tokens are
//! sharded, over the data axis when there are replicas, and over the pipeline axis for a tied weight on
//! two stages. The square sum is partial over every axis with more than one device, except the data
//! axis without ZeRO. AdamW clips by the norm of all gradients, so it needs the square sum reduced.

mod update;

use std::collections::HashMap;

use crate::context::Zero;
use crate::kernel::CollectiveKind;
use crate::layout::WeightSplit;
use crate::mesh::{Axis, DeviceGroup};
use crate::model::WeightShape;
use crate::program::{
    Action, BufferId, BufferRole, CollectiveOp, FusedOp, Instr, ParameterShard, Phase, Reduction,
};
use crate::{Bytes, Layout};

use super::collective::{group_fits, kind_fits};
use super::error::{CheckFault, CheckResult, ensure, fault};
use super::lattice::{AbstractValue, PendingSum, SymbolId};
use super::stage::{BufferContents, StageChecker};

/// Layout of a buffer over the data axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataAxisLayout {
    /// The same on every replica.
    Whole,
    /// A partial sum: each replica has a summand.
    Partial,
    /// Sharded: each replica has its own part.
    Sharded,
}

/// State of a weight's gradient during the step.
struct GradientState {
    weight: Option<SymbolId>,
    tensor: PendingSum,
    data: DataAxisLayout,
    pipeline: PendingSum,
    counted: bool,
    zeroed: bool,
}

/// State of a weight during the step.
struct WeightState {
    value: SymbolId,
    updated: bool,
    data: DataAxisLayout,
}

/// State of the sum of squared gradients.
struct SquareSumState {
    buffer: BufferId,
    tensor: PendingSum,
    data: DataAxisLayout,
    pipeline: PendingSum,
    /// Whether it has been reduced over any axis, so that nothing more may be added.
    closed: bool,
}

struct StepChecker<'c, 'a> {
    check: &'c StageChecker<'a>,
    gradients: HashMap<BufferId, GradientState>,
    weights: HashMap<BufferId, WeightState>,
    states: HashMap<BufferId, bool>,
    square_sum: Option<SquareSumState>,
    /// The weight of this stage that is tied to one on the other end of the pipeline.
    tied: Option<SymbolId>,
}

/// Walks the step phase. `tied` is the weight of this stage that another stage holds too.
pub(super) fn walk(check: &mut StageChecker, tied: Option<SymbolId>) {
    check.phase = Phase::Step;
    let stage = check.stage;
    let mut faults: Vec<(usize, CheckFault)> = vec![];
    let mut step = StepChecker::new(check, tied);
    for (at, instr) in stage.step.iter().enumerate() {
        if let Err(fault) = step.instruction(instr) {
            faults.push((at, fault));
            break;
        }
    }
    let ends = if faults.is_empty() { step.ends() } else { vec![] };
    for (at, fault) in faults {
        check.report(at, &stage.step[at], fault);
    }
    for problem in ends {
        check.errors.of_stage(check.index, CheckFault { problem, hint: None });
    }
}

impl<'c, 'a> StepChecker<'c, 'a> {
    fn new(check: &'c StageChecker<'a>, tied: Option<SymbolId>) -> Self {
        let replicas = check.context.mesh.data > 1;
        let mut step = StepChecker {
            check,
            gradients: HashMap::new(),
            weights: HashMap::new(),
            states: HashMap::new(),
            square_sum: None,
            tied,
        };
        for (index, (buffer, content)) in
            check.stage.buffers.iter().zip(&check.contents).enumerate()
        {
            let id = BufferId(index as u32);
            match (buffer.role, content) {
                (BufferRole::WeightGradient, BufferContents::Holds(state)) => {
                    let weight = match state.meaning {
                        AbstractValue::Gradient { of, .. } => Some(of),
                        _ => None,
                    };
                    let both = weight.is_some() && weight == tied;
                    let gradient = GradientState {
                        weight,
                        tensor: state.tensor,
                        data: if replicas {
                            DataAxisLayout::Partial
                        } else {
                            DataAxisLayout::Whole
                        },
                        pipeline: if both { PendingSum::Owed } else { PendingSum::Done },
                        counted: false,
                        zeroed: false,
                    };
                    step.gradients.insert(id, gradient);
                }
                (BufferRole::Weight, BufferContents::Holds(state)) => {
                    if let AbstractValue::Value(value) = state.meaning {
                        let weight =
                            WeightState { value, updated: false, data: DataAxisLayout::Whole };
                        step.weights.insert(id, weight);
                    }
                }
                (role, _) if role.is_optimizer_state() => {
                    step.states.insert(id, false);
                }
                _ => {}
            }
        }
        step
    }

    fn name(&self, id: BufferId) -> String {
        format!("`{}`", self.check.stage.buffer(id).name)
    }

    fn instruction(&mut self, instr: &Instr) -> CheckResult {
        match &instr.action {
            Action::Fused(FusedOp::Fill) => self.zero_square_sum(instr),
            Action::Fused(FusedOp::SquareSum) => self.count_square(instr),
            Action::Fused(FusedOp::AdamW) => self.update(instr),
            Action::Collective(collective) => self.collective(instr, collective),
            _ => fault("does not belong to the step phase"),
        }
    }

    fn zero_square_sum(&mut self, instr: &Instr) -> CheckResult {
        let ([], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs no operand and one result");
        };
        let buffer = self.check.stage.buffer(written.buffer);
        let number = buffer.role == BufferRole::SquareSum
            && (written.extent.rows, written.extent.columns) == (1, 1);
        ensure(number && self.square_sum.is_none(), || {
            format!("zeroes `{}`: only the sum of squares is zeroed, and once", buffer.name)
        })?;
        let context = self.check.context;
        let owed =
            |axis| if context.axis_size(axis) > 1 { PendingSum::Owed } else { PendingSum::Done };
        let parted = context.zero == Zero::One && context.mesh.data > 1;
        self.square_sum = Some(SquareSumState {
            buffer: written.buffer,
            tensor: owed(Axis::Tensor),
            data: if parted { DataAxisLayout::Partial } else { DataAxisLayout::Whole },
            pipeline: owed(Axis::Pipeline),
            closed: false,
        });
        Ok(())
    }

    /// Elements that one replica updates: all of its shard, or with ZeRO-1 its part.
    fn part(&self, shard: &ParameterShard) -> u64 {
        let context = self.check.context;
        let whole: u64 = shard.members.iter().map(WeightShape::elements).sum();
        let devices = if shard.split == WeightSplit::Whole { 1 } else { context.tensor_size() };
        let replicas = if context.zero == Zero::One { context.mesh.data } else { 1 };
        (whole / devices).div_ceil(replicas)
    }

    fn accesses(&self, access: &crate::program::Access, elements: u64) -> CheckResult {
        let seen = access.extent.rows * access.extent.columns;
        ensure(seen == elements, || {
            format!("accesses {seen} elements of {}, not {elements}", self.name(access.buffer))
        })
    }

    fn shard(&self, id: BufferId) -> CheckResult<&'a ParameterShard> {
        match &self.check.stage.buffer(id).shard {
            Some(shard) => Ok(shard),
            None => fault(format!(
                "accesses {}, which is not a parameter, gradient or optimizer state",
                self.name(id)
            )),
        }
    }

    /// A gradient that is reduced over all axes, at least in this replica's part.
    fn reduced(&self, id: BufferId) -> CheckResult<&GradientState> {
        let Some(gradient) = self.gradients.get(&id) else {
            return fault(format!("reads {} as a gradient", self.name(id)));
        };
        let parted = self.check.context.zero == Zero::One && self.check.context.mesh.data > 1;
        let wanted = if parted { DataAxisLayout::Sharded } else { DataAxisLayout::Whole };
        for (owed, axis) in [
            (gradient.tensor != PendingSum::Done, Axis::Tensor),
            (gradient.data != wanted, Axis::Data),
            (gradient.pipeline != PendingSum::Done, Axis::Pipeline),
        ] {
            ensure(!owed, || {
                let name = self.name(id);
                format!("reads {name} before its reduction over the {} axis", axis.name())
            })?;
        }
        ensure(!gradient.zeroed, || format!("reads {} after it was zeroed", self.name(id)))?;
        Ok(gradient)
    }

    fn count_square(&mut self, instr: &Instr) -> CheckResult {
        let ([gradient, total], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs a gradient and the sum, and writes the sum");
        };
        self.accesses(gradient, self.part(self.shard(gradient.buffer)?))?;
        let found = self.reduced(gradient.buffer)?;
        ensure(!found.counted, || format!("counts {} twice", self.name(gradient.buffer)))?;
        let elsewhere = self.tied.is_some() && found.weight == self.tied && self.check.index == 0;
        ensure(!elsewhere, || {
            format!(
                "counts {}, which the last stage counts too: it is tied",
                self.name(gradient.buffer)
            )
        })?;
        match &self.square_sum {
            Some(sum) if sum.buffer == total.buffer && total == written && !sum.closed => {}
            Some(sum) if sum.closed => {
                return fault("adds to the sum of squares after its reduction");
            }
            _ => {
                return fault(format!(
                    "adds to {}, which is not the sum of squares",
                    self.name(total.buffer)
                ));
            }
        }
        if let Some(found) = self.gradients.get_mut(&gradient.buffer) {
            found.counted = true;
        }
        Ok(())
    }

    fn collective(&mut self, instr: &Instr, collective: &CollectiveOp) -> CheckResult {
        let ([read], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs one operand, in place");
        };
        ensure(read == written, || "does not work in place".into())?;
        let id = read.buffer;
        kind_fits(collective)?;
        ensure(collective.reduction == Reduction::Sum, || {
            "takes the maximum of a partial sum".into()
        })?;
        let mesh = self.check.context.mesh;
        let ends = collective.axis == Axis::Pipeline && self.gradients.contains_key(&id);
        let group = match (mesh.group(collective.axis), ends) {
            (group, true) => both_ends(group),
            (group, false) => group,
        };
        group_fits(collective, group)?;
        let buffer = self.check.stage.buffer(id);
        let whole = read.extent.bytes();
        let booked = (collective.payload, collective.statistic);
        let sum = buffer.role == BufferRole::SquareSum;
        let expected = if sum { (Bytes(0), whole) } else { (whole, Bytes(0)) };
        ensure(booked == expected && whole == buffer.extent.bytes(), || {
            format!(
                "declares a payload of {} bytes for {}, which has {}",
                booked.0.0,
                self.name(id),
                whole.0
            )
        })?;
        self.apply(id, collective)
    }

    fn apply(&mut self, id: BufferId, collective: &CollectiveOp) -> CheckResult {
        let name = self.name(id);
        self.kind_belongs(id, collective)?;
        let owed = |sum: PendingSum| {
            if sum == PendingSum::Owed { Layout::Partial } else { Layout::Replicated }
        };
        let lies = |data: DataAxisLayout| match data {
            DataAxisLayout::Whole => Layout::Replicated,
            DataAxisLayout::Partial => Layout::Partial,
            DataAxisLayout::Sharded => Layout::Sharded(crate::Dim::Feature),
        };
        let (tensor, data, pipeline) = if let Some(g) = self.gradients.get_mut(&id) {
            ensure(!g.counted, || format!("changes {name} after its square was counted"))?;
            ensure(g.data != DataAxisLayout::Sharded, || {
                format!("changes {name} after its reduce-scatter over the data axis")
            })?;
            (&mut g.tensor, &mut g.data, &mut g.pipeline)
        } else if let Some(s) = self.square_sum.as_mut().filter(|s| s.buffer == id) {
            s.closed = true;
            (&mut s.tensor, &mut s.data, &mut s.pipeline)
        } else if let Some(w) = self.weights.get_mut(&id) {
            ensure(collective.axis == Axis::Data && w.updated, || {
                format!("gathers {name} before it was updated, or over another axis than data")
            })?;
            return reshard(&mut w.data, lies, collective, &name, |_| DataAxisLayout::Whole);
        } else {
            return fault(format!(
                "changes {name}, which is not a gradient, a weight or the sum of squares"
            ));
        };
        match collective.axis {
            Axis::Tensor => reshard(tensor, owed, collective, &name, |_| PendingSum::Done),
            Axis::Pipeline => reshard(pipeline, owed, collective, &name, |_| PendingSum::Done),
            Axis::Data => reshard(data, lies, collective, &name, |to| match to {
                Layout::Replicated => DataAxisLayout::Whole,
                _ => DataAxisLayout::Sharded,
            }),
        }
    }

    /// Checks the layouts that the step phase may change between: sums are reduced and, with ZeRO-1,
    /// gradients reduce-scattered and weights all-gathered over the data axis.
    fn kind_belongs(&self, id: BufferId, collective: &CollectiveOp) -> CheckResult {
        let parted = Layout::Sharded(crate::Dim::Feature);
        let ways = if self.weights.contains_key(&id) {
            [(parted, Layout::Replicated); 2]
        } else {
            let parts = self.gradients.contains_key(&id)
                && collective.axis == Axis::Data
                && self.check.context.zero == Zero::One;
            let after = if parts { parted } else { Layout::Replicated };
            [(Layout::Partial, Layout::Replicated), (Layout::Partial, after)]
        };
        ensure(ways.contains(&(collective.from, collective.to)), || {
            format!(
                "turns {} from {} into {}, but the step phase only reduces over the {} axis and gathers weights",
                self.name(id),
                collective.from,
                collective.to,
                collective.axis.name()
            )
        })
    }
}

/// The group of the first and the last stage.
pub(super) fn both_ends(pipeline: DeviceGroup) -> DeviceGroup {
    DeviceGroup { size: 2, stride: pipeline.stride * (pipeline.size - 1), ..pipeline }
}

/// Changes the layout of a buffer over one axis from the collective's source to its target.
fn reshard<T: Copy>(
    held: &mut T,
    layout: impl Fn(T) -> Layout,
    collective: &CollectiveOp,
    name: &str,
    after: impl Fn(Layout) -> T,
) -> CheckResult {
    let is = layout(*held);
    ensure(is == collective.from, || match (collective.kind, is) {
        (CollectiveKind::AllReduce | CollectiveKind::ReduceScatter, Layout::Replicated) => format!(
            "sums {name} over the {} axis, where it is whole already: the result would be {} times too large",
            collective.axis.name(),
            collective.group.size
        ),
        _ => format!(
            "expects {name} to be {} over the {} axis, but it is {is}",
            collective.from,
            collective.axis.name()
        ),
    })?;
    *held = after(collective.to);
    Ok(())
}
