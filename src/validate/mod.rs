//! Predicted beside measured.
//!
//! Kernels are priced one by one. A step is planned under the restrictions that its measurement names,
//! with its mesh and microbatch, and its plan is simulated; a GPT's step has an estimator of its own
//! ([`narrows_calibration::gpt`]). Nothing is fitted here; figures that something was fitted to before are
//! marked, and summed up apart.

mod left_out;

use std::collections::BTreeMap;

use narrows_calibration::gpt::fitted::{FitConditions, fitted_to};
use narrows_calibration::gpt::{self, FRAMEWORK};
use narrows_calibration::measurements::{
    self, KernelRun, MeasuredQuantity, Measurement, OrderingCase, Orderings, RelativeErrors,
    TrainedModel, TrainingStep,
};
use narrows_cost_model::interval::{Coverage, ErrorModel};
use narrows_cost_model::{Profile, profile};
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Recompute, Rules};
use narrows_plan::{DType, Defect, Defects, Kernel};
use narrows_planner::{
    MemoryLimit, Prediction, Request, kernels as kernels_of_step, predict_program, search,
};

use crate::args::validate::{MeasurementInput, ValidateSettings};
use crate::errors::{CommandResult, Failure, Problem};

pub use left_out::{LeftOut, left_out};

/// A figure and its prediction.
pub struct ComparedFigure<'a> {
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
    /// Whether something was fitted to this figure: then what stands beside it is no prediction.
    pub fitted: bool,
    /// The terms of that fit, where they are not those of the file: then what stands beside it is no error of
    /// the fit either.
    pub other_terms: Option<&'static FitConditions>,
    /// What a step takes on this hardware as a multiple of its kernels, which is fitted to steps.
    pub step_factor: f64,
}

/// A predicted time and its interval, in seconds.
struct PredictedTime {
    time_s: f64,
    interval_s: [f64; 2],
}

/// Figures that are summed up together.
pub struct FigureSummary<'a> {
    /// Whose.
    pub name: String,
    /// How far predictions are off.
    pub errors: RelativeErrors,
    /// Whether the faster one comes out faster.
    pub orderings: Orderings,
    /// How many lie within their intervals.
    pub coverage: Coverage,
    /// To how many something was fitted.
    pub fitted: usize,
    /// The figures.
    pub figures: Vec<&'a ComparedFigure<'a>>,
}

/// Predicts every figure, on the presets and on the profiles that were given besides.
pub fn compare(asked: &ValidateSettings) -> CommandResult<Vec<ComparedFigure<'_>>> {
    let ValidateSettings { files, profiles } = asked;
    let given = profiles.iter().map(|given| (given.read.name(), given.read.clone()));
    let mut profiles: BTreeMap<&str, Profile> = given.collect();
    let mut compared = vec![];
    for MeasurementInput { path, read: file } in files {
        for (index, measurement) in file.measurements.iter().enumerate() {
            let at = |field: &str| format!("measurements[{index}].{field}");
            let name = measurement.hardware.as_str();
            if !profiles.contains_key(name) {
                let found = profile::preset(name).map_err(|defects| {
                    let hint = "a preset's name, or that of a profile given as --hardware FILE";
                    let defects = moved(defects, &at("hardware")).0.into_iter();
                    let defects = defects.map(|defect| defect.hint(hint)).collect();
                    Failure::file(path, Defects(defects))
                })?;
                profiles.insert(name, found);
            }
            let profile = &profiles[name];
            let predicted = match &measurement.measured {
                MeasuredQuantity::Kernels(runs) => kernels(measurement, runs, profile),
                MeasuredQuantity::Step(step) => self::step(step, measurement, profile)
                    .map_err(|defects| Failure::file(path, moved(defects, &at("measured.step"))))?,
                MeasuredQuantity::Recomputation(step) => recomputation(step, measurement, profile)
                    .map_err(|defects| {
                        Failure::file(path, moved(defects, &at("measured.recomputation")))
                    })?,
            };
            let measured_s = measurement.measured_s(profile);
            let PredictedTime { time_s: predicted_s, interval_s } = predicted;
            let terms = self::terms(measurement, measured_s);
            let fitted = measurement.fitted || terms.is_some();
            let other_terms =
                terms.and_then(|(terms, step)| (!terms.hold(step, profile)).then_some(terms));
            let step_factor = profile.launching(measurement.executor).step_factor;
            let file = &file.name;
            compared.push(ComparedFigure {
                file,
                measurement,
                measured_s,
                predicted_s,
                interval_s,
                fitted,
                other_terms,
                step_factor,
            });
        }
    }
    if compared.is_empty() {
        return Err(Failure::input(Problem::new("--measurements", "there are no figures")));
    }
    Ok(compared)
}

