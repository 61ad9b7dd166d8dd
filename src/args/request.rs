//! Flags of planning requests: model, hardware, devices, batch and restrictions of the search.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use clap::Args;
use narrows_cost_model::Profile;
use narrows_plan::Bytes;
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, Rules, WeightRule};
use narrows_planner::{GroupingRule, MemoryLimit, Objective, Request};

use crate::defaults::RequestDefaults;
use crate::errors::{CommandResult, Failure, Problem, Problems};
use crate::input;

use super::units;
use super::values::{
    ContextAttentionArg, ExecutorArg, GradReduceDtypeArg, GroupingArg, NormArg, ObjectiveArg,
    OverlapArg, RecomputeArg, ScheduleArg, WeightsArg, WithinNodeArg, ZeroArg, baselines,
};

/// Model and hardware.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// Model to train: a preset such as cola-7b, a model file, a Hugging Face config.json, the YAML of Nanotron or BOOST,
    /// or `-`
    ///
    /// Presets: llama-, cola-, svd-, lax- or dlr- with 60m, 130m, 350m, 1b, 3b, 7b, 13b, 30b or 40b, and
    /// cola-tiny. Sizes from 1b up are BOOST's, with tied embeddings; the others are CoLA's, without its
    /// padding token. With a plan file, the default is the model that the plan names.
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<OsString>,
    /// Hardware to plan for: a preset such as a100-80gb, a profile file, or `-` [default: a100-80gb]
    ///
    /// With a plan file, the default is the profile that the plan names.
    #[arg(long, value_name = "NAME|FILE")]
    pub hardware: Option<OsString>,
}

/// The memory limit.
#[derive(Clone, Debug, Args)]
pub struct MemoryArgs {
    /// Memory of a device: `auto` (that of the profile, less its reserve), `none`, or bytes such as 64GiB
    #[arg(long, value_name = "BYTES", default_value = "auto", allow_hyphen_values = true)]
    #[arg(value_parser = units::memory_limit)]
    pub memory_limit: MemoryLimit,
}

