//! `narrows run`: trains a model under a plan, or counts what the plan does.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use narrows_plan::lower::lower;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, CheckedProgram, Plan, Precision};
use narrows_planner::Request;
use narrows_planner::predict::{Prediction, predict_program};
use narrows_runtime::cpu::Session;
use narrows_runtime::data::{Sampler, Sampling, TokenFile};
use narrows_runtime::train::{Ended, Next, Predicted, Record, TrainError, Trained};
use narrows_runtime::{Backend, DeviceId, NullBackend, Trainer};

use super::cost::{Priced, price};
use crate::args::low::Format;
use crate::args::resolve::{Answer, PlanFile};
use crate::args::run::{Run, RunArgs, Subject, Task, Tokens, Training, cores, run as resolve};
use crate::errors::{Ending, Failure, Outcome, Problem};
use crate::output::{self, Lines};
use crate::report::page::plural;
use crate::report::run::{Beginning, Counts, Course, Summary, progress_line};
use crate::report::{infeasible, proof};

/// The text that a run without a token file reads.
const SHIPPED: &[u8] = include_bytes!("../../data/moby-dick.txt");

/// What reports call it.
const SHIPPED_NAME: &str = "moby-dick.txt (within the program)";

/// How often a run in text form says where it is.
const LINES_OF_PROGRESS: u64 = 10;

/// A plan that is about to be run.
struct Planned {
    model: Model,
    plan: Plan,
    program: CheckedProgram,
    prediction: Prediction,
}

/// Where the words for people go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Voice {
    Stdout,
    /// Standard output belongs to a plan or to metrics.
    Stderr,
    /// One JSON document is all that is said.
    Silent,
}

/// Plans, unless a plan was given, and runs the plan.
pub fn run(args: &RunArgs) -> Outcome<()> {
    let Run { subject, task, answer } = resolve(args)?;
    let planned = match subject {
        Subject::File(file) => read(*file, &task, args)?,
        Subject::Search(request) => searched(&request, &task, &answer)?,
    };
    if let Some(file) = &answer.output {
        output::write_plan(file, &planned.plan)?;
    }
    match task {
        Task::Count => count(&planned, &answer),
        Task::Train(training) => train(planned, &training, &answer),
    }
}

fn read(file: PlanFile, task: &Task, args: &RunArgs) -> Outcome<Planned> {
    if matches!(task, Task::Train(_)) && file.plan.precision != Precision::Full32 {
        let problem = "the plan computes in mixed bf16, and processors compute in f32 alone";
        let problem = Problem { field: "precision".into(), ..Problem::new(&file.name, problem) };
        let hint = "a plan that `narrows plan --hardware cpu-local` makes";
        return Err(Failure::input(problem.hint(hint)));
    }
    let Priced { plan, resolved, prediction } = price(&file, args.request.executor)?;
    let program = CheckedProgram::check(lower(&resolved))
        .map_err(|errors| Failure::failed(proof::problems(&file.name, &errors)))?;
    Ok(Planned { model: file.model, plan, program, prediction })
}

fn searched(request: &Request, task: &Task, answer: &Answer) -> Outcome<Planned> {
    let Request { model, profile, executor, .. } = request;
    if matches!(task, Task::Train(_)) && profile.precision() != Precision::Full32 {
        let name = profile.name();
        let problem =
            format!("plans for `{name}` compute in mixed bf16, and processors in f32 alone");
        let problem = Problem::new("--hardware", problem).hint("--hardware cpu-local");
        return Err(Failure::input(problem));
    }
    let found = super::searched(request, answer.format);
    let Some(fitted) = found.best else {
        return Err(infeasible::failure(request, &found.report));
    };
    let resolved =
        fitted.plan.resolve(model).map_err(|defects| Failure::file("the plan found", defects))?;
    let prediction = predict_program(model, profile, *executor, &resolved, &fitted.program);
    let (plan, program) = (fitted.plan, fitted.program);
    Ok(Planned { model: model.clone(), plan, program, prediction })
}

fn count(planned: &Planned, answer: &Answer) -> Outcome<()> {
    let mut backend = NullBackend;
    let report = backend.run_step(&planned.program).map_err(|error| Failure::execution(&error))?;
    let counts = Counts::of(backend.name(), &planned.model, &report);
    match voice(answer, None) {
        Voice::Silent => output::print_json(&counts),
        voice => voice.say(&counts.text()),
    }
}

