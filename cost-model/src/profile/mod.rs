//! Hardware profiles: what a device, its links and its executors can do.
//!
//! A [`ProfileFile`] is what somebody wrote; a [`Profile`] is one whose every number was checked,
//! so that a price made from it is finite. [`read`] goes from text to the latter, [`preset`] from a
//! name. A profile holds hardware only: no number in it is indexed by a model or a strategy.

mod file;
mod measured;
mod presets;
mod refits;
mod resolve;

use narrows_plan::{Bytes, DType, Defect, Defects, Precision};
use serde::Deserialize;
use sha2::{Digest, Sha256};

pub use file::*;
pub use measured::*;
pub use narrows_plan::decisions::Executor;
pub(crate) use presets::measured_shapes;
pub use presets::{preset, preset_names};
pub use refits::*;

/// A checked hardware profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    file: ProfileFile,
    fingerprint: String,
}

impl Profile {
    fn new(file: ProfileFile) -> Self {
        let fingerprint = fingerprint(&file);
        Profile { file, fingerprint }
    }

    /// The name in plans and messages.
    pub fn name(&self) -> &str {
        &self.file.name
    }

    /// What was written.
    pub fn file(&self) -> &ProfileFile {
        &self.file
    }

    /// The number formats that training uses on this hardware.
    pub fn precision(&self) -> Precision {
        self.file.precision
    }

    /// Memory of one device.
    pub fn memory(&self) -> Bytes {
        self.file.device.memory_bytes
    }

    /// The part of the memory that no arena can use.
    pub fn reserve(&self) -> Bytes {
        self.file.device.reserve.bytes
    }

    /// What an arena may use: memory less reserve. Never zero.
    pub fn usable_memory(&self) -> Bytes {
        self.memory().saturating_sub(self.reserve())
    }

    /// Peak rate of dense products, in operations per second, by the format of the inputs.
    pub fn peak_flops_per_s(&self, input: DType) -> f64 {
        match input {
            DType::Bf16 => self.file.device.peak_flops_per_s.bf16,
            DType::F32 | DType::U32 => self.file.device.peak_flops_per_s.f32,
        }
    }

    /// The peak rate of so many devices together. Those of a measured machine of processors share it.
    pub fn peak_flops_per_s_of(&self, devices: u64, input: DType) -> f64 {
        let shared = self.file.measured.as_ref().is_some_and(KernelMeasurements::is_shared);
        let machines = if shared { 1.0 } else { devices as f64 };
        self.peak_flops_per_s(input) * machines
    }

    /// Devices of one node.
    pub fn devices_per_node(&self) -> u64 {
        u64::from(self.file.links.devices_per_node)
    }

    /// How `executor` launches kernels here.
    pub fn launching(&self, executor: Executor) -> &LaunchCosts {
        match executor {
            Executor::Captured => &self.file.executors.captured,
            Executor::Eager => &self.file.executors.eager,
        }
    }

    /// SHA-256, in hex, of everything a price can depend on: names, descriptions and provenance
    /// are left out, so that correcting a citation does not make plans stale.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// What whoever reads a prediction should know of the measurement it rests on; a sentence.
    pub fn warning(&self) -> Option<String> {
        let repeatability = self.file.measured.as_ref()?.repeatability?;
        let warning = repeatability.warning()?;
        Some(format!("`{}` {warning}; its predictions are no better", self.name()))
    }

    /// Where every group of numbers comes from, by its path, in file order.
    pub fn provenance(&self) -> Vec<(String, Provenance)> {
        let mut found = Vec::new();
        let value = serde_json::to_value(&self.file).unwrap_or_default();
        collect_provenance(&value, "", &mut found);
        found
    }

    /// What nobody measured on this hardware: the paths of groups of numbers, and of single numbers
    /// in groups that are otherwise measured, in file order.
    pub fn assumed(&self) -> Vec<String> {
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

/// Reads a profile. `name` is the file's name, for messages.
///
/// # Errors
/// Every defect with the path of its field; a syntax error or an unknown field ends the reading
/// and is the only one reported.
pub fn read(name: &str, text: &str) -> Result<Profile, Defects> {
    let mut json = serde_json::Deserializer::from_str(text);
    let file: ProfileFile = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path };
        Defects::one(
            Defect::new(field, format!("{name} is not a profile: {}", error.inner()))
                .hint("the files under profiles/ are complete examples"),
        )
    })?;
    json.end().map_err(|error| {
        Defects::one(Defect::new("", format!("{name} goes on after its end: {error}")))
    })?;
    file.resolve()
}

/// The JSON schema of a profile file.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ProfileFile).to_value()
}

fn fingerprint(file: &ProfileFile) -> String {
    let mut value = serde_json::to_value(file).unwrap_or_default();
    strip_prose(&mut value);
    let digest = Sha256::digest(value.to_string().as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fields that no price depends on.
const PROSE: [&str; 5] = ["name", "description", "provenance", "machine", "repeatability"];

fn strip_prose(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|key, _| !PROSE.contains(&key.as_str()));
            fields.values_mut().for_each(strip_prose);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(strip_prose),
        _ => {}
    }
}

fn collect_provenance(
    value: &serde_json::Value,
    path: &str,
    found: &mut Vec<(String, Provenance)>,
) {
    let serde_json::Value::Object(fields) = value else { return };
    let dot = if path.is_empty() { "" } else { "." };
    let own = fields.get("provenance").map(Provenance::deserialize);
    if let Some(Ok(provenance)) = own {
        found.push((path.to_string(), provenance));
    }
    for (key, child) in fields {
        collect_provenance(child, &format!("{path}{dot}{key}"), found);
    }
}
