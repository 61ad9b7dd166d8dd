//! φ on latents, and the division that an online norm still owes. Several latents lie side by side
//! in one operand, and each has its own result.

use narrows_plan::model::Activation;

use super::super::device::{CpuDevice, ResolvedInstr, Stop};
use super::norm::rms;
use super::{view, view_mut, write};
use crate::kernels::{
    LatentRecoverSaved, latent_backward, latent_forward, latent_recover, latent_recover_backward,
    latent_recover_in_place,
};

pub fn forward(device: &mut CpuDevice, ready: &ResolvedInstr, phi: Activation) -> Result<(), Stop> {
    let parallel = device.parallel;
    let extent = ready.instr.reads[0].extent;
    let mut operands = device.operands(ready)?;
    let h = view(operands.read(0), extent);
    let mut first = 0;
    for (port, access) in ready.instr.writes.iter().enumerate() {
        let width = access.extent.columns as usize;
        let z = view_mut(operands.write(port), access.extent);
        latent_forward(h.column_range(first, width), phi, z, parallel);
        first += width;
    }
    Ok(())
}

pub fn recover(device: &mut CpuDevice, ready: &ResolvedInstr, phi: Activation) -> Result<(), Stop> {
    let (rms, parallel) = (rms(device), device.parallel);
    let extent = ready.instr.reads[0].extent;
    let in_place = ready.instr.reads[0] == ready.instr.writes[0];
    let mut operands = device.operands(ready)?;
    let s = operands.read(1);
    if in_place {
        let h = view_mut(operands.write(0), extent);
        latent_recover_in_place(h, s, rms, phi, parallel);
        return Ok(());
    }
    let h = view(operands.read(0), extent);
    let mut first = 0;
    for (port, access) in ready.instr.writes.iter().enumerate() {
        let width = access.extent.columns as usize;
        let z = view_mut(operands.write(port), access.extent);
        latent_recover(h.column_range(first, width), s, rms, phi, z, parallel);
        first += width;
    }
    Ok(())
}

pub fn backward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    phi: Activation,
) -> Result<(), Stop> {
    let parallel = device.parallel;
    let reads = &ready.instr.reads;
    let saved = usize::from(phi != Activation::Identity);
    let sections = reads.len() - saved;
    let extent = ready.instr.writes[0].extent;
    let mut operands = device.operands(ready)?;
    // Without φ nothing of h is read, whatever is passed.
    let h = (saved == 1).then(|| view(operands.read(sections), reads[sections].extent));
    let mut dh = view_mut(operands.write(0), extent);
    let mut first = 0;
    for (port, access) in reads[..sections].iter().enumerate() {
        let width = access.extent.columns as usize;
        let dz = view(operands.read(port), access.extent);
        let h = h.map_or(dz, |h| h.column_range(first, width));
        let dh = dh.reborrow().column_range(first, width);
        latent_backward(dz, h, phi, dh, parallel);
        first += width;
    }
    Ok(())
}

pub fn recover_backward(
    device: &mut CpuDevice,
    ready: &ResolvedInstr,
    phi: Activation,
) -> Result<(), Stop> {
    let (rms, parallel) = (rms(device), device.parallel);
    let (reads, writes) = (&ready.instr.reads, &ready.instr.writes);
    let add = reads.last() == writes.last();
    // The latents' gradients, h or every z, s, and the gradient of s when it is added to.
    let before_s = reads.len() - 1 - usize::from(add);
    let sections = match phi {
        Activation::Identity => before_s / 2,
        Activation::Silu => before_s - 1,
    };
    let mut operands = device.operands(ready)?;
    let s = operands.read(before_s);
    let (mut dh, ds) = (view_mut(operands.write(0), writes[0].extent), operands.write(1));
    let mut first = 0;
    for port in 0..sections {
        let extent = reads[port].extent;
        let width = extent.columns as usize;
        let saved = match phi {
            Activation::Identity => {
                view(operands.read(sections + port), reads[sections + port].extent)
            }
            Activation::Silu => {
                view(operands.read(sections), reads[sections].extent).column_range(first, width)
            }
        };
        let owed = LatentRecoverSaved { dz: view(operands.read(port), extent), saved, s, rms, phi };
        let dh = dh.reborrow().column_range(first, width);
        latent_recover_backward(owed, dh, ds, write(add || port > 0), parallel);
        first += width;
    }
    Ok(())
}
