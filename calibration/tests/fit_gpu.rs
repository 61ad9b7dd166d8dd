//! Fits of GPU profiles to simulated measurements, on meshes of one device, of two, and of a whole node.

use crate::kernels::{self, collective, fused};
use narrows_calibration::fit::{GpuMachine, GpuModel, MeasuredStep, fit_gpu_profile};
use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::profile::{
    EfficiencyPoint, MeasuredPoint, NodeWiring, ProfileFile, ProvenanceKind, preset, read,
};
use narrows_cost_model::{Executor, KernelClass, Prices, Profile};
use narrows_plan::kernel::{CollectiveKind, Direction, Kernel, Transfer};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

/// The preset at which fits start, and of which the true profile is a perturbation.
const BASE: &str = "h100-sxm";
/// Launch gaps of the true profile.
const GAPS_S: [f64; 2] = [1.1e-6, 5.5e-6];

fn machine(name: &str, per_node: u32) -> GpuMachine {
    let memory = Bytes(85_000_000_000);
    let (capability, multiprocessors) = ((9, 0), 132);
    GpuMachine {
        name: "gpu-measured".into(),
        title: format!("{name}, driver 13.0"),
        description: "Simulated GPUs.".into(),
        gpu: GpuModel {
            name: name.into(),
            capability,
            multiprocessors,
            memory,
            devices_per_node: per_node,
        },
        source: "a test".into(),
        date: "2026-11-21".into(),
    }
}

fn h100(per_node: u32) -> GpuMachine {
    machine("NVIDIA H100 80GB HBM3", per_node)
}

fn gemm(m: u64, n: u64, k: u64) -> Kernel {
    kernels::gemm(DType::Bf16, [m, n, k])
}

fn attention(length: u64, direction: Direction) -> Kernel {
    kernels::attention(DType::Bf16, direction, length, (16, 128))
}

fn transfer(bytes: u64) -> Kernel {
    let group = DeviceGroup { axis: Axis::Pipeline, size: 2, stride: 1 };
    Kernel::Transfer(Transfer { bytes: Bytes(bytes), group })
}

/// Kernels of one device.
fn compute_kernels() -> Vec<Kernel> {
    let mut all = vec![];
    for m in [1024, 4096, 16_384] {
        for (n, k) in [(256, 4096), (4096, 256), (1024, 1024), (4096, 1024), (11_008, 1024)] {
            all.push(gemm(m, n, k));
        }
    }
    all.extend((16..28).step_by(2).map(|log| fused(1 << log)));
    for length in [512, 1024, 2048, 4096] {
        all.extend(
            [Direction::Forward, Direction::Backward].map(|direction| attention(length, direction)),
        );
    }
    all
}

/// Collectives and transfers of a mesh of several devices.
fn link_kernels(devices: u64) -> Vec<Kernel> {
    let mut groups = vec![(devices, 1)];
    if devices > 2 {
        groups.extend([(2, 1), (2, devices / 2)]);
    }
    let mut all: Vec<Kernel> = (16..28).step_by(4).map(|log| transfer(1 << log)).collect();
    for (size, stride) in groups {
        for kind in
            [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter]
        {
            all.extend((14..28).step_by(2).map(|log| collective(kind, 1 << log, size, stride)));
        }
    }
    all
}

const fn mesh(devices: u64) -> Mesh {
    Mesh { tensor: devices, pipeline: 1, data: 1, context: 1 }
}

fn truth(per_node: u32) -> Profile {
    let mut file = preset(BASE).unwrap().file().clone();
    file.gemm.efficiency_max = 0.78;
    file.gemm.start_s = 3.2e-6;
    file.gemm.memory_efficiency = 0.7;
    file.gemm.exposed_epilogue = 1.4;
    file.fused.efficiency = 0.77;
    file.fused.start_s = 2.4e-6;
    file.attention.start_s = 5e-6;
    for point in file.attention.forward.iter_mut().chain(&mut file.attention.backward) {
        point.efficiency *= 0.8;
    }
    file.links.intra_node.efficiency = 0.62;
    file.links.intra_node.fill_s = 12e-6;
    file.links.devices_per_node = per_node;
    file.executors.captured.launch_gap_s = GAPS_S[0];
    file.executors.eager.launch_gap_s = GAPS_S[1];
    file.resolve().unwrap()
}

/// Time of a kernel without its launch gap, in seconds.
fn kernel_time_s(truth: &Profile, kernel: &Kernel, devices: u64) -> f64 {
    let prices = Prices::new(truth, Executor::Captured, &mesh(devices));
    prices.kernel_time(kernel).0 - prices.launch_gap().0
}

