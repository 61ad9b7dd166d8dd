//! Intervals of kernels that run one after the other, and of steps.
//!
//! With n_k kernels of shape k, its price p_k, its class c and its scale s_k
//! ([`error_scale`](crate::error_scale) at its distance from the measurements), draw b is
//!
//! ```text
//! T_b = Σ_k n_k · p_k(θ_b) · exp(s_k · e_{b,c})  ·  exp(e_{b,step})
//! ```
//! θ_b is one of the profile's refits ([`BootstrapRefits`](crate::profile::BootstrapRefits)), or a resampling of the
//! measurements that correct prices; without either, the profile's own numbers. e_{b,c} is one error for all kernels
//! of a class: errors are fully correlated within a class and independent between classes.
//!
//! Where measured steps were compared with their predictions, e_{b,step} includes the errors of the kernels. Only a
//! distance beyond that of the compared plans adds to it:
//!
//! ```text
//! T_b = Σ_k n_k · p_k · exp((s_k − 1) · e_{b,c})  ·  exp(e_{b,step})
//! ```

use std::collections::HashMap;

use narrows_plan::random::SplitMix64;
use narrows_plan::{Kernel, Mesh};
use schemars::JsonSchema;
use serde::Serialize;

use super::statistics::{central_interval, draw_error};
use crate::kernel_shape::NEAR_OCTAVES;
use crate::price::{PriceSource, Prices};
use crate::profile::{Executor, Profile, ProfileFile, RelativeError};

/// Draws of a step's time.
const DRAWS: usize = 2000;
/// Resamplings of the measurements that correct prices.
const RESAMPLINGS: usize = 24;
/// The least time of a draw, as a fraction of the prediction.
const FRACTION_MIN: f64 = 1e-3;
const SEED: u64 = 0x6e61_7272_6f77_7300;

/// A kernel of a step that lies far from every measured shape.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct UnmeasuredKernel {
    /// The kernel.
    pub kernel: Kernel,
    /// Fraction of the time of all kernels.
    pub share: f64,
    /// Octaves to the nearest measured shape; `None` when no kernel of its class was measured.
    pub distance_octaves: Option<f64>,
}

/// The errors of predictions on one kind of hardware.
pub struct ErrorModel<'a> {
    file: &'a ProfileFile,
    executor: Executor,
    prices: Prices,
    refitted_prices: Vec<Prices>,
}

impl<'a> ErrorModel<'a> {
    /// The errors of one executor on one mesh.
    pub fn new(profile: &'a Profile, executor: Executor, mesh: &Mesh) -> ErrorModel<'a> {
        let file = profile.file();
        let refits = file.refitted();
        ErrorModel {
            file,
            executor,
            prices: Prices::new(profile, executor, mesh),
            refitted_prices: refits
                .iter()
                .map(|refit| Prices::from_file(refit, executor, mesh))
                .collect(),
        }
    }

    /// The interval of the time of kernels, each with its number of runs, relative to their predicted time:
    /// low ≤ 1 ≤ high. A negative count subtracts a kernel, for the difference of two steps.
    pub fn kernels_interval(&self, kernels: &[(Kernel, f64)]) -> [f64; 2] {
        self.interval(kernels, StepError::None)
    }

    /// The interval of a step time relative to its predicted time: errors of the kernels and of the time between them.
    pub fn step_interval(&self, kernels: &[(Kernel, f64)]) -> [f64; 2] {
        self.interval(kernels, self.step_error(StepComparison::Alone))
    }

    /// The interval of the difference of two steps relative to the predicted one: errors of the kernels that differ, which the error of
    /// a whole step does not contain, and of the time between them.
    pub fn difference_interval(&self, kernels: &[(Kernel, f64)]) -> [f64; 2] {
        self.interval(kernels, self.step_error(StepComparison::Difference))
    }

    /// ln(time / predicted time) of a step in every draw. Draw b has the same errors of kernel classes and of steps
    /// for all programs and profiles with the same errors, so that differences of two steps are taken draw by draw.
    pub fn step_log_ratios(&self, kernels: &[(Kernel, f64)]) -> Vec<f64> {
        self.log_ratios(kernels, self.step_error(StepComparison::Difference))
    }

    fn step_error(&self, comparison: StepComparison) -> StepError<'a> {
        let compared = self.file.measured.as_ref().and_then(|measured| measured.steps.as_ref());
        let compared = compared.filter(|_| self.executor == Executor::Captured);
        let launch_costs = self.file.executors.of(self.executor);
        let includes_kernels = launch_costs.step_error_includes_kernels;
        let of_step = match comparison {
            StepComparison::Alone if includes_kernels => StepError::Whole,
            _ => StepError::BeyondKernels,
        };
        let of_executor = launch_costs.step_error.as_ref().map(of_step);
        compared.map(StepError::Whole).or(of_executor).unwrap_or(StepError::None)
    }

    fn interval(&self, kernels: &[(Kernel, f64)], step_error: StepError) -> [f64; 2] {
        central_interval(self.log_ratios(kernels, step_error)).map(f64::exp)
    }

