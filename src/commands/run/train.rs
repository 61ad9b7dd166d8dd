//! The training run: prepares a session, trains, and reports.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;
use narrows_cluster::TcpProcessGroup;
use narrows_cuda::GpuOptions;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, CheckedProgram, Plan};
use narrows_planner::Prediction;
use narrows_runtime::checkpoint::{self, FolderLock};
use narrows_runtime::process_group::{ProcessGroup, StorageUse};
use narrows_runtime::session::Session;
use narrows_runtime::train::{
    CollapseWatch, EvaluationOutcome, MetricsRecord, StepPrediction, TrainControl, TrainEnd,
    TrainError, TrainedStep,
};
use narrows_runtime::{DeviceId, RunError, Trainer};

use super::checkpoints::{CheckpointEntry, CheckpointKeeper};
use super::data_check::DataCheck;
use super::initial_weights::load_initial_weights;
use super::memory::require_memory;
use super::processes::RunStart;
use super::tokens::sampler;
use super::trace::Tracer;
use super::validation::Validation;
use super::{PlannedRun, TextOutput, processes};
use crate::args::{
    CheckpointSettings, Detail, ExecutionTarget, OutputSettings, RunOrigin, TokenSource,
    TrainSettings,
};
use crate::breakdown::seconds_by_category;
use crate::cluster::{LaunchedProcess, leave};
use crate::errors::{CommandResult, ExitStatus, Failure};
use crate::host::cores;
use crate::metrics_file::MetricsFile;
use crate::report::{Report, RunHeader, RunHistory, RunReport, progress_line};
use crate::signals::StopSignals;
use crate::tensorboard::EventFile;
use crate::text::plural;
use crate::{gpu, output, progress};

/// Number of progress lines in a run.
const PROGRESS_LINES: u64 = 10;

/// Trains the model of a plan. Several processes, which have joined `group`, end together.
pub fn train(
    planned: PlannedRun,
    training: &TrainSettings,
    output: &OutputSettings,
    (group, lock, signals): (Option<Arc<TcpProcessGroup>>, Option<&FolderLock>, StopSignals),
) -> CommandResult<()> {
    let outcome = train_in_group(group.clone(), planned, training, output, (lock, signals));
    match (group, &training.process) {
        (Some(group), Some(process)) => leave(&group, outcome, &process.label()),
        _ => outcome,
    }
}

