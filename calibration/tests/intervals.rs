//! Coverage of intervals where the true function and its noise are known, and widths of intervals.

use narrows_calibration::validation::IntervalCoverage;
use narrows_calibration::{Bootstrap, bootstrap, independent_units};
use narrows_cost_model::Executor;
use narrows_cost_model::interval::{ErrorModel, prediction_interval};
use narrows_cost_model::profile::{Profile, ProfileFile, preset, preset_names};
use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

/// Sizes (x, y, 1) and a time in seconds.
type Row = ([f64; 3], f64);

/// True coefficients: seconds for each unit of x and y, and of a launch.
const LAW: [f64; 3] = [2.0, 0.7, 3.0];

fn law(coefficients: &[f64; 3], sizes: &[f64; 3]) -> f64 {
    coefficients.iter().zip(sizes).map(|(a, b)| a * b).sum()
}

/// Simulated measurements with log-normal relative errors.
fn simulate(random: &mut SplitMix64, count: usize, noise: f64) -> Vec<Row> {
    let mut row = || {
        let sizes = [1.0, 1.0].map(|_: f64| (random.uniform() * 4.0).exp());
        let sizes = [sizes[0], sizes[1], 1.0];
        (sizes, law(&LAW, &sizes) * (noise * random.normal()).exp())
    };
    (0..count).map(|_| row()).collect()
}

/// Least squares of relative errors, in which row i counts `counts[i]` times: three equations, by Gaussian
/// elimination.
fn fit(rows: &[Row], counts: &[f64]) -> [f64; 3] {
    // Regularization, for draws of few distinct rows.
    let mut equations = [[1e-9, 0.0, 0.0, 0.0], [0.0, 1e-9, 0.0, 0.0], [0.0, 0.0, 1e-9, 0.0]];
    for ((sizes, time), weight) in rows.iter().zip(counts) {
        let relative = sizes.map(|size| size / time);
        for i in 0..3 {
            for j in 0..3 {
                equations[i][j] += weight * relative[i] * relative[j];
            }
            equations[i][3] += weight * relative[i];
        }
    }
    for pivot in 0..3 {
        let own = equations[pivot];
        for (_, equation) in equations.iter_mut().enumerate().filter(|(row, _)| *row != pivot) {
            let factor = equation[pivot] / own[pivot];
            equation.iter_mut().zip(own).for_each(|(value, own)| *value -= factor * own);
        }
    }
    std::array::from_fn(|i| (equations[i][3] / equations[i][i]).max(1e-3))
}

/// A fit and its bootstrap.
struct Fitted {
    coefficients: [f64; 3],
    bootstrap: Bootstrap<[f64; 3]>,
}

impl Fitted {
    fn new(rows: &[Row], draws: usize) -> Fitted {
        let residual = |coefficients: &[f64; 3], row: usize| {
            (rows[row].1 / law(coefficients, &rows[row].0)).ln()
        };
        let coefficients = fit(rows, &vec![1.0; rows.len()]);
        let refit = |counts: &[f64]| fit(rows, counts);
        let bootstrap =
            bootstrap(&independent_units(rows.len()), draws, 7, &coefficients, refit, residual);
        Fitted { coefficients, bootstrap }
    }

    /// The interval of a new measurement.
    fn interval(&self, sizes: &[f64; 3], scale: f64) -> [f64; 2] {
        let own = law(&self.coefficients, sizes);
        let draws: Vec<f64> =
            self.bootstrap.draws.iter().map(|draw| (law(draw, sizes) / own).ln()).collect();
        let residuals: Vec<f64> = self.bootstrap.residuals.iter().map(|(_, r)| *r).collect();
        prediction_interval(&draws, &residuals, scale).map(|logarithm| own * logarithm.exp())
    }
}

#[test]
fn intervals_cover_nine_in_ten_new_measurements_of_a_known_function() {
    for (count, noise) in [(25, 0.05), (60, 0.15), (200, 0.3)] {
        let mut random = SplitMix64::new(count as u64);
        let mut measurements = vec![];
        for _ in 0..200 {
            let fitted = Fitted::new(&simulate(&mut random, count, noise), 24);
            for (sizes, time) in simulate(&mut random, 10, noise) {
                measurements.push((time, fitted.interval(&sizes, 1.0)));
            }
        }
        let share = IntervalCoverage::count(measurements).share().unwrap();
        println!("{count} measurements, noise {noise}: {:.1} % within", share * 100.0);
        assert!((0.85..=0.95).contains(&share), "{count} measurements: {share}");
    }
}