/// Flags of a planning request.
#[derive(Clone, Debug, Args)]
pub struct RequestArgs {
    /// Model and hardware.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Number of devices [default: 1]
    #[arg(long, value_name = "N")]
    pub devices: Option<u64>,
    /// Sequences in one optimizer step, over all devices [default: one per device]
    #[arg(long, value_name = "N")]
    pub global_batch: Option<u64>,
    /// Tokens in a sequence [default: 4096, or the model's longest if that is less]
    #[arg(long, value_name = "N")]
    pub sequence_length: Option<u64>,
    /// Sequences in a microbatch of one replica [default: searched]
    #[arg(long, value_name = "N")]
    pub micro_batch: Option<u64>,
    /// Devices along the tensor axis [default: searched]
    #[arg(long, value_name = "N")]
    pub tensor: Option<u64>,
    /// Largest tensor axis to search [default: any]
    #[arg(long, value_name = "N")]
    pub max_tensor: Option<u64>,
    /// Axes whose devices must share a node
    #[arg(long, value_name = "AXIS", value_enum)]
    pub within_node: Option<WithinNodeArg>,
    /// Pipeline stages [default: searched]
    #[arg(long, value_name = "N")]
    pub pipeline: Option<u64>,
    /// Devices along the context axis, which share each sequence [default: searched from 8,192 tokens on, otherwise 1]
    #[arg(long, value_name = "N")]
    pub context: Option<u64>,
    /// Collectives around attention on a context axis [default: auto]
    #[arg(long, value_name = "HOW", value_enum)]
    pub context_attention: Option<ContextAttentionArg>,
    /// Devices along the data axis, each with its part of the batch [default: searched]
    #[arg(long, value_name = "N")]
    pub data_parallel: Option<u64>,
    /// Format in which gradients are reduced over the replicas [default: fp32]
    ///
    /// bf16 halves the bytes of these reductions, and needs hardware with mixed precision. It changes the gradients
    /// that are computed, so it is not searched. With a plan file, the default is the format of the plan.
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub grad_reduce_dtype: Option<GradReduceDtypeArg>,
    /// Sharding of optimizer states, gradients and weights over the replicas [default: auto]
    #[arg(long, value_name = "STAGE", value_enum)]
    pub zero: Option<ZeroArg>,
    /// Replicas of a ZeRO shard group: neighbours that together hold one copy of the sharded states [default: searched,
    /// over whole nodes and all replicas]
    #[arg(long, value_name = "N")]
    pub shard_size: Option<u64>,
    /// Order of the passes of pipeline stages [default: auto]
    #[arg(long, value_enum)]
    pub schedule: Option<ScheduleArg>,
    /// Overlap of collectives with computation [default: auto]
    #[arg(long, value_enum)]
    pub overlap: Option<OverlapArg>,
    /// Plans to search: all of them, or those of a published baseline [default: auto]
    #[arg(long, value_parser = baselines())]
    pub strategy: Option<Baseline>,
    /// Activations that the backward pass may recompute [default: auto]
    #[arg(long, value_name = "WHAT", value_enum)]
    pub recompute: Option<RecomputeArg>,
    /// Reduction of the statistic of a norm over sharded features [default: auto, or what BOOST's YAML states]
    #[arg(long, value_enum)]
    pub norm: Option<NormArg>,
    /// Whether factors that share an input run as one GEMM [default: auto]
    #[arg(long, value_enum)]
    pub grouping: Option<GroupingArg>,
    /// Allowed layouts of weights over the tensor axis [default: any]
    #[arg(long, value_enum)]
    pub weights: Option<WeightsArg>,
    /// Memory limit.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Launch of kernels: captured graphs, or one by one [default: captured]
    ///
    /// With a plan file, the default is the executor that the plan was priced for.
    #[arg(long, value_enum)]
    pub executor: Option<ExecutorArg>,
    /// Quantity that the search minimises
    #[arg(long, value_enum, default_value_t = ObjectiveArg::StepTime)]
    pub objective: ObjectiveArg,
    /// Time limit of the search in seconds [default: none; the search ends when it can exclude no more plans]
    #[arg(long, value_name = "SECONDS", value_parser = units::seconds)]
    pub time_limit: Option<Duration>,
}

/// Sizes that every request has.
pub struct RequestSizes {
    /// Number of devices.
    pub devices: u64,
    /// Sequences in a step.
    pub global_batch: u64,
    /// Tokens in a sequence.
    pub sequence_length: u64,
}

impl MemoryArgs {
    /// Bytes that a device may use; `Bytes(u64::MAX)` without a limit.
    pub fn bytes(&self, profile: &Profile) -> Bytes {
        match self.memory_limit {
            MemoryLimit::Auto => profile.usable_memory(),
            MemoryLimit::None => Bytes(u64::MAX),
            MemoryLimit::Bytes(bytes) => bytes,
        }
    }
}

impl RequestArgs {
    /// The request, with defaults for omitted flags.
    ///
    /// # Errors
    /// A model or profile that cannot be read, and an invalid request.
    pub fn resolve(&self, defaults: &RequestDefaults) -> CommandResult<Request> {
        at_most_one_stdin(self.model.model.iter().chain(&self.model.hardware))?;
        let mut problems = Problems::default();
        let model = problems.take(self.model.resolve_model(defaults));
        let hardware = self.model.hardware.as_deref().unwrap_or(OsStr::new(defaults.hardware));
        let profile = problems.take(input::profile(hardware));
        let (Some(model), Some(profile)) = (model, profile) else {
            return Err(problems.into_result().err().unwrap_or_else(|| Failure::failed(vec![])));
        };
        let request = self.request(defaults, model, profile);
        problems.take(validate(&request));
        problems.into_result().map(|()| request)
    }