    /// ln(time / predicted time) in every draw; all zero for kernels that take no time.
    fn log_ratios(&self, kernels: &[(Kernel, f64)], step_error: StepError) -> Vec<f64> {
        let groups = self.groups(kernels, step_error);
        let total: f64 = groups.iter().map(|group| group.time_s).sum();
        if total <= 0.0 {
            return vec![0.0; DRAWS];
        }
        let mut random = SplitMix64::new(SEED);
        let log_ratio = |draw: usize| {
            let errors =
                PriceSource::ALL.map(|source| draw_error(self.class_error(source), &mut random));
            let (whole, step_error) = match step_error {
                StepError::None => (false, 0.0),
                StepError::BeyondKernels(error) => (false, draw_error(error, &mut random)),
                StepError::Whole(error) => (true, draw_error(error, &mut random)),
            };
            let time = |group: &KernelGroup| {
                let refitted_s = match group.refitted_s.len() {
                    many if many > 0 && !whole => group.refitted_s[draw % many],
                    _ => group.time_s,
                };
                let scale = if whole { group.scale - 1.0 } else { group.scale };
                refitted_s * (scale * errors[group.source as usize]).exp()
            };
            // In the difference of two steps, some kernels have negative times.
            let sum: f64 = groups.iter().map(time).sum();
            (sum / total).max(FRACTION_MIN).ln() + step_error
        };
        (0..DRAWS).map(log_ratio).collect()
    }

    /// Sums over the kernels of one source and one scale.
    fn groups(&self, kernels: &[(Kernel, f64)], step_error: StepError) -> Vec<KernelGroup> {
        let mut indices: HashMap<(PriceSource, u64), usize> = HashMap::new();
        let mut groups: Vec<KernelGroup> = vec![];
        for (kernel, count) in kernels {
            let time_s = self.prices.kernel_time(kernel).0;
            if time_s <= 0.0 {
                continue;
            }
            let source = self.prices.source(kernel);
            let scale = match step_error {
                StepError::None => self.prices.lone_error_scale(kernel),
                _ => self.prices.error_scale(kernel),
            };
            let index = *indices.entry((source, scale.to_bits())).or_insert_with(|| {
                groups.push(KernelGroup { source, scale, time_s: 0.0, refitted_s: vec![] });
                groups.len() - 1
            });
            let group = &mut groups[index];
            group.time_s += time_s * count;
            let resampled = self.prices.resampled_kernel_times_s(kernel, RESAMPLINGS);
            let refitted_s = resampled.unwrap_or_else(|| {
                self.refitted_prices.iter().map(|prices| prices.kernel_time(kernel).0).collect()
            });
            group.refitted_s.resize(refitted_s.len(), 0.0);
            for (sum, refitted_s) in group.refitted_s.iter_mut().zip(refitted_s) {
                *sum += refitted_s * count;
            }
        }
        groups
    }

    fn class_error(&self, source: PriceSource) -> &RelativeError {
        let file = self.file;
        match source {
            PriceSource::Gemm => &file.gemm.relative_error,
            PriceSource::Attention => &file.attention.relative_error,
            PriceSource::Fused => &file.fused.relative_error,
            PriceSource::IntraNode => &file.links.relative_error,
            PriceSource::InterNode => &file.links.inter_node.relative_error,
        }
    }

    /// Whether the profile has any measured shape.
    pub fn has_measured_shapes(&self) -> bool {
        self.prices.has_measured_shapes()
    }

    /// The kernels further than a factor of two from every measured shape, in descending order of time. Empty for a
    /// profile without measured shapes.
    pub fn unmeasured_kernels(&self, kernels: &[(Kernel, f64)]) -> Vec<UnmeasuredKernel> {
        if !self.has_measured_shapes() {
            return vec![];
        }
        let time_s = |(kernel, count): &(Kernel, f64)| self.prices.kernel_time(kernel).0 * count;
        let total: f64 = kernels.iter().map(time_s).sum();
        let is_far = |counted: &&(Kernel, f64)| {
            time_s(counted) > 0.0 && self.prices.distance_octaves(&counted.0) > NEAR_OCTAVES
        };
        let describe = |counted: &(Kernel, f64)| {
            let distance = self.prices.distance_octaves(&counted.0);
            UnmeasuredKernel {
                kernel: counted.0.clone(),
                share: time_s(counted) / total,
                distance_octaves: distance.is_finite().then_some(distance),
            }
        };
        let mut unmeasured: Vec<UnmeasuredKernel> =
            kernels.iter().filter(is_far).map(describe).collect();
        unmeasured.sort_by(|a, b| b.share.total_cmp(&a.share));
        unmeasured
    }
}

/// Whether a step counts by itself, or against another step.
#[derive(Clone, Copy)]
enum StepComparison {
    Alone,
    Difference,
}

/// The error of a step time that the errors of kernels do not explain.
#[derive(Clone, Copy)]
enum StepError<'a> {
    None,
    /// An error in addition to the errors of the kernels.
    BeyondKernels(&'a RelativeError),
    /// The error of whole steps, which includes the errors of the kernels.
    Whole(&'a RelativeError),
}

struct KernelGroup {
    source: PriceSource,
    scale: f64,
    time_s: f64,
    /// The time by each refit, or by each resampling of the measurements.
    refitted_s: Vec<f64>,
}
