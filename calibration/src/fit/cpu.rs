//! The profile of a CPU, whose devices are groups of threads that share the machine.

use narrows_cost_model::profile::{
    Executor, KernelMeasurements, MeasuredPoint, Profile, ProfileFile, Provenance, ProvenanceKind,
    RelativeError, Repeatability, preset,
};
use narrows_cost_model::{KernelClass, Prices};
use narrows_plan::kernel::Attention;
use narrows_plan::{Bytes, Defects, Kernel, Mesh};

use super::class::{
    FIT_ORDER, fit_attention_curves, fit_parameters, mean_log_error, points_of_class, provenance,
    with_relative_errors,
};

/// The preset from which curves and all numbers that are not measured are taken.
const BASE: &str = "cpu-local";
/// Shortest GEMM or fused op for peak rates: the time of a shorter one is mostly its start.
const LONG_S: f64 = 20e-6;
/// Largest factor of a step over the sum of its instructions' shortest times. A larger one is due to other load of the
/// machine, which does not predict the next step.
const STEP_FACTOR_MAX: f64 = 1.25;

/// The rate of GEMMs in bf16.
const BF16_RATE: &str = "peak_flops_per_s.bf16";

/// The machine that was measured.
#[derive(Clone, Debug)]
pub struct CpuMachine {
    /// The profile's name.
    pub name: String,
    /// Identifies the machine and the threads in use.
    pub title: String,
    /// The profile's description.
    pub description: String,
    /// Memory of the machine.
    pub memory: Bytes,
    /// Threads that the devices share.
    pub threads: u32,
    /// The command of the measurement, and the machine.
    pub source: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
}

/// Fits the profile of a CPU to the measured `points`.
///
/// # Errors
/// Measurements that do not give a valid profile, for example an empty list.
pub fn fit_cpu_profile(
    machine: &CpuMachine,
    points: Vec<MeasuredPoint>,
    repeatability: Option<Repeatability>,
) -> Result<Profile, Defects> {
    let mut file = preset(BASE)?.file().clone();
    let (source, date) = (&machine.source, &machine.date);
    let measured = provenance(ProvenanceKind::Measured, None, source, date);
    let fitted = |what: &str, class| {
        let how = format!("{what} to {} of them", points_of_class(&points, class).len());
        provenance(ProvenanceKind::Measured, Some(&how), source, date)
    };
    let has = |class| points.iter().any(|point| KernelClass::of(&point.kernel) == class);
    (file.name, file.description) = (machine.name.clone(), machine.description.clone());
    file.device.memory_bytes = machine.memory;
    file.device.compute_units = 1;
    set_peak_rates(&mut file, &points);
    let how = "peak and bandwidth: the largest rates of a GEMM and of a fused op; memory: as the system reports it";
    file.device.provenance = provenance(ProvenanceKind::Measured, Some(how), source, date);
    // bf16 may be measured apart (`with_bf16_rate`), and the units that a GEMM's tiles are spread over are not counted.
    file.device.provenance.assumed = vec![BF16_RATE.into(), "compute_units".into()];
    if has(KernelClass::Gemm) {
        file.gemm.efficiency_max = 1.0;
        file.gemm.provenance = fitted("the price of GEMMs fitted", KernelClass::Gemm);
    }
    if has(KernelClass::Fused) {
        file.fused.provenance = fitted("the price of fused ops fitted", KernelClass::Fused);
        let fused_ops =
            points.iter().filter(|point| KernelClass::of(&point.kernel) == KernelClass::Fused);
        let shortest_s = fused_ops.map(|point| point.time_s).fold(f64::INFINITY, f64::min);
        let captured = &mut file.executors.captured;
        captured.launch_gap_s = (shortest_s / 2.0).min(1e-5);
        let how = "launch_gap_s: half of the shortest fused op, at most 10 µs, because no fused op is shorter than its \
                   start; step_factor: measured steps over the sums of their instructions' shortest times, at most 1.25";
        captured.provenance = provenance(ProvenanceKind::Derived, Some(how), source, date);
    }
    for class in FIT_ORDER {
        let class_points = points_of_class(&points, class);
        if class_points.is_empty() {
            continue;
        }
        if class == KernelClass::Attention {
            let peak = file.device.peak_flops_per_s.f32;
            let machine_rate = |a: &Attention, point: &MeasuredPoint| {
                a.flops().0 * point.devices as f64 / point.time_s
            };
            let fraction = |a: &Attention, point: &MeasuredPoint| machine_rate(a, point) / peak;
            fit_attention_curves(&mut file, &class_points, fraction);
            file.attention.provenance = fitted("the price of attention fitted", class);
        }
        if class == KernelClass::Link {
            let how = "bandwidth: that of memory; efficiency and fill fitted";
            let assumed = vec!["fill_half_bytes".to_owned()];
            file.links.intra_node.provenance = Provenance { assumed, ..fitted(how, class) };
        }
        fit_parameters(&mut file, class, |file| curve_error(file, &class_points));
    }
    // The load of the machine and the assumed step error apply to both executors.
    for launch_costs in [&mut file.executors.captured, &mut file.executors.eager] {
        launch_costs.step_error = Some(assumed_step_error(&measured.date));
        if let Some(Repeatability { undisturbed, .. }) = repeatability {
            launch_costs.step_factor = undisturbed.recip().clamp(1.0, STEP_FACTOR_MAX);
        }
    }
    file.measured = Some(KernelMeasurements {
        threads: Some(machine.threads),
        machine: Some(machine.title.clone()),
        repeatability,
        steps: None,
        points,
        provenance: measured.clone(),
    });
    with_relative_errors(file, &measured)
}