fn train_in_group(
    group: Option<Arc<TcpProcessGroup>>,
    planned: PlannedRun,
    training: &TrainSettings,
    output: &OutputSettings,
    (lock, signals): (Option<&FolderLock>, StopSignals),
) -> CommandResult<()> {
    let PlannedRun { model, plan, program, prediction, prices } = planned;
    if let (Some(group), Some(settings)) = (&group, &training.checkpoints) {
        checkpoint::require_shared(&settings.dir, &**group).map_err(Failure::checkpoint)?;
    }
    let threads = threads_per_device(&plan, training);
    let sampler = sampler(&model, &plan, training)?;
    let text = TextOutput::new(output, training.metrics.as_deref(), training.is_rank_0());
    if training.target == ExecutionTarget::Cpu {
        require_memory(&model, program.program(), training)?;
    }
    let mut tracer =
        training.trace.as_ref().map(|settings| Tracer::new(settings, &program, &prices));
    let process_group = group.clone().map(|group| group as Arc<dyn ProcessGroup>);
    let mut session = session(&model, program, (training, threads), process_group)
        .map_err(|error| Failure::execution(&error))?;
    session.initialise(&model, training.recipe.seed).map_err(|error| Failure::execution(&error))?;
    if tracer.is_some() {
        session.record_instruction_spans();
    }
    let mut trainer = Trainer::new(session, sampler, training.recipe.optimizer)?;
    let mut keeper = CheckpointKeeper::new(training, lock, &model);
    keeper.resume(&mut trainer, training.recipe.steps)?;
    let weights_sha256 = match keeper.resumed() {
        None => {
            let _storage = StorageUse::begin(trainer.session().process_group().cloned());
            load_initial_weights(&mut trainer, &model, training)?
        }
        Some(_) => String::new(),
    };
    let first_step = trainer.session().steps();
    let recipe = &training.recipe;
    let validation = training.validation.as_ref();
    let is_rank_0 = training.is_rank_0();
    let mut validation = validation
        .map(|settings| Validation::new(settings, &model, recipe, &mut trainer, is_rank_0))
        .transpose()?;
    keeper.finish_best(&trainer)?;
    if let Some(group) = &group {
        let evaluated_sha256 = validation.as_ref().map_or(String::new(), Validation::tokens_sha256);
        let tokens_sha256 = trainer.cursor().tokens_sha256;
        let start = RunStart { step: first_step, tokens_sha256, evaluated_sha256, weights_sha256 };
        processes::require_same_start(group, start)?;
    }
    let tokens = match training.tokens {
        TokenSource::BuiltIn => None,
        TokenSource::File(_) => Some(trainer.sampler().file()),
    };
    let evaluated = validation.as_ref().map(Validation::file);
    let storage = StorageUse::begin(trainer.session().process_group().cloned());
    let mut data_check = DataCheck::begin(tokens, evaluated, training)?;
    drop(storage);
    let mut metrics = training
        .metrics
        .as_deref()
        .map(|file| metrics_file(file, training, &keeper))
        .transpose()?;
    let folder = training.tensorboard.as_deref();
    let mut events = folder.map(|folder| EventFile::create(folder, first_step + 1)).transpose()?;
    let predicted = step_prediction(&plan, &prediction);
    let header =
        RunHeader { model: &model, plan: &plan, prediction: &prediction, threads, training };
    let resumed = keeper.resumed().map(|checkpoint| (checkpoint.step, checkpoint.path.as_path()));
    text.print(&header.text(trainer.sampler(), data_check.clause(), resumed))?;
    let stop = signals.stop_in_order();
    let progress = progress_bar(first_step, training.recipe.steps, text);
    let line_every = (training.recipe.steps / PROGRESS_LINES).max(1);
    let ends = validation.as_ref().is_some_and(|validation| validation.ends(&trainer));
    let had_stopped_early = ends && first_step < recipe.steps;
    let mut history = RunHistory::default();
    let mut collapse = CollapseWatch::new(model.vocab, recipe.optimizer.warm_up_steps);
    // Of this process, and beside a step. The run then stops in order, with a checkpoint, so that no step is lost.
    let mut fault: Option<Failure> = None;
    let after_step = |trainer: &mut Trainer, trained: &TrainedStep| {
        if let Some(tracer) = &mut tracer {
            tracer.record(trainer, trained);
        }
        let outcome = match &mut validation {
            Some(validation) => validation.evaluate_if_due(trainer, recipe.steps),
            None => Ok(None),
        };
        let evaluation = match &outcome {
            Ok(Some(EvaluationOutcome::Evaluated(evaluation))) => Some(*evaluation),
            _ => None,
        };
        let written = metrics.as_mut().map_or(Ok(()), |metrics| {
            let record = MetricsRecord::new(trained, Some(&predicted));
            metrics.write(&record.with_evaluation(evaluation.as_ref()))
        });
        let event = events.as_mut();
        let event =
            event.map_or(Ok(()), |events| events.write(trained, &predicted, evaluation.as_ref()));
        if written.is_ok() {
            history.push(trained);
        }
        let collapsed = collapse.push(trained.step, trained.loss, trained.gradient_norm);
        if let Some(collapse) = collapsed.filter(|_| training.is_rank_0()) {
            progress.suspend(|| output::warn(&format!("step {}: {collapse}", trained.step)));
        }
        progress.set_message(format!("loss {:.4}", trained.loss));
        progress.inc(1);
        let mut lines = String::new();
        if trained.step == first_step + 1 || trained.step.is_multiple_of(line_every) {
            lines += &progress_line(trained, training.recipe.steps);
        }
        if let Some(EvaluationOutcome::Unreadable(error)) = outcome? {
            fault = error.map(Failure::token_file);
        }
        let judged = validation.as_mut().zip(evaluation);
        let verdict = judged.map(|(validation, evaluation)| validation.judge(evaluation, trainer));
        if let Some(verdict) = &verdict {
            lines += &verdict.line(trained.step);
        }
        let printed = match lines.is_empty() {
            true => Ok(()),
            false => progress.suspend(|| text.print(&lines)),
        };
        let control = verdict.as_ref().map_or(TrainControl::Continue, |verdict| verdict.control);
        let tokens = match control == TrainControl::Continue && trained.step < recipe.steps {
            true => trainer.read_ahead().map_err(Failure::token_file),
            false => Ok(()),
        };
        fault = fault
            .take()
            .or(written.and(event).and(printed).and(tokens).err())
            .or_else(|| data_check.fault());
        if verdict.as_ref().is_some_and(|verdict| verdict.is_best) {
            keeper.save_best(trainer).map_err(LoopError::Ended)?;
        }
        // Processes write checkpoints together, so they first agree whether to continue.
        let stop = stop.load(Ordering::Relaxed) || fault.is_some();
        if keeper.agree(trainer, stop).map_err(LoopError::Ended)? {
            return Ok(TrainControl::Stop);
        }
        if control == TrainControl::Continue {
            keeper.save_if_due(trainer, recipe.steps).map_err(LoopError::Ended)?;
        }
        Ok::<_, LoopError>(control)
    };
    let result = match had_stopped_early {
        true => text
            .print(&Validation::early_stop_line(&trainer))
            .map_err(LoopError::Ended)
            .map(|()| TrainEnd::StoppedEarly),
        false => trainer.train(recipe.steps, after_step),
    };
    progress.finish_and_clear();
    let result = match result {
        Ok(end) => keeper.save(&trainer).and_then(|()| fault.map_or(Ok(end), Err)),
        Err(LoopError::Step(error)) => {
            // Other processes complete the checkpoint that is being written if they have failed in the same way.
            let is_common = matches!(error, TrainError::Run(RunError::NonFiniteGradients { .. }));
            let saved = match is_common || group.is_none() {
                true => keeper.finish_pending(),
                false => Ok(()),
            };
            let mut failure = Failure::from(error);
            failure.problems.extend(saved.err().into_iter().flat_map(|failed| failed.problems));
            Err(failure)
        }
        Err(LoopError::Ended(failure)) => Err(failure),
    };
    let end = match result {
        Ok(end) => end,
        Err(failure) => {
            let trace = tracer.map(|tracer| tracer.write_after_failure(&trainer));
            return Err(with_leftovers(failure, metrics.as_ref(), trace, &keeper, &history));
        }
    };
    data_check.warn_if_unfinished();
    let last_evaluation = validation.as_ref().and_then(Validation::last);
    // A trace that cannot be written does not cost the report.
    let traced = tracer.map_or(Ok(()), |tracer| tracer.write(&trainer));
    let trace = training.trace.as_ref().filter(|_| traced.is_ok());
    let report = RunReport::new(&header, &trainer, &history, end)
        .with_evaluations(last_evaluation.map(|last| last.loss), trainer.evaluations().best_loss)
        .with_files(
            metrics.as_ref().map(MetricsFile::name),
            trace.map(|trace| trace.file.as_path()),
        )
        .with_checkpoints(
            keeper.resumed().map(|checkpoint| checkpoint.step),
            keeper.last().map(|CheckpointEntry { path, .. }| path.as_path()),
        );
    match text {
        TextOutput::Json => output::print_json(&report)?,
        _ => text.print(&report.page(Detail::Summary).text())?,
    }
    match end {
        TrainEnd::Completed | TrainEnd::StoppedEarly => traced,
        TrainEnd::Stopped => {
            let problems = traced.err().map_or(vec![], |failure| failure.problems);
            Err(Failure { problems, ..stopped(&trainer, &keeper, training) })
        }
    }
}

