//! Collectives along any mesh axis. The bytes that they move are counted where they are moved.

use narrows_plan::Bytes;
use narrows_plan::kernel::Collective;
use narrows_plan::program::CollectiveOp;
use narrows_runtime::process_group::CollectiveOperands;
use narrows_runtime::{ScheduledInstruction, bytes_sent_per_member};

use crate::abort::StopReason;
use crate::device::CpuDevice;

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: &CollectiveOp,
) -> Result<(), StopReason> {
    let links = device.links;
    let Some(communicator) = links.communicator(&op.group) else {
        return Err(device.unsupported(scheduled, "its device group is not connected"));
    };
    let in_place = scheduled.instr.reads.first() == scheduled.instr.writes.first();
    let size = communicator.size();
    let collective = |elements: usize| Collective {
        kind: op.kind(),
        payload: Bytes(4 * elements as u64),
        group: op.group,
    };
    let mut elements = 0;
    let mut operands = device.operands(scheduled)?;
    for index in 0..scheduled.instr.writes.len() {
        let target = operands.write(index);
        let operands = if in_place {
            CollectiveOperands::InPlace(target)
        } else {
            CollectiveOperands::OutOfPlace { source: operands.read(index), target }
        };
        let volume = communicator.run(operands, op.function)?;
        let equal_shards = volume.whole.is_multiple_of(size * size);
        let received = Bytes(4 * volume.received as u64);
        debug_assert!(
            !equal_shards || bytes_sent_per_member(&collective(volume.whole)) == received
        );
        elements += volume.whole;
    }
    debug_assert_eq!(op.group.size, size as u64);
    device.report.count_collective(op.axis, &collective(elements));
    Ok(())
}
