//! Intervals: what they cover where the law and its noise are known, and when they are wider.

use narrows_calibration::validation::Coverage;
use narrows_calibration::{Bootstrap, bootstrap, independent_units};
use narrows_cost_model::Executor;
use narrows_cost_model::interval::{ErrorModel, prediction_interval};
use narrows_cost_model::profile::{Profile, ProfileFile, preset, preset_names};
use narrows_plan::kernel::{Collective, CollectiveKind, Gemm, Kernel};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Axis, DeviceGroup};
use narrows_plan::{Bytes, DType, Mesh};

/// Sizes x, y and a time.
type Row = ([f64; 3], f64);

/// The truth: seconds of x operations and y bytes, and of a launch.
const LAW: [f64; 3] = [2.0, 0.7, 3.0];

fn law(numbers: &[f64; 3], sizes: &[f64; 3]) -> f64 {
    numbers.iter().zip(sizes).map(|(a, b)| a * b).sum()
}

/// Measurements with a relative error that is normal in its logarithm.
fn drawn(random: &mut SplitMix64, count: usize, noise: f64) -> Vec<Row> {
    let mut row = || {
        let sizes = [1.0, 1.0].map(|_: f64| (random.uniform() * 4.0).exp());
        let sizes = [sizes[0], sizes[1], 1.0];
        (sizes, law(&LAW, &sizes) * (noise * random.normal()).exp())
    };
    (0..count).map(|_| row()).collect()
}

/// Least squares of relative errors: three equations, by Gauss.
fn fit(rows: &[Row], times: &[f64]) -> [f64; 3] {
    // A little of the truth's size keeps draws of few rows solvable.
    let mut equations = [[1e-9, 0.0, 0.0, 0.0], [0.0, 1e-9, 0.0, 0.0], [0.0, 0.0, 1e-9, 0.0]];
    for ((sizes, time), weight) in rows.iter().zip(times) {
        let over = sizes.map(|size| size / time);
        for i in 0..3 {
            for j in 0..3 {
                equations[i][j] += weight * over[i] * over[j];
            }
            equations[i][3] += weight * over[i];
        }
    }
    for pivot in 0..3 {
        let own = equations[pivot];
        for (_, equation) in equations.iter_mut().enumerate().filter(|(row, _)| *row != pivot) {
            let factor = equation[pivot] / own[pivot];
            equation.iter_mut().zip(own).for_each(|(value, of)| *value -= factor * of);
        }
    }
    std::array::from_fn(|i| (equations[i][3] / equations[i][i]).max(1e-3))
}

/// The interval of a new row's time, from a bootstrap of the rows.
struct Fitted {
    numbers: [f64; 3],
    bootstrap: Bootstrap<[f64; 3]>,
}

impl Fitted {
    fn new(rows: &[Row], draws: usize) -> Fitted {
        let residual =
            |numbers: &[f64; 3], row: usize| (rows[row].1 / law(numbers, &rows[row].0)).ln();
        let numbers = fit(rows, &vec![1.0; rows.len()]);
        let again = |times: &[f64]| fit(rows, times);
        let bootstrap =
            bootstrap(&independent_units(rows.len()), draws, 7, &numbers, again, residual);
        Fitted { numbers, bootstrap }
    }

    fn interval(&self, sizes: &[f64; 3], scale: f64) -> [f64; 2] {
        let own = law(&self.numbers, sizes);
        let draws: Vec<f64> =
            self.bootstrap.draws.iter().map(|numbers| (law(numbers, sizes) / own).ln()).collect();
        let residuals: Vec<f64> = self.bootstrap.residuals.iter().map(|(_, r)| *r).collect();
        prediction_interval(&draws, &residuals, scale).map(|logarithm| own * logarithm.exp())
    }
}

/// Calibrations drawn from a known law: nine in ten of what is measured afterwards lie within.
#[test]
fn nine_in_ten_lie_within_where_the_law_is_known() {
    for (count, noise) in [(25, 0.05), (60, 0.15), (200, 0.3)] {
        let mut random = SplitMix64::new(count as u64);
        let mut covered = vec![];
        for _ in 0..200 {
            let fitted = Fitted::new(&drawn(&mut random, count, noise), 24);
            for (sizes, time) in drawn(&mut random, 10, noise) {
                covered.push((time, fitted.interval(&sizes, 1.0)));
            }
        }
        let share = Coverage::count(covered).share().unwrap();
        println!("{count} measurements, noise {noise}: {:.1} % within", share * 100.0);
        assert!((0.85..=0.95).contains(&share), "{count} measurements: {share}");
    }
}

/// Whatever the seed: a unit that no draw leaves out would have no residual, and be missing where it errs most.
#[test]
fn every_unit_is_left_out_by_some_draw() {
    let strata = [vec![vec![0], vec![1], vec![2]], vec![vec![3, 4], vec![5]]];
    for seed in 0..200 {
        let of = |draws: usize| bootstrap(&strata, draws, seed, &0.0, |_| 0.0, |_, row| row as f64);
        let found = of(16);
        let rows: Vec<usize> = found.residuals.iter().map(|(row, _)| *row).collect();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5], "seed {seed}");
        assert!((16..=64).contains(&found.draws.len()), "{}", found.draws.len());
    }
    // One that is alone is in every draw, and drawing ends all the same.
    let alone = bootstrap(&[vec![vec![0]]], 3, 1, &0.0, |_| 0.0, |_, _| 1.0);
    assert_eq!((alone.draws.len(), alone.residuals.len()), (12, 0));
}

