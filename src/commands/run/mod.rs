//! `narrows run`: trains a model under a plan, or counts what the plan does.

mod checkpoints;
mod processes;
mod trace;
mod train;

use narrows_cost_model::{Prices, Profile};
use narrows_plan::lower::lower;
use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Plan, Precision};
use narrows_planner::{Prediction, Request, predict_program};
use narrows_runtime::count_step;

use super::calibrate;
use super::cost::{PricedPlan, price};
use crate::args::low::OutputFormat;
use crate::args::resolve::{OutputSettings, PlanFile, launch};
use crate::args::run::{
    ExecutionTarget, PlanSelection, RunArgs, RunSettings, RunTask, TrainSettings, cores,
    run as resolve,
};
use crate::calibrate::{cache, gpu, machine};
use crate::errors::{CommandResult, Failure, Problem};
use crate::output;
use crate::report::run::NullRunReport;
use crate::report::{infeasible, proof};
pub use checkpoints::SavedCheckpoint;

/// A plan that is about to be run.
struct PlannedRun {
    model: Model,
    plan: Plan,
    program: CheckedProgram,
    prediction: Prediction,
    prices: Prices,
}

/// Where the words for people go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextOutput {
    Stdout,
    /// Standard output belongs to a plan or to metrics.
    Stderr,
    /// One JSON document is all that is said.
    Silent,
    /// Another process speaks.
    Mute,
}

/// Plans, unless a plan was given, and runs the plan.
pub fn run(args: &RunArgs) -> CommandResult<()> {
    let RunSettings { subject, task, answer } = resolve(args)?;
    let _held_until_the_end = match &task {
        RunTask::Train(training) if training.leads() => {
            checkpoints::admit(training.checkpoints.as_ref())?
        }
        _ => None,
    };
    let leads = !matches!(&task, RunTask::Train(training) if !training.leads());
    let planned = match subject {
        PlanSelection::File(file) => read(*file, &task, args)?,
        PlanSelection::Search(mut request) => {
            if let RunTask::Train(training) = &task
                && args.request.subject.hardware.is_none()
            {
                match training.on {
                    // Many would measure at the same time, and each plan something else.
                    ExecutionTarget::Processors if training.launched.is_none() => {
                        request.profile = this_machine(training, request.devices, &answer)?;
                    }
                    ExecutionTarget::Processors => {}
                    ExecutionTarget::Gpus { .. } => these_gpus(training, &mut request, &answer),
                }
            }
            searched(&request, &task, &answer)?
        }
    };
    if let Some(file) = answer.output.as_ref().filter(|_| leads) {
        output::write_plan(file, &planned.plan)?;
    }
    match task {
        RunTask::Count => count(&planned, &answer),
        RunTask::Train(training) => train::train(planned, &training, &answer),
    }
}

/// What nobody named is measured: this machine, with the threads that its devices will have.
fn this_machine(
    training: &TrainSettings,
    devices: u64,
    answer: &OutputSettings,
) -> CommandResult<Profile> {
    calibrate::of_this_machine(threads(training, devices), answer.format)
}

/// What was measured of these GPUs, where that is kept; otherwise the preset stays, and that is said.
fn these_gpus(training: &TrainSettings, request: &mut Request, answer: &OutputSettings) {
    let launch = training.launched.as_ref().map(|launched| &launched.launch);
    // Other nodes may have kept something else, and all must plan the same.
    let one_node = launch.is_none_or(|launch| launch.local_world_size == launch.world_size);
    let kept = gpu::kept(request.devices).filter(|_| one_node);
    if let Some(profile) = kept.and_then(|path| cache::read(&path)) {
        request.profile = profile;
    } else if training.leads() && answer.format == OutputFormat::Text {
        let name = request.profile.name();
        let why = if one_node {
            "nothing that was measured of these GPUs is kept"
        } else {
            "nodes may have kept different measurements"
        };
        let measure =
            "`narrows calibrate --backend cuda` measures, and --hardware names what it wrote";
        output::tell(&format!("Predicting with the preset `{name}`: {why}; {measure}\n"));
    }
}

