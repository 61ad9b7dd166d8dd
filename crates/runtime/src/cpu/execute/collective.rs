//! Collectives, over any axis. What they move is counted from the operands that were moved.

use narrows_plan::Bytes;
use narrows_plan::kernel::{Collective, CollectiveKind};
use narrows_plan::program::Exchange;

use super::super::device::{Device, Ready, Stop};
use super::super::exchange::Kind;

pub fn run(device: &mut Device, ready: &Ready, exchange: &Exchange) -> Result<(), Stop> {
    let links = device.links;
    let Some((group, me)) = links.group(&device.at, &exchange.group, &device.context.mesh) else {
        return Err(device.unfit(ready, "names a group that the mesh does not have"));
    };
    let kind = match exchange.kind {
        CollectiveKind::AllReduce => Kind::AllReduce(exchange.reduction),
        CollectiveKind::ReduceScatter => Kind::ReduceScatter,
        CollectiveKind::AllGather => Kind::AllGather,
        CollectiveKind::AllToAll => Kind::AllToAll,
    };
    let count = ready.instr.writes.len();
    let in_place = ready.instr.reads.first() == ready.instr.writes.first();
    let members = group.members() as u64;
    let mut numbers = 0;
    let mut operands = device.operands(ready)?;
    for port in 0..count {
        let made = operands.write(port);
        if in_place {
            numbers += made.len() as u64;
            group.in_place(me, made, kind, &links.abort)?;
        } else {
            let source = operands.read(port);
            // The whole tensor is the longer side; members exchange parts of equal shards.
            let shards = if kind == Kind::AllToAll { members } else { 1 };
            numbers += source.len().max(made.len()) as u64 * shards;
            group.between(me, source, made, kind, &links.abort)?;
        }
    }
    let group = exchange.group;
    debug_assert_eq!(group.size, members);
    let moved = Collective { kind: exchange.kind, payload: Bytes(4 * numbers), group };
    device.report.count_collective(exchange.axis, &moved);
    Ok(())
}
