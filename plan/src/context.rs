//! The context of a plan: mesh, workload, number formats, ZeRO stage, schedule and overlap.

use std::num::NonZeroU64;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mesh::{Axis, DeviceGroup, Mesh, Workload};
use crate::model::Model;
use crate::{DType, Dim, GradReduceDtype, Layout, Precision};

/// Sharding of optimizer states, gradients and weights over the data axis.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Zero {
    /// All optimizer states on every replica; gradients are all-reduced.
    Off,
    /// ZeRO-1: gradients are reduce-scattered, each replica updates its part of the fp32 states,
    /// new weights are all-gathered.
    One,
    /// ZeRO-2: as ZeRO-1, and each replica accumulates only its part of the gradients of blocks, which are
    /// reduce-scattered in the backward pass of every microbatch.
    Two,
    /// ZeRO-3: as ZeRO-2, and each replica stores only its part of the weights of blocks, which are all-gathered before
    /// each pass that reads them.
    Three,
}

impl Zero {
    /// The name in reports, with the replicas of a shard group where these are not all: "ZeRO-3 in groups of 8". `None`
    /// without ZeRO.
    pub fn label(self, shard_size: Option<u64>) -> Option<String> {
        let groups = shard_size.map_or(String::new(), |size| format!(" in groups of {size}"));
        (self != Zero::Off).then(|| format!("ZeRO-{}{groups}", self.stage()))
    }

    /// The number of the stage; 0 without ZeRO.
    pub fn stage(self) -> u64 {
        match self {
            Zero::Off => 0,
            Zero::One => 1,
            Zero::Two => 2,
            Zero::Three => 3,
        }
    }
}

/// The order in which pipeline stages run the passes of their microbatches.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub enum PipelineSchedule {
    /// One forward and one backward pass in turn.
    #[default]
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B with the weight gradients of blocks in passes of their own, which fill the time in which stages would wait.
    #[serde(rename = "zero-bubble")]
    ZeroBubble,
    /// 1F1B through several chunks of the model on each stage.
    #[serde(rename = "interleaved")]
    Interleaved,
}

impl PipelineSchedule {
    /// All schedules.
    pub const ALL: [PipelineSchedule; 3] = [
        PipelineSchedule::OneForwardOneBackward,
        PipelineSchedule::ZeroBubble,
        PipelineSchedule::Interleaved,
    ];

    /// Whether a stage has several chunks of the model.
    pub fn has_chunks(self) -> bool {
        match self {
            PipelineSchedule::Interleaved => true,
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => false,
        }
    }

    /// Whether weight gradients of blocks may have passes of their own, on other stages than the first.
    pub fn defers_weight_gradients(self) -> bool {
        match self {
            PipelineSchedule::ZeroBubble => true,
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => false,
        }
    }

    /// The name in reports, with the number of chunks of a stage where there are several.
    pub fn label(self, chunks: u64) -> String {
        match self.has_chunks() {
            true => format!("{} ({chunks} chunks)", self.name()),
            false => self.name().into(),
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            PipelineSchedule::OneForwardOneBackward => "1F1B",
            PipelineSchedule::ZeroBubble => "zero-bubble",
            PipelineSchedule::Interleaved => "interleaved",
        }
    }

    /// The number that the microbatches of a replica are a multiple of where passes run two.
    pub(crate) fn paired_microbatch_multiple(self, stages: u64) -> u64 {
        match self {
            PipelineSchedule::Interleaved => 2 * stages,
            PipelineSchedule::OneForwardOneBackward | PipelineSchedule::ZeroBubble => 2,
        }
    }

    pub(crate) fn is_default(&self) -> bool {
        *self == PipelineSchedule::default()
    }
}

/// The collectives around attention on a context axis, and the positions of each sequence that its devices have.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ContextAttention {
    /// Positions are exchanged for heads by all-to-all (DeepSpeed-Ulysses). Each device has consecutive positions.
    #[default]
    Exchange,
    /// Keys and values of all positions are all-gathered, and their gradients reduce-scattered; queries stay (as in
    /// Llama 3). Of 2C chunks of positions, device i has the chunks i and 2C − 1 − i, so that causal work is balanced
    /// (zigzag).
    Gather,
    /// Keys and values are passed around the axis while attention to the part before is computed, in the backward pass
    /// together with their gradients (ring attention). Queries stay, with the positions of `gather`.
    Ring,
}

impl ContextAttention {
    /// All forms.
    pub const ALL: [ContextAttention; 3] =
        [ContextAttention::Exchange, ContextAttention::Gather, ContextAttention::Ring];

