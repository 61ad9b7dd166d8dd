//! Flags of `cost` for steps under other frameworks.

use std::ffi::OsString;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use narrows_calibration::measurements::StepRecompute;
use narrows_calibration::{FrameworkStep, framework_names};
use narrows_plan::strategy::Baseline;
use narrows_plan::{Defect, Executor, Mesh, Workload};
use narrows_planner::{MemoryLimit, Request};

use super::request::RequestArgs;
use super::values::{RecomputeArg, ScheduleArg};
use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem, Problems};

/// The framework that is this program: its steps are those of a plan.
const OWN: &str = "narrows";

/// Flags of a step under a framework.
#[derive(Clone, Debug, Args)]
pub struct FrameworkArgs {
    /// Framework that runs the step [default: narrows]
    ///
    /// With another one than narrows, a full-rank model is priced as that framework trains it on the mesh of the flags,
    /// without a plan: nothing is searched. Omitted axes of the mesh and --micro-batch are 1, the data axis takes the
    /// remaining devices, and --zero and --strategy have the framework's defaults. --chunks is for interleaved stages.
    #[arg(long, value_name = "NAME", value_parser = frameworks())]
    pub framework: Option<String>,
    /// Part of the blocks that the backward pass of the framework recomputes [default: as --recompute says]
    #[arg(long, value_name = "WHAT", value_enum, requires = "framework")]
    pub selective_recompute: Option<SelectiveRecomputeArg>,
    /// Model chunks of each pipeline stage of the framework, which interleave [default: 1]
    #[arg(long, value_name = "N", requires = "framework")]
    pub chunks: Option<u64>,
}

/// `--selective-recompute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SelectiveRecomputeArg {
    /// The core of attention: Megatron-LM's selective recomputation
    Attention,
    /// Every second block: torchtitan's `selective` with option 2
    Layers,
    /// All but attention and every second GEMM: torchtitan's `selective` with option `op`
    Ops,
}

impl From<SelectiveRecomputeArg> for StepRecompute {
    fn from(recompute: SelectiveRecomputeArg) -> StepRecompute {
        match recompute {
            SelectiveRecomputeArg::Attention => StepRecompute::Selective,
            SelectiveRecomputeArg::Layers => StepRecompute::SelectiveLayers,
            SelectiveRecomputeArg::Ops => StepRecompute::SelectiveOps,
        }
    }
}

/// Parser of the names of frameworks.
fn frameworks() -> impl TypedValueParser<Value = String> {
    PossibleValuesParser::new(framework_names().chain([OWN]))
}

/// The flag of `cost` on commands that plan.
#[derive(Clone, Debug, Args)]
pub struct RefusedFrameworkArgs {
    /// Refused with a hint: steps of other frameworks are priced, not planned
    #[arg(long, hide = true)]
    framework: Option<OsString>,
}

impl RefusedFrameworkArgs {
    /// Refuses the flag.
    ///
    /// # Errors
    /// The flag, with the command that prices such a step.
    pub fn refuse(&self) -> CommandResult<()> {
        let Some(name) = &self.framework else { return Ok(()) };
        let message =
            "steps of other frameworks are priced on a mesh, and no plan of theirs is searched";
        let name = name.to_string_lossy();
        let hint =
            format!("narrows cost --framework {name}, with --tensor, --pipeline and --micro-batch");
        Err(Failure::input(Problem::new("--framework", message).hint(hint)))
    }
}

impl FrameworkArgs {
    /// The framework whose table prices the step; `None` for this program.
    pub fn other(&self) -> Option<&str> {
        self.framework.as_deref().filter(|name| *name != OWN)
    }

    /// Rejects flags of frameworks where this program runs the step.
    pub fn require_none(&self) -> CommandResult<()> {
        let flags = [
            ("--selective-recompute", self.selective_recompute.is_some(), "--recompute"),
            ("--chunks", self.chunks.is_some(), "--schedule interleaved"),
        ];
        let mut problems = Problems::default();
        for (flag, _, instead) in flags.into_iter().filter(|(_, is_set, _)| *is_set) {
            let message = "describes a step of another framework, and plans of narrows search it";
            problems.push(Problem::new(flag, message).hint(format!("{instead} for a plan")));
        }
        problems.into_result()
    }

