//! Predicted beside measured.
//!
//! Kernels are priced one by one. A step is planned under the restrictions that its measurement names,
//! with its mesh and microbatch, and its plan is simulated; a GPT's step has an estimator of its own
//! ([`narrows_cost_model::gpt`]). Nothing is fitted here.

use std::collections::BTreeMap;

use narrows_cost_model::gpt::{self, FRAMEWORK};
use narrows_cost_model::interval::{Coverage, Spread};
use narrows_cost_model::measured::{
    self, Errors, KernelRun, Measured, Measurement, MeasurementsFile, Orderings, Race, Step,
    Subject,
};
use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::Rules;
use narrows_plan::{Defect, Defects};
use narrows_planner::predict::predict_program;
use narrows_planner::search::search;
use narrows_planner::{MemoryLimit, Request};

use crate::errors::{Failure, Outcome, Problem};

/// A figure and its prediction.
pub struct Compared<'a> {
    /// The file's name.
    pub file: &'a str,
    /// What was measured.
    pub measurement: &'a Measurement,
    /// Its time.
    pub measured_s: f64,
    /// Its predicted time.
    pub predicted_s: f64,
    /// The 90 % interval of the prediction.
    pub interval_s: [f64; 2],
}

/// A predicted time and its interval, in seconds.
struct Predicted {
    time_s: f64,
    interval_s: [f64; 2],
}

/// Figures that are summed up together.
pub struct Summary<'a> {
    /// Whose.
    pub name: String,
    /// How far predictions are off.
    pub errors: Errors,
    /// Whether the faster one comes out faster.
    pub orderings: Orderings,
    /// How many lie within their intervals.
    pub coverage: Coverage,
    /// The figures.
    pub figures: Vec<&'a Compared<'a>>,
}

/// Predicts every figure.
pub fn compare(files: &[MeasurementsFile]) -> Outcome<Vec<Compared<'_>>> {
    let mut profiles: BTreeMap<&str, Profile> = BTreeMap::new();
    let mut compared = vec![];
    for file in files {
        for (index, measurement) in file.measurements.iter().enumerate() {
            let at = |field: &str| format!("measurements[{index}].{field}");
            let name = measurement.hardware.as_str();
            if !profiles.contains_key(name) {
                let found = profile::preset(name).map_err(|defects| {
                    Failure::file(&file.name, moved(defects, &at("hardware")))
                })?;
                profiles.insert(name, found);
            }
            let profile = &profiles[name];
            let predicted = match &measurement.measured {
                Measured::Kernels(runs) => kernels(measurement, runs, profile),
                Measured::Step(step) => {
                    self::step(step, measurement, profile).map_err(|defects| {
                        Failure::file(&file.name, moved(defects, &at("measured.step")))
                    })?
                }
            };
            let measured_s = measurement.measured_s(profile);
            let Predicted { time_s: predicted_s, interval_s } = predicted;
            let file = &file.name;
            compared.push(Compared { file, measurement, measured_s, predicted_s, interval_s });
        }
    }
    if compared.is_empty() {
        return Err(Failure::input(Problem::new("--measurements", "there are no figures")));
    }
    Ok(compared)
}

/// Defects of a part, at the place of the part.
fn moved(defects: Defects, place: &str) -> Defects {
    let place = |defect: Defect| Defect { field: place.to_owned(), ..defect };
    Defects(defects.0.into_iter().map(place).collect())
}

fn model(subject: &Subject) -> Result<Model, Defects> {
    match subject {
        Subject::Preset(name) => presets::find(name).map_err(Defects::one),
        Subject::Described(file) => file.as_ref().clone().resolve(),
        Subject::Gpt(_) => Err(Defect::new("model", "a GPT has no plan").into()),
    }
}

/// What kernels that run one after the other should take.
fn kernels(measurement: &Measurement, runs: &[KernelRun], profile: &Profile) -> Predicted {
    let time_s = measured::predicted_s(measurement, runs, profile);
    let kernels = measured::kernels(runs, measurement.mesh).into_iter().map(|kernel| (kernel, 1.0));
    let spread = Spread::new(profile, measurement.executor, &measurement.mesh);
    let interval = spread.of_kernels(&kernels.collect::<Vec<_>>());
    Predicted { time_s, interval_s: interval.map(|ratio| time_s * ratio) }
}

