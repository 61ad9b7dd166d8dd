//! The fused passes: which kernel each is. Element-wise ones and copies are here.

use narrows_plan::Dim;
use narrows_plan::program::{Access, FusedOp};

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::{crossing, ends, latent, norm, step, view, view_mut};
use crate::kernels::{
    GatedProductSaved, PartitionShape, PositionRange, add, add_into, gated_product_backward,
    gated_product_forward, pack_shards, rope_backward, rope_forward, slice_shard, unpack_shards,
};
use narrows_plan::model::GatedProduct as Product;

pub fn run(device: &mut CpuDevice, ready: &ResolvedInstr, op: FusedOp) -> Result<(), Stop> {
    use FusedOp::*;
    match op {
        NormForward | NormStatistic | NormApply | NormOnline | NormScale => {
            norm::forward(device, ready, op)
        }
        NormBackward | NormBackwardStatistic | NormBackwardApply | NormOnlineBackward => {
            norm::backward(device, ready, op)
        }
        LatentForward { activation } => latent::forward(device, ready, activation),
        LatentRecover { activation } => latent::recover(device, ready, activation),
        LatentBackward { activation } => latent::backward(device, ready, activation),
        LatentRecoverBackward { activation } => latent::recover_backward(device, ready, activation),
        LatentNorm { activation } => crossing::norm(device, ready, activation),
        LatentNormBackward { activation } => crossing::norm_backward(device, ready, activation),
        TensorGate { a, b } => crossing::gate_forward(device, ready, (a, b)),
        TensorGateBackward { a, b } => crossing::gate_backward(device, ready, (a, b)),
        Rope { .. } => rope(device, ready, true),
        RopeBackward { .. } => rope(device, ready, false),
        GatedProduct { product } => gated_forward(device, ready, product),
        GatedProductBackward { product } => gated_backward(device, ready, product),
        Add => residual_add(device, ready),
        AddInto => accumulate(device, ready),
        Fill => step::fill(device, ready),
        Gather => ends::gather(device, ready),
        ScatterAdd => ends::scatter_add(device, ready),
        LossMaximum | LossSum | LossGradient => ends::loss(device, ready, op),
        Pack { dim } => copy(device, ready, dim, CopyKind::Pack),
        Unpack { dim } => copy(device, ready, dim, CopyKind::Unpack),
        Slice { dim } => copy(device, ready, dim, CopyKind::Slice),
        SquareSum => step::square_sum(device, ready),
        AdamW => step::adamw(device, ready),
    }
}

/// The rotated features are the first of each row.
fn rope(device: &mut CpuDevice, ready: &ResolvedInstr, forward: bool) -> Result<(), Stop> {
    let parallel = device.parallel;
    let part = ready.instr.writes[0];
    let whole = device.stage.buffer(part.buffer).extent;
    let tokens = device.tokens(part.extent.rows);
    let positions = PositionRange { first: tokens.first_position, count: tokens.positions };
    let Some(table) = device.rotary else {
        return Err(device.unfit(ready, "rotates, but the program has no heads"));
    };
    let mut operands = device.operands_as(ready, |device, access| device.whole(ready, access))?;
    let x = view_mut(operands.write(0), whole).column_range(0, part.extent.columns as usize);
    match forward {
        true => rope_forward(x, table, positions, parallel),
        false => rope_backward(x, table, positions, parallel),
    }
    Ok(())
}

fn gated_forward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    product: Product,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    let (reads, made) = (&ready.instr.reads, ready.instr.writes[0].extent);
    let width = made.columns as usize;
    let mut operands = device.operands(ready)?;
    let y = view_mut(operands.write(0), made);
    let first = view(operands.read(0), reads[0].extent);
    let (gate, up) = match reads.get(1) {
        Some(up) => (first, view(operands.read(1), up.extent)),
        None => (first.column_range(0, width), first.column_range(width, width)),
    };
    gated_product_forward(gate, up, product, y, parallel);
    Ok(())
}

fn gated_backward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    product: Product,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    let (reads, writes) = (&ready.instr.reads, &ready.instr.writes);
    let width = reads[0].extent.columns as usize;
    let mut operands = device.operands(ready)?;
    let dy = view(operands.read(0), reads[0].extent);
    let first = view(operands.read(1), reads[1].extent);
    let made = view_mut(operands.write(0), writes[0].extent);
    if let Some(up) = reads.get(2) {
        let saved = GatedProductSaved { dy, gate: first, up: view(operands.read(2), up.extent) };
        let dup = view_mut(operands.write(1), writes[1].extent);
        gated_product_backward(saved, product, made, dup, parallel);
    } else {
        let (gate, up) = (first.column_range(0, width), first.column_range(width, width));
        let (dgate, dup) = made.split_columns(width);
        gated_product_backward(GatedProductSaved { dy, gate, up }, product, dgate, dup, parallel);
    }
    Ok(())
}

fn residual_add(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let mut operands = device.operands(ready)?;
    let sum = operands.write(0);
    add(operands.read(0), operands.read(1), sum, parallel);
    Ok(())
}

fn accumulate(device: &mut CpuDevice, ready: &ResolvedInstr) -> Result<(), Stop> {
    let parallel = device.parallel;
    let mut operands = device.operands(ready)?;
    let sum = operands.write(0);
    add_into(operands.read(0), sum, parallel);
    Ok(())
}

enum CopyKind {
    Pack,
    Unpack,
    Slice,
}

/// The most tensors side by side.
const SECTIONS_MAX: usize = 8;

fn copy(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    dim: Dim,
    way: CopyKind,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    // The form is that of the value that is cut, or put together.
    let value = match way {
        CopyKind::Pack | CopyKind::Slice => &ready.instr.reads[0],
        CopyKind::Unpack => &ready.instr.writes[0],
    };
    let mut sections = [0; SECTIONS_MAX];
    let count = sections_of(device, value, &mut sections);
    let tokens = device.tokens(value.extent.rows);
    let form = PartitionShape {
        sequences: tokens.sequences,
        positions: tokens.positions,
        sections: &sections[..count],
        dim,
        shards: device.context.tensor_size() as usize,
    };
    let me = device.at.tensor as usize;
    let mut operands = device.operands(ready)?;
    let (from, to) = (operands.read(0), operands.write(0));
    match way {
        CopyKind::Pack => pack_shards(form, from, to, parallel),
        CopyKind::Unpack => unpack_shards(form, from, to, parallel),
        CopyKind::Slice => slice_shard(form, me, from, to, parallel),
    }
    Ok(())
}

/// The widths of what lies side by side in an operand on this device.
fn sections_of(device: &CpuDevice, access: &Access, held: &mut [usize; SECTIONS_MAX]) -> usize {
    let buffer = device.stage.buffer(access.buffer);
    let columns = access.extent.columns;
    let whole: u64 = buffer.sections.iter().sum();
    if buffer.sections.is_empty() || buffer.sections.len() > held.len() {
        held[0] = columns as usize;
        return 1;
    }
    for (held, width) in held.iter_mut().zip(&buffer.sections) {
        *held = (width * columns / whole) as usize;
    }
    buffer.sections.len()
}
