//! Flags of `run`.

use std::ffi::{OsStr, OsString};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use narrows_cuda::AttentionKernels;
use narrows_runtime::checkpoint::CheckpointOutline;

use crate::cluster::LaunchedProcess;
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem};
use crate::host::cores;
use crate::output::require_folder_name;
use crate::{gpu, input, output};

use super::checkpoint::{CheckpointArgs, CheckpointSettings};
use super::data::token_stream;
use super::initial_weights::InitialWeightsArgs;
use super::launch::LaunchArgs;
use super::output::OutputArgs;
use super::plan::PlanSelection;
use super::plan_file::PlanFile;
use super::recipe::RecipeArgs;
use super::recipe_file;
use super::request::RequestArgs;
use super::run_places::RunPlaces;
use super::run_settings::{
    ExecutionTarget, RunSettings, RunTask, TokenSource, TrainSettings, VerifyData,
};
use super::tokenizer::tokenizer_files;
use super::trace::TraceArgs;
use super::validation::ValidationArgs;

/// Limit of the threads per device on machines with fewer cores, so that tests can use several per core.
const THREADS_MAX: u64 = 64;

/// Flags of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A plan file, or `-` [default: the fastest plan is searched]
    #[arg(value_name = "PLAN")]
    pub plan: Option<OsString>,
    /// Token file to train on, as `narrows data` makes it [default: a built-in book]
    #[arg(long, value_name = "FILE")]
    pub data: Option<OsString>,
    /// When to verify the checksums of --data and --eval-data
    #[arg(long, value_name = "WHEN", value_enum)]
    pub verify_data: Option<VerifyData>,
    /// Recipe file, TOML or JSON: flags of the recipe as fields, such as `beta2 = 0.999`; a flag overrides its field
    #[arg(long, value_name = "FILE")]
    pub recipe: Option<OsString>,
    /// Recipe.
    #[command(flatten)]
    pub recipe_flags: RecipeArgs,
    /// Validation.
    #[command(flatten)]
    pub validation: ValidationArgs,
    /// Write one JSON object per step to this file, or `-`; one with the steps of another run is renamed
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<OsString>,
    /// Write event files for TensorBoard to this folder
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Checkpoints.
    #[command(flatten)]
    pub checkpoints: CheckpointArgs,
    /// Copy this tokenizer.json into each checkpoint, for `generate` and for other programs, and the files beside it that
    /// belong to it
    #[arg(long, value_name = "FILE", requires = "checkpoint_dir")]
    pub tokenizer: Option<PathBuf>,
    /// Initial weights.
    #[command(flatten)]
    pub initial_weights: InitialWeightsArgs,
    /// Traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Backend that executes the plan
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu)]
    pub backend: BackendArg,
    /// GPUs: launch kernels one by one instead of capturing graphs; with --deterministic the results are bitwise equal
    #[arg(long)]
    pub eager: bool,
    /// GPUs: bitwise reproducible runs: attention uses Narrows' own kernels instead of cuDNN's
    #[arg(long)]
    pub deterministic: bool,
    /// Threads per device [default: the cores of the machine, divided among its devices]
    #[arg(long, value_name = "N")]
    pub threads: Option<NonZeroU64>,
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

impl RunArgs {
    /// Whether an argument, which would be the name of a plan, is the value of `--resume` after a space.
    fn is_value_of_resume(&self, argument: &OsStr) -> bool {
        self.checkpoints.resume.is_some() && argument == "auto" && !Path::new(argument).exists()
    }

    /// The settings.
    ///
    /// # Errors
    /// Inputs that cannot be read, flags that contradict each other, and a missing GPU.
    pub fn resolve(&self) -> CommandResult<RunSettings> {
        // Of values that are not flags of recipes it matters only that they are set.
        let flags = RecipeArgs {
            model: self.request.model.model.as_ref().map(|model| model.display().to_string()),
            data: self.data.as_ref().map(|file| file.display().to_string()),
            eval_data: self.validation.eval_data.as_ref().map(|file| file.display().to_string()),
            global_batch: self.request.global_batch.map(|_| NonZeroU64::MIN),
            sequence_length: self.request.sequence_length.map(|_| NonZeroU64::MIN),
            ..self.recipe_flags.clone()
        };
        let in_file = self.recipe.as_ref().map(|file| recipe_file::read(file)).transpose();
        let in_file = in_file.map_err(|failure| self.places(&flags).locate(failure))?;
        let recipe = match &in_file {
            Some(in_file) => self.recipe_flags.clone().or(in_file.clone()),
            None => self.recipe_flags.clone(),
        };
        let model = flags.model.clone().or(recipe.model.clone());
        let mut places = self.places(&RecipeArgs { model, ..recipe.clone() });
        if let (Some(file), Some(in_file)) = (&self.recipe, &in_file) {
            places = places.with_recipe(file, in_file, &flags);
        }
        self.resolve_with(&recipe, &places).map_err(|failure| places.locate(failure))
    }

