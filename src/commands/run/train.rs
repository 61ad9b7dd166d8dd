//! Trains under a plan, and says how it goes.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use narrows_cluster::TcpProcessGroup;
use narrows_cpu::{GatheredTensors, memory_lower_bound, node_memory_lower_bound};
use narrows_plan::model::Model;
use narrows_plan::program::Program;
use narrows_plan::{Bytes, CheckedProgram, Plan};
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::Session;
use narrows_runtime::train::{
    MetricsRecord, StepPrediction, TrainControl, TrainEnd, TrainError, TrainedStep,
};
use narrows_runtime::{DeviceId, RunError, Trainer};

use super::checkpoints::CheckpointKeeper;
use super::processes;
use super::trace::Tracer;
use super::{PlannedRun, TextOutput, voice};
use crate::args::gpu;
use crate::args::resolve::OutputSettings;
use crate::args::run::{ExecutionTarget, TokenSource, TrainSettings, cores};
use crate::commands::{STOPPED, TICK};
use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::lines::LineFile;
use crate::memory;
use crate::output;
use crate::processes::part;
use crate::report::page::plural;
use crate::report::parts;
use crate::report::run::{RunHeader, RunHistory, RunReport, progress_line};

/// The text that a run without a token file reads.
const SHIPPED: &[u8] = include_bytes!("../../../data/moby-dick.txt");

/// What reports call it.
const SHIPPED_NAME: &str = "moby-dick.txt (within the program)";

/// How often a run in text form says where it is.
const LINES_OF_PROGRESS: u64 = 10;

/// Trains the model of a plan. Where this is one process of many, all of them end with it.
pub fn train(
    planned: PlannedRun,
    training: &TrainSettings,
    answer: &OutputSettings,
) -> CommandResult<()> {
    let cluster = processes::join(&planned, training)?;
    let trained = train_in(cluster.clone(), planned, training, answer);
    match cluster {
        None => trained,
        Some(cluster) => part(&cluster, trained, &training.process()),
    }
}