/// A unit that is in every draw would have no residual, even if its error is the largest.
#[test]
fn every_unit_is_left_out_by_some_draw() {
    let strata = [vec![vec![0], vec![1], vec![2]], vec![vec![3, 4], vec![5]]];
    for seed in 0..200 {
        let bootstrap = bootstrap(&strata, 16, seed, &0.0, |_| 0.0, |_, row| row as f64);
        let rows: Vec<usize> = bootstrap.residuals.iter().map(|(row, _)| *row).collect();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5], "seed {seed}");
        assert!((16..=64).contains(&bootstrap.draws.len()), "{}", bootstrap.draws.len());
    }
    // The only unit of a stratum is in every draw, and drawing ends nevertheless.
    let single = bootstrap(&[vec![vec![0]]], 3, 1, &0.0, |_| 0.0, |_, _| 1.0);
    assert_eq!((single.draws.len(), single.residuals.len()), (12, 0));
}

#[test]
fn fewer_measurements_and_more_distance_make_wider_intervals() {
    let width = |[low, high]: [f64; 2]| (high / low).ln();
    let mean = |count: usize, scale: f64| {
        let mut random = SplitMix64::new(1);
        let mut sample = || {
            let fitted = Fitted::new(&simulate(&mut random, count, 0.1), 24);
            width(fitted.interval(&[20.0, 20.0, 1.0], scale))
        };
        (0..60).map(|_| sample()).sum::<f64>() / 60.0
    };
    let (many, few, far) = (mean(100, 1.0), mean(12, 1.0), mean(100, 3.0));
    assert!(few > 1.15 * many && far > 2.5 * many, "{many} {few} {far}");
    let rows = simulate(&mut SplitMix64::new(3), 30, 0.1);
    let interval = || Fitted::new(&rows, 24).interval(&[5.0, 9.0, 1.0], 1.0);
    assert_eq!(interval(), interval());
}

fn gemm(m: u64, n: u64, k: u64, accumulate: bool) -> Kernel {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Kernel::Gemm(Gemm { m, n, k, batch: 1, accumulate, residual: false, input, output })
}

fn all_reduce(mib: u64, size: u64, stride: u64) -> Kernel {
    let (kind, payload) = (CollectiveKind::AllReduce, Bytes(mib * Bytes::MIB));
    let group = DeviceGroup { axis: Axis::Tensor, size, stride };
    Kernel::Collective(Collective { kind, payload, group })
}

fn ratios(profile: &Profile, kernel: Kernel) -> [f64; 2] {
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 2, context: 1 };
    let [low, high] =
        ErrorModel::new(profile, Executor::Eager, &mesh).kernels_interval(&[(kernel, 3.0)]);
    assert!(low <= 1.0 && 1.0 <= high && low > 0.0 && high.is_finite(), "{low} {high}");
    [low, high]
}

fn width(profile: &Profile, kernel: Kernel) -> f64 {
    let [low, high] = ratios(profile, kernel.clone());
    assert_eq!(ratios(profile, kernel), [low, high]);
    (high / low).ln()
}

/// Two residuals make a wider interval than an assumed half width of the same size.
#[test]
fn few_residuals_make_wider_intervals() {
    let width_with = |residuals: &[f64]| {
        let mut file = preset("h100-sxm").unwrap().file().clone();
        file.gemm.relative_error.residuals = residuals.to_vec();
        width(&file.resolve().unwrap(), gemm(4096, 4096, 4096, false))
    };
    let (none, two, eight) = (width_with(&[]), width_with(&[0.1, -0.2]), width_with(&[0.1; 8]));
    assert!(two > 1.6 * none && two < 1.9 * none, "{none} {two}");
    assert!(eight > 1.05 * none && eight < two, "{none} {eight} {two}");
}

/// The error of whole steps contains that of their kernels, and is not added to it.
#[test]
fn an_error_of_whole_steps_is_not_added_to_that_of_kernels() {
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 };
    let kernels = [(gemm(16_384, 4096, 4096, false), 10.0), (all_reduce(128, 4, 1), 5.0)];
    let width_with = |includes_kernels: bool| {
        let mut file = preset("a100-80gb").unwrap().file().clone();
        file.executors.eager.step_error_includes_kernels = includes_kernels;
        let profile = file.resolve().unwrap();
        let [low, high] = ErrorModel::new(&profile, Executor::Eager, &mesh).step_interval(&kernels);
        (high / low).ln() / 2.0
    };
    let file = preset("a100-80gb").unwrap();
    let shipped = file.file().executors.eager.step_error.as_ref().unwrap().half_width_90.ln_1p();
    let (whole, added) = (width_with(true), width_with(false));
    assert!((whole / shipped - 1.0).abs() < 0.1 && added > 1.05 * whole, "{whole} {added}");
}

