//! Fits of one kernel class, for CPUs and GPUs.

use narrows_cost_model::interval::thin_to_quantiles;
use narrows_cost_model::profile::{
    EfficiencyPoint, Executor, MeasuredPoint, Profile, ProfileFile, Provenance, ProvenanceKind,
    RELATIVE_ERROR_MAX, RelativeError,
};
use narrows_cost_model::{KernelClass, Prices};
use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::{Defects, Kernel, Mesh};

use crate::coordinate_descent::CoordinateDescent;

/// The order in which classes are fitted.
pub(super) const FIT_ORDER: [KernelClass; 4] =
    [KernelClass::Fused, KernelClass::Gemm, KernelClass::Attention, KernelClass::Link];
/// Least relative error, for the drift of a machine between measurement and prediction.
pub(super) const HALF_WIDTH_MIN: f64 = 0.03;
/// More residuals than these are replaced by their quantiles.
pub(super) const RESIDUALS_MAX: usize = 99;
/// Points of attention's curves lie at least a factor of two apart, so that no curve rises too fast.
const ATTENTION_LENGTHS: [u64; 10] = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
/// Steps of the search in the logarithm, from a factor of 4 to one of 1.01.
const LOG_STEPS: [f64; 9] = [1.4, 0.7, 0.35, 0.18, 0.09, 0.045, 0.022, 0.011, 0.01];
/// Moves of one parameter in one direction at one step.
const MOVES_MAX: usize = 12;

/// A fitted number and its range.
struct FitParameter {
    value: fn(&mut ProfileFile) -> &mut f64,
    range: (f64, f64),
}

/// The parameters of a class.
fn class_parameters(class: KernelClass) -> &'static [FitParameter] {
    match class {
        KernelClass::Gemm => &[
            FitParameter { value: |f| &mut f.gemm.memory_efficiency, range: (1e-3, 1.0) },
            FitParameter { value: |f| &mut f.gemm.exposed_epilogue, range: (1e-3, 100.0) },
            FitParameter { value: |f| &mut f.gemm.tile_overhead_elements, range: (1e-2, 1e3) },
            FitParameter { value: |f| &mut f.gemm.efficiency_max, range: (1e-2, 1.0) },
            FitParameter { value: |f| &mut f.gemm.start_s, range: (1e-8, 1e-3) },
        ],
        KernelClass::Attention => &[
            FitParameter { value: |f| &mut f.attention.start_s, range: (1e-8, 1e-3) },
            FitParameter { value: |f| &mut f.attention.head_dim_half, range: (1.0, 1024.0) },
        ],
        KernelClass::Fused => &[
            FitParameter { value: |f| &mut f.fused.efficiency, range: (1e-3, 1.0) },
            FitParameter { value: |f| &mut f.fused.start_s, range: (1e-8, 1e-3) },
        ],
        KernelClass::Link => &[
            FitParameter { value: |f| &mut f.links.intra_node.efficiency, range: (1e-3, 1.0) },
            FitParameter { value: |f| &mut f.links.intra_node.fill_s, range: (1e-8, 1e-2) },
        ],
    }
}

/// Fits the parameters of a class: minimises `error`, from the values in the file.
pub(super) fn fit_parameters(
    file: &mut ProfileFile,
    class: KernelClass,
    error: impl Fn(&ProfileFile) -> f64,
) {
    let parameters = class_parameters(class);
    for FitParameter { value, range: (low, high) } in parameters {
        let value = value(file);
        *value = value.clamp(*low, *high);
    }
    let scale = |trial: &mut ProfileFile, index: usize, factor: f64| {
        let FitParameter { value, range: (low, high) } = &parameters[index];
        let value = value(trial);
        *value = (*value * factor).clamp(*low, *high);
    };
    let mut search = CoordinateDescent::new(file.clone(), &error);
    for step in LOG_STEPS {
        search.sweep(parameters.len(), [step.exp(), (-step).exp()], MOVES_MAX, scale, &error);
    }
    *file = search.best;
}

/// Mean of |ln(measured / priced)|. A point that is priced 0 has no error.
pub(super) fn mean_log_error(
    points: &[MeasuredPoint],
    mut price_s: impl FnMut(&MeasuredPoint) -> f64,
) -> f64 {
    let log_error = |point: &MeasuredPoint| {
        let priced_s = price_s(point);
        if priced_s > 0.0 { (point.time_s / priced_s).ln().abs() } else { 0.0 }
    };
    points.iter().map(log_error).sum::<f64>() / points.len().max(1) as f64
}

