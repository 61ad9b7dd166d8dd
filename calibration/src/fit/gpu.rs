//! The profile of GPUs, whose devices share no resources: the time of a compute kernel does not depend on the mesh.
//!
//! The fit starts at the preset of the GPU ([`GpuModel::nearest_preset`]). It fits the efficiencies of GEMMs, fused ops and
//! links within a node, the starts, and the curves of attention. The peaks of the data sheet, the links between nodes,
//! the reserve and every class without measurements keep their values and provenance.
//!
//! Instructions are timed launch by launch, so their times contain no launch gap. The gap of captured graphs is derived
//! from steps on one device,
//!
//! ```text
//! gap = max(0, (measured step − Σ instructions) / launches)       the median over all plans
//! ```
//! and that of single launches likewise.

use narrows_plan::kernel::Attention;
use narrows_plan::{Bytes, DType, Defects, Kernel, Mesh};

use narrows_cost_model::profile::{
    Executor, KernelMeasurements, MeasuredPoint, NodeWiring, Profile, ProfileFile, Provenance,
    ProvenanceKind, Repeatability, preset,
};
use narrows_cost_model::{KernelClass, PriceSource, Prices};

use super::class::{
    FIT_ORDER, fit_attention_curves, fit_parameters, mean_log_error, points_of_class, provenance,
    with_relative_errors,
};
use crate::statistics::upper_median;

/// Rounds in which the curves of attention and its start, which depend on each other, are fitted alternately.
const ATTENTION_ROUNDS: usize = 3;
/// Least fraction of a kernel's time that remains after its start is subtracted.
const REMAINDER_MIN: f64 = 0.1;
/// Shortest kernel whose rate may raise a peak of the data sheet.
const LONG_S: f64 = 50e-6;
/// Most GPUs of a node that are wired in pairs, without a switch.
const ALL_PAIRS_DEVICES_MAX: u32 = 4;

/// A GPU model, as its driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuModel {
    /// The name that the driver reports.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory.
    pub memory: Bytes,
    /// GPUs of a node; 1 where only one is visible.
    pub devices_per_node: u32,
}

/// The measured GPUs.
#[derive(Clone, Debug)]
pub struct GpuMachine {
    /// The profile's name.
    pub name: String,
    /// Identifies the GPUs, their driver and libraries.
    pub title: String,
    /// The profile's description.
    pub description: String,
    /// The model of the GPUs.
    pub gpu: GpuModel,
    /// The command of the measurement, and the machine.
    pub source: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
}

/// The measured step of a plan on one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredStep {
    /// Sum of the times of the instructions, each timed alone.
    pub instructions_s: f64,
    /// Number of kernel launches.
    pub launches: f64,
    /// Step time with captured graphs.
    pub captured_s: f64,
    /// Step time with single launches.
    pub eager_s: f64,
}

impl GpuModel {
    /// The preset for this GPU, or the nearest one, and whether it is for exactly this GPU.
    pub fn nearest_preset(&self) -> (&'static str, bool) {
        let named = |part| self.name.contains(part);
        let large = self.memory.as_f64() > 60e9;
        let a100 = match (large, self.devices_per_node > ALL_PAIRS_DEVICES_MAX) {
            (false, _) => "a100-40gb",
            (true, false) => "a100-80gb",
            (true, true) => "a100-80gb-8",
        };
        let other_form_factor =
            named("PCIe") || named("PCIE") || named("NVL") || named("GH200") || named("MIG");
        match self.capability {
            _ if named("H200") && !other_form_factor => ("h200-sxm", true),
            _ if named("H100") && !other_form_factor => ("h100-sxm", true),
            _ if named("A100") && !other_form_factor => (a100, true),
            (9.., _) if self.memory.as_f64() > 100e9 => ("h200-sxm", false),
            (9.., _) => ("h100-sxm", false),
            _ => (a100, false),
        }
    }

    /// The preset that predicts steps of Narrows' own runtime on this GPU best: a measured one if there is one, or else the
    /// nearest.
    pub fn preset_for_runs(&self) -> &'static str {
        match self.nearest_preset() {
            ("h100-sxm", true) => "h100-sxm-measured",
            (name, _) => name,
        }
    }
}

