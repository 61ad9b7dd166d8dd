//! Settings of `run`, which its flags become.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use narrows_cuda::AttentionKernels;
use narrows_runtime::checkpoint::TokenizerFile;
use narrows_runtime::{GemmDtype, Optimizer};

use crate::cluster::LaunchedProcess;

use super::checkpoint::CheckpointSettings;
use super::output::OutputSettings;
use super::plan::PlanSelection;
use super::recipe::Recipe;
use super::run_places::RunPlaces;
use super::trace::TraceSettings;
use super::validation::ValidationSettings;

/// `--verify-data`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum VerifyData {
    /// Before the first step for files up to 1 GiB, and while the run trains for larger ones: the default
    #[default]
    Auto,
    /// Before the first step
    Start,
    /// While the run trains: damaged tokens end it with a checkpoint
    Background,
    /// Never
    Never,
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
    /// Counts instructions and bytes without executing them. The optimizer must be able to train the program.
    Count(Optimizer),
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
        /// Which kernels compute attention.
        attention: AttentionKernels,
    },
}

/// Settings of training, besides the plan.
#[derive(Debug)]
pub struct TrainSettings {
    /// The backend.
    pub target: ExecutionTarget,
    /// Source of the tokens.
    pub tokens: TokenSource,
    /// When the tokens are verified.
    pub verify_data: VerifyData,
    /// The recipe.
    pub recipe: Recipe,
    /// The metrics file.
    pub metrics: Option<OsString>,
    /// The folder of event files.
    pub tensorboard: Option<PathBuf>,
    /// Threads per device, if given.
    pub threads: Option<u64>,
    /// Validation, if any.
    pub validation: Option<ValidationSettings>,
    /// Checkpoints, if any.
    pub checkpoints: Option<CheckpointSettings>,
    /// Files of the tokenizer for checkpoints, if any.
    pub tokenizer: Vec<TokenizerFile>,
    /// File or folder of the initial weights, if they are not random.
    pub init_from: Option<PathBuf>,
    /// The trace, if any.
    pub trace: Option<TraceSettings>,
    /// Rank and rendezvous of this process, if there are several.
    pub process: Option<LaunchedProcess>,
    /// Places in messages.
    pub places: RunPlaces,
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
    /// Places in messages.
    pub places: RunPlaces,
}

impl TrainSettings {
    /// Format to which the operands of GEMMs are rounded; `None` on GPUs, which multiply in the precision of the plan.
    pub fn gemm_dtype(&self) -> Option<GemmDtype> {
        (self.target == ExecutionTarget::Cpu).then_some(self.recipe.gemm_dtype)
    }

    /// Whether this process prints and writes files for all.
    pub fn is_rank_0(&self) -> bool {
        self.process.as_ref().is_none_or(LaunchedProcess::is_rank_0)
    }
}

impl RunTask {
    /// Whether this process prints and writes files for all.
    pub fn is_rank_0(&self) -> bool {
        match self {
            RunTask::Count(_) => true,
            RunTask::Train(training) => training.is_rank_0(),
        }
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        match self {
            RunTask::Count(optimizer) => optimizer,
            RunTask::Train(training) => &training.recipe.optimizer,
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