/// The points of one class.
pub(super) fn points_of_class(points: &[MeasuredPoint], class: KernelClass) -> Vec<MeasuredPoint> {
    points.iter().filter(|point| KernelClass::of(&point.kernel) == class).cloned().collect()
}

/// The provenance of numbers that were measured, fitted or derived. `how` describes the fit or the derivation.
pub(super) fn provenance(
    kind: ProvenanceKind,
    how: Option<&str>,
    source: &str,
    date: &str,
) -> Provenance {
    let source = how.map_or(source.to_owned(), |how| format!("{how}; {source}"));
    Provenance { kind, source, date: date.to_owned(), assumed: vec![] }
}

/// Fits the efficiency of attention by length: the geometric mean of the fractions of the peak near each length.
pub(super) fn fit_attention_curves(
    file: &mut ProfileFile,
    points: &[MeasuredPoint],
    fraction_of_peak: impl Fn(&Attention, &MeasuredPoint) -> f64,
) {
    let half = file.attention.head_dim_half;
    for direction in [Direction::Forward, Direction::Backward] {
        let mut curve: Vec<EfficiencyPoint> = vec![];
        for length in ATTENTION_LENGTHS {
            let log_fractions: Vec<f64> = points
                .iter()
                .filter_map(|point| match &point.kernel {
                    Kernel::Attention(a)
                        if a.direction == direction && nearest_length(a.length) == length =>
                    {
                        let (dim, reference) = (a.head_dim as f64, 128.0);
                        let head = (dim / (dim + half) * (reference + half) / reference).min(1.0);
                        Some((fraction_of_peak(a, point) / head).ln())
                    }
                    _ => None,
                })
                .collect();
            if log_fractions.is_empty() {
                continue;
            }
            let mean = (log_fractions.iter().sum::<f64>() / log_fractions.len() as f64).exp();
            let max = curve.last().map_or(1.0, |last| last.efficiency * 1.9);
            curve.push(EfficiencyPoint { length, efficiency: mean.clamp(1e-4, max.min(1.0)) });
        }
        if curve.is_empty() {
            continue;
        }
        match direction {
            Direction::Forward => file.attention.forward = curve,
            Direction::Backward => file.attention.backward = curve,
        }
    }
}

fn nearest_length(length: u64) -> u64 {
    let distance = |other: u64| ((other as f64).ln() - (length.max(1) as f64).ln()).abs();
    ATTENTION_LENGTHS
        .into_iter()
        .min_by(|a, b| distance(*a).total_cmp(&distance(*b)))
        .unwrap_or(length)
}

/// Sets the relative error of each class from its leave-one-out residuals, and resolves the file.
pub(super) fn with_relative_errors(
    mut file: ProfileFile,
    measured: &Provenance,
) -> Result<Profile, Defects> {
    let profile = file.clone().resolve()?;
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let prices = Prices::new(&profile, Executor::Captured, &mesh);
    for class in KernelClass::ALL {
        let Some(mut residuals) = prices.leave_one_out_residuals(class) else { return Ok(profile) };
        let mut errors: Vec<f64> =
            residuals.iter().map(|residual| residual.exp_m1().abs()).collect();
        errors.sort_by(f64::total_cmp);
        let Some(half_width) = errors.get(errors.len() * 9 / 10) else { continue };
        if *half_width > 0.0 && *half_width < HALF_WIDTH_MIN {
            let widening = HALF_WIDTH_MIN / half_width;
            residuals.iter_mut().for_each(|residual| *residual *= widening);
        }
        let error = RelativeError {
            half_width_90: half_width.clamp(HALF_WIDTH_MIN, RELATIVE_ERROR_MAX),
            residuals: thin_to_quantiles(residuals, RESIDUALS_MAX),
            provenance: Provenance {
                source: format!("each measurement against the others; {}", measured.source),
                ..measured.clone()
            },
        };
        match class {
            KernelClass::Gemm => file.gemm.relative_error = error,
            KernelClass::Attention => file.attention.relative_error = error,
            KernelClass::Fused => file.fused.relative_error = error,
            KernelClass::Link => file.links.relative_error = error,
        }
    }
    file.resolve()
}
