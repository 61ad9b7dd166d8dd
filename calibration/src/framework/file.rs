//! The JSON form of a framework's table, `narrows-framework/1`.
//!
//! A table states what a framework launches for a decoder: its attention kernel, the passes over memory of each
//! segment, the host's time, and what it communicates for sharded parameters. It has no value that is indexed by a
//! model, a mesh or a device.

use narrows_cost_model::profile::Provenance;
use narrows_plan::Zero;
use serde::{Deserialize, Serialize};

use super::errors::StepErrors;

/// The table of a framework.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrameworkTable {
    /// Version of the format.
    pub format: TableFormat,
    /// The name in measurements files.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// GEMMs of linears that share an input.
    pub linears: LinearGrouping,
    /// The attention kernel.
    pub attention: AttentionKernel,
    /// Passes over memory.
    pub passes: SegmentPasses,
    /// Recomputation of whole blocks.
    pub block_recomputation: BlockRecomputation,
    /// Time of the host.
    pub host: HostCosts,
    /// Time of the device.
    #[serde(default)]
    pub device: DeviceCosts,
    /// Tokens of the residual stream over the tensor axis, unless a step states it.
    pub tokens: TokenSharding,
    /// Sums over the tensor axis in backward passes.
    #[serde(default)]
    pub tensor_collectives: TensorCollectives,
    /// Transfers between stages.
    #[serde(default)]
    pub transfers: StageTransfers,
    /// Communication and updates of parameters.
    pub parameters: ParameterCosts,
    /// Division of blocks among pipeline stages.
    pub stages: StageDivision,
    /// Factors on the prices of the profile, for everything that scales with them and is not counted.
    pub factors: PriceFactors,
    /// Errors of measured steps.
    pub errors: StepErrors,
    /// Provenance of the values.
    pub provenance: Provenance,
}

/// Version of the format of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TableFormat {
    /// The only version so far.
    #[serde(rename = "narrows-framework/1")]
    V1,
}

/// GEMMs of linears that share an input: q, k and v; gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LinearGrouping {
    /// One GEMM for all of them.
    Grouped,
    /// One GEMM each.
    Separate,
}

/// Recomputation of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BlockRecomputation {
    /// Until the last saved tensor: the last linear and what follows it are not repeated.
    UntilLastSaved,
    /// The whole forward pass.
    Whole,
}

/// The attention kernel. Efficiencies are relative to the curves of the profile, which are those of FlashAttention-2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttentionKernel {
    /// Name and generation, for a reader.
    pub kernel: String,
    /// Efficiency of the forward pass over that of the profile.
    pub forward: f64,
    /// Efficiency of the backward pass over that of the profile.
    pub backward: f64,
    /// Scores of all heads.
    #[serde(default)]
    pub scores: AttentionScores,
    /// The fused softmax applies where this divides the matrices of scores on a device.
    #[serde(default = "one")]
    pub fused_softmax_matrices: u64,
}

/// The scores of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AttentionScores {
    /// They stay in the fused kernel.
    #[default]
    Kernel,
    /// They are written to memory: attention is two GEMMs with the passes of `attention_core` between them.
    Memory,
}

/// Passes over memory of each segment and direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SegmentPasses {
    /// A block, forward, without the core of attention.
    pub block_forward: Vec<MemoryPass>,
    /// The core of attention, forward, as selective recomputation repeats it.
    #[serde(default)]
    pub attention_core: Vec<MemoryPass>,
    /// A block, backward.
    pub block_backward: Vec<MemoryPass>,
    /// The embedding, forward.
    pub embedding_forward: Vec<MemoryPass>,
    /// The embedding, backward.
    pub embedding_backward: Vec<MemoryPass>,
    /// Last norm, logits and loss, forward.
    pub head_forward: Vec<MemoryPass>,
    /// The same, backward.
    pub head_backward: Vec<MemoryPass>,
}

