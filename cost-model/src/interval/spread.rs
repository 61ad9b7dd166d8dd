//! The interval of kernels that run one after the other, and of steps made of them.
//!
//! With n_k kernels of shape k, its price p_k, its class c and its scale s_k (from the distance to the
//! nearest measured shape, [`Prices::scale`]), a draw is
//!
//! ```text
//! T_b = Σ_k n_k · p_k(θ_b) · exp(s_k · e_{b,c})  ·  exp(e_{b,step})
//! ```
//! Where a machine's steps were compared with their predictions, the error of a step, e_{b,step}, holds those of
//! its kernels already. Only what is further away than plans that were compared adds to it:
//!
//! ```text
//! T_b = Σ_k n_k · p_k · exp((s_k − 1) · e_{b,c})  ·  exp(e_{b,step})
//! ```
//! θ_b is one of the profile's refits ([`profile::BootstrapRefits`](crate::profile::BootstrapRefits)), or prices corrected by
//! a draw of the measurements, where there are neither the profile's own numbers. e_{b,c} is one of the
//! residuals of the class, the same for all of its kernels: kernels of one class err together, those of
//! different classes do not. A class without residuals has its 90 % half-width h, mostly assumed: e is
//! then normal with 1.645·σ = ln(1 + h). So it is with few residuals, spread by √((n + 1)/(n − 1)) as others are.

use std::collections::HashMap;

use narrows_plan::{Kernel, Mesh};
use serde::Serialize;

use super::{SplitMix64, few, middle};
use crate::Prices;
use crate::price::PriceSource;
use crate::price::shapes::NEAR;
use crate::profile::{Executor, Profile, ProfileFile, RelativeError};

/// Draws of a step's time.
const DRAWS: usize = 2000;
/// Draws of the measurements that correct prices.
const CORRECTIONS: usize = 24;
/// Fewer residuals than this do not say how their tails look.
const RESIDUALS_MIN: usize = 10;
/// No draw is less than this share of the prediction.
const LEAST: f64 = 1e-3;
const SEED: u64 = 0x6e61_7272_6f77_7300;

/// A kernel that is needed, and was not measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct UnmeasuredKernel {
    /// What it is.
    pub kernel: Kernel,
    /// Its share of the time of all kernels.
    pub share: f64,
    /// Octaves to the nearest measured shape; `null` when nothing like it was measured.
    pub distance_octaves: Option<f64>,
}

/// How far predictions on one kind of hardware may be off.
pub struct ErrorModel<'a> {
    file: &'a ProfileFile,
    executor: Executor,
    prices: Prices,
    refitted: Vec<Prices>,
}

