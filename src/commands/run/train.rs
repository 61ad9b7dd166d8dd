//! The training run: prepares a session, trains, and reports.

use std::ffi::OsStr;
use std::sync::Arc;

use narrows_cluster::TcpProcessGroup;
use narrows_cpu::CpuOptions;
use narrows_cuda::GpuOptions;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, CheckedProgram, Plan};
use narrows_planner::Prediction;
use narrows_runtime::checkpoint::{self, FolderLock};
use narrows_runtime::process_group::{ProcessGroup, StorageUse};
use narrows_runtime::session::Session;
use narrows_runtime::train::{StepPrediction, TrainEnd};
use narrows_runtime::{DeviceId, RunError, Trainer};

use super::checkpoints::{CheckpointEntry, CheckpointKeeper};
use super::data_check::DataCheck;
use super::initial_weights::load_initial_weights;
use super::memory::require_memory;
use super::processes::RunStart;
use super::shared_cores::sharing_processes;
use super::step_log::{RecordFiles, StepLog};
use super::tokens::sampler;
use super::trace::Tracer;
use super::train_loop::TrainLoop;
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
use crate::report::{Report, RunHeader, RunReport};
use crate::signals::StopSignals;
use crate::tensorboard::EventFile;
use crate::text::plural;
use crate::{gpu, output};

/// Trains the model of a plan. Several processes, which have joined `group`, end together.
pub fn train(
    planned: PlannedRun,
    training: &TrainSettings,
    output: &OutputSettings,
    (group, lock, signals): (Option<Arc<TcpProcessGroup>>, Option<&FolderLock>, StopSignals),
) -> CommandResult<()> {
    let outcome = train_in_group(group.clone(), planned, training, output, (lock, signals));
    let outcome = outcome.map_err(|failure| training.places.locate(failure));
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
    let PlannedRun { model, plan, program, prediction, prices, gemms_are_priced } = planned;
    if let (Some(group), Some(settings)) = (&group, &training.checkpoints) {
        checkpoint::require_shared(&settings.dir, &**group).map_err(Failure::checkpoint)?;
    }
    let threads = threads_per_device(&plan, training, group.as_deref())?;
    let sampler = sampler(&model, &plan, training)?;
    let text = TextOutput::new(output, training.metrics.as_deref(), training.is_rank_0());
    let weight_decay = training.recipe.optimizer.weight_decay;
    if model.latent_residual.is_some() && weight_decay > 0.0 && training.is_rank_0() {
        output::warn(&format!(
            "{} {weight_decay} also decays the latent residual, which is a part of the factors B here; DLR keeps it: \
             --weight-decay 0 trains as DLR does without decay",
            training.places.name("--weight-decay")
        ));
    }
    if let Some(loro) = training.recipe.optimizer.loro
        && loro.exact_every.get() > training.recipe.steps
        && training.is_rank_0()
    {
        output::warn(&format!(
            "{} {} is more than the {} of the run: no step is exact",
            training.places.name("--loro-every"),
            loro.exact_every,
            plural(training.recipe.steps, "step")
        ));
    }
    if training.target == ExecutionTarget::Cpu {
        require_memory(&model, program.program(), training)?;
    }
    let tracer = training.trace.as_ref().map(|settings| Tracer::new(settings, &program, &prices));
    let session = initialised_session(&model, program, (training, threads), group.clone())?;
    let mut trainer = Trainer::new(session, sampler, training.recipe.optimizer)?;
    let mut keeper = CheckpointKeeper::new(training, lock, &model);
    let validation = begin_run(&mut trainer, &mut keeper, &model, training, group.as_deref())?;
    let data_check = begin_data_check(&trainer, validation.as_ref(), training)?;
    let first_step = trainer.session().steps();
    let files = record_files(training, &keeper, first_step)?;
    let predicted = step_prediction(&plan, &prediction);
    let header = RunHeader {
        model: &model,
        plan: &plan,
        prediction: &prediction,
        gemms_are_priced,
        threads,
        training,
    };
    let resumed = keeper.resumed().map(|checkpoint| (checkpoint.step, checkpoint.path.as_path()));
    let evaluated = validation.as_ref().map(Validation::description);
    text.print(&header.text(trainer.sampler(), data_check.clause(), evaluated, resumed))?;
    let mut train_loop = TrainLoop {
        steps: training.recipe.steps,
        stop: signals.stop_in_order(),
        log: StepLog::new(training, files, predicted, text, (first_step, model.vocab)),
        tracer,
        validation,
        data_check,
        keeper,
        fault: None,
    };
    let ended = train_loop.run(&mut trainer);
    finish(ended, train_loop, &trainer, &header, text)
}

