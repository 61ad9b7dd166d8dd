//! Decisions that differ between plans of one model.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use narrows_plan::graph::Grouping;
use narrows_plan::{BlockDecisions, Mesh, Plan, ResolvedPlan, SegmentPlan, Workload};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::op_decisions::{OpDecision, op_decisions};

use super::ComparedPlan;

/// A decision that differs.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DecisionDifference {
    /// The decision, by its place in the plan: `mesh.tensor`, `grouping`.
    #[schemars(with = "String")]
    pub decision: ComparedDecision,
    /// Value in every plan.
    pub values: Vec<Value>,
}

/// Decisions that differ in a segment, or in consecutive blocks.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct SegmentDifference {
    /// `embedding`, `block` or `head`.
    pub segment: &'static str,
    /// First and last of the consecutive blocks; `null` for embedding and head.
    pub blocks: Option<[u64; 2]>,
    /// Grouping, and the numbers of stored and recomputed activations.
    pub decisions: Vec<DecisionDifference>,
    /// Number of ops that any of the plans has.
    pub ops_total: usize,
    /// Ops with different strategies, layouts, or stored or recomputed outputs.
    pub ops: Vec<OpDifference>,
}

/// An op that differs.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct OpDifference {
    /// Name of the op in plans.
    pub op: String,
    /// Decisions for the op in every plan; `null` where a grouping replaces the op.
    pub values: Vec<Option<OpDecision>>,
}

/// Decisions for the whole plan that differ, in the order in which they constrain each other.
pub fn plan_differences(plans: &[ComparedPlan]) -> Vec<DecisionDifference> {
    differences(plans.iter().map(|plan| plan_decisions(&plan.priced.plan)).collect())
}

/// A decision that plans are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComparedDecision {
    /// The hardware profile.
    Hardware,
    /// The launch mode of kernels.
    Executor,
    /// Number formats.
    Precision,
    /// Devices along the tensor axis.
    Tensor,
    /// Devices along the context axis.
    Context,
    /// Pipeline stages.
    Pipeline,
    /// Devices along the data axis.
    Data,
    /// Sequences of a step.
    GlobalBatch,
    /// Tokens of a sequence.
    SequenceLength,
    /// Sequences of a microbatch.
    MicroBatch,
    /// Format of gradient reductions.
    GradReduceDtype,
    /// The ZeRO stage.
    Zero,
    /// Replicas of a shard group.
    ShardSize,
    /// The pipeline schedule.
    Schedule,
    /// Collectives around attention on the context axis.
    ContextAttention,
    /// Model chunks of each stage.
    Chunks,
    /// Overlap of gradient reductions.
    OverlapGradReduce,
    /// Overlap of gathers of updated weights.
    OverlapParamGather,
    /// Overlap of collectives over the tensor axis.
    OverlapTensorCollectives,
    /// Overlap of two microbatches of a pass.
    OverlapMicrobatchPairs,
    /// Buckets of the first block's gradients.
    LastGradientBucket,
    /// Gather buckets of the first block's weights.
    FirstGatherBucket,
    /// Steps between exact steps of LORO.
    LoroEvery,
    /// Layout of the hidden state between blocks.
    HiddenLayout,
    /// Layout of crossing latents between blocks.
    CrossingLayout,
    /// Blocks of each stage; of an interleaved pipeline, of each virtual stage.
    StageBlocks,
    /// Linears of a block that run as one GEMM.
    Grouping,
    /// Number of activations that a segment stores.
    StoredActivations,
    /// Number of activations that a segment recomputes.
    RecomputedActivations,
}

impl ComparedDecision {
    /// The name: a path in plan files, or a few words.
    pub fn name(self) -> &'static str {
        match self {
            ComparedDecision::Hardware => "hardware",
            ComparedDecision::Executor => "executor",
            ComparedDecision::Precision => "precision",
            ComparedDecision::Tensor => "mesh.tensor",
            ComparedDecision::Context => "mesh.context",
            ComparedDecision::ContextAttention => "context_attention",
            ComparedDecision::Pipeline => "mesh.pipeline",
            ComparedDecision::Data => "mesh.data",
            ComparedDecision::GlobalBatch => "workload.global_batch",
            ComparedDecision::SequenceLength => "workload.sequence_length",
            ComparedDecision::MicroBatch => "workload.micro_batch",
            ComparedDecision::GradReduceDtype => "grad_reduce_dtype",
            ComparedDecision::Zero => "zero",
            ComparedDecision::ShardSize => "shard_size",
            ComparedDecision::Schedule => "schedule",
            ComparedDecision::Chunks => "chunks of each stage",
            ComparedDecision::OverlapGradReduce => "overlap_grad_reduce",
            ComparedDecision::OverlapParamGather => "overlap_param_gather",
            ComparedDecision::OverlapTensorCollectives => "overlap_tensor_collectives",
            ComparedDecision::OverlapMicrobatchPairs => "overlap_microbatch_pairs",
            ComparedDecision::LastGradientBucket => "last_gradient_bucket",
            ComparedDecision::FirstGatherBucket => "first_gather_bucket",
            ComparedDecision::LoroEvery => "loro_every",
            ComparedDecision::HiddenLayout => "hidden_layout",
            ComparedDecision::CrossingLayout => "crossing_layout",
            ComparedDecision::StageBlocks => "blocks of each stage",
            ComparedDecision::Grouping => "grouping",
            ComparedDecision::StoredActivations => "stored activations",
            ComparedDecision::RecomputedActivations => "recomputed activations",
        }
    }
}

