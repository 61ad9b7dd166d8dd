//! Collectives along any mesh axis, on the thread of the device or on its communication thread.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use narrows_plan::Bytes;
use narrows_plan::kernel::Collective;
use narrows_plan::program::{Action, CollectiveFunction, CollectiveOp};
use narrows_runtime::process_group::CollectiveOperands;
use narrows_runtime::session::{MeshCoordinates, ModelProgram};
use narrows_runtime::{ScheduledInstruction, bytes_sent_per_member};

use crate::abort::StopReason;
use crate::arena::{ArenaOperands, SharedArena};
use crate::communication::Job;
use crate::device::{CpuDevice, DeviceSite, OperandRanges};
use crate::device_links::DeviceLinks;

pub(crate) fn run(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    op: &CollectiveOp,
) -> Result<(), StopReason> {
    let site = device.site();
    run_collective(&site, scheduled, op, device.operands(scheduled)?)?;
    count(device, scheduled, op);
    Ok(())
}

/// A device, as its communication thread executes collectives on it.
pub(crate) struct CommunicationContext {
    pub model_program: Arc<ModelProgram>,
    pub coordinates: MeshCoordinates,
    pub links: Arc<DeviceLinks>,
    pub arena: SharedArena,
}

/// Executes a collective on the communication thread.
pub(crate) fn run_job(context: &mut CommunicationContext, job: Job) -> Result<(), StopReason> {
    let CommunicationContext { model_program, coordinates, links, arena } = context;
    let program = model_program.program();
    let stage = &program.stages[coordinates.stage as usize];
    let Job { pass, slot, index, .. } = job;
    let instr = &stage.instructions(pass.chunk_phase())[index];
    let scheduled = ScheduledInstruction { instr, pass, slot };
    let site = DeviceSite { coordinates: *coordinates, program, stage, links };
    let Action::Collective(op) = &instr.action else {
        return Err(site.unsupported(&scheduled, "it is not a collective"));
    };
    let range = |access: &_| site.operand_range(&scheduled, access);
    let reads = OperandRanges::of(&instr.reads, range);
    let writes = OperandRanges::of(&instr.writes, range);
    // SAFETY: the thread of the device keeps away until it has waited, as `hand_over` requires.
    match unsafe { arena.operands(reads.as_slice(), writes.as_slice()) } {
        Some(operands) => run_collective(&site, &scheduled, op, operands),
        None => Err(site.invalid_operands(&scheduled)),
    }
}

/// Executes a collective.
fn run_collective(
    site: &DeviceSite,
    scheduled: &ScheduledInstruction,
    op: &CollectiveOp,
    mut operands: ArenaOperands,
) -> Result<(), StopReason> {
    let Some(communicator) = site.links.communicator(&op.group) else {
        return Err(site.unsupported(scheduled, "its device group is not connected"));
    };
    let in_place = is_in_place(scheduled);
    debug_assert_eq!(op.group.size, communicator.size() as u64);
    for index in 0..scheduled.instr.writes.len() {
        let target = operands.write(index);
        let source = if in_place { &[] } else { operands.read(index) };
        let whole = whole_elements(op, source.len().max(target.len()));
        let operands = match in_place {
            true => CollectiveOperands::InPlace(target),
            false => CollectiveOperands::OutOfPlace { source, target },
        };
        let volume = communicator.run(operands, op.function)?;
        // The counts of the report are those of the code that moves the bytes.
        debug_assert_eq!(volume.whole, whole);
        let size = communicator.size();
        let received = Bytes(4 * volume.received as u64);
        debug_assert!(
            !whole.is_multiple_of(size * size)
                || bytes_sent_per_member(&collective(op, whole)) == received
        );
    }
    Ok(())
}

/// Counts the bytes of a collective.
pub(crate) fn count(device: &mut CpuDevice, scheduled: &ScheduledInstruction, op: &CollectiveOp) {
    let in_place = is_in_place(scheduled);
    let (site, instr) = (device.site(), scheduled.instr);
    let len = |range: Range<usize>| range.end.saturating_sub(range.start);
    let elements = instr.writes.iter().enumerate().map(|(index, write)| {
        let target = len(site.operand_range(scheduled, write));
        let read = instr.reads.get(index).filter(|_| !in_place);
        let source = read.map_or(0, |read| len(site.operand_range(scheduled, read)));
        whole_elements(op, source.max(target))
    });
    device.report.count_collective(op.axis, &collective(op, elements.sum()));
}

fn is_in_place(scheduled: &ScheduledInstruction) -> bool {
    scheduled.instr.reads.first() == scheduled.instr.writes.first()
}

/// Elements of the whole, unsharded tensor of which the longer operand of a member has this many.
fn whole_elements(op: &CollectiveOp, operand: usize) -> usize {
    match op.function {
        CollectiveFunction::AllToAll => operand * op.group.size as usize,
        CollectiveFunction::AllReduce(_)
        | CollectiveFunction::ReduceScatter
        | CollectiveFunction::AllGather => operand,
    }
}

fn collective(op: &CollectiveOp, elements: usize) -> Collective {
    Collective { kind: op.kind(), payload: Bytes(4 * elements as u64), group: op.group }
}
