//! The flags of `run`, and what they mean.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use clap::{Args, ValueEnum};
use narrows_planner::Request;
use narrows_runtime::Optimizer;

use crate::errors::{CommandResult, Failure, Problem};
use crate::input;
use crate::output;

use super::checkpoint::{CheckpointArgs, CheckpointSettings};
use super::data::same_file;
use super::gpu;
use super::launch::{LaunchArgs, LaunchedProcess};
use super::low::{OutputArgs, OutputFormat, RequestArgs};
use super::resolve::{self, ModelDefaults, OutputSettings, PlanFile};
use super::trace::{TraceArgs, TraceSettings};
use super::units;

/// What is planned for who does not say: small enough to learn something on a processor in minutes.
/// One device on all cores, because its threads read one memory, and a device for each core would add
/// collectives and move parameters about: on two cores its steps took 0.142 s at best, those of two
/// devices 0.189 s.
const DEFAULTS: ModelDefaults = ModelDefaults {
    model: Some("cola-tiny"),
    hardware: "cpu-local",
    devices: 1,
    global_batch: GLOBAL_BATCH,
    sequence_length: SEQUENCE_LENGTH,
};

/// Sequences of a step, rounded up to a multiple of the devices.
pub const GLOBAL_BATCH: u64 = 8;

/// Tokens of a sequence.
pub const SEQUENCE_LENGTH: u64 = 128;

/// Steps of a schedule, over those of the warm-up of who does not say.
const STEPS_PER_WARM_UP: u64 = 10;

/// Threads of a device that are allowed whatever the machine: a test may want some. Many more would only
/// wait for each other.
const THREADS_MAX: u64 = 64;

/// The longest warm-up of who does not say.
const WARM_UP_STEPS_MAX: u64 = 100;

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A plan file, or `-` [default: the fastest plan is searched]
    #[arg(value_name = "PLAN")]
    pub plan: Option<OsString>,
    /// Token file to train on, as `narrows data` makes [default: a book that comes with the program]
    #[arg(long, value_name = "FILE")]
    pub data: Option<OsString>,
    /// Optimizer steps, those before a checkpoint that is resumed included
    #[arg(long, value_name = "N", default_value = "200")]
    pub steps: NonZeroU64,
    /// Steps until the learning rate has fallen to its last [default: --steps]
    #[arg(long, value_name = "N")]
    pub decay_steps: Option<NonZeroU64>,
    /// Where weights begin and in which order sequences come
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// Write one JSON object a step to this file, or `-`
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<OsString>,
    /// Where a run is kept.
    #[command(flatten)]
    pub checkpoints: CheckpointArgs,
    /// What is traced.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// What executes the plan
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    /// Start every kernel by itself instead of capturing graphs; the results are the same bits (GPUs)
    #[arg(long)]
    pub eager: bool,
    /// Threads a device uses [default: the machine's cores, divided among the devices]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
    /// Largest learning rate
    #[arg(long, value_name = "RATE", default_value_t = 3e-3, value_parser = units::positive)]
    pub learning_rate: f64,
    /// Steps until the learning rate is at its largest; from there it falls to a tenth of that
    /// [default: a tenth of --decay-steps, at most 100]
    #[arg(long, value_name = "N")]
    pub warm_up_steps: Option<u64>,
    /// Decoupled weight decay of matrices
    #[arg(long, value_name = "LAMBDA", default_value_t = 0.1, value_parser = units::not_negative)]
    pub weight_decay: f64,
    /// Largest norm of all gradients together
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = units::positive)]
    pub clip_norm: f64,
    /// Who else runs it.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// What is planned.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Where the answer goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// What executes a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// Processors: devices are threads
    Cpu,
    /// NVIDIA GPUs
    Cuda,
    /// Nothing is computed: what each device would do is counted
    Null,
}

/// Where the tokens of a run come from.
#[derive(Debug)]
pub enum TokenSource {
    /// The text within the program, every byte a token.
    Shipped,
    /// A token file.
    File(PathBuf),
}

/// What a run does with a plan.
#[derive(Debug)]
pub enum RunTask {
    /// Counts what it would do.
    Count,
    /// Trains.
    Train(Box<TrainSettings>),
}