    /// The name in plans and messages.
    pub fn name(self) -> &'static str {
        match self {
            ContextAttention::Exchange => "exchange",
            ContextAttention::Gather => "gather",
            ContextAttention::Ring => "ring",
        }
    }

    /// Whether each device has two chunks of the positions of a sequence, in zigzag order.
    pub fn is_zigzag(self) -> bool {
        self != ContextAttention::Exchange
    }

    /// Whether attention can divide the heads of a model over the devices of a mesh that has a context axis.
    pub fn divides_heads(self, mesh: &Mesh, model: &Model) -> bool {
        let parts = self.head_parts(mesh);
        let divides = |heads: u64| heads.is_multiple_of(parts);
        mesh.context == 1 || divides(model.heads) && divides(model.kv_heads)
    }

    /// Parts of the heads of attention on a mesh with a context axis.
    pub fn head_parts(self, mesh: &Mesh) -> u64 {
        match self {
            ContextAttention::Exchange => mesh.tensor * mesh.context,
            ContextAttention::Gather | ContextAttention::Ring => mesh.tensor,
        }
    }

    /// Whether the devices of the context axis have equally many positions of a sequence.
    pub fn divides_positions(self, mesh: &Mesh, sequence_length: u64) -> bool {
        sequence_length.is_multiple_of(self.position_parts(mesh))
    }

    /// Runs of consecutive positions that all devices of a context axis have.
    pub fn position_parts(self, mesh: &Mesh) -> u64 {
        if self.is_zigzag() && mesh.context > 1 { 2 * mesh.context } else { mesh.context }
    }

    /// Whether plan files and answers leave the key out.
    pub fn is_default(&self) -> bool {
        *self == ContextAttention::default()
    }
}

/// Division of the gradients or the weights of a stage's first block into buckets. The gradients are the last to be complete in a
/// backward pass, and the weights are the first that the next step reads, so that of a whole bucket nothing is hidden.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BucketSplit {
    /// One bucket.
    #[default]
    Whole,
    /// The ops behind attention have a bucket, which overlaps with attention; those before it have another.
    AtAttention,
    /// Each linear has a bucket, with the norms next to it. Those of q, k and v that read the block's input share one with
    /// the block's first norm.
    ByLinear,
}

impl BucketSplit {
    /// All divisions.
    pub const ALL: [BucketSplit; 3] =
        [BucketSplit::Whole, BucketSplit::AtAttention, BucketSplit::ByLinear];
    /// Divisions into several buckets.
    pub const SPLITS: [BucketSplit; 2] = [BucketSplit::AtAttention, BucketSplit::ByLinear];

    /// Whether plan files leave the key out.
    pub fn is_default(&self) -> bool {
        *self == BucketSplit::default()
    }
}

/// Mesh, attention on the context axis, workload, number formats, ZeRO stage, schedule and overlap, which strategies
/// and their instructions depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// The device mesh.
    pub mesh: Mesh,
    /// The collectives around attention on the context axis, without effect where that has one device.
    pub context_attention: ContextAttention,
    /// The work of a step.
    pub workload: Workload,
    /// Whether a step has several microbatches, whose weight gradients are summed. With one, GEMMs overwrite the weight
    /// gradients of the last step. The passes of a microbatch depend on nothing else of their number.
    pub accumulates_gradients: bool,
    /// Number formats.
    pub precision: Precision,
    /// Format in which gradients are reduced over the replicas.
    pub grad_reduce_dtype: GradReduceDtype,
    /// Sharding of optimizer states, gradients and weights over replicas.
    pub zero: Zero,
    /// Neighbouring replicas that together hold one copy of the states that ZeRO shards; 1 without ZeRO. Where there
    /// are more replicas, each such group has a copy (hybrid sharding).
    pub shard_size: u64,
    /// The order of passes.
    pub schedule: PipelineSchedule,
    /// Chunks of the model on each stage; 1 unless the schedule is interleaved.
    pub chunks: u64,
    /// Whether collectives over the data axis overlap with computation: reductions of gradients during the last
    /// backward pass, and the collectives that ZeRO-2 and ZeRO-3 have in every pass.
    pub overlap_grad_reduce: bool,
    /// Whether the gathers of updated weights at the end of a step overlap with the first forward pass of the next step,
    /// where [`gathers_in_forward`](Context::gathers_in_forward) allows it.
    pub overlap_param_gather: bool,
    /// Whether tensor-axis collectives of activation gradients overlap with the weight-gradient GEMMs of the linears
    /// that computed them.
    pub overlap_tensor_collectives: bool,
    /// Whether a pass runs two microbatches, whose instructions alternate so that the collectives of activations of one
    /// overlap with the computation of the other.
    pub overlap_microbatch_pairs: bool,
    /// The buckets of the gradients of a stage's first block, where
    /// [`can_split_gradient_bucket`](Context::can_split_gradient_bucket) holds.
    pub last_gradient_bucket: BucketSplit,
    /// The gather buckets of the weights of a stage's first block, where
    /// [`gathers_in_forward`](Context::gathers_in_forward) holds.
    pub first_gather_bucket: BucketSplit,
    /// Steps from one exact step of the optimizer LORO to the next; `None` with AdamW.
    pub loro_every: Option<NonZeroU64>,
}

