//! Checks of the step phase: every gradient is reduced once over each axis on which it is partial, its
//! square is counted once, and every weight is updated once.
//!
//! The backward pass leaves a gradient partial over the tensor axis where tokens are sharded, over the
//! data axis where there are replicas, and over the pipeline axis for a tied weight on two stages. With ZeRO the data
//! axis is that of the shard group, whose members have different parts, and of the replicas of one part. The
//! square sum is partial over every axis with more than one device, except over replicas of one part.
//! AdamW clips by the norm of all gradients, so it needs the square sum reduced over all axes.
//!
//! For every gradient, weight and the square sum, the checker tracks the layout over each axis.
//! [`collective`] compares it with the source layout of a collective: a second reduction of a gradient
//! over one axis finds the gradient replicated, and is refused there.

mod collective;
mod rounding;
mod update;

use std::collections::{BTreeSet, HashMap};

use crate::mesh::Axis;
use crate::program::{
    Access, Action, BufferId, BufferRole, ChunkPhase, FusedOp, Instr, ParameterShard,
};
use crate::{Dim, Layout};

use super::error::{CheckFault, CheckResult, ensure, fault};
use super::lattice::{AbstractValue, ForwardValueId, PendingReduction};
use super::memory::ByteOwners;
use super::shards::replica_part;
use super::stage::StageChecker;
pub(super) use collective::first_and_last_stage;

/// Layout over the shard group of a buffer of which each member has one part.
const REPLICA_PARTS: Layout = Layout::Sharded(Dim::Feature);

/// Layouts of a buffer over the axes: replicated, partial or, over the shard group, in parts.
struct AxisLayouts {
    tensor: Layout,
    /// Over the shard group of ZeRO.
    shards: Layout,
    /// Over the replicas that hold the same shard; over all replicas without ZeRO.
    replicas: Layout,
    pipeline: Layout,
}

impl AxisLayouts {
    /// The first axis on which the buffer is not reduced, given its layout over the shard group once reduced.
    fn unreduced_axis(&self, shards: Layout) -> Option<Axis> {
        let axes = [
            (self.tensor == Layout::Replicated, Axis::Tensor),
            (self.shards == shards && self.replicas == Layout::Replicated, Axis::Data),
            (self.pipeline == Layout::Replicated, Axis::Pipeline),
        ];
        axes.into_iter().find(|(reduced, _)| !reduced).map(|(_, axis)| axis)
    }
}

/// State of a weight's gradient during the step.
struct GradientState {
    weight: Option<ForwardValueId>,
    layouts: AxisLayouts,
    /// Whether each member of the shard group stores only its part.
    is_stored_in_parts: bool,
    /// The bf16 copy, while it is reduced over the data axis.
    rounded: Option<BufferId>,
    /// Whether the passes of the next step overwrite it.
    is_overwritten: bool,
    zeroed: bool,
}

/// State of a weight during the step.
struct WeightState {
    value: ForwardValueId,
    updated: bool,
    /// Layout over the shard group.
    shards: Layout,
    /// Whether each member of the shard group stores only its part.
    is_stored_in_parts: bool,
}

/// State of the sum of squared gradients.
struct SquareSumState {
    buffer: BufferId,
    layouts: AxisLayouts,
    /// Whether a collective has reduced the sum, after which no square may be added.
    reduced: bool,
}

struct StepChecker<'c, 'a> {
    checker: &'c StageChecker<'a>,
    gradients: HashMap<BufferId, GradientState>,
    /// Gradients whose squares have not been counted.
    uncounted: BTreeSet<BufferId>,
    /// The gradient that each rounded copy is of, while it is reduced.
    rounded_of: HashMap<BufferId, BufferId>,
    weights: HashMap<BufferId, WeightState>,
    /// Optimizer states, with whether an update has used them.
    optimizer_states: HashMap<BufferId, bool>,
    square_sum: Option<SquareSumState>,
    /// The weight of this stage that is tied to one on the other end of the pipeline.
    tied: Option<ForwardValueId>,
    /// The rounded gradient last written to each byte range.
    owners: ByteOwners,
}

