//! `narrows run`: trains a model under a plan, or counts what the plan executes.

mod checkpoints;
mod data_check;
mod initial_weights;
mod memory;
mod processes;
mod resume;
mod shared_cores;
mod step_log;
mod tokens;
mod trace;
mod train;
mod train_loop;
mod validation;

use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::sync::Arc;

use narrows_cost_model::{Prices, Profile};
use narrows_plan::model::{ExactStepObstacle, Model};
use narrows_plan::{CheckedProgram, Plan, Precision};
use narrows_planner::{Prediction, Request, SearchCache, predict_program};
use narrows_runtime::GemmDtype;
use narrows_runtime::checkpoint::FolderLock;
use narrows_runtime::data::{LastTarget, TargetRule};
use narrows_runtime::session::ModelProgram;
use narrows_runtime::{Loro, Optimizer, count_step};

use super::calibrate::profile_of_this_machine;
use super::cost::price;
use super::ineffective::warn_of_ineffective_flags;
use super::search::search;
use crate::args::{
    BackendArg, Detail, ExecutionTarget, OutputFormat, OutputSettings, PlanFile, PlanSelection,
    RunArgs, RunSettings, RunTask, TrainSettings,
};
use crate::calibrate::{cache, gpu, machine};
use crate::cluster::{LaunchedProcess, Membership, report_failure};
use crate::errors::{CommandResult, Failure, Problem};
use crate::host::cores;
use crate::output;
use crate::priced_plan::PricedPlan;
use crate::report::{self, InfeasibleReport, NullRunReport};
use crate::signals::StopSignals;
use crate::text;

/// A plan to run, with its prediction.
struct PlannedRun {
    model: Model,
    plan: Plan,
    program: CheckedProgram,
    prediction: Prediction,
    prices: Prices,
    /// Whether the prediction has GEMMs in their own format.
    gemms_are_priced: bool,
}

impl PlannedRun {
    /// A plan with its prediction for a task, whose GEMMs may have another format than the plan.
    fn new(model: Model, profile: &Profile, priced: PricedPlan, task: &RunTask) -> PlannedRun {
        let PricedPlan { plan, resolved, program, prediction } = priced;
        let gemm_dtype = match task {
            RunTask::Train(training) => training.gemm_dtype(),
            RunTask::Count(_) => None,
        };
        let rounds_operands = gemm_dtype == Some(GemmDtype::Bf16);
        let with_bf16 = rounds_operands.then(|| profile.with_bf16_gemms()).flatten();
        let prediction = match &with_bf16 {
            Some(profile) => predict_program(&model, profile, plan.executor, &resolved, &program),
            None => prediction,
        };
        let gemms_are_priced = with_bf16.is_some() || !rounds_operands;
        let profile = with_bf16.as_ref().unwrap_or(profile);
        let prices = Prices::new(profile, plan.executor, &plan.mesh);
        PlannedRun { model, plan, program, prediction, prices, gemms_are_priced }
    }
}

/// Destination of the text output of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextOutput {
    Stdout,
    /// Standard output belongs to a plan or to metrics.
    Stderr,
    /// Nowhere: a JSON document is the only output.
    Json,
    /// Nowhere: another process prints.
    Silent,
}

/// Searches for a plan unless a plan file is given, and runs the plan.
///
/// # Errors
/// A process that fails before all have joined tells the others, which would otherwise wait for it.
pub fn run(args: &RunArgs) -> CommandResult<()> {
    let process = match args.backend {
        BackendArg::Null => None,
        _ => args.launch.resolve().ok().flatten(),
    };
    let membership = Arc::new(Membership::default());
    let warning = "Ctrl-C will end the run without finishing its step";
    let reporting = process.clone().map(|process| (process, Arc::clone(&membership)));
    let label = process.as_ref().map(LaunchedProcess::label);
    let signals = StopSignals::install(warning, label, move || {
        if let Some((process, membership)) = &reporting {
            membership.report_stop(process);
        }
    });
    let before_joining = |failure| match &process {
        Some(process) => report_failure(process, failure),
        None => failure,
    };
    let settings = args.resolve().map_err(before_joining)?;
    let places = settings.places.clone();
    let prepared = prepare(settings).map_err(|failure| before_joining(places.locate(failure)));
    let (task, output, planned, lock) = prepared?;
    match task {
        RunTask::Count(optimizer) => {
            count(&planned, &optimizer, &output).map_err(|failure| places.locate(failure))
        }
        RunTask::Train(training) => {
            let group = membership.join(|| processes::join(&planned, &training))?;
            train::train(planned, &training, &output, (group, lock.as_ref(), signals))
        }
    }
}