    /// The step of these flags under `framework`, with the request that has its model and hardware.
    ///
    /// # Errors
    /// An invalid request, and flags that only a search or a plan has.
    pub fn step(
        &self,
        framework: &str,
        args: &RequestArgs,
    ) -> CommandResult<(FrameworkStep, Request)> {
        let mut problems = Problems::default();
        for flag in args.flags_of_plans() {
            let message = format!("is for plans of narrows, and `{framework}` runs no plan");
            problems.push(Problem::new(flag, message).hint(format!("omit {flag}")));
        }
        let recompute = problems.take(self.recompute(args.recompute));
        let shards_tokens = problems.take(shards_tokens(args.strategy));
        let request = problems.take(args.resolve(&RequestDefaults::PLAN));
        problems.into_result()?;
        let (Some(recompute), Some(shards_tokens), Some(request)) =
            (recompute, shards_tokens, request)
        else {
            return Err(Failure::failed(vec![]));
        };
        let [tensor, pipeline] = [request.tensor, request.pipeline].map(|size| size.unwrap_or(1));
        let model_devices = tensor * pipeline;
        let data = request.data.unwrap_or(request.devices / model_devices);
        if data * model_devices != request.devices {
            let message = format!(
                "{} devices are not tensor {tensor} × pipeline {pipeline} × data {data}",
                request.devices
            );
            let hint = "--tensor, --pipeline and --data-parallel: omitted axes are 1, the data axis takes the rest";
            return Err(Failure::input(Problem::new("--devices", message).hint(hint)));
        }
        let step = FrameworkStep {
            framework: framework.to_owned(),
            mesh: Mesh { tensor, pipeline, data, context: 1 },
            workload: Workload {
                global_batch: request.global_batch,
                sequence_length: request.sequence_length,
                micro_batch: request.micro_batch.unwrap_or(1),
            },
            recompute,
            zero: request.zero,
            shards_tokens,
            chunks: self.chunks.unwrap_or(1),
        };
        Ok((step, request))
    }

    fn recompute(&self, recompute: Option<RecomputeArg>) -> CommandResult<StepRecompute> {
        let problem = |flag: &str, message: &str, hint: &str| {
            Err(Failure::input(Problem::new(flag, message).hint(hint)))
        };
        match (recompute, self.selective_recompute) {
            (None, None) => Ok(StepRecompute::None),
            (None, Some(selective)) => Ok(selective.into()),
            (Some(_), Some(_)) => {
                let message = "and --recompute both say what is recomputed";
                problem("--selective-recompute", message, "one of the two")
            }
            (Some(RecomputeArg::None), None) => Ok(StepRecompute::None),
            (Some(RecomputeArg::Block), None) => Ok(StepRecompute::Block),
            (Some(RecomputeArg::Auto | RecomputeArg::Latents), None) => {
                let message = "does not say what a framework recomputes";
                problem("--recompute", message, "none, block, or --selective-recompute")
            }
        }
    }
}

/// Whether `--strategy` shards tokens over the tensor axis; `None` for the default of the framework.
fn shards_tokens(strategy: Option<Baseline>) -> CommandResult<Option<bool>> {
    match strategy {
        None | Some(Baseline::Auto) => Ok(None),
        Some(strategy) if strategy.is_for_dense_models() => Ok(Some(strategy.shards_tokens())),
        Some(strategy) => {
            let message = format!(
                "{} is for plans of narrows: frameworks split dense linears",
                strategy.name()
            );
            let names: Vec<&str> = Baseline::of_dense_models().map(Baseline::name).collect();
            let problem = Problem::new("--strategy", message);
            Err(Failure::input(problem.hint(names.join(" or "))))
        }
    }
}

impl RequestArgs {
    /// The flags that were passed and that only a plan of this program has.
    fn flags_of_plans(&self) -> Vec<&'static str> {
        let of_search = self.search_flags().into_iter();
        let of_search = of_search.filter(|flag| !["--strategy", "--recompute"].contains(flag));
        let one_after_the_other = [ScheduleArg::OneForwardOneBackward, ScheduleArg::Auto];
        let others = [
            ("--context", self.context.is_some_and(|size| size != 1)),
            ("--context-attention", self.context_attention.is_some()),
            ("--grad-reduce-dtype", self.grad_reduce_dtype.is_some()),
            ("--shard-size", self.shard_size.is_some()),
            ("--schedule", self.schedule.is_some_and(|s| !one_after_the_other.contains(&s))),
            ("--overlap", self.overlap.is_some()),
            ("--executor", self.executor.is_some_and(|it| Executor::from(it) != Executor::Eager)),
            ("--memory-limit", self.memory.memory_limit != MemoryLimit::Auto),
        ];
        let others = others.into_iter().filter_map(|(flag, is_set)| is_set.then_some(flag));
        of_search.chain(others).collect()
    }
}

/// The flag that a defect of a step is about.
pub fn in_flag(defect: Defect) -> Problem {
    let field = defect.field.trim_start_matches("measured.step.");
    let flag = match field {
        "mesh" => "--devices",
        "mesh.tensor" => "--tensor",
        "mesh.pipeline" => "--pipeline",
        "mesh.data" => "--data-parallel",
        "workload.global_batch" => "--global-batch",
        "workload.sequence_length" => "--sequence-length",
        "workload.micro_batch" => "--micro-batch",
        "recompute" => "--recompute",
        "interleaving" => "--chunks",
        "framework" => "--framework",
        "hardware" => "--hardware",
        _ => "--model",
    };
    let size = field.strip_prefix("model.decoder.").unwrap_or_default().to_owned();
    let hint = match &*size {
        "layers" => "--pipeline times --chunks has to divide the blocks",
        "heads" | "d_ff" => "--tensor has to divide heads and d_ff",
        _ => return Problem::in_flag(flag, defect).field(size),
    };
    Problem::in_flag(flag, defect).field(size).hint(hint)
}