/// Walks the step phase. `tied` is the weight of this stage that is tied to one on another stage.
pub(super) fn walk(checker: &mut StageChecker, tied: Option<ForwardValueId>) {
    checker.at = ChunkPhase::STEP;
    let stage = checker.stage;
    let mut step = StepChecker::new(checker, tied);
    let mut instructions = stage.step.iter().enumerate();
    let first_fault = instructions
        .find_map(|(index, instr)| step.instruction(instr).err().map(|fault| (index, fault)));
    match first_fault {
        Some((index, fault)) => checker.report(index, &stage.step[index], fault),
        None => {
            for problem in step.end_of_step_problems() {
                checker.errors.push_stage(checker.index, CheckFault { problem, hint: None });
            }
        }
    }
}

/// Partial where `partial`, otherwise replicated.
fn partial_if(partial: bool) -> Layout {
    if partial { Layout::Partial } else { Layout::Replicated }
}

impl<'c, 'a> StepChecker<'c, 'a> {
    fn new(checker: &'c StageChecker<'a>, tied: Option<ForwardValueId>) -> Self {
        let mut step = StepChecker {
            checker,
            gradients: HashMap::new(),
            uncounted: BTreeSet::new(),
            rounded_of: HashMap::new(),
            weights: HashMap::new(),
            optimizer_states: HashMap::new(),
            square_sum: None,
            tied,
            owners: ByteOwners::default(),
        };
        let buffers = checker.stage.buffers.iter().zip(&checker.contents);
        for (index, (buffer, contents)) in buffers.enumerate() {
            let id = BufferId(index as u32);
            match (buffer.role, contents) {
                (BufferRole::WeightGradient, contents) => {
                    let Some(state) = contents.state() else { continue };
                    let weight = match state.value {
                        AbstractValue::Gradient { of, .. } => Some(of),
                        _ => None,
                    };
                    let is_stored_in_parts = contents.is_replica_part();
                    let layouts = AxisLayouts {
                        tensor: partial_if(state.pending == PendingReduction::Sum),
                        shards: match is_stored_in_parts {
                            true => REPLICA_PARTS,
                            false => partial_if(step.has_replica_parts()),
                        },
                        replicas: partial_if(checker.context.replica_group().size > 1),
                        pipeline: partial_if(weight.is_some() && weight == tied),
                    };
                    let gradient = GradientState {
                        weight,
                        layouts,
                        is_stored_in_parts,
                        rounded: None,
                        is_overwritten: step.checker.overwritten_gradients.contains(&id),
                        zeroed: false,
                    };
                    step.gradients.insert(id, gradient);
                    step.uncounted.insert(id);
                }
                (BufferRole::Weight, contents) => {
                    if let Some(AbstractValue::Value(value)) = contents.state().map(|s| s.value) {
                        let is_stored_in_parts = contents.is_replica_part();
                        let (updated, shards) = (false, Layout::Replicated);
                        let weight = WeightState { value, updated, shards, is_stored_in_parts };
                        step.weights.insert(id, weight);
                    }
                }
                (role, _) if role.is_optimizer_state() => {
                    step.optimizer_states.insert(id, false);
                }
                _ => {}
            }
        }
        step
    }

    fn name(&self, id: BufferId) -> String {
        format!("`{}`", self.checker.stage.buffer(id).name)
    }

    /// Whether each replica updates only its part of every parameter.
    fn has_replica_parts(&self) -> bool {
        self.checker.context.shard_size > 1
    }

    fn instruction(&mut self, instr: &Instr) -> CheckResult {
        match &instr.action {
            Action::Fused(FusedOp::Fill) => self.zero_square_sum(instr),
            Action::Fused(FusedOp::SquareSum) => self.count_squares(instr),
            Action::Fused(FusedOp::AdamW) => self.update(instr),
            Action::Fused(FusedOp::Cast) => self.cast(instr),
            Action::Collective(collective) => self.collective(instr, collective),
            _ => fault("does not belong to the step phase"),
        }
    }

