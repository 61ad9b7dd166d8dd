//! Measurements of a profile whose other numbers were changed.

use narrows_plan::Mesh;

use super::{Executor, Prices};
use crate::profile::{MeasuredPoint, ProfileFile};

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
            prices.measured_curve_s(file, devices_share_machine, kernel, *devices)
        };
        let ratio = price(file) / price(measured_on);
        if ratio.is_finite() && ratio > 0.0 {
            *time_s *= ratio;
        }
    }
    file.measured = Some(measured);
}
