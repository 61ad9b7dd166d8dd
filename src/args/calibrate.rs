//! The flags of `calibrate`, and what they mean.

use std::ffi::OsString;
use std::num::NonZeroU64;

use clap::{Args, ValueEnum};
use narrows_plan::model::Model;

use super::gpu;
use super::launch::{LaunchArgs, LaunchedProcess};
use super::low::OutputFormat;
use super::run::cores;
use crate::calibrate::works::BenchmarkExtent;
use crate::errors::{CommandResult, Failure, Problem};
use crate::input;
use crate::output;

/// Devices that are measured together, of who does not say.
const DEVICES_MAX: u64 = 8;

/// Flags of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Write the profile to this file, or `-` [default: where `run` looks for it]
    #[arg(long, value_name = "FILE")]
    pub output: Option<OsString>,
    /// What is measured
    #[arg(long, value_enum, default_value_t = MeasuredBackend::Cpu)]
    pub backend: MeasuredBackend,
    /// Measure the shapes of this model's plans too: a preset, or a model file
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// Threads that the devices share [default: the machine's cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
    /// Most devices that are measured together [default: one a thread, at most 8]; of GPUs, as many as there
    /// are processes
    #[arg(long, value_name = "N")]
    pub devices: Option<NonZeroU64>,
    /// Sequences of a step on one GPU [default: those of the models that are measured]
    #[arg(long, value_name = "N")]
    pub global_batch: Option<NonZeroU64>,
    /// Tokens of a sequence on GPUs [default: as many as the models that are measured have]
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<NonZeroU64>,
    /// Measure for a few seconds, and only what cola-tiny needs
    #[arg(long)]
    pub quick: bool,
    /// Run other plans in between, and compare their steps with what the profile says of them
    #[arg(long)]
    pub compare: bool,
    /// Who else measures.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Form of the answer
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    pub format: OutputFormat,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MeasuredBackend {
    /// Processors: devices are threads
    Cpu,
    /// NVIDIA GPUs, one a process: torchrun, srun or mpirun starts several
    Cuda,
}

/// What the devices are.
#[derive(Debug)]
pub enum CalibrateTarget {
    /// Threads of this process.
    Processors {
        /// How many threads they share.
        threads: u64,
    },
    /// GPUs, one a process; this process alone, or one of many.
    Gpus {
        /// Which of them.
        launched: Option<LaunchedProcess>,
        /// Sequences of a step on one GPU.
        global_batch: Option<u64>,
        /// Tokens of a sequence.
        sequence_length: Option<u64>,
    },
}

/// Everything that `calibrate` depends on.
#[derive(Debug)]
pub struct CalibrateSettings {
    /// Where the profile goes; `None` for where `run` looks for it.
    pub output: Option<OsString>,
    /// A model of which plans are measured too.
    pub model: Option<Model>,
    /// What is measured.
    pub on: CalibrateTarget,
    /// Most devices.
    pub devices: u64,
    /// How much is measured.
    pub amount: BenchmarkExtent,
    /// Whether other plans are compared.
    pub compare: bool,
    /// Form of the answer.
    pub format: OutputFormat,
}

impl CalibrateSettings {
    /// Whether this process speaks and writes: it does so for all, if there are others.
    pub fn leads(&self) -> bool {
        match &self.on {
            CalibrateTarget::Processors { .. } => true,
            CalibrateTarget::Gpus { launched, .. } => {
                launched.as_ref().is_none_or(LaunchedProcess::leads)
            }
        }
    }
}

/// What is asked of `calibrate`.
pub fn calibrate(args: &CalibrateArgs) -> CommandResult<CalibrateSettings> {
    if args.format == OutputFormat::Json && args.output.as_deref().is_some_and(output::is_stdout) {
        let problem = "the profile and the JSON answer would both go to standard output";
        return Err(Failure::input(Problem::new("--output", problem).hint("the name of a file")));
    }
    let (on, devices) = match args.backend {
        MeasuredBackend::Cpu => processors(args)?,
        MeasuredBackend::Cuda => gpus(args)?,
    };
    let model = args.model.as_deref().map(input::model).transpose()?;
    Ok(CalibrateSettings {
        output: args.output.clone(),
        model,
        on,
        devices,
        amount: if args.quick { BenchmarkExtent::Quick } else { BenchmarkExtent::Whole },
        compare: args.compare,
        format: args.format,
    })
}

fn processors(args: &CalibrateArgs) -> CommandResult<(CalibrateTarget, u64)> {
    says_nothing(
        [
            ("--global-batch", args.global_batch.is_some()),
            ("--sequence-length", args.sequence_length.is_some()),
        ],
        ("processors, whose works are fixed", "--model measures other shapes"),
    )?;
    let threads = args.threads.map_or(cores(), NonZeroU64::get);
    if threads > cores() {
        let problem = format!("{threads} threads would take turns on {} cores", cores());
        let problem =
            Problem::new("--threads", problem).hint("as many as there are cores, or fewer");
        return Err(Failure::input(problem));
    }
    let devices = args.devices.map_or(threads.min(DEVICES_MAX), NonZeroU64::get);
    if devices > threads {
        let problem = format!("{devices} devices would take turns on so few threads ({threads})");
        let problem =
            Problem::new("--devices", problem).hint("as many as there are threads, or fewer");
        return Err(Failure::input(problem));
    }
    Ok((CalibrateTarget::Processors { threads }, devices))
}

fn gpus(args: &CalibrateArgs) -> CommandResult<(CalibrateTarget, u64)> {
    says_nothing(
        [("--threads", args.threads.is_some()), ("--devices", args.devices.is_some())],
        ("GPUs, which are one a process", "torchrun, srun or mpirun starts several processes"),
    )?;
    gpu::admit()?;
    let launched = args.launch.resolve()?;
    let devices = launched.as_ref().map_or(1, |launched| launched.launch.world_size);
    let (global_batch, sequence_length) = (args.global_batch, args.sequence_length);
    let [global_batch, sequence_length] =
        [global_batch, sequence_length].map(|given| given.map(NonZeroU64::get));
    Ok((CalibrateTarget::Gpus { launched, global_batch, sequence_length }, devices))
}

fn says_nothing(flags: [(&str, bool); 2], (of, hint): (&str, &str)) -> CommandResult<()> {
    match flags.into_iter().find(|(_, given)| *given) {
        None => Ok(()),
        Some((flag, _)) => {
            let problem = Problem::new(flag, format!("says nothing about {of}"));
            Err(Failure::input(problem.hint(format!("without it; {hint}"))))
        }
    }
}