/// Launches that read and write memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemoryPass {
    /// The tensor whose elements are counted.
    pub of: PassTensor,
    /// Bytes read and written for each element by one launch.
    #[serde(rename = "bytes")]
    pub bytes_per_element: u64,
    /// Launches.
    #[serde(default = "one")]
    pub times: u64,
    /// The steps that have this pass.
    #[serde(default)]
    pub only: PassCondition,
}

fn one() -> u64 {
    1
}

/// The tensor that a pass reads and writes, on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PassTensor {
    /// The residual stream.
    Hidden,
    /// The residual stream before its tokens are sharded.
    AllHidden,
    /// Scores of attention.
    Scores,
    /// Queries, or the context.
    Queries,
    /// Keys, or values.
    Keys,
    /// An inner tensor of the MLP.
    Mlp,
    /// Logits.
    Logits,
    /// The weights of the segment.
    Weights,
}

/// The steps that have a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PassCondition {
    /// All steps.
    #[default]
    All,
    /// Models whose MLP has a gate.
    Gated,
    /// Models whose MLP has no gate.
    Plain,
    /// Steps in which the fused softmax does not apply.
    UnfusedSoftmax,
}

/// Time of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostCosts {
    /// Seconds to launch one kernel.
    pub operator_s: f64,
    /// Seconds of modules and hooks of a block, for each pass.
    pub block_s: f64,
    /// Seconds of a step outside its passes.
    pub step_s: f64,
    /// Fraction of the host's time that every further device of the tensor axis adds, because collectives wait for the
    /// slowest host.
    #[serde(default)]
    pub lockstep: f64,
}

/// Time of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceCosts {
    /// Seconds of an operator beyond its counted work: further kernels that it launches, and gaps between kernels.
    pub operator_s: f64,
}

/// Sums of partial results over the tensor axis in backward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TensorCollectives {
    /// They run alone.
    #[default]
    Alone,
    /// Those of a column linear run beside the GEMM of its weight's gradient. Sharded inputs are gathered again for it,
    /// beside the GEMM of their gradient.
    BesideWeightGradients,
}

/// Transfers of a replicated residual stream between stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StageTransfers {
    /// Every device of the tensor axis sends all of it.
    #[default]
    Whole,
    /// Every device of the tensor axis sends its share, and the receivers gather the shares (Narayanan et al., "Efficient
    /// Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv 2104.04473, section 4.1).
    Shares,
}

/// Tokens of the residual stream over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenSharding {
    /// Every device has all of them.
    Replicated,
    /// Sequence parallelism.
    Sharded,
}

impl TokenSharding {
    /// Whether a device has a share of the tokens.
    pub fn are_sharded(self) -> bool {
        self == TokenSharding::Sharded
    }
}

/// Communication and updates of parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ParameterCosts {
    /// The ZeRO stage, unless a step states one.
    pub zero: Zero,
    /// Bytes of a gathered weight.
    pub weight_bytes: u64,
    /// Bytes of a reduced gradient.
    pub gradient_bytes: u64,
    /// Bytes that an update reads and writes for each of its parameters.
    pub update_bytes: u64,
    /// Whether the GEMM of a weight's gradient adds its result to the fp32 gradient, instead of a pass over memory.
    #[serde(default)]
    pub fused_accumulation: bool,
    /// Computation beside which these collectives run.
    pub overlap: ParameterOverlap,
}

/// Computation beside which collectives of parameters run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ParameterOverlap {
    /// The pass of a neighbouring block.
    Blocks,
    /// Nothing.
    None,
}

/// Division of blocks among pipeline stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StageDivision {
    /// Equal numbers of blocks.
    EqualBlocks,
    /// Nearly equal numbers of weights, those of the logits included.
    EqualWeights,
}

/// Factors on the prices of the profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriceFactors {
    /// Factor on GEMMs: sustained clocks under power limits, below those of short measurements.
    pub gemm: f64,
    /// Factor on GEMMs with rows that do not begin at multiples of 16 bytes, for which libraries have slower kernels.
    pub unaligned_gemm: f64,
    /// Factor on passes over memory.
    pub memory: f64,
    /// Factor on collectives and transfers.
    pub collective: f64,
}
