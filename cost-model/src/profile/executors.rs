//! Costs of launching kernels, by executor.

use narrows_plan::Executor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::provenance::{Provenance, RelativeError};

/// The ways of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecutorSpecs {
    /// Captured graphs of fused ops: this project's runtime.
    pub captured: LaunchCosts,
    /// Fused ops, launched one by one. Where absent, launches cost what those of `eager` cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiled: Option<LaunchCosts>,
    /// A framework that launches operator by operator.
    pub eager: LaunchCosts,
}

impl ExecutorSpecs {
    /// The costs of launching kernels with `executor`.
    pub fn of(&self, executor: Executor) -> &LaunchCosts {
        match executor {
            Executor::Captured => &self.captured,
            Executor::Compiled => self.compiled.as_ref().unwrap_or(&self.eager),
            Executor::Eager => &self.eager,
        }
    }

    /// Whether `executor` runs a fused op as one kernel.
    pub fn fuses_ops(&self, executor: Executor) -> bool {
        executor == Executor::Compiled || self.of(executor).fuses_ops
    }
}

/// One way of launching kernels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LaunchCosts {
    /// Time between the end of a kernel and the start of the next one.
    pub launch_gap_s: f64,
    /// Time of the host for one launch. Launches queue: the device waits where it has ended all that was launched.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_launch_s: f64,
    /// Whether a fused op is one kernel; otherwise it runs operator by operator.
    #[serde(rename = "fuses_passes")]
    pub fuses_ops: bool,
    /// Time of a step over the sum of its kernels measured alone: clocks under sustained load, the host, the
    /// allocator.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub step_factor: f64,
    /// Time of a step beyond its kernels that no factor on them explains: the host between steps, and devices that wait for
    /// it and for each other.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub step_s: f64,
    /// Error of measured steps relative to that time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_error: Option<RelativeError>,
    /// Whether `step_error` is that of whole steps, which contains the errors of their kernels; otherwise it adds to them.
    #[serde(default, skip_serializing_if = "is_false")]
    pub step_error_includes_kernels: bool,
    /// Provenance of these numbers.
    pub provenance: Provenance,
}

fn one() -> f64 {
    1.0
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero(time_s: &f64) -> bool {
    *time_s == 0.0
}

fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}