/// Fits the profile of GPUs to the measured `points`; those of GEMMs, attention and fused ops are of one device. `steps`
/// are of plans on one device.
///
/// # Errors
/// Measurements that do not give a valid profile, for example an empty list.
pub fn fit_gpu_profile(
    machine: &GpuMachine,
    points: Vec<MeasuredPoint>,
    steps: &[MeasuredStep],
    repeatability: Option<Repeatability>,
) -> Result<Profile, Defects> {
    let (source, date) = (&machine.source, &machine.date);
    let mut file = base_file(machine, &points)?;
    let points = within_node(points, &file);
    let (captured, eager) = (file.executors.captured.clone(), file.executors.eager.clone());
    // Measured times contain no launch gap.
    file.executors.captured.launch_gap_s = 0.0;
    for class in FIT_ORDER {
        let class_points = points_of_class(&points, class);
        if class_points.is_empty() {
            continue;
        }
        let how = format!("{} to {} measurements", fit_description(class), class_points.len());
        let provenance = provenance(ProvenanceKind::Measured, Some(&how), source, date);
        fit_class(&mut file, class, &class_points);
        match class {
            KernelClass::Gemm => file.gemm.provenance = provenance,
            KernelClass::Attention => file.attention.provenance = provenance,
            KernelClass::Fused => file.fused.provenance = provenance,
            KernelClass::Link => {
                let assumed = vec!["fill_half_bytes".to_owned()];
                file.links.intra_node.provenance = Provenance { assumed, ..provenance };
            }
        }
    }
    (file.executors.captured, file.executors.eager) = (captured, eager);
    derive_launch_gaps(&mut file, steps, machine);
    // A class without measurements is as uncertain as in the preset of its curves.
    file.gemm.error_growth = None;
    if file.refits.take().is_some() {
        file.form_of = Some(machine.gpu.nearest_preset().0.to_owned());
    }
    file.measured = Some(KernelMeasurements {
        threads: None,
        machine: Some(machine.title.clone()),
        repeatability,
        steps: None,
        points,
        provenance: provenance(ProvenanceKind::Measured, None, source, date),
    });
    with_relative_errors(file, &provenance(ProvenanceKind::Measured, None, source, date))
}

/// Description of the fit of a class, for its provenance.
fn fit_description(class: KernelClass) -> &'static str {
    match class {
        KernelClass::Gemm => "efficiencies, epilogue, tile overhead and start fitted",
        KernelClass::Attention => "curves, head size and start fitted",
        KernelClass::Fused => "efficiency and start fitted",
        KernelClass::Link => {
            "efficiency and fill fitted, to the bandwidth and the wiring of the data sheet,"
        }
    }
}

/// The preset with the memory and the node size that the driver reports.
fn base_file(machine: &GpuMachine, points: &[MeasuredPoint]) -> Result<ProfileFile, Defects> {
    let gpu = &machine.gpu;
    let (name, exact) = gpu.nearest_preset();
    let mut file = preset(name)?.file().clone();
    if !exact {
        label_assumed(&mut file, name, gpu, &machine.date);
    }
    (file.name, file.description) = (machine.name.clone(), machine.description.clone());
    let device = &mut file.device;
    device.memory_bytes = gpu.memory;
    let half = Bytes(gpu.memory.0 / 2);
    if device.reserve.bytes > half {
        device.reserve.bytes = half;
    }
    device.provenance.source =
        format!("{}; memory_bytes: as the driver reports it", device.provenance.source);
    raise_exceeded_peaks(&mut file, points);
    let devices = points.iter().map(|point| point.devices).max().unwrap_or(1);
    if devices > 1 {
        set_devices_per_node(&mut file, gpu.devices_per_node.max(1));
    }
    Ok(file)
}

