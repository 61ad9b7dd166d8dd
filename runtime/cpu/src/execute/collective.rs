//! Collectives, over any axis. What they move is counted where it is moved.

use narrows_plan::Bytes;
use narrows_plan::kernel::Collective;
use narrows_plan::program::CollectiveOp;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use narrows_runtime::bytes_sent_per_member;

pub fn run(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    exchange: &CollectiveOp,
) -> Result<(), Stop> {
    let links = device.links;
    let Some(group) = links.group(&device.at, &exchange.group, &device.context.mesh) else {
        return Err(device.unfit(ready, "names a group that the mesh does not have"));
    };
    let (kind, reduction) = (exchange.kind, exchange.reduction);
    let count = ready.instr.writes.len();
    let in_place = ready.instr.reads.first() == ready.instr.writes.first();
    let members = group.members();
    let payload_of = |numbers: usize| Collective {
        kind: exchange.kind,
        payload: Bytes(4 * numbers as u64),
        group: exchange.group,
    };
    let mut numbers = 0;
    let mut operands = device.operands(ready)?;
    for port in 0..count {
        let made = operands.write(port);
        let moved = if in_place {
            group.in_place(made, kind, reduction)?
        } else {
            group.between(operands.read(port), made, kind, reduction)?
        };
        let equal_parts = moved.whole.is_multiple_of(members * members);
        let taken = Bytes(4 * moved.received as u64);
        debug_assert!(!equal_parts || bytes_sent_per_member(&payload_of(moved.whole)) == taken);
        numbers += moved.whole;
    }
    debug_assert_eq!(exchange.group.size, members as u64);
    device.report.count_collective(exchange.axis, &payload_of(numbers));
    Ok(())
}
