//! The plan: the decisions of a run, small, readable and editable by hand.
//!
//! A plan names the mesh, the stages, the strategy of every op and the copies that are kept or recomputed.
//! Layouts, reshards, buffers and instructions follow from it ([`resolve`](Plan::resolve),
//! [`lower`](crate::lower)).

mod context;
mod resolve;
mod saves;

use std::num::NonZeroU64;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::context::{BucketSplit, ContextAttention, PipelineSchedule, Zero};
use crate::graph::Grouping;
use crate::mesh::{Mesh, Workload};
use crate::strategy::Strategy;
use crate::{Defect, Defects, GradReduceDtype, Precision, json};

pub use resolve::{ResolvedBlock, ResolvedPlan, SegmentPlan};

/// The plan format of this version.
pub const PLAN_FORMAT: &str = "narrows-plan/1";

/// The decisions for a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Always `narrows-plan/1`.
    pub format: String,
    /// The model.
    pub model: PlanSource,
    /// The hardware profile.
    pub hardware: PlanSource,
    /// The executor that the plan was priced for; absent for captured graphs.
    #[serde(default, skip_serializing_if = "Executor::is_captured")]
    pub executor: Executor,
    /// Number formats.
    pub precision: Precision,
    /// Number format in which gradients are reduced over the replicas, `fp32` or, with mixed precision, `bf16`; absent
    /// for fp32.
    #[serde(default, skip_serializing_if = "GradReduceDtype::is_default")]
    pub grad_reduce_dtype: GradReduceDtype,
    /// The device mesh.
    pub mesh: Mesh,
    /// The collectives around attention on the context axis, and with them the order of positions; absent for
    /// `exchange`.
    #[serde(default, skip_serializing_if = "ContextAttention::is_default")]
    pub context_attention: ContextAttention,
    /// The work of a step.
    pub workload: Workload,
    /// Sharding of optimizer states, gradients and weights over the data axis.
    pub zero: Zero,
    /// Neighbouring replicas that together hold one copy of the states that ZeRO shards, a divisor of `mesh.data`;
    /// absent where all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard_size: Option<u64>,
    /// The order in which pipeline stages run the passes of their microbatches; absent for 1F1B.
    #[serde(default, skip_serializing_if = "PipelineSchedule::is_default")]
    pub schedule: PipelineSchedule,
    /// Whether collectives over the data axis overlap with computation: reductions of gradients during the backward
    /// pass of the last microbatch, and the gathers and reductions that ZeRO-2 and ZeRO-3 have in every pass. Absent
    /// where they do not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlap_grad_reduce: bool,
    /// Whether the weights that ZeRO-1 and ZeRO-2 update in parts are gathered during the first forward pass of the next
    /// step. Absent where a step ends with these gathers. Without effect on interleaved schedules.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlap_param_gather: bool,
    /// Whether tensor-axis collectives of activation gradients overlap with the weight-gradient GEMMs of the linears that
    /// computed them; absent where they do not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlap_tensor_collectives: bool,
    /// Whether passes run two microbatches each, of which the collectives of activations of one overlap with the computation
    /// of the other; absent where passes run one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlap_microbatch_pairs: bool,
    /// Buckets of the gradients of a stage's first block, the last to be complete; absent for `whole`. Without effect where no
    /// gradients are reduced in buckets: without `overlap_grad_reduce`, and with ZeRO-2 and ZeRO-3.
    #[serde(default, skip_serializing_if = "BucketSplit::is_default")]
    pub last_gradient_bucket: BucketSplit,
    /// Gather buckets of the weights of a stage's first block, the first that the next step reads; absent for `whole`. Without
    /// effect where no weights are gathered in buckets: without `overlap_param_gather`.
    #[serde(default, skip_serializing_if = "BucketSplit::is_default")]
    pub first_gather_bucket: BucketSplit,
    /// Steps from one exact step of the optimizer LORO to the next; absent with AdamW. `narrows run` replaces it by that of
    /// its recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loro_every: Option<NonZeroU64>,
    /// Layout of the hidden state between blocks.
    pub hidden_layout: PlanLayout,
    /// Layout of the latents that cross between blocks (LaX); absent for models without crossings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crossing_layout: Option<PlanLayout>,
    /// The blocks of each pipeline stage, in order. With an interleaved schedule, the blocks of each chunk in the
    /// order of the model: entry k is chunk k / P of stage k mod P, of P stages. The first and the last of several
    /// entries may have no blocks: they have the embedding and the head.
    pub stages: Vec<StagePlan>,
    /// Decisions for the embedding.
    pub embedding: SegmentDecisions,
    /// Decisions for blocks, by the names that stages use.
    #[serde(deserialize_with = "json::without_repeated_keys")]
    pub blocks: IndexMap<String, BlockDecisions>,
    /// Decisions for the head.
    pub head: SegmentDecisions,
}

/// Identity of the model or the profile of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanSource {
    /// Name.
    pub name: String,
    /// SHA-256 of the canonical form.
    pub fingerprint: String,
}

/// Launch mode of kernels. A plan records the executor that it was priced for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Executor {
    /// Captured graphs with fused ops: this project's runtime.
    #[default]
    Captured,
    /// Fused ops, launched one by one.
    Compiled,
    /// A framework that launches operators one by one.
    Eager,
}

