//! Validation of measurements: references that resolve, sizes that divide, measurements in range.

mod decoder;
mod program;
mod step;

use std::collections::HashMap;
use std::ops::RangeInclusive;

use narrows_plan::strategy::NormRule;
use narrows_plan::{Defect, Defects, Mesh, is_display_control, short_number};

use super::file::{
    KernelRun, MeasuredQuantity, Measurement, MeasurementUnit, MeasurementsFile, NormRun,
};

/// Largest size. Products of sizes up to it do not overflow.
const SIZE_MAX: u64 = 1 << 24;
/// Largest number of devices.
const DEVICES_MAX: u64 = 1 << 20;
/// Most elements of a tensor: more fit no device. The bytes of smaller tensors do not overflow.
const ELEMENTS_MAX: u128 = 1 << 52;
/// Times in seconds: from a picosecond to thirty years.
const TIME_S: RangeInclusive<f64> = 1e-12..=1e9;
/// Divisors of sizes, in messages.
const TENSOR_AXIS: &str = "the tensor axis";
const CHUNKS: &str = "stages, or all their chunks";
/// Percent of a peak.
const PERCENT: RangeInclusive<f64> = 1e-6..=100.0;

/// Checks a file. `prefix` returns the path of a measurement with its separator, such as `measurements[3].`.
///
/// # Errors
/// Every defect.
pub(crate) fn validate(
    file: &MeasurementsFile,
    prefix: impl Fn(usize) -> String,
) -> Result<(), Defects> {
    let mut check = MeasurementValidator::default();
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if file.name.is_empty() || !file.name.chars().all(legal) {
        let problem = format!("`{}` is not a valid name", file.name);
        check.defect_with_hint("name", problem, "lower-case letters, digits, `-`, `_` and `.`");
    }
    check.printable("description", &file.description, true);
    for (name, source) in &file.sources {
        check.printable(&format!("sources[{name:?}]"), name, false);
        check.printable(&format!("sources[{name:?}].citation"), &source.citation, false);
        check.printable(&format!("sources[{name:?}].conditions"), &source.conditions, true);
    }
    let mut names = HashMap::new();
    for (index, measurement) in file.measurements.iter().enumerate() {
        check.prefix = prefix(index);
        check.earlier_defects = check.defects.0.len();
        if let Some(first) = names.insert(measurement.name.as_str(), index) {
            let problem =
                format!("`{}` is already the name of measurements[{first}]", measurement.name);
            check.defect_with_hint(
                "name",
                problem,
                "a unique name: reports refer to measurements by it",
            );
        }
        if !file.sources.contains_key(&measurement.source) {
            let known: Vec<&str> = file.sources.keys().map(String::as_str).collect();
            let problem = format!("`{}` is not a key of `sources`", measurement.source);
            check.defect_with_hint("source", problem, &known.join(", "));
        }
        check.measurement(measurement);
    }
    check.defects.into_result(())
}

/// The defects of a part, with its path before their fields.
pub(crate) fn nested(path: &str, defects: Defects) -> Defects {
    let nest = |defect: Defect| {
        let dot = if defect.field.is_empty() { "" } else { "." };
        Defect { field: format!("{path}{dot}{}", defect.field), ..defect }
    };
    Defects(defects.0.into_iter().map(nest).collect())
}

#[derive(Default)]
struct MeasurementValidator {
    defects: Defects,
    /// Path of the current measurement, put before every field.
    prefix: String,
    /// Number of defects before those of the current measurement.
    earlier_defects: usize,
}

impl MeasurementValidator {
    fn defect(&mut self, field: &str, problem: String) {
        self.defects.push(Defect::new(format!("{}{field}", self.prefix), problem));
    }

    fn defect_with_hint(&mut self, field: &str, problem: String, hint: &str) {
        let defect = Defect::new(format!("{}{field}", self.prefix), problem);
        self.defects.push(if hint.is_empty() { defect } else { defect.hint(hint) });
    }

