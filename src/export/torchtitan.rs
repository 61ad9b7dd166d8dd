//! torchtitan: the TOML of `train.py`.
//!
//! Options are the fields of `torchtitan/config/job_config.py` in release v0.2.2 (commit 73a0e69), the last one that is
//! configured in TOML.

use narrows_plan::model::{GatedProduct, Model};
use narrows_plan::strategy::Baseline;
use narrows_plan::{
    ContextAttention, GradReduceDtype, PipelineSchedule, PlanLayout, Precision, Zero,
};
use serde_json::json;

use super::common;
use super::decision::{Decision, Translation, effective_schedule};
use super::exported_plan::{ExportedPlan, Placement, Recomputation, ValueKind};
use super::render::{comments, options, toml};
use super::{ExportRow, TargetFramework};

/// torchtitan.
pub struct Torchtitan;

impl TargetFramework for Torchtitan {
    fn name(&self, _: &ExportedPlan) -> &'static str {
        "torchtitan v0.2.2"
    }

    fn translate(&self, decision: Decision, exported: &ExportedPlan) -> Translation {
        let plan = exported.plan;
        let (mesh, workload) = (plan.mesh, plan.workload);
        let size = |path, size: u64| Translation::exact([(path, json!(size))]);
        match decision {
            Decision::Model => shape(exported),
            Decision::Linears => linears(exported.model),
            Decision::Precision => precision(exported),
            Decision::GradReduceDtype => match plan.grad_reduce_dtype {
                GradReduceDtype::Fp32 => {
                    Translation::exact([("training.mixed_precision_reduce", json!("float32"))])
                }
                GradReduceDtype::Bf16 => {
                    Translation::not_expressible("reduces gradients in fp32 only")
                }
            },
            Decision::Tensor => size("parallelism.tensor_parallel_degree", mesh.tensor),
            Decision::Context => context(exported),
            Decision::Pipeline => pipeline(exported),
            // Written with the shard group.
            Decision::Data => Translation::implied(),
            Decision::GlobalBatch => size("training.global_batch_size", workload.global_batch),
            Decision::SequenceLength => {
                let pieces = 2 * mesh.tensor * mesh.context;
                let length = size("training.seq_len", workload.sequence_length);
                match workload.sequence_length.is_multiple_of(pieces) {
                    true => length,
                    false => {
                        Translation::not_expressible(format!("needs a multiple of {pieces} tokens"))
                            .with(length.options)
                    }
                }
            }
            Decision::MicroBatch => micro_batch(exported),
            Decision::Zero => zero(exported),
            Decision::ShardSize => shard_size(exported),
            Decision::Schedule => schedule(exported),
            Decision::Stages => stages(exported),
            Decision::OverlapGradReduce => match plan.overlap_grad_reduce {
                false if mesh.replicas() > 1 => Translation::approximated(
                    [],
                    "gathers and reductions always overlap with passes",
                ),
                true if plan.zero == Zero::Off => Translation::approximated(
                    [],
                    "a bucket has 100 MB, not the gradients of one block",
                ),
                _ => Translation::implied(),
            },
            Decision::OverlapParamGather => overlap_param_gather(exported),
            Decision::OverlapTensorCollectives => {
                match plan.overlap_tensor_collectives && mesh.tensor > 1 {
                    false => Translation::implied(),
                    true => Translation::approximated(
                        [
                            ("parallelism.enable_async_tensor_parallel", json!(true)),
                            ("compile.enable", json!(true)),
                        ],
                        "collectives are pipelined with the GEMMs that they feed or follow",
                    ),
                }
            }
            Decision::OverlapMicrobatchPairs => common::overlap_microbatch_pairs(exported),
            Decision::LastGradientBucket => common::last_gradient_bucket(exported),
            Decision::FirstGatherBucket => common::first_gather_bucket(exported),
            Decision::LoroEvery => common::loro_every(exported),
            Decision::HiddenLayout => hidden_layout(exported),
            Decision::CrossingLayout => common::crossing_layout(exported),
            Decision::Ops => match exported.placement() {
                Placement::OneDevice | Placement::Published(Baseline::MegatronSp) => {
                    Translation::implied()
                }
                Placement::Published(Baseline::FullrankTp) => {
                    Translation::approximated([], "norms and additions are sharded on positions")
                }
                placement => Translation::not_expressible(format!(
                    "splits linears in one way; the plan has {}",
                    placement.sentence()
                )),
            },
            Decision::Grouping => match exported.grouping() {
                Some(grouping) if !grouping.qkv && !grouping.gate_up => Translation::implied(),
                _ => Translation::approximated([], "q, k, v and gate, up are GEMMs of their own"),
            },
            Decision::Saves => saves(exported),
            Decision::Embedding => common::embedding(exported),
            Decision::Head => common::head(exported),
            Decision::Executor => common::executor(exported),
        }
    }

    fn render(&self, exported: &ExportedPlan, head: &[String], rows: &[ExportRow]) -> String {
        let usage = [
            format!(
                "Start {} processes. Add tokenizer, dataset, optimizer and steps yourself.",
                exported.plan.mesh.devices()
            ),
            "The sizes of the model are Python. Register them as this flavor, before training starts:"
                .to_owned(),
            flavor(exported.model),
        ];
        let all = options(rows);
        format!("{}{}\n{}", comments(head), comments(&usage), toml(all))
    }
}

