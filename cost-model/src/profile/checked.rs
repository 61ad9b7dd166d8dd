//! Validated profiles.

use narrows_plan::{Bytes, DType, Precision};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::Executor;
use super::file::{LaunchCosts, ProfileFile};
use super::measured::KernelMeasurements;
use super::provenance::{Provenance, ProvenanceKind};

/// A hardware profile whose numbers were validated.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    file: ProfileFile,
    fingerprint: String,
}

impl Profile {
    pub(super) fn new(file: ProfileFile) -> Self {
        let fingerprint = fingerprint(&file);
        Profile { file, fingerprint }
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
        match executor {
            Executor::Captured => &self.file.executors.captured,
            Executor::Eager => &self.file.executors.eager,
        }
    }

    /// SHA-256, in hex, of all fields that a price depends on. Names, descriptions and provenance are left out, so
    /// that correcting a citation does not make plans stale.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// A warning for readers of predictions when the measurements of the profile are unreliable.
    pub fn warning(&self) -> Option<String> {
        let repeatability = self.file.measured.as_ref()?.repeatability?;
        let warning = repeatability.warning()?;
        Some(format!("`{}` {warning}; its predictions are as unreliable", self.name()))
    }

    /// Path and provenance of every group of numbers, in file order.
    pub fn provenance(&self) -> Vec<(String, Provenance)> {
        let mut groups = Vec::new();
        let value = serde_json::to_value(&self.file).unwrap_or_default();
        collect_provenance(&value, "", &mut groups);
        groups
    }

    /// Paths of assumed values in file order: whole groups, and single numbers in groups that are otherwise measured.
    pub fn assumed_paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        for (path, provenance) in self.provenance() {
            let dot = if path.is_empty() { "" } else { "." };
            let fields = provenance.assumed.iter().map(|field| format!("{path}{dot}{field}"));
            if provenance.kind == ProvenanceKind::Assumed {
                paths.push(path.clone());
            }
            paths.extend(fields);
        }
        paths
    }
}

fn fingerprint(file: &ProfileFile) -> String {
    let mut value = serde_json::to_value(file).unwrap_or_default();
    remove_unpriced(&mut value);
    hex::encode(Sha256::digest(value.to_string().as_bytes()))
}

/// Fields that no price depends on.
const UNPRICED: [&str; 5] = ["name", "description", "provenance", "machine", "repeatability"];

fn remove_unpriced(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|key, _| !UNPRICED.contains(&key.as_str()));
            fields.values_mut().for_each(remove_unpriced);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(remove_unpriced),
        _ => {}
    }
}

fn collect_provenance(
    value: &serde_json::Value,
    path: &str,
    groups: &mut Vec<(String, Provenance)>,
) {
    let serde_json::Value::Object(fields) = value else { return };
    let dot = if path.is_empty() { "" } else { "." };
    if let Some(Ok(provenance)) = fields.get("provenance").map(Provenance::deserialize) {
        groups.push((path.to_string(), provenance));
    }
    for (key, child) in fields {
        collect_provenance(child, &format!("{path}{dot}{key}"), groups);
    }
}