impl Context {
    /// A context with the 1F1B schedule and without overlap, in which gradients are reduced in fp32 and ZeRO shards
    /// over all replicas.
    ///
    /// # Panics
    /// A mesh or a microbatch of size zero, which `Plan::context` and the planner refuse first.
    pub fn new(mesh: Mesh, workload: Workload, precision: Precision, zero: Zero) -> Context {
        Context {
            mesh,
            context_attention: ContextAttention::Exchange,
            workload,
            accumulates_gradients: workload.microbatches(&mesh) > 1,
            precision,
            grad_reduce_dtype: GradReduceDtype::Fp32,
            zero,
            shard_size: if zero == Zero::Off { 1 } else { mesh.replicas() },
            schedule: PipelineSchedule::OneForwardOneBackward,
            chunks: 1,
            overlap_grad_reduce: false,
            overlap_param_gather: false,
            overlap_tensor_collectives: false,
            overlap_microbatch_pairs: false,
            last_gradient_bucket: BucketSplit::Whole,
            first_gather_bucket: BucketSplit::Whole,
            loro_every: None,
        }
    }

    /// Whether each replica accumulates only its part of the gradients of blocks.
    pub fn shards_gradients(&self) -> bool {
        self.zero >= Zero::Two && self.shard_size > 1
    }

    /// Whether each replica stores only its part of the weights of blocks.
    pub fn shards_weights(&self) -> bool {
        self.zero == Zero::Three && self.shard_size > 1
    }

    /// Whether updated weights of blocks and of the head are gathered during the first forward pass of the next step: with
    /// ZeRO-1 and ZeRO-2, whose passes read whole weights, and one chunk per stage.
    pub fn gathers_in_forward(&self) -> bool {
        self.overlap_param_gather
            && self.shard_size > 1
            && !self.shards_weights()
            && self.chunks == 1
    }

    /// Whether parts of a block's gradients can be reduced before others. With ZeRO-2 and ZeRO-3 each backward pass ends with the
    /// reduction of the first block's gradients.
    pub fn can_split_gradient_bucket(&self) -> bool {
        self.overlap_grad_reduce && self.mesh.replicas() > 1 && !self.shards_gradients()
    }

    /// The context in which the buckets of first blocks are whole.
    pub fn with_whole_buckets(self) -> Context {
        let (last_gradient_bucket, first_gather_bucket) = (BucketSplit::Whole, BucketSplit::Whole);
        Context { last_gradient_bucket, first_gather_bucket, ..self }
    }

    /// Whether gradients are rounded for their reduction over the replicas.
    pub fn rounds_gradients(&self) -> bool {
        self.grad_reduce_dtype == GradReduceDtype::Bf16
    }

    /// Whether reduced parts of sharded gradients are added to the parts of earlier microbatches. With one microbatch a
    /// step the parts are the sums already. Rounded parts are added nevertheless, to zeros, which widens them.
    pub fn accumulates_parts(&self) -> bool {
        self.shards_gradients() && (self.accumulates_gradients || self.rounds_gradients())
    }

    /// The replicas that share one copy of the states that ZeRO shards.
    pub fn shard_group(&self) -> DeviceGroup {
        DeviceGroup { size: self.shard_size, ..self.mesh.group(Axis::Data) }
    }

    /// Position of a replica in its shard group, which is the index of its part.
    pub fn shard_position(&self, replica: u64) -> u64 {
        replica % self.shard_size.max(1)
    }

    /// The replicas that hold the same shard: all replicas without ZeRO, one where ZeRO shards over all.
    pub fn replica_group(&self) -> DeviceGroup {
        let data = self.mesh.group(Axis::Data);
        let size = data.size / self.shard_size;
        DeviceGroup { size, stride: data.stride * self.shard_size, ..data }
    }

    /// Number of chunks of all stages.
    pub fn virtual_stages(&self) -> usize {
        (self.mesh.pipeline * self.chunks) as usize
    }

    /// The virtual stage that is this chunk of a stage.
    pub fn virtual_stage(&self, stage: usize, chunk: usize) -> usize {
        chunk * self.mesh.pipeline as usize + stage
    }

    /// The stage of a virtual stage, and its chunk there.
    pub fn stage_and_chunk(&self, virtual_stage: usize) -> (usize, usize) {
        let stages = self.mesh.pipeline as usize;
        (virtual_stage % stages, virtual_stage / stages)
    }

    /// The axis that names the collectives of activations in reports: tensor where there is one.
    pub fn activation_axis(&self) -> Axis {
        if self.mesh.tensor == 1 { Axis::Context } else { Axis::Tensor }
    }

