//! Names of the fields of a request, which state their units.
//!
//! Keys of files and flags end with the unit of their number. This file is the only reader of these endings: everywhere
//! else a unit is a [`Unit`].

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

use crate::unit::Unit;

/// Name of a field as in `whatif --list`, with its unit: `hardware.links.intra_node.bandwidth_bytes_per_s`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct FieldName {
    name: String,
    #[serde(skip)]
    unit: Unit,
}

/// Endings of keys with their units, the longer of two before the shorter. The first ending of a unit is that of files.
const ENDINGS: [(&str, Unit); 13] = [
    ("_bytes_per_s", Unit::BytesPerSecond),
    ("_gb_per_s", Unit::GigabytesPerSecond),
    ("_gbps", Unit::GigabytesPerSecond),
    ("_bytes", Unit::Bytes),
    ("_gib", Unit::Gibibytes),
    ("_elements", Unit::Elements),
    ("_s", Unit::Seconds),
    ("_seconds", Unit::Seconds),
    ("_ms", Unit::Milliseconds),
    ("_us", Unit::Microseconds),
    ("_ns", Unit::Nanoseconds),
    ("_hours", Unit::Hours),
    ("_watts", Unit::Watts),
];

impl FieldName {
    /// A name, with the unit that it states.
    pub fn new(name: impl Into<String>) -> FieldName {
        let name = name.into();
        let unit = name.rsplit('.').find_map(|key| Some(split(key)?.1)).unwrap_or(Unit::One);
        FieldName { name, unit }
    }

    /// The whole name.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Unit of the field.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// The name without its file and unit: `links.intra_node.bandwidth`.
    pub fn short(&self) -> String {
        let name = self.name.trim_start_matches("hardware.").trim_start_matches("model.");
        let keys = name.split('.').map(|key| split(key).map_or(key, |(quantity, _)| quantity));
        keys.collect::<Vec<_>>().join(".")
    }

    /// This name with the ending of another one of the same quantity: `…bandwidth_bytes_per_s` with that of `bandwith_gbps`. `None`
    /// where the other is in the unit of files, or of another quantity.
    pub fn with_ending_of(&self, other: &FieldName) -> Option<FieldName> {
        let in_files = other.in_files()?;
        let ending = |name: &str| ENDINGS.into_iter().find(|(ending, _)| name.ends_with(ending));
        let ((of_files, _), (of_other, unit)) = (ending(&in_files.name)?, ending(&other.name)?);
        let quantity = self.name.strip_suffix(of_files)?;
        Some(FieldName { name: format!("{quantity}{of_other}"), unit })
    }

    /// Endings of the same quantity in other units than that of the name: `_gb_per_s` and `_gbps` of
    /// `bandwidth_bytes_per_s`.
    pub fn other_endings(&self) -> Vec<&'static str> {
        let ending = ENDINGS.into_iter().find(|(ending, _)| self.name.ends_with(ending));
        let Some((own, unit)) = ending else { return vec![] };
        let is_other = |(ending, other): &(&'static str, Unit)| {
            *ending != own && other.in_files().0 == unit.in_files().0
        };
        ENDINGS.into_iter().filter(is_other).map(|(ending, _)| ending).collect()
    }

    /// The name of the same field with the unit that files have; `None` where the field is in this unit already.
    pub fn in_files(&self) -> Option<FieldName> {
        let (unit, _) = self.unit.in_files();
        let (ending, _) = ENDINGS.into_iter().find(|(_, known)| *known == unit)?;
        let (rest, key) = self.name.rsplit_once('.').map_or(("", &*self.name), |parts| parts);
        let (quantity, _) = split(key).filter(|_| unit != self.unit)?;
        let dot = if rest.is_empty() { "" } else { "." };
        Some(FieldName { name: format!("{rest}{dot}{quantity}{ending}"), unit })
    }
}

impl fmt::Display for FieldName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The quantity that a key names, and its unit; `None` for a key without a unit.
fn split(key: &str) -> Option<(&str, Unit)> {
    match key {
        "global_batch" | "micro_batch" => return Some((key, Unit::Sequences)),
        "sequence_length" | "tokens" => return Some((key, Unit::Tokens)),
        "bytes" | "memory_limit" => return Some((key, Unit::Bytes)),
        _ if key.contains("efficiency") => return Some((key, Unit::Efficiency)),
        // "Flops" is part of the quantity too: a device has several peaks.
        "peak_flops_per_s" => return Some(("peak_flops", Unit::FlopsPerSecond)),
        _ => {}
    }
    let (ending, unit) = ENDINGS.into_iter().find(|(ending, _)| key.ends_with(ending))?;
    Some((&key[..key.len() - ending.len()], unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_short_forms_and_units() {
        for (name, value, expected) in [
            (
                "hardware.links.intra_node.bandwidth_bytes_per_s",
                3e11,
                "links.intra_node.bandwidth 300 GB/s",
            ),
            (
                "hardware.device.peak_flops_per_s.bf16",
                3.12e14,
                "device.peak_flops.bf16 312 TFLOP/s",
            ),
            ("hardware.device.reserve.bytes", 1024.0, "device.reserve.bytes 1.0 KiB"),
            ("hardware.gemm.start_s", 5.8e-6, "gemm.start 5.8 µs"),
            ("hardware.gemm.tile_overhead_elements", 6.0, "gemm.tile_overhead 6"),
            ("hardware.gemm.efficiency_max", 0.914, "gemm.efficiency_max 0.914"),
            ("model.hidden", 4096.0, "hidden 4096"),
            ("rank", 1024.0, "rank 1024"),
        ] {
            let name = FieldName::new(name);
            assert_eq!(format!("{} {}", name.short(), name.unit().format(value)), expected);
        }
    }

    #[test]
    fn units_for_people_become_those_of_files() {
        for (typed, expected) in [
            ("links.bandwidth_gbps", Some(("links.bandwidth_bytes_per_s", 1e9))),
            ("links.bandwidth_gb_per_s", Some(("links.bandwidth_bytes_per_s", 1e9))),
            ("device.memory_gib", Some(("device.memory_bytes", 1_073_741_824.0))),
            ("start_us", Some(("start_s", 1e-6))),
            ("gemm.start_s", None),
            ("device.compute_units", None),
        ] {
            let name = FieldName::new(typed);
            let in_files = name.in_files().map(|of| (of.to_string(), name.unit().in_files().1));
            assert_eq!(in_files, expected.map(|(name, factor)| (name.to_owned(), factor)));
        }
    }
}