/// The terms on which the constants for GPTs were fitted to this step, whatever its file says, and the step.
fn terms(
    measurement: &Measurement,
    measured_s: f64,
) -> Option<(&'static FitConditions, &TrainingStep)> {
    let MeasuredQuantity::Step(step) = &measurement.measured else { return None };
    Some((fitted_to(step, measurement.mesh, measured_s)?, step))
}

/// Defects of a part, at the place of the part. What a request calls by its flag is called by its field.
fn moved(defects: Defects, place: &str) -> Defects {
    let place = |defect: Defect| {
        let field = match defect.field.as_str() {
            "global-batch" | "sequence-length" | "micro-batch" => {
                format!(".workload.{}", defect.field.replace('-', "_"))
            }
            "model" | "recompute" | "strategy" | "norm" | "weights" | "zero" => {
                format!(".{}", defect.field)
            }
            _ => String::new(),
        };
        Defect { field: format!("{place}{field}"), ..defect }
    };
    Defects(defects.0.into_iter().map(place).collect())
}

fn model(subject: &TrainedModel) -> Result<Model, Defects> {
    match subject {
        TrainedModel::Preset(name) => presets::find(name).map_err(Defects::one),
        TrainedModel::Described(file) => file.as_ref().clone().resolve(),
        TrainedModel::Gpt(_) => Err(Defect::new("model", "a GPT has no plan").into()),
    }
}

/// What kernels that run one after the other should take.
fn kernels(measurement: &Measurement, runs: &[KernelRun], profile: &Profile) -> PredictedTime {
    let time_s = measurements::predicted_s(measurement, runs, profile);
    let spread = ErrorModel::new(profile, measurement.executor, &measurement.mesh);
    let input = profile.precision().compute();
    let interval = spread.of_kernels(&measurements::kernels(runs, measurement.mesh, input));
    PredictedTime { time_s, interval_s: interval.map(|ratio| time_s * ratio) }
}

/// What a step should take.
fn step(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
) -> Result<PredictedTime, Defects> {
    let mesh = measurement.mesh;
    if let Some(time_s) = gpt::step_s(step, mesh, profile, &FRAMEWORK) {
        if profile.precision().compute() != DType::Bf16 {
            let problem =
                format!("a GPT is priced in 16 bits, and `{}` computes in 32", profile.name());
            return Err(Defect::new("model", problem).hint("hardware of `mixed-bf16`").into());
        }
        let certainty = gpt::interval::certainty()?;
        let interval_s = certainty.interval_s(step, mesh, profile, &FRAMEWORK);
        return Ok(PredictedTime { time_s, interval_s: interval_s.unwrap_or([time_s; 2]) });
    }
    let PlannedStep { prediction, .. } = planned(step, measurement, profile, step.recompute)?;
    let interval_s = prediction.step_time_interval_s;
    Ok(PredictedTime { time_s: prediction.step_time_s, interval_s })
}

