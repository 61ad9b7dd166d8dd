//! Whether measurements make sense: names that are there, sizes that divide, values that are times.

mod step;

use std::collections::HashMap;
use std::ops::RangeInclusive;

use narrows_plan::strategy::NormRule;
use narrows_plan::units::short;
use narrows_plan::{Defect, Defects, Mesh};

use super::{KernelRun, MeasuredQuantity, Measurement, MeasurementUnit, MeasurementsFile, NormRun};

/// Larger sizes are mistakes, and their products do not overflow.
const SIZE_MAX: u64 = 1 << 24;
/// More devices than this nobody has.
const DEVICES_MAX: u64 = 1 << 20;
/// More numbers than this no device holds, and their bytes do not overflow.
const NUMBERS_MAX: u128 = 1 << 52;
/// Times in seconds: a thousandth of a nanosecond to thirty years.
const TIME_S: RangeInclusive<f64> = 1e-12..=1e9;
/// Percent of a peak that nobody exceeds.
const PERCENT: RangeInclusive<f64> = 1e-6..=100.0;

/// Every defect of a file.
pub fn check(file: &MeasurementsFile) -> Result<(), Defects> {
    let mut check =
        MeasurementValidator { defects: Defects::default(), place: String::new(), sound_until: 0 };
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if file.name.is_empty() || !file.name.chars().all(legal) {
        let problem = format!("`{}` is not a name", file.name);
        check.hinted("name", problem, "lower-case letters, digits, `-`, `_` and `.`");
    }
    check.words("description", &file.description, true);
    for (name, source) in &file.sources {
        check.words(&format!("sources[{name:?}]"), name, false);
        check.words(&format!("sources[{name:?}].citation"), &source.citation, false);
        check.words(&format!("sources[{name:?}].conditions"), &source.conditions, true);
    }
    let mut names = HashMap::new();
    for (index, measurement) in file.measurements.iter().enumerate() {
        check.place = format!("measurements[{index}].");
        check.sound_until = check.defects.0.len();
        if let Some(first) = names.insert(measurement.name.as_str(), index) {
            let problem = format!("`{}` is taken by measurements[{first}]", measurement.name);
            check.hinted("name", problem, "a name of its own: reports tell figures apart by it");
        }
        if !file.sources.contains_key(&measurement.source) {
            let known: Vec<&str> = file.sources.keys().map(String::as_str).collect();
            let problem = format!("`{}` is not a key of `sources`", measurement.source);
            check.hinted("source", problem, &known.join(", "));
        }
        check.measurement(measurement);
    }
    check.defects.into_result(())
}

struct MeasurementValidator {
    defects: Defects,
    /// Before every field.
    place: String,
    /// How many defects were there before the measurement that is looked at.
    sound_until: usize,
}

impl MeasurementValidator {
    fn defect(&mut self, field: &str, problem: String) {
        self.defects.push(Defect::new(format!("{}{field}", self.place), problem));
    }

    fn hinted(&mut self, field: &str, problem: String, hint: &str) {
        let defect = Defect::new(format!("{}{field}", self.place), problem);
        self.defects.push(if hint.is_empty() { defect } else { defect.hint(hint) });
    }

    /// Whether nothing is wrong with this measurement so far: its sizes may be computed with.
    fn sound(&self) -> bool {
        self.defects.0.len() == self.sound_until
    }

    fn size(&mut self, field: &str, size: u64) {
        if !(1..=SIZE_MAX).contains(&size) {
            self.defect(field, format!("{size} does not lie between 1 and {SIZE_MAX}"));
        }
    }

    /// Text that a terminal prints as it is.
    fn words(&mut self, field: &str, text: &str, may_be_blank: bool) {
        if text.trim().is_empty() && !may_be_blank {
            self.defect(field, "says nothing".into());
        }
        if text.chars().any(char::is_control) {
            self.defect(field, "holds a control character, or more than one line".into());
        }
    }

