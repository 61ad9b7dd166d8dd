//! The gradient norm and AdamW.

use narrows_plan::WeightSplit;
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::session::{OptimizerUpdate, StepTask};

use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{self, AdamWStep, ParameterState, adamw_update, adamw_update_and_zero};

/// Adds the sum of squares of a gradient to the operand. A gradient that all devices of the tensor
/// axis have whole is counted by the first of them only.
pub(crate) fn square_sum(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let shard = &device.stage.buffer(scheduled.instr.reads[0].buffer).shard;
    let is_whole = shard.as_ref().is_some_and(|shard| shard.split == WeightSplit::Whole);
    if is_whole && device.coordinates.tensor > 0 {
        return Ok(());
    }
    let mut operands = device.operands(scheduled)?;
    let squares = kernels::gradient_square_sum(operands.read(0), parallel);
    operands.write(0)[0] += squares as f32;
    Ok(())
}

/// Operands read: gradient, moments, weight. Operands written: weight, gradient, moments, or weight, moments where the next
/// step overwrites the gradient. The gradient is zeroed whole; with ZeRO, the others are the part of the parameter that this
/// replica updates.
pub(crate) fn adamw(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let StepTask::Update(update) = device.step.task else { return Ok(()) };
    let OptimizerUpdate { optimizer, coefficients, .. } = update;
    let parallel = device.parallel;
    let square_sum = gradient_square_sum(device);
    if !square_sum.is_finite() {
        // All devices have the same sum, so none of them updates anything. The session reports it.
        return Ok(());
    }
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    let read_gradient = reads[0];
    let zeroed_gradient = scheduled.instr.zeroed_gradient().copied();
    let group = device.update_groups[&writes[0].buffer];
    let adamw = AdamWStep {
        gradient_factor: update.gradient_factor(f64::from(square_sum).sqrt()) as f32,
        learning_rate: coefficients.learning_rate as f32,
        rate_scale: coefficients.rate_scale(group),
        beta1: optimizer.beta1 as f32,
        beta2: optimizer.beta2 as f32,
        epsilon: coefficients.epsilon as f32,
        weight_decay: coefficients.decay_of(group) as f32,
        step: u32::try_from(coefficients.moment_steps).unwrap_or(u32::MAX),
    };
    let elements = writes[0].extent.columns as usize;
    let is_whole_gradient =
        zeroed_gradient.is_some_and(|zeroed| zeroed.extent != read_gradient.extent);
    let position = device.program.context.shard_position(device.coordinates.replica) as usize;
    let start = if is_whole_gradient { position * elements } else { 0 };
    // The kernel reads a gradient that it zeroes through the written operand, which contains the read one.
    let mut operands = device.operands_at(scheduled, |device, access| {
        if *access == read_gradient && is_whole_gradient {
            0..0
        } else {
            device.operand_range(scheduled, access)
        }
    })?;
    let first_state = writes.len() - 2;
    let parameter = ParameterState {
        weights: operands.write(0),
        first_moment: operands.write(first_state),
        second_moment: operands.write(first_state + 1),
    };
    match zeroed_gradient {
        Some(_) => {
            let updated = start..start + elements;
            adamw_update_and_zero(parameter, operands.write(1), updated, adamw, parallel);
        }
        None => adamw_update(parameter, operands.read(0), adamw, parallel),
    }
    Ok(())
}

/// The sum of squares of all gradients, after its reduction.
pub(crate) fn gradient_square_sum(device: &CpuDevice) -> f32 {
    let buffer = device.stage.buffer(device.stage.square_sum());
    let start = (buffer.offset / 4) as usize;
    device.arena.slice(start..start + 1)[0]
}
