//! The price of a fused op: a memory-bound kernel.
//!
//! ```text
//! fused:   gap + start + bytes / (bandwidth · η)
//! unfused: parameters · launches · (gap + start) + unfused bytes / (bandwidth · η)
//! ```
//! A fused op has one launch for all parameters that it updates. PyTorch code of publications loops over them.
//! A start of s seconds is the same as a bandwidth that ramps as bytes/(bytes + s·bandwidth·η).

use narrows_plan::Seconds;
use narrows_plan::kernel::FusedKernel;

use crate::profile::{DeviceSpec, FusedCurve};

/// Prices fused ops; see the [module](self).
#[derive(Clone, Copy, Debug)]
pub(super) struct FusedPrice {
    start: Seconds,
    bytes_per_s: f64,
    fused: bool,
}

impl FusedPrice {
    /// From parts of a validated profile; `fused` says whether the executor runs the op as one kernel.
    pub(super) fn new(curve: &FusedCurve, device: &DeviceSpec, fused: bool) -> Self {
        FusedPrice {
            start: Seconds(curve.start_s),
            bytes_per_s: device.memory_bandwidth_bytes_per_s * curve.efficiency,
            fused,
        }
    }

    /// Whether the executor runs a fused op as one kernel.
    pub(super) fn is_fused(&self) -> bool {
        self.fused
    }

    /// Number of kernel launches.
    pub(super) fn launches(&self, op: &FusedKernel) -> u32 {
        let of_all = u64::from(op.unfused_launches).saturating_mul(op.parameters);
        if self.fused { 1 } else { u32::try_from(of_all).unwrap_or(u32::MAX) }
    }

    /// Seconds including a launch gap for every launch.
    pub(super) fn price(&self, op: &FusedKernel, launch_gap: Seconds) -> Seconds {
        let traffic = if self.fused { op.traffic } else { op.unfused_traffic };
        (launch_gap + self.start) * f64::from(self.launches(op))
            + Seconds(traffic.as_f64() / self.bytes_per_s)
    }
}
