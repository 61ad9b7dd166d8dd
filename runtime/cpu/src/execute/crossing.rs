//! What a latent that crosses between blocks passes through.

use narrows_plan::model::Activation;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{view, view_mut, with_scratch, write};
use crate::kernels::{
    LayerNorm, LayerNormGradients, LayerNormSaved, MatrixView, TensorGate, TensorGateGradients,
    layer_norm_backward, layer_norm_forward, tensor_gate_backward, tensor_gate_forward,
};

/// ε of the LayerNorm over a crossed latent: PyTorch's default, with which LaX is published.
const EPSILON: f32 = 1e-5;

fn layer_norm(weight: &[f32], phi: Activation) -> LayerNorm<'_> {
    let (scale, bias) = weight.split_at(weight.len() / 2);
    LayerNorm { scale, bias, epsilon: EPSILON, phi }
}

pub fn norm(device: &mut CpuDevice, ready: &ResolvedInstr, phi: Activation) -> Result<(), Stop> {
    let parallel = device.parallel;
    let (read, written) = (ready.instr.reads[0].extent, ready.instr.writes[0].extent);
    let mut operands = device.operands(ready)?;
    let by = layer_norm(operands.read(1), phi);
    let z = view_mut(operands.write(0), written);
    layer_norm_forward(view(operands.read(0), read), by, z, parallel);
    Ok(())
}

pub fn norm_backward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    phi: Activation,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    let reads = &ready.instr.reads;
    if reads.len() > 4 {
        return Err(device.unfit(ready, "adds to a gradient that nothing else contributes to"));
    }
    let (dz, v) = (reads[0].extent, reads[1].extent);
    with_scratch(
        device,
        parallel.reduction_scratch_elements(2 * v.columns as usize),
        |device, scratch| {
            let mut operands = device.operands(ready)?;
            let by = layer_norm(operands.read(2), phi);
            let saved =
                LayerNormSaved { dz: view(operands.read(0), dz), v: view(operands.read(1), v) };
            let dv = view_mut(operands.write(0), v);
            let weight = operands.write(1);
            let (dscale, dbias) = weight.split_at_mut(weight.len() / 2);
            let made = LayerNormGradients { dv, dscale, dbias, scratch };
            layer_norm_backward(saved, by, made, parallel);
            Ok(())
        },
    )
}

fn gate(weight: &[f32], (a, b): (usize, usize)) -> TensorGate<'_> {
    let (u, v) = weight.split_at(a * a);
    TensorGate { u: MatrixView::new(u, a, a), v: MatrixView::new(v, b, b) }
}

pub fn gate_forward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    sides: (u64, u64),
) -> Result<(), Stop> {
    let (sides, parallel) = ((sides.0 as usize, sides.1 as usize), device.parallel);
    let tokens = ready.instr.reads[0].extent.rows as usize;
    with_scratch(
        device,
        TensorGate::scratch_elements_for(sides, sides, parallel),
        |device, scratch| {
            let mut operands = device.operands(ready)?;
            let (h, by) = (operands.read(0), gate(operands.read(1), sides));
            let g = operands.write(0);
            tensor_gate_forward(tokens, by, h, g, write(false), scratch, parallel);
            Ok(())
        },
    )
}

pub fn gate_backward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    sides: (u64, u64),
) -> Result<(), Stop> {
    let (sides, parallel) = ((sides.0 as usize, sides.1 as usize), device.parallel);
    let tokens = ready.instr.reads[0].extent.rows as usize;
    let add = ready.instr.reads.len() > 4;
    with_scratch(
        device,
        TensorGate::scratch_elements_for(sides, sides, parallel),
        |device, scratch| {
            let mut operands = device.operands(ready)?;
            let (dg, h, by) = (operands.read(0), operands.read(1), gate(operands.read(2), sides));
            let dh = operands.write(0);
            let (du, dv) = operands.write(1).split_at_mut(sides.0 * sides.0);
            let made = TensorGateGradients { dh, write: write(add), du, dv };
            tensor_gate_backward(tokens, by, (h, dg), made, scratch, parallel);
            Ok(())
        },
    )
}
