//! Predictions of the measurements in files.
//!
//! Kernels are priced one by one. A step is planned with the mesh, microbatch and restrictions of its measurement, and
//! its plan is simulated. Steps of other frameworks are priced by [`framework`](crate::framework). Measurements that a prediction was fitted
//! to are labelled, and summarised apart.

use std::collections::BTreeMap;

use narrows_cost_model::interval::ErrorModel;
use narrows_cost_model::{Breakdown, Prices, Profile, profile};
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Recompute, Rules};
use narrows_plan::{CheckedProgram, DType, Defect, Defects, Kernel, Mesh, PipelineSchedule, Zero};
use narrows_planner::{
    GroupingRule, MemoryLimit, Prediction, Request, RequestDefect, RequestField,
    kernels as kernels_of_step, predict_program, search,
};

use crate::framework::{
    FitConditions, FrameworkTable, decoder_step_time_s, decoder_term_shares, fit_conditions_of,
    is_fitted_step,
};
use crate::measurements::{
    KernelRun, KernelTimes, MeasuredQuantity, Measurement, MeasurementsFile, StepLinears,
    TrainedModel, TrainingStep, nested, predicted_times, priced_kernels,
};
use crate::step_terms::{StepTerm, TermShare};

use super::published_program::PublishedProgram;

/// A measurement and its prediction.
pub struct ComparedMeasurement<'a> {
    /// The file's name.
    pub file: &'a str,
    /// The measurement.
    pub measurement: &'a Measurement,
    /// The measured time.
    pub measured_s: f64,
    /// The predicted time.
    pub predicted_s: f64,
    /// The 90 % interval of the prediction.
    pub interval_s: [f64; 2],
    /// Whether the prediction was fitted to this measurement.
    pub fitted: bool,
    /// The conditions of that fit where the file has others: the error is then not an error of the fit.
    pub fit_conditions: Option<&'static FitConditions>,
    /// Terms of a step with their shares of its predicted time; empty for other measurements.
    pub terms: Vec<(StepTerm, f64)>,
    /// The fitted factor of a step's time over that of its kernels on this hardware.
    pub step_factor: f64,
    /// The fitted time of a step beyond its kernels on this hardware.
    pub step_s: f64,
}

/// The defects of one measurements file.
#[derive(Debug)]
pub struct FileDefects {
    /// The index of the file.
    pub file: usize,
    /// Defects of the file, each with the path of its field.
    pub defects: Defects,
}

/// A predicted time and its interval, in seconds.
struct PredictedTime {
    time_s: f64,
    interval_s: [f64; 2],
    /// Shares of the terms of a step.
    terms: Vec<TermShare>,
}

/// Predicts every measurement of `files`, on `profiles` and on presets. A profile replaces the preset of its name.
///
/// # Errors
/// The first measurement without a prediction: its hardware is unknown, or its step has no plan.
pub fn compare<'a>(
    files: impl IntoIterator<Item = &'a MeasurementsFile>,
    profiles: impl IntoIterator<Item = &'a Profile>,
) -> Result<Vec<ComparedMeasurement<'a>>, FileDefects> {
    let profiles = profiles.into_iter().map(|profile| (profile.name(), profile.clone()));
    let mut profiles: BTreeMap<&str, Profile> = profiles.collect();
    let mut compared = vec![];
    for (file_index, file) in files.into_iter().enumerate() {
        for (index, measurement) in file.measurements.iter().enumerate() {
            let within = |path: &str, defects: Defects| {
                let path = format!("measurements[{index}].{path}");
                FileDefects { file: file_index, defects: nested(&path, defects) }
            };
            let name = measurement.hardware.as_str();
            if !profiles.contains_key(name) {
                let preset = profile::preset(name).map_err(|defects| {
                    let hint = "a preset's name, or that of a profile given as --hardware FILE";
                    let defects = defects.0.into_iter().map(|defect| defect.hint(hint));
                    within("hardware", of_whole(defects))
                })?;
                profiles.insert(name, preset);
            }
            let profile = &profiles[name];
            let predicted = match &measurement.measured {
                MeasuredQuantity::Kernels(runs) => predict_kernels(measurement, runs, profile),
                MeasuredQuantity::Step(step) => predict_step(step, measurement, profile)
                    .map_err(|defects| within("measured.step", defects))?,
                MeasuredQuantity::Recomputation(step) => {
                    predict_recomputation(step, measurement, profile)
                        .map_err(|defects| within("measured.recomputation", defects))?
                }
            };
            let measured_s = measurement.measured_s(profile);
            let fit = fit_conditions(measurement, measured_s);
            compared.push(ComparedMeasurement {
                file: &file.name,
                measurement,
                measured_s,
                predicted_s: predicted.time_s,
                interval_s: predicted.interval_s,
                terms: predicted.terms,
                fitted: measurement.fitted || fit.is_some() || table_fit(measurement, measured_s),
                fit_conditions: fit.and_then(|(conditions, step)| {
                    (!conditions.apply_to(step, profile)).then_some(conditions)
                }),
                step_factor: profile.launch_costs(measurement.executor).step_factor,
                step_s: profile.launch_costs(measurement.executor).step_s,
            });
        }
    }
    Ok(compared)
}