/// Threads that all devices of this machine share.
fn threads(training: &TrainSettings, devices: u64) -> u64 {
    training.threads.map_or(cores(), |each| each.saturating_mul(devices).min(cores()))
}

/// Says where the profile was measured on something else than what is about to train.
fn warn_of_other_machine(profile: &Profile, task: &RunTask, devices: u64) {
    let RunTask::Train(training) = task else { return };
    let warning = match training.on {
        ExecutionTarget::Processors if training.launched.is_none() => {
            machine::other(profile, threads(training, devices))
        }
        ExecutionTarget::Gpus { .. } if training.leads() => machine::other_gpus(profile),
        _ => None,
    };
    if let Some(warning) = warning {
        output::warn(&warning);
    }
}

fn is_on_processors(task: &RunTask) -> bool {
    matches!(task, RunTask::Train(training) if training.on == ExecutionTarget::Processors)
}

fn read(mut file: PlanFile, task: &RunTask, args: &RunArgs) -> CommandResult<PlannedRun> {
    if is_on_processors(task) && file.plan.precision != Precision::Full32 {
        let problem = "the plan computes in mixed bf16, and processors compute in f32 alone";
        let problem = Problem { field: "precision".into(), ..Problem::new(&file.name, problem) };
        let hint = "a plan that `narrows plan --hardware cpu-local` makes";
        return Err(Failure::input(problem.hint(hint)));
    }
    launch(&mut file, &args.request);
    warn_of_other_machine(&file.profile, task, file.plan.mesh.devices());
    let PricedPlan { plan, resolved, prediction } = price(&file)?;
    let program = CheckedProgram::check(lower(&resolved))
        .map_err(|errors| Failure::failed(proof::problems(&file.name, &errors)))?;
    let prices = Prices::new(&file.profile, plan.executor, &plan.mesh);
    Ok(PlannedRun { model: file.model, plan, program, prediction, prices })
}

fn searched(
    request: &Request,
    task: &RunTask,
    answer: &OutputSettings,
) -> CommandResult<PlannedRun> {
    let Request { model, profile, executor, .. } = request;
    if is_on_processors(task) && profile.precision() != Precision::Full32 {
        let name = profile.name();
        let problem =
            format!("plans for `{name}` compute in mixed bf16, and processors in f32 alone");
        let problem = Problem::new("--hardware", problem).hint("--hardware cpu-local");
        return Err(Failure::input(problem));
    }
    warn_of_other_machine(profile, task, request.devices);
    let found = super::searched(request, answer.format);
    let Some(fitted) = found.best else {
        return Err(infeasible::failure(request, &found.report));
    };
    let resolved =
        fitted.plan.resolve(model).map_err(|defects| Failure::file("the plan found", defects))?;
    let prediction = predict_program(model, profile, *executor, &resolved, &fitted.program);
    let (plan, program) = (fitted.plan, fitted.program);
    let prices = Prices::new(profile, *executor, &plan.mesh);
    Ok(PlannedRun { model: model.clone(), plan, program, prediction, prices })
}

fn count(planned: &PlannedRun, answer: &OutputSettings) -> CommandResult<()> {
    let report = count_step(&planned.program).map_err(|error| Failure::execution(&error))?;
    let counts = NullRunReport::of("null", &planned.model, &report);
    match voice(answer, None, true) {
        TextOutput::Silent => output::print_json(&counts),
        voice => voice.say(&counts.text()),
    }
}

fn voice(answer: &OutputSettings, metrics: Option<&std::ffi::OsStr>, leads: bool) -> TextOutput {
    match answer.format {
        _ if !leads => TextOutput::Mute,
        OutputFormat::Json => TextOutput::Silent,
        OutputFormat::Text if answer.plan_on_stdout() || metrics.is_some_and(output::is_stdout) => {
            TextOutput::Stderr
        }
        OutputFormat::Text => TextOutput::Stdout,
    }
}

impl TextOutput {
    fn say(self, text: &str) -> CommandResult<()> {
        match self {
            TextOutput::Stdout => output::print(text)?,
            TextOutput::Stderr => output::tell(text),
            TextOutput::Silent | TextOutput::Mute => {}
        }
        Ok(())
    }
}
