//! The decisions of a plan, and what becomes of them in another framework.

use narrows_plan::graph::Grouping;
use narrows_plan::{ContextAttention, PipelineSchedule, Zero};
use serde_json::Value;

use super::exported_plan::{ExportedPlan, Recomputation};
use crate::text::plural;

/// A decision of a plan. Names are the fields of plan files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Widths, heads, vocabulary and constants of the model.
    Model,
    /// Dense linears or factor pairs, their ranks, activations and crossings.
    Linears,
    /// Number formats.
    Precision,
    /// Format of gradient reductions.
    GradReduceDtype,
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
    /// Sharding over replicas.
    Zero,
    /// Replicas of a shard group.
    ShardSize,
    /// The order of passes.
    Schedule,
    /// The blocks of each stage, or of each chunk.
    Stages,
    /// Overlap of collectives over the data axis.
    OverlapGradReduce,
    /// Overlap of gathers of updated weights.
    OverlapParamGather,
    /// Overlap of collectives over the tensor axis.
    OverlapTensorCollectives,
    /// Overlap of two microbatches of a pass.
    OverlapMicrobatchPairs,
    /// Gradient buckets of first blocks.
    LastGradientBucket,
    /// Gather buckets of first blocks.
    FirstGatherBucket,
    /// Exact steps of LORO.
    LoroEvery,
    /// Layout of the hidden state between blocks.
    HiddenLayout,
    /// Layout of crossing latents between blocks.
    CrossingLayout,
    /// Strategies of the ops of blocks.
    Ops,
    /// Factors that run as one GEMM.
    Grouping,
    /// Activations that are kept and recomputed.
    Saves,
    /// Strategies of the embedding.
    Embedding,
    /// Strategies of the head.
    Head,
    /// Launches of kernels.
    Executor,
}

/// Fidelity of a decision in a framework.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fidelity {
    /// The framework does the same.
    Exact,
    /// The framework does nearly the same: the difference.
    Approximated(String),
    /// The framework has nothing of the kind: the reason, and what it does instead.
    NotExpressible(String),
}

/// Options that express a decision, each with its path or flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Translation {
    /// Options in the order in which they are written; paths are joined by dots.
    pub options: Vec<(&'static str, Value)>,
    /// Fidelity of the decision.
    pub fidelity: Fidelity,
}

