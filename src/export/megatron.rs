//! Megatron-LM: arguments of `pretrain_gpt.py`.
//!
//! Options are those of release core_v0.19.0 (commit 5be9626): `megatron/training/arguments.py`, and the fields of
//! `TransformerConfig`, `ModelParallelConfig` and `DistributedDataParallelConfig`, from which it derives more of them.

use std::collections::{BTreeMap, BTreeSet};

use narrows_plan::model::{AttentionMask, GatedProduct, Model, Positions};
use narrows_plan::strategy::Baseline;
use narrows_plan::{
    ContextAttention, Executor, GradReduceDtype, PipelineSchedule, PlanLayout, Precision, Zero,
};
use serde_json::{Value, json};

use super::common;
use super::decision::{Decision, Translation, effective_schedule};
use super::exported_plan::{ExportedPlan, Placement, Recomputation, StageRecomputation, ValueKind};
use super::render::{comments, flag_words, options};
use super::{ExportRow, TargetFramework};
use crate::text::plural;

/// Megatron-LM.
pub struct Megatron;

impl TargetFramework for Megatron {
    fn name(&self, _: &ExportedPlan) -> &'static str {
        "Megatron-LM core_v0.19.0"
    }

    fn translate(&self, decision: Decision, exported: &ExportedPlan) -> Translation {
        let ExportedPlan { model, plan, .. } = exported;
        let (mesh, workload) = (plan.mesh, plan.workload);
        let size = |flag, size: u64| Translation::exact([(flag, json!(size))]);
        match decision {
            Decision::Model => shape(exported),
            Decision::Linears => linears(model),
            Decision::Precision => match plan.precision {
                Precision::MixedBf16 => Translation::exact([("bf16", json!(true))]),
                Precision::Fp32 => Translation::implied(),
            },
            Decision::GradReduceDtype => grad_reduce_dtype(exported),
            Decision::Tensor => size("tensor-model-parallel-size", mesh.tensor),
            Decision::Context => context(exported),
            Decision::Pipeline => size("pipeline-model-parallel-size", mesh.pipeline),
            // What the number of processes leaves.
            Decision::Data => Translation::implied(),
            Decision::GlobalBatch => size("global-batch-size", workload.global_batch),
            Decision::SequenceLength => size("seq-length", workload.sequence_length),
            Decision::MicroBatch => size("micro-batch-size", workload.micro_batch),
            Decision::Zero => zero(plan.zero),
            Decision::ShardSize => match exported.context().partial_shard_size() {
                None => Translation::implied(),
                Some(shard) => size("num-distributed-optimizer-instances", mesh.replicas() / shard),
            },
            Decision::Schedule => match effective_schedule(exported) {
                PipelineSchedule::ZeroBubble => Translation::not_expressible(
                    "has no zero-bubble schedule: weight gradients stay in the backward passes of 1F1B",
                ),
                // Several chunks in the layout of stages select the interleaved schedule.
                PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
                    Translation::implied()
                }
            },
            Decision::Stages => stages(exported),
            Decision::OverlapGradReduce => overlap_grad_reduce(exported),
            Decision::OverlapParamGather => overlap_param_gather(exported),
            Decision::OverlapTensorCollectives => match plan.overlap_tensor_collectives {
                false if mesh.tensor > 1 => Translation::approximated(
                    [],
                    "reductions of input gradients always overlap with weight-gradient GEMMs",
                ),
                _ => Translation::implied(),
            },
            Decision::OverlapMicrobatchPairs => common::overlap_microbatch_pairs(exported),
            Decision::LastGradientBucket => common::last_gradient_bucket(exported),
            Decision::FirstGatherBucket => common::first_gather_bucket(exported),
            Decision::LoroEvery => common::loro_every(exported),
            Decision::HiddenLayout => hidden_layout(exported),
            Decision::CrossingLayout => common::crossing_layout(exported),
            Decision::Ops => match exported.placement() {
                Placement::OneDevice
                | Placement::Published(Baseline::FullrankTp | Baseline::MegatronSp) => {
                    Translation::implied()
                }
                placement => Translation::not_expressible(format!(
                    "splits linears in one way; the plan has {}",
                    placement.sentence()
                )),
            },
            Decision::Grouping => match exported.grouping() {
                Some(grouping) if grouping.qkv && grouping.gate_up => Translation::implied(),
                _ => Translation::approximated([], "q, k, v and gate, up are always one GEMM each"),
            },
            Decision::Saves => saves(exported),
            Decision::Embedding => common::embedding(exported),
            Decision::Head => common::head(exported),
            Decision::Executor => match plan.executor {
                Executor::Captured => Translation::approximated(
                    [],
                    "kernels are launched one by one; --cuda-graph-impl captures them",
                ),
                _ => Translation::implied(),
            },
        }
    }

    fn render(&self, exported: &ExportedPlan, head: &[String], rows: &[ExportRow]) -> String {
        let mesh = exported.plan.mesh;
        let usage = [
            format!(
                "Start {} processes. Add data, tokenizer, optimizer and checkpoints yourself:",
                mesh.devices()
            ),
            "  source FILE && torchrun … pretrain_gpt.py \"${MEGATRON_ARGS[@]}\" …".to_owned(),
        ];
        // Overlap of tensor-axis collectives relies on the order of one queue, which FSDP must not have.
        let queues = match exported.plan.zero {
            Zero::Two | Zero::Three => "",
            Zero::Off | Zero::One if mesh.tensor * mesh.context == 1 => "",
            Zero::Off | Zero::One => "export CUDA_DEVICE_MAX_CONNECTIONS=1\n",
        };
        let lines = options(rows).map(|(flag, value)| flag_words(flag, value).join(" "));
        let arguments: String = lines.map(|line| format!("  {line}\n")).collect();
        format!("{}{}{queues}MEGATRON_ARGS=(\n{arguments})\n", comments(head), comments(&usage))
    }
}

