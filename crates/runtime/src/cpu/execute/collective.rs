//! Collectives, over any axis.

use narrows_plan::kernel::CollectiveKind;
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
    let mut operands = device.operands(ready)?;
    for port in 0..count {
        let made = operands.write(port);
        if in_place {
            group.in_place(me, made, kind, &links.abort)?;
        } else {
            group.between(me, operands.read(port), made, kind, &links.abort)?;
        }
    }
    Ok(())
}