#[test]
fn fewer_measurements_and_more_distance_make_wider_intervals() {
    let width = |[low, high]: [f64; 2]| (high / low).ln();
    let mean = |count: usize, scale: f64| {
        let mut random = SplitMix64::new(1);
        let mut one = || {
            let fitted = Fitted::new(&drawn(&mut random, count, 0.1), 24);
            width(fitted.interval(&[20.0, 20.0, 1.0], scale))
        };
        (0..60).map(|_| one()).sum::<f64>() / 60.0
    };
    let (many, few, far) = (mean(100, 1.0), mean(12, 1.0), mean(100, 3.0));
    assert!(few > 1.15 * many && far > 2.5 * many, "{many} {few} {far}");
    let rows = drawn(&mut SplitMix64::new(3), 30, 0.1);
    let interval = || Fitted::new(&rows, 24).interval(&[5.0, 9.0, 1.0], 1.0);
    assert_eq!(interval(), interval());
}

fn product(m: u64, n: u64, k: u64, accumulate: bool) -> Kernel {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Kernel::Gemm(Gemm { m, n, k, batch: 1, accumulate, input, output })
}

fn all_reduce(mib: u64, size: u64, stride: u64) -> Kernel {
    let (kind, payload) = (CollectiveKind::AllReduce, Bytes(mib * Bytes::MIB));
    let group = DeviceGroup { axis: Axis::Tensor, size, stride };
    Kernel::Collective(Collective { kind, payload, group })
}

fn ratios(profile: &Profile, kernel: Kernel) -> [f64; 2] {
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 2 };
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

/// Two measurements say less of the next one than the same half-width that somebody gives.
#[test]
fn few_residuals_make_wider_intervals() {
    let of = |residuals: &[f64]| {
        let mut file = preset("h100-sxm").unwrap().file().clone();
        file.gemm.relative_error.residuals = residuals.to_vec();
        width(&file.resolve().unwrap(), product(4096, 4096, 4096, false))
    };
    let (none, two, eight) = (of(&[]), of(&[0.1, -0.2]), of(&[0.1; 8]));
    assert!(two > 1.6 * none && two < 1.9 * none, "{none} {two}");
    assert!(eight > 1.05 * none && eight < two, "{none} {eight} {two}");
}

#[test]
fn prices_far_from_published_figures_are_less_certain() {
    let a100 = preset("a100-80gb").unwrap();
    let known = product(16_384, 4096, 4096, false);
    let near = width(&a100, known.clone());
    assert!(near < 0.2, "{near}");
    for far in [product(16_384, 4096, 4096, true), product(64, 64, 64, false)] {
        assert!(width(&a100, far.clone()) > 1.5 * near, "{far:?}");
    }
    let (inside, across) = (all_reduce(128, 4, 1), all_reduce(128, 2, 4));
    assert!(width(&a100, across) > 2.0 * width(&a100, inside));
    // The same numbers from fewer shapes.
    let with = |change: fn(&mut ProfileFile)| {
        let mut file = a100.file().clone();
        change(&mut file);
        file.resolve().unwrap()
    };
    let fewer = with(|file| {
        let refits = file.refits.as_mut().unwrap();
        refits.kernels = vec![product(2048, 1024, 1024, false)];
    });
    assert!(width(&fewer, known.clone()) > 1.5 * near);
    // And as a profile without any measurement assumes it.
    assert!(width(&preset("h100-sxm").unwrap(), known) > 2.0 * near);
}

/// Curves that were carried over from other hardware are no better there than where they were fitted.
#[test]
fn carried_over_prices_are_less_certain_than_fitted_ones() {
    let base = preset("a100-80gb").unwrap();
    let kernels = [
        product(16_384, 4096, 4096, false),
        product(64, 64, 64, false),
        product(16_384, 4096, 4096, true),
        product(100_000, 8, 8, true),
        all_reduce(128, 4, 1),
        all_reduce(1 << 20, 2, 1),
    ];
    for name in preset_names().filter(|name| *name != "a100-80gb") {
        let profile = preset(name).unwrap();
        for kernel in &kernels {
            let (carried, fitted) = (width(&profile, kernel.clone()), width(&base, kernel.clone()));
            assert!(carried > 0.98 * fitted, "{name}, {kernel:?}: {carried} {fitted}");
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
fn kernels_that_nobody_measured_are_named_by_their_share() {
    let mesh = Mesh { tensor: 4, pipeline: 1, data: 1 };
    let kernels = [
        (product(16_384, 4096, 4096, false), 2.0),
        (product(64, 64, 64, false), 1.0),
        (product(16_384, 4096, 4096, true), 1.0),
        (all_reduce(0, 4, 1), 1.0),
    ];
    let a100 = preset("a100-80gb").unwrap();
    let found = ErrorModel::new(&a100, Executor::Eager, &mesh).unmeasured_kernels(&kernels);
    let named: Vec<&Kernel> = found.iter().map(|one| &one.kernel).collect();
    assert_eq!(named, [&kernels[2].0, &kernels[1].0]);
    assert!((0.3..0.4).contains(&found[0].share), "{found:?}");
    assert!(found.iter().all(|one| one.distance_octaves.unwrap() > 1.0));
    let h100 = preset("h100-sxm").unwrap();
    let h100 = ErrorModel::new(&h100, Executor::Eager, &mesh);
    assert!(!h100.has_measured_shapes() && h100.unmeasured_kernels(&kernels).is_empty());
}
