//! Whether measurements make sense: names that are there, sizes that divide, values that are times.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use narrows_plan::strategy::{Baseline, NormRule, Recompute, Zero};
use narrows_plan::{Defect, Defects, Mesh};

use crate::Executor;

use super::{
    Gpt, KernelRun, Measured, Measurement, MeasurementsFile, NormRun, Step, Subject, Unit,
};

/// Larger sizes are mistakes, and their products do not overflow.
const SIZE_MAX: u64 = 1 << 24;
/// More devices than this nobody has.
const DEVICES_MAX: u64 = 1 << 20;
/// More numbers than this no device holds, and their bytes do not overflow.
const NUMBERS_MAX: u128 = 1 << 52;
/// A simulated step has each of them.
const MICROBATCHES_MAX: u64 = 1 << 16;
/// Times in seconds: a thousandth of a nanosecond to thirty years.
const TIME_S: RangeInclusive<f64> = 1e-12..=1e9;
/// Percent of a peak that nobody exceeds.
const PERCENT: RangeInclusive<f64> = 1e-6..=100.0;

/// Every defect of a file.
pub fn check(file: &MeasurementsFile) -> Result<(), Defects> {
    let mut check = Check { defects: Defects::default(), place: String::new() };
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if file.name.is_empty() || !file.name.chars().all(legal) {
        check.defect("name", format!("`{}` is not a name", file.name));
    }
    check.words("description", &file.description, true);
    for (name, source) in &file.sources {
        check.words("sources", name, false);
        check.words(&format!("sources.{name}.citation"), &source.citation, false);
        check.words(&format!("sources.{name}.conditions"), &source.conditions, true);
    }
    let mut names = HashSet::new();
    for (index, measurement) in file.measurements.iter().enumerate() {
        check.place = format!("measurements[{index}].");
        if !names.insert(measurement.name.as_str()) {
            check.defect("name", format!("`{}` is taken", measurement.name));
        }
        if !file.sources.contains_key(&measurement.source) {
            check.defect("source", format!("`{}` is not among the sources", measurement.source));
        }
        check.measurement(measurement);
    }
    check.defects.into_result(())
}

struct Check {
    defects: Defects,
    /// Before every field.
    place: String,
}