    /// Whether the current measurement has no defect so far, which computations with its sizes require.
    fn is_valid(&self) -> bool {
        self.defects.0.len() == self.earlier_defects
    }

    fn size(&mut self, field: &str, size: u64) {
        if !(1..=SIZE_MAX).contains(&size) {
            self.defect(field, format!("{size} is not between 1 and {SIZE_MAX}"));
        }
    }

    /// Checks that a named divisor divides a size.
    fn divides(&mut self, field: &str, size: u64, (divisor, name): (u64, &str)) {
        if !size.is_multiple_of(divisor) {
            self.defect(field, format!("{size} is not divisible by {divisor} ({name})"));
        }
    }

    /// Text that is safe to print on a terminal.
    fn printable(&mut self, field: &str, text: &str, may_be_empty: bool) {
        if text.trim().is_empty() && !may_be_empty {
            self.defect(field, "is empty".into());
        }
        if text.chars().any(is_display_control) {
            self.defect(field, "contains a control character or a line break".into());
        }
    }

    /// Checks that a tensor of these sizes fits a device.
    fn fits_device(&mut self, field: &str, sizes: &[u64]) {
        let elements = sizes.iter().try_fold(1_u128, |product, size| {
            Some(product.checked_mul((*size).into())?).filter(|product| *product <= ELEMENTS_MAX)
        });
        if elements.is_none() {
            let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
            self.defect(field, format!("{} elements fit no device", sizes.join(" × ")));
        }
    }

    fn value(&mut self, measurement: &Measurement) {
        let value = measurement.value;
        let (in_seconds, range) = match measurement.unit {
            MeasurementUnit::S => (value, TIME_S),
            MeasurementUnit::Ms => (value * 1e-3, TIME_S),
            MeasurementUnit::Us => (value * 1e-6, TIME_S),
            MeasurementUnit::MbPerMs => (1.0 / value, TIME_S),
            MeasurementUnit::PercentOfPeak => (value, PERCENT),
        };
        let shown = short_number(value);
        // No range contains NaN.
        if !(value > 0.0 && range.contains(&in_seconds)) {
            let problem = match measurement.unit {
                MeasurementUnit::PercentOfPeak => {
                    format!("{shown} is not a percentage of a peak: it must be between 0 and 100")
                }
                MeasurementUnit::MbPerMs => format!("{shown} is not a ratio of memory to time"),
                _ => {
                    let [min, max] =
                        [TIME_S.start(), TIME_S.end()].map(|limit| short_number(*limit));
                    format!("{shown} is not a time: it must be between {min} and {max} seconds")
                }
            };
            self.defect("value", problem);
        }
    }

    fn measurement(&mut self, measurement: &Measurement) {
        self.printable("name", &measurement.name, false);
        self.printable("table", &measurement.table, false);
        if let Some(group) = &measurement.comparison_group {
            self.printable("race", group, false);
        }
        self.value(measurement);
        let Mesh { tensor, context, pipeline, data } = measurement.mesh;
        let axes =
            [("tensor", tensor), ("context", context), ("pipeline", pipeline), ("data", data)];
        for (axis, size) in axes {
            self.size(&format!("mesh.{axis}"), size);
        }
        // The product of four sizes up to 2²⁴ fits 128 bits.
        let devices: u128 = axes.iter().map(|(_, size)| u128::from(*size)).product();
        if devices > DEVICES_MAX.into() {
            self.defect("mesh", format!("more than {DEVICES_MAX} devices"));
        }
        let unit = measurement.unit;
        match &measurement.measured {
            MeasuredQuantity::Kernels(runs) => self.kernels(runs, measurement),
            MeasuredQuantity::Step(step) => {
                if unit == MeasurementUnit::PercentOfPeak {
                    self.defect_with_hint(
                        "unit",
                        "`percent_of_peak` is for GEMMs only".into(),
                        "s, ms, us",
                    );
                }
                self.step("step", step, measurement);
            }
            MeasuredQuantity::Recomputation(step) => {
                self.recomputation(step);
                self.step("recomputation", step, measurement);
            }
        }
        let recomputes = matches!(measurement.measured, MeasuredQuantity::Recomputation(_));
        if recomputes != (unit == MeasurementUnit::MbPerMs) {
            let hint = if recomputes { "mb_per_ms" } else { "s, ms, us" };
            self.defect_with_hint(
                "unit",
                "recomputation is measured in `mb_per_ms`, and nothing else is".into(),
                hint,
            );
        }
    }

