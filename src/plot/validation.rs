//! Measurements beside their predictions.

use narrows_calibration::measurements::{MeasuredQuantity, priced_kernels};
use narrows_calibration::validation::ComparedMeasurement;
use narrows_cost_model::Profile;
use narrows_plan::{Bytes, Kernel};

use super::PALETTE;
use super::figure::{Figure, PlotKind};
use super::picture::Picture;
use super::stacked_bars::{Bar, StackedBars};
use crate::text::{percents, signed_percents};
use crate::unit::Unit;

/// Most measurements of a picture.
const MEASUREMENTS_MAX: usize = 200;

/// A measured value, its prediction, and the interval of that.
struct MeasuredPair {
    name: String,
    measured: f64,
    predicted: f64,
    interval: [f64; 2],
    /// (predicted − measured) / measured.
    error: f64,
    /// Whether the prediction was fitted to the measurement.
    fitted: bool,
}

/// The pictures of measurements: times of steps, efficiency of GEMMs, and times of collectives. `profile` finds the
/// hardware of a measurement by its name.
pub fn validation_figures(
    compared: &[ComparedMeasurement],
    profile: &dyn Fn(&str) -> Option<Profile>,
) -> Vec<Figure> {
    let kinds = [
        (PlotKind::StepTime, "Step time", "step time"),
        (PlotKind::GemmEfficiency, "Efficiency of GEMMs", "FLOP/s in % of the peak of the device"),
        (PlotKind::Communication, "Collectives, with the bytes that they reduce", "time"),
    ];
    let figure = |(kind, title, axis): (PlotKind, &str, &str)| {
        let of_kind = compared.iter().filter_map(|entry| comparison(entry, kind, profile));
        let (comparisons, total): (Vec<MeasuredPair>, usize) =
            (of_kind.clone().take(MEASUREMENTS_MAX).collect(), of_kind.count());
        let title = match total > MEASUREMENTS_MAX {
            true => format!("{title} (the first {MEASUREMENTS_MAX} of {total} measurements)"),
            false => title.to_owned(),
        };
        let caption = format!(
            "{title}: measured and predicted, with the error of the prediction; whiskers are 90 % intervals. \
             * The prediction was fitted to this measurement."
        );
        Figure::of(kind, picture(kind, &title, axis, &comparisons), &caption)
    };
    kinds.into_iter().filter_map(figure).collect()
}

/// The values of a measurement in a picture of this kind; `None` if it has no place there.
fn comparison(
    entry: &ComparedMeasurement,
    kind: PlotKind,
    profile: &dyn Fn(&str) -> Option<Profile>,
) -> Option<MeasuredPair> {
    let measurement = entry.measurement;
    let profile = profile(&measurement.hardware)?;
    let input = profile.precision().compute_dtype();
    let kernels = match &measurement.measured {
        MeasuredQuantity::Kernels(runs) => priced_kernels(runs, measurement.mesh, input),
        MeasuredQuantity::Step(_) => vec![],
        MeasuredQuantity::Recomputation(_) => return None,
    };
    // Value of a time, and addition to the name.
    let (value, note): (Box<dyn Fn(f64) -> f64>, String) = match kind {
        PlotKind::StepTime if kernels.is_empty() => (Box::new(|time| time), String::new()),
        PlotKind::GemmEfficiency if !kernels.is_empty() => {
            let flops = |(kernel, times): &(Kernel, f64)| match kernel {
                Kernel::Gemm(gemm) => Some(gemm.flops().0 * times),
                _ => None,
            };
            let flops: f64 = kernels.iter().map(flops).sum::<Option<f64>>()?;
            let peak = profile.peak_flops_per_s(input);
            (Box::new(move |time| 100.0 * flops / (time * peak)), String::new())
        }
        PlotKind::Communication if !kernels.is_empty() => {
            let payload = |(kernel, times): &(Kernel, f64)| match kernel {
                Kernel::Collective(collective) => Some(collective.payload.as_f64() * times),
                _ => None,
            };
            let bytes: f64 = kernels.iter().map(payload).sum::<Option<f64>>()?;
            (Box::new(|time| time), format!(", {}", Bytes(bytes as u64)))
        }
        _ => return None,
    };
    let fitted = if entry.fitted { " *" } else { "" };
    let [low, high] = entry.interval_s.map(&value);
    Some(MeasuredPair {
        name: format!("{}{note}{fitted}", measurement.name),
        measured: value(entry.measured_s),
        predicted: value(entry.predicted_s),
        interval: [low.min(high), low.max(high)],
        error: entry.predicted_s / entry.measured_s - 1.0,
        fitted: entry.fitted,
    })
}

/// Two bars for each measurement.
fn picture(
    kind: PlotKind,
    title: &str,
    axis: &str,
    comparisons: &[MeasuredPair],
) -> Option<Picture> {
    let times =
        comparisons.iter().flat_map(|comparison| [comparison.measured, comparison.predicted]);
    // Efficiencies are shares.
    let unit = (kind != PlotKind::GemmEfficiency).then(|| Unit::Seconds.common(times));
    let scaled = |value: f64| unit.map_or(value, |unit| unit.scaled(value));
    let note = |value: f64| unit.map_or_else(|| percents(value, 1), |unit| unit.format(value));
    let axis_label = unit.map_or(axis.to_owned(), |unit| format!("{axis} in {}", unit.symbol()));
    let bars = comparisons.iter().flat_map(|comparison| {
        let error = signed_percents(100.0 * comparison.error, 1);
        let measured = Bar {
            name: comparison.name.clone(),
            values: vec![scaled(comparison.measured), 0.0],
            interval: None,
            note: note(comparison.measured),
        };
        let predicted = Bar {
            name: String::new(),
            values: vec![0.0, scaled(comparison.predicted)],
            interval: Some(comparison.interval.map(scaled)),
            note: format!("{} (time {error})", note(comparison.predicted)),
        };
        [measured, predicted]
    });
    let bars: Vec<Bar> = bars.collect();
    let parts = vec![("measured".to_owned(), PALETTE[7]), ("predicted".to_owned(), PALETTE[0])];
    let title = format!("{title}, measured and predicted");
    let fitted = if comparisons.iter().any(|c| c.fitted) { "*: in the fit; " } else { "" };
    let axis_label = format!("{axis_label} ({fitted}whisker: 90 % interval)");
    (!bars.is_empty())
        .then(|| StackedBars { title, axis_label, parts, bars, limit: None }.picture())
        .flatten()
}
