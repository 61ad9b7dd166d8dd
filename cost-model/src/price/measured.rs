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
//! factors. Where devices share a machine, how many do is one of the sizes. No product or attention is priced above the peak rate, whatever its neighbours did.

use std::collections::HashMap;

use narrows_plan::Kernel;

use super::shapes::{
    KernelKind, LogShape, MeasuredShapes, kind, log, scale, shape, square_distance,
};
use crate::interval::SplitMix64;
use crate::profile::{KernelMeasurements, MeasuredPoint};

pub use super::shapes::KernelClass;

/// ε: below a twentieth of an octave, shapes are the same.
const SAME: f64 = 0.0025;
/// w∞: what the mean weighs, as a measurement that lies so many octaves away.
const MEAN_WEIGHT: f64 = 1.0 / (4.0 * 4.0 * 4.0 * 4.0);
/// The seed of draws: every kernel of a kind sees the same measurements in a draw.
const DRAWN: u64 = 1;

#[derive(Clone, Debug)]
struct MeasuredKernel {
    at: LogShape,
    /// ln(measured / priced by the curves).
    factor: f64,
}

/// The measurements of a kind, and the mean of their factors.
#[derive(Clone, Debug, Default)]
struct MeasuredFamily {
    known: Vec<MeasuredKernel>,
    mean: f64,
}

/// Corrects prices; see the [module](self).
#[derive(Clone, Debug)]
pub struct MeasuredCorrection {
    families: HashMap<KernelKind, MeasuredFamily>,
    shapes: MeasuredShapes,
    devices: u64,
}

impl MeasuredCorrection {
    /// For a mesh of `devices`. `curves` prices by the curves what ran on so many devices: each on its share of
    /// the machine, where they share one.
    pub fn new(
        measured: &KernelMeasurements,
        devices: u64,
        curves: impl Fn(&Kernel, u64) -> f64,
    ) -> Self {
        let mut families: HashMap<KernelKind, MeasuredFamily> = HashMap::new();
        let mut shapes = MeasuredShapes::default();
        let sharing = |devices| if measured.is_shared() { devices } else { 1 };
        for MeasuredPoint { kernel, devices, time_s, .. } in &measured.points {
            let factor = (time_s / curves(kernel, *devices)).ln();
            if factor.is_finite() {
                let devices = sharing(*devices);
                let known = MeasuredKernel { at: shape(kernel, log(devices)), factor };
                families.entry(kind(kernel)).or_default().known.push(known);
                shapes.add(kernel, devices);
            }
        }
        for family in families.values_mut() {
            let count = family.known.len() as f64;
            family.mean = family.known.iter().map(|known| known.factor).sum::<f64>() / count;
        }
        MeasuredCorrection { families, shapes, devices: sharing(devices) }
    }

    /// What the price by the curves is multiplied with.
    pub fn factor(&self, kernel: &Kernel) -> f64 {
        let Some(family) = self.families.get(&kind(kernel)) else { return 1.0 };
        family.factor(&shape(kernel, log(self.devices)), None)
    }

    /// The same by so many draws of the measurements, each with replacement from those of the kind.
    /// A kind that nobody measured has a factor of 1 in all of them.
    pub fn drawn_factors(&self, kernel: &Kernel, draws: usize) -> Vec<f64> {
        let Some(family) = self.families.get(&kind(kernel)) else { return vec![1.0; draws] };
        family.drawn_factors(&shape(kernel, log(self.devices)), draws)
    }

    /// How far the nearest measurement lies; infinitely, when nothing of its class was measured.
    pub fn distance(&self, kernel: &Kernel) -> f64 {
        self.shapes.distance(kernel, self.devices)
    }

    /// How far each measurement of a class lies from what the others make of it, ln(measured / priced),
    /// over the [`scale`] of its distance from them.
    pub fn left_out(&self, class: KernelClass) -> Vec<f64> {
        let families = self
            .families
            .iter()
            .filter(|(kind, family)| kind.class() == class && family.known.len() > 1);
        families.flat_map(|(_, family)| family.left_out()).collect()
    }
}

impl MeasuredFamily {
    fn factor(&self, at: &LogShape, without: Option<usize>) -> f64 {
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

    fn drawn_factors(&self, at: &LogShape, draws: usize) -> Vec<f64> {
        let weight = |known: &MeasuredKernel| {
            let near = square_distance(at, &known.at) + SAME;
            (1.0 / (near * near), known.factor)
        };
        let weighted: Vec<(f64, f64)> = self.known.iter().map(weight).collect();
        let mut random = SplitMix64::new(DRAWN);
        let mut draw = || {
            let (mut sum, mut weights, mut mean) = (0.0, MEAN_WEIGHT, 0.0);
            for _ in &weighted {
                let (weight, factor) = weighted[random.below(weighted.len())];
                sum += weight * factor;
                weights += weight;
                mean += factor / weighted.len() as f64;
            }
            ((sum + MEAN_WEIGHT * mean) / weights).exp()
        };
        (0..draws).map(|_| draw()).collect()
    }

    fn left_out(&self) -> Vec<f64> {
        let residual = |(own, known): (usize, &MeasuredKernel)| {
            let others = self.known.iter().enumerate().filter(|(other, _)| *other != own);
            let squares = others.map(|(_, other)| square_distance(&known.at, &other.at));
            let distance = squares.fold(f64::INFINITY, f64::min).sqrt();
            (known.factor - self.factor(&known.at, Some(own)).ln()) / scale(distance)
        };
        self.known.iter().enumerate().map(residual).collect()
    }
}
