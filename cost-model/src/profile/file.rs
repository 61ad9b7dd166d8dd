//! The JSON form of a profile, `narrows-profile/1`.
//!
//! Units are in the keys. Every group of numbers has a `provenance`; a number that was not measured is labelled
//! `assumed` there.

use narrows_plan::{Bytes, DType, Executor, Precision};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::measured::KernelMeasurements;
use super::provenance::{Provenance, ProvenanceKind, RelativeError};
use super::refits::{BootstrapRefits, FittedParameter};
use crate::overlap::OverlapSlowdown;

/// The JSON form of a hardware profile; [`resolve`](ProfileFile::resolve) turns it into a [`Profile`](super::Profile).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    /// Version of the format.
    pub format: ProfileFormat,
    /// The name in plans and messages: lower-case letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// Preset that the form of the curves is taken from. For a kernel class without measurements here, prices far
    /// from the measured shapes of that preset are less certain. Absent where the form is assumed too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form_of: Option<String>,
    /// The number formats that training uses on this hardware.
    pub precision: Precision,
    /// Price of one device for one hour, in dollars. Absent where it is not known; step times do not depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_device_hour: Option<f64>,
    /// One device.
    pub device: DeviceSpec,
    /// GEMMs.
    pub gemm: GemmCurve,
    /// Causal flash attention.
    pub attention: AttentionCurve,
    /// Fused ops: memory-bound kernels.
    #[serde(rename = "passes")]
    pub fused: FusedCurve,
    /// Links between the devices.
    pub links: LinkSpec,
    /// Collectives overlapped with computation. Absent where they do not run at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlap: Option<OverlapSpec>,
    /// Processors that serve a device. Absent where they are assumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostSpec>,
    /// Costs of launching kernels.
    pub executors: ExecutorSpecs,
    /// Times of kernels on the machine itself, which correct prices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<KernelMeasurements>,
    /// Bootstrap refits of the numbers that were fitted to published figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refits: Option<BootstrapRefits>,
}

impl ProfileFile {
    /// Whether the devices are GPUs: those of CPUs are threads, which share memory.
    pub fn has_gpus(&self) -> bool {
        self.links.library != CollectiveLibrary::SharedMemory
    }

    /// The value of a fitted parameter.
    fn parameter_mut(&mut self, parameter: FittedParameter) -> &mut f64 {
        match parameter {
            FittedParameter::GemmEfficiencyMax => &mut self.gemm.efficiency_max,
            FittedParameter::GemmExposedEpilogue => &mut self.gemm.exposed_epilogue,
            FittedParameter::GemmTileOverhead => &mut self.gemm.tile_overhead_elements,
            FittedParameter::GemmStart => &mut self.gemm.start_s,
            FittedParameter::LinkEfficiency => &mut self.links.intra_node.efficiency,
            FittedParameter::LinkFill => &mut self.links.intra_node.fill_s,
        }
    }

    /// Path and provenance of every group of numbers, in file order.
    pub(super) fn groups(&self) -> Vec<(&'static str, &Provenance)> {
        // Without `..`, so that a new group is a compile error here.
        let ProfileFile {
            format: _,
            name: _,
            description: _,
            form_of: _,
            precision: _,
            price_per_device_hour: _,
            device,
            gemm,
            attention,
            fused,
            links,
            overlap,
            host,
            executors: ExecutorSpecs { captured, compiled, eager },
            measured,
            refits,
        } = self;
        let (intra, inter) = (&links.intra_node, &links.inter_node);
        let groups = [
            ("device", Some(&device.provenance)),
            ("device.reserve", Some(&device.reserve.provenance)),
            ("gemm", Some(&gemm.provenance)),
            ("gemm.relative_error", Some(&gemm.relative_error.provenance)),
            ("gemm.error_growth", gemm.error_growth.as_ref().map(|growth| &growth.provenance)),
            ("attention", Some(&attention.provenance)),
            ("attention.relative_error", Some(&attention.relative_error.provenance)),
            ("passes", Some(&fused.provenance)),
            ("passes.relative_error", Some(&fused.relative_error.provenance)),
            ("links.intra_node", Some(&intra.provenance)),
            ("links.inter_node", Some(&inter.provenance)),
            ("links.inter_node.relative_error", Some(&inter.relative_error.provenance)),
            ("links.relative_error", Some(&links.relative_error.provenance)),
            ("overlap", overlap.as_ref().map(|overlap| &overlap.provenance)),
            ("host", host.as_ref().map(|host| &host.provenance)),
            ("executors.captured", Some(&captured.provenance)),
            ("executors.captured.step_error", captured.step_error.as_ref().map(|e| &e.provenance)),
            ("executors.compiled", compiled.as_ref().map(|compiled| &compiled.provenance)),
            (
                "executors.compiled.step_error",
                compiled
                    .as_ref()
                    .and_then(|costs| costs.step_error.as_ref())
                    .map(|e| &e.provenance),
            ),
            ("executors.eager", Some(&eager.provenance)),
            ("executors.eager.step_error", eager.step_error.as_ref().map(|e| &e.provenance)),
            ("measured", measured.as_ref().map(|measured| &measured.provenance)),
            (
                "measured.steps",
                measured.as_ref().and_then(|m| m.steps.as_ref()).map(|e| &e.provenance),
            ),
            ("refits", refits.as_ref().map(|refits| &refits.provenance)),
        ];
        let present = |(path, provenance): (_, Option<_>)| Some((path, provenance?));
        groups.into_iter().filter_map(present).collect()
    }

