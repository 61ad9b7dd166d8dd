//! Flags of `run`.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use narrows_runtime::Optimizer;

use crate::cluster::LaunchedProcess;
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem};
use crate::host::cores;
use crate::{gpu, input, output};

use super::checkpoint::{CheckpointArgs, CheckpointSettings};
use super::data::{is_same_file, output_is_input, token_stream};
use super::launch::LaunchArgs;
use super::output::{OutputArgs, OutputFormat, OutputSettings};
use super::plan::PlanSelection;
use super::plan_file::PlanFile;
use super::request::RequestArgs;
use super::trace::{TraceArgs, TraceSettings};
use super::units;

/// Limit of the threads per device on machines with fewer cores, so that tests can use several per core.
const THREADS_MAX: u64 = 64;

/// Steps of the learning-rate schedule per step of the default warm-up.
const STEPS_PER_WARM_UP: u64 = 10;

/// Longest default warm-up.
const WARM_UP_STEPS_MAX: u64 = 100;

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A plan file, or `-` [default: the fastest plan is searched]
    #[arg(value_name = "PLAN")]
    pub plan: Option<OsString>,
    /// Token file to train on, as `narrows data` makes it [default: a built-in book]
    #[arg(long, value_name = "FILE")]
    pub data: Option<OsString>,
    /// Optimizer steps, including those before a checkpoint that is resumed
    #[arg(long, value_name = "N", default_value = "200")]
    pub steps: NonZeroU64,
    /// Steps until the learning rate has decayed to its minimum [default: --steps]
    #[arg(long, value_name = "N")]
    pub decay_steps: Option<NonZeroU64>,
    /// Seed of the initial weights and of the order of sequences
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// Write one JSON object per step to this file, or `-`
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<OsString>,
    /// Checkpoints.
    #[command(flatten)]
    pub checkpoints: CheckpointArgs,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Backend that executes the plan
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu)]
    pub backend: BackendArg,
    /// GPUs: launch kernels one by one instead of capturing graphs; the results are bitwise equal
    #[arg(long)]
    pub eager: bool,
    /// Threads per device [default: the cores of the machine, divided among its devices]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
    /// Peak learning rate
    #[arg(long, value_name = "RATE", default_value_t = 3e-3, value_parser = units::positive)]
    pub learning_rate: f64,
    /// Steps until the learning rate peaks; from there it decays to a tenth of the peak
    /// [default: a tenth of --decay-steps, at most 100]
    #[arg(long, value_name = "N")]
    pub warm_up_steps: Option<u64>,
    /// Decoupled weight decay of matrices
    #[arg(long, value_name = "LAMBDA", default_value_t = 0.1, value_parser = units::non_negative)]
    pub weight_decay: f64,
    /// Global norm to which gradients are clipped
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = units::positive)]
    pub clip_norm: f64,
    /// Other processes.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Planning request.
    #[command(flatten)]
    pub request: RequestArgs,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `--backend` of `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// CPU: each device is a group of threads
    Cpu,
    /// NVIDIA GPUs
    Cuda,
    /// None: counts what each device would do
    Null,
}

/// Source of the tokens of a run.
#[derive(Debug)]
pub enum TokenSource {
    /// The built-in text; every byte is a token.
    BuiltIn,
    /// A token file.
    File(PathBuf),
}

/// Task of a run.
#[derive(Debug)]
pub enum RunTask {
    /// Counts instructions and bytes without executing them.
    Count,
    /// Trains.
    Train(Box<TrainSettings>),
}

/// Backend of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionTarget {
    /// On threads of this process, or one process per device.
    Cpu,
    /// On GPUs, one per process.
    Gpus {
        /// Whether kernels are launched one by one.
        eager: bool,
    },
}

/// Settings of training, besides the plan.
#[derive(Debug)]
pub struct TrainSettings {
    /// The backend.
    pub target: ExecutionTarget,
    /// Source of the tokens.
    pub tokens: TokenSource,
    /// Steps of the whole run.
    pub steps: u64,
    /// Seed of the initial weights and of the order of sequences.
    pub seed: u64,
    /// The metrics file.
    pub metrics: Option<OsString>,
    /// Threads per device, if given.
    pub threads: Option<u64>,
    /// The optimizer and its schedule.
    pub optimizer: Optimizer,
    /// Checkpoints, if any.
    pub checkpoints: Option<CheckpointSettings>,
    /// The trace, if any.
    pub trace: Option<TraceSettings>,
    /// Rank and rendezvous of this process, if there are several.
    pub process: Option<LaunchedProcess>,
}

/// Settings of `run`.
#[derive(Debug)]
pub struct RunSettings {
    /// The plan.
    pub selection: PlanSelection,
    /// Whether `--hardware` was given.
    pub hardware_is_explicit: bool,
    /// Task of the run.
    pub task: RunTask,
    /// Output settings.
    pub output: OutputSettings,
}

impl TrainSettings {
    /// Whether this process prints and writes files for all.
    pub fn is_rank_0(&self) -> bool {
        self.process.as_ref().is_none_or(LaunchedProcess::is_rank_0)
    }
}

impl RunTask {
    /// Whether this process prints and writes files for all.
    pub fn is_rank_0(&self) -> bool {
        match self {
            RunTask::Count => true,
            RunTask::Train(training) => training.is_rank_0(),
        }
    }

    /// The settings of training on processors, if that is the task.
    pub fn on_cpu(&self) -> Option<&TrainSettings> {
        match self {
            RunTask::Train(training) if training.target == ExecutionTarget::Cpu => Some(training),
            _ => None,
        }
    }
}

impl RunArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, flags that contradict each other, and a missing GPU.
    pub fn resolve(&self) -> CommandResult<RunSettings> {
        let output = self.output.resolve()?;
        let task = self.task()?;
        self.reject_two_documents_on_stdout(&output)?;
        self.reject_overwritten_inputs()?;
        let selection = match &self.plan {
            Some(argument) => {
                let mut file = PlanFile::read(argument, &self.request.model)?;
                file.override_sizes(&self.request)?;
                file.override_executor(&self.request);
                PlanSelection::File(Box::new(file))
            }
            None if self.request.minimises_cost() => {
                let problem = Problem::new("--objective", "a run uses all of its devices");
                let hint = "`narrows plan --objective cost --output FILE`, then `narrows run FILE`";
                return Err(Failure::input(problem.hint(hint)));
            }
            None => {
                let defaults = match &task {
                    RunTask::Count => RequestDefaults::RUN,
                    RunTask::Train(training) => request_defaults(training),
                };
                PlanSelection::Search(Box::new(self.request.resolve(&defaults)?))
            }
        };
        let hardware_is_explicit = self.request.model.hardware.is_some();
        Ok(RunSettings { selection, hardware_is_explicit, task, output })
    }

    fn task(&self) -> CommandResult<RunTask> {
        let target = match self.backend {
            BackendArg::Cpu => ExecutionTarget::Cpu,
            BackendArg::Cuda => {
                gpu::require_cuda()?;
                ExecutionTarget::Gpus { eager: self.eager }
            }
            BackendArg::Null => {
                self.reject_flags_of_training()?;
                return Ok(RunTask::Count);
            }
        };
        Ok(RunTask::Train(Box::new(self.training(target)?)))
    }

    fn reject_flags_of_training(&self) -> CommandResult<()> {
        let flags = [
            ("--metrics", self.metrics.is_some()),
            ("--data", self.data.is_some()),
            ("--trace", self.trace.trace.is_some()),
            ("--checkpoint-dir", self.checkpoints.checkpoint_dir.is_some()),
        ];
        match flags.into_iter().find(|(_, is_set)| *is_set) {
            None => Ok(()),
            Some((flag, _)) => {
                let message = "the null backend computes nothing: it reads no tokens, and has \
                    nothing to measure or to save";
                Err(Failure::input(Problem::new(flag, message).hint("--backend cpu")))
            }
        }
    }

    fn training(&self, target: ExecutionTarget) -> CommandResult<TrainSettings> {
        let tokens = match &self.data {
            None => TokenSource::BuiltIn,
            Some(file) if input::is_stdin(file) => {
                return Err(Failure::input(token_stream("--data")));
            }
            Some(file) => TokenSource::File(file.into()),
        };
        let threads = self.threads.map(NonZeroU64::get);
        self.reject_flags_of_other_targets(target)?;
        if let Some(threads) = threads.filter(|threads| *threads > cores().max(THREADS_MAX)) {
            let message =
                format!("{threads} threads per device are too many for {} cores", cores());
            let hint = "the number of cores, divided among the devices";
            return Err(Failure::input(Problem::new("--threads", message).hint(hint)));
        }
        let steps = self.steps.get();
        let decay_steps = self.decay_steps.map_or(steps, NonZeroU64::get);
        let warm_up_steps = self
            .warm_up_steps
            .unwrap_or((decay_steps / STEPS_PER_WARM_UP).clamp(1, WARM_UP_STEPS_MAX));
        let process = self.launch.resolve()?;
        // One process writes for all.
        let is_rank_0 = process.as_ref().is_none_or(LaunchedProcess::is_rank_0);
        let optimizer = Optimizer {
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm,
            ..Optimizer::new(self.learning_rate, warm_up_steps, decay_steps)
        };
        Ok(TrainSettings {
            target,
            tokens,
            steps,
            seed: self.seed,
            metrics: self.metrics.clone().filter(|_| is_rank_0),
            threads,
            optimizer,
            checkpoints: self.checkpoints.resolve(),
            trace: self.trace.resolve(steps)?.filter(|_| is_rank_0),
            process,
        })
    }

    fn reject_flags_of_other_targets(&self, target: ExecutionTarget) -> CommandResult<()> {
        let on_cpu = target == ExecutionTarget::Cpu;
        for (flag, is_set, backend, applies) in [
            ("--threads", self.threads.is_some(), "cpu", on_cpu),
            ("--eager", self.eager, "cuda", !on_cpu),
        ] {
            if is_set && !applies {
                let problem = Problem::new(flag, format!("applies to --backend {backend} only"));
                let hint = format!("omit it, or use --backend {backend}");
                return Err(Failure::input(problem.hint(hint)));
            }
        }
        Ok(())
    }

    fn reject_two_documents_on_stdout(&self, output: &OutputSettings) -> CommandResult<()> {
        if !self.metrics.as_deref().is_some_and(output::is_stdout) {
            return Ok(());
        }
        let other = match output.format {
            OutputFormat::Json => "JSON answer",
            OutputFormat::Text if output.plan_on_stdout() => "plan",
            OutputFormat::Text => return Ok(()),
        };
        let message = format!("the metrics and the {other} would both go to standard output");
        Err(Failure::input(Problem::new("--metrics", message).hint("the name of a file")))
    }

    /// Rejects outputs that are also inputs or other outputs: truncating a memory-mapped token file would kill the
    /// program.
    fn reject_overwritten_inputs(&self) -> CommandResult<()> {
        let model = &self.request.model;
        let inputs =
            || self.data.iter().chain(&self.plan).chain(&model.model).chain(&model.hardware);
        let outputs = [
            ("--metrics", &self.metrics),
            ("--output", &self.output.output),
            ("--trace", &self.trace.trace),
        ];
        for (index, (flag, output)) in outputs.iter().enumerate() {
            let Some(output) = output else { continue };
            let same = outputs[..index].iter().find(|(_, other)| {
                other.as_ref().is_some_and(|other| {
                    let device = Path::new(other).exists() && !Path::new(other).is_file();
                    let same = other == output || is_same_file(other, Path::new(output));
                    same && !device && !output::is_stdout(other)
                })
            });
            if let Some((other, _)) = same {
                let message = format!("{other} writes to `{}` too", output.display());
                return Err(Failure::input(Problem::new(*flag, message).hint("another file name")));
            }
            if let Some(input) = inputs().find(|input| is_same_file(input, Path::new(output))) {
                return Err(Failure::input(output_is_input(flag, input)));
            }
        }
        Ok(())
    }
}

/// Request defaults of a training run: one device per process, and the hardware of the backend.
fn request_defaults(training: &TrainSettings) -> RequestDefaults {
    let defaults = RequestDefaults::RUN;
    RequestDefaults {
        devices: training
            .process
            .as_ref()
            .map_or(defaults.devices, |process| process.launch.world_size),
        hardware: match training.target {
            ExecutionTarget::Cpu => defaults.hardware,
            ExecutionTarget::Gpus { .. } => gpu::nearest_preset(),
        },
        ..defaults
    }
}