    /// Whether passes may have collectives of activations.
    pub fn has_activation_collectives(&self) -> bool {
        self.mesh.tensor > 1 || self.mesh.context > 1
    }

    /// Whether passes can run two microbatches: where they have collectives of activations and no other overlap, and an even
    /// number of microbatches. Ring attention overlaps its own transfers.
    pub fn can_pair_microbatches(&self) -> bool {
        let multiple = self.schedule.paired_microbatch_multiple(self.mesh.pipeline);
        self.has_activation_collectives()
            && !self.rotates_keys()
            && !self.overlap_tensor_collectives
            && !self.shards_gradients()
            && self.workload.microbatches(&self.mesh).is_multiple_of(multiple)
    }

    /// Microbatches that one pass runs.
    pub fn pass_microbatches(&self) -> u64 {
        if self.overlap_microbatch_pairs { 2 } else { 1 }
    }

    /// Forward passes of a step through each chunk.
    pub fn passes(&self) -> u64 {
        self.workload.microbatches(&self.mesh) / self.pass_microbatches()
    }

    /// Devices along the tensor axis.
    pub fn tensor_size(&self) -> u64 {
        self.mesh.tensor
    }

    /// Format of weights and activations.
    pub fn compute_dtype(&self) -> DType {
        self.precision.compute_dtype()
    }

    /// The dim on which tokens may be sharded over the tensor axis, if any.
    ///
    /// Whole sequences where they divide, otherwise positions. Kernels and bytes are equal for both, but
    /// with whole sequences attention is local and no reshard packs, so positions are never cheaper.
    pub fn token_dim(&self) -> Option<Dim> {
        let devices = self.tensor_size();
        if devices == 1 {
            None
        } else if self.workload.micro_batch.is_multiple_of(devices) {
            Some(Dim::Sequence)
        } else if self.positions().is_multiple_of(devices) {
            Some(Dim::Position)
        } else {
            None
        }
    }

    /// Positions of a sequence at one place of the context axis.
    pub fn positions(&self) -> u64 {
        self.workload.sequence_length / self.mesh.context
    }

    /// Tokens of one microbatch at one place of the context axis.
    pub fn tokens(&self) -> u64 {
        self.workload.micro_batch * self.positions()
    }

    /// Rows (tokens) of an activation in `layout` on one device.
    pub fn rows(&self, layout: Layout) -> u64 {
        match layout {
            Layout::Sharded(Dim::Sequence | Dim::Position) => self.tokens() / self.tensor_size(),
            Layout::Heads | Layout::Gathered => self.workload.tokens(),
            _ => self.tokens(),
        }
    }

    /// Features of an activation of this width in `layout` on one device.
    pub fn columns(&self, width: u64, layout: Layout) -> u64 {
        match layout {
            Layout::Sharded(Dim::Feature) | Layout::Gathered => width / self.tensor_size(),
            Layout::Heads => width / (self.tensor_size() * self.mesh.context),
            _ => width,
        }
    }

    /// Whether attention reads the keys and values that devices of the context axis gathered.
    pub fn gathers_keys(&self) -> bool {
        self.mesh.context > 1 && self.context_attention == ContextAttention::Gather
    }

    /// Whether keys and values rotate around the context axis.
    pub fn rotates_keys(&self) -> bool {
        self.mesh.context > 1 && self.context_attention == ContextAttention::Ring
    }

    /// Whether each device of the context axis has two chunks of the positions of a sequence, in zigzag order.
    pub fn has_zigzag_positions(&self) -> bool {
        self.mesh.context > 1 && self.context_attention.is_zigzag()
    }

    /// The layout at each place of the context axis of a tensor that is made of heads, before and after the collectives
    /// around attention.
    pub(crate) fn heads_by_position(&self) -> Layout {
        match self.tensor_size() {
            1 => Layout::Replicated,
            _ => Layout::Sharded(Dim::Feature),
        }
    }

    /// Whether a shard of tokens along an axis is one contiguous piece of memory.
    pub(crate) fn tokens_contiguous(&self, dim: Dim, axis: Axis) -> bool {
        let has_two_chunks = axis == Axis::Context && self.has_zigzag_positions();
        dim == Dim::Sequence || self.workload.micro_batch == 1 && !has_two_chunks
    }

    /// Replicas of a shard group; `None` without ZeRO, and where these are all replicas.
    pub fn partial_shard_size(&self) -> Option<u64> {
        let is_partial = self.zero != Zero::Off && self.shard_size != self.mesh.replicas();
        is_partial.then_some(self.shard_size)
    }

    /// Devices along `axis`.
    pub fn axis_size(&self, axis: Axis) -> u64 {
        self.mesh.axis_size(axis)
    }
}
