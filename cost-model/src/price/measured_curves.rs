//! Prices of measured kernels by the curves of a profile, to which their times are compared.

use narrows_plan::{Kernel, Mesh};

use super::collective::LinkPrice;
use super::fused::FusedPrice;
use super::topology::Topology;
use super::{Executor, Prices};
use crate::profile::{MeasuredPoint, ProfileFile};

/// Prices by the curves of a profile, under the conditions of its measurements.
pub(super) struct MeasuredCurves<'a> {
    /// Prices without corrections.
    pub prices: &'a Prices,
    /// The profile of the prices.
    pub file: &'a ProfileFile,
    /// Whether the devices of the measurements share one machine.
    pub devices_share_machine: bool,
}

impl MeasuredCurves<'_> {
    /// The price of a kernel in seconds. On whole devices it is that on the mesh that the measurement was taken on, in nodes
    /// of the profile's size, without the launch gap; 0 for kernels that are never launched or that cross nodes.
    pub fn time_s(&self, kernel: &Kernel, devices: u64) -> f64 {
        if self.devices_share_machine {
            return self.prices.curve_time(kernel, devices as f64).unwrap_or_default().0;
        }
        let ProfileFile { links, fused, device, .. } = self.file;
        let topology = Topology::new(u64::from(links.devices_per_node), devices);
        let fused = FusedPrice::new(fused, device, true);
        self.prices.execution_time_s(kernel, fused, &LinkPrice::new(links, topology))
    }
}

/// Scales the measured times of a profile that was changed after its kernels had been measured on `measured_on`. Each
/// time is multiplied by the price from the curves of `file` over the price from the curves of `measured_on`, so that
/// measurements correct the curves by the same factors as on the measured hardware.
///
/// Without this scaling, the correction of a measured kernel would cancel every change of the hardware.
pub fn scale_measurements(file: &mut ProfileFile, measured_on: &ProfileFile, executor: Executor) {
    let Some(mut measured) = file.measured.take() else { return };
    let devices_share_machine = measured.devices_share_machine();
    for MeasuredPoint { kernel, devices, time_s, .. } in &mut measured.points {
        let mesh = Mesh { tensor: *devices, pipeline: 1, data: 1, context: 1 };
        let price = |file: &ProfileFile| {
            let prices = Prices::without_correction(file, executor, &mesh);
            MeasuredCurves { prices: &prices, file, devices_share_machine }.time_s(kernel, *devices)
        };
        let ratio = price(file) / price(measured_on);
        if ratio.is_finite() && ratio > 0.0 {
            *time_s *= ratio;
        }
    }
    file.measured = Some(measured);
}
