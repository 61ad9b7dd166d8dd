//! Fits of CPU profiles to simulated measurements.

use crate::kernels::{self, collective, fused};
use narrows_calibration::fit::{
    CpuMachine, fit_cpu_profile, step_error, with_bf16_rate, with_step_error,
};
use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::profile::{
    MeasuredPoint, Provenance, ProvenanceKind, Repeatability, preset,
};
use narrows_cost_model::{Executor, KernelClass, Prices, Profile};
use narrows_plan::kernel::{CollectiveKind, Direction, Kernel};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Bytes, DType, Mesh};

fn machine() -> CpuMachine {
    CpuMachine {
        name: "invented".into(),
        title: "an invented processor, 2 threads".into(),
        description: "A simulated machine.".into(),
        memory: Bytes(1 << 34),
        threads: 2,
        source: "a test".into(),
        date: "2026-11-21".into(),
    }
}

fn gemm(m: u64, n: u64, k: u64) -> Kernel {
    kernels::gemm(DType::F32, [m, n, k])
}

fn attention(length: u64, direction: Direction) -> Kernel {
    kernels::attention(DType::F32, direction, length, (8, 32))
}

fn all_reduce(bytes: u64) -> Kernel {
    collective(CollectiveKind::AllReduce, bytes, 2, 1)
}

/// Powers of four.
fn sizes() -> impl Iterator<Item = u64> + Clone {
    [64, 256, 1024].into_iter()
}

fn kernels() -> Vec<Kernel> {
    let mut all = vec![];
    for m in sizes() {
        for n in sizes() {
            all.extend(sizes().map(|k| gemm(m, n, k)));
        }
    }
    all.extend((10..24).step_by(2).map(|log| fused(1 << log)));
    for length in [64, 256, 1024] {
        all.extend([Direction::Forward, Direction::Backward].map(|way| attention(length, way)));
    }
    all.extend((10..24).step_by(2).map(|log| all_reduce(1 << log)));
    all
}

const fn mesh(devices: u64) -> Mesh {
    Mesh { tensor: devices, pipeline: 1, data: 1, context: 1 }
}

/// Prices of `truth` with noise, on one device and on two that share the memory.
fn measurements(truth: &Profile, noise: impl Fn(usize) -> f64) -> Vec<MeasuredPoint> {
    let prices = Prices::new(truth, Executor::Captured, &mesh(1));
    let mut points = vec![];
    for devices in [1, 2] {
        for kernel in kernels() {
            let link = KernelClass::of(&kernel) == KernelClass::Link;
            if link && devices == 1 {
                continue;
            }
            let sharing = if link { 1.0 } else { devices as f64 };
            let time_s = prices.kernel_time(&kernel).0 * sharing * noise(points.len());
            points.push(MeasuredPoint { kernel, devices, time_s, spread: 0.0 });
        }
    }
    points
}

fn truth() -> Profile {
    let mut file = preset("cpu-local").unwrap().file().clone();
    file.gemm.efficiency_max = 0.9;
    file.gemm.start_s = 4e-6;
    file.gemm.tile_overhead_elements = 2.0;
    file.fused.start_s = 3e-6;
    file.links.intra_node.fill_s = 15e-6;
    file.resolve().unwrap()
}

/// Largest logarithmic error of a price, for shapes between the measured ones.
fn largest_error(fitted: &Profile, truth: &Profile) -> f64 {
    let kernels = [
        gemm(128, 512, 512),
        gemm(512, 128, 256),
        fused(3 << 14),
        attention(512, Direction::Forward),
    ];
    let (fitted, truth) = (
        Prices::new(fitted, Executor::Captured, &mesh(1)),
        Prices::new(truth, Executor::Captured, &mesh(1)),
    );
    let error = |kernel| (fitted.kernel_time(kernel).0 / truth.kernel_time(kernel).0).ln().abs();
    kernels.iter().map(error).fold(0.0, f64::max)
}

#[test]
fn a_fit_recovers_the_true_profile() {
    let truth = truth();
    let fitted = fit_cpu_profile(&machine(), measurements(&truth, |_| 1.0), None).unwrap();
    let prices = |devices| Prices::new(&fitted, Executor::Captured, &mesh(devices));
    for point in measurements(&truth, |_| 1.0) {
        let priced = prices(point.devices).kernel_time(&point.kernel).0;
        assert!((priced / point.time_s).ln().abs() < 0.05, "{point:?}: {priced}");
        assert!(!prices(point.devices).is_unmeasured(&point.kernel));
    }
    assert!(largest_error(&fitted, &truth) < 0.25, "{}", largest_error(&fitted, &truth));
    let file = fitted.file();
    assert!((file.fused.start_s / 3e-6).ln().abs() < 0.5, "{}", file.fused.start_s);
    assert_eq!(file.gemm.provenance.kind, ProvenanceKind::Measured);
    assert!(fitted.assumed_paths().iter().all(|path| !path.starts_with("gemm")));
}

