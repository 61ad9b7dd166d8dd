//! The hardware profiles and the tables of frameworks that come with Narrows, as JSON text.
//!
//! `narrows-cost-model` reads and validates profiles. To add one, write `profiles/NAME.json` and add its name to
//! [`PROFILES`]; `cost-model/tests/profiles.rs` checks every entry. `narrows-calibration` reads the tables of frameworks.

macro_rules! profiles {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../", $name, ".json")))),*]
    };
}

/// Name and JSON text of every profile.
pub const PROFILES: &[(&str, &str)] = profiles![
    "a100-80gb",
    "a100-80gb-8",
    "a100-80gb-8-4nic",
    "a100-40gb",
    "h100-sxm",
    "h100-sxm-measured",
    "h200-sxm",
    "cpu-local",
];

/// Name and JSON text of every table of a framework.
pub const FRAMEWORKS: &[(&str, &str)] = profiles![
    "frameworks/fsdp",
    "frameworks/torchtitan",
    "frameworks/torchtitan-compiled",
    "frameworks/nanotron",
    "frameworks/megatron",
    "frameworks/megatron-deepspeed",
];