fn point(truth: &Profile, kernel: Kernel, devices: u64) -> MeasuredPoint {
    MeasuredPoint { time_s: kernel_time_s(truth, &kernel, devices), kernel, devices, spread: 0.0 }
}

/// The measurements of `calibrate`: compute kernels on one device, link kernels on each mesh.
fn points(truth: &Profile, meshes: &[u64]) -> Vec<MeasuredPoint> {
    let mut all: Vec<MeasuredPoint> =
        compute_kernels().into_iter().map(|kernel| point(truth, kernel, 1)).collect();
    for &devices in meshes.iter().filter(|devices| **devices > 1) {
        all.extend(link_kernels(devices).into_iter().map(|kernel| point(truth, kernel, devices)));
    }
    all
}

fn steps() -> Vec<MeasuredStep> {
    let step = |launches: f64| {
        let instructions_s = launches * 80e-6;
        let [captured_s, eager_s] = GAPS_S.map(|gap| instructions_s + launches * gap);
        MeasuredStep { instructions_s, launches, captured_s, eager_s }
    };
    vec![step(50.0), step(200.0), step(90.0)]
}

fn fitted(meshes: &[u64], per_node: u32) -> (Profile, Profile) {
    let truth = truth(per_node);
    let fitted_profile =
        fit_gpu_profile(&h100(per_node), points(&truth, meshes), &steps(), None).unwrap();
    (truth, fitted_profile)
}

fn log_error(actual: f64, expected: f64) -> f64 {
    (actual / expected).ln().abs()
}

/// Prices of measured shapes equal the measured times on every mesh, prices of other shapes are close, and coefficients
/// equal the true ones where the measurements determine them.
#[test]
fn fits_recover_the_true_profile() {
    for (meshes, per_node) in [(&[1][..], 1), (&[1, 2], 2), (&[1, 2, 8], 8), (&[1, 2], 8)] {
        let (truth, fitted_profile) = fitted(meshes, per_node);
        let both = |devices| {
            [&fitted_profile, &truth]
                .map(|profile| Prices::new(profile, Executor::Captured, &mesh(devices)))
        };
        for MeasuredPoint { kernel, devices, .. } in points(&truth, meshes) {
            // Compute kernels take equally long on every mesh.
            let meshes_of_kernel = match KernelClass::of(&kernel) {
                KernelClass::Link => vec![devices],
                _ => vec![1, 2, 8, 64],
            };
            for devices in meshes_of_kernel {
                let [priced, expected] = both(devices).map(|prices| prices.kernel_time(&kernel).0);
                assert!(
                    log_error(priced, expected) < 0.02,
                    "{meshes:?}, {devices}: {kernel:?} {priced} {expected}"
                );
                // Along a tensor axis, own kernels run backward attention, which one device does not measure.
                let is_own = devices > 1
                    && matches!(&kernel, Kernel::Attention(op) if op.direction == Direction::Backward);
                assert_eq!(both(devices)[0].is_unmeasured(&kernel), is_own, "{kernel:?}");
            }
        }
        let largest = meshes.iter().copied().max().unwrap();
        let mut between = vec![
            (gemm(8192, 2048, 512), 1),
            (gemm(2048, 512, 4096), 1),
            (fused(3 << 20), 1),
            (attention(3000, Direction::Backward), 1),
        ];
        if largest > 1 {
            let kind = CollectiveKind::AllReduce;
            between.extend([
                (collective(kind, 3 << 20, largest, 1), largest),
                (transfer(3 << 20), largest),
            ]);
        }
        for (kernel, devices) in between {
            let [priced, expected] = both(devices).map(|prices| prices.kernel_time(&kernel).0);
            assert!(
                log_error(priced, expected) < 0.1,
                "{meshes:?}: {kernel:?} {priced} {expected}"
            );
        }
        let [file, expected] = [&fitted_profile, &truth].map(Profile::file);
        let assert_near = |name: &str, coefficient: fn(&ProfileFile) -> f64, tolerance: f64| {
            let (actual, expected) = (coefficient(file), coefficient(expected));
            assert!(
                log_error(actual, expected) < tolerance,
                "{meshes:?}, {name}: {actual}, not {expected}"
            );
        };
        assert_near("gemm.efficiency_max", |f| f.gemm.efficiency_max, 0.06);
        assert_near("gemm.start_s", |f| f.gemm.start_s, 0.3);
        assert_near("passes.efficiency", |f| f.fused.efficiency, 0.04);
        assert_near("passes.start_s", |f| f.fused.start_s, 0.1);
        let directions: [fn(&ProfileFile) -> &[EfficiencyPoint]; 2] =
            [|f| &f.attention.forward, |f| &f.attention.backward];
        for curve in directions {
            let at = |file| curve(file).iter().find(|at| at.length == 2048).unwrap().efficiency;
            assert!(
                log_error(at(file), at(expected)) < 0.05,
                "{:?} {:?}",
                curve(file),
                curve(expected)
            );
        }
        assert_near("gap of graphs", |f| f.executors.captured.launch_gap_s, 1e-6);
        assert_near("gap of launches", |f| f.executors.eager.launch_gap_s, 1e-6);
        if largest > 1 {
            assert_near("links.efficiency", |f| f.links.intra_node.efficiency, 0.05);
        }
        assert_eq!(file.device.peak_flops_per_s, expected.device.peak_flops_per_s);
        let text = serde_json::to_string(file).unwrap();
        assert_eq!(read(&text).unwrap(), fitted_profile);
    }
}

