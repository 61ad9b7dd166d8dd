//! From measurements on GPUs to a profile.
//!
//! Devices are whole: none shares anything with another, so a kernel's time is its own, on whatever mesh it was
//! measured. The profile begins as that of the preset for such GPUs ([`GpuModel::preset`]). Of it stay the peaks of the
//! data sheet, what lies between nodes, the reserve, and whatever nothing was measured of, with what they say of
//! where they come from. Fitted are the efficiencies of products, passes and links inside a node, starts, and
//! attention's curves, by the same search along one number after the other as for processors.
//!
//! Instructions are timed launch by launch, so their times hold no gap between them. What a step of captured
//! graphs takes beyond its instructions, on one device, is the gap:
//!
//! ```text
//! gap = max(0, (step by the clock − Σ instructions) / launches)       the middle of all plans
//! ```
//! and of single launches likewise. Nobody measured a gap: both are labelled as derived.

use narrows_plan::kernel::Attention;
use narrows_plan::{Bytes, DType, Defects, Kernel, Mesh};

use super::search::improve;
use super::{curves, from, intervals, of_class, parameters};
use narrows_cost_model::price::Prices;
use narrows_cost_model::price::measured::KernelClass;
use narrows_cost_model::price::topology::Topology;
use narrows_cost_model::profile::{
    Executor, KernelMeasurements, MeasuredPoint, NodeWiring, Profile, ProfileFile, Provenance,
    ProvenanceKind, Repeatability, preset,
};

/// Attention's curves and its start depend on each other: they are fitted in turns.
const TURNS: usize = 3;
/// A kernel is no shorter than its start, and what is left of it no less than this share of it.
const LEFT_MIN: f64 = 0.1;
/// Shorter ones do not show that a device can do more than its data sheet says.
const LONG_S: f64 = 50e-6;
/// Up to so many GPUs of a node are wired to each other, where the name does not say: more need a switch.
const WIRED_MAX: u32 = 4;

/// A kind of GPU, as its driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuModel {
    /// What it is called.
    pub name: String,
    /// Compute capability: (9, 0) is sm_90.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Memory.
    pub memory: Bytes,
    /// How many of them there are in a node; 1 where only one is seen.
    pub per_node: u32,
}

/// GPUs that were measured.
#[derive(Clone, Debug)]
pub struct GpuMachine {
    /// The profile's name.
    pub name: String,
    /// What tells them, with their driver and libraries, from others.
    pub title: String,
    /// What a reader should know.
    pub description: String,
    /// Which they are.
    pub gpu: GpuModel,
    /// The command, and on what it ran.
    pub source: String,
    /// The day, `YYYY-MM-DD`.
    pub date: String,
}

/// A step of a plan on one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredStep {
    /// The sum of its instructions' times, each timed alone.
    pub instructions_s: f64,
    /// Kernels that it launches.
    pub launches: f64,
    /// What it took by the clock, as captured graphs.
    pub captured_s: f64,
    /// The same, launch by launch.
    pub eager_s: f64,
}

impl GpuModel {
    /// The preset of the data sheet, and whether it is that of this GPU; otherwise the nearest one.
    pub fn preset(&self) -> (&'static str, bool) {
        let has = |part| self.name.contains(part);
        let large = self.memory.as_f64() > 60e9;
        let a100 = match (large, self.per_node > WIRED_MAX) {
            (false, _) => "a100-40gb",
            (true, false) => "a100-80gb",
            (true, true) => "a100-80gb-8",
        };
        let others = has("PCIe") || has("PCIE") || has("NVL") || has("GH200") || has("MIG");
        match self.capability {
            _ if has("H200") && !others => ("h200-sxm", true),
            _ if has("H100") && !others => ("h100-sxm", true),
            _ if has("A100") && !others => (a100, true),
            (9.., _) if self.memory.as_f64() > 100e9 => ("h200-sxm", false),
            (9.., _) => ("h100-sxm", false),
            _ => (a100, false),
        }
    }
}

/// The profile of GPUs on which these were measured. Points of products, attention and passes are those of
/// one device. `steps` are of plans on one device.
///
/// # Errors
/// When the measurements make no profile, such as none at all.
pub fn profile(
    machine: &GpuMachine,
    points: Vec<MeasuredPoint>,
    steps: &[MeasuredStep],
    repeatability: Option<Repeatability>,
) -> Result<Profile, Defects> {
    let (source, date) = (&machine.source, &machine.date);
    let mut file = base(machine, &points)?;
    let points = inside_a_node(points, &file);
    let (captured, eager) = (file.executors.captured.clone(), file.executors.eager.clone());
    // Measured times hold no gap.
    file.executors.captured.launch_gap_s = 0.0;
    for class in [KernelClass::Pass, KernelClass::Gemm, KernelClass::Attention, KernelClass::Link] {
        let of_class = of_class(&points, class);
        if of_class.is_empty() {
            continue;
        }
        let how = format!("{} to {} measurements", fitted(class), of_class.len());
        let provenance = from(ProvenanceKind::Measured, Some(&how), source, date);
        fit(&mut file, class, &of_class);
        match class {
            KernelClass::Gemm => file.gemm.provenance = provenance,
            KernelClass::Attention => file.attention.provenance = provenance,
            KernelClass::Pass => file.passes.provenance = provenance,
            KernelClass::Link => {
                let assumed = vec!["fill_half_bytes".to_owned()];
                file.links.intra_node.provenance = Provenance { assumed, ..provenance };
            }
        }
    }
    (file.executors.captured, file.executors.eager) = (captured, eager);
    gaps(&mut file, steps, machine);
    // What nothing was measured of is as uncertain as where its curves come from.
    if file.refits.take().is_some() {
        file.form_of = Some(machine.gpu.preset().0.to_owned());
    }
    file.measured = Some(KernelMeasurements {
        threads: None,
        machine: Some(machine.title.clone()),
        repeatability,
        steps: None,
        points,
        provenance: from(ProvenanceKind::Measured, None, source, date),
    });
    intervals(file, &from(ProvenanceKind::Measured, None, source, date))
}