/// Plans a run, and locks its folder of checkpoints.
fn prepare(
    RunSettings { selection, hardware_is_explicit, task, output, .. }: RunSettings,
) -> CommandResult<(RunTask, OutputSettings, PlannedRun, Option<FolderLock>)> {
    let lock = match &task {
        RunTask::Train(training) if training.is_rank_0() => {
            checkpoints::lock_folder(training.checkpoints.as_ref())?
        }
        _ => None,
    };
    let loro = task.optimizer().loro;
    let loro_every = loro.map(|loro| loro.exact_every);
    let planned = match selection {
        PlanSelection::File(mut file) => {
            require_exact_steps(&file.model, loro)?;
            if file.plan.loro_every != loro_every && task.is_rank_0() {
                warn_of_other_exact_steps(&file, loro_every);
            }
            file.plan.loro_every = loro_every;
            price_file(*file, &task)?
        }
        PlanSelection::Search(mut request) => {
            require_exact_steps(&request.model, loro)?;
            request.loro_every = loro_every;
            if let (RunTask::Train(training), false) = (&task, hardware_is_explicit) {
                use_measured_profile(training, &mut request, output.format)?;
            }
            search_plan(&request, &task, &output)?
        }
    };
    let planned = PlannedRun { prediction: planned.prediction.between_exact_steps(), ..planned };
    if let Some(file) = output.plan_file.as_ref().filter(|_| task.is_rank_0()) {
        output::write_plan(file, &planned.plan)?;
    }
    if let RunTask::Train(training) = &task {
        processes::require_one_per_device(&planned, training)?;
        require_predicted_tokens(&planned, training.recipe.targets)?;
    }
    Ok((task, output, planned, lock))
}

/// Checks that LORO can train a model, where it is the optimizer.
fn require_exact_steps(model: &Model, loro: Option<Loro>) -> CommandResult<()> {
    match loro.and_then(|_| model.exact_step_obstacle()) {
        None => Ok(()),
        Some(ExactStepObstacle { reason, hint }) => {
            let problem = Problem::new("--optimizer loro", reason);
            Err(Failure::input(problem.hint("--optimizer adamw").hint(hint)))
        }
    }
}

/// Warns of a plan for another optimizer than that of the recipe, which decides.
fn warn_of_other_exact_steps(file: &PlanFile, loro_every: Option<NonZeroU64>) {
    let optimizer = |every: Option<NonZeroU64>| match every {
        Some(every) => format!("LORO with an exact step {}", text::every(every.get(), "step")),
        None => "AdamW".into(),
    };
    let [planned, run] = [file.plan.loro_every, loro_every].map(optimizer);
    output::warn(&format!("{} is for {planned}, and the run has {run}", file.name));
}

/// Checks that the rule of predicted tokens suits the model and its sequences.
fn require_predicted_tokens(planned: &PlannedRun, targets: TargetRule) -> CommandResult<()> {
    let PlannedRun { model, plan, .. } = planned;
    if targets.last == LastTarget::Ignored && plan.workload.sequence_length == 1 {
        let message = "with --last-target ignored, a sequence of one token predicts none";
        let problem = Problem::new("--sequence-length", message);
        return Err(Failure::input(problem.hint("longer sequences, or --last-target next")));
    }
    if let Some(pad_id) = targets.pad_id.filter(|id| u64::from(*id) >= model.vocab) {
        let (name, vocab) = (&model.name, model.vocab);
        let message = format!("{pad_id} is not below {vocab}, the vocabulary size of {name}");
        return Err(Failure::input(Problem::new("--pad-id", message)));
    }
    Ok(())
}

/// Replaces the profile of a request by the measured profile of this machine, if all processes would use the same one.
fn use_measured_profile(
    training: &TrainSettings,
    request: &mut Request,
    format: OutputFormat,
) -> CommandResult<()> {
    match training.target {
        // Processes that measure simultaneously would get different profiles, hence different plans.
        ExecutionTarget::Cpu if training.process.is_none() => {
            let threads = threads_of_all(training, request.devices);
            request.profile = profile_of_this_machine(threads, format)?;
        }
        ExecutionTarget::Cpu => {}
        ExecutionTarget::Gpus { .. } => use_profile_of_gpus(training, request, format),
    }
    Ok(())
}