    /// The request for a model and a profile, with defaults for omitted flags, not validated.
    pub fn request(&self, defaults: &RequestDefaults, model: Model, profile: Profile) -> Request {
        let devices = self.devices.unwrap_or(defaults.devices);
        let sizes = RequestSizes {
            devices,
            global_batch: self.global_batch.unwrap_or(round_up(defaults.global_batch, devices)),
            sequence_length: self
                .sequence_length
                .unwrap_or(defaults.sequence_length.min(model.max_sequence_length)),
        };
        self.assemble(sizes, model, profile)
    }

    /// Whether the cost of a step is minimised.
    pub fn minimises_cost(&self) -> bool {
        self.objective == ObjectiveArg::Cost
    }

    /// The flags that were passed and restrict a search beyond its sizes.
    pub fn search_flags(&self) -> Vec<&'static str> {
        let flags = [
            ("--max-tensor", self.max_tensor.is_some()),
            ("--within-node", self.within_node.is_some()),
            ("--strategy", self.strategy.is_some()),
            ("--recompute", self.recompute.is_some()),
            ("--norm", self.norm.is_some()),
            ("--grouping", self.grouping.is_some()),
            ("--weights", self.weights.is_some()),
            ("--objective", self.objective != ObjectiveArg::StepTime),
            ("--time-limit", self.time_limit.is_some()),
        ];
        set_flags(flags)
    }

    /// The flags that were passed and describe the mesh.
    pub fn mesh_flags(&self) -> Vec<&'static str> {
        let flags = [
            ("--devices", self.devices.is_some()),
            ("--tensor", self.tensor.is_some()),
            ("--pipeline", self.pipeline.is_some()),
            ("--context", self.context.is_some()),
            ("--context-attention", self.context_attention.is_some()),
            ("--data-parallel", self.data_parallel.is_some()),
            ("--micro-batch", self.micro_batch.is_some()),
            ("--grad-reduce-dtype", self.grad_reduce_dtype.is_some()),
            ("--zero", self.zero.is_some()),
            ("--shard-size", self.shard_size.is_some()),
            ("--schedule", self.schedule.is_some()),
            ("--overlap", self.overlap.is_some()),
        ];
        set_flags(flags)
    }

    /// A request with these sizes, not validated.
    pub fn assemble(&self, sizes: RequestSizes, model: Model, profile: Profile) -> Request {
        let RequestSizes { devices, global_batch, sequence_length } = sizes;
        Request {
            objective: self.objective.into(),
            devices,
            global_batch,
            sequence_length,
            micro_batch: self.micro_batch,
            tensor: self.tensor,
            tensor_max: self.max_tensor,
            tensor_within_node: self.within_node == Some(WithinNodeArg::Tensor),
            pipeline: self.pipeline,
            data: self.data_parallel,
            context: self.context,
            context_attention: self.context_attention.and_then(ContextAttentionArg::attention),
            grad_reduce_dtype: self.grad_reduce_dtype.map(Into::into).unwrap_or_default(),
            zero: self.zero.and_then(ZeroArg::stage),
            shard_size: self.shard_size,
            schedule: self.schedule.and_then(ScheduleArg::schedule),
            overlap_grad_reduce: self.overlap.and_then(OverlapArg::grad_reduce),
            overlap_tensor_collectives: self.overlap != Some(OverlapArg::Off),
            loro_every: None,
            overlap_microbatch_pairs: self.overlap != Some(OverlapArg::Off),
            rules: Rules {
                baseline: self.strategy.unwrap_or(Baseline::Auto),
                weights: self.weights.map_or(WeightRule::Any, WeightRule::from),
                norm: self
                    .norm
                    .map_or_else(|| input::norm_rule(self.model.model.as_deref()), NormRule::from),
                recompute: self.recompute.map_or(Recompute::Auto, Recompute::from),
            },
            grouping: self.grouping.map_or(GroupingRule::Auto, GroupingRule::from),
            memory_limit: self.memory.memory_limit,
            executor: self.executor.map(Into::into).unwrap_or_default(),
            time_limit: self.time_limit,
            model,
            profile,
        }
    }
}