#[test]
fn intervals_far_from_measured_shapes_are_wider() {
    let a100 = preset("a100-80gb").unwrap();
    let known = gemm(16_384, 4096, 4096, false);
    let near = width(&a100, known.clone());
    assert!(near < 0.2, "{near}");
    for far in [gemm(16_384, 4096, 4096, true), gemm(64, 64, 64, false)] {
        assert!(width(&a100, far.clone()) > 1.5 * near, "{far:?}");
    }
    let (inside, across) = (all_reduce(128, 4, 1), all_reduce(128, 2, 4));
    assert!(width(&a100, across) > 2.0 * width(&a100, inside));
    // The same coefficients, fitted to fewer shapes.
    let with = |change: fn(&mut ProfileFile)| {
        let mut file = a100.file().clone();
        change(&mut file);
        file.resolve().unwrap()
    };
    let fewer = with(|file| {
        let refits = file.refits.as_mut().unwrap();
        refits.kernels = vec![gemm(2048, 1024, 1024, false)];
    });
    assert!(width(&fewer, known.clone()) > 1.5 * near);
    // A profile without measurements.
    assert!(width(&preset("h100-sxm").unwrap(), known) > 2.0 * near);
}

/// Widths of 192 and 768 are equally far from measured ones of 256 and 1024.
#[test]
fn intervals_of_gemms_narrower_than_all_measured_ones_are_wider() {
    let a100 = preset("a100-80gb").unwrap();
    let [narrow, wide, measured] = [[192, 3072], [768, 3072], [1024, 4096]]
        .map(|[n, k]| width(&a100, gemm(16_384, n, k, false)));
    assert!(narrow > 1.5 * wide && wide > 1.3 * measured, "{narrow} {wide} {measured}");
}

#[test]
fn intervals_of_profiles_derived_from_others_are_no_narrower() {
    let base = preset("a100-80gb").unwrap();
    let kernels = [
        gemm(16_384, 4096, 4096, false),
        gemm(64, 64, 64, false),
        gemm(16_384, 4096, 4096, true),
        gemm(100_000, 8, 8, true),
        all_reduce(128, 4, 1),
        all_reduce(1 << 20, 2, 1),
    ];
    for name in preset_names().filter(|name| *name != "a100-80gb") {
        let profile = preset(name).unwrap();
        for kernel in &kernels {
            let (derived, fitted) = (width(&profile, kernel.clone()), width(&base, kernel.clone()));
            assert!(derived > 0.98 * fitted, "{name}, {kernel:?}: {derived} {fitted}");
        }
        if profile.file().form_of.is_some() {
            let far = |near: usize, far: usize| {
                let [near, far] = [near, far].map(|index| width(&profile, kernels[index].clone()));
                assert!(far > 1.5 * near, "{name}: {near} {far}");
            };
            far(0, 1);
            far(0, 3);
            far(4, 5);
        }
    }
}

#[test]
fn unmeasured_kernels_are_listed_by_share() {
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 };
    let kernels = [
        (gemm(16_384, 4096, 4096, false), 2.0),
        (gemm(64, 64, 64, false), 1.0),
        (gemm(16_384, 4096, 4096, true), 1.0),
        (all_reduce(0, 4, 1), 1.0),
    ];
    let a100 = preset("a100-80gb").unwrap();
    let unmeasured = ErrorModel::new(&a100, Executor::Eager, &mesh).unmeasured_kernels(&kernels);
    let listed: Vec<&Kernel> = unmeasured.iter().map(|entry| &entry.kernel).collect();
    assert_eq!(listed, [&kernels[2].0, &kernels[1].0]);
    assert!((0.3..0.4).contains(&unmeasured[0].share), "{unmeasured:?}");
    assert!(unmeasured.iter().all(|entry| entry.distance_octaves.unwrap() > 1.0));
    let h100 = preset("h100-sxm").unwrap();
    let h100 = ErrorModel::new(&h100, Executor::Eager, &mesh);
    assert!(!h100.has_measured_shapes() && h100.unmeasured_kernels(&kernels).is_empty());
}
