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
mod ring_attention;
mod rms_norm;
mod step;
mod transfer;
mod vocabulary;

use narrows_plan::program::Action;
use narrows_runtime::ScheduledInstruction;

use crate::abort::StopReason;
use crate::device::CpuDevice;

pub(crate) use collective::{CommunicationContext, run_job};
pub(crate) use optimizer::gradient_square_sum;
pub(crate) use step::run_step;

fn run_instruction(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let instr = scheduled.instr;
    match &instr.action {
        Action::Gemm(gemm) => gemm::run(device, scheduled, gemm)?,
        Action::Attention(op) => match op.rotation() {
            Some(group) => ring_attention::run(device, scheduled, op, group)?,
            None => attention::run(device, scheduled, op)?,
        },
        Action::Fused(op) => fused::run(device, scheduled, *op)?,
        Action::Collective(collective) => collective::run(device, scheduled, collective)?,
        Action::Send(transfer) => transfer::send(device, scheduled, transfer)?,
        Action::Receive(transfer) => transfer::receive(device, scheduled, transfer)?,
    }
    device.report.count_instruction(instr.action.name());
    Ok(())
}