impl Check {
    fn defect(&mut self, field: &str, problem: String) {
        self.defects.push(Defect::new(format!("{}{field}", self.place), problem));
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
            Unit::S => (value, TIME_S),
            Unit::Ms => (value * 1e-3, TIME_S),
            Unit::Us => (value * 1e-6, TIME_S),
            Unit::MbPerMs => (1.0 / value, TIME_S),
            Unit::PercentOfPeak => (value, PERCENT),
        };
        let plain = (1e-4..1e9).contains(&value.abs()) || value == 0.0;
        let shown = if plain { value.to_string() } else { format!("{value:e}") };
        // No range contains what is not a number.
        if !(value > 0.0 && range.contains(&in_seconds)) {
            let problem = match measurement.unit {
                Unit::PercentOfPeak => format!("{shown} is no share of a peak: 100 is all of it"),
                Unit::MbPerMs => format!("{shown} is no ratio of memory to time"),
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
        let (unit, saving) = (measurement.unit, Unit::MbPerMs);
        match &measurement.measured {
            Measured::Kernels(runs) => self.kernels(runs, measurement),
            Measured::Step(step) => {
                if matches!(step.model, Subject::Gpt(_)) && measurement.executor != Executor::Eager
                {
                    self.defect("executor", "a GPT is predicted under `eager` alone".into());
                }
                if unit == Unit::PercentOfPeak {
                    self.defect("unit", "`percent_of_peak` is for kernels".into());
                }
                self.step("step", step, measurement.mesh);
            }
            Measured::Recomputation(step) => {
                self.recomputation(step);
                self.step("recomputation", step, measurement.mesh);
            }
        }
        let recomputes = matches!(measurement.measured, Measured::Recomputation(_));
        if recomputes != (unit == saving) {
            self.defect("unit", "`mb_per_ms` is for recomputation, and no other is".into());
        }
    }

    fn recomputation(&mut self, step: &Step) {
        if matches!(step.recompute, Recompute::Auto | Recompute::None) {
            let problem = "say what is computed again, `latents` or `block`";
            self.defect("measured.recomputation.recompute", problem.into());
        }
        if let Subject::Gpt(_) = step.model {
            let problem = "the memory of a GPT is not predicted";
            self.defect("measured.recomputation.model.gpt", problem.into());
        }
    }

    fn kernels(&mut self, runs: &[KernelRun], measurement: &Measurement) {
        let unit = measurement.unit;
        if runs.is_empty() {
            self.defect("measured.kernels", "is empty".into());
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
                    self.size(&field("all_reduce.times"), run.times);
                    if !(1..=1 << 50).contains(&run.payload_bytes.0) {
                        let problem = format!("{} bytes are no payload", run.payload_bytes.0);
                        self.defect(&field("all_reduce.payload_bytes"), problem);
                    }
                    if unit == Unit::PercentOfPeak {
                        self.defect(&field("all_reduce"), "does no operations".into());
                    }
                }
                KernelRun::Norm(run) => {
                    self.norm(&field("norm"), run, measurement.mesh);
                    if unit == Unit::PercentOfPeak {
                        self.defect(&field("norm"), "is no product".into());
                    }
                }
            }
        }
    }

    fn norm(&mut self, field: &str, run: &NormRun, mesh: Mesh) {
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
                let problem = "`auto` says not which: `sync` or `online`";
                self.defect(&format!("{field}.norm"), problem.into());
            }
            NormRule::Sync if run.latents > 0 => {
                let problem = "a synchronous norm is done before any latent is made";
                self.defect(&format!("{field}.latents"), problem.into());
            }
            NormRule::Sync | NormRule::Online => {}
        }
    }

    fn step(&mut self, kind: &str, step: &Step, mesh: Mesh) {
        let work = step.workload;
        for (name, size) in [
            ("global_batch", work.global_batch),
            ("sequence_length", work.sequence_length),
            ("micro_batch", work.micro_batch),
        ] {
            self.size(&format!("measured.{kind}.workload.{name}"), size);
        }
        if !self.defects.0.is_empty() {
            return;
        }
        let turn = mesh.data.saturating_mul(work.micro_batch);
        if !work.global_batch.is_multiple_of(turn) {
            let problem = format!(
                "{} sequences do not divide into microbatches of {} on {} replicas",
                work.global_batch, work.micro_batch, mesh.data
            );
            self.defect(&format!("measured.{kind}.workload.global_batch"), problem);
        } else if work.global_batch / turn > MICROBATCHES_MAX {
            let problem = format!("more than {MICROBATCHES_MAX} microbatches");
            self.defect(&format!("measured.{kind}.workload.global_batch"), problem);
        }
        if let Subject::Gpt(gpt) = &step.model {
            self.gpt(gpt, step, mesh);
        }
    }

    fn gpt(&mut self, gpt: &Gpt, step: &Step, mesh: Mesh) {
        let model = "measured.step.model.gpt";
        let sizes = [("layers", gpt.layers), ("hidden", gpt.hidden), ("heads", gpt.heads)];
        for (name, size) in sizes.into_iter().chain([("vocabulary", gpt.vocabulary)]) {
            self.size(&format!("{model}.{name}"), size);
        }
        let work = step.workload;
        let (tokens, wide) = ([work.micro_batch, work.sequence_length], 4 * gpt.hidden);
        self.holds(model, &[wide, wide, gpt.layers]);
        self.holds(model, &[gpt.vocabulary, gpt.hidden]);
        self.holds(model, &[tokens[0], tokens[1], wide.max(gpt.vocabulary)]);
        self.holds(model, &[tokens[0], gpt.heads, tokens[1], tokens[1]]);
        if !self.defects.0.is_empty() {
            return;
        }
        for (name, size, by) in [
            ("layers", gpt.layers, mesh.pipeline),
            ("heads", gpt.heads, mesh.tensor),
            ("hidden", gpt.hidden, gpt.heads),
            ("vocabulary", gpt.vocabulary, mesh.tensor),
        ] {
            if !size.is_multiple_of(by) {
                self.defect(&format!("{model}.{name}"), format!("{size} does not divide by {by}"));
            }
        }
        if step.zero != Zero::Off {
            self.defect("measured.step.zero", "a GPT is predicted without ZeRO".into());
        }
        if step.strategy != Baseline::FullrankTp {
            let problem =
                format!("a GPT is predicted as full rank, not `{}`", step.strategy.name());
            self.defect("measured.step.strategy", problem);
        }
    }
}