impl Serialize for ComparedDecision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Decisions of a plan outside of segments. A new field of plans must be named here.
fn plan_decisions(plan: &Plan) -> Vec<(ComparedDecision, Value)> {
    use ComparedDecision as Of;
    let Plan {
        format: _,
        model: _,
        hardware,
        executor,
        precision,
        grad_reduce_dtype,
        mesh: Mesh { tensor, pipeline, data, context },
        context_attention,
        workload: Workload { global_batch, sequence_length, micro_batch },
        zero,
        shard_size,
        schedule,
        overlap_grad_reduce,
        overlap_param_gather,
        overlap_tensor_collectives,
        overlap_microbatch_pairs,
        last_gradient_bucket,
        first_gather_bucket,
        loro_every,
        hidden_layout,
        crossing_layout,
        stages: _,
        embedding: _,
        blocks: _,
        head: _,
    } = plan;
    vec![
        (Of::Hardware, json!(hardware.name)),
        (Of::Executor, json!(executor)),
        (Of::Precision, json!(precision)),
        (Of::Tensor, json!(tensor)),
        (Of::Context, json!(context)),
        (Of::ContextAttention, json!(context_attention)),
        (Of::Pipeline, json!(pipeline)),
        (Of::Data, json!(data)),
        (Of::GlobalBatch, json!(global_batch)),
        (Of::SequenceLength, json!(sequence_length)),
        (Of::MicroBatch, json!(micro_batch)),
        (Of::GradReduceDtype, json!(grad_reduce_dtype)),
        (Of::Zero, json!(zero)),
        (Of::ShardSize, json!(shard_size)),
        (Of::Schedule, json!(schedule)),
        (Of::Chunks, json!(plan.chunks())),
        (Of::OverlapGradReduce, json!(overlap_grad_reduce)),
        (Of::OverlapParamGather, json!(overlap_param_gather)),
        (Of::OverlapTensorCollectives, json!(overlap_tensor_collectives)),
        (Of::OverlapMicrobatchPairs, json!(overlap_microbatch_pairs)),
        (Of::LastGradientBucket, json!(last_gradient_bucket)),
        (Of::FirstGatherBucket, json!(first_gather_bucket)),
        (Of::LoroEvery, json!(loro_every)),
        (Of::HiddenLayout, json!(hidden_layout)),
        (Of::CrossingLayout, json!(crossing_layout)),
        (Of::StageBlocks, json!(virtual_stage_blocks(plan))),
    ]
}

/// Numbers of blocks of the stages, or of the virtual stages of an interleaved pipeline.
pub fn virtual_stage_blocks(plan: &Plan) -> Vec<u64> {
    let blocks = |stage: &narrows_plan::StagePlan| stage.runs.iter().map(|run| run.count).sum();
    plan.stages.iter().map(blocks).collect()
}

/// Keeps the decisions whose values differ. All lists have the same names, in the same order.
fn differences(lists: Vec<Vec<(ComparedDecision, Value)>>) -> Vec<DecisionDifference> {
    let Some(first) = lists.first() else { return vec![] };
    let row = |index: usize| {
        let values: Vec<Value> = lists.iter().map(|list| list[index].1.clone()).collect();
        let differ = values.iter().any(|value| *value != values[0]);
        differ.then(|| DecisionDifference { decision: first[index].0, values })
    };
    (0..first.len()).filter_map(row).collect()
}

