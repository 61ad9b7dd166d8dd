//! Execution of a step on one device: for each instruction its operands in the arena, and a call of a
//! kernel.

mod attention;
mod collective;
mod copies;
mod elementwise;
mod fused;
mod gemm;
mod latent;
mod latent_crossing;
mod operands;
mod optimizer;
mod qk_norm;
mod rms_norm;
mod transfer;
mod vocabulary;

use narrows_plan::program::{Action, Phase};
use narrows_runtime::{ScheduledInstruction, TimeCategory, pass_parts};

use crate::abort::StopReason;
use crate::device::CpuDevice;

pub(crate) use optimizer::gradient_square_sum;

/// Executes the passes of a step that its task includes.
pub(crate) fn run_step(device: &mut CpuDevice) -> Result<(), StopReason> {
    let stage = device.stage;
    let task = device.step.task;
    for part in pass_parts(stage).filter(|part| task.includes(part.pass.phase)) {
        if part.pass.phase != Phase::Step && part.instructions.start == 0 {
            load_tokens(device, part.pass.microbatch);
            device.clock.read(TimeCategory::Other);
        }
        let categories = &device.categories.of(part.pass.chunk_phase())[part.instructions.clone()];
        for (scheduled, category) in part.scheduled(stage).zip(categories) {
            let start = device.clock.last_reading();
            run_instruction(device, &scheduled)?;
            device.clock.end_instruction(*category, start);
        }
    }
    Ok(())
}

fn run_instruction(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let instr = scheduled.instr;
    match &instr.action {
        Action::Gemm(gemm) => gemm::run(device, scheduled, gemm)?,
        Action::Attention(attention) => attention::run(device, scheduled, attention)?,
        Action::Fused(op) => fused::run(device, scheduled, *op)?,
        Action::Collective(collective) => collective::run(device, scheduled, collective)?,
        Action::Send(transfer) => transfer::send(device, scheduled, transfer)?,
        Action::Receive(transfer) => transfer::receive(device, scheduled, transfer)?,
    }
    device.report.count_instruction(instr.action.name());
    Ok(())
}

/// Copies the token ids and targets of this device's rows of a microbatch to the input buffers.
fn load_tokens(device: &mut CpuDevice, microbatch: u64) {
    for buffer in &device.stage.buffers {
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