    /// What numbers of these sizes need must be something a device could hold.
    fn holds(&mut self, field: &str, sizes: &[u64]) {
        let numbers = sizes.iter().try_fold(1_u128, |product, size| {
            Some(product.checked_mul((*size).into())?).filter(|product| *product <= NUMBERS_MAX)
        });
        if numbers.is_none() {
            let product: Vec<String> = sizes.iter().map(u64::to_string).collect();
            self.defect(field, format!("{} numbers are no device's", product.join(" × ")));
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
        let shown = short(value);
        // No range contains what is not a number.
        if !(value > 0.0 && range.contains(&in_seconds)) {
            let problem = match measurement.unit {
                MeasurementUnit::PercentOfPeak => {
                    format!("{shown} is no share of a peak: 100 is all of it")
                }
                MeasurementUnit::MbPerMs => format!("{shown} is no ratio of memory to time"),
                _ => format!("{shown} is no time: it must be more than zero, and end"),
            };
            self.defect("value", problem);
        }
    }

    fn measurement(&mut self, measurement: &Measurement) {
        self.words("name", &measurement.name, false);
        self.words("table", &measurement.table, false);
        if let Some(race) = &measurement.race {
            self.words("race", race, false);
        }
        self.value(measurement);
        let Mesh { tensor, pipeline, data } = measurement.mesh;
        for (axis, size) in [("tensor", tensor), ("pipeline", pipeline), ("data", data)] {
            self.size(&format!("mesh.{axis}"), size);
        }
        // No product of three sizes that passed overflows 128 bits.
        if [tensor, pipeline, data].map(u128::from).iter().product::<u128>() > DEVICES_MAX.into() {
            self.defect("mesh", format!("more than {DEVICES_MAX} devices"));
        }
        let (unit, saving) = (measurement.unit, MeasurementUnit::MbPerMs);
        match &measurement.measured {
            MeasuredQuantity::Kernels(runs) => self.kernels(runs, measurement),
            MeasuredQuantity::Step(step) => {
                if unit == MeasurementUnit::PercentOfPeak {
                    self.hinted("unit", "`percent_of_peak` is for products".into(), "s, ms, us");
                }
                self.step("step", step, measurement);
            }
            MeasuredQuantity::Recomputation(step) => {
                self.recomputation(step);
                self.step("recomputation", step, measurement);
            }
        }
        let recomputes = matches!(measurement.measured, MeasuredQuantity::Recomputation(_));
        if recomputes != (unit == saving) {
            let hint = if recomputes { "mb_per_ms" } else { "s, ms, us" };
            self.hinted("unit", "`mb_per_ms` is for recomputation, and no other is".into(), hint);
        }
    }

    fn kernels(&mut self, runs: &[KernelRun], measurement: &Measurement) {
        let unit = measurement.unit;
        if runs.is_empty() {
            self.hinted("measured.kernels", "is empty".into(), "product, all_reduce, norm");
        }
        for (index, run) in runs.iter().enumerate() {
            let field = |name: &str| format!("measured.kernels[{index}].{name}");
            match run {
                KernelRun::Product(run) => {
                    let sizes = [("m", run.m), ("k", run.k), ("n", run.n)];
                    for (name, size) in
                        sizes.into_iter().chain([("batch", run.batch), ("times", run.times)])
                    {
                        self.size(&field(&format!("product.{name}")), size);
                    }
                    for sides in [[run.m, run.k], [run.k, run.n], [run.m, run.n]] {
                        self.holds(&field("product"), &[sides[0], sides[1], run.batch]);
                    }
                }
                KernelRun::AllReduce(run) => {
                    self.among_devices(&field("all_reduce"), measurement.mesh);
                    self.size(&field("all_reduce.times"), run.times);
                    if !(1..=1 << 50).contains(&run.payload_bytes.0) {
                        let problem = format!("{} bytes are no payload", run.payload_bytes.0);
                        self.defect(&field("all_reduce.payload_bytes"), problem);
                    }
                    if unit == MeasurementUnit::PercentOfPeak {
                        self.defect(&field("all_reduce"), "does no operations".into());
                    }
                }
                KernelRun::Norm(run) => {
                    self.norm(&field("norm"), run, measurement.mesh);
                    if unit == MeasurementUnit::PercentOfPeak {
                        self.defect(&field("norm"), "is no product".into());
                    }
                }
            }
        }
    }

    /// What lies over the tensor axis has no time, or another one, where that is one device.
    fn among_devices(&mut self, field: &str, mesh: Mesh) {
        if mesh.tensor == 1 {
            let problem = "runs among the devices of the tensor axis, and `mesh.tensor` is 1";
            let hint = "the devices that took part as `mesh.tensor`, or leave this kernel out";
            self.hinted(field, problem.into(), hint);
        }
    }

    fn norm(&mut self, field: &str, run: &NormRun, mesh: Mesh) {
        self.among_devices(field, mesh);
        let sizes = [("rows", run.rows), ("features", run.features), ("times", run.times)];
        for (name, size) in sizes {
            self.size(&format!("{field}.{name}"), size);
        }
        if run.latents > SIZE_MAX {
            self.size(&format!("{field}.latents"), run.latents);
        }
        self.holds(field, &[run.rows, run.features.max(run.latents)]);
        if mesh.tensor > 0 && !run.features.is_multiple_of(mesh.tensor) {
            let problem = format!("{} does not divide by {}", run.features, mesh.tensor);
            self.defect(&format!("{field}.features"), problem);
        }
        match run.norm {
            NormRule::Auto => {
                let problem = "`auto` says not which";
                self.hinted(&format!("{field}.norm"), problem.into(), "sync, online");
            }
            NormRule::Sync if run.latents > 0 => {
                let problem = "a synchronous norm is done before any latent is made";
                self.defect(&format!("{field}.latents"), problem.into());
            }
            NormRule::Sync | NormRule::Online => {}
        }
    }
}