/// Brings a run to its first step: from its last checkpoint, or with initial weights. All processes agree that they
/// start at the same step with the same tokens and weights. Returns its validation, if it has one.
fn begin_run<'a>(
    trainer: &mut Trainer,
    keeper: &mut CheckpointKeeper,
    model: &Model,
    training: &'a TrainSettings,
    group: Option<&TcpProcessGroup>,
) -> CommandResult<Option<Validation<'a>>> {
    let recipe = &training.recipe;
    keeper.resume(trainer, recipe.steps)?;
    let weights_sha256 = match keeper.resumed() {
        None => {
            let _storage = StorageUse::begin(trainer.session().process_group().cloned());
            load_initial_weights(trainer, model, training)?
        }
        Some(_) => String::new(),
    };
    let is_rank_0 = training.is_rank_0();
    let settings = training.validation.as_ref();
    let validation = settings
        .map(|settings| Validation::new(settings, model, recipe, trainer, is_rank_0))
        .transpose()?;
    keeper.finish_best(trainer)?;
    if let Some(group) = group {
        let step = trainer.session().steps();
        let evaluated_sha256 = validation.as_ref().map_or(String::new(), Validation::tokens_sha256);
        let tokens_sha256 = trainer.cursor().tokens_sha256;
        let start = RunStart { step, tokens_sha256, evaluated_sha256, weights_sha256 };
        processes::require_same_start(group, start)?;
    }
    Ok(validation)
}

/// Begins the verification of the token files of a run.
fn begin_data_check(
    trainer: &Trainer,
    validation: Option<&Validation>,
    training: &TrainSettings,
) -> CommandResult<DataCheck> {
    let tokens = match training.tokens {
        TokenSource::BuiltIn => None,
        TokenSource::File(_) => Some(trainer.sampler().file()),
    };
    let evaluated = validation.map(Validation::file);
    let _storage = StorageUse::begin(trainer.session().process_group().cloned());
    DataCheck::begin(tokens, evaluated, training)
}

/// Opens the metrics file and the event file of a run that begins after `first_step` steps.
fn record_files(
    training: &TrainSettings,
    keeper: &CheckpointKeeper,
    first_step: u64,
) -> CommandResult<RecordFiles> {
    let folder = training.tensorboard.as_deref();
    if let Some(folder) = folder.filter(|_| !may_resume(training)) {
        EventFile::require_none(folder)?;
    }
    let metrics = training.metrics.as_deref();
    let metrics = metrics.map(|file| metrics_file(file, training, keeper)).transpose()?;
    let events = folder.map(|folder| EventFile::create(folder, first_step + 1)).transpose()?;
    Ok(RecordFiles { metrics, events })
}