/// A model of torchtitan that computes the function of LLaMA.
#[derive(Clone, Copy, PartialEq)]
enum TitanModel {
    /// Tied embedding and head, norms of heads, or heads of another width than hidden / heads. It has no pipeline.
    Qwen3,
    /// All other models.
    Llama3,
}

impl TitanModel {
    fn of(model: &Model) -> TitanModel {
        let norms_heads = model.blocks.iter().any(|block| block.qk_norm);
        match model.tied || norms_heads || model.heads * model.head_dim != model.hidden {
            true => TitanModel::Qwen3,
            false => TitanModel::Llama3,
        }
    }

    fn name(self) -> &'static str {
        match self {
            TitanModel::Qwen3 => "qwen3",
            TitanModel::Llama3 => "llama3",
        }
    }
}

/// The Python that registers the sizes of a model under its name.
fn flavor(model: &Model) -> String {
    let titan = TitanModel::of(model);
    let d_ff = model.blocks[0].up.d_out;
    let (class, import, own) = match titan {
        TitanModel::Qwen3 => {
            let python = |value: bool| if value { "True" } else { "False" };
            let own = format!(
                "head_dim={}, hidden_dim={d_ff}, qk_norm={}, enable_weight_tying={}",
                model.head_dim,
                python(model.blocks[0].qk_norm),
                python(model.tied)
            );
            ("Qwen3ModelArgs", "", own)
        }
        TitanModel::Llama3 => {
            // The class scales RoPE as Llama 3.1 does, by a factor of 8, unless told another factor.
            let mlp = llama_mlp(model.hidden, d_ff);
            let own = format!("{mlp}, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0)");
            let import = "from torchtitan.models.llama3.model.args import RoPEScalingArgs\n  ";
            ("TransformerModelArgs", import, own)
        }
    };
    let name = titan.name();
    format!(
        "  from torchtitan.models.{name} import {class}, {name}_args\n  \
           {import}{name}_args[{}] = {class}(\n      \
               dim={}, n_layers={}, n_heads={}, n_kv_heads={}, vocab_size={},\n      \
               {own},\n      \
               norm_eps={:?}, rope_theta={:?}, max_seq_len={},\n  )",
        json!(model.name),
        model.hidden,
        model.blocks.len(),
        model.heads,
        model.kv_heads,
        model.vocab,
        model.norm_epsilon,
        model.rope.theta,
        model.max_sequence_length,
    )
}

/// The class computes d_ff: ⌊8/3 · dim⌋, times `ffn_dim_multiplier`, rounded up to `multiple_of`. Anything at most d_ff is
/// rounded up to it.
fn llama_mlp(hidden: u64, d_ff: u64) -> String {
    let computed = 8 * hidden / 3;
    match computed <= d_ff {
        true => format!("multiple_of={d_ff}"),
        false => {
            let half = d_ff as f64 / computed as f64 / 2.0;
            format!("multiple_of={d_ff}, ffn_dim_multiplier={half:.4}")
        }
    }
}