#[test]
fn provenance_is_measured_derived_or_that_of_the_preset() {
    let base = preset(BASE).unwrap();
    let (_, one) = fitted(&[1], 1);
    let (_, several) = fitted(&[1, 2], 2);
    for (fitted_profile, links) in [(&one, false), (&several, true)] {
        let file = fitted_profile.file();
        for provenance in
            [&file.gemm.provenance, &file.fused.provenance, &file.attention.provenance]
        {
            assert_eq!(provenance.kind, ProvenanceKind::Measured);
            assert!(provenance.source.contains("fitted") && provenance.source.contains("a test"));
        }
        for launching in [&file.executors.captured, &file.executors.eager] {
            assert_eq!(launching.provenance.kind, ProvenanceKind::Derived);
            assert!(launching.provenance.source.starts_with("steps of "), "{launching:?}");
        }
        let kind = file.links.intra_node.provenance.kind;
        assert_eq!(kind == ProvenanceKind::Measured, links);
        assert_eq!(file.links.inter_node.provenance, base.file().links.inter_node.provenance);
        assert_eq!(file.device.provenance.kind, base.file().device.provenance.kind);
        assert_eq!(file.device.memory_bytes, Bytes(85_000_000_000));
    }
    // A measurement of one GPU does not determine the size of a node.
    assert_eq!(one.devices_per_node(), base.devices_per_node());
    assert_eq!(several.devices_per_node(), 2);
}

/// Peaks are the measured rates, because there is no data sheet.
#[test]
fn a_gpu_without_a_preset_is_fitted_from_the_nearest_one() {
    let truth = truth(8);
    let mut points = points(&truth, &[1]);
    points.iter_mut().for_each(|point| point.time_s /= 4.0);
    let other = machine("NVIDIA B300", 1);
    assert_eq!(other.gpu.nearest_preset(), ("h100-sxm", false));
    let fitted_profile = fit_gpu_profile(&other, points.clone(), &steps(), None).unwrap();
    let device = &fitted_profile.file().device;
    assert_eq!(device.provenance.kind, ProvenanceKind::Assumed);
    assert!(device.provenance.source.contains("the rate that was reached"), "{device:?}");
    assert!(fitted_profile.assumed_paths().contains(&"links.inter_node".to_owned()));
    let prices = Prices::new(&fitted_profile, Executor::Captured, &mesh(1));
    for MeasuredPoint { kernel, time_s, .. } in points {
        let priced = prices.kernel_time(&kernel).0 - prices.launch_gap().0;
        assert!(log_error(priced, time_s) < 0.05, "{kernel:?}: {priced}, not {time_s}");
    }
}

#[test]
fn the_nearest_preset_is_found_by_name_and_memory() {
    let gpu = |name: &str, memory: u64, per_node| {
        let (capability, multiprocessors) = ((8, 0), 108);
        let (name, memory) = (name.into(), Bytes(memory << 30));
        GpuModel { name, capability, multiprocessors, memory, devices_per_node: per_node }
    };
    for (name, memory, per_node, expected) in [
        ("NVIDIA A100-SXM4-40GB", 39, 4, ("a100-40gb", true)),
        ("NVIDIA A100-SXM4-80GB", 79, 4, ("a100-80gb", true)),
        ("NVIDIA A100-SXM4-80GB", 79, 8, ("a100-80gb-8", true)),
        ("NVIDIA A100 80GB PCIe", 79, 2, ("a100-80gb", false)),
        ("NVIDIA H100 80GB HBM3", 79, 8, ("h100-sxm", true)),
        ("NVIDIA H200", 139, 8, ("h200-sxm", true)),
        ("NVIDIA A10G", 22, 1, ("a100-40gb", false)),
    ] {
        assert_eq!(gpu(name, memory, per_node).nearest_preset(), expected, "{name}");
    }
    assert_eq!(gpu("NVIDIA H100 80GB HBM3", 79, 8).preset_for_runs(), "h100-sxm-measured");
    assert_eq!(gpu("NVIDIA H100 PCIe", 79, 2).preset_for_runs(), "a100-80gb");
    assert_eq!(gpu("NVIDIA H200", 139, 8).preset_for_runs(), "h200-sxm");
}

