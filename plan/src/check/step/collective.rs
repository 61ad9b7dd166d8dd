//! Collectives of the step phase, each of which changes the layout of a gradient, a weight or the square sum.

use crate::context::Context;
use crate::kernel::CollectiveKind;
use crate::mesh::{Axis, DeviceGroup};
use crate::program::{Access, BufferId, BufferRole, CollectiveOp, Instr, Reduction};
use crate::{Bytes, Layout};

use super::super::collective::{check_group, check_kind};
use super::super::error::{CheckResult, ensure, fault};
use super::super::shards::replica_part;
use super::{AxisLayouts, REPLICA_PARTS, StepChecker};

impl AxisLayouts {
    fn layout_mut(&mut self, collective: &CollectiveOp, context: &Context) -> &mut Layout {
        match collective.axis {
            Axis::Tensor => &mut self.tensor,
            Axis::Data if collective.group == context.shard_group() => &mut self.shards,
            Axis::Context | Axis::Data => &mut self.replicas,
            Axis::Pipeline => &mut self.pipeline,
        }
    }
}

impl StepChecker<'_, '_> {
    pub(super) fn collective(&mut self, instr: &Instr, collective: &CollectiveOp) -> CheckResult {
        ensure(!instr.reads.is_empty() && instr.reads == instr.writes, || {
            "does not work in place on one or more operands".into()
        })?;
        ensure(collective.axis != Axis::Context, || {
            "runs over the context axis, which is only a part of the replicas".into()
        })?;
        check_kind(collective)?;
        ensure(collective.function.reduction() == Reduction::Sum, || {
            "takes the maximum of a partial sum".into()
        })?;
        let is_coalesced = instr.reads.len() > 1;
        ensure(!is_coalesced || collective.axis == Axis::Data, || {
            format!("has several operands over the {} axis", collective.axis.name())
        })?;
        let is_square_sum = |access: &Access| {
            self.checker.stage.buffer(access.buffer).role == BufferRole::SquareSum
        };
        let reduces_norm = instr.reads.iter().any(is_square_sum);
        ensure(!(is_coalesced && reduces_norm), || {
            "reduces the sum of squares together with gradients".into()
        })?;
        for access in &instr.reads {
            self.operand(access, collective)?;
        }
        let bytes: Bytes = instr.reads.iter().map(|access| access.extent.bytes()).sum();
        let declared = (collective.payload, collective.statistic);
        let expected = if reduces_norm { (Bytes(0), bytes) } else { (bytes, Bytes(0)) };
        ensure(declared == expected, || {
            format!(
                "declares {} bytes of payload and {} of statistics, but its operands have {}",
                collective.payload.0, collective.statistic.0, bytes.0
            )
        })
    }

    /// Checks and applies a collective to one of its operands.
    fn operand(&mut self, access: &Access, collective: &CollectiveOp) -> CheckResult {
        let id = self.gradient_in(access.buffer).unwrap_or(access.buffer);
        self.check_format(id, access.buffer, collective)?;
        check_group(collective, self.expected_group(id, collective))?;
        let buffer = self.checker.stage.buffer(access.buffer);
        // Of a whole gradient that has been reduce-scattered, replicas reduce their parts.
        let is_part = self.gradients.get(&id).is_some_and(|g| g.layouts.shards == REPLICA_PARTS);
        let accessed = match &buffer.shard {
            Some(shard) if is_part => {
                buffer.extent.dtype.bytes(replica_part(shard, self.checker.context))
            }
            _ => buffer.extent.bytes(),
        };
        ensure(access.extent.bytes() == accessed, || {
            format!(
                "accesses {} bytes of {}, which has {}",
                access.extent.bytes().0,
                self.name(id),
                accessed.0
            )
        })?;
        self.apply_collective(id, collective)
    }

    /// The device group that a collective on this buffer runs over.
    fn expected_group(&self, id: BufferId, collective: &CollectiveOp) -> DeviceGroup {
        let context = self.checker.context;
        let is_gradient = self.gradients.contains_key(&id);
        match collective.axis {
            Axis::Pipeline if is_gradient => {
                first_and_last_stage(context.mesh.group(Axis::Pipeline))
            }
            Axis::Data if is_gradient && collective.to == Layout::Replicated => {
                context.replica_group()
            }
            Axis::Data => context.shard_group(),
            axis => context.mesh.group(axis),
        }
    }

    fn apply_collective(&mut self, id: BufferId, collective: &CollectiveOp) -> CheckResult {
        let name = self.name(id);
        self.check_layout_change(id, collective)?;
        let layout = if let Some(gradient) = self.gradients.get_mut(&id) {
            ensure(self.uncounted.contains(&id), || {
                format!("changes {name} after its square was counted")
            })?;
            // After the reduce-scatter of a whole gradient, only replicas of one part reduce it.
            let is_reduced =
                gradient.layouts.shards == REPLICA_PARTS && !gradient.is_stored_in_parts;
            let of_replicas = collective.group == self.checker.context.replica_group();
            ensure(!is_reduced || of_replicas, || {
                format!("changes {name} after its reduce-scatter over the data axis")
            })?;
            gradient.layouts.layout_mut(collective, self.checker.context)
        } else if let Some(sum) = self.square_sum.as_mut().filter(|sum| sum.buffer == id) {
            sum.reduced = true;
            sum.layouts.layout_mut(collective, self.checker.context)
        } else if let Some(weight) = self.weights.get_mut(&id) {
            ensure(collective.axis == Axis::Data && weight.updated, || {
                format!("gathers {name} before it was updated, or over another axis than data")
            })?;
            &mut weight.shards
        } else {
            return fault(format!(
                "changes {name}, which is not a gradient, a weight or the sum of squares"
            ));
        };
        reshard(layout, collective, &name)
    }

    /// Checks that the step phase may change the layout of a buffer like this: partial sums are reduced
    /// and, with ZeRO, gradients reduce-scattered and weights all-gathered over the shard group.
    fn check_layout_change(&self, id: BufferId, collective: &CollectiveOp) -> CheckResult {
        let scatters = self.gradients.contains_key(&id)
            && collective.group == self.checker.context.shard_group();
        let allowed = match (collective.from, collective.to) {
            (REPLICA_PARTS, Layout::Replicated) => self.weights.contains_key(&id),
            (Layout::Partial, Layout::Replicated) => !self.weights.contains_key(&id),
            (Layout::Partial, REPLICA_PARTS) => !self.weights.contains_key(&id) && scatters,
            _ => false,
        };
        ensure(allowed, || {
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
pub(in crate::check) fn first_and_last_stage(pipeline: DeviceGroup) -> DeviceGroup {
    DeviceGroup { size: 2, stride: pipeline.stride * (pipeline.size - 1), ..pipeline }
}

/// Changes the layout of a buffer over the collective's axis. Refuses a collective whose source layout
/// is not that of the buffer, such as a second reduction of a gradient.
fn reshard(layout: &mut Layout, collective: &CollectiveOp, name: &str) -> CheckResult {
    ensure(*layout == collective.from, || match (collective.kind(), *layout) {
        (CollectiveKind::AllReduce | CollectiveKind::ReduceScatter, Layout::Replicated) => format!(
            "sums {name} over the {} axis, where it is whole already: the result would be {} times too large",
            collective.axis.name(),
            collective.group.size
        ),
        _ => format!(
            "expects {name} to be {} over the {} axis, but it is {layout}",
            collective.from,
            collective.axis.name()
        ),
    })?;
    *layout = collective.to;
    Ok(())
}
