//! The planner's input.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use narrows_cost_model::{Executor, Profile};
use narrows_plan::graph::Grouping;
use narrows_plan::model::Model;
use narrows_plan::strategy::{Rules, TiedWeightLayout};
use narrows_plan::{
    Bytes, ContextAttention, GEMM_SIZE_MAX, GradReduceDtype, PipelineSchedule, Zero,
};

use crate::objective::Objective;

/// All inputs of a search. A size that is `None` is searched.
#[derive(Clone, Debug)]
pub struct Request {
    /// Quantity that the search minimises.
    pub objective: Objective,
    /// The model to train.
    pub model: Model,
    /// The hardware.
    pub profile: Profile,
    /// Number of devices; the largest one for the least cost.
    pub devices: u64,
    /// Sequences in a step.
    pub global_batch: u64,
    /// Tokens in a sequence.
    pub sequence_length: u64,
    /// Sequences of one microbatch.
    pub micro_batch: Option<u64>,
    /// Devices along the tensor axis.
    pub tensor: Option<u64>,
    /// Largest tensor axis to search.
    pub tensor_max: Option<u64>,
    /// Whether the devices of a tensor axis must be in one node.
    pub tensor_within_node: bool,
    /// Pipeline stages.
    pub pipeline: Option<u64>,
    /// Devices along the data axis.
    pub data: Option<u64>,
    /// Devices along the context axis.
    pub context: Option<u64>,
    /// The collectives around attention on a context axis.
    pub context_attention: Option<ContextAttention>,
    /// Format in which gradients are reduced over the replicas. It changes the gradients that are computed, so it is
    /// not searched.
    pub grad_reduce_dtype: GradReduceDtype,
    /// ZeRO stage.
    pub zero: Option<Zero>,
    /// Neighbouring replicas that together hold one copy of the states that ZeRO shards.
    pub shard_size: Option<u64>,
    /// The order of passes; on one stage, all orders are 1F1B.
    pub schedule: Option<PipelineSchedule>,
    /// Whether gradients are reduced during the last backward pass.
    pub overlap_grad_reduce: Option<bool>,
    /// Whether collectives of activation gradients may overlap with weight-gradient GEMMs.
    pub overlap_tensor_collectives: bool,
    /// Steps from one exact step of the optimizer LORO to the next; `None` with AdamW. The step time that a search minimises is the
    /// average with them.
    pub loro_every: Option<NonZeroU64>,
    /// Whether passes may run two microbatches, of which the collectives of activations of one overlap with the computation of
    /// the other, where that is faster.
    pub overlap_microbatch_pairs: bool,
    /// Restrictions on strategies.
    pub rules: Rules,
    /// Groupings to search.
    pub grouping: GroupingRule,
    /// Memory that a device may use.
    pub memory_limit: MemoryLimit,
    /// Launch mode of kernels.
    pub executor: Executor,
    /// Wall time after which the search stops.
    pub time_limit: Option<Duration>,
}

/// A size of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestField {
    /// [`Request::devices`].
    Devices,
    /// [`Request::global_batch`].
    GlobalBatch,
    /// [`Request::sequence_length`].
    SequenceLength,
    /// [`Request::micro_batch`].
    MicroBatch,
    /// [`Request::tensor`].
    Tensor,
    /// [`Request::tensor_max`].
    TensorMax,
    /// [`Request::pipeline`].
    Pipeline,
    /// [`Request::data`].
    Data,
    /// [`Request::context`].
    Context,
    /// [`Request::context_attention`].
    ContextAttention,
    /// [`Request::grad_reduce_dtype`].
    GradReduceDtype,
    /// [`Request::shard_size`].
    ShardSize,
    /// [`Request::loro_every`].
    LoroEvery,
}

/// The name in messages.
impl fmt::Display for RequestField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RequestField::Devices => "devices",
            RequestField::GlobalBatch => "global batch",
            RequestField::SequenceLength => "sequence length",
            RequestField::MicroBatch => "microbatch",
            RequestField::Tensor => "tensor axis",
            RequestField::TensorMax => "largest tensor axis",
            RequestField::Pipeline => "pipeline axis",
            RequestField::Data => "data axis",
            RequestField::Context => "context axis",
            RequestField::ContextAttention => "attention on a context axis",
            RequestField::GradReduceDtype => "gradient reduction",
            RequestField::ShardSize => "shard group",
            RequestField::LoroEvery => "exact steps",
        })
    }
}

/// An invalid size of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct RequestDefect {
    /// The size.
    pub field: RequestField,
    /// The problem, as one sentence without a full stop.
    pub problem: String,
    /// A change to try.
    pub hint: Option<String>,
}

/// Every defect of a request; never empty when returned as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestDefects(pub Vec<RequestDefect>);

impl std::error::Error for RequestDefects {}