#[test]
fn prices_fitted_to_noise_are_positive_finite_and_within_the_peak() {
    let truth = truth();
    let noise =
        |index: usize| if index.is_multiple_of(7) { 5.0 } else { 1.0 + (index % 3) as f64 / 5.0 };
    let fitted = fit_cpu_profile(&machine(), measurements(&truth, noise), None).unwrap();
    for devices in [1, 2, 64] {
        let prices = Prices::new(&fitted, Executor::Captured, &mesh(devices));
        for log in 0..40 {
            for kernel in [gemm(1 << log.min(20), 64, 8), fused(1 << log), all_reduce(1 << log)] {
                let price = prices.kernel_time(&kernel).0;
                assert!(price.is_finite() && price > 0.0, "{kernel:?}: {price}");
                if let Kernel::Gemm(gemm) = &kernel {
                    let peak = fitted.peak_flops_per_s(DType::F32);
                    assert!(gemm.flops().0 / price <= peak * 1.000_001);
                }
            }
        }
    }
}

#[test]
fn intervals_of_unmeasured_shapes_are_wider() {
    let fitted = fit_cpu_profile(&machine(), measurements(&truth(), |_| 1.0), None).unwrap();
    let prices = Prices::new(&fitted, Executor::Captured, &mesh(1));
    let (near, far) = (gemm(256, 256, 300), gemm(1 << 16, 1 << 16, 256));
    assert!(!prices.is_unmeasured(&near) && prices.is_unmeasured(&far));
    assert!(prices.relative_half_width(&far) > 2.0 * prices.relative_half_width(&near));
}

#[test]
fn a_fit_without_measurements_is_an_error() {
    let defects = fit_cpu_profile(&machine(), vec![], None).unwrap_err();
    assert!(defects.to_string().contains("measured.points"), "{defects}");
}

fn closed_loop() -> Provenance {
    let (kind, source) = (ProvenanceKind::Measured, "a closed loop".into());
    Provenance { kind, source, date: "2026-11-21".into(), assumed: vec![] }
}

/// Simulated errors of groups of eight plans, with standard deviations between and within groups.
fn simulate_errors(
    random: &mut SplitMix64,
    groups: usize,
    group_deviation: f64,
    plan_deviation: f64,
) -> Vec<Vec<f64>> {
    let mut group = || {
        let group_error = group_deviation * random.normal();
        (0..8).map(|_| group_error + plan_deviation * random.normal()).collect()
    };
    (0..groups).map(|_| group()).collect()
}

/// Holds for any ratio of errors between and within groups.
#[test]
fn intervals_of_compared_steps_cover_the_next_group() {
    let fitted = fit_cpu_profile(&machine(), measurements(&truth(), |_| 1.0), None).unwrap();
    let near = [(gemm(256, 256, 256), 3.0), (fused(1 << 12), 5.0)];
    let mut random = SplitMix64::new(7);
    for (group_deviation, plan_deviation) in [(0.05, 0.01), (0.03, 0.05), (0.0, 0.1)] {
        let (mut inside, mut all) = (0, 0);
        for _ in 0..60 {
            let mut groups = simulate_errors(&mut random, 7, group_deviation, plan_deviation);
            let next = groups.pop().unwrap();
            let compared_groups: Vec<&[f64]> = groups.iter().map(Vec::as_slice).collect();
            let compared =
                with_step_error(&fitted, step_error(&compared_groups, closed_loop()).unwrap())
                    .unwrap();
            let error_model = ErrorModel::new(&compared, Executor::Captured, &mesh(1));
            let [low, high] = error_model.step_interval(&near);
            inside += next.iter().filter(|error| (low..=high).contains(&error.exp())).count();
            all += next.len();
        }
        let share = f64::from(inside as u32) / f64::from(all as u32);
        println!("{group_deviation} {plan_deviation}: {share}");
        assert!((0.85..=0.96).contains(&share), "{group_deviation} {plan_deviation}: {share}");
    }
}