/// Widths, heads, vocabulary and constants of a decoder.
fn shape(exported: &ExportedPlan) -> Translation {
    let model = exported.model;
    let block = match exported.uniform_block() {
        Ok(block) => block,
        Err(difference) => {
            return Translation::not_expressible(format!(
                "has one shape for all blocks: {difference}"
            ));
        }
    };
    let mut options = vec![
        ("num-layers", json!(model.blocks.len())),
        ("hidden-size", json!(model.hidden)),
        ("ffn-hidden-size", json!(block.up.d_out)),
        ("num-attention-heads", json!(model.heads)),
        ("kv-channels", json!(model.head_dim)),
        ("group-query-attention", json!(true)),
        ("num-query-groups", json!(model.kv_heads)),
        ("max-position-embeddings", json!(model.max_sequence_length)),
    ];
    let positions = positions(model);
    let rotates = positions.iter().any(|(flag, _)| *flag == "rotary-base");
    options.extend(positions);
    options.extend([
        ("normalization", json!("RMSNorm")),
        ("norm-epsilon", json!(model.norm_epsilon)),
        ("swiglu", json!(true)),
        ("disable-bias-linear", json!(true)),
        ("attention-dropout", json!(0.0)),
        ("hidden-dropout", json!(0.0)),
        ("init-method-std", json!(model.initial_std)),
        ("vocab-size", json!(model.vocab)),
        // The vocabulary is padded to a multiple of this number of rows on each device.
        ("make-vocab-size-divisible-by", json!(1)),
    ]);
    if block.qkv_bias {
        options.push(("add-qkv-bias", json!(true)));
    }
    if block.qk_norm {
        options.push(("qk-layernorm", json!(true)));
    }
    if let AttentionMask::SlidingWindow(window) = block.attention {
        // Keys before and after that of the query.
        options.push(("window-size", json!(format!("{},0", window - 1))));
    }
    if !model.tied {
        options.push(("untie-embeddings-and-output-weights", json!(true)));
    }
    if model.padding_token.is_some() {
        return Translation::not_expressible("trains the row of the padding token too")
            .with(options);
    }
    if let Some(difference) = common::other_rope(model).filter(|_| rotates) {
        return Translation::not_expressible(difference).with(options);
    }
    let mut differences = vec![];
    if rotates && model.rope.theta.fract() != 0.0 {
        differences.push("--rotary-base is an integer".to_owned());
    }
    if !model.vocab.is_multiple_of(exported.plan.mesh.tensor) {
        let rows = model.vocab.next_multiple_of(exported.plan.mesh.tensor);
        differences.push(format!("the vocabulary is padded to {rows} rows"));
    }
    // The default divides the standard deviation of o and down by √(2 · layers).
    differences.push("o and down start with a smaller standard deviation".to_owned());
    Translation::approximated(options, differences.join("; "))
}

