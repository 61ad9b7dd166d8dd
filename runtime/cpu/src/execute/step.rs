//! The optimizer.

use narrows_plan::program::Region;
use narrows_plan::strategy::Zero;

use narrows_runtime::session::OptimizerUpdate;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use crate::kernels::{AdamWStep, ParameterState, adamw_update, gradient_square_sum};

/// Adds the squares of a gradient, unless another device of the tensor axis counts them too.
pub fn square_sum(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let shard = &device.stage.buffer(ready.instr.reads[0].buffer).shard;
    let whole = shard.as_ref().is_some_and(|s| s.split == narrows_plan::emit::WeightSplit::Whole);
    if whole && device.at.tensor > 0 {
        return Ok(());
    }
    let mut operands = device.operands(ready)?;
    let squares = gradient_square_sum(operands.read(0), parallel);
    operands.write(0)[0] += squares as f32;
    Ok(())
}

/// Reads gradient, moments and weight; writes weight, the whole gradient and the moments.
pub fn adamw(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let Some(OptimizerUpdate { optimizer: options, coefficients, step }) = device.step.update
    else {
        return Ok(());
    };
    let parallel = device.parallel;
    let squares = square_sum_of(device);
    if !squares.is_finite() {
        // All devices see the same sum: none updates anything, and the session says so.
        return Ok(());
    }
    let weight = ready.instr.writes[0].buffer;
    let decays = device.decays.get(&weight).copied().unwrap_or(false);
    let numbers = AdamWStep {
        gradient_factor: options.clip_factor(f64::from(squares).sqrt()) as f32,
        learning_rate: coefficients.learning_rate as f32,
        beta1: options.beta1 as f32,
        beta2: options.beta2 as f32,
        epsilon: options.epsilon as f32,
        weight_decay: if decays { options.weight_decay as f32 } else { 0.0 },
        step: u32::try_from(step).unwrap_or(u32::MAX),
    };
    let count = ready.instr.writes[0].extent.columns as usize;
    let parted = device.context.zero == Zero::One;
    let begin = if parted { device.at.data as usize * count } else { 0 };
    // A part of the gradient that is read lies within the whole that is zeroed; where it is all of
    // it, it is worked on in place.
    let (read, zeroed) = (ready.instr.reads[0], ready.instr.writes[1]);
    let mut operands = device.operands_as(ready, |device, access| {
        if *access == read && read != zeroed { 0..0 } else { device.range(ready, access) }
    })?;
    let weights = operands.write(0);
    let gradient = operands.write(1);
    let parameter = ParameterState {
        weights,
        first_moment: operands.write(2),
        second_moment: operands.write(3),
    };
    adamw_update(parameter, gradient, begin..begin + count, numbers, parallel);
    Ok(())
}

/// The sum of all squared gradients, once it is reduced.
pub fn square_sum_of(device: &CpuDevice) -> f32 {
    let buffer = device
        .stage
        .buffers
        .iter()
        .find(|buffer| buffer.region == Region::Input && buffer.name == "square sum");
    let at = buffer.map_or(0, |buffer| (buffer.offset / 4) as usize);
    device.arena.slice(at..at + 1)[0]
}

/// Zeroes an operand.
pub fn fill(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let mut operands = device.operands(ready)?;
    crate::kernels::fill_zero(operands.write(0), parallel);
    Ok(())
}