/// The profile with a measured rate of GEMMs whose operands are rounded to bf16: a multiple of that in f32. `how` says how it was
/// measured.
///
/// # Errors
/// A rate outside the range of profiles.
pub fn with_bf16_rate(profile: Profile, ratio: f64, how: &str) -> Result<Profile, Defects> {
    let mut file = profile.file().clone();
    let device = &mut file.device;
    device.peak_flops_per_s.bf16 = ratio * device.peak_flops_per_s.f32;
    device.provenance.assumed.retain(|field| field != BF16_RATE);
    device.provenance.source = format!("{}; {BF16_RATE}: {how}", device.provenance.source);
    file.resolve()
}

/// The assumed error of steps beyond that of their kernels, which measured steps replace
/// ([`with_step_error`](super::with_step_error)).
fn assumed_step_error(date: &str) -> RelativeError {
    let how = "nine plans in ten of the closed loop of docs/measurements.md lie within 8 %, on the \
               machine of this project; not measured on this one";
    let provenance = provenance(ProvenanceKind::Assumed, None, how, date);
    RelativeError { half_width_90: 0.08, residuals: vec![], provenance }
}

/// Sets peak and bandwidth to the largest measured rates of one device or of several together.
fn set_peak_rates(file: &mut ProfileFile, points: &[MeasuredPoint]) {
    let machine_rate =
        |work: f64, point: &MeasuredPoint| work * point.devices as f64 / point.time_s;
    let long = || points.iter().filter(|point| point.time_s >= LONG_S);
    let flops_per_s = |point: &MeasuredPoint| match &point.kernel {
        Kernel::Gemm(gemm) => machine_rate(gemm.flops().0, point),
        _ => 0.0,
    };
    let bytes_per_s = |point: &MeasuredPoint| match &point.kernel {
        Kernel::Fused(op) => machine_rate(op.traffic.as_f64(), point),
        _ => 0.0,
    };
    let peak = long().map(flops_per_s).fold(0.0, f64::max);
    if peak > 0.0 {
        let old = &file.device.peak_flops_per_s;
        let bf16_ratio = old.bf16 / old.f32;
        file.device.peak_flops_per_s.f32 = peak;
        file.device.peak_flops_per_s.bf16 = peak * bf16_ratio;
    }
    let bandwidth = long().map(bytes_per_s).fold(0.0, f64::max);
    if bandwidth > 0.0 {
        file.device.memory_bandwidth_bytes_per_s = bandwidth;
        file.fused.efficiency = 0.5;
        file.links.intra_node.bandwidth_bytes_per_s = bandwidth;
    }
}

/// Mean logarithmic error with the prices of the curves alone.
fn curve_error(file: &ProfileFile, points: &[MeasuredPoint]) -> f64 {
    let Ok(profile) = file.clone().resolve() else { return f64::INFINITY };
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 1 };
    let prices = Prices::new(&profile, Executor::Captured, &mesh);
    mean_log_error(points, |point| {
        let devices_sharing = match KernelClass::of(&point.kernel) {
            KernelClass::Link => 1.0,
            _ => point.devices as f64,
        };
        prices.kernel_time(&point.kernel).0 * devices_sharing
    })
}
