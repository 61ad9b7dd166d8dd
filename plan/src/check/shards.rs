//! Checks of parameter shards: the shards of all devices must tile each parameter.

use crate::context::Context;
use crate::layout::WeightSplit;
use crate::model::WeightShape;
use crate::program::{Buffer, BufferRole, ParameterShard, StageProgram};
use crate::{DType, Dim};

use super::error::{CheckErrors, CheckResult, ensure, fault, fault_hint};
use super::lattice::ShardedExtent;

pub(super) fn check_shards(
    index: usize,
    stage: &StageProgram,
    context: &Context,
    errors: &mut CheckErrors,
) {
    for buffer in &stage.buffers {
        let parameter = buffer.role.is_parameter();
        let result = match &buffer.shard {
            Some(shard) if parameter => check_shard(buffer, shard, context),
            None if !parameter => Ok(()),
            Some(_) => fault("has a shard, but is not a parameter, gradient or optimizer state"),
            None => fault("is a parameter, gradient or optimizer state, but has no shard"),
        };
        if let Err(mut fault) = result {
            fault.problem = format!("`{}`: {}", buffer.name, fault.problem);
            errors.push_stage(index, fault);
        }
    }
}

fn check_shard(buffer: &Buffer, shard: &ParameterShard, context: &Context) -> CheckResult {
    let devices = context.tensor_size();
    let dtype = match buffer.role {
        role if role.is_weight() => context.compute_dtype(),
        BufferRole::RoundedGradient => context.grad_reduce_dtype.dtype(),
        _ => DType::F32,
    };
    let is_rounded = buffer.role == BufferRole::MicrobatchGradient
        && buffer.extent.dtype == context.grad_reduce_dtype.dtype();
    ensure(buffer.extent.dtype == dtype || is_rounded, || {
        format!("is stored as {}, not as {}", buffer.extent.dtype.name(), dtype.name())
    })?;
    ensure(!shard.members.is_empty() && shard.members.len() == shard.offset_stride.len(), || {
        "every member of a shard needs one offset".into()
    })?;
    let widest = shard.members.iter().flat_map(|member| [member.rows, member.columns]).max();
    ensure(widest.is_some_and(|side| side <= 1 << 28) && shard.members.len() <= 4, || {
        "has more than four members, or members of more than 2²⁸ rows or columns".into()
    })?;
    for (WeightShape { weight: name, rows, columns }, stride) in
        shard.members.iter().zip(&shard.offset_stride)
    {
        let (size, side) = match shard.split {
            WeightSplit::Whole => (0, "elements"),
            WeightSplit::Rows => (*rows, "rows"),
            WeightSplit::Columns => (*columns, "columns"),
        };
        ensure(size.is_multiple_of(devices), || {
            format!("the {size} {side} of `{name}` do not divide into {devices} equal parts")
        })?;
        if *stride != size / devices {
            return fault_hint(
                format!(
                    "device i begins at {stride}·i of the {size} {side} of `{name}`, so {devices} devices leave gaps or overlap"
                ),
                format!("{}", size / devices),
            );
        }
        ensure(*rows == shard.members[0].rows, || {
            format!(
                "`{name}` cannot share a buffer with `{}`: their rows differ",
                shard.members[0].weight
            )
        })?;
    }
    let part = replica_part(shard, context);
    let expected = if buffer.is_replica_part(context) { part } else { part * context.shard_size };
    let elements = buffer.extent.rows * buffer.extent.columns;
    ensure(elements == expected, || {
        format!("has {elements} elements, but its shard of the parameter has {expected}")
    })
}

/// Elements of a parameter on one device of the tensor axis.
fn local_elements(shard: &ParameterShard, context: &Context) -> u64 {
    let devices = context.tensor_size();
    let (rows, columns) = sharded_extents(shard, devices);
    rows.local(devices) * columns.local(devices)
}

/// Elements of the part of a parameter that one replica updates, on one device of the tensor axis.
pub(super) fn replica_part(shard: &ParameterShard, context: &Context) -> u64 {
    local_elements(shard, context).div_ceil(context.shard_size)
}

/// Whether the parts of the replicas have more elements than the parameter.
pub(super) fn is_padded(shard: &ParameterShard, context: &Context) -> bool {
    !local_elements(shard, context).is_multiple_of(context.shard_size)
}

/// Rows and columns of the members side by side, with their sharding over the tensor axis.
pub(super) fn sharded_extents(
    shard: &ParameterShard,
    devices: u64,
) -> (ShardedExtent, ShardedExtent) {
    let sharded = |split| (shard.split == split && devices > 1).then_some(Dim::Feature);
    let rows = shard.members.first().map_or(0, |member| member.rows);
    let columns = shard.members.iter().map(|member| member.columns).sum();
    (
        ShardedExtent { size: rows, sharded: sharded(WeightSplit::Rows) },
        ShardedExtent { size: columns, sharded: sharded(WeightSplit::Columns) },
    )
}
