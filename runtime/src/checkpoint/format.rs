//! Version of checkpoints, names of their files and tensors, and their JSON files.

use std::path::Path;

use narrows_plan::{Defect, json};
use serde::de::DeserializeOwned;

use super::error::{CheckpointError, CheckpointFault};

/// The version of a checkpoint of whole tensors, which one process writes.
pub(crate) const WHOLE_VERSION: u64 = 1;

/// The version of a checkpoint of shards, which all processes write: the latest that is read.
pub(crate) const SHARDS_VERSION: u64 = 2;

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
pub(super) const STATE: &str = "state.json";
pub(super) const MANIFEST: &str = "manifest.json";

/// Start of the names of shards.
pub(super) const MODEL_SHARD: &str = "model-";
pub(super) const OPTIMIZER_SHARD: &str = "optimizer-";

/// Suffix of a parameter's name in the name of a tensor.
pub(super) const WEIGHT_SUFFIX: &str = "";
pub(super) const FIRST_MOMENT_SUFFIX: &str = ".first_moment";
pub(super) const SECOND_MOMENT_SUFFIX: &str = ".second_moment";

const FORMAT_PREFIX: &str = "narrows-checkpoint/";

/// The `format` field of the JSON files.
pub(super) fn format_field(version: u64) -> String {
    format!("{FORMAT_PREFIX}{version}")
}

/// Parses a JSON file of a checkpoint. The format is checked first, because a later version may have
/// other fields.
pub(super) fn parse_json<T: DeserializeOwned>(
    path: &Path,
    bytes: &[u8],
) -> Result<T, CheckpointError> {
    let error = |fault| CheckpointError::new(path, fault);
    let field_error = |defect: Defect| {
        let field = if defect.field.is_empty() { ".".into() } else { defect.field };
        error(CheckpointFault::InvalidField { field, problem: defect.problem })
    };
    let value: serde_json::Value = json::read_bytes(bytes).map_err(field_error)?;
    let format = value.get("format").and_then(|format| format.as_str());
    let version = format.and_then(|format| format.strip_prefix(FORMAT_PREFIX));
    match version.and_then(|version| version.parse().ok()) {
        Some(version @ (WHOLE_VERSION | SHARDS_VERSION))
            if format == Some(&format_field(version)) => {}
        Some(version) if version > SHARDS_VERSION => {
            let expected = SHARDS_VERSION;
            return Err(error(CheckpointFault::NewerFormat { expected, actual: version }));
        }
        _ => {
            let actual = match value.get("format") {
                None => "nothing".into(),
                Some(other) => {
                    format!("`{}`", other.to_string().chars().take(60).collect::<String>())
                }
            };
            return Err(error(CheckpointFault::UnknownFormat { actual }));
        }
    }
    json::read_bytes(bytes).map_err(field_error)
}

/// Whether a file of this name may be a shard of a checkpoint.
pub(super) fn is_shard(name: &str) -> bool {
    let numbers = [MODEL_SHARD, OPTIMIZER_SHARD].iter().find_map(|start| name.strip_prefix(start));
    let numbers = numbers.and_then(|rest| rest.strip_suffix(".safetensors"));
    numbers.is_some_and(|numbers| {
        numbers.split("-of-").count() == 2
            && numbers.split("-of-").all(|number| number.parse::<u64>().is_ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_shards_are_no_paths() {
        assert!(is_shard("model-00001-of-00004.safetensors"));
        for other in
            ["model-/../x-of-1.safetensors", "model.safetensors", "model-1-of-2-of-3.safetensors"]
        {
            assert!(!is_shard(other), "{other}");
        }
    }
}