/// RoPE, apart from the blocks that do not rotate queries and keys.
fn positions(model: &Model) -> Vec<(&'static str, Value)> {
    let skips: Vec<u8> =
        model.blocks.iter().map(|block| u8::from(block.positions == Positions::None)).collect();
    if !skips.contains(&0) {
        return vec![("position-embedding-type", json!("none"))];
    }
    let mut options = vec![
        ("position-embedding-type", json!("rope")),
        ("rotary-base", json!(model.rope.theta.round() as u64)),
    ];
    if skips.contains(&1) {
        // A Python list, as one word.
        options.push(("no-rope-freq", json!(json!(skips).to_string())));
    }
    options
}

fn linears(model: &Model) -> Translation {
    if model.is_low_rank() {
        return Translation::not_expressible(
            "has no factor pairs: the arguments describe dense linears",
        );
    }
    match model.blocks.iter().all(|block| block.product == GatedProduct::SwiGlu) {
        true => Translation::implied(),
        false => Translation::not_expressible("always has SiLU on the gate"),
    }
}

fn grad_reduce_dtype(exported: &ExportedPlan) -> Translation {
    let plan = exported.plan;
    if plan.precision == Precision::Fp32 {
        return Translation::implied();
    }
    let is_fsdp = plan.zero >= Zero::Two;
    match (plan.grad_reduce_dtype, is_fsdp) {
        (GradReduceDtype::Fp32, false) => {
            Translation::exact([("accumulate-allreduce-grads-in-fp32", json!(true))])
        }
        (GradReduceDtype::Bf16, false) => Translation::exact([
            ("grad-reduce-in-bf16", json!(true)),
            ("ddp-param-name-patterns-for-fp32-local-accumulation", json!(["all"])),
        ]),
        (dtype, true) => Translation::exact([
            ("megatron-fsdp-main-grads-dtype", json!("fp32")),
            ("megatron-fsdp-grad-comm-dtype", json!(dtype.name())),
        ]),
    }
}

fn context(exported: &ExportedPlan) -> Translation {
    let (parts, length) = (exported.plan.mesh.context, exported.plan.workload.sequence_length);
    if parts == 1 {
        return Translation::implied();
    }
    let collectives = match exported.plan.context_attention {
        ContextAttention::Exchange => "a2a",
        ContextAttention::Gather => "all_gather",
        ContextAttention::Ring => "p2p",
    };
    let options = [("context-parallel-size", json!(parts)), ("cp-comm-type", json!([collectives]))];
    match length.is_multiple_of(2 * parts) {
        true => Translation::exact(options),
        false => Translation::not_expressible(format!(
            "needs a sequence length that is a multiple of {}, two pieces for each device",
            2 * parts
        ))
        .with(options),
    }
}

fn zero(zero: Zero) -> Translation {
    let sharded = |strategy| {
        vec![
            ("use-megatron-fsdp", json!(true)),
            ("use-distributed-optimizer", json!(true)),
            ("data-parallel-sharding-strategy", json!(strategy)),
            ("ckpt-format", json!("fsdp_dtensor")),
        ]
    };
    let difference = "embedding and head are sharded as blocks are";
    match zero {
        Zero::Off => Translation::implied(),
        Zero::One => Translation::exact([("use-distributed-optimizer", json!(true))]),
        Zero::Two => Translation::approximated(sharded("optim_grads"), difference),
        Zero::Three => Translation::approximated(sharded("optim_grads_params"), difference),
    }
}

/// `Ettt|ttt|tttL`: E embedding, t a block, L head and loss; stages in the order of the model.
fn stages(exported: &ExportedPlan) -> Translation {
    if exported.plan.mesh.pipeline == 1 {
        return Translation::implied();
    }
    let blocks = exported.stage_blocks();
    let stage = |(index, count): (usize, &u64)| {
        let layers = match count {
            0 => String::new(),
            1 => "t".to_owned(),
            count => format!("t*{count}"),
        };
        let embedding = if index == 0 { "E" } else { "" };
        let head = if index + 1 == blocks.len() { "L" } else { "" };
        format!("{embedding}{layers}{head}")
    };
    let layout = blocks.iter().enumerate().map(stage).collect::<Vec<_>>().join("|");
    Translation::exact([("pipeline-model-parallel-layout", json!(layout))])
}

