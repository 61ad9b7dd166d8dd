//! Activations of latents, and the division by the RMS that an online norm leaves to the latents.
//! Several latents are side by side in one operand, and each has a result of its own.

use narrows_plan::model::Activation;
use narrows_runtime::ScheduledInstruction;

use super::operands::{view, view_mut, write_mode};
use super::rms_norm::norm_shape;
use crate::abort::StopReason;
use crate::device::CpuDevice;
use crate::kernels::{
    LatentRecoverSaved, latent_backward, latent_forward, latent_recover, latent_recover_backward,
    latent_recover_in_place,
};

pub(crate) fn forward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let extent = scheduled.instr.reads[0].extent;
    let mut operands = device.operands(scheduled)?;
    let h = view(operands.read(0), extent);
    let mut first = 0;
    for (index, access) in scheduled.instr.writes.iter().enumerate() {
        let width = access.extent.columns as usize;
        let z = view_mut(operands.write(index), access.extent);
        latent_forward(h.column_range(first, width), activation, z, parallel);
        first += width;
    }
    Ok(())
}

pub(crate) fn recover(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm_shape(device), device.parallel);
    let extent = scheduled.instr.reads[0].extent;
    let in_place = scheduled.instr.reads[0] == scheduled.instr.writes[0];
    let mut operands = device.operands(scheduled)?;
    let s = operands.read(1);
    if in_place {
        let h = view_mut(operands.write(0), extent);
        latent_recover_in_place(h, s, norm, activation, parallel);
        return Ok(());
    }
    let h = view(operands.read(0), extent);
    let mut first = 0;
    for (index, access) in scheduled.instr.writes.iter().enumerate() {
        let width = access.extent.columns as usize;
        let z = view_mut(operands.write(index), access.extent);
        latent_recover(h.column_range(first, width), s, norm, activation, z, parallel);
        first += width;
    }
    Ok(())
}

pub(crate) fn backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let parallel = device.parallel;
    let reads = &scheduled.instr.reads;
    // The last operand is h, unless the activation is the identity.
    let reads_h = activation != Activation::Identity;
    let latents = reads.len() - usize::from(reads_h);
    let extent = scheduled.instr.writes[0].extent;
    let mut operands = device.operands(scheduled)?;
    let h = reads_h.then(|| view(operands.read(latents), reads[latents].extent));
    let mut dh = view_mut(operands.write(0), extent);
    let mut first = 0;
    for (index, access) in reads[..latents].iter().enumerate() {
        let width = access.extent.columns as usize;
        let dz = view(operands.read(index), access.extent);
        // The kernel does not read h if the activation is the identity.
        let h = h.map_or(dz, |h| h.column_range(first, width));
        let dh = dh.reborrow().column_range(first, width);
        latent_backward(dz, h, activation, dh, parallel);
        first += width;
    }
    Ok(())
}

pub(crate) fn recover_backward(
    device: &mut CpuDevice,
    scheduled: &ScheduledInstruction,
    activation: Activation,
) -> Result<(), StopReason> {
    let (norm, parallel) = (norm_shape(device), device.parallel);
    let (reads, writes) = (&scheduled.instr.reads, &scheduled.instr.writes);
    // Operands: the gradient of each latent, then h (for the identity: each latent), then s, then the
    // gradient of s if it is accumulated.
    let accumulate = reads.last() == writes.last();
    let s_index = reads.len() - 1 - usize::from(accumulate);
    let latents = match activation {
        Activation::Identity => s_index / 2,
        Activation::Silu => s_index - 1,
    };
    let mut operands = device.operands(scheduled)?;
    let s = operands.read(s_index);
    let (mut dh, ds) = (view_mut(operands.write(0), writes[0].extent), operands.write(1));
    let mut first = 0;
    for index in 0..latents {
        let extent = reads[index].extent;
        let width = extent.columns as usize;
        let saved = match activation {
            Activation::Identity => {
                view(operands.read(latents + index), reads[latents + index].extent)
            }
            Activation::Silu => {
                view(operands.read(latents), reads[latents].extent).column_range(first, width)
            }
        };
        let dz = view(operands.read(index), extent);
        let saved = LatentRecoverSaved { dz, saved, s, rms: norm, phi: activation };
        let dh = dh.reborrow().column_range(first, width);
        latent_recover_backward(saved, dh, ds, write_mode(accumulate || index > 0), parallel);
        first += width;
    }
    Ok(())
}