/// Labels every group as assumed, because the preset is of another GPU model.
fn label_assumed(file: &mut ProfileFile, name: &str, gpu: &GpuModel, date: &str) {
    let ratio = f64::from(gpu.multiprocessors) / f64::from(file.device.compute_units.max(1));
    file.device.compute_units = gpu.multiprocessors.max(1);
    let peak = &mut file.device.peak_flops_per_s;
    (peak.bf16, peak.f32) = (peak.bf16 * ratio, peak.f32 * ratio);
    let set_assumed = |provenance: &mut Provenance| {
        let source = format!("taken from `{name}`, the nearest preset to {}", gpu.name);
        let (kind, date) = (ProvenanceKind::Assumed, date.to_owned());
        *provenance = Provenance { kind, source, date, assumed: vec![] };
    };
    for provenance in [
        &mut file.device.reserve.provenance,
        &mut file.gemm.provenance,
        &mut file.gemm.relative_error.provenance,
        &mut file.attention.provenance,
        &mut file.attention.relative_error.provenance,
        &mut file.fused.provenance,
        &mut file.fused.relative_error.provenance,
        &mut file.links.intra_node.provenance,
        &mut file.links.inter_node.provenance,
        &mut file.links.inter_node.relative_error.provenance,
        &mut file.links.relative_error.provenance,
        &mut file.executors.captured.provenance,
        &mut file.executors.eager.provenance,
    ] {
        set_assumed(provenance);
    }
    for launch_costs in [&mut file.executors.captured, &mut file.executors.eager] {
        if let Some(error) = &mut launch_costs.step_error {
            set_assumed(&mut error.provenance);
        }
    }
    set_assumed(&mut file.device.provenance);
    file.device.provenance.source = format!(
        "{}; peaks scaled by the number of multiprocessors that the driver reports",
        file.device.provenance.source
    );
}

/// Raises peaks to the rates of kernels that exceed them. Short kernels are ignored: their operands lie in caches, and
/// clocks are coarse.
fn raise_exceeded_peaks(file: &mut ProfileFile, points: &[MeasuredPoint]) {
    let device = &mut file.device;
    let long = || points.iter().filter(|point| point.time_s >= LONG_S);
    let flops_per_s = |input: DType| {
        let rates = long().map(move |point| match &point.kernel {
            Kernel::Gemm(gemm) if gemm.input == input => gemm.flops().0 / point.time_s,
            Kernel::Attention(a) if a.input == input => a.flops().0 / point.time_s,
            _ => 0.0,
        });
        rates.fold(0.0, f64::max)
    };
    let bytes_per_s = long().map(|point| match &point.kernel {
        Kernel::Fused(op) => op.traffic.as_f64() / point.time_s,
        _ => 0.0,
    });
    let mut raised = vec![];
    for (reached, peak, name) in [
        (flops_per_s(DType::Bf16), &mut device.peak_flops_per_s.bf16, "peak_flops_per_s.bf16"),
        (flops_per_s(DType::F32), &mut device.peak_flops_per_s.f32, "peak_flops_per_s.f32"),
        (
            bytes_per_s.fold(0.0, f64::max),
            &mut device.memory_bandwidth_bytes_per_s,
            "memory_bandwidth_bytes_per_s",
        ),
    ] {
        if reached > *peak {
            *peak = reached;
            raised.push(name);
        }
    }
    if !raised.is_empty() {
        let source = &mut device.provenance.source;
        *source =
            format!("{source}; {}: the rate that was reached, which is higher", raised.join(", "));
    }
}

/// Sets the number of GPUs per node. The number of network cards per GPU stays that of the preset.
fn set_devices_per_node(file: &mut ProfileFile, devices_per_node: u32) {
    let links = &mut file.links;
    let before = f64::from(links.devices_per_node);
    let cards = f64::from(links.inter_node.nics_per_node) / before * f64::from(devices_per_node);
    links.inter_node.nics_per_node = (cards.round() as u32).max(1);
    links.devices_per_node = devices_per_node;
    if devices_per_node > ALL_PAIRS_DEVICES_MAX {
        links.intra_node.wiring = NodeWiring::Switched;
    }
}

