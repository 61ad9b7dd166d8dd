//! The JSON form of a profile, `narrows-profile/1`.
//!
//! Units are in the keys. Every group of numbers has a `provenance`; a number that was not measured is labelled
//! `assumed` there.

use narrows_plan::{Bytes, DType, Precision};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::executors::ExecutorSpecs;
use super::links::{CollectiveLibrary, LinkSpec, OverlapSpec};
use super::measured::KernelMeasurements;
use super::provenance::{Provenance, ProvenanceKind, RelativeError};
use super::refits::{BootstrapRefits, FittedParameter};

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
    /// for a file without refits. Parameters that were set after the fit keep their values, which are given and not uncertain.
    pub fn refitted(&self) -> Vec<ProfileFile> {
        let Some(refits) = &self.refits else { return vec![] };
        let mut base = ProfileFile { refits: None, measured: None, ..self.clone() };
        let as_fitted: Vec<bool> = (0..refits.parameters.len())
            .map(|index| {
                let present = *base.parameter_mut(refits.parameters[index]);
                refits.fitted.get(index).is_none_or(|fitted| *fitted == present)
            })
            .collect();
        let refit = |draw: &Vec<f64>| {
            let mut file = base.clone();
            for ((parameter, value), is_fitted) in
                refits.parameters.iter().zip(draw).zip(&as_fitted)
            {
                if *is_fitted {
                    *file.parameter_mut(*parameter) = *value;
                }
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