fn train(planned: Planned, training: &Training, answer: &Answer) -> Outcome<()> {
    let Planned { model, plan, program, prediction } = planned;
    let mesh = plan.mesh;
    let devices = mesh.devices();
    let threads = training.threads.unwrap_or((cores() / devices).max(1));
    warn_of_cores(devices, threads);
    let sampler = sampler(&model, &plan, training)?;
    let voice = voice(answer, training.metrics.as_deref());
    let mut metrics = training.metrics.as_deref().map(Lines::create).transpose()?;
    let mut session = Session::new(&model, program, usize::try_from(threads).unwrap_or(usize::MAX))
        .map_err(|error| Failure::execution(&error))?;
    session.initialise(&model, training.seed);
    let stage_bytes = &prediction.peak_memory_bytes;
    let allocated = (0..devices).map(|id| Bytes(stage_bytes[DeviceId(id).stage(&mesh)])).collect();
    let predicted = Predicted { step_time_s: prediction.step_time_s, allocated };
    let beginning =
        Beginning { model: &model, plan: &plan, prediction: &prediction, threads, training };
    voice.say(&beginning.text(&sampler))?;
    let mut trainer = Trainer::new(session, sampler, training.optimizer)?;
    let stop = stop_on_signals();
    let progress = progress(training.steps, voice);
    let every = (training.steps / LINES_OF_PROGRESS).max(1);
    let mut course = Course::default();
    let watch = |_: &Trainer, trained: &Trained| {
        if let Some(lines) = &mut metrics {
            lines.write(&Record::new(trained, Some(&predicted)))?;
        }
        course.add(trained);
        progress.set_message(format!("loss {:.4}", trained.loss));
        progress.inc(1);
        if trained.step == 1 || trained.step.is_multiple_of(every) {
            let line = progress_line(trained, training.steps);
            progress.suspend(|| voice.say(&line))?;
        }
        let next = if stop.load(Ordering::Relaxed) { Next::Stop } else { Next::Continue };
        Ok::<_, Failure>(next)
    };
    let ended = trainer.train(training.steps, watch);
    progress.finish_and_clear();
    let ended = ended.map_err(|failure| with_what_is_kept(failure, metrics.as_ref(), &course))?;
    let summary = Summary::of(&beginning, &trainer, &course, ended, metrics.as_ref());
    match voice {
        Voice::Silent => output::print_json(&summary)?,
        voice => voice.say(&summary.text())?,
    }
    if ended == Ended::Stopped {
        let (made, asked) = (course.steps(), training.steps);
        output::tell(&format!("stopped after step {made} of {asked}, as asked\n"));
        return Err(Failure { ending: Ending::Stopped, problems: vec![] });
    }
    Ok(())
}

fn sampler(model: &Model, plan: &Plan, training: &Training) -> Outcome<Sampler> {
    let file = match &training.tokens {
        Tokens::Shipped => TokenFile::from_text(Path::new(SHIPPED_NAME), SHIPPED),
        Tokens::File(path) => TokenFile::open(path),
    }
    .map_err(Failure::token_file)?;
    let sampling = Sampling {
        sequence_length: plan.workload.sequence_length,
        vocabulary: u32::try_from(model.vocab).unwrap_or(u32::MAX),
        seed: training.seed,
    };
    Sampler::new(Arc::new(file), sampling).map_err(|error| TrainError::from(error).into())
}

/// Says what is left of a run that ended in an error.
fn with_what_is_kept(mut failure: Failure, metrics: Option<&Lines>, course: &Course) -> Failure {
    if let (Some(lines), Some(problem)) = (metrics, failure.problems.first_mut()) {
        let (steps, file) = (plural(course.steps(), "step"), lines.name());
        problem.because.push(format!("the metrics of the {steps} before it are in {file}"));
    }
    failure
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
            std::process::exit(super::STOPPED.into());
        }
    };
    if let Err(error) = ctrlc::set_handler(handler) {
        output::warn(&format!("Ctrl-C will not wait for the end of a step: {error}"));
    }
    stop
}

fn voice(answer: &Answer, metrics: Option<&std::ffi::OsStr>) -> Voice {
    match answer.format {
        Format::Json => Voice::Silent,
        Format::Text if answer.plan_on_stdout() || metrics.is_some_and(output::is_stdout) => {
            Voice::Stderr
        }
        Format::Text => Voice::Stdout,
    }
}

impl Voice {
    fn say(self, text: &str) -> Outcome<()> {
        match self {
            Voice::Stdout => output::print(text)?,
            Voice::Stderr => output::tell(text),
            Voice::Silent => {}
        }
        Ok(())
    }
}

/// A bar, drawn on standard error, and only when that is a terminal.
fn progress(steps: u64, voice: Voice) -> ProgressBar {
    if voice == Voice::Silent {
        return ProgressBar::hidden();
    }
    let progress = ProgressBar::new(steps);
    let template = "{spinner} {wide_bar} step {pos} of {len}, {msg}, {eta} to go";
    if let Ok(style) = ProgressStyle::with_template(template) {
        progress.set_style(style);
    }
    progress.enable_steady_tick(super::TICK);
    progress
}