/// The conditions under which the framework was fitted to this measurement, and its step. Independent of the file's own
/// label.
fn fit_conditions(
    measurement: &Measurement,
    measured_s: f64,
) -> Option<(&'static FitConditions, &TrainingStep)> {
    let MeasuredQuantity::Step(step) = &measurement.measured else { return None };
    Some((fit_conditions_of(step, measurement.mesh, measured_s)?, step))
}

/// Whether a framework's table was fitted to this measurement. Independent of the file's own label.
fn table_fit(measurement: &Measurement, measured_s: f64) -> bool {
    match &measurement.measured {
        MeasuredQuantity::Step(step) => is_fitted_step(step, measurement.mesh, measured_s),
        _ => false,
    }
}

/// Defects of a step as a whole, instead of fields of its plan or of other files.
fn of_whole(defects: impl IntoIterator<Item = Defect>) -> Defects {
    Defects(defects.into_iter().map(|defect| Defect { field: String::new(), ..defect }).collect())
}

/// A defect of the request that a step was turned into, at the field of the step.
fn in_step(defect: RequestDefect) -> Defect {
    let field = match defect.field {
        RequestField::GlobalBatch => "workload.global_batch",
        RequestField::SequenceLength => "workload.sequence_length",
        RequestField::MicroBatch => "workload.micro_batch",
        // The mesh is a field of the measurement.
        RequestField::Devices
        | RequestField::Tensor
        | RequestField::TensorMax
        | RequestField::Pipeline
        | RequestField::Data
        | RequestField::Context
        | RequestField::GradReduceDtype
        | RequestField::ShardSize
        | RequestField::ContextAttention
        | RequestField::LoroEvery => "",
    };
    Defect { field: field.into(), problem: defect.problem, hint: defect.hint }
}

/// The model of a planned step; defects have their field within the step.
fn resolve_model(model: &TrainedModel) -> Result<Model, Defects> {
    match model {
        TrainedModel::Preset(name) => presets::find(name).map_err(Defects::single),
        TrainedModel::Described(file) => {
            let model = file.as_ref().clone().resolve();
            model.map_err(|defects| nested("model.described", defects))
        }
        TrainedModel::Gpt(_) | TrainedModel::Decoder(_) => {
            Err(Defect::new("model", "the model of a framework has no plan").into())
        }
    }
}

/// Predicts kernels that run one after the other. The host's time for a launch is not one constant: the interval reaches at
/// least to the longest time of an operator that published runs show, that of the tables of frameworks.
fn predict_kernels(
    measurement: &Measurement,
    runs: &[KernelRun],
    profile: &Profile,
) -> PredictedTime {
    let KernelTimes { time_s, host_s } = predicted_times(measurement, runs, profile);
    let errors = ErrorModel::new(profile, measurement.executor, &measurement.mesh);
    let input = profile.precision().compute_dtype();
    let interval = errors.kernels_interval(&priced_kernels(runs, measurement.mesh, input));
    let [low_s, high_s] = interval.map(|ratio| time_s * ratio);
    let launch_s = profile.launch_costs(measurement.executor).host_launch_s;
    let slow_host_s =
        if launch_s > 0.0 { host_s * FrameworkTable::operator_s_max() / launch_s } else { 0.0 };
    PredictedTime { time_s, interval_s: [low_s, high_s.max(slow_host_s)], terms: vec![] }
}

/// Predicts a step; defects have their field within the step.
fn predict_step(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
) -> Result<PredictedTime, Defects> {
    let mesh = measurement.mesh;
    if let Some(predicted) = predict_decoder(step, mesh, profile) {
        return predicted;
    }
    let recompute = step.recompute.of_plan()?;
    if step.accumulate_grad_in_fp32.is_some() && profile.precision().compute_dtype() == DType::F32 {
        let problem = format!("`{}` trains in fp32", profile.name());
        return Err(Defect::new("accumulate_grad_in_fp32", problem).hint("leave it out").into());
    }
    let PlannedStep { prediction, program, .. } = plan_step(step, measurement, profile, recompute)?;
    let prices = Prices::new(profile, measurement.executor, &mesh);
    let factor = profile.launch_costs(measurement.executor).step_factor;
    let added = PublishedProgram::added_time(step, program.program(), &prices).scaled(factor);
    let time_s = prediction.step_time_s + added.total();
    let interval_s =
        prediction.step_time_interval_s.map(|bound| bound * time_s / prediction.step_time_s);
    let terms = shares(&prediction.breakdown_s.plus(&added));
    Ok(PredictedTime { time_s, interval_s, terms })
}