impl fmt::Display for RequestDefects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(RequestDefect::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// Groupings to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupingRule {
    /// Every grouping.
    Auto,
    /// Only the grouping of all factors with a common input.
    On,
    /// No grouping.
    Off,
}

/// Memory that a device may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The profile's memory minus its reserve.
    Auto,
    /// No limit.
    None,
    /// Size of the arena.
    Bytes(Bytes),
}

impl GroupingRule {
    /// The groupings that the rule allows.
    pub(crate) fn groupings(self) -> &'static [Grouping] {
        match self {
            GroupingRule::Auto => &Grouping::ALL,
            GroupingRule::On => &Grouping::ALL[..1],
            GroupingRule::Off => &Grouping::ALL[3..],
        }
    }
}

impl Request {
    /// A request for the fastest plan of the whole search space: all sizes are searched, the memory is the profile's,
    /// kernels are captured in graphs, and there is no time limit.
    pub fn new(
        model: Model,
        profile: Profile,
        devices: u64,
        global_batch: u64,
        sequence_length: u64,
    ) -> Request {
        Request {
            objective: Objective::StepTime,
            model,
            profile,
            devices,
            global_batch,
            sequence_length,
            micro_batch: None,
            tensor: None,
            tensor_max: None,
            tensor_within_node: false,
            pipeline: None,
            data: None,
            context: None,
            context_attention: None,
            grad_reduce_dtype: GradReduceDtype::Fp32,
            zero: None,
            shard_size: None,
            schedule: None,
            overlap_grad_reduce: None,
            overlap_tensor_collectives: true,
            loro_every: None,
            overlap_microbatch_pairs: true,
            rules: Rules::ALL,
            grouping: GroupingRule::Auto,
            memory_limit: MemoryLimit::Auto,
            executor: Executor::Captured,
            time_limit: None,
        }
    }

    /// The possible layouts of a tied weight; one `None` for a model without a tied weight.
    pub(crate) fn tied_weights(&self) -> Vec<Option<TiedWeightLayout>> {
        if self.model.tied {
            TiedWeightLayout::ALL.into_iter().map(Some).collect()
        } else {
            vec![None]
        }
    }

    /// Whether [`tensor_max`](Request::tensor_max) and [`tensor_within_node`](Request::tensor_within_node) allow a
    /// tensor axis of this size. Devices fill nodes in rank order, and the tensor axis is the innermost.
    pub(crate) fn allows_tensor(&self, tensor: u64) -> bool {
        let per_node = self.profile.devices_per_node();
        let within_node = per_node.is_multiple_of(tensor) || self.devices <= per_node;
        self.tensor_max.is_none_or(|max| tensor <= max) && (within_node || !self.tensor_within_node)
    }

    /// Largest arena of a device.
    pub fn arena_limit(&self) -> Bytes {
        match self.memory_limit {
            MemoryLimit::Auto => self.profile.usable_memory(),
            MemoryLimit::None => Bytes(u64::MAX),
            MemoryLimit::Bytes(bytes) => bytes,
        }
    }

    /// The sizes that no request takes, whatever its others are.
    pub fn sizes_out_of_range(&self) -> Vec<RequestDefect> {
        // A plan with an axis of 0 devices has 0 devices.
        let devices = Some(self.devices).filter(|_| self.fixed_axes() > 0);
        let sizes = [
            (RequestField::Devices, devices, 1 << 20),
            (RequestField::GlobalBatch, Some(self.global_batch), 1 << 24),
            (RequestField::SequenceLength, Some(self.sequence_length), 1 << 24),
            (RequestField::MicroBatch, self.micro_batch, 1 << 24),
            (RequestField::Tensor, self.tensor, 1 << 20),
            (RequestField::TensorMax, self.tensor_max, 1 << 20),
            (RequestField::Pipeline, self.pipeline, 1 << 20),
            (RequestField::Data, self.data, 1 << 20),
            (RequestField::Context, self.context, 1 << 20),
            (RequestField::ShardSize, self.shard_size, 1 << 20),
        ];
        let defect = |(field, size, max): (RequestField, Option<u64>, u64)| {
            let size = size.filter(|size| *size == 0 || *size > max)?;
            let problem = format!("{size} is not between 1 and {max}");
            Some(RequestDefect { field, problem, hint: None })
        };
        sizes.into_iter().filter_map(defect).collect()
    }