/// Only distance from the measured shapes adds to a measured error of steps.
#[test]
fn measured_step_errors_replace_assumed_ones() {
    let fitted = fit_cpu_profile(&machine(), measurements(&truth(), |_| 1.0), None).unwrap();
    let assumed = fitted.file().executors.captured.step_error.as_ref().unwrap();
    assert_eq!((assumed.half_width_90, assumed.provenance.kind), (0.08, ProvenanceKind::Assumed));
    assert!(fitted.assumed_paths().contains(&"executors.captured.step_error".to_string()));
    let groups = [[0.2, -0.1], [0.15, 0.18], [-0.2, -0.17]];
    let groups: Vec<&[f64]> = groups.iter().map(|group| &group[..]).collect();
    let error = step_error(&groups, closed_loop()).unwrap();
    let compared = with_step_error(&fitted, error.clone()).unwrap();
    assert!(!compared.assumed_paths().contains(&"executors.captured.step_error".to_string()));
    let width = |profile: &Profile, executor, kernel: Kernel| {
        let [low, high] =
            ErrorModel::new(profile, executor, &mesh(1)).step_interval(&[(kernel, 1.0)]);
        (high / low).ln() / 2.0
    };
    let (near, far) = (gemm(256, 256, 256), gemm(1 << 16, 1 << 16, 256));
    let near_width = width(&compared, Executor::Captured, near.clone());
    assert!((near_width / error.half_width_90.ln_1p() - 1.0).abs() < 0.1, "{near_width} {error:?}");
    assert!(width(&compared, Executor::Captured, far) > near_width);
    let eager = |profile| width(profile, Executor::Eager, near.clone());
    assert_eq!(eager(&compared), eager(&fitted), "steps of the eager executor were not compared");
    assert!(
        step_error(&groups[..1], closed_loop()).is_none(),
        "an error between groups needs two groups"
    );
    let busy = step_error(&[&[7.0], &[-7.0], &[7.0]], closed_loop()).unwrap();
    assert!(busy.half_width_90 > 1000.0, "large errors are capped: {busy:?}");
    assert!(with_step_error(&fitted, busy).is_ok());
    let exact = step_error(&[&[0.0], &[0.0]], closed_loop()).unwrap();
    assert!(exact.half_width_90 >= 0.03 && with_step_error(&fitted, exact).is_ok());
}

#[test]
fn a_busy_machine_is_reported_and_does_not_change_prices_of_kernels() {
    let fit = |undisturbed| {
        let repeatability =
            Repeatability::from_points(&measurements(&truth(), |_| 1.0), 2, undisturbed);
        fit_cpu_profile(&machine(), measurements(&truth(), |_| 1.0), Some(repeatability)).unwrap()
    };
    let (quiet, busy) = (fit(0.96), fit(0.4));
    assert_eq!(quiet.warning(), None);
    let warning = busy.warning().unwrap();
    assert!(warning.contains("`invented` was measured on a busy machine"), "{warning}");
    let factor = |profile: &Profile| profile.launch_costs(Executor::Captured).step_factor;
    assert!((factor(&quiet) - 1.0 / 0.96).abs() < 1e-9 && factor(&busy) == 1.25);
    for profile in [&quiet, &busy] {
        // The eager executor was not measured, and gets the same factor.
        let eager = profile.launch_costs(Executor::Eager);
        assert!(eager.step_factor == factor(profile) && eager.step_error.is_some(), "{eager:?}");
    }
    let mut alike = busy.file().clone();
    let executors = &mut alike.executors;
    for launching in [&mut executors.captured, &mut executors.eager] {
        launching.step_factor = factor(&quiet);
    }
    assert_eq!(quiet.fingerprint(), alike.resolve().unwrap().fingerprint());
    let text = serde_json::to_string(busy.file()).unwrap();
    let again = narrows_cost_model::profile::read(&text).unwrap();
    assert_eq!(again.warning(), Some(warning));
}

/// GEMMs in bf16 have their measured rate, although the measurements that correct prices are in f32; other kernels keep their
/// prices.
#[test]
fn gemms_in_bf16_have_their_measured_rate() {
    let fitted = fit_cpu_profile(&machine(), measurements(&truth(), |_| 1.3), None).unwrap();
    assert!(fitted.with_bf16_gemms().is_none(), "an assumed rate");
    assert!(preset("cpu-local").unwrap().with_bf16_gemms().is_none());
    let measured = with_bf16_rate(fitted.clone(), 2.0, "a test").unwrap();
    assert!(!measured.assumed_paths().iter().any(|path| path.contains("bf16")));
    let rounded = measured.with_bf16_gemms().unwrap();
    let ratio = |kernel: &Kernel| {
        let [rounded, exact] = [&rounded, &fitted].map(|profile| {
            Prices::new(profile, Executor::Captured, &mesh(1)).kernel_time(kernel).0
        });
        rounded / exact
    };
    for kernel in [gemm(1024, 1024, 1024), gemm(4096, 512, 512)] {
        assert!((0.48..0.6).contains(&ratio(&kernel)), "{kernel:?}: {}", ratio(&kernel));
    }
    for kernel in [attention(512, Direction::Forward), fused(1 << 20), all_reduce(1 << 20)] {
        assert_eq!(ratio(&kernel), 1.0, "{kernel:?}");
    }
}