/// Error that ends the loop of steps.
enum LoopError {
    /// A step failed.
    Step(TrainError),
    /// A checkpoint or an evaluation failed.
    Ended(Failure),
}

impl From<TrainError> for LoopError {
    fn from(error: TrainError) -> LoopError {
        LoopError::Step(error)
    }
}

/// Threads per device, with a warning if the devices of this machine have more threads than the machine has cores.
fn threads_per_device(plan: &Plan, training: &TrainSettings) -> u64 {
    let devices = match &training.process {
        Some(LaunchedProcess { launch, .. }) => launch.local_world_size,
        None => plan.mesh.devices(),
    };
    let cores = cores();
    let threads = training.threads.unwrap_or((cores / devices).max(1));
    let on_cpu = training.target == ExecutionTarget::Cpu;
    if on_cpu && training.is_rank_0() && devices.saturating_mul(threads) > cores {
        let threads = if threads == 1 { String::new() } else { format!(" of {threads} threads") };
        output::warn(&format!(
            "{devices} devices{threads} share {cores} cores, so steps take longer than predicted"
        ));
    }
    threads
}

/// Step time, breakdown and the arena of every device, for the metrics.
fn step_prediction(plan: &Plan, prediction: &Prediction) -> StepPrediction {
    let stage_bytes = &prediction.peak_memory_bytes;
    let arena = |id| Bytes(stage_bytes[DeviceId(id).stage(&plan.mesh)]);
    StepPrediction {
        step_time_s: prediction.step_time_s,
        breakdown_s: seconds_by_category(&prediction.breakdown_s),
        allocated: (0..plan.mesh.devices()).map(arena).collect(),
    }
}