    /// Checks that the sizes fit each other and the model.
    ///
    /// # Errors
    /// Every defect.
    pub fn validate(&self) -> Result<(), RequestDefects> {
        let mut defects = self.sizes_out_of_range();
        let mut push = |field, problem, hint: Option<&str>| {
            defects.push(RequestDefect { field, problem, hint: hint.map(str::to_owned) });
        };
        if self.sequence_length > self.model.max_sequence_length {
            let problem = format!(
                "{} tokens exceed the {} that `{}` supports",
                self.sequence_length, self.model.max_sequence_length, self.model.name
            );
            let hint = format!(
                "a shorter sequence; a larger max_sequence_length in a model file, or max_position_embeddings in a \
                 config.json; or --sweep sequence_length={} of `narrows whatif`, which prices any length",
                self.sequence_length
            );
            push(RequestField::SequenceLength, problem, Some(&hint));
        }
        let tokens = |sequences: u64| sequences.saturating_mul(self.sequence_length);
        if let Some(size) = self.micro_batch.filter(|size| tokens(*size) > GEMM_SIZE_MAX) {
            let problem = format!(
                "{size} sequences of {} tokens exceed {GEMM_SIZE_MAX} tokens, the most that a kernel can index",
                self.sequence_length
            );
            push(RequestField::MicroBatch, problem, Some("a smaller --micro-batch"));
        }
        let precision = self.profile.precision();
        if !self.grad_reduce_dtype.suits(precision) {
            let name = self.profile.name();
            let problem = format!("`bf16` needs mixed precision, but `{name}` computes in fp32");
            let hint = "fp32, or hardware with the precision mixed-bf16";
            push(RequestField::GradReduceDtype, problem, Some(hint));
        }
        if self.loro_every.is_some()
            && let Some(obstacle) = self.model.exact_step_obstacle()
        {
            push(RequestField::LoroEvery, obstacle.reason, Some(obstacle.hint));
        }
        let stages_max = self.model.stages_max();
        if let Some(stages) = self.pipeline.filter(|stages| *stages > stages_max) {
            let problem = format!(
                "{stages} stages exceed the model's {} blocks, embedding and head",
                self.model.blocks.len()
            );
            let hint = "at most one stage per block, one for the embedding and one for the head";
            push(RequestField::Pipeline, problem, Some(hint));
        }
        if let Some(tensor) = self.tensor.filter(|tensor| !self.allows_tensor(*tensor)) {
            let per_node = self.profile.devices_per_node();
            let problem = match self.tensor_max {
                Some(max) if tensor > max => format!("{tensor} exceeds the largest allowed, {max}"),
                _ => format!("axes of {tensor} devices cross nodes of {per_node}"),
            };
            push(
                RequestField::Tensor,
                problem,
                Some("a smaller tensor axis, or fewer constraints"),
            );
        }
        if defects.is_empty() {
            defects.extend(self.defect_of_context_axis());
        }
        if defects.is_empty() {
            defects.extend(self.defect_of_fixed_axes());
        }
        if let Some(size) = self.shard_size.filter(|_| defects.is_empty()) {
            let defect = |problem: String, hint: &str| {
                let (field, hint) = (RequestField::ShardSize, Some(hint.to_owned()));
                RequestDefect { field, problem, hint }
            };
            let (replicas, what, divided) = match (self.data, self.fixed_context()) {
                (Some(data), Some(1)) => (data, "replicas", "the data axis"),
                (Some(data), Some(context)) => (data * context, "replicas", "data × context"),
                _ => (self.devices, "devices", "the data axis"),
            };
            if size == 1 {
                defects
                    .push(defect("a shard group needs at least two replicas".into(), "at least 2"));
            } else if self.zero == Some(Zero::Off) {
                let problem = "without ZeRO nothing is sharded over replicas".into();
                defects.push(defect(problem, "leave it out, or another ZeRO stage"));
            } else if !replicas.is_multiple_of(size) {
                let problem = format!("{replicas} {what} do not divide into groups of {size}");
                defects.push(defect(problem, &format!("a divisor of {divided}")));
            }
        }
        if defects.is_empty() { Ok(()) } else { Err(RequestDefects(defects)) }
    }

    /// The product of the fixed axes.
    pub(crate) fn fixed_axes(&self) -> u64 {
        let fixed = [self.tensor, self.pipeline, self.context, self.data].into_iter().flatten();
        fixed.fold(1_u64, |product, size| product.saturating_mul(size))
    }

    fn defect_of_fixed_axes(&self) -> Option<RequestDefect> {
        let (devices, product) = (self.devices, self.fixed_axes());
        let are = if devices == 1 { "device is" } else { "devices are" };
        let (problem, axes) = match self.objective {
            // The least cost may be that of fewer devices.
            Objective::Cost if product > devices => {
                let problem = format!("{devices} {are} fewer than {product}");
                (problem, "axes whose product is at most the number of devices")
            }
            Objective::Cost => return None,
            _ if devices.is_multiple_of(product) => return None,
            _ => {
                let problem = format!("{devices} {are} not a multiple of {product}");
                (problem, "axes whose product divides the number of devices")
            }
        };
        let problem = format!("{problem}, the product of the fixed axes");
        let enough = devices.checked_next_multiple_of(product).unwrap_or(product);
        let hint = Some(format!("{enough} devices, or {axes}"));
        Some(RequestDefect { field: RequestField::Devices, problem, hint })
    }
}