/// Overlap of reductions of gradients. Megatron-FSDP turns it on where it shards gradients, and the overlap of gathers
/// where it shards weights: `MegatronFSDP.__init__`.
fn overlap_grad_reduce(exported: &ExportedPlan) -> Translation {
    let plan = exported.plan;
    let reductions = ("overlap-grad-reduce", json!(true));
    let gathers = ("overlap-param-gather", json!(true));
    let (options, always) = match plan.zero {
        Zero::Off | Zero::One if plan.overlap_grad_reduce => {
            return Translation::approximated(
                [reductions],
                "a bucket has a number of elements, not the gradients of one block",
            );
        }
        Zero::Off | Zero::One => return Translation::implied(),
        Zero::Two => (vec![reductions], "reductions of gradients always overlap"),
        Zero::Three => (vec![reductions, gathers], "gathers and reductions always overlap"),
    };
    match plan.overlap_grad_reduce || plan.mesh.replicas() == 1 {
        true => Translation::exact(options),
        false => Translation::approximated(options, always),
    }
}

fn overlap_param_gather(exported: &ExportedPlan) -> Translation {
    let plan = exported.plan;
    let option = [("overlap-param-gather", json!(true))];
    match (exported.context().gathers_in_forward(), plan.overlap_grad_reduce) {
        (false, _) => Translation::implied(),
        // Reductions of ZeRO-2 always overlap.
        (true, _) if plan.zero == Zero::Two => Translation::exact(option),
        (true, false) => Translation::not_expressible(
            "gathers overlap only where reductions of gradients do too",
        ),
        (true, true) => Translation::approximated(
            option,
            "a bucket has a number of elements, not the weights of one block",
        ),
    }
}

fn hidden_layout(exported: &ExportedPlan) -> Translation {
    let sequence_parallel = ("sequence-parallel", json!(true));
    match exported.plan.hidden_layout {
        PlanLayout::Replicated => Translation::implied(),
        PlanLayout::Position => Translation::exact([sequence_parallel]),
        PlanLayout::Sequence => {
            let difference =
                "positions are sharded in place of whole sequences: the same bytes and kernels";
            Translation::approximated([sequence_parallel], difference)
        }
        PlanLayout::Feature => {
            Translation::not_expressible("shards the hidden state on positions or not at all")
        }
    }
}

/// Recomputation that stores no more in any stage than the plan does.
fn saves(exported: &ExportedPlan) -> Translation {
    let whole_blocks = |stages: &[StageRecomputation]| {
        let most = stages.iter().map(|stage| stage.blocks).max().unwrap_or(0);
        let options = vec![
            ("recompute-granularity", json!("full")),
            ("recompute-method", json!("block")),
            ("recompute-num-layers", json!(most)),
        ];
        (most, options)
    };
    match exported.recomputation() {
        Recomputation::Nothing => Translation::implied(),
        Recomputation::WholeBlocks(stages) => {
            let (most, options) = whole_blocks(&stages);
            match stages.iter().all(|stage| stage.first && stage.blocks == most.min(stage.of)) {
                true => Translation::exact(options),
                false => Translation::approximated(
                    options,
                    format!("the first {} of every stage recompute", plural(most, "block")),
                ),
            }
        }
        Recomputation::Activations { values, stages } => match modules(&values) {
            Some(modules) => Translation::approximated(
                [
                    ("recompute-granularity", json!("selective")),
                    ("recompute-modules", json!(modules)),
                ],
                format!("every block recomputes {} as a whole", modules.join(" and ")),
            ),
            None => {
                let (most, options) = whole_blocks(&stages);
                Translation::approximated(
                    options,
                    format!(
                        "the first {} of every stage recompute everything, not {} alone",
                        plural(most, "block"),
                        values.into_keys().collect::<Vec<_>>().join(", ")
                    ),
                )
            }
        },
    }
}

/// The modules of `--recompute-modules` that recompute at least these values; `None` where there are none.
fn modules(values: &BTreeMap<String, ValueKind>) -> Option<Vec<&'static str>> {
    let module = |kind: &ValueKind| match kind {
        ValueKind::Norm => Some("layernorm"),
        ValueKind::GateOrUp | ValueKind::GatedProduct => Some("mlp"),
        ValueKind::Other => None,
    };
    let modules: Option<BTreeSet<_>> = values.values().map(module).collect();
    modules.map(|modules| modules.into_iter().collect())
}