/// Replaces the profile of a request by the cached profile of these GPUs, or reports that the preset is used.
fn use_profile_of_gpus(training: &TrainSettings, request: &mut Request, format: OutputFormat) {
    let launch = training.process.as_ref().map(|process| &process.launch);
    // Nodes may have different cached profiles, and all processes must have the same plan.
    let one_node = launch.is_none_or(|launch| launch.local_world_size == launch.world_size);
    let cached = gpu::cached_profile(request.devices).filter(|_| one_node);
    if let Some(profile) = cached.and_then(|path| cache::read(&path)) {
        request.profile = profile;
    } else if training.is_rank_0() && format == OutputFormat::Text {
        let name = request.profile.name();
        let reason = match one_node {
            true => "there is no measured profile of these GPUs",
            false => "nodes may have different measured profiles",
        };
        output::eprint(&format!(
            "Predicting with the preset `{name}`: {reason}. `narrows calibrate --backend cuda` measures one, \
             and --hardware selects it\n"
        ));
    }
}

/// Number of threads shared by all devices of this machine.
fn threads_of_all(training: &TrainSettings, devices: u64) -> u64 {
    training.threads.map_or(cores(), |threads| threads.saturating_mul(devices).min(cores()))
}

/// Warns of a profile that was measured on other hardware than that of the run.
fn warn_of_other_machine(profile: &Profile, task: &RunTask, devices: u64) {
    let RunTask::Train(training) = task else { return };
    let warning = match training.target {
        ExecutionTarget::Cpu if training.process.is_none() => {
            machine::other_machine_warning(profile, threads_of_all(training, devices))
        }
        ExecutionTarget::Gpus { .. } if training.is_rank_0() => {
            machine::other_gpus_warning(profile)
        }
        _ => None,
    };
    if let Some(warning) = warning {
        output::warn(&warning);
    }
}

fn price_file(file: PlanFile, task: &RunTask) -> CommandResult<PlannedRun> {
    if task.on_cpu().is_some() && file.plan.precision != Precision::Fp32 {
        let message = "the plan computes in mixed bf16, and the cpu backend in f32 only";
        let problem = Problem::new(&file.name, message).field("precision");
        let hint = "a plan made with `narrows plan --hardware cpu-local`";
        return Err(Failure::input(problem.hint(hint)));
    }
    warn_of_other_machine(&file.profile, task, file.plan.mesh.devices());
    let priced = price(&file)?;
    Ok(PlannedRun::new(file.model, &file.profile, priced, task))
}

fn search_plan(
    request: &Request,
    task: &RunTask,
    output: &OutputSettings,
) -> CommandResult<PlannedRun> {
    let Request { model, profile, .. } = request;
    if task.on_cpu().is_some() && profile.precision() != Precision::Fp32 {
        let name = profile.name();
        let message =
            format!("plans for `{name}` compute in mixed bf16, and the cpu backend in f32 only");
        let problem = Problem::new("--hardware", message).hint("--hardware cpu-local");
        return Err(Failure::input(problem));
    }
    warn_of_other_machine(profile, task, request.devices);
    let cache = SearchCache::default();
    let result = search(request, &cache, output.format);
    let Some(best) = result.best else {
        return Err(InfeasibleReport::new(request, &result.report, &cache).into_failure());
    };
    let priced = PricedPlan::of_search(request, best)?;
    warn_of_ineffective_flags(request, priced.plan.mesh);
    Ok(PlannedRun::new(model.clone(), profile, priced, task))
}

fn count(
    planned: &PlannedRun,
    optimizer: &Optimizer,
    output: &OutputSettings,
) -> CommandResult<()> {
    ModelProgram::new(&planned.model, planned.program.clone())
        .and_then(|program| program.check_optimizer(optimizer))
        .map_err(|error| Failure::execution(&error))?;
    let step = count_step(&planned.program).map_err(|error| Failure::execution(&error))?;
    let report = NullRunReport::new("null", &planned.model, &planned.plan, &step);
    report::print(&report, output.format, Detail::Summary, output.plan_on_stdout())
}

impl TextOutput {
    fn new(output: &OutputSettings, metrics: Option<&OsStr>, is_rank_0: bool) -> TextOutput {
        let stdout_in_use = output.plan_on_stdout() || metrics.is_some_and(output::is_stdout);
        match output.format {
            _ if !is_rank_0 => TextOutput::Silent,
            OutputFormat::Json => TextOutput::Json,
            OutputFormat::Text if stdout_in_use => TextOutput::Stderr,
            OutputFormat::Text => TextOutput::Stdout,
        }
    }

    fn print(self, text: &str) -> CommandResult<()> {
        match self {
            TextOutput::Stdout => output::print(text)?,
            TextOutput::Stderr => output::eprint(text),
            TextOutput::Json | TextOutput::Silent => {}
        }
        Ok(())
    }
}
