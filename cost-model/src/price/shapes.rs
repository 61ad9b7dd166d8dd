//! Which kernels are alike: their kinds, and how far their shapes lie apart.
//!
//! A shape is the logarithms of a kernel's sizes, base two, so a distance of 1 is a factor of two in
//! one of them. Kernels of another kind but of the same class (an all-gather where all-reduces were
//! measured, a product that accumulates where none did) count as [`OTHER_KIND`] further away; of those of
//! another class nothing is known.
//!
//! How far a price may be off grows with the distance d from the nearest measurement as
//!
//! ```text
//! scale(d) = min(1 + max(0, d − 1), 8)
//! ```
//! that each octave beyond the first adds as much again is an assumption. Residuals are divided by it
//! where they are taken, so that what was left out far from the rest does not count twice.

use std::collections::HashMap;

use narrows_plan::Kernel;
use narrows_plan::kernel::{CollectiveKind, Direction, FusedKind};

/// Beyond this distance, a factor of two in one size, a shape counts as unmeasured.
pub const NEAR: f64 = 1.0;
/// What another kind of the same class adds to the distance: two octaves.
pub const OTHER_KIND: f64 = 2.0;
/// No error is scaled by more.
const SCALE_MAX: f64 = 8.0;

/// How many times as large an error is at this distance from what was measured. Where nothing of the
/// class was measured (an infinite distance) its error is an assumption, made for every shape: 1.
pub fn scale(distance: f64) -> f64 {
    if distance.is_finite() { (1.0 + (distance - NEAR).max(0.0)).min(SCALE_MAX) } else { 1.0 }
}

/// What may be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelKind {
    Gemm { accumulate: bool },
    Attention(Direction),
    Pass(FusedKind),
    Collective(CollectiveKind),
    Transfer,
}

/// What a profile has an interval for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelClass {
    /// Products.
    Gemm,
    /// Attention.
    Attention,
    /// Element-wise passes and the optimizer.
    Pass,
    /// Collectives and transfers.
    Link,
}

impl KernelClass {
    /// All of them.
    pub const ALL: [KernelClass; 4] =
        [KernelClass::Gemm, KernelClass::Attention, KernelClass::Pass, KernelClass::Link];

    /// The one that a kernel belongs to.
    pub fn of(kernel: &Kernel) -> KernelClass {
        kind(kernel).class()
    }
}

impl KernelKind {
    pub(super) fn class(self) -> KernelClass {
        match self {
            KernelKind::Gemm { .. } => KernelClass::Gemm,
            KernelKind::Attention(_) => KernelClass::Attention,
            KernelKind::Pass(_) => KernelClass::Pass,
            KernelKind::Collective(_) | KernelKind::Transfer => KernelClass::Link,
        }
    }
}

/// Logarithms of sizes.
pub(super) type LogShape = [f64; 5];

/// Shapes that were measured, by kind.
#[derive(Clone, Debug, Default)]
pub struct MeasuredShapes(HashMap<KernelKind, Vec<LogShape>>);

impl MeasuredShapes {
    /// Of these kernels, on a device of its own each.
    pub fn of<'a>(kernels: impl IntoIterator<Item = &'a Kernel>) -> MeasuredShapes {
        let mut shapes = MeasuredShapes::default();
        for kernel in kernels {
            shapes.add(kernel, 1);
        }
        shapes
    }

    /// Adds what was measured on one of so many devices that share a machine.
    pub(super) fn add(&mut self, kernel: &Kernel, devices: u64) {
        self.0.entry(kind(kernel)).or_default().push(shape(kernel, log(devices)));
    }

    /// How far the nearest of them lies from a kernel; infinitely, when nothing of its class is there.
    pub fn distance(&self, kernel: &Kernel, devices: u64) -> f64 {
        let (own, at) = (kind(kernel), shape(kernel, log(devices)));
        let nearest = |known: &[LogShape]| {
            let squares = known.iter().map(|known| square_distance(&at, known));
            squares.fold(f64::INFINITY, f64::min).sqrt()
        };
        if let Some(known) = self.0.get(&own) {
            return nearest(known);
        }
        let others = self.0.iter().filter(|(kind, _)| kind.class() == own.class());
        others.map(|(_, known)| nearest(known) + OTHER_KIND).fold(f64::INFINITY, f64::min)
    }
}

pub(super) fn square_distance(a: &LogShape, b: &LogShape) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

pub(super) fn kind(kernel: &Kernel) -> KernelKind {
    match kernel {
        Kernel::Gemm(gemm) => KernelKind::Gemm { accumulate: gemm.accumulate },
        Kernel::Attention(attention) => KernelKind::Attention(attention.direction),
        Kernel::Fused(pass) => KernelKind::Pass(pass.kind),
        Kernel::Collective(collective) => KernelKind::Collective(collective.kind),
        Kernel::Transfer(_) => KernelKind::Transfer,
    }
}

pub(super) fn log(size: u64) -> f64 {
    (size.max(1) as f64).log2()
}

/// Which pass of its kind it is shows in how often an executor without fusion would launch, and how
/// much more it would move: those weigh more than a size.
pub(super) fn shape(kernel: &Kernel, devices: f64) -> LogShape {
    match kernel {
        Kernel::Gemm(gemm) => [log(gemm.m), log(gemm.n), log(gemm.k), log(gemm.batch), devices],
        Kernel::Attention(a) => {
            let heads = log(a.sequences.saturating_mul(a.heads));
            [heads, log(a.length), log(a.head_dim), log(a.heads) - log(a.kv_heads), devices]
        }
        Kernel::Fused(pass) => {
            let more = log(pass.unfused_traffic.0) - log(pass.traffic.0);
            let launches = log(u64::from(pass.unfused_launches));
            [log(pass.traffic.0), 4.0 * more, 4.0 * launches, 0.0, devices]
        }
        Kernel::Collective(c) => [log(c.payload.0), log(c.group.size), 0.0, 0.0, devices],
        Kernel::Transfer(transfer) => [log(transfer.bytes.0), 0.0, 0.0, 0.0, devices],
    }
}
