//! The price of a memory-bound pass.
//!
//! ```text
//! fused:   gap + start + bytes / (bandwidth · η)
//! unfused: launches · (gap + start) + unfused bytes / (bandwidth · η)
//! ```
//! A start of s seconds is the same as a bandwidth that ramps as bytes/(bytes + s·bandwidth·η).

use narrows_plan::Seconds;
use narrows_plan::kernel::FusedKernel;

use crate::profile::{DeviceSpec, FusedCurve};

/// Prices passes; see the [module](self).
#[derive(Clone, Copy, Debug)]
pub struct FusedPrice {
    start: Seconds,
    bytes_per_s: f64,
    fused: bool,
}

impl FusedPrice {
    /// Prices from a checked profile's parts, for an executor that fuses passes or does not.
    pub fn new(curve: &FusedCurve, device: &DeviceSpec, fused: bool) -> Self {
        FusedPrice {
            start: Seconds(curve.start_s),
            bytes_per_s: device.memory_bandwidth_bytes_per_s * curve.efficiency,
            fused,
        }
    }

    /// How many kernels it is.
    pub fn launches(&self, pass: &FusedKernel) -> u32 {
        if self.fused { 1 } else { pass.unfused_launches }
    }

    /// Seconds including a launch gap for every launch.
    pub fn price(&self, pass: &FusedKernel, launch_gap: Seconds) -> Seconds {
        let traffic = if self.fused { pass.traffic } else { pass.unfused_traffic };
        (launch_gap + self.start) * f64::from(self.launches(pass))
            + Seconds(traffic.as_f64() / self.bytes_per_s)
    }
}
