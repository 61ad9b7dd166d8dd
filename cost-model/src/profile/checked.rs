//! Validated profiles.

use narrows_plan::{Bytes, DType, Precision};
use sha2::{Digest, Sha256};

use super::Executor;
use super::executors::LaunchCosts;
use super::file::{HostSpec, ProfileFile};
use super::measured::KernelMeasurements;
use super::provenance::{Provenance, ProvenanceKind};

/// A hardware profile whose numbers were validated.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    file: ProfileFile,
    fingerprint: String,
    fingerprint_within_nodes: String,
}

impl Profile {
    pub(super) fn new(file: ProfileFile) -> Self {
        let priced = priced_fields(&file);
        let mut within_nodes = priced.clone();
        UNPRICED_WITHIN_NODES.iter().for_each(|field| remove_field(&mut within_nodes, field));
        Profile {
            fingerprint: digest(&priced),
            fingerprint_within_nodes: digest(&within_nodes),
            file,
        }
    }

    /// The name in plans and messages.
    pub fn name(&self) -> &str {
        &self.file.name
    }

    /// The JSON form.
    pub fn file(&self) -> &ProfileFile {
        &self.file
    }

    /// The number formats of training on this hardware.
    pub fn precision(&self) -> Precision {
        self.file.precision
    }

    /// Memory of one device.
    pub fn memory(&self) -> Bytes {
        self.file.device.memory_bytes
    }

    /// Memory that no arena can use.
    pub fn reserve(&self) -> Bytes {
        self.file.device.reserve.bytes
    }

    /// Memory that an arena may use: memory minus reserve. Never zero.
    pub fn usable_memory(&self) -> Bytes {
        self.memory().saturating_sub(self.reserve())
    }

    /// Peak rate of GEMMs on one device, in FLOPs per second, by the format of the inputs.
    pub fn peak_flops_per_s(&self, input: DType) -> f64 {
        match input {
            DType::Bf16 => self.file.device.peak_flops_per_s.bf16,
            DType::F32 | DType::U32 => self.file.device.peak_flops_per_s.f32,
        }
    }

    /// Peak rate of `devices` together, in FLOPs per second; where devices share one machine, the rate of the
    /// machine.
    pub fn total_peak_flops_per_s(&self, devices: u64, input: DType) -> f64 {
        let shared =
            self.file.measured.as_ref().is_some_and(KernelMeasurements::devices_share_machine);
        let machines = if shared { 1.0 } else { devices as f64 };
        self.peak_flops_per_s(input) * machines
    }

    /// Devices of one node.
    pub fn devices_per_node(&self) -> u64 {
        u64::from(self.file.links.devices_per_node)
    }

    /// The costs of launching kernels with `executor`.
    pub fn launch_costs(&self, executor: Executor) -> &LaunchCosts {
        self.file.executors.of(executor)
    }

    /// The processors that serve a device; assumed where the profile states none: eight threads for a GPU, and the device's own
    /// for a device of threads.
    pub fn host(&self) -> HostSpec {
        let has_gpus = self.file.has_gpus();
        let threads = if has_gpus { 8 } else { self.file.device.compute_units };
        self.file.host.clone().unwrap_or_else(|| HostSpec::assumed(threads.into(), has_gpus))
    }

    /// SHA-256, in hex, of all fields that a price depends on. Names, descriptions and provenance are left out, so
    /// that correcting a citation does not make plans stale.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// As [`Profile::fingerprint`], without the links between nodes and the memory of a device: kernels within a node have
    /// equal prices in profiles with equal fingerprints.
    pub fn fingerprint_within_nodes(&self) -> &str {
        &self.fingerprint_within_nodes
    }

    /// The profile for an executor that rounds the operands of GEMMs in f32 to bf16. `None` where their rate is not measured.
    pub fn with_bf16_gemms(&self) -> Option<Profile> {
        let Provenance { kind, assumed, .. } = &self.file.device.provenance;
        let is_assumed = assumed.iter().any(|field| field == "peak_flops_per_s.bf16");
        if *kind != ProvenanceKind::Measured || is_assumed {
            return None;
        }
        let mut file = self.file.clone();
        file.gemm.operands = Some(DType::Bf16);
        file.resolve().ok()
    }

    /// A warning for readers of predictions when the measurements of the profile are unreliable.
    pub fn warning(&self) -> Option<String> {
        let repeatability = self.file.measured.as_ref()?.repeatability?;
        let warning = repeatability.warning()?;
        Some(format!(
            "`{}` {warning}; its predictions may be wrong by more than their intervals say",
            self.name()
        ))
    }

    /// Path and provenance of every group of numbers, in file order.
    pub fn provenance(&self) -> Vec<(&'static str, &Provenance)> {
        self.file.groups()
    }

    /// Paths of assumed values in file order: whole groups, and single numbers in groups that are otherwise measured.
    pub fn assumed_paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        for (path, provenance) in self.provenance() {
            let fields = provenance.assumed.iter().map(|field| format!("{path}.{field}"));
            if provenance.kind == ProvenanceKind::Assumed {
                paths.push(path.to_owned());
            }
            paths.extend(fields);
        }
        paths
    }
}

/// Fields besides provenance that no step time depends on.
const UNPRICED: [&str; 7] = [
    "name",
    "description",
    "price_per_device_hour",
    "host",
    "measured.machine",
    "measured.repeatability",
    "refits.fitted",
];

/// Fields besides [`UNPRICED`] that no price of a kernel within a node depends on.
const UNPRICED_WITHIN_NODES: [&str; 3] =
    ["links.inter_node", "device.memory_bytes", "device.reserve"];

/// The JSON form without provenance and [`UNPRICED`] fields. All other fields, new ones included, remain.
fn priced_fields(file: &ProfileFile) -> serde_json::Value {
    let mut value = serde_json::to_value(file).unwrap_or_default();
    for path in UNPRICED {
        remove_field(&mut value, path);
    }
    for (group, _) in file.groups() {
        remove_field(&mut value, &format!("{group}.provenance"));
    }
    value
}

/// SHA-256, in hex.
fn digest(value: &serde_json::Value) -> String {
    hex::encode(Sha256::digest(value.to_string().as_bytes()))
}

/// Removes the field at a dotted path, if it exists, and keeps the order of the others.
fn remove_field(value: &mut serde_json::Value, path: &str) {
    let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
    let mut parents = parent.split('.').filter(|key| !key.is_empty());
    let object = parents.try_fold(value, |value, key| value.get_mut(key));
    if let Some(serde_json::Value::Object(fields)) = object {
        fields.retain(|name, _| name != key);
    }
}
