//! Kernels that a calibration measured: their rates, and how well they are known.

use narrows_calibration::upper_median;
use narrows_cost_model::KernelClass;
use narrows_cost_model::profile::{MeasuredPoint, ProfileFile};
use narrows_plan::{Kernel, Seconds};
use serde::{Serialize, Serializer};

use super::kernels;
use super::page::{Align, Cell, Page};
use crate::args::Detail;
use crate::text::{half_width, percent, rate};

/// Measurements of one class of kernels.
#[derive(Debug, Serialize)]
pub struct ClassCoverage {
    #[serde(rename = "kernels", serialize_with = "class_name")]
    class: KernelClass,
    /// Number of shapes, counted once for each number of devices.
    measured: usize,
    /// Median relative difference between the slowest and the fastest round.
    spread_median: f64,
    /// Half width of the 90 % interval around a price.
    half_width_90: f64,
    /// Median and maximum of the FLOPs per second of GEMMs and attention kernels on one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    flops_per_s: Option<[f64; 2]>,
    /// Median and maximum of the bytes per second of other kernels on one device.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<[f64; 2]>,
}

/// A measured kernel and its rate.
#[derive(Debug, Serialize)]
pub struct KernelRate {
    /// The kernel in words.
    kernel: String,
    /// Devices that ran together.
    devices: u64,
    time_s: f64,
    /// FLOPs of one device in a second; absent for kernels without.
    #[serde(skip_serializing_if = "Option::is_none")]
    flops_per_s: Option<f64>,
    /// Bytes in a second: those that cross the memory bus of a device, or those of the unsharded tensors of a collective.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_s: Option<f64>,
}

impl KernelRate {
    /// The rate of a measurement.
    pub fn new(point: &MeasuredPoint) -> KernelRate {
        let (flops, bytes) = match &point.kernel {
            Kernel::Gemm(gemm) => (Some(gemm.flops().0), None),
            Kernel::Attention(attention) => (Some(attention.flops().0), None),
            Kernel::Fused(fused) => (None, Some(fused.traffic)),
            Kernel::Collective(collective) => (None, Some(collective.payload)),
            Kernel::Transfer(transfer) => (None, Some(transfer.bytes)),
        };
        KernelRate {
            kernel: kernels::name(&point.kernel),
            devices: point.devices,
            time_s: point.time_s,
            flops_per_s: flops.map(|flops| flops / point.time_s),
            bytes_per_s: bytes.map(|bytes| bytes.as_f64() / point.time_s),
        }
    }

    fn text(&self) -> String {
        let of = |value: Option<f64>, unit| value.map(|value| rate(value, unit));
        of(self.flops_per_s, "FLOP").or_else(|| of(self.bytes_per_s, "B")).unwrap_or_default()
    }
}

impl ClassCoverage {
    /// The measurements of a class in a profile.
    pub fn new(file: &ProfileFile, points: &[MeasuredPoint], class: KernelClass) -> ClassCoverage {
        let of_class = || points.iter().filter(|point| KernelClass::of(&point.kernel) == class);
        let error = match class {
            KernelClass::Gemm => &file.gemm.relative_error,
            KernelClass::Attention => &file.attention.relative_error,
            KernelClass::Fused => &file.fused.relative_error,
            KernelClass::Link => &file.links.relative_error,
        };
        let rates = |of: fn(KernelRate) -> Option<f64>| -> Option<[f64; 2]> {
            let rates: Vec<f64> = of_class().map(KernelRate::new).filter_map(of).collect();
            let highest = rates.iter().copied().fold(0.0, f64::max);
            Some([upper_median(rates)?, highest])
        };
        let spreads = of_class().map(|point| point.spread);
        ClassCoverage {
            class,
            measured: of_class().count(),
            spread_median: upper_median(spreads.collect()).unwrap_or_default(),
            half_width_90: error.half_width_90,
            flops_per_s: rates(|kernel| kernel.flops_per_s),
            bytes_per_s: rates(|kernel| kernel.bytes_per_s),
        }
    }
}

/// Serializes the name of a class in JSON.
fn class_name<S: Serializer>(class: &KernelClass, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match class {
        // The names of GEMMs and fused ops in JSON are older than the terms of the glossary, and stay.
        KernelClass::Gemm => "products",
        KernelClass::Attention => "attention",
        KernelClass::Fused => "element-wise and optimizer",
        KernelClass::Link => "collectives and transfers",
    })
}

/// The name of a class in text.
fn class_title(class: KernelClass) -> &'static str {
    match class {
        KernelClass::Gemm => "GEMMs",
        KernelClass::Attention => "attention",
        KernelClass::Fused => "fused ops and optimizer",
        KernelClass::Link => "collectives and transfers",
    }
}

/// The table of classes, and with details that of all measurements.
pub fn tables(page: &mut Page, classes: &[ClassCoverage], measured: &[KernelRate], detail: Detail) {
    page.heading("Measured kernels");
    let row = |coverage: &ClassCoverage| {
        let of =
            |rates: Option<[f64; 2]>, unit| rates.map(|rates| rates.map(|value| rate(value, unit)));
        let rates = of(coverage.flops_per_s, "FLOP").or_else(|| of(coverage.bytes_per_s, "B"));
        let [median, highest] = rates.unwrap_or_default();
        vec![
            class_title(coverage.class).into(),
            coverage.measured.to_string(),
            median,
            highest,
            percent(coverage.spread_median),
            half_width(coverage.half_width_90),
        ]
    };
    let columns = [
        ("kernels", Align::Left),
        ("shapes", Align::Right),
        ("median rate", Align::Right),
        ("highest", Align::Right),
        ("spread", Align::Right),
        ("90 %", Align::Right),
    ];
    page.table(&columns, &classes.iter().map(row).collect::<Vec<_>>());
    if classes.iter().any(|coverage| coverage.half_width_90 > 1.0) {
        page.paragraph(
            "Intervals beyond ±100 % are factors in both directions. Such prices are unreliable, mostly because the machine \
             was busy: measure again.",
        );
    }
    if detail == Detail::Summary || measured.is_empty() {
        return;
    }
    page.heading("Measurements on one device, by the number of devices that ran");
    let row = |kernel: &KernelRate| {
        let time = Seconds(kernel.time_s);
        let devices = kernel.devices.to_string();
        vec![kernel.kernel.clone().into(), devices.into(), time.into(), kernel.text().into()]
    };
    let columns = [
        ("kernel", Align::Left),
        ("devices", Align::Right),
        ("time", Align::Right),
        ("rate", Align::Right),
    ];
    page.table(&columns, &measured.iter().map(row).collect::<Vec<Vec<Cell>>>());
}