/// What recomputing adds to a step for 10⁹ bytes that it frees at the peak of the fullest stage. Both
/// steps are planned, and their kernels err together: what they share is certain to cancel.
fn recomputation(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
) -> Result<PredictedTime, Defects> {
    let keeping = planned(step, measurement, profile, Recompute::None)?;
    let redoing = planned(step, measurement, profile, step.recompute)?;
    let peak =
        |of: &PlannedStep| of.prediction.peak_memory_bytes.iter().copied().max().unwrap_or(0);
    let freed = peak(&keeping) as f64 - peak(&redoing) as f64;
    let added_s = redoing.prediction.step_time_s - keeping.prediction.step_time_s;
    if freed <= 0.0 || added_s <= 0.0 {
        let problem = format!("recomputing frees {freed} bytes for {added_s} s: there is no ratio");
        return Err(Defect::new("recompute", problem).into());
    }
    let less = keeping.kernels.into_iter().map(|(kernel, times)| (kernel, -times));
    let difference: Vec<(Kernel, f64)> = redoing.kernels.into_iter().chain(less).collect();
    let spread = ErrorModel::new(profile, measurement.executor, &measurement.mesh);
    let time_s = added_s / freed * 1e9;
    let interval_s = spread.of_step(&difference).map(|ratio| time_s * ratio);
    Ok(PredictedTime { time_s, interval_s })
}

/// A plan that satisfies what a measurement says of its step.
struct PlannedStep {
    prediction: Prediction,
    /// Its kernels, each with how often a step runs it.
    kernels: Vec<(Kernel, f64)>,
}

/// Plans a step as it was measured. Its memory is what it was when somebody ran it: there is no limit.
fn planned(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
    recompute: Recompute,
) -> Result<PlannedStep, Defects> {
    let (mesh, work) = (measurement.mesh, step.workload);
    let (model, profile) = (model(&step.model)?, profile.clone());
    let (batch, length) = (work.global_batch, work.sequence_length);
    let devices = mesh.tensor * mesh.pipeline * mesh.data;
    let request = Request {
        micro_batch: Some(work.micro_batch),
        tensor: Some(mesh.tensor),
        pipeline: Some(mesh.pipeline),
        data: Some(mesh.data),
        zero: Some(step.zero),
        rules: Rules { baseline: step.strategy, weights: step.weights, norm: step.norm, recompute },
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
    let prediction = predict_program(model, profile, *executor, &resolved, &fitted.program);
    Ok(PlannedStep { prediction, kernels: kernels_of_step(fitted.program.program()) })
}

/// Sums up the figures of each table, in the order in which they first appear, and all together.
pub fn tables<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    grouped(compared, |one| format!("{}: {}", one.file, one.measurement.table))
}

/// The same for each source.
pub fn sources<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    grouped(compared, |one| format!("{}: {}", one.file, one.measurement.source))
}

/// All figures, and those that nothing was fitted to.
pub fn overall<'a>(compared: &'a [ComparedFigure<'a>]) -> Vec<FigureSummary<'a>> {
    let all = summary("all".into(), compared.iter().collect());
    let held = |one: &&ComparedFigure| !one.fitted;
    let held = summary("not fitted to".into(), compared.iter().filter(held).collect());
    all.into_iter().chain(held).collect()
}

fn grouped<'a>(
    compared: &'a [ComparedFigure<'a>],
    name: impl Fn(&ComparedFigure) -> String,
) -> Vec<FigureSummary<'a>> {
    let mut groups: Vec<(String, Vec<&ComparedFigure>)> = vec![];
    for one in compared {
        let name = name(one);
        match groups.iter_mut().find(|(known, _)| *known == name) {
            Some((_, figures)) => figures.push(one),
            None => groups.push((name, vec![one])),
        }
    }
    groups.into_iter().filter_map(|(name, figures)| summary(name, figures)).collect()
}

fn summary<'a>(name: String, figures: Vec<&'a ComparedFigure<'a>>) -> Option<FigureSummary<'a>> {
    let errors = RelativeErrors::of(figures.iter().map(|one| (one.predicted_s, one.measured_s)))?;
    let race = |one: &&'a ComparedFigure| {
        let job = one.measurement.race.as_deref()?;
        Some(OrderingCase { job, measured_s: one.measured_s, predicted_s: one.predicted_s })
    };
    let races: Vec<OrderingCase> = figures.iter().filter_map(race).collect();
    let coverage = Coverage::of(figures.iter().map(|one| (one.measured_s, one.interval_s)));
    let orderings = Orderings::of(&races);
    let fitted = figures.iter().filter(|one| one.fitted).count();
    Some(FigureSummary { name, errors, orderings, coverage, fitted, figures })
}
