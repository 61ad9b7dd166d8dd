//! Classes, kinds and shapes of kernels, and the distance between shapes.
//!
//! A log shape holds the base-2 logarithms of a kernel's sizes, so a distance of 1 (an octave) is a factor of two
//! in one size. A GEMM that adds to its result is [`ACCUMULATE_OCTAVES`] from one of the same sizes that overwrites it: it
//! runs the same kernel, and the bytes that it reads are in its price. A kernel of another kind but of the same class (an
//! all-gather where all-reduces were measured) is [`OTHER_KIND_OCTAVES`] further away. Kernels of different classes are
//! infinitely far apart.
//!
//! The error of a price grows with the distance d from the nearest measurement as
//!
//! ```text
//! scale(d) = min(1 + max(0, d − 1), 8)
//! ```
//! That each octave beyond the first adds as much again is an assumption. Residuals are divided by the scale at
//! which they were taken, so that a measurement far from all other ones does not count twice.
//!
//! The error of a GEMM alone grows from the nearest measurement on, where a profile states the growth g
//! ([`ErrorGrowth`](crate::profile::ErrorGrowth)):
//!
//! ```text
//! scale(d) = min(1 + g·d, 8)
//! ```
//! No measurement says which tile a library chooses for a GEMM that is narrower than all measured ones: it counts as
//! one of another kind.

use std::collections::HashMap;

use narrows_plan::Kernel;
use narrows_plan::kernel::{CollectiveKind, Direction, FusedKind, Gemm};

/// A shape further than this from every measured one, a factor of two in one size, is unmeasured.
pub const NEAR_OCTAVES: f64 = 1.0;
/// Distance added between kernels of the same class but different kinds.
pub(crate) const OTHER_KIND_OCTAVES: f64 = 2.0;
/// Distance between a GEMM that adds to its result and one that overwrites it.
const ACCUMULATE_OCTAVES: f64 = 2.0;
/// The largest scale of an error.
const SCALE_MAX: f64 = 8.0;

/// Factor on the error of a price at a distance from the nearest measurement. At an infinite distance the factor is
/// 1: where no kernel of the class was measured, the assumed error of the class holds for every shape.
pub fn error_scale(distance_octaves: f64) -> f64 {
    if distance_octaves.is_finite() {
        (1.0 + (distance_octaves - NEAR_OCTAVES).max(0.0)).min(SCALE_MAX)
    } else {
        1.0
    }
}

/// As [`error_scale`], with a growth for each octave from the nearest measurement.
pub(crate) fn growing_error_scale(distance_octaves: f64, growth_per_octave: f64) -> f64 {
    if distance_octaves.is_finite() {
        (1.0 + growth_per_octave * distance_octaves).min(SCALE_MAX)
    } else {
        1.0
    }
}

/// Kernels whose measurements correct each other's prices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KernelKind {
    Gemm,
    Attention(Direction),
    Fused(FusedKind),
    Collective(CollectiveKind),
    Transfer,
}

/// Kernels whose prices share one relative error in a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelClass {
    /// GEMMs.
    Gemm,
    /// Attention.
    Attention,
    /// Fused ops, the optimizer's included.
    Fused,
    /// Collectives and P2P transfers.
    Link,
}

impl KernelClass {
    /// All classes.
    pub const ALL: [KernelClass; 4] =
        [KernelClass::Gemm, KernelClass::Attention, KernelClass::Fused, KernelClass::Link];

    /// The class of a kernel.
    pub fn of(kernel: &Kernel) -> KernelClass {
        KernelKind::of(kernel).class()
    }
}

impl KernelKind {
    pub(crate) fn of(kernel: &Kernel) -> KernelKind {
        match kernel {
            Kernel::Gemm(_) => KernelKind::Gemm,
            Kernel::Attention(attention) => KernelKind::Attention(attention.direction),
            Kernel::Fused(op) => KernelKind::Fused(op.kind),
            Kernel::Collective(collective) => KernelKind::Collective(collective.kind),
            Kernel::Transfer(_) => KernelKind::Transfer,
        }
    }

    pub(crate) fn class(self) -> KernelClass {
        match self {
            KernelKind::Gemm => KernelClass::Gemm,
            KernelKind::Attention(_) => KernelClass::Attention,
            KernelKind::Fused(_) => KernelClass::Fused,
            KernelKind::Collective(_) | KernelKind::Transfer => KernelClass::Link,
        }
    }
}

/// Base-2 logarithms of a kernel's sizes and properties; the last one is of the number of devices that share the machine.
pub(crate) type LogShape = [f64; 6];