impl Translation {
    /// The framework does the same with these options.
    pub fn exact(options: impl Into<Vec<(&'static str, Value)>>) -> Translation {
        Translation { options: options.into(), fidelity: Fidelity::Exact }
    }

    /// The framework does the same without any option.
    pub fn implied() -> Translation {
        Translation::exact([])
    }

    /// The framework does nearly the same with these options.
    pub fn approximated(
        options: impl Into<Vec<(&'static str, Value)>>,
        difference: impl Into<String>,
    ) -> Translation {
        Translation { options: options.into(), fidelity: Fidelity::Approximated(difference.into()) }
    }

    /// The framework cannot do it.
    pub fn not_expressible(reason: impl Into<String>) -> Translation {
        Translation { options: vec![], fidelity: Fidelity::NotExpressible(reason.into()) }
    }

    /// The same with options that are written although the decision is not exact.
    pub fn with(self, options: impl Into<Vec<(&'static str, Value)>>) -> Translation {
        Translation { options: options.into(), ..self }
    }
}

impl Decision {
    /// Every decision, in the order in which they constrain each other.
    pub const ALL: [Decision; 30] = [
        Decision::Model,
        Decision::Linears,
        Decision::Precision,
        Decision::GradReduceDtype,
        Decision::Tensor,
        Decision::Context,
        Decision::Pipeline,
        Decision::Data,
        Decision::GlobalBatch,
        Decision::SequenceLength,
        Decision::MicroBatch,
        Decision::Zero,
        Decision::ShardSize,
        Decision::Schedule,
        Decision::Stages,
        Decision::OverlapGradReduce,
        Decision::OverlapParamGather,
        Decision::OverlapTensorCollectives,
        Decision::OverlapMicrobatchPairs,
        Decision::LastGradientBucket,
        Decision::FirstGatherBucket,
        Decision::LoroEvery,
        Decision::HiddenLayout,
        Decision::CrossingLayout,
        Decision::Ops,
        Decision::Grouping,
        Decision::Saves,
        Decision::Embedding,
        Decision::Head,
        Decision::Executor,
    ];

    /// The field of plan files, or fields.
    pub fn name(self) -> &'static str {
        match self {
            Decision::Model => "model",
            Decision::Linears => "model.linears",
            Decision::Precision => "precision",
            Decision::GradReduceDtype => "grad_reduce_dtype",
            Decision::Tensor => "mesh.tensor",
            Decision::Context => "mesh.context",
            Decision::Pipeline => "mesh.pipeline",
            Decision::Data => "mesh.data",
            Decision::GlobalBatch => "workload.global_batch",
            Decision::SequenceLength => "workload.sequence_length",
            Decision::MicroBatch => "workload.micro_batch",
            Decision::Zero => "zero",
            Decision::ShardSize => "shard_size",
            Decision::Schedule => "schedule",
            Decision::Stages => "stages",
            Decision::OverlapGradReduce => "overlap_grad_reduce",
            Decision::OverlapParamGather => "overlap_param_gather",
            Decision::OverlapTensorCollectives => "overlap_tensor_collectives",
            Decision::OverlapMicrobatchPairs => "overlap_microbatch_pairs",
            Decision::LastGradientBucket => "last_gradient_bucket",
            Decision::FirstGatherBucket => "first_gather_bucket",
            Decision::LoroEvery => "loro_every",
            Decision::HiddenLayout => "hidden_layout",
            Decision::CrossingLayout => "crossing_layout",
            Decision::Ops => "blocks.ops",
            Decision::Grouping => "blocks.grouping",
            Decision::Saves => "blocks.keep",
            Decision::Embedding => "embedding",
            Decision::Head => "head",
            Decision::Executor => "executor",
        }
    }

    /// The value in a plan, in a few words.
    pub fn value(self, exported: &ExportedPlan) -> String {
        let ExportedPlan { model, plan, resolved } = exported;
        let name = |value: Value| value.as_str().map_or(value.to_string(), str::to_owned);
        let on = |flag: bool| if flag { "on" } else { "off" }.to_owned();
        match self {
            Decision::Model => model.name.clone(),
            Decision::Linears if model.has_crossings() => "factor pairs with crossings".into(),
            Decision::Linears if model.is_low_rank() => "factor pairs".into(),
            Decision::Linears => "dense".into(),
            Decision::Precision => name(serde_json::json!(plan.precision)),
            Decision::GradReduceDtype => plan.grad_reduce_dtype.name().into(),
            Decision::Tensor => plan.mesh.tensor.to_string(),
            Decision::Context => match plan.context_attention {
                ContextAttention::Exchange => plan.mesh.context.to_string(),
                attention => format!("{}, {}", plan.mesh.context, attention.name()),
            },
            Decision::Pipeline => plan.mesh.pipeline.to_string(),
            Decision::Data => plan.mesh.data.to_string(),
            Decision::GlobalBatch => plan.workload.global_batch.to_string(),
            Decision::SequenceLength => plan.workload.sequence_length.to_string(),
            Decision::MicroBatch => plan.workload.micro_batch.to_string(),
            Decision::Zero => plan.zero.label(None).unwrap_or_else(|| "off".into()),
            Decision::ShardSize if plan.zero == Zero::Off => "none".into(),
            Decision::ShardSize => {
                let partial = resolved.context.partial_shard_size();
                partial.map_or("all replicas".into(), |size| size.to_string())
            }
            Decision::Schedule if plan.mesh.pipeline == 1 => "one stage".into(),
            Decision::Schedule => plan.schedule.label(plan.chunks()),
            Decision::Stages => stage_phrase(&exported.stage_blocks()),
            Decision::OverlapGradReduce => on(plan.overlap_grad_reduce),
            Decision::OverlapParamGather => on(resolved.context.gathers_in_forward()),
            Decision::OverlapTensorCollectives => on(plan.overlap_tensor_collectives),
            Decision::OverlapMicrobatchPairs => on(plan.overlap_microbatch_pairs),
            Decision::LastGradientBucket => name(serde_json::json!(plan.last_gradient_bucket)),
            Decision::FirstGatherBucket => name(serde_json::json!(plan.first_gather_bucket)),
            Decision::LoroEvery => {
                plan.loro_every.map_or("AdamW".into(), |every| every.to_string())
            }
            Decision::HiddenLayout => name(serde_json::json!(plan.hidden_layout)),
            Decision::CrossingLayout => {
                plan.crossing_layout.map_or("none".into(), |layout| name(serde_json::json!(layout)))
            }
            Decision::Ops => exported.placement().to_string(),
            Decision::Grouping => match exported.grouping() {
                Some(Grouping { qkv: true, gate_up: true }) => "q, k, v; gate, up".into(),
                Some(Grouping { qkv: true, gate_up: false }) => "q, k, v".into(),
                Some(Grouping { qkv: false, gate_up: true }) => "gate, up".into(),
                Some(Grouping { qkv: false, gate_up: false }) => "none".into(),
                None => "differs by block".into(),
            },
            Decision::Saves => match exported.recomputation() {
                Recomputation::Nothing => "nothing recomputed".into(),
                Recomputation::WholeBlocks(stages) | Recomputation::Activations { stages, .. } => {
                    let blocks = stages.iter().map(|stage| stage.blocks).sum();
                    format!("recomputes in {}", plural(blocks, "block"))
                }
            },
            Decision::Embedding => exported.embedding_strategy().name().into(),
            Decision::Head => exported.head_strategies().map(|s| s.name()).join(", "),
            Decision::Executor => plan.executor.name().into(),
        }
    }
}

/// The schedule of a plan with one stage is that of every framework.
pub fn effective_schedule(exported: &ExportedPlan) -> PipelineSchedule {
    match exported.plan.mesh.pipeline {
        1 => PipelineSchedule::OneForwardOneBackward,
        _ => exported.plan.schedule,
    }
}

/// Numbers of blocks: `8 × 4` where all are equal, otherwise `7, 9, 8`.
fn stage_phrase(blocks: &[u64]) -> String {
    match blocks {
        [first, rest @ ..] if rest.iter().all(|other| other == first) => match blocks.len() {
            1 => plural(*first, "block"),
            stages => format!("{stages} of {}", plural(*first, "block")),
        },
        _ => blocks.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}
