//! Instructions of a pass on parameters of which each replica has a part: all-gathers of weights, casts and reduce-scatters of
//! the gradients of a microbatch, and the addition of a part to the sum over microbatches.

use crate::mesh::Axis;
use crate::program::{
    Access, Action, BufferId, BufferRole, CollectiveFunction, CollectiveOp, FusedOp, Instr,
};
use crate::{Bytes, DType};

use super::collective::{check_group, check_kind};
use super::error::{CheckResult, ensure, fault};
use super::lattice::{AbstractState, AbstractValue};
use super::shards::{is_padded, replica_part, sharded_extents};
use super::stage::{BufferContents, StageChecker};

impl StageChecker<'_> {
    /// Checks an instruction of this kind; `None` for others.
    pub(super) fn sharded_parameters(&mut self, at: usize, instr: &Instr) -> Option<CheckResult> {
        let written = self.stage.buffer(instr.writes.first()?.buffer);
        match &instr.action {
            Action::Collective(op) if op.axis == Axis::Data => {
                Some(self.data_collective(at, instr, op))
            }
            Action::Fused(FusedOp::AddInto) if written.role.is_gradient() => {
                Some(self.accumulate_part(at, instr))
            }
            Action::Fused(FusedOp::Cast) if written.role == BufferRole::MicrobatchGradient => {
                Some(self.round_microbatch_gradient(at, instr))
            }
            Action::Fused(FusedOp::Fill) if written.role == BufferRole::MicrobatchGradient => {
                Some(self.zero_microbatch_gradient(at, instr))
            }
            _ => None,
        }
    }

    fn data_collective(&mut self, at: usize, instr: &Instr, op: &CollectiveOp) -> CheckResult {
        check_kind(op)?;
        ensure(self.context.shard_size > 1, || {
            "runs over the data axis within a pass, where replicas compute different microbatches"
                .into()
        })?;
        check_group(op, self.context.shard_group())?;
        ensure(instr.reads.len() == instr.writes.len(), || {
            format!("has {} operands but {} results", instr.reads.len(), instr.writes.len())
        })?;
        let bytes =
            |side: &[Access]| -> Bytes { side.iter().map(|access| access.extent.bytes()).sum() };
        let payload = bytes(&instr.reads).max(bytes(&instr.writes));
        ensure((op.payload, op.statistic) == (payload, Bytes(0)), || {
            format!("declares {} bytes, but its tensors have {}", op.payload.0, payload.0)
        })?;
        for (read, written) in instr.reads.iter().zip(&instr.writes) {
            for access in [read, written] {
                self.check_whole(access)?;
            }
            let contents = match op.function {
                CollectiveFunction::AllGather => self.gathered(read.buffer, written.buffer)?,
                CollectiveFunction::ReduceScatter => self.reduced(read.buffer, written.buffer)?,
                _ => {
                    return fault(
                        "only gathers weights and reduce-scatters gradients within a pass",
                    );
                }
            };
            self.mark_read(read.buffer);
            self.write(at, instr, written.buffer, contents)?;
        }
        Ok(())
    }

    fn check_whole(&self, access: &Access) -> CheckResult {
        let buffer = self.stage.buffer(access.buffer);
        ensure(access.extent == buffer.extent, || {
            format!("accesses `{}` as {}, not whole", buffer.name, access.extent)
        })
    }

    /// The contents of a gathered weight.
    fn gathered(&self, part: BufferId, whole: BufferId) -> CheckResult<BufferContents> {
        let (from, to) = (self.stage.buffer(part), self.stage.buffer(whole));
        let roles = (from.role, to.role) == (BufferRole::Weight, BufferRole::GatheredWeight);
        ensure(roles && from.shard == to.shard, || {
            format!("gathers `{}`, which is not a part of `{}`", from.name, to.name)
        })?;
        match self.contents[part.0 as usize] {
            BufferContents::ReplicaPart(state) => Ok(BufferContents::Tensor(state)),
            BufferContents::Unknown => Ok(BufferContents::Unknown),
            _ => fault(format!("gathers `{}`, which every replica has whole", from.name)),
        }
    }

    /// The contents of a microbatch's gradient after its reduction: in place, or with one microbatch as the sum.
    fn reduced(&mut self, read: BufferId, written: BufferId) -> CheckResult<BufferContents> {
        let (buffer, to) = (self.stage.buffer(read), self.stage.buffer(written));
        let is_sum = to.role == BufferRole::WeightGradient && to.shard == buffer.shard;
        let fits = read == written || (is_sum && !self.context.accumulates_parts());
        ensure(fits && buffer.role == BufferRole::MicrobatchGradient, || {
            format!("reduces `{}` to `{}`: not a gradient of one microbatch", buffer.name, to.name)
        })?;
        let dtype = self.context.grad_reduce_dtype.dtype();
        ensure(buffer.extent.dtype == dtype && to.extent.dtype == dtype, || {
            let (from, name) = (buffer.extent.dtype.name(), &to.name);
            format!(
                "reduces `{}`, which is {from}, to `{name}`, not in {}",
                buffer.name,
                dtype.name()
            )
        })?;
        if let (true, Some(sum)) = (is_sum, self.contents[written.0 as usize].state()) {
            ensure(sum.value == AbstractValue::Zero, || format!("reduces `{}` twice", to.name))?;
            self.overwritten_gradients.insert(written);
        }
        let state = match self.contents[read.0 as usize] {
            BufferContents::Tensor(state) => state,
            BufferContents::Unknown => return Ok(BufferContents::Unknown),
            BufferContents::ReplicaPart(_) => {
                return fault(format!("reduces `{}` twice", buffer.name));
            }
            _ => return fault(format!("reduces `{}` before it is written", buffer.name)),
        };
        let padded = buffer.shard.as_ref().is_some_and(|shard| is_padded(shard, self.context));
        ensure(!padded || self.zeroed_gradients.contains(&read), || {
            format!("reduces `{}`, whose padding is not zero", buffer.name)
        })?;
        let is_own = |id: &BufferId| self.stage.buffer(*id).shard == buffer.shard;
        let mut weights = self.graph.completed_values(state.value);
        ensure(weights.any(|value| self.weights.get(&value).is_some_and(is_own)), || {
            format!("reduces `{}`, which is not the complete gradient of its weight", buffer.name)
        })?;
        Ok(BufferContents::ReplicaPart(state))
    }

    /// Rounds the gradient of a microbatch for its reduction.
    fn round_microbatch_gradient(&mut self, at: usize, instr: &Instr) -> CheckResult {
        let ([read], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs one operand and one result");
        };
        let (from, to) = (self.stage.buffer(read.buffer), self.stage.buffer(written.buffer));
        let dtypes = (from.extent.dtype, to.extent.dtype);
        let fits = from.role == BufferRole::MicrobatchGradient
            && from.shard == to.shard
            && dtypes == (DType::F32, DType::Bf16);
        ensure(fits, || format!("rounds `{}` to `{}`: not its bf16 copy", from.name, to.name))?;
        for access in [read, written] {
            self.check_whole(access)?;
        }
        let contents = match self.contents[read.buffer.0 as usize] {
            BufferContents::Tensor(state) => {
                BufferContents::Tensor(AbstractState { dtype: to.extent.dtype, ..state })
            }
            BufferContents::Unknown => BufferContents::Unknown,
            _ => return fault(format!("rounds `{}`, which is not a whole gradient", from.name)),
        };
        if self.zeroed_gradients.contains(&read.buffer) {
            self.zeroed_gradients.insert(written.buffer);
        }
        self.mark_read(read.buffer);
        self.write(at, instr, written.buffer, contents)
    }

    /// Adds this replica's part of a microbatch's gradient to the sum over microbatches.
    fn accumulate_part(&mut self, at: usize, instr: &Instr) -> CheckResult {
        let ([part, sum], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs the part of a gradient and a sum, and writes the sum");
        };
        let (from, to) = (self.stage.buffer(part.buffer), self.stage.buffer(sum.buffer));
        let roles = (from.role, to.role);
        let fits = roles == (BufferRole::MicrobatchGradient, BufferRole::WeightGradient)
            && from.shard == to.shard
            && sum == written;
        ensure(fits, || format!("adds `{}` to `{}`: not the same gradient", from.name, to.name))?;
        let elements = to.shard.as_ref().map_or(0, |shard| replica_part(shard, self.context));
        for access in [part, sum] {
            let accessed = access.extent.rows * access.extent.columns;
            ensure(accessed == elements, || {
                format!("adds {accessed} elements, but a replica has {elements}")
            })?;
        }
        let contents = |id: BufferId| self.contents[id.0 as usize];
        let contents = match (contents(part.buffer), contents(sum.buffer)) {
            (BufferContents::Unknown, _) | (_, BufferContents::Unknown) => BufferContents::Unknown,
            (BufferContents::ReplicaPart(part), BufferContents::ReplicaPart(sum)) => {
                ensure(sum.value == AbstractValue::Zero, || {
                    format!("adds a microbatch to `{}` twice", to.name)
                })?;
                BufferContents::ReplicaPart(AbstractState { dtype: sum.dtype, ..part })
            }
            (_, BufferContents::ReplicaPart(_)) => {
                return fault(format!("adds `{}` before its reduction", from.name));
            }
            _ => return fault(format!("adds a part to `{}`, which is whole", to.name)),
        };
        self.mark_read(part.buffer);
        self.write(at, instr, sum.buffer, contents)
    }

    /// Zeros, to which the instructions of the backward pass add.
    fn zero_microbatch_gradient(&mut self, at: usize, instr: &Instr) -> CheckResult {
        let ([], [written]) = (&instr.reads[..], &instr.writes[..]) else {
            return fault("needs no operand and one result");
        };
        self.check_whole(written)?;
        let buffer = self.stage.buffer(written.buffer);
        let Some(shard) = &buffer.shard else { return fault("zeroes no gradient") };
        let (rows, columns) = sharded_extents(shard, self.context.tensor_size());
        self.zeroed_gradients.insert(written.buffer);
        let zero = AbstractState::new(AbstractValue::Zero, rows, columns, buffer.extent.dtype);
        self.write(at, instr, written.buffer, BufferContents::Tensor(zero))?;
        // A linear writes over the zeros, except for the zeros of the padding.
        self.mark_read(written.buffer);
        Ok(())
    }
}