    fn kernels(&mut self, runs: &[KernelRun], measurement: &Measurement) {
        let in_percent = measurement.unit == MeasurementUnit::PercentOfPeak;
        if runs.is_empty() {
            self.defect_with_hint(
                "measured.kernels",
                "is empty".into(),
                "product, all_reduce, norm",
            );
        }
        for (index, run) in runs.iter().enumerate() {
            let field = |name: &str| format!("measured.kernels[{index}].{name}");
            match run {
                KernelRun::Gemm(run) => {
                    let sizes = [("m", run.m), ("k", run.k), ("n", run.n)];
                    for (name, size) in
                        sizes.into_iter().chain([("batch", run.batch), ("times", run.times)])
                    {
                        self.size(&field(&format!("product.{name}")), size);
                    }
                    for sides in [[run.m, run.k], [run.k, run.n], [run.m, run.n]] {
                        self.fits_device(&field("product"), &[sides[0], sides[1], run.batch]);
                    }
                }
                KernelRun::AllReduce(run) => {
                    self.needs_tensor_axis(&field("all_reduce"), measurement.mesh);
                    self.size(&field("all_reduce.times"), run.times);
                    if !(1..=1 << 50).contains(&run.payload_bytes.0) {
                        let problem = format!(
                            "{} bytes are not a payload: give 1 to 2^50",
                            run.payload_bytes.0
                        );
                        self.defect(&field("all_reduce.payload_bytes"), problem);
                    }
                    if in_percent {
                        self.defect(
                            &field("all_reduce"),
                            "has no FLOPs: `percent_of_peak` is for GEMMs only".into(),
                        );
                    }
                }
                KernelRun::Norm(run) => {
                    self.norm(&field("norm"), run, measurement.mesh);
                    if in_percent {
                        self.defect(
                            &field("norm"),
                            "is not a GEMM: `percent_of_peak` is for GEMMs only".into(),
                        );
                    }
                }
            }
        }
    }

    /// Checks that the tensor axis of a kernel that spans it has more than one device.
    fn needs_tensor_axis(&mut self, field: &str, mesh: Mesh) {
        if mesh.tensor == 1 {
            let problem = "runs among the devices of the tensor axis, and `mesh.tensor` is 1";
            let hint = "set `mesh.tensor` to the devices that took part, or leave this kernel out";
            self.defect_with_hint(field, problem.into(), hint);
        }
    }

    fn norm(&mut self, field: &str, run: &NormRun, mesh: Mesh) {
        self.needs_tensor_axis(field, mesh);
        let sizes = [("rows", run.rows), ("features", run.features), ("times", run.times)];
        for (name, size) in sizes {
            self.size(&format!("{field}.{name}"), size);
        }
        if run.latents > SIZE_MAX {
            self.size(&format!("{field}.latents"), run.latents);
        }
        self.fits_device(field, &[run.rows, run.features.max(run.latents)]);
        if mesh.tensor > 0 && !run.features.is_multiple_of(mesh.tensor) {
            let problem = format!("{} is not divisible by {}", run.features, mesh.tensor);
            self.defect(&format!("{field}.features"), problem);
        }
        match run.norm {
            NormRule::Auto => {
                let problem = "`auto` does not fix a norm";
                self.defect_with_hint(&format!("{field}.norm"), problem.into(), "sync, online");
            }
            NormRule::Sync if run.latents > 0 => {
                let problem = "a synchronous norm scales no latents";
                self.defect(&format!("{field}.latents"), problem.into());
            }
            NormRule::Sync | NormRule::Online => {}
        }
    }
}
