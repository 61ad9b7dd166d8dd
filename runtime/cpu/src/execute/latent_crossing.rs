//! LayerNorm and gate of latents that cross between blocks.

use narrows_plan::model::Activation;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, with_scratch, write_mode};
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    self, LayerNorm, LayerNormGradients, LayerNormSaved, MatrixView, TensorGate,
    TensorGateGradients, layer_norm_backward, layer_norm_forward,
};

/// The weight is the scale followed by the bias.
fn layer_norm(weight: &[f32], epsilon: f32, activation: Activation) -> LayerNorm<'_> {
    let (scale, bias) = weight.split_at(weight.len() / 2);
    LayerNorm { scale, bias, epsilon, phi: activation }
}

fn epsilon(device: &CpuDevice) -> f32 {
    device.program.constants.latent_norm_epsilon as f32
}

pub(crate) fn norm(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let (parallel, epsilon) = (device.parallel, epsilon(device));
    let (input, output) = (scheduled.instr.reads[0].extent, scheduled.instr.writes[0].extent);
    let mut operands = device.operands(scheduled)?;
    let norm = layer_norm(operands.read(1), epsilon, activation);
    let z = view_mut(operands.write(0), output);
    layer_norm_forward(view(operands.read(0), input), norm, z, parallel);
    Ok(())
}

pub(crate) fn norm_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let (parallel, epsilon) = (device.parallel, epsilon(device));
    let reads = &scheduled.instr.reads;
    if reads.len() > 4 {
        return Err(device.unsupported(scheduled, "it accumulates the gradient of a LayerNorm"));
    }
    let (dz_extent, v_extent) = (reads[0].extent, reads[1].extent);
    with_scratch(
        device,
        parallel.reduction_scratch_elements(2 * v_extent.columns as usize),
        |device, scratch| {
            let mut operands = device.operands(scheduled)?;
            let norm = layer_norm(operands.read(2), epsilon, activation);
            let (dz, v) = (view(operands.read(0), dz_extent), view(operands.read(1), v_extent));
            let dv = view_mut(operands.write(0), v_extent);
            let dweight = operands.write(1);
            let (dscale, dbias) = dweight.split_at_mut(dweight.len() / 2);
            let gradients = LayerNormGradients { dv, dscale, dbias, scratch };
            layer_norm_backward(LayerNormSaved { dz, v }, norm, gradients, parallel);
            Ok(())
        },
    )
}

/// The weight is the matrix u, `a × a`, followed by v, `b × b`.
fn gate(weight: &[f32], (a, b): (usize, usize)) -> TensorGate<'_> {
    let (u, v) = weight.split_at(a * a);
    TensorGate { u: MatrixView::new(u, a, a), v: MatrixView::new(v, b, b) }
}

pub(crate) fn tensor_gate(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    sides: (u64, u64),
) -> Result<(), StopReason> {
    let (sides, parallel) = ((sides.0 as usize, sides.1 as usize), device.parallel);
    let tokens = scheduled.instr.reads[0].extent.rows as usize;
    with_scratch(
        device,
        TensorGate::scratch_elements_for(sides, sides, parallel),
        |device, scratch| {
            let mut operands = device.operands(scheduled)?;
            let (h, gate) = (operands.read(0), gate(operands.read(1), sides));
            let g = operands.write(0);
            kernels::tensor_gate_forward(tokens, gate, h, g, write_mode(false), scratch, parallel);
            Ok(())
        },
    )
}

pub(crate) fn tensor_gate_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    sides: (u64, u64),
) -> Result<(), StopReason> {
    let (sides, parallel) = ((sides.0 as usize, sides.1 as usize), device.parallel);
    let tokens = scheduled.instr.reads[0].extent.rows as usize;
    let accumulate = scheduled.instr.reads.len() > 4;
    with_scratch(
        device,
        TensorGate::scratch_elements_for(sides, sides, parallel),
        |device, scratch| {
            let mut operands = device.operands(scheduled)?;
            let (dg, h) = (operands.read(0), operands.read(1));
            let gate = gate(operands.read(2), sides);
            let dh = operands.write(0);
            let (du, dv) = operands.write(1).split_at_mut(sides.0 * sides.0);
            let gradients = TensorGateGradients { dh, write: write_mode(accumulate), du, dv };
            kernels::tensor_gate_backward(tokens, gate, (h, dg), gradients, scratch, parallel);
            Ok(())
        },
    )
}
