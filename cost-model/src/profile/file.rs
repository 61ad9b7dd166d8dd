//! The JSON form of a profile, `narrows-profile/1`.
//!
//! Units are in the keys. Every group of numbers says where it comes from in its `provenance`: a
//! number that nobody measured is labelled `assumed`.

use narrows_plan::{Bytes, Precision};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::measured::KernelMeasurements;
use super::refits::BootstrapRefits;

/// A hardware profile as written; [`resolve`](ProfileFile::resolve) turns it into a
/// [`Profile`](super::Profile).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileFile {
    /// The form of this file.
    pub format: ProfileFormat,
    /// The name in plans and messages: lower-case letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// The profile that comes with the program whose curves these have the form of, where nothing was measured here:
    /// what is far from its measured shapes is less certain here too. Absent where nothing is known of either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form_of: Option<String>,
    /// The number formats that training uses on this hardware.
    pub precision: Precision,
    /// One device.
    pub device: DeviceSpec,
    /// Dense products.
    pub gemm: GemmCurve,
    /// Causal flash attention.
    pub attention: AttentionCurve,
    /// Memory-bound passes.
    pub passes: FusedCurve,
    /// What connects the devices.
    pub links: LinkSpec,
    /// How kernels are launched.
    pub executors: ExecutorSpecs,
    /// What kernels took on the machine itself; prices are corrected by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<KernelMeasurements>,
    /// How certain the numbers are that were fitted to figures of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refits: Option<BootstrapRefits>,
}

/// The form of a profile file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ProfileFormat {
    /// The only form so far.
    #[serde(rename = "narrows-profile/1")]
    V1,
}

/// Where a group of numbers comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// How the numbers were obtained.
    pub kind: ProvenanceKind,
    /// What they were taken from or fitted to, for a reader who wants to check.
    pub source: String,
    /// The day they were written down, `YYYY-MM-DD`.
    pub date: String,
    /// Fields of the group that it does not hold for: their values are assumed. One within another object of
    /// the group is named with that: `peak_flops_per_s.bf16`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
}

/// How a group of numbers was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProvenanceKind {
    /// Measured on this hardware by `narrows calibrate`, or fitted to what it measured.
    Measured,
    /// Computed from what was measured on this hardware, by a rule that the source names: nobody measured the
    /// numbers themselves.
    Derived,
    /// The vendor's data sheet.
    Datasheet,
    /// Taken from, or fitted to, somebody's published measurements on this hardware.
    Published,
    /// A plausible value that nobody measured on this hardware.
    Assumed,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Memory of the device.
    pub memory_bytes: Bytes,
    /// The part of it that no arena can use.
    pub reserve: MemoryReserve,
    /// Peak bandwidth of that memory.
    pub memory_bandwidth_bytes_per_s: f64,
    /// Peak rate of dense products.
    pub peak_flops_per_s: PeakFlops,
    /// Independent units that a product's tiles are spread over: streaming multiprocessors, cores.
    pub compute_units: u32,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// Memory that no arena holds: driver context, NCCL's buffers, library workspaces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryReserve {
    /// Bytes of it.
    pub bytes: Bytes,
    /// Where the number comes from.
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

/// The widest relative error that a profile may have: whatever lies further away is as useless.
pub const HALF_WIDTH_MAX: f64 = 1e6;

/// How far measurements lie from a price.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RelativeError {
    /// Nine measurements in ten lie between price / (1 + this) and price · (1 + this).
    pub half_width_90: f64,
    /// ln(measured / priced) of measurements that the price had not seen, over the scale of their distance
    /// from those it had; at most 99, else their quantiles. Where they are fewer than ten, the error is taken
    /// as normal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residuals: Vec<f64>,
    /// Where the number comes from.
    pub provenance: Provenance,
}