/// What is said of the numbers of a class.
fn fitted(class: KernelClass) -> &'static str {
    match class {
        KernelClass::Gemm => "efficiencies, epilogue, tile overhead and start fitted",
        KernelClass::Attention => "curves, head size and start fitted",
        KernelClass::Pass => "efficiency and start fitted",
        KernelClass::Link => {
            "efficiency and fill fitted, to the bandwidth and the wiring of the data sheet,"
        }
    }
}

/// The preset, with what the driver says of this GPU.
fn base(machine: &GpuMachine, points: &[MeasuredPoint]) -> Result<ProfileFile, Defects> {
    let gpu = &machine.gpu;
    let (name, exact) = gpu.preset();
    let mut file = preset(name)?.file().clone();
    if !exact {
        assumed(&mut file, name, gpu, &machine.date);
    }
    (file.name, file.description) = (machine.name.clone(), machine.description.clone());
    let device = &mut file.device;
    device.memory_bytes = gpu.memory;
    let half = Bytes(gpu.memory.0 / 2);
    if device.reserve.bytes > half {
        device.reserve.bytes = half;
    }
    device.provenance.source =
        format!("{}; memory_bytes: what the driver says", device.provenance.source);
    exceeded(&mut file, points);
    let devices = points.iter().map(|point| point.devices).max().unwrap_or(1);
    if devices > 1 {
        of_node(&mut file, gpu.per_node.max(1));
    }
    Ok(file)
}

/// Of another GPU: nothing in the file was measured on this one, or is of its data sheet.
fn assumed(file: &mut ProfileFile, name: &str, gpu: &GpuModel, date: &str) {
    let scale = f64::from(gpu.multiprocessors) / f64::from(file.device.compute_units.max(1));
    file.device.compute_units = gpu.multiprocessors.max(1);
    let peak = &mut file.device.peak_flops_per_s;
    (peak.bf16, peak.f32) = (peak.bf16 * scale, peak.f32 * scale);
    let note = |provenance: &mut Provenance| {
        let source = format!("that of `{name}`, the nearest preset to {}", gpu.name);
        let (kind, date) = (ProvenanceKind::Assumed, date.to_owned());
        *provenance = Provenance { kind, source, date, assumed: vec![] };
    };
    for provenance in [
        &mut file.device.reserve.provenance,
        &mut file.gemm.provenance,
        &mut file.gemm.relative_error.provenance,
        &mut file.attention.provenance,
        &mut file.attention.relative_error.provenance,
        &mut file.passes.provenance,
        &mut file.passes.relative_error.provenance,
        &mut file.links.intra_node.provenance,
        &mut file.links.inter_node.provenance,
        &mut file.links.inter_node.relative_error.provenance,
        &mut file.links.relative_error.provenance,
        &mut file.executors.captured.provenance,
        &mut file.executors.eager.provenance,
    ] {
        note(provenance);
    }
    for launching in [&mut file.executors.captured, &mut file.executors.eager] {
        if let Some(error) = &mut launching.step_error {
            note(&mut error.provenance);
        }
    }
    note(&mut file.device.provenance);
    let more = "peaks scaled by the number of multiprocessors, which is the driver's";
    file.device.provenance.source = format!("{}; {more}", file.device.provenance.source);
}

/// No product and no pass beats what a device can do: where one did, that is what it can do. Short ones say
/// nothing, because their operands lie in caches, and clocks are coarse.
fn exceeded(file: &mut ProfileFile, points: &[MeasuredPoint]) {
    let device = &mut file.device;
    let long = || points.iter().filter(|point| point.time_s >= LONG_S);
    let products = |input: DType| {
        let rates = long().map(move |point| match &point.kernel {
            Kernel::Gemm(gemm) if gemm.input == input => gemm.flops().0 / point.time_s,
            Kernel::Attention(a) if a.input == input => a.flops().0 / point.time_s,
            _ => 0.0,
        });
        rates.fold(0.0, f64::max)
    };
    let passes = long().map(|point| match &point.kernel {
        Kernel::Fused(pass) => pass.traffic.as_f64() / point.time_s,
        _ => 0.0,
    });
    let mut told = vec![];
    for (reached, peak, name) in [
        (products(DType::Bf16), &mut device.peak_flops_per_s.bf16, "peak_flops_per_s.bf16"),
        (products(DType::F32), &mut device.peak_flops_per_s.f32, "peak_flops_per_s.f32"),
        (
            passes.fold(0.0, f64::max),
            &mut device.memory_bandwidth_bytes_per_s,
            "memory_bandwidth_bytes_per_s",
        ),
    ] {
        if reached > *peak {
            *peak = reached;
            told.push(name);
        }
    }
    if !told.is_empty() {
        let source = &mut device.provenance.source;
        *source =
            format!("{source}; {}: the most that was reached, which is more", told.join(", "));
    }
}