    fn zero_square_sum(&mut self, instr: &Instr) -> CheckResult {
        let ([], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs no operand and one result");
        };
        let buffer = self.checker.stage.buffer(written.buffer);
        let scalar = buffer.role == BufferRole::SquareSum
            && (written.extent.rows, written.extent.columns) == (1, 1);
        ensure(scalar && self.square_sum.is_none(), || {
            format!("zeroes `{}`: only the sum of squares is zeroed, and once", buffer.name)
        })?;
        let context = self.checker.context;
        let layouts = AxisLayouts {
            tensor: partial_if(context.axis_size(Axis::Tensor) > 1),
            shards: partial_if(self.has_replica_parts()),
            replicas: Layout::Replicated,
            pipeline: partial_if(context.axis_size(Axis::Pipeline) > 1),
        };
        self.square_sum = Some(SquareSumState { buffer: written.buffer, layouts, reduced: false });
        Ok(())
    }

    /// Elements that one replica updates: its whole shard, or its part with ZeRO.
    fn updated_elements(&self, shard: &ParameterShard) -> u64 {
        replica_part(shard, self.checker.context)
    }

    fn check_elements(&self, access: &Access, expected: u64) -> CheckResult {
        let elements = access.extent.rows * access.extent.columns;
        ensure(elements == expected, || {
            format!("accesses {elements} elements of {}, not {expected}", self.name(access.buffer))
        })
    }

    fn shard(&self, id: BufferId) -> CheckResult<&'a ParameterShard> {
        match &self.checker.stage.buffer(id).shard {
            Some(shard) => Ok(shard),
            None => fault(format!(
                "accesses {}, which is not a parameter, gradient or optimizer state",
                self.name(id)
            )),
        }
    }

    /// A gradient that is reduced over all axes, at least in the part of this replica.
    fn reduced_gradient(&self, id: BufferId) -> CheckResult<&GradientState> {
        let Some(gradient) = self.gradients.get(&id) else {
            return fault(format!("reads {} as a gradient", self.name(id)));
        };
        if let Some(axis) = self.unreduced_axis(gradient) {
            return fault(format!(
                "reads {} before its reduction over the {} axis",
                self.name(id),
                axis.name()
            ));
        }
        ensure(gradient.rounded.is_none(), || {
            format!("reads {}, whose reduced copy has not been widened", self.name(id))
        })?;
        ensure(!gradient.zeroed, || format!("reads {} after it was zeroed", self.name(id)))?;
        Ok(gradient)
    }

    /// The first axis over which a gradient is not reduced, in the part of this replica.
    fn unreduced_axis(&self, gradient: &GradientState) -> Option<Axis> {
        let data = if self.has_replica_parts() { REPLICA_PARTS } else { Layout::Replicated };
        gradient.layouts.unreduced_axis(data)
    }

    /// Whether a gradient is that of a tied weight whose square the last stage counts.
    fn is_counted_on_last_stage(&self, gradient: &GradientState) -> bool {
        self.tied.is_some() && gradient.weight == self.tied && self.checker.index == 0
    }

    fn count_squares(&mut self, instr: &Instr) -> CheckResult {
        let (Some((total, gradients @ [_, ..])), [written]) =
            (instr.reads.split_last(), &instr.writes[..])
        else {
            return fault("needs gradients and the sum of squares, and writes the sum");
        };
        match &self.square_sum {
            Some(sum) if sum.buffer == total.buffer && total == written && !sum.reduced => {}
            Some(sum) if sum.reduced => {
                return fault("adds to the sum of squares after its reduction");
            }
            _ => {
                return fault(format!(
                    "adds to {}, which is not the sum of squares",
                    self.name(total.buffer)
                ));
            }
        }
        gradients.iter().try_for_each(|gradient| self.count_square(gradient))
    }

    fn count_square(&mut self, gradient: &Access) -> CheckResult {
        self.check_elements(gradient, self.updated_elements(self.shard(gradient.buffer)?))?;
        let state = self.reduced_gradient(gradient.buffer)?;
        ensure(self.uncounted.contains(&gradient.buffer), || {
            format!("counts the square of {} twice", self.name(gradient.buffer))
        })?;
        ensure(!self.is_counted_on_last_stage(state), || {
            format!(
                "counts the square of {}, which is tied: the last stage counts it too",
                self.name(gradient.buffer)
            )
        })?;
        self.uncounted.remove(&gradient.buffer);
        Ok(())
    }
}
