//! Whether measurements make sense: names that are there, sizes that divide, values that are times.

use std::collections::HashSet;

use narrows_plan::strategy::Baseline;
use narrows_plan::{Defect, Defects, Mesh};

use super::{Gpt, KernelRun, Measured, Measurement, MeasurementsFile, Step, Subject, Unit};

/// Larger sizes are mistakes, and their products do not overflow.
const SIZE_MAX: u64 = 1 << 24;

/// Every defect of a file.
pub fn check(file: &MeasurementsFile) -> Result<(), Defects> {
    let mut check = Check { defects: Defects::default(), place: String::new() };
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
    if file.name.is_empty() || !file.name.chars().all(legal) {
        check.defect("name", format!("`{}` is not a name", file.name));
    }
    for (name, source) in &file.sources {
        if source.citation.trim().is_empty() {
            check.defect(&format!("sources.{name}.citation"), "says nothing".into());
        }
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

    fn measurement(&mut self, measurement: &Measurement) {
        let value = measurement.value;
        if !(value > 0.0 && value.is_finite()) {
            self.defect("value", format!("{value} is no time: it must be more than zero"));
        }
        let Mesh { tensor, pipeline, data } = measurement.mesh;
        for (axis, size) in [("tensor", tensor), ("pipeline", pipeline), ("data", data)] {
            self.size(&format!("mesh.{axis}"), size);
        }
        match &measurement.measured {
            Measured::Kernels(runs) => self.kernels(runs, measurement.unit),
            Measured::Step(step) => {
                if measurement.unit == Unit::PercentOfPeak {
                    self.defect("unit", "`percent_of_peak` is for kernels".into());
                }
                self.step(step, measurement.mesh);
            }
        }
    }

    fn kernels(&mut self, runs: &[KernelRun], unit: Unit) {
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
            }
        }
    }

    fn step(&mut self, step: &Step, mesh: Mesh) {
        let work = step.workload;
        for (name, size) in [
            ("global_batch", work.global_batch),
            ("sequence_length", work.sequence_length),
            ("micro_batch", work.micro_batch),
        ] {
            self.size(&format!("measured.step.workload.{name}"), size);
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
            self.defect("measured.step.workload.global_batch", problem);
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
        if step.strategy != Baseline::FullrankTp {
            let problem =
                format!("a GPT is predicted as full rank, not `{}`", step.strategy.name());
            self.defect("measured.step.strategy", problem);
        }
    }
}
