//! Prices corrected by what was measured nearby.
//!
//! The curves of a profile are smooth; a machine is not. With xᵢ the shapes that were measured, tᵢ their
//! times and p the price by the curves, the price of a shape x is p(x) · f(x):
//!
//! ```text
//! ln f(x) = (Σ wᵢ(x) · ln tᵢ/p(xᵢ) + w∞ · mean) / (Σ wᵢ(x) + w∞)
//! wᵢ(x)   = (|x − xᵢ|² + ε)⁻²
//! ```
//! Shapes are compared by the logarithms of their sizes, so a distance of 1 is a factor of two in one
//! of them, and only with measurements of the same kind of kernel. What was measured itself has its own
//! time back, up to what its nearest neighbours weigh; far from everything f is the mean of the kind's
//! factors. No product or attention is priced above the peak rate, whatever its neighbours did.

use std::collections::HashMap;

use narrows_plan::Kernel;
use narrows_plan::kernel::{CollectiveKind, Direction, PassKind};

use crate::profile::{Measured, Point};

/// ε: below a twentieth of an octave, shapes are the same.
const SAME: f64 = 0.0025;
/// w∞: what the mean weighs, as a measurement that lies so many octaves away.
const MEAN_WEIGHT: f64 = 1.0 / (4.0 * 4.0 * 4.0 * 4.0);
/// Beyond this distance, a factor of two in one size, a shape counts as unmeasured.
pub const NEAR: f64 = 1.0;

/// What may be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Gemm { accumulate: bool },
    Attention(Direction),
    Pass(PassKind),
    Collective(CollectiveKind),
    Transfer,
}

/// What a profile has an interval for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Products.
    Gemm,
    /// Attention.
    Attention,
    /// Element-wise passes and the optimizer.
    Pass,
    /// Collectives and transfers.
    Link,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 4] = [Class::Gemm, Class::Attention, Class::Pass, Class::Link];

    /// The one that a kernel belongs to.
    pub fn of(kernel: &Kernel) -> Class {
        kind(kernel).class()
    }
}

impl Kind {
    fn class(self) -> Class {
        match self {
            Kind::Gemm { .. } => Class::Gemm,
            Kind::Attention(_) => Class::Attention,
            Kind::Pass(_) => Class::Pass,
            Kind::Collective(_) | Kind::Transfer => Class::Link,
        }
    }
}

/// Logarithms of sizes.
type Shape = [f64; 5];

#[derive(Clone, Debug)]
struct Known {
    at: Shape,
    /// ln(measured / priced by the curves).
    factor: f64,
}

/// The measurements of a kind, and the mean of their factors.
#[derive(Clone, Debug, Default)]
struct Family {
    known: Vec<Known>,
    mean: f64,
}

/// Corrects prices; see the [module](self).
#[derive(Clone, Debug)]
pub struct Correction {
    families: HashMap<Kind, Family>,
    devices: f64,
}

impl Correction {
    /// For a mesh of `devices`. `curves` prices by the curves what runs on a share of the machine.
    pub fn new(measured: &Measured, devices: u64, curves: impl Fn(&Kernel, u64) -> f64) -> Self {
        let mut families: HashMap<Kind, Family> = HashMap::new();
        for Point { kernel, devices, time_s, .. } in &measured.points {
            let factor = (time_s / curves(kernel, *devices)).ln();
            if factor.is_finite() {
                let known = Known { at: shape(kernel, log(*devices)), factor };
                families.entry(kind(kernel)).or_default().known.push(known);
            }
        }
        for family in families.values_mut() {
            let count = family.known.len() as f64;
            family.mean = family.known.iter().map(|known| known.factor).sum::<f64>() / count;
        }
        Correction { families, devices: log(devices) }
    }

    /// What the price by the curves is multiplied with.
    pub fn factor(&self, kernel: &Kernel) -> f64 {
        let Some(family) = self.families.get(&kind(kernel)) else { return 1.0 };
        family.factor(&shape(kernel, self.devices), None)
    }

    /// How far the nearest measurement lies; infinitely, when nothing of its kind was measured.
    pub fn distance(&self, kernel: &Kernel) -> f64 {
        let Some(family) = self.families.get(&kind(kernel)) else { return f64::INFINITY };
        let at = shape(kernel, self.devices);
        let squares = family.known.iter().map(|known| square_distance(&at, &known.at));
        squares.fold(f64::INFINITY, f64::min).sqrt()
    }

    /// How far each measurement of a class lies from what the others make of it:
    /// ln(measured / priced).
    pub fn left_out(&self, class: Class) -> Vec<f64> {
        let families = self
            .families
            .iter()
            .filter(|(kind, family)| kind.class() == class && family.known.len() > 1);
        let residuals = families.flat_map(|(_, family)| {
            family
                .known
                .iter()
                .enumerate()
                .map(|(own, known)| known.factor - family.factor(&known.at, Some(own)).ln())
        });
        residuals.collect()
    }
}

impl Family {
    fn factor(&self, at: &Shape, without: Option<usize>) -> f64 {
        let (mut sum, mut weights) = (MEAN_WEIGHT * self.mean, MEAN_WEIGHT);
        for (index, known) in self.known.iter().enumerate() {
            if without == Some(index) {
                continue;
            }
            let near = square_distance(at, &known.at) + SAME;
            let weight = 1.0 / (near * near);
            sum += weight * known.factor;
            weights += weight;
        }
        (sum / weights).exp()
    }
}

fn square_distance(a: &Shape, b: &Shape) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
}

fn kind(kernel: &Kernel) -> Kind {
    match kernel {
        Kernel::Gemm(gemm) => Kind::Gemm { accumulate: gemm.accumulate },
        Kernel::Attention(attention) => Kind::Attention(attention.direction),
        Kernel::Pass(pass) => Kind::Pass(pass.kind),
        Kernel::Collective(collective) => Kind::Collective(collective.kind),
        Kernel::Transfer(_) => Kind::Transfer,
    }
}

fn log(size: u64) -> f64 {
    (size.max(1) as f64).log2()
}

/// Which pass of its kind it is shows in how often an executor without fusion would launch, and how
/// much more it would move: those weigh more than a size.
fn shape(kernel: &Kernel, devices: f64) -> Shape {
    match kernel {
        Kernel::Gemm(gemm) => [log(gemm.m), log(gemm.n), log(gemm.k), log(gemm.batch), devices],
        Kernel::Attention(a) => {
            let heads = log(a.sequences.saturating_mul(a.heads));
            [heads, log(a.length), log(a.head_dim), log(a.heads) - log(a.kv_heads), devices]
        }
        Kernel::Pass(pass) => {
            let more = log(pass.unfused_traffic.0) - log(pass.traffic.0);
            let launches = log(u64::from(pass.unfused_launches));
            [log(pass.traffic.0), 4.0 * more, 4.0 * launches, 0.0, devices]
        }
        Kernel::Collective(c) => [log(c.payload.0), log(c.group.size), 0.0, 0.0, devices],
        Kernel::Transfer(transfer) => [log(transfer.bytes.0), 0.0, 0.0, 0.0, devices],
    }
}