impl ModelArgs {
    fn resolve_model(&self, defaults: &RequestDefaults) -> CommandResult<Model> {
        input::model(&self.model_name(defaults)?)
    }

    /// The model as typed, or the default.
    ///
    /// # Errors
    /// No model was typed, and there is no default.
    pub fn model_name(&self, defaults: &RequestDefaults) -> CommandResult<OsString> {
        self.model.clone().or(defaults.model.map(OsString::from)).ok_or_else(|| {
            let hint = "a preset such as cola-7b or llama-7b, or the path of a config.json";
            Failure::input(Problem::new("--model", "is missing").hint(hint))
        })
    }
}

/// The next multiple of `divisor`; the number itself where there is none, which validation rejects.
fn round_up(number: u64, divisor: u64) -> u64 {
    if divisor == 0 { number } else { number.checked_next_multiple_of(divisor).unwrap_or(number) }
}

/// The names of the flags that are set.
fn set_flags<const N: usize>(flags: [(&'static str, bool); N]) -> Vec<&'static str> {
    flags.into_iter().filter_map(|(flag, is_set)| is_set.then_some(flag)).collect()
}

/// Checks that the parts of a request fit each other.
///
/// # Errors
/// Every defect of the request.
pub fn validate(request: &Request) -> CommandResult<()> {
    let mut problems = Problems::default();
    problems.take(request.validate().map_err(Failure::request));
    problems.take(reject_dense_baseline_of_low_rank(request));
    problems.take(reject_cost_of_shared_machine(request));
    problems.into_result()
}

/// Rejects a second `-` among inputs.
pub fn at_most_one_stdin<'a>(inputs: impl IntoIterator<Item = &'a OsString>) -> CommandResult<()> {
    if inputs.into_iter().filter(|input| input::is_stdin(input)).count() < 2 {
        return Ok(());
    }
    let message = "two inputs are `-`, but there is one standard input";
    Err(Failure::input(Problem::new("-", message).hint("a file for all but one")))
}

/// Rejects the least cost on devices that are parts of one machine, whose number does not change what it costs.
fn reject_cost_of_shared_machine(request: &Request) -> CommandResult<()> {
    let measured = request.profile.file().measured.as_ref();
    let is_shared = measured.is_some_and(|measured| measured.devices_share_machine());
    if request.objective != Objective::Cost || !is_shared {
        return Ok(());
    }
    let message = format!(
        "devices of `{}` are parts of one machine, so that using fewer of them does not make a step cheaper",
        request.profile.name()
    );
    let problem = Problem::new("--objective", message);
    Err(Failure::input(
        problem.hint("--objective step-time, which is also the least cost of a machine"),
    ))
}

/// Rejects baselines that shard dense linears for a low-rank model.
pub fn reject_dense_baseline_of_low_rank(request: &Request) -> CommandResult<()> {
    let model = &request.model;
    let baseline = request.rules.baseline;
    if !baseline.is_for_dense_models() || !model.is_low_rank() {
        return Ok(());
    }
    let dense = model.dense_counterpart().name;
    let message =
        format!("`{}` is for dense models, and `{}` is low-rank", baseline.name(), model.name);
    let problem = Problem::new("--strategy", message);
    let problem = if presets::find(&dense).is_ok() {
        problem.hint(format!("--model {dense}, its dense counterpart"))
    } else {
        let hint = "a model file of its dense counterpart";
        problem.hint(format!("{hint} `{dense}`: every linear \"dense\""))
    };
    Err(Failure::input(problem.hint("--strategy vanilla-tp or --strategy btp for this model")))
}