/// Shapes that were measured, by kind.
#[derive(Clone, Debug, Default)]
pub struct MeasuredShapes(HashMap<KernelKind, Vec<LogShape>>);

impl MeasuredShapes {
    /// The shapes of kernels that were each measured on a whole device.
    pub fn from_kernels<'a>(kernels: impl IntoIterator<Item = &'a Kernel>) -> MeasuredShapes {
        let mut shapes = MeasuredShapes::default();
        for kernel in kernels {
            shapes.insert(kernel, 1);
        }
        shapes
    }

    /// Adds a kernel that was measured on one of `devices` that share a machine.
    pub(crate) fn insert(&mut self, kernel: &Kernel, devices: u64) {
        self.0.entry(KernelKind::of(kernel)).or_default().push(log_shape(kernel, devices));
    }

    /// Distance from a kernel to the nearest measured shape; infinite when no kernel of its class was measured.
    pub fn distance_octaves(&self, kernel: &Kernel, devices: u64) -> f64 {
        let (kind, shape) = (KernelKind::of(kernel), log_shape(kernel, devices));
        let nearest = |measured: &[LogShape]| {
            let squares = measured.iter().map(|measured| squared_distance(&shape, measured));
            squares.fold(f64::INFINITY, f64::min).sqrt()
        };
        if let Some(measured) = self.0.get(&kind) {
            return nearest(measured);
        }
        let same_class = self.0.iter().filter(|(other, _)| other.class() == kind.class());
        same_class
            .map(|(_, measured)| nearest(measured) + OTHER_KIND_OCTAVES)
            .fold(f64::INFINITY, f64::min)
    }

    /// As [`distance_octaves`](MeasuredShapes::distance_octaves) for a GEMM on a whole device; one that is narrower than all
    /// measured GEMMs counts as one of another kind.
    pub(crate) fn gemm_distance_octaves(&self, gemm: &Gemm) -> f64 {
        let kernel = Kernel::Gemm(gemm.clone());
        let width = |shape: &LogShape| shape[..3].iter().copied().fold(f64::INFINITY, f64::min);
        let gemms = self.0.iter().filter(|(kind, _)| kind.class() == KernelClass::Gemm);
        let narrowest =
            gemms.flat_map(|(_, shapes)| shapes).map(width).fold(f64::INFINITY, f64::min);
        let is_narrower = width(&log_shape(&kernel, 1)) < narrowest;
        self.distance_octaves(&kernel, 1) + if is_narrower { OTHER_KIND_OCTAVES } else { 0.0 }
    }
}

pub(crate) fn squared_distance(a: &LogShape, b: &LogShape) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

fn log2_size(size: u64) -> f64 {
    (size.max(1) as f64).log2()
}

/// The log shape of a kernel on one of `devices` that share a machine.
///
/// Fused ops of one kind differ in launches and extra traffic under an executor without fusion: these two weigh four
/// times as much as a size.
pub(crate) fn log_shape(kernel: &Kernel, devices: u64) -> LogShape {
    let devices = log2_size(devices);
    match kernel {
        Kernel::Gemm(gemm) => [
            log2_size(gemm.m),
            log2_size(gemm.n),
            log2_size(gemm.k),
            log2_size(gemm.batch),
            if gemm.accumulate { ACCUMULATE_OCTAVES } else { 0.0 },
            devices,
        ],
        Kernel::Attention(a) => {
            let heads = log2_size(a.sequences.saturating_mul(a.heads));
            let heads_per_kv_head = log2_size(a.heads) - log2_size(a.kv_heads);
            // Ring attention is made of kernels for the positions of a device.
            let (length, parts) = match a.rotation() {
                Some(_) => (a.queries(), 1),
                None => (a.length, a.query_parts),
            };
            let parts = log2_size(parts);
            [heads, log2_size(length), log2_size(a.head_dim), heads_per_kv_head, parts, devices]
        }
        Kernel::Fused(op) => {
            let extra_traffic = log2_size(op.unfused_traffic.0) - log2_size(op.traffic.0);
            let launches = log2_size(u64::from(op.unfused_launches));
            [log2_size(op.traffic.0), 4.0 * extra_traffic, 4.0 * launches, 0.0, 0.0, devices]
        }
        Kernel::Collective(c) => {
            [log2_size(c.payload.0), log2_size(c.group.size), 0.0, 0.0, 0.0, devices]
        }
        Kernel::Transfer(transfer) => [log2_size(transfer.bytes.0), 0.0, 0.0, 0.0, 0.0, devices],
    }
}