impl<'a> ErrorModel<'a> {
    /// For one executor on one mesh.
    pub fn new(profile: &'a Profile, executor: Executor, mesh: &Mesh) -> ErrorModel<'a> {
        let file = profile.file();
        let refitted = match &file.refits {
            Some(refits) => refits.files(file).map(|f| Prices::of(&f, executor, mesh)).collect(),
            None => vec![],
        };
        ErrorModel { file, executor, prices: Prices::new(profile, executor, mesh), refitted }
    }

    /// The interval of kernels that run so many times each, over their predicted time:
    /// low ≤ 1 ≤ high. Times below zero are those of a step that is taken off.
    pub fn of_kernels(&self, kernels: &[(Kernel, f64)]) -> [f64; 2] {
        self.within(kernels, StepError::Nothing)
    }

    /// The interval of a step, over its predicted time: that of its kernels, and of what a step takes
    /// beyond them.
    pub fn of_step(&self, kernels: &[(Kernel, f64)]) -> [f64; 2] {
        let executors = &self.file.executors;
        let compared = self.file.measured.as_ref().and_then(|measured| measured.steps.as_ref());
        let (launching, compared) = match self.executor {
            Executor::Captured => (&executors.captured, compared),
            Executor::Eager => (&executors.eager, None),
        };
        let error = launching.step_error.as_ref();
        let beyond = compared.map(StepError::Whole).or(error.map(StepError::Kernels));
        self.within(kernels, beyond.unwrap_or(StepError::Nothing))
    }

    fn within(&self, kernels: &[(Kernel, f64)], beyond: StepError) -> [f64; 2] {
        let groups = self.groups(kernels);
        let total: f64 = groups.iter().map(|group| group.time_s).sum();
        if total <= 0.0 {
            return [1.0, 1.0];
        }
        let mut random = SplitMix64::new(SEED);
        let draw = |index: usize| {
            let errors = PriceSource::ALL.map(|source| drawn(self.error(source), &mut random));
            let (whole, beyond) = match beyond {
                StepError::Nothing => (false, 0.0),
                StepError::Kernels(error) => (false, drawn(error, &mut random)),
                StepError::Whole(error) => (true, drawn(error, &mut random)),
            };
            let time = |group: &KernelGroup| {
                let refit = match group.drawn_s.len() {
                    many if many > 0 && !whole => group.drawn_s[index % many],
                    _ => group.time_s,
                };
                let scale = if whole { group.scale - 1.0 } else { group.scale };
                refit * (scale * errors[group.source as usize]).exp()
            };
            // Of a difference between two steps, some kernels count less than nothing.
            let sum: f64 = groups.iter().map(time).sum();
            (sum / total).max(LEAST).ln() + beyond
        };
        middle((0..DRAWS).map(draw).collect()).map(f64::exp)
    }

    /// Kernels of one source and one scale, together.
    fn groups(&self, kernels: &[(Kernel, f64)]) -> Vec<KernelGroup> {
        let mut found: HashMap<(PriceSource, u64), usize> = HashMap::new();
        let mut groups: Vec<KernelGroup> = vec![];
        for (kernel, times) in kernels {
            let time_s = self.prices.kernel(kernel).0;
            if time_s <= 0.0 {
                continue;
            }
            let source = self.prices.source(kernel);
            let scale = self.prices.scale(kernel);
            let index = *found.entry((source, scale.to_bits())).or_insert_with(|| {
                groups.push(KernelGroup { source, scale, time_s: 0.0, drawn_s: vec![] });
                groups.len() - 1
            });
            let group = &mut groups[index];
            group.time_s += time_s * times;
            let drawn_s = self.prices.drawn(kernel, CORRECTIONS).unwrap_or_else(|| {
                self.refitted.iter().map(|prices| prices.kernel(kernel).0).collect()
            });
            group.drawn_s.resize(drawn_s.len(), 0.0);
            for (sum, drawn_s) in group.drawn_s.iter_mut().zip(drawn_s) {
                *sum += drawn_s * times;
            }
        }
        groups
    }

    fn error(&self, source: PriceSource) -> &RelativeError {
        let file = self.file;
        match source {
            PriceSource::Gemm => &file.gemm.relative_error,
            PriceSource::Attention => &file.attention.relative_error,
            PriceSource::Pass => &file.passes.relative_error,
            PriceSource::IntraNode => &file.links.relative_error,
            PriceSource::InterNode => &file.links.inter_node.relative_error,
        }
    }

    /// Whether the profile knows of any shape that was measured.
    pub fn knows_shapes(&self) -> bool {
        self.prices.knows_shapes()
    }

    /// The kernels that lie further than a factor of two from everything measured, the longest first.
    /// Empty when no shape was measured at all.
    pub fn unmeasured(&self, kernels: &[(Kernel, f64)]) -> Vec<UnmeasuredKernel> {
        if !self.knows_shapes() {
            return vec![];
        }
        let time = |(kernel, times): &(Kernel, f64)| self.prices.kernel(kernel).0 * times;
        let total: f64 = kernels.iter().map(time).sum();
        let far = |one: &&(Kernel, f64)| time(one) > 0.0 && self.prices.distance(&one.0) > NEAR;
        let named = |one: &(Kernel, f64)| {
            let distance = self.prices.distance(&one.0);
            UnmeasuredKernel {
                kernel: one.0.clone(),
                share: time(one) / total,
                distance_octaves: distance.is_finite().then_some(distance),
            }
        };
        let mut found: Vec<UnmeasuredKernel> = kernels.iter().filter(far).map(named).collect();
        found.sort_by(|a, b| b.share.total_cmp(&a.share));
        found
    }
}

/// What is known of a step's error besides its kernels'.
#[derive(Clone, Copy)]
enum StepError<'a> {
    Nothing,
    /// What comes on top of them.
    Kernels(&'a RelativeError),
    /// What steps were off, their kernels included.
    Whole(&'a RelativeError),
}

struct KernelGroup {
    source: PriceSource,
    scale: f64,
    time_s: f64,
    drawn_s: Vec<f64>,
}

/// One error of a class, ln(measured / predicted).
pub fn drawn(error: &RelativeError, random: &mut SplitMix64) -> f64 {
    let sigma = (1.0 + error.half_width_90).ln() / 1.645;
    let normal = random.normal();
    let index = random.below(error.residuals.len().max(1));
    match error.residuals.len() {
        0 => sigma * normal,
        some @ 1..RESIDUALS_MIN => sigma * normal * few(some),
        many => error.residuals[index] * few(many),
    }
}