fn shape(exported: &ExportedPlan) -> Translation {
    let model = exported.model;
    let options =
        [("model.name", json!(TitanModel::of(model).name())), ("model.flavor", json!(model.name))];
    if let Err(difference) = exported.uniform_block() {
        return Translation::not_expressible(format!("has one shape for all blocks: {difference}"));
    }
    if model.padding_token.is_some() {
        return Translation::not_expressible("trains the row of the padding token too")
            .with(options);
    }
    if model.blocks.iter().any(|block| block.qkv_bias) {
        return Translation::not_expressible("would have no biases of q, k and v").with(options);
    }
    if let Some(difference) =
        common::other_positions(model).or_else(|| common::ignored_window(model))
    {
        return Translation::not_expressible(difference).with(options);
    }
    Translation::approximated(
        options,
        "weights start with standard deviations that depend on depth",
    )
}

fn linears(model: &Model) -> Translation {
    if model.is_low_rank() {
        return Translation::not_expressible(
            "has no factor pairs: the flavor describes dense linears",
        );
    }
    match model.blocks.iter().all(|block| block.product == GatedProduct::SwiGlu) {
        true => Translation::implied(),
        false => Translation::not_expressible("always has SiLU on the gate"),
    }
}

/// Whether torchtitan applies `fully_shard`, with which alone it mixes precisions along other axes.
fn is_fully_sharded(exported: &ExportedPlan) -> bool {
    let mesh = exported.plan.mesh;
    mesh.context > 1 || mesh.data > 1 && exported.plan.zero != Zero::Off
}

fn precision(exported: &ExportedPlan) -> Translation {
    let mesh = exported.plan.mesh;
    let path = "training.mixed_precision_param";
    match exported.plan.precision {
        Precision::Fp32 => Translation::exact([(path, json!("float32"))]),
        Precision::MixedBf16 => {
            let options = [(path, json!("bfloat16"))];
            if is_fully_sharded(exported) {
                Translation::exact(options)
            } else if mesh.tensor * mesh.pipeline == 1 {
                let difference =
                    "weights stay fp32 and are cast in each operator that computes in bf16";
                Translation::approximated(options, difference)
            } else {
                Translation::not_expressible(
                    "supports mixed precision with tensor or pipeline parallelism only under FSDP",
                )
                .with(options)
            }
        }
    }
}

fn context(exported: &ExportedPlan) -> Translation {
    let parts = exported.plan.mesh.context;
    let degree = ("parallelism.context_parallel_degree", json!(parts));
    match exported.plan.context_attention {
        // PyTorch passes keys and values to the next device by an all-to-all in which the other parts are empty.
        ContextAttention::Ring => {
            let rotation = ("parallelism.context_parallel_rotate_method", json!("alltoall"));
            Translation::exact([degree, rotation])
        }
        ContextAttention::Exchange if parts > 1 => Translation::approximated(
            [degree],
            "keys and values are gathered in place of exchanging heads",
        ),
        _ => Translation::exact([degree]),
    }
}

fn pipeline(exported: &ExportedPlan) -> Translation {
    let stages = exported.plan.mesh.pipeline;
    let options = [("parallelism.pipeline_parallel_degree", json!(stages))];
    match stages > 1 && TitanModel::of(exported.model) == TitanModel::Qwen3 {
        true => {
            Translation::not_expressible("has no pipeline for tied embeddings and free head widths")
                .with(options)
        }
        false => Translation::exact(options),
    }
}

fn micro_batch(exported: &ExportedPlan) -> Translation {
    let (mesh, workload) = (exported.plan.mesh, exported.plan.workload);
    match mesh.pipeline {
        1 => Translation::exact([("training.local_batch_size", json!(workload.micro_batch))]),
        // A local batch is what runs through the pipeline at once.
        _ => Translation::exact([
            ("training.local_batch_size", json!(workload.global_batch / mesh.data)),
            ("parallelism.pipeline_parallel_microbatch_size", json!(workload.micro_batch)),
        ]),
    }
}

fn zero(exported: &ExportedPlan) -> Translation {
    let plan = exported.plan;
    let reshard = |policy| [("parallelism.fsdp_reshard_after_forward", json!(policy))];
    let whole_model = "embedding and head are sharded as blocks are";
    match plan.zero {
        _ if plan.mesh.replicas() == 1 => Translation::implied(),
        Zero::Off if is_fully_sharded(exported) => Translation::approximated(
            reshard("never"),
            "optimizer states and gradients are sharded over the devices of the context axis",
        ),
        Zero::Off if plan.mesh.tensor * plan.mesh.pipeline > 1 => Translation::not_expressible(
            "has replicas without sharding only where they are the whole mesh",
        ),
        Zero::Off => Translation::implied(),
        Zero::One => {
            Translation::approximated(reshard("never"), "gradients are sharded too: ZeRO-2")
        }
        Zero::Two => Translation::approximated(reshard("never"), whole_model),
        Zero::Three => Translation::approximated(reshard("always"), whole_model),
    }
}

