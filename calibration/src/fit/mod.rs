//! From measurements to a profile.
//!
//! Peak and bandwidth are what the fastest product and the fastest pass reached. The other numbers of a
//! group minimise, by a search along one of them after the other (`search`), the mean of
//!
//! ```text
//! |ln(measured / priced)|
//! ```
//! over the measurements of the group. What is left is corrected by the measurements themselves
//! ([`price::measured`](narrows_cost_model::price::measured)), and the interval of a group is the distance
//! within which nine measurements in ten lie of what all the others make of them.
//!
//! That is a machine of processors ([`profile()`]). For GPUs the peaks are the data sheet's: [`gpu`].

pub mod gpu;
mod search;
mod steps;

use narrows_plan::kernel::{Attention, Direction, Gemm};
use narrows_plan::{Bytes, Defects, Kernel, Mesh};

use narrows_cost_model::interval::thinned;
use narrows_cost_model::price::Prices;
use narrows_cost_model::price::measured::KernelClass;
use narrows_cost_model::profile::{
    self, EfficiencyPoint, Executor, KernelMeasurements, MeasuredPoint, Profile, ProfileFile,
    Provenance, ProvenanceKind, RelativeError, Repeatability, preset,
};
use search::{FitParameter, improve};

pub use steps::{GROUPS_MIN, steps, with_steps};

/// The profile whose form and whose unmeasured numbers a measured one takes over.
const BASE: &str = "cpu-local";
/// Shorter than this, a product or a pass says more about its start than about the machine.
const LONG_S: f64 = 20e-6;
/// A step by the clock takes more than its instructions' shortest times; what it takes beyond this is other
/// work on the machine, and says nothing of the next step.
const STEP_FACTOR_MAX: f64 = 1.25;
/// Intervals are never narrower: the machine of tomorrow is not quite that of today.
const HALF_WIDTH_MIN: f64 = 0.03;
/// More residuals than these are thinned out.
const RESIDUALS_MAX: usize = 99;
/// Points of attention's curves lie at least a factor of two apart, so that no curve can rise too fast.
const LENGTHS: [u64; 10] = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

/// The machine that was measured.
#[derive(Clone, Debug)]
pub struct CpuMachine {
    /// The profile's name.
    pub name: String,
    /// What tells this machine, and the threads that are used of it, from others.
    pub title: String,
    /// What a reader should know.
    pub description: String,
    /// Its memory.
    pub memory: Bytes,
    /// Threads that its devices share.
    pub threads: u32,
    /// The command, and on what it ran.
    pub source: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
}

/// The profile of a machine on which these were measured, and how well that repeats.
///
/// # Errors
/// When the measurements make no profile, such as none at all.
pub fn profile(
    machine: &CpuMachine,
    points: Vec<MeasuredPoint>,
    repeatability: Option<Repeatability>,
) -> Result<Profile, Defects> {
    let mut file = preset(BASE)?.file().clone();
    let (source, date) = (&machine.source, &machine.date);
    let measured = from(ProvenanceKind::Measured, None, source, date);
    let fitted = |what: &str, class| {
        let how = format!("{what} to {} of them", of_class(&points, class).len());
        from(ProvenanceKind::Measured, Some(&how), source, date)
    };
    let threads = Some(machine.threads);
    let (name, description) = (machine.name.clone(), machine.description.clone());
    (file.name, file.description) = (name, description);
    file.device.memory_bytes = machine.memory;
    file.device.compute_units = 1;
    let has = |class| points.iter().any(|point| KernelClass::of(&point.kernel) == class);
    rates(&mut file, &points);
    let how = "peak and bandwidth: the most that a product and a pass reached; memory: what the system says";
    file.device.provenance = from(ProvenanceKind::Measured, Some(how), source, date);
    // Nothing was computed in bf16, and nobody counts what products are spread over.
    file.device.provenance.assumed = vec!["peak_flops_per_s.bf16".into(), "compute_units".into()];
    if has(KernelClass::Gemm) {
        file.gemm.efficiency_max = 1.0;
        file.gemm.provenance = fitted("the price of products fitted", KernelClass::Gemm);
    }
    if has(KernelClass::Pass) {
        file.passes.provenance = fitted("the price of passes fitted", KernelClass::Pass);
        let starts =
            points.iter().filter(|point| KernelClass::of(&point.kernel) == KernelClass::Pass);
        let least = starts.map(|point| point.time_s).fold(f64::INFINITY, f64::min);
        let captured = &mut file.executors.captured;
        captured.launch_gap_s = (least / 2.0).min(1e-5);
        let how = "launch_gap_s: half of the shortest pass, at most 10 µs, because a pass is not shorter than its \
                   start; step_factor: steps by the clock over the sums of their instructions' shortest times, at most 1.25";
        captured.provenance = from(ProvenanceKind::Derived, Some(how), source, date);
    }
    for class in [KernelClass::Pass, KernelClass::Gemm, KernelClass::Attention, KernelClass::Link] {
        let of_class = of_class(&points, class);
        if of_class.is_empty() {
            continue;
        }
        if class == KernelClass::Attention {
            let peak = file.device.peak_flops_per_s.f32;
            let together =
                |a: &Attention, of: &MeasuredPoint| a.flops().0 * of.devices as f64 / of.time_s;
            curves(&mut file, &of_class, |a, point| together(a, point) / peak);
            file.attention.provenance = fitted("the price of attention fitted", class);
        }
        if class == KernelClass::Link {
            let how = "bandwidth: that of memory; efficiency and fill fitted";
            let assumed = vec!["fill_half_bytes".to_owned()];
            file.links.intra_node.provenance = Provenance { assumed, ..fitted(how, class) };
        }
        improve(&mut file, parameters(class), |file| error(file, &of_class));
    }
    // Whoever launches: what the machine does besides, and what nobody saw of its steps.
    for launching in [&mut file.executors.captured, &mut file.executors.eager] {
        launching.step_error = Some(step_error(&measured.date));
        if let Some(Repeatability { undisturbed, .. }) = repeatability {
            launching.step_factor = undisturbed.recip().clamp(1.0, STEP_FACTOR_MAX);
        }
    }
    file.measured = Some(KernelMeasurements {
        threads,
        machine: Some(machine.title.clone()),
        repeatability,
        steps: None,
        points,
        provenance: measured.clone(),
    });
    intervals(file, &measured)
}

