//! The gradient norm and AdamW.

use std::slice;

use narrows_plan::WeightSplit;
use narrows_plan::program::ParameterUpdate;
use narrows_runtime::ScheduledInstruction;
use narrows_runtime::session::{OptimizerUpdate, StepTask};

use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{self, AdamWStep, ParameterState, adamw_update, adamw_update_and_zero};

/// Adds the sum of squares of one gradient after the other to the last operand. A gradient that all devices of the tensor
/// axis have whole is counted by the first of them only.
pub(crate) fn square_sum(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let Some((_, gradients)) = scheduled.instr.reads.split_last() else { return Ok(()) };
    for gradient in gradients {
        let shard = &device.stage.buffer(gradient.buffer).shard;
        let is_whole = shard.as_ref().is_some_and(|shard| shard.split == WeightSplit::Whole);
        if is_whole && device.coordinates.tensor > 0 {
            continue;
        }
        let accesses = (slice::from_ref(gradient), &scheduled.instr.writes[..]);
        let mut operands = device.some_operands_at(scheduled, accesses, |device, access| {
            device.operand_range(scheduled, access)
        })?;
        let squares = kernels::gradient_square_sum(operands.read(0), parallel);
        operands.write(0)[0] += squares as f32;
    }
    Ok(())
}

/// Updates one parameter after the other.
pub(crate) fn adamw(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
) -> Result<(), StopReason> {
    let StepTask::Update(update) = device.step.task else { return Ok(()) };
    let square_sum = gradient_square_sum(device);
    if !square_sum.is_finite() {
        // All devices have the same sum, so none of them updates anything. The session reports it.
        return Ok(());
    }
    for parameter in scheduled.instr.parameter_updates() {
        let Some(parameter) = parameter else {
            return Err(device.unsupported(scheduled, "its operands are not those of updates"));
        };
        update_parameter(device, scheduled, (&parameter, &update, square_sum))?;
    }
    Ok(())
}

/// Updates a parameter. The gradient is zeroed whole; with ZeRO, the other operands are the part that this replica updates.
fn update_parameter(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    (parameter, update, square_sum): (&ParameterUpdate, &OptimizerUpdate, f32),
) -> Result<(), StopReason> {
    let ParameterUpdate { gradient: read_gradient, weight, zeroed, states } = *parameter;
    let parallel = device.parallel;
    let adamw = AdamWStep::new(update, device.update_groups[&weight.buffer], square_sum);
    let [first, second] = states else {
        return Err(device.unsupported(scheduled, "its parameters have a master copy"));
    };
    let elements = weight.extent.columns as usize;
    let is_whole_gradient = zeroed.is_some_and(|zeroed| zeroed.extent != read_gradient.extent);
    let position = device.program.context.shard_position(device.coordinates.replica) as usize;
    let start = if is_whole_gradient { position * elements } else { 0 };
    // A gradient that is zeroed is a written operand, which contains the part that is read.
    let written = [weight, *first, *second, zeroed.unwrap_or(read_gradient)];
    let (read, written) = match zeroed {
        Some(_) => (&[][..], &written[..]),
        None => (&[read_gradient][..], &written[..3]),
    };
    let mut operands = device.some_operands_at(scheduled, (read, written), |device, access| {
        device.operand_range(scheduled, access)
    })?;
    let parameter = ParameterState {
        weights: operands.write(0),
        first_moment: operands.write(1),
        second_moment: operands.write(2),
    };
    match zeroed {
        Some(_) => {
            let updated = start..start + elements;
            adamw_update_and_zero(parameter, operands.write(3), updated, adamw, parallel);
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