    /// This file with the parameters of each bootstrap refit in place of its own, in the order of the draws. Empty
    /// for a file without refits.
    pub fn refitted(&self) -> Vec<ProfileFile> {
        let Some(refits) = &self.refits else { return vec![] };
        let base = ProfileFile { refits: None, measured: None, ..self.clone() };
        let refit = |draw: &Vec<f64>| {
            let mut file = base.clone();
            for (parameter, value) in refits.parameters.iter().zip(draw) {
                *file.parameter_mut(*parameter) = *value;
            }
            file
        };
        refits.draws.iter().map(refit).collect()
    }
}

/// Version of the profile format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProfileFormat {
    /// The only version so far.
    #[serde(rename = "narrows-profile/1")]
    V1,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Memory of the device.
    pub memory_bytes: Bytes,
    /// Memory outside every arena.
    pub reserve: MemoryReserve,
    /// Peak bandwidth of that memory.
    pub memory_bandwidth_bytes_per_s: f64,
    /// Peak rate of GEMMs.
    pub peak_flops_per_s: PeakFlops,
    /// Independent units that a GEMM's tiles are spread over: streaming multiprocessors, cores.
    pub compute_units: u32,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Memory outside every arena: driver context, NCCL's buffers, library workspaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryReserve {
    /// Size of the reserve.
    pub bytes: Bytes,
    /// Provenance of the number.
    pub provenance: Provenance,
}

/// Peak rates by the format of the inputs, without sparsity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PeakFlops {
    /// Inputs in bf16, sums in fp32.
    pub bf16: f64,
    /// Inputs in fp32, without TF32.
    pub f32: f64,
}

/// Parameters of the price of a GEMM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmCurve {
    /// Fraction of the peak that the largest tile reaches on an endless GEMM, power limits and issue slots included.
    /// In (0, 1].
    pub efficiency_max: f64,
    /// Fraction of the peak memory bandwidth that a memory-bound GEMM reaches. In (0, 1].
    pub memory_efficiency: f64,
    /// Fraction of the write of C that the next tile's main loop does not hide.
    pub exposed_epilogue: f64,
    /// λ: a tile of a rows and b columns costs 1 + λ(1/a + 1/b) for each multiply-add.
    pub tile_overhead_elements: f64,
    /// Fill and drain of one launch, under any executor.
    pub start_s: f64,
    /// The tiles that the library may choose from.
    pub tiles: Vec<GemmTile>,
    /// Format to which an executor rounds the operands of GEMMs, where that is not the format of the program: GEMMs have its rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operands: Option<DType>,
    /// Error of measurements relative to the price.
    pub relative_error: RelativeError,
    /// Growth of the error of a GEMM alone with its distance from the shapes of `refits`. Where absent, the error grows as
    /// that of other kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_growth: Option<ErrorGrowth>,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Growth of an error with the distance from measured shapes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ErrorGrowth {
    /// Growth of the error for each octave, as a multiple of the error of a measured shape. At least 0.
    pub per_octave: f64,
    /// Provenance of the growth.
    pub provenance: Provenance,
}

/// The part of C that one compute unit computes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmTile {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub columns: u32,
}

/// Parameters of the price of attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionCurve {
    /// Fraction of the peak by sequence length, forward, with 128 features a head.
    pub forward: Vec<EfficiencyPoint>,
    /// Fraction of the peak by sequence length, backward, with 128 features a head.
    pub backward: Vec<EfficiencyPoint>,
    /// Features a head at which the efficiency has fallen to half of its limit.
    pub head_dim_half: f64,
    /// Fill and drain of one launch.
    pub start_s: f64,
    /// Error of measurements relative to the price.
    pub relative_error: RelativeError,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// One point of an efficiency curve over the sequence length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EfficiencyPoint {
    /// Tokens of a sequence.
    pub length: u64,
    /// Fraction of the peak, in (0, 1].
    pub efficiency: f64,
}

/// Parameters of the price of a fused op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FusedCurve {
    /// Fraction of the peak memory bandwidth that a large fused op reaches. In (0, 1].
    pub efficiency: f64,
    /// Fill and drain of one launch; dominates small ops.
    pub start_s: f64,
    /// Error of measurements relative to the price.
    pub relative_error: RelativeError,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Links between the devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Devices of one node.
    pub devices_per_node: u32,
    /// The library that runs collectives.
    pub library: CollectiveLibrary,
    /// Inside a node.
    pub intra_node: IntraNodeLinks,
    /// Between nodes.
    pub inter_node: InterNodeLinks,
    /// Error of measurements relative to the price of a collective or P2P transfer inside a node.
    pub relative_error: RelativeError,
}