/// Where numbers come from: a machine's measurements, and what was made of them.
fn from(kind: ProvenanceKind, how: Option<&str>, source: &str, date: &str) -> Provenance {
    let source = how.map_or(source.to_owned(), |how| format!("{how}; {source}"));
    Provenance { kind, source, date: date.to_owned(), assumed: vec![] }
}

fn of_class(points: &[MeasuredPoint], class: KernelClass) -> Vec<MeasuredPoint> {
    points.iter().filter(|point| KernelClass::of(&point.kernel) == class).cloned().collect()
}

/// What steps lie off beyond their kernels: other steps than those that were measured are needed to see it
/// ([`with_steps`] puts in what they showed).
fn step_error(date: &str) -> RelativeError {
    let source = "nine plans in ten of the closed loop of docs/measurements.md lie within 8 %, on the \
                  machine of this project; not measured on this one";
    let (kind, source, date) = (ProvenanceKind::Assumed, source.into(), date.into());
    let provenance = Provenance { kind, source, date, assumed: vec![] };
    RelativeError { half_width_90: 0.08, residuals: vec![], provenance }
}

/// What is fitted for a class.
fn parameters(class: KernelClass) -> &'static [FitParameter] {
    match class {
        KernelClass::Gemm => &[
            FitParameter { at: |f| &mut f.gemm.memory_efficiency, range: (1e-3, 1.0) },
            FitParameter { at: |f| &mut f.gemm.exposed_epilogue, range: (1e-3, 100.0) },
            FitParameter { at: |f| &mut f.gemm.tile_overhead_elements, range: (1e-2, 1e3) },
            FitParameter { at: |f| &mut f.gemm.efficiency_max, range: (1e-2, 1.0) },
            FitParameter { at: |f| &mut f.gemm.start_s, range: (1e-8, 1e-3) },
        ],
        KernelClass::Attention => &[
            FitParameter { at: |f| &mut f.attention.start_s, range: (1e-8, 1e-3) },
            FitParameter { at: |f| &mut f.attention.head_dim_half, range: (1.0, 1024.0) },
        ],
        KernelClass::Pass => &[
            FitParameter { at: |f| &mut f.passes.efficiency, range: (1e-3, 1.0) },
            FitParameter { at: |f| &mut f.passes.start_s, range: (1e-8, 1e-3) },
        ],
        KernelClass::Link => &[
            FitParameter { at: |f| &mut f.links.intra_node.efficiency, range: (1e-3, 1.0) },
            FitParameter { at: |f| &mut f.links.intra_node.fill_s, range: (1e-8, 1e-2) },
        ],
    }
}

/// Peak and bandwidth: what was reached, on one device or on several together.
fn rates(file: &mut ProfileFile, points: &[MeasuredPoint]) {
    let together = |rate: f64, point: &MeasuredPoint| rate * point.devices as f64 / point.time_s;
    let long = || points.iter().filter(|point| point.time_s >= LONG_S);
    let flops = |point: &MeasuredPoint| match &point.kernel {
        Kernel::Gemm(gemm) => together(gemm.flops().0, point),
        _ => 0.0,
    };
    let bytes = |point: &MeasuredPoint| match &point.kernel {
        Kernel::Fused(pass) => together(pass.traffic.as_f64(), point),
        _ => 0.0,
    };
    let peak = long().map(flops).fold(0.0, f64::max);
    if peak > 0.0 {
        let old = &file.device.peak_flops_per_s;
        let share_of_bf16 = old.bf16 / old.f32;
        file.device.peak_flops_per_s.f32 = peak;
        file.device.peak_flops_per_s.bf16 = peak * share_of_bf16;
    }
    let bandwidth = long().map(bytes).fold(0.0, f64::max);
    if bandwidth > 0.0 {
        file.device.memory_bandwidth_bytes_per_s = bandwidth;
        file.passes.efficiency = 0.5;
        file.links.intra_node.bandwidth_bytes_per_s = bandwidth;
    }
}

