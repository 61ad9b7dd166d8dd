//! Provenance of the numbers of a profile, and the errors of prices derived from them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Provenance of a group of numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Origin of the numbers.
    pub kind: ProvenanceKind,
    /// Source of the numbers, or of the measurements that they were fitted to.
    pub source: String,
    /// Date of the record, `YYYY-MM-DD`.
    pub date: String,
    /// Assumed fields of a group that is otherwise not assumed. A field of an object within the group is written
    /// with its path: `peak_flops_per_s.bf16`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
}

/// Origin of a group of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ProvenanceKind {
    /// Measured on this hardware by `narrows calibrate`, or fitted to such measurements.
    Measured,
    /// Computed from measurements on this hardware by a rule that the source names; the numbers themselves were not
    /// measured.
    Derived,
    /// The vendor's data sheet.
    Datasheet,
    /// Taken from, or fitted to, published measurements on this hardware.
    Published,
    /// A plausible value that was not measured on this hardware.
    Assumed,
}

impl ProvenanceKind {
    /// The name in profiles and reports.
    pub fn name(self) -> &'static str {
        match self {
            ProvenanceKind::Measured => "measured",
            ProvenanceKind::Derived => "derived",
            ProvenanceKind::Datasheet => "datasheet",
            ProvenanceKind::Published => "published",
            ProvenanceKind::Assumed => "assumed",
        }
    }
}

/// The largest relative error that a profile may state.
pub const RELATIVE_ERROR_MAX: f64 = 1e6;

/// Error of measurements relative to a price.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RelativeError {
    /// The h for which nine measurements in ten lie between price / (1 + h) and price · (1 + h). Intervals of step times do
    /// not depend on it where there are ten residuals or more.
    pub half_width_90: f64,
    /// ln(measured / priced) of measurements outside the fit, divided by the error scale of their distance from the
    /// measurements inside it; quantiles where there are more than 99. Ten or more are drawn from; with
    /// fewer, the error is normally distributed with the half-width.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub residuals: Vec<f64>,
    /// Provenance of the error.
    pub provenance: Provenance,
}
