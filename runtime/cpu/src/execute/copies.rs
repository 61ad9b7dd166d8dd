//! Copies before and after the collective of a reshard.

use narrows_plan::program::Access;
use narrows_plan::{Axis, Dim};
use narrows_runtime::ScheduledInstruction;

use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{PartitionShape, pack_shards, slice_shard, unpack_shards};

pub(crate) enum ShardCopyKind {
    Pack,
    Unpack,
    Slice,
}

/// The largest number of tensors side by side in a buffer.
const SECTIONS_MAX: usize = 8;

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    (dim, axis): (Dim, Axis),
    kind: ShardCopyKind,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    // The shape is that of the whole local tensor.
    let whole = match kind {
        ShardCopyKind::Pack | ShardCopyKind::Slice => &scheduled.instr.reads[0],
        ShardCopyKind::Unpack => &scheduled.instr.writes[0],
    };
    let mut widths = [0; SECTIONS_MAX];
    let sections = section_widths(device, whole, &mut widths);
    let tokens = device.token_rows(whole.extent.rows);
    let shape = PartitionShape {
        sequences: tokens.sequences,
        positions: tokens.positions.count,
        sections,
        dim,
        is_zigzag: axis == Axis::Context && device.program.context.has_zigzag_positions(),
        shards: device.program.context.axis_size(axis) as usize,
    };
    let shard = device.coordinates.tensor as usize;
    let mut operands = device.operands(scheduled)?;
    let (source, target) = (operands.read(0), operands.write(0));
    match kind {
        ShardCopyKind::Pack => pack_shards(shape, source, target, parallel),
        ShardCopyKind::Unpack => unpack_shards(shape, source, target, parallel),
        ShardCopyKind::Slice => slice_shard(shape, shard, source, target, parallel),
    }
    Ok(())
}

/// Widths of the sections of an operand on this device. A buffer without sections, or with too many,
/// counts as one.
fn section_widths<'w>(
    device: &CpuDevice,
    access: &Access,
    widths: &'w mut [usize; SECTIONS_MAX],
) -> &'w [usize] {
    let sections = &device.stage.buffer(access.buffer).sections;
    let columns = access.extent.columns;
    let whole: u64 = sections.iter().sum();
    if sections.is_empty() || sections.len() > widths.len() {
        widths[0] = columns as usize;
        return &widths[..1];
    }
    for (local, width) in widths.iter_mut().zip(sections) {
        *local = (width * columns / whole) as usize;
    }
    &widths[..sections.len()]
}