/// Differences of the embedding, of ranges of blocks, and of the head, where there are any.
pub fn segment_differences(plans: &[ComparedPlan]) -> Vec<SegmentDifference> {
    let of = |segment: fn(&ResolvedPlan) -> &SegmentPlan| -> Vec<&SegmentPlan> {
        plans.iter().map(|plan| segment(&plan.priced.resolved)).collect()
    };
    let save_counts = |decisions: fn(&Plan) -> &narrows_plan::SegmentDecisions| {
        let counts = |plan: &ComparedPlan| {
            let decisions = decisions(&plan.priced.plan);
            saves(decisions.keep.len(), decisions.recompute.len()).to_vec()
        };
        differences(plans.iter().map(counts).collect())
    };
    let embedding = segment_difference(plans, "embedding", None, &of(|plan| &plan.embedding))
        .with(save_counts(|plan| &plan.embedding));
    let head = segment_difference(plans, "head", None, &of(|plan| &plan.head))
        .with(save_counts(|plan| &plan.head));
    let blocks = block_ranges(plans).into_iter().filter_map(|[first, last]| {
        let layers: Option<Vec<&SegmentPlan>> = plans
            .iter()
            .map(|plan| {
                let mut blocks = plan.priced.resolved.stages.iter().flatten();
                blocks.find(|block| block.layer == first).map(|block| &*block.plan)
            })
            .collect();
        let decisions = plans.iter().map(|plan| {
            let block = block_decisions(&plan.priced.plan, first)?;
            let grouping = (ComparedDecision::Grouping, json!(grouping_phrase(block.grouping)));
            let saves = saves(block.keep.len(), block.recompute.len());
            Some([grouping].into_iter().chain(saves).collect::<Vec<_>>())
        });
        let decisions = differences(decisions.collect::<Option<Vec<_>>>()?);
        Some(segment_difference(plans, "block", Some([first, last]), &layers?).with(decisions))
    });
    let all = [embedding].into_iter().chain(blocks).chain([head]);
    all.filter(|segment| !segment.decisions.is_empty() || !segment.ops.is_empty()).collect()
}

impl SegmentDifference {
    fn with(self, decisions: Vec<DecisionDifference>) -> SegmentDifference {
        SegmentDifference { decisions, ..self }
    }
}

/// Numbers of activations that are stored and recomputed for the backward pass.
fn saves(stored: usize, recomputed: usize) -> [(ComparedDecision, Value); 2] {
    [
        (ComparedDecision::StoredActivations, json!(stored)),
        (ComparedDecision::RecomputedActivations, json!(recomputed)),
    ]
}

fn grouping_phrase(grouping: Grouping) -> &'static str {
    match (grouping.qkv, grouping.gate_up) {
        (true, true) => "q, k, v; gate, up",
        (true, false) => "q, k, v",
        (false, true) => "gate, up",
        (false, false) => "none",
    }
}

/// First and last of consecutive blocks that share their decisions in every plan.
fn block_ranges(plans: &[ComparedPlan]) -> Vec<[u64; 2]> {
    let names = |layer: u64| -> Option<Vec<&str>> {
        plans.iter().map(|plan| decisions_name(&plan.priced.plan, layer)).collect()
    };
    let mut ranges: Vec<[u64; 2]> = vec![];
    let mut previous = None;
    for layer in 0.. {
        let Some(names) = names(layer) else { break };
        match ranges.last_mut() {
            Some(range) if previous.as_ref() == Some(&names) => range[1] = layer,
            _ => ranges.push([layer, layer]),
        }
        previous = Some(names);
    }
    ranges
}

/// Name of the decisions of a block; `None` beyond the last block.
fn decisions_name(plan: &Plan, layer: u64) -> Option<&str> {
    let mut runs = plan.stages.iter().flat_map(|stage| &stage.runs);
    let run = runs.find(|run| (run.first..run.first + run.count).contains(&layer))?;
    Some(&run.decisions)
}

fn block_decisions(plan: &Plan, layer: u64) -> Option<&BlockDecisions> {
    plan.blocks.get(decisions_name(plan, layer)?)
}

fn segment_difference(
    plans: &[ComparedPlan],
    segment: &'static str,
    blocks: Option<[u64; 2]>,
    segments: &[&SegmentPlan],
) -> SegmentDifference {
    // In the order of the first plan; ops that it groups differently follow.
    let mut names: IndexMap<String, ()> = IndexMap::new();
    let mut lists: Vec<BTreeMap<String, OpDecision>> = vec![];
    for (plan, segment) in plans.iter().zip(segments) {
        let decisions = op_decisions(segment, &plan.priced.resolved.context);
        names.extend(decisions.iter().map(|(name, _)| (name.clone(), ())));
        lists.push(decisions.into_iter().collect());
    }
    let ops_total = names.len();
    let difference = |op: String| {
        let values: Vec<Option<OpDecision>> =
            lists.iter().map(|list| list.get(&op).cloned()).collect();
        let differ = values.iter().any(|value| *value != values[0]);
        differ.then_some(OpDifference { op, values })
    };
    let ops = names.into_keys().filter_map(difference).collect();
    SegmentDifference { segment, blocks, decisions: vec![], ops_total, ops }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_decisions_that_differ_are_kept() {
        let lists = vec![
            vec![(ComparedDecision::Tensor, json!(1)), (ComparedDecision::Zero, json!("one"))],
            vec![(ComparedDecision::Tensor, json!(4)), (ComparedDecision::Zero, json!("one"))],
        ];
        let decision = ComparedDecision::Tensor;
        let expected = DecisionDifference { decision, values: vec![json!(1), json!(4)] };
        assert_eq!(differences(lists), [expected]);
        assert!(differences(vec![]).is_empty());
    }
}
