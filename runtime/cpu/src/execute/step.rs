//! The instructions of a step on one device, in order, except for collectives that the program allows beside others: these go to the
//! communication thread, if the device has one.
//!
//! | collectives | handed over | waited for |
//! |---|---|---|
//! | within a pass, with overlapped instructions | in order, if nothing is pending | after the last overlapped instruction |
//! | gradient buckets | at their points in the last pass | before the rest of the step phase |
//! | gather buckets | at the end of the step | at their points in the next first pass, and before anything else reads weights |
//!
//! While a bucket is pending, collectives within the pass stay on the thread of the device: they would wait for the bucket. So do
//! collectives that run beside one over the data axis. One that uses the communicator of a pending collective waits for it, since a
//! communicator serves one thread at a time.
#![allow(unsafe_code)]

use narrows_plan::program::{Action, CollectiveOp, Instr, MicrobatchPass, Phase};
use narrows_runtime::{PartOrder, PassPart, ScheduledInstruction, TimeCategory, pass_parts};

use super::{collective, run_instruction};
use crate::abort::StopReason;
use crate::communication::{CommunicationThread, Job};
use crate::device::CpuDevice;

/// Executes the passes of a step that its task includes.
pub(crate) fn run_step(device: &mut CpuDevice) -> Result<(), StopReason> {
    let task = device.step.task;
    for part in pass_parts(device.stage).filter(|part| task.includes(part.pass.phase)) {
        run_part(device, &part)?;
    }
    if device.clock.records_spans() {
        // The spans of gathers belong to this step, so it ends with them.
        wait(device, CommunicationThread::wait)?;
        if let Some(communication) = &device.communication {
            communication.take_spans(|span| device.clock.set_span(span));
        }
    }
    Ok(())
}

fn run_part(device: &mut CpuDevice, part: &PassPart) -> Result<(), StopReason> {
    let (stage, in_step_phase) = (device.stage, part.pass.phase == Phase::Step);
    match part.order {
        PartOrder::AfterGathers(bucket) => {
            wait(device, |communication| communication.wait_for_gathers(bucket))?;
        }
        PartOrder::InOrder if in_step_phase => wait(device, CommunicationThread::wait)?,
        PartOrder::InOrder | PartOrder::BesideLastPass | PartOrder::BesideNextStep(_) => {}
    }
    let is_beside = matches!(part.order, PartOrder::BesideLastPass | PartOrder::BesideNextStep(_));
    if !in_step_phase && part.instructions.start == 0 {
        load_tokens(device, part.pass);
        device.clock.read(TimeCategory::Other);
    }
    let categories = &device.categories.of(part.pass.chunk_phase())[part.instructions.clone()];
    // The last of the collectives of this pass that are pending, one after the other, and the last instruction beside them.
    let mut pending: Option<(&Instr, usize)> = None;
    let instructions = part.instructions.clone().zip(part.scheduled(stage)).zip(categories);
    for ((index, scheduled), category) in instructions {
        if pending.is_some_and(|(_, last)| last < index) {
            wait(device, CommunicationThread::wait)?;
            pending = None;
        }
        if let Action::Collective(op) = &scheduled.instr.action
            && let Some(communication) = &device.communication
        {
            let overlapped = scheduled.instr.overlapped_instrs;
            let is_handed_over = is_beside
                || match pending {
                    // Collectives in sequence, of which one may read the result of the one before.
                    Some((before, _)) => {
                        before.collectives_in_sequence(std::slice::from_ref(scheduled.instr)) > 0
                    }
                    None => overlapped > 0 && communication.is_idle(),
                };
            if is_handed_over {
                hand_over(device, &scheduled, (index, op));
                if !is_beside {
                    pending = Some((scheduled.instr, index.saturating_add(overlapped)));
                }
                continue;
            }
            if communication.uses(&op.group) {
                wait(device, CommunicationThread::wait)?;
            }
        } else if is_beside {
            // A bucket is executed in order.
            wait(device, CommunicationThread::wait)?;
        }
        let start = device.clock.last_reading();
        run_instruction(device, &scheduled)?;
        device.clock.end_instruction(*category, start);
    }
    if pending.is_some() {
        wait(device, CommunicationThread::wait)?;
    }
    if let (PartOrder::BesideNextStep(bucket), Some(communication)) =
        (part.order, &mut device.communication)
    {
        communication.end_gather_bucket(bucket);
    }
    Ok(())
}

/// Hands a collective over to the communication thread, which the device has.
fn hand_over(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    (index, op): (usize, &CollectiveOp),
) {
    collective::count(device, scheduled, op);
    device.report.count_instruction(scheduled.instr.action.name());
    let ScheduledInstruction { pass, slot, .. } = *scheduled;
    let span = device.clock.reserve_span();
    if let Some(communication) = &mut device.communication {
        // SAFETY: `run_part` waits before it executes an instruction that the program does not allow beside the collective. A
        // bucket of gradients is waited for at the begin of the step phase, and gathers before their points in the next first
        // pass; between steps, the engine waits for them.
        unsafe { communication.hand_over(Job { pass, slot, index, group: op.group, span }) };
    }
}

/// Waits for the communication thread, if there is one. The time is that of an exposed collective.
fn wait(
    device: &mut CpuDevice,
    wait: impl FnOnce(&CommunicationThread) -> Result<(), StopReason>,
) -> Result<(), StopReason> {
    if let Some(communication) = &device.communication {
        wait(communication)?;
        device.clock.read(TimeCategory::CollectiveExposed);
    }
    Ok(())
}

/// Copies the token ids and targets of this device's rows of a pass's microbatches to the input buffers.
fn load_tokens(device: &mut CpuDevice, pass: MicrobatchPass) {
    let first = pass.microbatch * device.program.context.pass_microbatches();
    for (id, index) in device.stage.inputs() {
        let (buffer, microbatch) = (device.stage.buffer(id), first + index);
        let Some(ids) = device.step.input_ids(buffer) else { continue };
        let rows = device.token_rows(buffer.extent.rows);
        let start = (buffer.offset / 4) as usize;
        let target = device.arena.slice_mut(start..start + buffer.extent.rows as usize);
        let mut rest: &mut [u32] = bytemuck::cast_slice_mut(target);
        for source in rows.id_ranges(&device.program.context, &device.coordinates, microbatch) {
            let target = rest.split_off_mut(..source.len()).expect("a range for each row");
            target.copy_from_slice(&ids[source]);
        }
    }
}