fn train_in(
    cluster: Option<Arc<TcpProcessGroup>>,
    planned: PlannedRun,
    training: &TrainSettings,
    answer: &OutputSettings,
) -> CommandResult<()> {
    let PlannedRun { model, plan, program, prediction, prices } = planned;
    let mesh = plan.mesh;
    let devices = mesh.devices();
    let launch = training.launched.as_ref().map(|launched| &launched.launch);
    let devices_here = launch.map_or(devices, |launch| launch.local_world_size);
    let threads = training.threads.unwrap_or((cores() / devices_here).max(1));
    if training.leads() && training.on == ExecutionTarget::Processors {
        warn_of_cores(devices_here, threads);
    }
    let sampler = sampler(&model, &plan, training)?;
    let voice = voice(answer, training.metrics.as_deref(), training.leads());
    if training.on == ExecutionTarget::Processors {
        enough_memory(&model, program.program(), training)?;
    }
    let asked = training.tracing.as_ref();
    let mut tracer = asked.map(|asked| Tracer::new(asked, &program, &prices));
    let mut session = session(
        &model,
        program,
        (training, threads),
        cluster.clone().map(|cluster| cluster as Arc<dyn ProcessGroup>),
    )
    .map_err(|error| Failure::execution(&error))?;
    session.initialise(&model, training.seed).map_err(|error| Failure::execution(&error))?;
    if tracer.is_some() {
        session.record_instruction_spans();
    }
    let mut trainer = Trainer::new(session, sampler, training.optimizer)?;
    let mut keeper = CheckpointKeeper::new(training.checkpoints.as_ref(), &model, training.seed);
    keeper.resume(&mut trainer, training.steps)?;
    let begun_at = trainer.session().steps();
    if let Some(cluster) = &cluster {
        processes::all_stand_at(cluster, begun_at, trainer.cursor().tokens_sha256)?;
    }
    let mut metrics = training.metrics.as_deref().map(|file| lines(file, &keeper)).transpose()?;
    let stage_bytes = &prediction.peak_memory_bytes;
    let allocated = (0..devices).map(|id| Bytes(stage_bytes[DeviceId(id).stage(&mesh)])).collect();
    let breakdown_s = parts::by_name(&prediction.breakdown_s);
    let predicted = StepPrediction { step_time_s: prediction.step_time_s, breakdown_s, allocated };
    let beginning =
        RunHeader { model: &model, plan: &plan, prediction: &prediction, threads, training };
    voice.say(&beginning.text(trainer.sampler(), keeper.resumed()))?;
    let stop = stop_on_signals();
    let progress = progress(begun_at, training.steps, voice);
    let every = (training.steps / LINES_OF_PROGRESS).max(1);
    let mut course = RunHistory::default();
    let watch = |trainer: &Trainer, trained: &TrainedStep| {
        if let Some(lines) = &mut metrics {
            lines.write(&MetricsRecord::new(trained, Some(&predicted)))?;
        }
        course.add(trained);
        if let Some(tracer) = &mut tracer {
            tracer.after(trainer, trained);
        }
        progress.set_message(format!("loss {:.4}", trained.loss));
        progress.inc(1);
        if trained.step == begun_at + 1 || trained.step.is_multiple_of(every) {
            let line = progress_line(trained, training.steps);
            progress.suspend(|| voice.say(&line))?;
        }
        // Processes save together, so they must agree first whether they go on.
        let stop = trainer
            .session()
            .any_process(stop.load(Ordering::Relaxed))
            .map_err(TrainError::from)?;
        if stop {
            return Ok(TrainControl::Stop);
        }
        keeper.on_the_way(trainer, training.steps)?;
        Ok::<_, Failure>(TrainControl::Continue)
    };
    let ended = trainer.train(training.steps, watch);
    progress.finish_and_clear();
    let ended = ended.and_then(|ended| keeper.save(&trainer).map(|()| ended));
    let ended = match ended {
        Ok(ended) => ended,
        Err(failure) => {
            let traced = tracer.map(|tracer| tracer.rescue(&trainer));
            return Err(with_what_is_kept(failure, metrics.as_ref(), traced, &keeper, &course));
        }
    };
    let summary = RunReport::of(&beginning, &trainer, &course, ended).with_files(
        metrics.as_ref(),
        keeper.resumed(),
        keeper.last(),
        asked,
    );
    if let Some(tracer) = tracer {
        tracer.finish(&trainer)?;
    }
    match voice {
        TextOutput::Silent => output::print_json(&summary)?,
        voice => voice.say(&summary.text())?,
    }
    if ended == TrainEnd::Stopped {
        let (made, asked) = (trainer.session().steps(), training.steps);
        let way_on = keeper.way_on().map_or(String::new(), |way_on| format!("; {way_on}"));
        if training.leads() {
            output::tell(&format!("stopped after step {made} of {asked}, as asked{way_on}\n"));
        }
        return Err(Failure { ending: ExitStatus::Stopped, problems: vec![] });
    }
    Ok(())
}

/// The memory of the devices of this process.
fn session(
    model: &Model,
    program: CheckedProgram,
    (training, threads): (&TrainSettings, u64),
    cluster: Option<Arc<dyn ProcessGroup>>,
) -> Result<Session, RunError> {
    let eager = match training.on {
        ExecutionTarget::Gpus { eager } => eager,
        ExecutionTarget::Processors => {
            let threads = usize::try_from(threads).unwrap_or(usize::MAX);
            return match cluster {
                None => narrows_cpu::session(model, program, threads),
                Some(cluster) => narrows_cpu::session_of_process(model, program, threads, cluster),
            };
        }
    };
    let options = gpu::options(training.launched.as_ref(), eager);
    narrows_cuda::session(model, program, &options, cluster, &mut |warning| output::warn(warning))
}

/// A file of metrics: a new one, unless the run goes on.
fn lines(file: &OsStr, keeper: &CheckpointKeeper) -> CommandResult<LineFile> {
    match keeper.resumed() {
        Some(kept) => LineFile::resume(file, kept.step),
        None => LineFile::create(file),
    }
}