/// The parameters of the price of a product; [`price::gemm`](crate::price::gemm) has the equations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmCurve {
    /// Share of the peak that the largest tile reaches on an endless product; power limits and
    /// issue slots are in it. In (0, 1].
    pub efficiency_max: f64,
    /// Share of the peak memory bandwidth that a memory-bound product reaches. In (0, 1].
    pub memory_efficiency: f64,
    /// Share of the write of C that the next tile's main loop does not hide.
    pub exposed_epilogue: f64,
    /// λ: a tile of a rows and b columns costs 1 + λ(1/a + 1/b) a product.
    pub tile_overhead_elements: f64,
    /// Fill and drain of one launch, whoever launches it.
    pub start_s: f64,
    /// The tiles that the library may choose from.
    pub tiles: Vec<GemmTile>,
    /// How far measurements lie from the price.
    pub relative_error: RelativeError,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// The part of C that one compute unit makes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmTile {
    /// Rows of it.
    pub rows: u32,
    /// Columns of it.
    pub columns: u32,
}

/// The parameters of the price of attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionCurve {
    /// Share of the peak by sequence length, forward, 128 features a head.
    pub forward: Vec<EfficiencyPoint>,
    /// The same, backward.
    pub backward: Vec<EfficiencyPoint>,
    /// Features a head at which the efficiency has fallen to half of its limit.
    pub head_dim_half: f64,
    /// Fill and drain of one launch.
    pub start_s: f64,
    /// How far measurements lie from the price.
    pub relative_error: RelativeError,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// One point of an efficiency curve over the sequence length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EfficiencyPoint {
    /// Tokens of a sequence.
    pub length: u64,
    /// Share of the peak reached there, in (0, 1].
    pub efficiency: f64,
}

/// The parameters of the price of a memory-bound pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FusedCurve {
    /// Share of the peak memory bandwidth that a long pass reaches. In (0, 1].
    pub efficiency: f64,
    /// Fill and drain of one launch; it makes short passes slow.
    pub start_s: f64,
    /// How far measurements lie from the price.
    pub relative_error: RelativeError,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// What connects the devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Devices of one node.
    pub devices_per_node: u32,
    /// What runs the collectives.
    pub library: CollectiveLibrary,
    /// Inside a node.
    pub intra_node: IntraNodeLinks,
    /// Between nodes.
    pub inter_node: InterNodeLinks,
    /// How far measurements lie from the price of a collective or transfer inside a node.
    pub relative_error: RelativeError,
}

/// What runs the collectives, and which column of NCCL's constants applies.
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

/// How the devices of a node are wired.
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
    /// How the devices are wired.
    pub wiring: NodeWiring,
    /// All links of one device, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Share of it that a long ring reaches (the bus bandwidth of nccl-tests). In (0, 1].
    pub efficiency: f64,
    /// What a long collective takes beyond NCCL's own latency constants.
    pub fill_s: f64,
    /// The payload at which half of `fill_s` is paid.
    pub fill_half_bytes: f64,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// Links between nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InterNodeLinks {
    /// Network cards of one node, shared evenly by its devices.
    pub nics_per_node: u32,
    /// One card, one direction.
    pub bandwidth_bytes_per_s: f64,
    /// Share of it that a long collective reaches. In (0, 1].
    pub efficiency: f64,
    /// What a message takes beyond NCCL's own latency constants: cables, switches.
    pub extra_latency_s: f64,
    /// How far measurements lie from the price of what crosses nodes.
    pub relative_error: RelativeError,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// Both ways of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecutorSpecs {
    /// A captured graph with fused passes: this project's runtime.
    pub captured: LaunchCosts,
    /// A framework that launches operator by operator.
    pub eager: LaunchCosts,
}

/// One way of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LaunchCosts {
    /// Time between the end of a kernel and the start of the next one.
    pub launch_gap_s: f64,
    /// Whether a pass is one kernel; otherwise it is run operator by operator.
    pub fuses_passes: bool,
    /// What a step takes, as a multiple of its kernels measured alone: clocks under sustained load,
    /// the host, the allocator.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub step_factor: f64,
    /// How far steps lie from that, beyond what their kernels are off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_error: Option<RelativeError>,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

fn one() -> f64 {
    1.0
}

fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}