    /// The flags of files and folders, with those that a recipe names.
    fn places(&self, recipe: &RecipeArgs) -> RunPlaces {
        let (data, eval_data) = (self.data(recipe), self.validation.file(recipe));
        let folder = |path: &Option<PathBuf>| path.clone().map(OsString::from);
        RunPlaces::new([
            ("", self.plan.clone()),
            ("--recipe", self.recipe.clone()),
            ("--model", recipe.model.clone().map(OsString::from)),
            ("--hardware", self.request.model.hardware.clone()),
            ("--data", data),
            ("--eval-data", eval_data),
            ("--metrics", self.metrics.clone()),
            ("--tensorboard", folder(&self.tensorboard)),
            ("--checkpoint-dir", folder(&self.checkpoints.checkpoint_dir)),
            ("--tokenizer", folder(&self.tokenizer)),
            ("--init-from", folder(&self.initial_weights.init_from)),
            ("--trace", self.trace.trace.clone()),
            ("--output", self.output.output.clone()),
        ])
    }

    fn resolve_with(&self, recipe: &RecipeArgs, places: &RunPlaces) -> CommandResult<RunSettings> {
        let output = self.output.resolve()?;
        self.tensorboard
            .as_deref()
            .map_or(Ok(()), |folder| require_folder_name("--tensorboard", folder))?;
        let checkpoints = self.checkpoints.resolve(&self.launch)?;
        let resumed = checkpoints.as_ref().map_or(Ok(None), CheckpointSettings::outline)?;
        let task = self.task(recipe, (checkpoints, resumed.as_ref()), places)?;
        self.reject_two_documents_on_stdout(&output)?;
        self.reject_overwritten_inputs(recipe)?;
        let mut request = self.request.clone();
        recipe.fill_request(&mut request);
        let selection = match &self.plan {
            Some(argument) if self.is_value_of_resume(argument) => {
                let problem =
                    Problem::new("--resume", "`auto` after a space is the name of a plan");
                return Err(Failure::input(problem.hint("--resume=auto")));
            }
            Some(argument) => {
                let mut file = PlanFile::read(argument, &request.model)?;
                file.override_sizes(&request)?;
                file.override_executor(&request);
                PlanSelection::File(Box::new(file))
            }
            None if self.request.minimises_cost() => {
                let problem = Problem::new("--objective", "a run uses all of its devices");
                let hint = "`narrows plan --objective cost --output FILE`, then `narrows run FILE`";
                return Err(Failure::input(problem.hint(hint)));
            }
            None => {
                fill_sizes(&mut request, resumed.as_ref());
                let defaults = match &task {
                    RunTask::Count(_) => RequestDefaults::RUN,
                    RunTask::Train(training) => request_defaults(training),
                };
                PlanSelection::Search(Box::new(request.resolve(&defaults)?))
            }
        };
        let hardware_is_explicit = self.request.model.hardware.is_some();
        let places = places.clone();
        Ok(RunSettings { selection, hardware_is_explicit, task, output, places })
    }

    fn task(
        &self,
        recipe: &RecipeArgs,
        checkpoints: (Option<CheckpointSettings>, Option<&CheckpointOutline>),
        places: &RunPlaces,
    ) -> CommandResult<RunTask> {
        let target = match self.backend {
            BackendArg::Cpu => ExecutionTarget::Cpu,
            BackendArg::Cuda => {
                gpu::require_cuda()?;
                let attention = match self.deterministic {
                    true => AttentionKernels::Deterministic,
                    false => AttentionKernels::Fastest,
                };
                ExecutionTarget::Gpus { eager: self.eager, attention }
            }
            BackendArg::Null => {
                self.reject_flags_of_training()?;
                if recipe.steps.is_some_and(|steps| steps.get() > 1) {
                    let place = places.name("--steps");
                    output::warn(&format!(
                        "{place}: the null backend counts one step, which stands for every one"
                    ));
                }
                if recipe.dtype.is_some() {
                    let place = places.name("--dtype");
                    output::warn(&format!(
                        "{place}: has no effect, since the null backend computes nothing"
                    ));
                }
                return Ok(RunTask::Count(recipe.resolve(None)?.optimizer));
            }
        };
        Ok(RunTask::Train(Box::new(self.training(target, recipe, checkpoints, places)?)))
    }

