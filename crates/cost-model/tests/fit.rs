//! A fit finds the machine that made its measurements.

use narrows_cost_model::fit::{Machine, profile};
use narrows_cost_model::price::measured::Class;
use narrows_cost_model::profile::{Point, ProvenanceKind, preset};
use narrows_cost_model::{Executor, Prices, Profile};
use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, Gemm, Kernel, Pass, PassKind,
};
use narrows_plan::mesh::{Axis, Group};
use narrows_plan::{Bytes, DType, Mesh};

fn machine() -> Machine {
    Machine {
        name: "invented".into(),
        description: "A machine that a formula is.".into(),
        memory: Bytes(1 << 34),
        threads: 2,
        source: "a test".into(),
        date: "2026-11-21".into(),
    }
}

fn product(m: u64, n: u64, k: u64) -> Kernel {
    let (input, output) = (DType::F32, DType::F32);
    Kernel::Gemm(Gemm { m, n, k, batch: 1, accumulate: false, input, output })
}

fn pass(bytes: u64) -> Kernel {
    let (traffic, unfused_traffic) = (Bytes(bytes), Bytes(2 * bytes));
    Kernel::Pass(Pass { kind: PassKind::Add, traffic, unfused_traffic, unfused_launches: 2 })
}

fn attention(length: u64, direction: Direction) -> Kernel {
    let input = DType::F32;
    let (sequences, heads, kv_heads, head_dim) = (4, 8, 8, 32);
    Kernel::Attention(Attention { direction, sequences, length, heads, kv_heads, head_dim, input })
}

fn all_reduce(bytes: u64) -> Kernel {
    let group = Group { axis: Axis::Tensor, size: 2, stride: 1 };
    let payload = Bytes(bytes);
    Kernel::Collective(Collective { kind: CollectiveKind::AllReduce, payload, group })
}

/// Powers of four.
fn sizes() -> impl Iterator<Item = u64> + Clone {
    [64, 256, 1024].into_iter()
}

fn kernels() -> Vec<Kernel> {
    let mut all = vec![];
    for m in sizes() {
        for n in sizes() {
            all.extend(sizes().map(|k| product(m, n, k)));
        }
    }
    all.extend((10..24).step_by(2).map(|log| pass(1 << log)));
    for length in [64, 256, 1024] {
        all.extend([Direction::Forward, Direction::Backward].map(|way| attention(length, way)));
    }
    all.extend((10..24).step_by(2).map(|log| all_reduce(1 << log)));
    all
}

const fn mesh(devices: u64) -> Mesh {
    Mesh { tensor: devices, pipeline: 1, data: 1 }
}

/// What `truth` makes of each kernel, on one device and on two that share it.
fn measurements(truth: &Profile, noise: impl Fn(usize) -> f64) -> Vec<Point> {
    let prices = Prices::new(truth, Executor::Captured, &mesh(1));
    let mut points = vec![];
    for devices in [1, 2] {
        for kernel in kernels() {
            let link = Class::of(&kernel) == Class::Link;
            if link && devices == 1 {
                continue;
            }
            let sharing = if link { 1.0 } else { devices as f64 };
            let time_s = prices.kernel(&kernel).0 * sharing * noise(points.len());
            points.push(Point { kernel, devices, time_s, spread: 0.0 });
        }
    }
    points
}

fn truth() -> Profile {
    let mut file = preset("cpu-local").unwrap().file().clone();
    file.gemm.efficiency_max = 0.9;
    file.gemm.start_s = 4e-6;
    file.gemm.tile_overhead_elements = 2.0;
    file.passes.start_s = 3e-6;
    file.links.intra_node.fill_s = 15e-6;
    file.resolve().unwrap()
}

/// The largest distance of a price from the truth, over shapes between those that were measured.
fn furthest(fitted: &Profile, truth: &Profile) -> f64 {
    let between = [
        product(128, 512, 512),
        product(512, 128, 256),
        pass(3 << 14),
        attention(512, Direction::Forward),
    ];
    let (fitted, truth) = (
        Prices::new(fitted, Executor::Captured, &mesh(1)),
        Prices::new(truth, Executor::Captured, &mesh(1)),
    );
    let apart = |kernel| (fitted.kernel(kernel).0 / truth.kernel(kernel).0).ln().abs();
    between.iter().map(apart).fold(0.0, f64::max)
}

#[test]
fn a_machine_is_found_again() {
    let truth = truth();
    let fitted = profile(&machine(), measurements(&truth, |_| 1.0)).unwrap();
    let prices = |devices| Prices::new(&fitted, Executor::Captured, &mesh(devices));
    for point in measurements(&truth, |_| 1.0) {
        let priced = prices(point.devices).kernel(&point.kernel).0;
        assert!((priced / point.time_s).ln().abs() < 0.05, "{point:?}: {priced}");
        assert!(!prices(point.devices).unmeasured(&point.kernel));
    }
    assert!(furthest(&fitted, &truth) < 0.25, "{}", furthest(&fitted, &truth));
    let file = fitted.file();
    assert!((file.passes.start_s / 3e-6).ln().abs() < 0.5, "{}", file.passes.start_s);
    assert_eq!(file.gemm.provenance.kind, ProvenanceKind::Measured);
    assert!(fitted.assumed().iter().all(|path| !path.starts_with("gemm")));
}

/// Whatever was measured, prices are positive and finite, and no product beats the peak.
#[test]
fn noise_makes_no_nonsense() {
    let truth = truth();
    let noise =
        |index: usize| if index.is_multiple_of(7) { 5.0 } else { 1.0 + (index % 3) as f64 / 5.0 };
    let fitted = profile(&machine(), measurements(&truth, noise)).unwrap();
    for devices in [1, 2, 64] {
        let prices = Prices::new(&fitted, Executor::Captured, &mesh(devices));
        for log in 0..40 {
            for kernel in [product(1 << log.min(20), 64, 8), pass(1 << log), all_reduce(1 << log)] {
                let price = prices.kernel(&kernel).0;
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
fn what_was_not_measured_is_less_certain() {
    let fitted = profile(&machine(), measurements(&truth(), |_| 1.0)).unwrap();
    let prices = Prices::new(&fitted, Executor::Captured, &mesh(1));
    let (near, far) = (product(256, 256, 300), product(1 << 16, 1 << 16, 256));
    assert!(!prices.unmeasured(&near) && prices.unmeasured(&far));
    assert!(prices.relative_half_width(&far) > 2.0 * prices.relative_half_width(&near));
}

#[test]
fn nothing_is_no_measurement() {
    let defects = profile(&machine(), vec![]).unwrap_err();
    assert!(defects.to_string().contains("measured.points"), "{defects}");
}