/// Predicts a step under a framework's table; `None` for a step of a plan.
fn predict_decoder(
    step: &TrainingStep,
    mesh: Mesh,
    profile: &Profile,
) -> Option<Result<PredictedTime, Defects>> {
    let (model, framework) = step.decoder()?;
    let predict = |table: FrameworkTable| {
        table.check_precision(profile).map_err(|it| Defect { field: "model".into(), ..it })?;
        let time_s = decoder_step_time_s(&table, model, step, mesh, profile);
        let (_, interval) = table.errors.of(step, mesh, profile);
        let interval_s = interval.map(|ratio| time_s * ratio);
        let terms = decoder_term_shares(&table, model, step, mesh, profile);
        Ok(PredictedTime { time_s, interval_s, terms })
    };
    Some(FrameworkTable::built_in(framework).and_then(predict))
}

/// The shares of the terms of a planned step. Launches are part of the kernels.
fn shares(breakdown: &Breakdown) -> Vec<TermShare> {
    let total = breakdown.total();
    [
        (StepTerm::Gemm, breakdown.gemm),
        (StepTerm::Attention, breakdown.attention),
        (StepTerm::Memory, breakdown.elementwise + breakdown.optimizer),
        (StepTerm::Collective, breakdown.collective_exposed + breakdown.other),
    ]
    .map(|(term, time_s)| (term, time_s / total))
    .to_vec()
}

/// Predicts the time that recomputation adds to a step per 10⁹ bytes of peak memory that it frees on the fullest stage.
/// Both steps are planned, and the errors of their common kernels cancel.
fn predict_recomputation(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
) -> Result<PredictedTime, Defects> {
    let keeping = plan_step(step, measurement, profile, Recompute::None)?;
    let recomputing = plan_step(step, measurement, profile, step.recompute.of_plan()?)?;
    let peak_bytes = |step: &PlannedStep| step.prediction.peak_memory().as_f64();
    let freed_bytes = peak_bytes(&keeping) - peak_bytes(&recomputing);
    let added_s = recomputing.prediction.step_time_s - keeping.prediction.step_time_s;
    if freed_bytes <= 0.0 || added_s <= 0.0 {
        let problem =
            format!("recomputation frees {freed_bytes} bytes for {added_s} s, which has no ratio");
        return Err(Defect::new("recompute", problem).into());
    }
    let subtracted = keeping.kernels.into_iter().map(|(kernel, count)| (kernel, -count));
    let difference: Vec<(Kernel, f64)> =
        recomputing.kernels.into_iter().chain(subtracted).collect();
    let errors = ErrorModel::new(profile, measurement.executor, &measurement.mesh);
    let time_s = added_s / freed_bytes * 1e9;
    let interval_s = errors.difference_interval(&difference).map(|ratio| time_s * ratio);
    Ok(PredictedTime { time_s, interval_s, terms: vec![] })
}

/// The fastest plan under the restrictions of a measurement.
struct PlannedStep {
    prediction: Prediction,
    program: CheckedProgram,
    /// Kernels, each with its number of launches in a step.
    kernels: Vec<(Kernel, f64)>,
}

/// Plans a step as it was measured. There is no memory limit, because the measured step did fit.
fn plan_step(
    step: &TrainingStep,
    measurement: &Measurement,
    profile: &Profile,
    recompute: Recompute,
) -> Result<PlannedStep, Defects> {
    let (mesh, work) = (measurement.mesh, step.workload);
    let (model, profile) = (resolve_model(&step.model)?, profile.clone());
    let (batch, length) = (work.global_batch, work.sequence_length);
    let (devices, replicas) = (mesh.devices(), mesh.replicas());
    let request = Request {
        micro_batch: Some(work.micro_batch),
        tensor: Some(mesh.tensor),
        pipeline: Some(mesh.pipeline),
        data: Some(mesh.data),
        context: Some(mesh.context),
        zero: Some(step.zero),
        shard_size: (step.zero != Zero::Off && replicas > 1).then_some(replicas),
        schedule: Some(PipelineSchedule::OneForwardOneBackward),
        overlap_tensor_collectives: step.overlap_tensor_collectives,
        overlap_microbatch_pairs: false,
        rules: Rules { baseline: step.strategy, weights: step.weights, norm: step.norm, recompute },
        grouping: match step.linears {
            StepLinears::Any => GroupingRule::Auto,
            StepLinears::Separate => GroupingRule::Off,
        },
        memory_limit: MemoryLimit::None,
        executor: measurement.executor,
        ..Request::new(model, profile, devices, batch, length)
    };
    request.validate().map_err(|defects| Defects(defects.0.into_iter().map(in_step).collect()))?;
    let Some(best) = search(&request).best else {
        return Err(Defect::new("", "no plan satisfies the restrictions of this step").into());
    };
    let Request { model, profile, executor, .. } = &request;
    let resolved = best.plan.resolve(model).map_err(|defects| of_whole(defects.0))?;
    let prediction = predict_program(model, profile, *executor, &resolved, &best.program);
    let kernels = kernels_of_step(best.program.program());
    Ok(PlannedStep { prediction, kernels, program: best.program })
}