fn sampler(model: &Model, plan: &Plan, training: &TrainSettings) -> CommandResult<Sampler> {
    let file = match &training.tokens {
        TokenSource::Shipped => TokenFile::from_text(Path::new(SHIPPED_NAME), SHIPPED),
        TokenSource::File(path) => TokenFile::open(path),
    }
    .map_err(Failure::token_file)?;
    let sampling = SamplerConfig {
        sequence_length: plan.workload.sequence_length,
        vocabulary: u32::try_from(model.vocab).unwrap_or(u32::MAX),
        seed: training.seed,
    };
    Sampler::new(Arc::new(file), sampling).map_err(|error| TrainError::from(error).into())
}

/// Says what is left of a run that ended in an error.
fn with_what_is_kept(
    mut failure: Failure,
    metrics: Option<&LineFile>,
    traced: Option<CommandResult<Option<String>>>,
    keeper: &CheckpointKeeper,
    course: &RunHistory,
) -> Failure {
    let (traced, untraced) = match traced.transpose() {
        Ok(traced) => (traced.flatten(), vec![]),
        Err(failure) => (None, failure.problems),
    };
    if let Some(problem) = failure.problems.first_mut() {
        if let Some(lines) = metrics {
            let (steps, file) = (plural(course.steps(), "step"), lines.name());
            problem.because.push(format!("the metrics of the {steps} before it are in {file}"));
        }
        problem.because.extend(traced);
        problem.because.extend(keeper.way_on());
    }
    failure.problems.extend(untraced);
    failure
}

/// A machine out of memory ends programs without a word, so it is asked first.
fn enough_memory(model: &Model, program: &Program, training: &TrainSettings) -> CommandResult<()> {
    let gathered = match training.checkpoints {
        Some(_) => GatheredTensors::WeightsAndMoments,
        None => GatheredTensors::Weights,
    };
    let needed = match &training.launched {
        None => memory_lower_bound(model, program, gathered),
        Some(launched) => {
            node_memory_lower_bound(model, program, gathered, launched.launch.node_ranks())
        }
    };
    let Some(available) = memory::available().filter(|available| needed > *available) else {
        return Ok(());
    };
    let largest = program.stages.iter().map(|stage| stage.arena.0).max().unwrap_or(0);
    let problem = format!("training {} takes {needed}, and {available} are free", model.name);
    let buffers = match program.context.mesh.devices() {
        1 => format!("because its buffers take {}", Bytes(largest)),
        devices => {
            let largest = Bytes(largest);
            format!("because the buffers of each of {devices} devices take up to {largest}")
        }
    };
    let problem = Problem::new("memory", problem)
        .because([buffers])
        .hint("a smaller model, --global-batch, --micro-batch or --sequence-length")
        .hint("--backend null counts what the devices would do, and allocates nothing");
    Err(Failure::failed(vec![problem]))
}

fn warn_of_cores(devices: u64, threads: u64) {
    let cores = cores();
    if devices.saturating_mul(threads) <= cores {
        return;
    }
    let each = if threads == 1 { String::new() } else { format!(" of {threads} threads") };
    output::warn(&format!(
        "{devices} devices{each} share {cores} cores: they take turns, and steps take longer than \
         predicted"
    ));
}

/// Whether somebody wants the run to end. It ends after its step; who asks twice does not wait.
fn stop_on_signals() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&stop);
    let handler = move || {
        if asked.swap(true, Ordering::Relaxed) {
            // A checkpoint that is being written has no name yet, so the folder stays whole.
            std::process::exit(STOPPED.into());
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        output::warn(&format!("Ctrl-C will not wait for the end of a step: {error}"));
    }
    stop
}

/// A bar, drawn on standard error, and only when that is a terminal.
fn progress(begun_at: u64, steps: u64, voice: TextOutput) -> ProgressBar {
    if matches!(voice, TextOutput::Silent | TextOutput::Mute) {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(steps).with_position(begun_at);
    // The steps before were not made in this run's time.
    progress.reset_eta();
    let template = "{spinner} {wide_bar} step {pos} of {len}, {msg}, {eta} to go";
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    progress.enable_steady_tick(TICK);
    progress
}
