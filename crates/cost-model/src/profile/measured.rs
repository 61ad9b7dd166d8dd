//! Measurements within a profile: what kernels took on the machine itself.
//!
//! The numbers of the other groups are then a fit to these, and prices are corrected by the nearest of
//! them ([`price::measured`](crate::price::measured)). A measured profile is one of a whole machine:
//! of D devices each has 1/D of its processors and of its memory's bandwidth.

use narrows_plan::Kernel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::file::Provenance;

/// What kernels took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Threads of the machine, which its devices share evenly.
    pub threads: u32,
    /// What was measured, a kernel and a number of devices once each.
    pub points: Vec<Point>,
    /// Where these numbers come from.
    pub provenance: Provenance,
}

/// What one kernel took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// What was executed.
    pub kernel: Kernel,
    /// Devices that shared the machine.
    pub devices: u64,
    /// Mean time on one of them, waiting for others within a collective included.
    pub time_s: f64,
    /// How far two passes of the measurement lay apart, relative to the shorter.
    pub spread: f64,
}