impl Executor {
    /// The name in plans and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Executor::Captured => "captured",
            Executor::Compiled => "compiled",
            Executor::Eager => "eager",
        }
    }

    fn is_captured(&self) -> bool {
        *self == Executor::Captured
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// Layout of a tensor between blocks, in the forward and the backward pass.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum PlanLayout {
    /// Whole on every device.
    Replicated,
    /// Sharded by features.
    Feature,
    /// Sharded by whole sequences.
    Sequence,
    /// Sharded by positions.
    Position,
}

/// The blocks of one stage, or of one of its chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StagePlan {
    /// Runs of consecutive blocks.
    pub runs: Vec<BlockRun>,
}

impl StagePlan {
    /// Least number of blocks of a stage or chunk: of several, the first has the embedding and the last the head, and they
    /// may have none.
    pub fn blocks_min(stage: usize, stages: usize) -> usize {
        usize::from(0 < stage && stage + 1 < stages)
    }
}

/// Consecutive blocks that share decisions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockRun {
    /// The first block.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
    /// Name of the decisions in `blocks` of the plan.
    pub decisions: String,
}

/// The decisions for one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SegmentDecisions {
    /// The strategy of every op, by name.
    #[serde(deserialize_with = "json::without_repeated_keys")]
    pub ops: IndexMap<String, Strategy>,
    /// Copies that the forward pass keeps for the backward pass, as `value@layout`.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Copies that the backward pass recomputes, as `value@layout`.
    #[serde(default, rename = "redo")]
    pub recompute: Vec<String>,
}

/// The decisions for a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockDecisions {
    /// Factors that run as one GEMM.
    pub grouping: Grouping,
    /// The strategy of every op, by name.
    #[serde(deserialize_with = "json::without_repeated_keys")]
    pub ops: IndexMap<String, Strategy>,
    /// Copies that the forward pass keeps for the backward pass, as `value@layout`.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Copies that the backward pass recomputes, as `value@layout`.
    #[serde(default, rename = "redo")]
    pub recompute: Vec<String>,
}

impl Plan {
    /// Reads a plan, without checking it against a model.
    ///
    /// # Errors
    /// The first defect, with its field.
    pub fn read(text: &str) -> Result<Plan, Defects> {
        let plan: Plan = json::read(text).map_err(|defect| {
            defect.hint("compare with a plan that `narrows plan --output` wrote")
        })?;
        if plan.format != PLAN_FORMAT {
            let problem = format!("unsupported plan format `{}`", plan.format);
            return Err(Defect::new("format", problem).hint(PLAN_FORMAT).into());
        }
        Ok(plan)
    }

    /// The JSON Schema of plan files.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Plan).into()
    }
}

impl PlanLayout {
    /// The layout of the tensor and of its gradient.
    pub fn edge(self) -> crate::EdgeLayout {
        use crate::{Dim, EdgeLayout};
        match self {
            PlanLayout::Replicated => EdgeLayout::REPLICATED,
            PlanLayout::Feature => EdgeLayout::sharded(Dim::Feature),
            PlanLayout::Sequence => EdgeLayout::sharded(Dim::Sequence),
            PlanLayout::Position => EdgeLayout::sharded(Dim::Position),
        }
    }

    /// The inverse of [`edge`](PlanLayout::edge); `None` for layouts that no boundary tensor has.
    pub fn from_edge(edge: crate::EdgeLayout) -> Option<PlanLayout> {
        [Self::Replicated, Self::Feature, Self::Sequence, Self::Position]
            .into_iter()
            .find(|layout| layout.edge() == edge)
    }
}

impl SegmentDecisions {
    /// The decisions that describe the choices of a segment.
    pub fn from_choice(
        segment: &crate::graph::Segment,
        choice: &crate::strategy::SegmentChoice,
    ) -> SegmentDecisions {
        use crate::strategy::Save;
        let mut decisions = SegmentDecisions::default();
        for (node, option) in segment.ops.iter().zip(&choice.ops) {
            decisions.ops.insert(node.name.clone(), option.choice.strategy);
        }
        for (value, flow) in segment.values.iter().zip(&choice.flows) {
            for (layout, save) in flow.copies().into_iter().zip(&flow.saves) {
                let name = format!("{}@{layout}", value.name);
                match save {
                    Save::Dropped => {}
                    Save::Kept => decisions.keep.push(name),
                    Save::Recomputed => decisions.recompute.push(name),
                }
            }
        }
        decisions
    }
}

impl BlockDecisions {
    /// Decisions of a block with this grouping.
    pub fn new(grouping: Grouping, decisions: SegmentDecisions) -> BlockDecisions {
        let SegmentDecisions { ops, keep, recompute } = decisions;
        BlockDecisions { grouping, ops, keep, recompute }
    }

    /// The decisions without the grouping.
    pub fn segment_decisions(&self) -> SegmentDecisions {
        SegmentDecisions {
            ops: self.ops.clone(),
            keep: self.keep.clone(),
            recompute: self.recompute.clone(),
        }
    }
}