/// What a run's devices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionTarget {
    /// Threads of this process, or processes.
    Processors,
    /// GPUs, one a process.
    Gpus {
        /// Whether no graph is captured.
        eager: bool,
    },
}

/// Everything that training depends on, besides the plan.
#[derive(Debug)]
pub struct TrainSettings {
    /// What the devices are.
    pub on: ExecutionTarget,
    /// Where the tokens come from.
    pub tokens: TokenSource,
    /// Steps of the whole run.
    pub steps: u64,
    /// The seed of weights and of sequences.
    pub seed: u64,
    /// Where a line for each step goes.
    pub metrics: Option<OsString>,
    /// Threads of a device, if that was said.
    pub threads: Option<u64>,
    /// How weights change.
    pub optimizer: Optimizer,
    /// Where checkpoints go, if anywhere.
    pub checkpoints: Option<CheckpointSettings>,
    /// What is traced, if anything.
    pub tracing: Option<TraceSettings>,
    /// Which of many processes this is, if there are others.
    pub launched: Option<LaunchedProcess>,
}

impl TrainSettings {
    /// Whether this process speaks and writes: it does so for all, if there are others.
    pub fn leads(&self) -> bool {
        self.launched.as_ref().is_none_or(LaunchedProcess::leads)
    }

    /// The name of the process, for messages; empty when it is alone.
    pub fn process(&self) -> String {
        self.launched.as_ref().map_or(String::new(), LaunchedProcess::process)
    }
}

/// Which plan is run.
#[derive(Debug)]
pub enum PlanSelection {
    /// One that was read.
    File(Box<PlanFile>),
    /// The fastest.
    Search(Box<Request>),
}

/// Everything that `run` depends on.
#[derive(Debug)]
pub struct RunSettings {
    /// Which plan.
    pub subject: PlanSelection,
    /// What is done with it.
    pub task: RunTask,
    /// Where the answer goes.
    pub answer: OutputSettings,
}

/// What is asked of `run`.
pub fn run(args: &RunArgs) -> CommandResult<RunSettings> {
    let answer = resolve::answer(&args.output)?;
    let task = task(args)?;
    one_document_on_stdout(args, &answer)?;
    no_input_is_overwritten(args)?;
    let subject = match &args.plan {
        Some(argument) => {
            let mut file = resolve::plan_file(argument, &args.request.subject)?;
            resolve::replace(&mut file, &args.request)?;
            PlanSelection::File(Box::new(file))
        }
        None => {
            let processes = match &task {
                RunTask::Train(training) => training.launched.as_ref(),
                RunTask::Count => None,
            };
            let devices = processes.map_or(DEFAULTS.devices, |launched| launched.launch.world_size);
            let hardware = match &task {
                RunTask::Train(training) if training.on != ExecutionTarget::Processors => {
                    gpu::profile()
                }
                _ => DEFAULTS.hardware,
            };
            let defaults = ModelDefaults { devices, hardware, ..DEFAULTS };
            PlanSelection::Search(Box::new(resolve::request_with(&args.request, &defaults)?))
        }
    };
    Ok(RunSettings { subject, task, answer })
}

fn task(args: &RunArgs) -> CommandResult<RunTask> {
    match args.backend {
        BackendName::Cpu => training(args, ExecutionTarget::Processors)
            .map(|training| RunTask::Train(Box::new(training))),
        BackendName::Null => {
            let measured = [
                ("--metrics", args.metrics.is_some()),
                ("--data", args.data.is_some()),
                ("--trace", args.trace.trace.is_some()),
                ("--checkpoint-dir", args.checkpoints.checkpoint_dir.is_some()),
            ];
            match measured.into_iter().find(|(_, given)| *given) {
                None => Ok(RunTask::Count),
                Some((flag, _)) => {
                    let problem = "the null backend computes nothing: it reads no tokens and has \
                        nothing to measure or to keep";
                    Err(Failure::input(Problem::new(flag, problem).hint("--backend cpu")))
                }
            }
        }
        BackendName::Cuda => {
            gpu::admit()?;
            let on = ExecutionTarget::Gpus { eager: args.eager };
            training(args, on).map(|training| RunTask::Train(Box::new(training)))
        }
    }
}