/// The library that runs collectives, with the column of NCCL's constants that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CollectiveLibrary {
    /// NCCL on compute capability 8.
    NcclAmpere,
    /// NCCL on compute capability 9. NVLS is not modelled.
    NcclHopper,
    /// Threads of one process that read each other's memory.
    SharedMemory,
}

/// Wiring of the devices of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeWiring {
    /// Each device has an equal share of its links to each other device: a group of fewer devices
    /// than the node has uses fewer links.
    AllPairs,
    /// A switch: any two devices can use all their links.
    Switched,
}

/// Links inside a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct IntraNodeLinks {
    /// Wiring of the devices.
    pub wiring: NodeWiring,
    /// All links of one device, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Fraction of the bandwidth that a large ring collective reaches (bus bandwidth of nccl-tests). In (0, 1].
    pub efficiency: f64,
    /// Time of a large collective beyond NCCL's own latency constants.
    pub fill_s: f64,
    /// Payload at which half of `fill_s` is paid.
    pub fill_half_bytes: f64,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Links between nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InterNodeLinks {
    /// Network cards of one node, shared evenly among its devices.
    pub nics_per_node: u32,
    /// One card, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Fraction of the bandwidth that a large collective reaches. In (0, 1].
    pub efficiency: f64,
    /// Latency of a message beyond NCCL's own constants: cables, switches.
    pub extra_latency_s: f64,
    /// Error of measurements relative to the price of a collective or P2P transfer between nodes.
    pub relative_error: RelativeError,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

/// Slowdown of a collective and computation that run at the same time on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlapSpec {
    /// Factor on the time of computation overlapped with a collective, which occupies some compute units. At least 1.
    pub compute_slowdown: f64,
    /// Factor on the time of a collective overlapped with computation, which uses memory bandwidth. At least 1.
    pub collective_slowdown: f64,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

impl OverlapSpec {
    /// The two factors.
    pub fn slowdown(&self) -> OverlapSlowdown {
        let OverlapSpec { compute_slowdown, collective_slowdown, .. } = self;
        OverlapSlowdown { compute: *compute_slowdown, collective: *collective_slowdown }
    }
}

/// The processors of a host that serve one of its devices. They run exact steps of LORO.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Threads that compute for one device.
    pub threads_per_device: u64,
    /// Floating-point operations of a thread in a second, in matrix decompositions in f64.
    pub flops_per_s: f64,
    /// Bandwidth between the memories of a device and its host.
    pub copy_bytes_per_s: f64,
    /// Bandwidth between hosts for one device.
    pub network_bytes_per_s: f64,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

impl HostSpec {
    /// The host of a profile that states none.
    pub(super) fn assumed(threads_per_device: u64, has_gpus: bool) -> HostSpec {
        HostSpec {
            threads_per_device,
            flops_per_s: 4e10,
            copy_bytes_per_s: 1e10,
            // Devices that are threads share the memory of their host.
            network_bytes_per_s: if has_gpus { 1e9 } else { 1e10 },
            provenance: Provenance {
                kind: ProvenanceKind::Assumed,
                source: "decompositions of pairs reach 45e9 to 79e9 FLOP/s on a core of an AMD EPYC with AVX-512"
                    .into(),
                date: "2026-11-27".into(),
                assumed: vec![],
            },
        }
    }
}

/// The ways of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecutorSpecs {
    /// Captured graphs of fused ops: this project's runtime.
    pub captured: LaunchCosts,
    /// Fused ops, launched one by one. Where absent, launches cost what those of `eager` cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiled: Option<LaunchCosts>,
    /// A framework that launches operator by operator.
    pub eager: LaunchCosts,
}

impl ExecutorSpecs {
    /// The costs of launching kernels with `executor`.
    pub fn of(&self, executor: Executor) -> &LaunchCosts {
        match executor {
            Executor::Captured => &self.captured,
            Executor::Compiled => self.compiled.as_ref().unwrap_or(&self.eager),
            Executor::Eager => &self.eager,
        }
    }

    /// Whether `executor` runs a fused op as one kernel.
    pub fn fuses_ops(&self, executor: Executor) -> bool {
        executor == Executor::Compiled || self.of(executor).fuses_ops
    }
}

/// One way of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LaunchCosts {
    /// Time between the end of a kernel and the start of the next one.
    pub launch_gap_s: f64,
    /// Time of the host for one launch. Launches queue: the device waits where it has ended all that was launched.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_launch_s: f64,
    /// Whether a fused op is one kernel; otherwise it runs operator by operator.
    #[serde(rename = "fuses_passes")]
    pub fuses_ops: bool,
    /// Time of a step over the sum of its kernels measured alone: clocks under sustained load, the host, the
    /// allocator.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub step_factor: f64,
    /// Time of a step beyond its kernels that no factor on them explains: the host between steps, and devices that wait for
    /// it and for each other.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub step_s: f64,
    /// Error of measured steps relative to that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_error: Option<RelativeError>,
    /// Whether `step_error` is that of whole steps, which contains the errors of their kernels; otherwise it adds to them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub step_error_includes_kernels: bool,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

fn one() -> f64 {
    1.0
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero(time_s: &f64) -> bool {
    *time_s == 0.0
}

fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}
