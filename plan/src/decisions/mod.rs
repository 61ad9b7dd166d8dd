//! The plan: what was decided, and nothing that follows from it.
//!
//! A plan is small, readable, diffable and editable by hand. It names the strategy of every op, the
//! copies that are kept or redone, the mesh and the stages. Layouts, reshards, buffers and
//! instructions follow from it ([`resolve`](Plan::resolve), [`lower`](crate::lower)).

mod resolve;
mod saves;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::context::Zero;
use crate::graph::Grouping;
use crate::json;
use crate::mesh::{Mesh, Workload};
use crate::strategy::Strategy;
use crate::{Defect, Defects, Precision};

pub use resolve::{ResolvedBlock, ResolvedPlan, SegmentPlan};

/// The format this version writes and reads.
pub const PLAN_FORMAT: &str = "narrows-plan/1";

/// The decisions for a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Always `narrows-plan/1`.
    pub format: String,
    /// The model it was made for.
    pub model: PlanSource,
    /// The hardware profile it was made for.
    pub hardware: PlanSource,
    /// How kernels were taken to be launched when the plan was priced; absent for captured graphs.
    #[serde(default, skip_serializing_if = "Executor::is_captured")]
    pub executor: Executor,
    /// Number formats.
    pub precision: Precision,
    /// The device mesh.
    pub mesh: Mesh,
    /// The work of a step.
    pub workload: Workload,
    /// Optimizer sharding over the data axis.
    pub zero: Zero,
    /// How the hidden state lies over the tensor axis between blocks.
    pub hidden_layout: PlanLayout,
    /// How the latents that cross between blocks (LaX) lie there; absent when none do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crossing_layout: Option<PlanLayout>,
    /// The blocks of each pipeline stage, in order.
    pub stages: Vec<StagePlan>,
    /// The embedding's decisions.
    pub embedding: SegmentDecisions,
    /// The decisions of blocks, by the names that stages use.
    pub blocks: IndexMap<String, BlockDecisions>,
    /// The head's decisions.
    pub head: SegmentDecisions,
}

/// Something a plan was made for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanSource {
    /// Its name.
    pub name: String,
    /// SHA-256 of its canonical form.
    pub fingerprint: String,
}

/// How kernels are launched. A plan only remembers which one it was priced for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Executor {
    /// A captured graph with fused passes: this project's runtime.
    #[default]
    Captured,
    /// A framework that launches operator by operator.
    Eager,
}

impl Executor {
    /// The name in plans and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Executor::Captured => "captured",
            Executor::Eager => "eager",
        }
    }

    fn is_captured(&self) -> bool {
        *self == Executor::Captured
    }
}

/// A layout of what blocks hand on, forward and backward.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum PlanLayout {
    /// Whole on every device.
    Replicated,
    /// Sharded on its features.
    Feature,
    /// Sharded on whole sequences.
    Sequence,
    /// Sharded on positions.
    Position,
}

/// The blocks of one stage: runs that share decisions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StagePlan {
    /// Runs of consecutive blocks.
    pub runs: Vec<BlockRun>,
}

/// Consecutive blocks that share decisions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockRun {
    /// The first block.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// A name among the plan's `blocks`.
    pub decisions: String,
}

/// The decisions for one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SegmentDecisions {
    /// The strategy of every op, by name.
    pub ops: IndexMap<String, Strategy>,
    /// Copies that the forward pass keeps for the backward pass, as `value@layout`.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Copies that the backward pass computes again, as `value@layout`.
    #[serde(default, rename = "redo")]
    pub recompute: Vec<String>,
}

/// The decisions for a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BlockDecisions {
    /// Which factors run as one product.
    pub grouping: Grouping,
    /// The strategy of every op, by name.
    pub ops: IndexMap<String, Strategy>,
    /// Copies that the forward pass keeps for the backward pass, as `value@layout`.
    #[serde(default)]
    pub keep: Vec<String>,
    /// Copies that the backward pass computes again, as `value@layout`.
    #[serde(default, rename = "redo")]
    pub recompute: Vec<String>,
}

impl Plan {
    /// Reads a plan. Every error names the field it is in; nothing is checked against a model yet.
    pub fn read(text: &str) -> Result<Plan, Defects> {
        let reader = &mut serde_json::Deserializer::from_str(text);
        let plan: Plan = json::read_value(reader).map_err(|defect| {
            defect.hint("compare with a plan that `narrows plan --output` wrote")
        })?;
        if plan.format != PLAN_FORMAT {
            let problem = format!("`{}` is not a format this version reads", plan.format);
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
    /// The layouts of its edges.
    pub fn edge(self) -> crate::EdgeLayout {
        use crate::{Dim, EdgeLayout};
        match self {
            PlanLayout::Replicated => EdgeLayout::REPLICATED,
            PlanLayout::Feature => EdgeLayout::sharded(Dim::Feature),
            PlanLayout::Sequence => EdgeLayout::sharded(Dim::Sequence),
            PlanLayout::Position => EdgeLayout::sharded(Dim::Position),
        }
    }

    /// The inverse of [`edge`](PlanLayout::edge); `None` for layouts no border takes.
    pub fn from_edge(edge: crate::EdgeLayout) -> Option<PlanLayout> {
        [Self::Replicated, Self::Feature, Self::Sequence, Self::Position]
            .into_iter()
            .find(|layout| layout.edge() == edge)
    }
}

impl SegmentDecisions {
    /// Writes a segment's choices down.
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
    /// A block's grouping and choices.
    pub fn new(grouping: Grouping, decisions: SegmentDecisions) -> BlockDecisions {
        let SegmentDecisions { ops, keep, recompute } = decisions;
        BlockDecisions { grouping, ops, keep, recompute }
    }

    /// Without the grouping.
    pub fn segment_decisions(&self) -> SegmentDecisions {
        SegmentDecisions {
            ops: self.ops.clone(),
            keep: self.keep.clone(),
            recompute: self.recompute.clone(),
        }
    }
}