/// Removes collectives and transfers between nodes, whose links are not fitted.
fn within_node(points: Vec<MeasuredPoint>, file: &ProfileFile) -> Vec<MeasuredPoint> {
    let crosses_nodes = |point: &MeasuredPoint| {
        KernelClass::of(&point.kernel) == KernelClass::Link
            && prices_on(file, point.devices).source(&point.kernel) == PriceSource::InterNode
    };
    points.into_iter().filter(|point| !crosses_nodes(point)).collect()
}

/// Prices of captured graphs on this number of devices. Attention is priced by its curves on any of them, since they are fitted to
/// the kernels that ran: therefore no tensor axis.
fn prices_on(file: &ProfileFile, devices: u64) -> Prices {
    let mesh = Mesh { tensor: 1, pipeline: 1, data: devices, context: 1 };
    Prices::from_file(file, Executor::Captured, &mesh)
}

/// Fits the numbers of a class to its points.
fn fit_class(file: &mut ProfileFile, class: KernelClass, points: &[MeasuredPoint]) {
    let fit = |file: &mut ProfileFile| fit_parameters(file, class, |f| curve_error(f, points));
    if class != KernelClass::Attention {
        return fit(file);
    }
    for _ in 0..ATTENTION_ROUNDS {
        let (start_s, peak) = (file.attention.start_s, file.device.peak_flops_per_s.clone());
        let fraction_of_peak = |a: &Attention, point: &MeasuredPoint| {
            let peak = match a.input {
                DType::Bf16 => peak.bf16,
                DType::F32 | DType::U32 => peak.f32,
            };
            let time_s = (point.time_s - start_s).max(REMAINDER_MIN * point.time_s);
            a.flops().0 / time_s / peak
        };
        fit_attention_curves(file, points, fraction_of_peak);
        fit(file);
    }
}

/// Mean logarithmic error with the prices of the curves, on the mesh of each measurement.
fn curve_error(file: &ProfileFile, points: &[MeasuredPoint]) -> f64 {
    let Ok(profile) = file.clone().resolve() else { return f64::INFINITY };
    let mut prices: Vec<(u64, Prices)> = vec![];
    mean_log_error(points, |MeasuredPoint { kernel, devices, .. }| {
        let index = prices.iter().position(|(known, _)| known == devices).unwrap_or_else(|| {
            prices.push((*devices, prices_on(profile.file(), *devices)));
            prices.len() - 1
        });
        prices[index].1.kernel_time(kernel).0
    })
}

/// Derives the launch gaps of both executors from whole steps.
fn derive_launch_gaps(file: &mut ProfileFile, steps: &[MeasuredStep], machine: &GpuMachine) {
    let median_gap = |step_time_s: fn(&MeasuredStep) -> f64| {
        let gap = |step: &MeasuredStep| (step_time_s(step) - step.instructions_s) / step.launches;
        let launching = steps.iter().filter(|step| step.launches >= 1.0);
        upper_median(launching.map(|step| gap(step).max(0.0)).collect())
    };
    let captured = median_gap(|step| step.captured_s);
    let eager = median_gap(|step| step.eager_s);
    let executors = &mut file.executors;
    for (launch_costs, gap, steps_of) in [
        (&mut executors.captured, captured, "captured graphs"),
        (&mut executors.eager, eager, "single launches of this runtime, with events between them,"),
    ] {
        let Some(gap) = gap else { continue };
        // The gap of measured steps includes the time in which the device waits for the host.
        (launch_costs.launch_gap_s, launch_costs.host_launch_s) = (gap, 0.0);
        let how = format!(
            "steps of {steps_of} less their instructions timed one by one, over their launches; the \
             median of {} plans on one GPU, at least 0",
            steps.len()
        );
        let (source, date) = (&machine.source, &machine.date);
        launch_costs.provenance = provenance(ProvenanceKind::Derived, Some(&how), source, date);
        let is_assumed = [
            ("step_factor", launch_costs.step_factor != 1.0),
            ("step_s", launch_costs.step_s > 0.0),
        ];
        let assumed = is_assumed.into_iter().filter(|(_, is_assumed)| *is_assumed);
        launch_costs.provenance.assumed = assumed.map(|(field, _)| field.into()).collect();
    }
}