fn training(args: &RunArgs, on: ExecutionTarget) -> CommandResult<TrainSettings> {
    let tokens = match &args.data {
        None => TokenSource::Shipped,
        Some(file) if input::is_stdin(file) => {
            let problem = "a token file is mapped into memory, and a stream cannot be";
            let hint = "the name of a file";
            return Err(Failure::input(Problem::new("--data", problem).hint(hint)));
        }
        Some(file) => TokenSource::File(file.into()),
    };
    let threads = args.threads.map(NonZeroU64::get);
    for (flag, given, on_gpus) in
        [("--threads", threads.is_some(), false), ("--eager", args.eager, true)]
    {
        if given && on_gpus != (on != ExecutionTarget::Processors) {
            let (backend, other) = if on_gpus { ("processors", "cuda") } else { ("GPUs", "cpu") };
            let problem = format!("says nothing about {backend}");
            let hint = format!("without it, or --backend {other}");
            return Err(Failure::input(Problem::new(flag, problem).hint(hint)));
        }
    }
    if let Some(threads) = threads.filter(|threads| *threads > cores().max(THREADS_MAX)) {
        let problem =
            format!("{threads} threads of each device would take turns on {} cores", cores());
        let hint = "as many as there are cores, divided among the devices";
        return Err(Failure::input(Problem::new("--threads", problem).hint(hint)));
    }
    let steps = args.steps.get();
    let decay = args.decay_steps.map_or(steps, NonZeroU64::get);
    let warm_up = (decay / STEPS_PER_WARM_UP).clamp(1, WARM_UP_STEPS_MAX);
    let schedule = (args.warm_up_steps.unwrap_or(warm_up), decay);
    let launched = args.launch.resolve()?;
    // One writes for all.
    let leads = launched.as_ref().is_none_or(LaunchedProcess::leads);
    let optimizer = Optimizer {
        weight_decay: args.weight_decay,
        clip_norm: args.clip_norm,
        ..Optimizer::new(args.learning_rate, schedule.0, schedule.1)
    };
    Ok(TrainSettings {
        on,
        tokens,
        steps,
        seed: args.seed,
        metrics: args.metrics.clone().filter(|_| leads),
        threads,
        optimizer,
        checkpoints: args.checkpoints.resolve(),
        tracing: args.trace.resolve(steps)?.filter(|_| leads),
        launched,
    })
}

fn one_document_on_stdout(args: &RunArgs, answer: &OutputSettings) -> CommandResult<()> {
    if !args.metrics.as_deref().is_some_and(output::is_stdout) {
        return Ok(());
    }
    let other = match answer.format {
        OutputFormat::Json => "JSON answer",
        OutputFormat::Text if answer.plan_on_stdout() => "plan",
        OutputFormat::Text => return Ok(()),
    };
    let problem = format!("the metrics and the {other} would both go to standard output");
    Err(Failure::input(Problem::new("--metrics", problem).hint("the name of a file")))
}

/// A token file that is cut off while it is mapped would end the program.
fn no_input_is_overwritten(args: &RunArgs) -> CommandResult<()> {
    let subject = &args.request.subject;
    let inputs =
        || args.data.iter().chain(&args.plan).chain(&subject.model).chain(&subject.hardware);
    let outputs = [
        ("--metrics", &args.metrics),
        ("--output", &args.output.output),
        ("--trace", &args.trace.trace),
    ];
    for (place, (flag, output)) in outputs.iter().enumerate() {
        let Some(output) = output else { continue };
        let before = outputs[..place].iter().find(|(_, other)| {
            other.as_ref().is_some_and(|other| {
                let device = Path::new(other).exists() && !Path::new(other).is_file();
                let same = other == output || same_file(other, Path::new(output));
                same && !device && !output::is_stdout(other)
            })
        });
        if let Some((other, _)) = before {
            let problem = format!("`{}` is what {other} writes to", output.display());
            return Err(Failure::input(Problem::new(*flag, problem).hint("another name")));
        }
        if let Some(input) = inputs().find(|input| same_file(input, Path::new(output))) {
            let problem = format!("`{}` is an input too", input.display());
            return Err(Failure::input(Problem::new(*flag, problem).hint("another name")));
        }
    }
    Ok(())
}

/// The cores that this program may use.
pub fn cores() -> u64 {
    available_parallelism().map_or(1, |cores| cores.get() as u64)
}