/// As many GPUs in a node as there are, with as many network cards for each as the preset has.
fn of_node(file: &mut ProfileFile, per_node: u32) {
    let links = &mut file.links;
    let before = f64::from(links.devices_per_node);
    let cards = f64::from(links.inter_node.nics_per_node) / before * f64::from(per_node);
    links.inter_node.nics_per_node = (cards.round() as u32).max(1);
    links.devices_per_node = per_node;
    if per_node > WIRED_MAX {
        links.intra_node.wiring = NodeWiring::Switched;
    }
}

/// What crosses nodes corrects no price: it would stand beside what does not.
fn inside_a_node(points: Vec<MeasuredPoint>, file: &ProfileFile) -> Vec<MeasuredPoint> {
    let per_node = u64::from(file.links.devices_per_node);
    let crosses = |point: &MeasuredPoint| {
        let group = match &point.kernel {
            Kernel::Collective(collective) => &collective.group,
            Kernel::Transfer(transfer) => &transfer.group,
            _ => return false,
        };
        Topology::new(per_node, point.devices).place(group).nodes > 1
    };
    points.into_iter().filter(|point| !crosses(point)).collect()
}

/// Fits the numbers of a class to its points.
fn fit(file: &mut ProfileFile, class: KernelClass, points: &[MeasuredPoint]) {
    let improve = |file: &mut ProfileFile| improve(file, parameters(class), |f| error(f, points));
    if class != KernelClass::Attention {
        return improve(file);
    }
    for _ in 0..TURNS {
        let (start_s, peak) = (file.attention.start_s, file.device.peak_flops_per_s.clone());
        let share_of_peak = |a: &Attention, point: &MeasuredPoint| {
            let peak = match a.input {
                DType::Bf16 => peak.bf16,
                DType::F32 | DType::U32 => peak.f32,
            };
            let time_s = (point.time_s - start_s).max(LEFT_MIN * point.time_s);
            a.flops().0 / time_s / peak
        };
        curves(file, points, share_of_peak);
        improve(file);
    }
}

/// Mean distance of the curves from these measurements, each on the mesh it was measured on.
fn error(file: &ProfileFile, points: &[MeasuredPoint]) -> f64 {
    let Ok(profile) = file.clone().resolve() else { return f64::INFINITY };
    let mut prices: Vec<(u64, Prices)> = vec![];
    let mut sum = 0.0;
    for MeasuredPoint { kernel, devices, time_s, .. } in points {
        let of = match prices.iter().position(|(known, _)| known == devices) {
            Some(index) => index,
            None => {
                let mesh = Mesh { tensor: *devices, pipeline: 1, data: 1 };
                prices.push((*devices, Prices::new(&profile, Executor::Captured, &mesh)));
                prices.len() - 1
            }
        };
        let priced = prices[of].1.kernel(kernel).0;
        sum += if priced > 0.0 { (time_s / priced).ln().abs() } else { 0.0 };
    }
    sum / points.len().max(1) as f64
}

/// What is left of whole steps, launch by launch.
fn gaps(file: &mut ProfileFile, steps: &[MeasuredStep], machine: &GpuMachine) {
    let middle = |of: fn(&MeasuredStep) -> f64| {
        let each = steps
            .iter()
            .filter(|step| step.launches >= 1.0)
            .map(|step| ((of(step) - step.instructions_s) / step.launches).max(0.0));
        let mut gaps: Vec<f64> = each.collect();
        gaps.sort_by(f64::total_cmp);
        gaps.get(gaps.len() / 2).copied()
    };
    let (captured, eager) = (middle(|step| step.captured_s), middle(|step| step.eager_s));
    let executors = &mut file.executors;
    for (launching, gap, steps_of) in [
        (&mut executors.captured, captured, "captured graphs"),
        (&mut executors.eager, eager, "single launches of this runtime, with events between them,"),
    ] {
        let Some(gap) = gap else { continue };
        launching.launch_gap_s = gap;
        let how = format!(
            "steps of {steps_of} by the clock, less their instructions timed one by one, over their \
             launches; the middle of {} plans on one GPU, and 0 where nothing is left",
            steps.len()
        );
        let (source, date) = (&machine.source, &machine.date);
        launching.provenance = from(ProvenanceKind::Derived, Some(&how), source, date);
        if launching.step_factor != 1.0 {
            launching.provenance.assumed = vec!["step_factor".into()];
        }
    }
}
