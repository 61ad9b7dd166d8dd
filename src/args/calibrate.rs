//! Flags of `calibrate`.

use std::ffi::OsString;
use std::num::NonZeroU64;

use clap::{Args, ValueEnum};
use narrows_plan::model::Model;

use crate::calibrate::benchmarks::BenchmarkExtent;
use crate::cluster::LaunchedProcess;
use crate::errors::{CommandResult, Failure, Problem};
use crate::host::cores;
use crate::{gpu, input, output};

use super::launch::LaunchArgs;
use super::output::{Detail, DetailArgs, FormatArgs, OutputFormat};

/// Largest default number of devices measured together.
const DEVICES_MAX: u64 = 8;

/// Flags of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Write the profile to this file, or `-` [default: the cache, where `run` looks for it]
    #[arg(long, value_name = "FILE")]
    pub output: Option<OsString>,
    /// Devices to measure
    #[arg(long, value_enum, default_value_t = CalibrateBackendArg::Cpu)]
    pub backend: CalibrateBackendArg,
    /// Measure the shapes of this model too: a preset, or a model file
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// CPU: threads that the devices share [default: the cores of the machine]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
    /// CPU: largest number of devices that are measured together [default: one per thread, at most 8]
    #[arg(long, value_name = "N")]
    pub devices: Option<NonZeroU64>,
    /// GPUs: sequences in a step on one GPU [default: depends on the model]
    #[arg(long, value_name = "N")]
    pub global_batch: Option<NonZeroU64>,
    /// GPUs: tokens in a sequence [default: depends on the model]
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<NonZeroU64>,
    /// Quick calibration: a few seconds for the kernels of cola-tiny on a CPU, half a minute for those of --model or
    /// cola-1b on a GPU
    #[arg(long)]
    pub quick: bool,
    /// Also time steps under other plans, and compare them with the predictions of the profile
    #[arg(long)]
    pub compare: bool,
    /// Other processes.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Output format.
    #[command(flatten)]
    pub format: FormatArgs,
    /// Detail of the report.
    #[command(flatten)]
    pub detail: DetailArgs,
}

/// `--backend` of `calibrate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CalibrateBackendArg {
    /// Processors: devices are threads
    Cpu,
    /// NVIDIA GPUs, one per process: torchrun, srun or mpirun starts several
    Cuda,
}

/// Devices to measure.
#[derive(Debug)]
pub enum CalibrateTarget {
    /// Threads of this process.
    Cpu {
        /// Number of threads that the devices share.
        threads: u64,
    },
    /// GPUs, one per process.
    Gpus {
        /// Rank and rendezvous of this process, if there are several.
        process: Option<LaunchedProcess>,
        /// Sequences in a step on one GPU.
        global_batch: Option<u64>,
        /// Tokens in a sequence.
        sequence_length: Option<u64>,
    },
}

/// Settings of `calibrate`.
#[derive(Debug)]
pub struct CalibrateSettings {
    /// The profile to write; `None` for the cache.
    pub output: Option<OsString>,
    /// A model whose shapes are measured too.
    pub model: Option<Model>,
    /// Devices to measure.
    pub target: CalibrateTarget,
    /// Most devices that are measured together.
    pub devices: u64,
    /// Extent of the benchmarks.
    pub extent: BenchmarkExtent,
    /// Whether other plans are compared with the profile.
    pub compare: bool,
    /// Output format.
    pub format: OutputFormat,
    /// Detail of the report.
    pub detail: Detail,
}

impl CalibrateSettings {
    /// Whether this process prints and writes files for all.
    pub fn is_rank_0(&self) -> bool {
        match &self.target {
            CalibrateTarget::Cpu { .. } => true,
            CalibrateTarget::Gpus { process, .. } => {
                process.as_ref().is_none_or(LaunchedProcess::is_rank_0)
            }
        }
    }
}

impl CalibrateArgs {
    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, flags that contradict each other, and a missing GPU.
    pub fn resolve(&self) -> CommandResult<CalibrateSettings> {
        let format = self.format.format;
        if format == OutputFormat::Json && self.output.as_deref().is_some_and(output::is_stdout) {
            let message = "the profile and the JSON answer would both go to standard output";
            let problem = Problem::new("--output", message);
            return Err(Failure::input(problem.hint("the name of a file")));
        }
        let (target, devices) = match self.backend {
            CalibrateBackendArg::Cpu => self.processors()?,
            CalibrateBackendArg::Cuda => self.gpus()?,
        };
        Ok(CalibrateSettings {
            output: self.output.clone(),
            model: self.model.as_deref().map(input::model).transpose()?,
            target,
            devices,
            extent: if self.quick { BenchmarkExtent::Quick } else { BenchmarkExtent::Full },
            compare: self.compare,
            format,
            detail: self.detail.resolve(),
        })
    }

    fn processors(&self) -> CommandResult<(CalibrateTarget, u64)> {
        let gpu_flags = [
            ("--global-batch", self.global_batch.is_some()),
            ("--sequence-length", self.sequence_length.is_some()),
        ];
        reject_flags_of_other_backend(gpu_flags, "cuda", "--model measures other shapes")?;
        let threads = self.threads.map_or(cores(), NonZeroU64::get);
        if threads > cores() {
            let message = format!("{threads} threads are too many for {} cores", cores());
            let problem = Problem::new("--threads", message);
            return Err(Failure::input(problem.hint("the number of cores, or less")));
        }
        let devices = self.devices.map_or(threads.min(DEVICES_MAX), NonZeroU64::get);
        if devices > threads {
            let message = format!("{devices} devices are too many for --threads {threads}");
            let problem = Problem::new("--devices", message);
            return Err(Failure::input(problem.hint("the number of threads, or less")));
        }
        Ok((CalibrateTarget::Cpu { threads }, devices))
    }

    fn gpus(&self) -> CommandResult<(CalibrateTarget, u64)> {
        let cpu_flags =
            [("--threads", self.threads.is_some()), ("--devices", self.devices.is_some())];
        reject_flags_of_other_backend(
            cpu_flags,
            "cpu",
            "for several GPUs start one process each with torchrun, srun or mpirun",
        )?;
        gpu::require_cuda()?;
        let process = self.launch.resolve()?;
        let devices = process.as_ref().map_or(1, |process| process.launch.world_size);
        let [global_batch, sequence_length] =
            [self.global_batch, self.sequence_length].map(|size| size.map(NonZeroU64::get));
        Ok((CalibrateTarget::Gpus { process, global_batch, sequence_length }, devices))
    }
}

/// Rejects flags that apply to `backend` only.
fn reject_flags_of_other_backend(
    flags: [(&str, bool); 2],
    backend: &str,
    hint: &str,
) -> CommandResult<()> {
    match flags.into_iter().find(|(_, is_set)| *is_set) {
        None => Ok(()),
        Some((flag, _)) => {
            let problem = Problem::new(flag, format!("applies to --backend {backend} only"));
            Err(Failure::input(problem.hint(format!("omit {flag}; {hint}"))))
        }
    }
}