/// Writes the trace and prints the report of a run that has ended, or adds the files that it wrote to its failure.
fn finish(
    ended: CommandResult<TrainEnd>,
    TrainLoop { log, tracer, validation, data_check, keeper, .. }: TrainLoop,
    trainer: &Trainer,
    header: &RunHeader,
    text: TextOutput,
) -> CommandResult<()> {
    let training = header.training;
    let end = match ended {
        Ok(end) => end,
        Err(failure) => {
            let trace = tracer.map(|tracer| tracer.write_after_failure(trainer));
            return Err(with_leftovers(failure, trace, &keeper, &log));
        }
    };
    data_check.warn_if_unfinished();
    let last_evaluation = validation.as_ref().and_then(Validation::last);
    // A trace that cannot be written does not cost the report.
    let traced = tracer.map_or(Ok(()), |tracer| tracer.write(trainer));
    let trace = training.trace.as_ref().filter(|_| traced.is_ok());
    let report = RunReport::new(header, trainer, log.history(), end)
        .with_evaluations(last_evaluation.map(|last| last.loss), trainer.evaluations().best_loss)
        .with_files(log.metrics_name(), trace.map(|trace| trace.file.as_path()))
        .with_checkpoints(
            keeper.resumed().map(|checkpoint| checkpoint.step),
            keeper.last().map(|CheckpointEntry { path, .. }| path.as_path()),
        );
    let report = match end {
        TrainEnd::StoppedEarly => report.with_early_stop(
            Validation::early_stop_sentence(trainer),
            keeper.best(trainer.evaluations().best_step),
        ),
        TrainEnd::Completed | TrainEnd::Stopped => report,
    };
    match text {
        TextOutput::Json => output::print_json(&report)?,
        _ => text.print(&report.page(Detail::Summary).text())?,
    }
    match end {
        TrainEnd::Completed | TrainEnd::StoppedEarly => traced,
        TrainEnd::Stopped => {
            let problems = traced.err().map_or(vec![], |failure| failure.problems);
            Err(Failure { problems, ..stopped(trainer, &keeper, training) })
        }
    }
}

/// Threads per device, with a warning if devices that share cores have more threads than there are cores.
///
/// # Errors
/// A process is gone or late.
fn threads_per_device(
    plan: &Plan,
    training: &TrainSettings,
    group: Option<&TcpProcessGroup>,
) -> CommandResult<u64> {
    let on_cpu = training.target == ExecutionTarget::Cpu;
    let devices = match (&training.process, group) {
        (Some(LaunchedProcess { launch, .. }), Some(group)) if on_cpu => {
            sharing_processes(group, launch)?
        }
        (Some(LaunchedProcess { launch, .. }), _) => launch.local_world_size,
        (None, _) => plan.mesh.devices(),
    };
    let cores = cores();
    let threads = training.threads.unwrap_or((cores / devices).max(1));
    if on_cpu && training.is_rank_0() && devices.saturating_mul(threads) > cores {
        let threads = devices.saturating_mul(threads);
        let (devices, cores) = (plural(devices, "device"), plural(cores, "core"));
        output::warn(&format!(
            "{threads} threads of {devices} share {cores}, so steps take longer than predicted"
        ));
    }
    Ok(threads)
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

/// A session on the devices of this process, with initial values of the parameters.
fn initialised_session(
    model: &Model,
    program: CheckedProgram,
    (training, threads): (&TrainSettings, u64),
    group: Option<Arc<TcpProcessGroup>>,
) -> CommandResult<Session> {
    let group = group.map(|group| group as Arc<dyn ProcessGroup>);
    let failure = |error| Failure::execution(&error);
    let mut session = session(model, program, (training, threads), group).map_err(failure)?;
    session.initialise(model, training.recipe.seed).map_err(failure)?;
    if training.trace.is_some() {
        session.record_instruction_spans();
    }
    Ok(session)
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
            let gemm_dtype = training.recipe.gemm_dtype;
            return CpuOptions { gemm_dtype, ..CpuOptions::new(threads) }
                .open(model, program, group);
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
    match keeper.resumed() {
        Some(checkpoint) => MetricsFile::resume(file, checkpoint.step),
        None if may_resume(training) => MetricsFile::restart(file),
        None => MetricsFile::create(file),
    }
}

/// Whether a run has `--resume`. Without a checkpoint it begins at its first step.
fn may_resume(training: &TrainSettings) -> bool {
    let resumes = |settings: &CheckpointSettings| settings.origin != RunOrigin::FirstStep;
    training.checkpoints.as_ref().is_some_and(resumes)
}

/// The failure of a run, with the files that the run has written.
fn with_leftovers(
    mut failure: Failure,
    trace: Option<CommandResult<Option<String>>>,
    keeper: &CheckpointKeeper,
    log: &StepLog,
) -> Failure {
    let (trace, trace_problems) = match trace.transpose() {
        Ok(trace) => (trace.flatten(), vec![]),
        Err(failure) => (None, failure.problems),
    };
    if let Some(problem) = failure.problems.first_mut() {
        if let (Some(file), Some(step)) = (log.metrics_name(), log.last_recorded()) {
            problem.causes.push(format!("the metrics until step {step} are in {file}"));
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