/// Overlap of gathers of updated weights. Gathers of ZeRO-3 belong to the overlap of reductions.
fn overlap_param_gather(exported: &ExportedPlan) -> Translation {
    let gathers = exported.context().gathers_in_forward();
    let is_sharded = is_fully_sharded(exported) && exported.plan.zero != Zero::Three;
    match is_sharded && !gathers {
        true => Translation::approximated([], "gathers always overlap with passes"),
        false => Translation::implied(),
    }
}

/// Replicas of a shard group are the product of the shard and the context degree.
fn shard_size(exported: &ExportedPlan) -> Translation {
    let mesh = exported.plan.mesh;
    let degrees = |replicate: u64, shard: u64| {
        [
            ("parallelism.data_parallel_replicate_degree", json!(replicate)),
            ("parallelism.data_parallel_shard_degree", json!(shard)),
        ]
    };
    if exported.plan.zero == Zero::Off {
        return Translation::exact(degrees(mesh.data, 1));
    }
    let shard = exported.context().shard_size;
    match shard.is_multiple_of(mesh.context) {
        true => Translation::exact(degrees(mesh.replicas() / shard, shard / mesh.context)),
        false => Translation::not_expressible(format!(
            "shards over whole context axes: {shard} replicas are no multiple of {}",
            mesh.context
        )),
    }
}

fn schedule(exported: &ExportedPlan) -> Translation {
    let named =
        |name| Translation::exact([("parallelism.pipeline_parallel_schedule", json!(name))]);
    match effective_schedule(exported) {
        _ if exported.plan.mesh.pipeline == 1 => Translation::implied(),
        PipelineSchedule::OneForwardOneBackward => named("1F1B"),
        PipelineSchedule::Interleaved => named("Interleaved1F1B"),
        PipelineSchedule::ZeroBubble => Translation::not_expressible(
            "has zero-bubble schedules for several chunks of a stage only",
        )
        .with([("parallelism.pipeline_parallel_schedule", json!("1F1B"))]),
    }
}

/// Names of the modules of each virtual stage.
fn stages(exported: &ExportedPlan) -> Translation {
    if exported.plan.mesh.pipeline == 1 {
        return Translation::implied();
    }
    let blocks = exported.stage_blocks();
    let mut next = 0;
    let mut parts: Vec<Vec<String>> = vec![];
    for count in &blocks {
        parts.push((next..next + count).map(|block| format!("layers.{block}")).collect());
        next += count;
    }
    if let Some(first) = parts.first_mut() {
        first.insert(0, "tok_embeddings".into());
    }
    if let Some(last) = parts.last_mut() {
        last.extend(["norm".into(), "output".into()]);
    }
    Translation::exact([("parallelism.module_fqns_per_model_part", json!(parts))])
}

fn hidden_layout(exported: &ExportedPlan) -> Translation {
    match exported.plan.hidden_layout {
        _ if exported.plan.mesh.tensor == 1 => Translation::implied(),
        PlanLayout::Position => Translation::implied(),
        PlanLayout::Sequence => {
            let difference =
                "positions are sharded in place of whole sequences: the same bytes and kernels";
            Translation::approximated([], difference)
        }
        PlanLayout::Replicated => {
            Translation::approximated([], "the hidden state is sharded on positions")
        }
        PlanLayout::Feature => Translation::not_expressible("shards the hidden state on positions"),
    }
}

fn saves(exported: &ExportedPlan) -> Translation {
    let mode = |mode| ("activation_checkpoint.mode", json!(mode));
    match exported.recomputation() {
        Recomputation::Nothing => Translation::exact([mode("none")]),
        all if all.is_everything() => Translation::exact([mode("full")]),
        Recomputation::Activations { values, .. }
            if values
                .values()
                .all(|kind| matches!(kind, ValueKind::Norm | ValueKind::GatedProduct)) =>
        {
            Translation::approximated(
                [mode("selective"), ("activation_checkpoint.selective_ac_option", json!("op"))],
                "every block keeps attention and every second GEMM, and recomputes the rest",
            )
        }
        _ => Translation::approximated([mode("full")], "every block recomputes everything"),
    }
}