/// Attention's efficiency by length: the mean of the logarithms of the shares of the peak that were reached there.
fn curves(
    file: &mut ProfileFile,
    points: &[MeasuredPoint],
    share_of_peak: impl Fn(&Attention, &MeasuredPoint) -> f64,
) {
    let half = file.attention.head_dim_half;
    for wanted in [Direction::Forward, Direction::Backward] {
        let mut curve: Vec<EfficiencyPoint> = vec![];
        for length in LENGTHS {
            let reached: Vec<f64> = points
                .iter()
                .filter_map(|point| match &point.kernel {
                    Kernel::Attention(a)
                        if a.direction == wanted && nearest(a.length) == length =>
                    {
                        let (dim, reference) = (a.head_dim as f64, 128.0);
                        let head = (dim / (dim + half) * (reference + half) / reference).min(1.0);
                        Some((share_of_peak(a, point) / head).ln())
                    }
                    _ => None,
                })
                .collect();
            if reached.is_empty() {
                continue;
            }
            let mean = (reached.iter().sum::<f64>() / reached.len() as f64).exp();
            let most = curve.last().map_or(1.0, |last| last.efficiency * 1.9);
            curve.push(EfficiencyPoint { length, efficiency: mean.clamp(1e-4, most.min(1.0)) });
        }
        if curve.is_empty() {
            continue;
        }
        match wanted {
            Direction::Forward => file.attention.forward = curve,
            Direction::Backward => file.attention.backward = curve,
        }
    }
}

fn nearest(length: u64) -> u64 {
    let apart = |of: u64| ((of as f64).ln() - (length.max(1) as f64).ln()).abs();
    LENGTHS.into_iter().min_by(|a, b| apart(*a).total_cmp(&apart(*b))).unwrap_or(length)
}

/// Mean distance of the curves from these measurements.
fn error(file: &ProfileFile, points: &[MeasuredPoint]) -> f64 {
    let Ok(profile) = file.clone().resolve() else { return f64::INFINITY };
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1 };
    let prices = Prices::new(&profile, Executor::Captured, &mesh);
    let distance = |point: &MeasuredPoint| {
        let sharing = match KernelClass::of(&point.kernel) {
            KernelClass::Link => 1.0,
            _ => point.devices as f64,
        };
        let priced = prices.kernel(&point.kernel).0 * sharing;
        if priced > 0.0 { (point.time_s / priced).ln().abs() } else { 0.0 }
    };
    points.iter().map(distance).sum::<f64>() / points.len().max(1) as f64
}

/// Puts in how far prices may be off, from what each measurement is to the others.
fn intervals(mut file: ProfileFile, measured: &Provenance) -> Result<Profile, Defects> {
    let profile = file.clone().resolve()?;
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1 };
    let prices = Prices::new(&profile, Executor::Captured, &mesh);
    let Some(correction) = prices.correction() else { return Ok(profile) };
    for class in KernelClass::ALL {
        let mut residuals = correction.left_out(class);
        let mut apart: Vec<f64> =
            residuals.iter().map(|residual| residual.exp_m1().abs()).collect();
        apart.sort_by(f64::total_cmp);
        let Some(half_width) = apart.get(apart.len() * 9 / 10) else { continue };
        if *half_width > 0.0 && *half_width < HALF_WIDTH_MIN {
            let wider = HALF_WIDTH_MIN / half_width;
            residuals.iter_mut().for_each(|residual| *residual *= wider);
        }
        let error = RelativeError {
            half_width_90: half_width.clamp(HALF_WIDTH_MIN, profile::HALF_WIDTH_MAX),
            residuals: thinned(residuals, RESIDUALS_MAX),
            provenance: Provenance {
                source: format!("each measurement against the others; {}", measured.source),
                ..measured.clone()
            },
        };
        match class {
            KernelClass::Gemm => file.gemm.relative_error = error,
            KernelClass::Attention => file.attention.relative_error = error,
            KernelClass::Pass => file.passes.relative_error = error,
            KernelClass::Link => file.links.relative_error = error,
        }
    }
    file.resolve()
}

/// Whether a product is skinny: one of its sizes is far below the others.
pub fn is_skinny(gemm: &Gemm) -> bool {
    let mut sizes = [gemm.m, gemm.n, gemm.k];
    sizes.sort_unstable();
    sizes[0].saturating_mul(4) <= sizes[1]
}
