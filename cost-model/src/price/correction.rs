//! Corrects prices by the nearest measurements.
//!
//! With xᵢ the measured shapes, tᵢ their times and p the price by the smooth curves of a profile, the price of a
//! shape x is p(x) · f(x):
//!
//! ```text
//! ln f(x) = (Σ wᵢ(x) · ln tᵢ/p(xᵢ) + w∞ · mean) / (Σ wᵢ(x) + w∞)
//! wᵢ(x)   = (|x − xᵢ|² + ε)⁻²
//! ```
//! f is inverse-distance weighting over log shapes ([`kernel_shape`](crate::kernel_shape)), among measurements of the
//! same kind of kernel. The price of a measured shape is its own time, up to the weight of its nearest neighbours;
//! far from all measurements f is the mean over the kind. Where devices share a machine, their number is one of the
//! sizes. The caller limits GEMMs and attention to the peak rate.

use std::collections::HashMap;

use narrows_plan::Kernel;
use narrows_plan::random::SplitMix64;

use crate::kernel_shape::{
    KernelClass, KernelKind, LogShape, MeasuredShapes, error_scale, log_shape, squared_distance,
};
use crate::profile::{KernelMeasurements, MeasuredPoint};

/// ε: shapes closer than a twentieth of an octave count as equal.
const EPSILON: f64 = 0.0025;
/// w∞: the weight of the mean, that of a measurement four octaves away.
const MEAN_WEIGHT: f64 = 1.0 / (4.0 * 4.0 * 4.0 * 4.0);
/// Seed of the draws: in a draw, all kernels of a kind share the resampled measurements.
const RESAMPLING_SEED: u64 = 1;

#[derive(Clone, Debug)]
struct MeasuredKernel {
    shape: LogShape,
    /// ln(measured / priced by the curves).
    log_ratio: f64,
}

/// The measurements of a kind, and the mean of their log ratios.
#[derive(Clone, Debug, Default)]
struct MeasuredFamily {
    kernels: Vec<MeasuredKernel>,
    mean_log_ratio: f64,
}

/// Correction of prices by measurements; see the [module](self).
#[derive(Clone, Debug)]
pub(super) struct MeasuredCorrection {
    families: HashMap<KernelKind, MeasuredFamily>,
    shapes: MeasuredShapes,
    devices: u64,
}

impl MeasuredCorrection {
    /// The correction for a mesh of `devices`. `curve_time_s` is the price by the curves of a kernel on a number of
    /// devices.
    pub(super) fn new(
        measured: &KernelMeasurements,
        devices: u64,
        curve_time_s: impl Fn(&Kernel, u64) -> f64,
    ) -> Self {
        let mut families: HashMap<KernelKind, MeasuredFamily> = HashMap::new();
        let mut shapes = MeasuredShapes::default();
        let sharing = |devices| if measured.devices_share_machine() { devices } else { 1 };
        for MeasuredPoint { kernel, devices, time_s, .. } in &measured.points {
            let log_ratio = (time_s / curve_time_s(kernel, *devices)).ln();
            if log_ratio.is_finite() {
                let devices = sharing(*devices);
                let measured = MeasuredKernel { shape: log_shape(kernel, devices), log_ratio };
                families.entry(KernelKind::of(kernel)).or_default().kernels.push(measured);
                shapes.insert(kernel, devices);
            }
        }
        for family in families.values_mut() {
            let count = family.kernels.len() as f64;
            let sum = family.kernels.iter().map(|kernel| kernel.log_ratio).sum::<f64>();
            family.mean_log_ratio = sum / count;
        }
        MeasuredCorrection { families, shapes, devices: sharing(devices) }
    }

    /// The factor f on the price by the curves.
    pub(super) fn factor(&self, kernel: &Kernel) -> f64 {
        let Some(family) = self.families.get(&KernelKind::of(kernel)) else { return 1.0 };
        family.factor(&log_shape(kernel, self.devices), None)
    }

    /// The factors f from several draws, with replacement, of the measurements of the kind; all 1 for a kind without
    /// measurements.
    pub(super) fn resampled_factors(&self, kernel: &Kernel, draws: usize) -> Vec<f64> {
        let Some(family) = self.families.get(&KernelKind::of(kernel)) else {
            return vec![1.0; draws];
        };
        family.resampled_factors(&log_shape(kernel, self.devices), draws)
    }

    /// Distance to the nearest measurement; infinite when no kernel of the class was measured.
    pub(super) fn distance_octaves(&self, kernel: &Kernel) -> f64 {
        self.shapes.distance_octaves(kernel, self.devices)
    }

    /// For each measurement of a class, ln(measured / price by the other measurements) over the [`error_scale`] of
    /// its distance from them.
    pub(super) fn leave_one_out_residuals(&self, class: KernelClass) -> Vec<f64> {
        let families = self
            .families
            .iter()
            .filter(|(kind, family)| kind.class() == class && family.kernels.len() > 1);
        families.flat_map(|(_, family)| family.leave_one_out_residuals()).collect()
    }
}

impl MeasuredFamily {
    fn factor(&self, shape: &LogShape, left_out: Option<usize>) -> f64 {
        let (mut sum, mut weights) = (MEAN_WEIGHT * self.mean_log_ratio, MEAN_WEIGHT);
        for (index, kernel) in self.kernels.iter().enumerate() {
            if left_out == Some(index) {
                continue;
            }
            let weight = inverse_distance_weight(shape, &kernel.shape);
            sum += weight * kernel.log_ratio;
            weights += weight;
        }
        (sum / weights).exp()
    }

    fn resampled_factors(&self, shape: &LogShape, draws: usize) -> Vec<f64> {
        let weight = |kernel: &MeasuredKernel| {
            (inverse_distance_weight(shape, &kernel.shape), kernel.log_ratio)
        };
        let weighted: Vec<(f64, f64)> = self.kernels.iter().map(weight).collect();
        let mut random = SplitMix64::new(RESAMPLING_SEED);
        let mut draw = || {
            let (mut sum, mut weights, mut mean) = (0.0, MEAN_WEIGHT, 0.0);
            for _ in &weighted {
                let (weight, log_ratio) = weighted[random.below(weighted.len())];
                sum += weight * log_ratio;
                weights += weight;
                mean += log_ratio / weighted.len() as f64;
            }
            ((sum + MEAN_WEIGHT * mean) / weights).exp()
        };
        (0..draws).map(|_| draw()).collect()
    }

    fn leave_one_out_residuals(&self) -> Vec<f64> {
        let residual = |(index, kernel): (usize, &MeasuredKernel)| {
            let others = self.kernels.iter().enumerate().filter(|(other, _)| *other != index);
            let squares = others.map(|(_, other)| squared_distance(&kernel.shape, &other.shape));
            let distance = squares.fold(f64::INFINITY, f64::min).sqrt();
            let predicted = self.factor(&kernel.shape, Some(index)).ln();
            (kernel.log_ratio - predicted) / error_scale(distance)
        };
        self.kernels.iter().enumerate().map(residual).collect()
    }
}

fn inverse_distance_weight(a: &LogShape, b: &LogShape) -> f64 {
    let near = squared_distance(a, b) + EPSILON;
    1.0 / (near * near)
}