    /// The token file of the flag or else of the recipe.
    pub(super) fn data(&self, recipe: &RecipeArgs) -> Option<OsString> {
        self.data.clone().or_else(|| recipe.data.clone().map(OsString::from))
    }

    fn reject_flags_of_training(&self) -> CommandResult<()> {
        let flags = [
            ("--metrics", self.metrics.is_some()),
            ("--tensorboard", self.tensorboard.is_some()),
            ("--data", self.data.is_some()),
            ("--eval-data", self.validation.eval_data.is_some()),
            ("--verify-data", self.verify_data.is_some()),
            ("--trace", self.trace.trace.is_some()),
            ("--checkpoint-dir", self.checkpoints.checkpoint_dir.is_some()),
            ("--init-from", self.initial_weights.init_from.is_some()),
            ("--dtype", self.recipe_flags.dtype.is_some()),
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

    fn training(
        &self,
        target: ExecutionTarget,
        recipe: &RecipeArgs,
        (checkpoints, resumed): (Option<CheckpointSettings>, Option<&CheckpointOutline>),
        places: &RunPlaces,
    ) -> CommandResult<TrainSettings> {
        let tokens = match &self.data(recipe) {
            None => TokenSource::BuiltIn,
            Some(file) if input::is_stdin(file) => {
                return Err(Failure::input(token_stream("--data")));
            }
            Some(file) => TokenSource::File(file.into()),
        };
        let threads = self.threads.map(NonZeroU64::get);
        self.reject_flags_of_other_targets(target, recipe)?;
        if let Some(threads) = threads.filter(|threads| *threads > cores().max(THREADS_MAX)) {
            let message =
                format!("{threads} threads per device are too many for {} cores", cores());
            let hint = "the number of cores, divided among the devices";
            return Err(Failure::input(Problem::new("--threads", message).hint(hint)));
        }
        let process = self.launch.resolve()?;
        // One process writes for all.
        let is_rank_0 = process.as_ref().is_none_or(LaunchedProcess::is_rank_0);
        let validation = recipe;
        let recipe = recipe.resolve(resumed)?;
        let trace = self.trace.resolve(recipe.steps)?.filter(|_| is_rank_0);
        trace.as_ref().map_or(Ok(()), |trace| output::check_writable(&trace.file))?;
        Ok(TrainSettings {
            target,
            tokens,
            verify_data: self.verify_data.unwrap_or_default(),
            metrics: self.metrics.clone().filter(|_| is_rank_0),
            tensorboard: self.tensorboard.clone().filter(|_| is_rank_0),
            threads,
            validation: self.validation.resolve(
                validation,
                recipe.steps,
                self.checkpoints.keep_best,
            )?,
            checkpoints,
            tokenizer: self.tokenizer.as_deref().map_or(Ok(vec![]), tokenizer_files)?,
            init_from: self.initial_weights.init_from.clone(),
            trace,
            recipe,
            process,
            places: places.clone(),
        })
    }

    fn reject_flags_of_other_targets(
        &self,
        target: ExecutionTarget,
        recipe: &RecipeArgs,
    ) -> CommandResult<()> {
        let on_cpu = target == ExecutionTarget::Cpu;
        for (flag, is_set, backend, applies) in [
            ("--threads", self.threads.is_some(), "cpu", on_cpu),
            ("--dtype", recipe.dtype.is_some(), "cpu", on_cpu),
            ("--eager", self.eager, "cuda", !on_cpu),
            ("--deterministic", self.deterministic, "cuda", !on_cpu),
        ] {
            if is_set && !applies {
                let problem = Problem::new(flag, format!("applies to --backend {backend} only"));
                let hint = format!("omit {flag}, or use --backend {backend}");
                return Err(Failure::input(problem.hint(hint)));
            }
        }
        Ok(())
    }
}

/// Sets the sizes of a step that no flag and no recipe sets to those of the checkpoint that is resumed.
fn fill_sizes(request: &mut RequestArgs, resumed: Option<&CheckpointOutline>) {
    let Some(resumed) = resumed else { return };
    request.sequence_length = request.sequence_length.or(Some(resumed.sequence_length));
    request.global_batch = request.global_batch.or(resumed.global_batch);
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
            ExecutionTarget::Gpus { .. } => gpu::preset_for_runs(),
        },
        ..defaults
    }
}