#[test]
fn measurements_across_nodes_do_not_correct_links_within_a_node() {
    let (truth, fitted_profile) = fitted(&[1, 2], 2);
    let crossing = collective(CollectiveKind::AllReduce, 1 << 24, 4, 1);
    let of_two = collective(CollectiveKind::AllReduce, 1 << 24, 2, 1);
    let on_four = Prices::new(&fitted_profile, Executor::Captured, &mesh(4));
    assert!(on_four.is_unmeasured(&crossing) && !on_four.is_unmeasured(&of_two));
    let expected = kernel_time_s(&truth, &of_two, 2);
    let inside = on_four.kernel_time(&of_two).0 - on_four.launch_gap().0;
    assert!(log_error(inside, expected) < 0.02, "{inside} {expected}");
    let mut with = points(&truth, &[1, 2]);
    with.push(MeasuredPoint { kernel: crossing, devices: 4, time_s: 1.0, spread: 0.0 });
    let machine = h100(2);
    let again = fit_gpu_profile(&machine, with, &steps(), None).unwrap();
    assert_eq!(
        again.file().measured,
        fitted_profile.file().measured,
        "a measurement across nodes was used"
    );
}

/// Times of kernels are equal, and launch gaps differ.
#[test]
fn launch_gaps_belong_to_the_executor() {
    let (_, fitted_profile) = fitted(&[1], 1);
    let prices = |executor| Prices::new(&fitted_profile, executor, &mesh(1));
    let [captured, eager] = [Executor::Captured, Executor::Eager].map(prices);
    let kernel = gemm(4096, 1024, 1024);
    let difference = eager.kernel_time(&kernel).0 - captured.kernel_time(&kernel).0;
    assert!((difference - (GAPS_S[1] - GAPS_S[0])).abs() < 1e-9, "{difference}");
    // Two launches, and twice the traffic.
    let kernel = fused(1 << 26);
    assert!(eager.kernel_time(&kernel).0 > 1.8 * captured.kernel_time(&kernel).0);
}

/// Prices stay positive and finite.
#[test]
fn noise_widens_intervals() {
    let truth = truth(8);
    let fit_with_noise = |size: f64| {
        let mut points = points(&truth, &[1, 2, 8]);
        for (index, point) in points.iter_mut().enumerate() {
            point.time_s *= 1.0 + size * [0.0, 1.0, -0.7, 0.4, -0.2][index % 5];
        }
        fit_gpu_profile(&h100(8), points, &steps(), None).unwrap()
    };
    let [exact, noisy] = [fit_with_noise(0.0), fit_with_noise(0.3)];
    let width = |profile: &Profile| {
        let error_model = ErrorModel::new(profile, Executor::Captured, &mesh(1));
        let [low, high] = error_model.kernels_interval(&[(gemm(4096, 1024, 1024), 1.0)]);
        high / low
    };
    assert!(width(&noisy) > 1.2 * width(&exact), "{} {}", width(&noisy), width(&exact));
    for log in 10..36 {
        for (kernel, devices) in [
            (gemm(1 << (log / 2), 4096, 64), 1),
            (fused(1 << log), 1),
            (collective(CollectiveKind::AllReduce, 1 << log, 8, 1), 8),
        ] {
            let price =
                Prices::new(&noisy, Executor::Captured, &mesh(devices)).kernel_time(&kernel).0;
            assert!(price.is_finite() && price > 0.0, "{kernel:?}: {price}");
        }
    }
}

#[test]
fn a_fit_without_measurements_is_an_error() {
    let defects = fit_gpu_profile(&h100(1), vec![], &[], None).unwrap_err();
    assert!(defects.to_string().contains("measured.points"), "{defects}");
}

/// Nodes with more GPUs than can be wired in pairs have a switch.
#[test]
fn the_size_of_a_node_determines_its_wiring() {
    let truth = truth(8);
    let mut machine = machine("NVIDIA A100-SXM4-80GB", 8);
    machine.gpu.capability = (8, 0);
    let fitted_profile =
        fit_gpu_profile(&machine, points(&truth, &[1, 8]), &steps(), None).unwrap();
    let links = &fitted_profile.file().links;
    assert_eq!((links.devices_per_node, links.intra_node.wiring), (8, NodeWiring::Switched));
}