/// Allocates the memory of the devices of this process.
fn session(
    model: &Model,
    program: CheckedProgram,
    (training, threads): (&TrainSettings, u64),
    group: Option<Arc<dyn ProcessGroup>>,
) -> Result<Session, RunError> {
    let options = match training.target {
        ExecutionTarget::Gpus { eager, attention } => {
            GpuOptions { eager, attention, ..gpu::session_options(training.process.as_ref()) }
        }
        ExecutionTarget::Cpu => {
            let threads = usize::try_from(threads).unwrap_or(usize::MAX);
            return match group {
                None => narrows_cpu::session(model, program, threads),
                Some(group) => narrows_cpu::session_of_process(model, program, threads, group),
            };
        }
    };
    narrows_cuda::session(model, program, &options, group, &mut |warning| output::warn(warning))
}

/// A new metrics file, or the existing one of a resumed run.
fn metrics_file(
    file: &OsStr,
    training: &TrainSettings,
    keeper: &CheckpointKeeper,
) -> CommandResult<MetricsFile> {
    let resumes = |settings: &CheckpointSettings| settings.origin != RunOrigin::FirstStep;
    match keeper.resumed() {
        Some(checkpoint) => MetricsFile::resume(file, checkpoint.step),
        None if training.checkpoints.as_ref().is_some_and(resumes) => MetricsFile::restart(file),
        None => MetricsFile::create(file),
    }
}

/// The failure of a run, with the files that the run has written.
fn with_leftovers(
    mut failure: Failure,
    metrics: Option<&MetricsFile>,
    trace: Option<CommandResult<Option<String>>>,
    keeper: &CheckpointKeeper,
    history: &RunHistory,
) -> Failure {
    let (trace, trace_problems) = match trace.transpose() {
        Ok(trace) => (trace.flatten(), vec![]),
        Err(failure) => (None, failure.problems),
    };
    if let Some(problem) = failure.problems.first_mut() {
        if let Some(metrics) = metrics {
            let (steps, file) = (plural(history.steps(), "step"), metrics.name());
            problem.causes.push(format!("the metrics of the {steps} before it are in {file}"));
        }
        problem.causes.extend(trace);
        problem.causes.extend(keeper.resumption(failure.status));
    }
    failure.problems.extend(trace_problems);
    failure
}

/// Prints that the run was stopped, and the checkpoint to resume from. Returns the failure, without problems.
fn stopped(trainer: &Trainer, keeper: &CheckpointKeeper, training: &TrainSettings) -> Failure {
    if training.is_rank_0() {
        let (step, steps) = (trainer.session().steps(), training.recipe.steps);
        let resumption = keeper
            .resumption(ExitStatus::Stopped)
            .map_or(String::new(), |clause| format!("; {clause}"));
        output::eprint(&format!("stopped after step {step} of {steps}{resumption}\n"));
    }
    Failure { status: ExitStatus::Stopped, problems: vec![] }
}

fn progress_bar(first_step: u64, steps: u64, text: TextOutput) -> ProgressBar {
    if matches!(text, TextOutput::Json | TextOutput::Silent) {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(steps).with_position(first_step);
    // Steps before the checkpoint are not part of this run's time.
    progress.reset_eta();
    let template = "{spinner} {wide_bar} step {pos} of {len}, {msg}, {eta} left";
    progress::styled(progress, template)
}