/// What a step should take. Its memory is what it was when somebody ran it: there is no limit.
fn step(step: &Step, measurement: &Measurement, profile: &Profile) -> Result<Predicted, Defects> {
    let mesh = measurement.mesh;
    if let Some(time_s) = gpt::step_s(step, mesh, profile, &FRAMEWORK) {
        let certainty = gpt::interval::certainty()?;
        let interval_s = certainty.interval_s(step, mesh, profile, &FRAMEWORK);
        return Ok(Predicted { time_s, interval_s: interval_s.unwrap_or([time_s; 2]) });
    }
    let work = step.workload;
    let (model, profile) = (model(&step.model)?, profile.clone());
    let (batch, length) = (work.global_batch, work.sequence_length);
    let devices = mesh.tensor * mesh.pipeline * mesh.data;
    let request = Request {
        micro_batch: Some(work.micro_batch),
        tensor: Some(mesh.tensor),
        pipeline: Some(mesh.pipeline),
        data: Some(mesh.data),
        zero: Some(step.zero),
        rules: Rules {
            baseline: step.strategy,
            weights: step.weights,
            norm: step.norm,
            recompute: step.recompute,
        },
        memory_limit: MemoryLimit::None,
        executor: measurement.executor,
        ..Request::new(model, profile, devices, batch, length)
    };
    request.validate()?;
    let Some(fitted) = search(&request).best else {
        let problem = "no plan satisfies what this measurement says of its step";
        return Err(Defect::new("", problem).into());
    };
    let Request { model, profile, executor, .. } = &request;
    let resolved = fitted.plan.resolve(model)?;
    let predicted = predict_program(model, profile, *executor, &resolved, &fitted.program);
    Ok(Predicted { time_s: predicted.step_time_s, interval_s: predicted.step_time_interval_s })
}

/// Sums up the figures of each table, in the order in which they first appear, and all together.
pub fn tables<'a>(compared: &'a [Compared<'a>]) -> Vec<Summary<'a>> {
    grouped(compared, |one| format!("{}: {}", one.file, one.measurement.table))
}

/// The same for each source.
pub fn sources<'a>(compared: &'a [Compared<'a>]) -> Vec<Summary<'a>> {
    grouped(compared, |one| format!("{}: {}", one.file, one.measurement.source))
}

/// All figures, and those that nothing was fitted to.
pub fn overall<'a>(compared: &'a [Compared<'a>]) -> Vec<Summary<'a>> {
    let all = summary("all".into(), compared.iter().collect());
    let fitted = |one: &&Compared| !one.measurement.fitted;
    let held = summary("not fitted to".into(), compared.iter().filter(fitted).collect());
    all.into_iter().chain(held).collect()
}

fn grouped<'a>(
    compared: &'a [Compared<'a>],
    name: impl Fn(&Compared) -> String,
) -> Vec<Summary<'a>> {
    let mut groups: Vec<(String, Vec<&Compared>)> = vec![];
    for one in compared {
        let name = name(one);
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, figures)) => figures.push(one),
            None => groups.push((name, vec![one])),
        }
    }
    groups.into_iter().filter_map(|(name, figures)| summary(name, figures)).collect()
}

fn summary<'a>(name: String, figures: Vec<&'a Compared<'a>>) -> Option<Summary<'a>> {
    let errors = Errors::of(figures.iter().map(|one| (one.predicted_s, one.measured_s)))?;
    let race = |one: &&'a Compared| {
        let job = one.measurement.race.as_deref()?;
        Some(Race { job, measured_s: one.measured_s, predicted_s: one.predicted_s })
    };
    let races: Vec<Race> = figures.iter().filter_map(race).collect();
    let coverage = Coverage::of(figures.iter().map(|one| (one.measured_s, one.interval_s)));
    Some(Summary { name, errors, orderings: Orderings::of(&races), coverage, figures })
}
