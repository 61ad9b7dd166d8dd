//! Nanotron: the YAML of `run_train.py`; for low-rank models that of BOOST's fork.
//!
//! Options are the fields of `Config` in `src/nanotron/config/` of Nanotron at commit 2411b02, and in BOOST at commit
//! ee035d4, whose `examples/cola/` has the low-rank classes.

use narrows_plan::graph::Op;
use narrows_plan::model::{Block, ConfigClass, GatedProduct};
use narrows_plan::strategy::{Baseline, Strategy};
use narrows_plan::{Defect, GradReduceDtype, PipelineSchedule, PlanLayout, Precision, Zero};
use serde_json::{Value, json};

use super::common;
use super::decision::{Decision, Translation, effective_schedule};
use super::exported_plan::{ExportedPlan, Placement, Recomputation};
use super::render::{comments, options, yaml};
use super::{ExportRow, TargetFramework};

/// Nanotron, and BOOST's fork of it.
pub struct Nanotron;

impl TargetFramework for Nanotron {
    fn name(&self, exported: &ExportedPlan) -> &'static str {
        match exported.model.is_low_rank() {
            true => "BOOST's Nanotron at ee035d4",
            false => "Nanotron at 2411b02",
        }
    }

    fn translate(&self, decision: Decision, exported: &ExportedPlan) -> Translation {
        let plan = exported.plan;
        let (mesh, workload) = (plan.mesh, plan.workload);
        let size = |path, size: u64| Translation::exact([(path, json!(size))]);
        match decision {
            Decision::Model => shape(exported),
            Decision::Linears => linears(exported),
            Decision::Precision => match plan.precision {
                Precision::MixedBf16 => Translation::exact([("model.dtype", json!("bfloat16"))]),
                Precision::Fp32 => Translation::exact([("model.dtype", json!("float32"))]),
            },
            Decision::GradReduceDtype => grad_reduce_dtype(exported),
            Decision::Tensor => tensor(exported),
            Decision::Context if mesh.context == 1 => Translation::implied(),
            Decision::Context => {
                Translation::not_expressible("has no context parallelism in its LLaMA classes")
            }
            Decision::Pipeline => size("parallelism.pp", mesh.pipeline),
            Decision::Data => size("parallelism.dp", mesh.data),
            Decision::GlobalBatch => {
                let microbatches = workload.microbatches(&mesh);
                size("tokens.batch_accumulation_per_replica", microbatches)
            }
            Decision::SequenceLength => size("tokens.sequence_length", workload.sequence_length),
            Decision::MicroBatch => size("tokens.micro_batch_size", workload.micro_batch),
            Decision::Zero => match plan.zero {
                Zero::Off | Zero::One => size("optimizer.zero_stage", plan.zero.stage()),
                Zero::Two | Zero::Three => {
                    let reason = "has ZeRO-1 at most: gradients and weights stay whole";
                    Translation::not_expressible(reason).with([("optimizer.zero_stage", json!(1))])
                }
            },
            Decision::ShardSize => match exported.context().partial_shard_size() {
                None => Translation::implied(),
                Some(_) => Translation::not_expressible("shards over all replicas"),
            },
            Decision::Schedule => {
                let schedule = effective_schedule(exported);
                let options = [("parallelism.pp_engine", json!("1f1b"))];
                match schedule {
                    PipelineSchedule::OneForwardOneBackward => Translation::exact(options),
                    other => {
                        Translation::not_expressible(format!("has no {} schedule", other.name()))
                            .with(options)
                    }
                }
            }
            Decision::Stages => stages(exported),
            Decision::OverlapGradReduce if mesh.replicas() == 1 => Translation::implied(),
            Decision::OverlapGradReduce => match plan.overlap_grad_reduce {
                true => Translation::approximated(
                    [],
                    "a bucket has 25 MB, not the gradients of one block",
                ),
                false => Translation::approximated([], "reductions of gradients always overlap"),
            },
            Decision::OverlapParamGather => match exported.context().gathers_in_forward() {
                true => {
                    Translation::approximated([], "all weights are gathered at the end of the step")
                }
                false => Translation::implied(),
            },
            Decision::OverlapTensorCollectives => {
                let overlaps = plan.overlap_tensor_collectives && mesh.tensor > 1;
                let path = "parallelism.tp_linear_async_communication";
                match overlaps && exported.model.is_low_rank() {
                    true => Translation::approximated(
                        [(path, json!(false))],
                        "grouped factors do not overlap",
                    ),
                    false => Translation::exact([(path, json!(overlaps))]),
                }
            }
            Decision::OverlapMicrobatchPairs => common::overlap_microbatch_pairs(exported),
            Decision::LastGradientBucket => common::last_gradient_bucket(exported),
            Decision::FirstGatherBucket => common::first_gather_bucket(exported),
            Decision::LoroEvery => common::loro_every(exported),
            Decision::HiddenLayout => hidden_layout(exported),
            Decision::CrossingLayout => common::crossing_layout(exported),
            Decision::Ops => ops(exported),
            Decision::Grouping => match exported.grouping() {
                Some(grouping) if grouping.qkv && grouping.gate_up => Translation::implied(),
                _ => Translation::approximated([], "q, k, v and gate, up are always grouped"),
            },
            Decision::Saves => saves(exported),
            Decision::Embedding => common::embedding(exported),
            Decision::Head => common::head(exported),
            Decision::Executor => common::executor(exported),
        }
    }

    fn render(&self, exported: &ExportedPlan, head: &[String], rows: &[ExportRow]) -> String {
        let script = match (exported.model.is_low_rank(), exported.placement()) {
            (false, _) => "run_train.py",
            (true, Placement::Published(Baseline::VanillaTpPublished)) => {
                "examples/cola/train_vanilla_cola.py"
            }
            (true, _) => "examples/cola/train_cola.py",
        };
        // Nanotron has no context axis.
        let mesh = exported.plan.mesh;
        let processes = mesh.devices() / mesh.context;
        let usage = [
            format!("Start {processes} processes of {script}, with CUDA_DEVICE_MAX_CONNECTIONS=1."),
            "Not part of the plan; set these yourself: general, checkpoints, logging, data_stages, tokens.train_steps,"
                .to_owned(),
            "and of optimizer all but zero_stage and accumulate_grad_in_fp32.".to_owned(),
        ];
        let required = required();
        let all = options(rows).chain(&required);
        format!("{}{}{}", comments(head), comments(&usage), yaml(all))
    }
}

/// Fields of the configuration that a plan does not decide, and that Nanotron requires.
fn required() -> Vec<(&'static str, Value)> {
    let stage = json!({
        "name": "training",
        "start_training_step": 1,
        "data": {"dataset": null, "num_loading_workers": 1, "seed": 42},
    });
    vec![
        ("optimizer.weight_decay", json!(0.1)),
        ("optimizer.clip_grad", json!(1.0)),
        ("optimizer.optimizer_factory.name", json!("adamW")),
        ("optimizer.optimizer_factory.adam_beta1", json!(0.9)),
        ("optimizer.optimizer_factory.adam_beta2", json!(0.95)),
        ("optimizer.optimizer_factory.adam_eps", json!(1e-8)),
        ("optimizer.optimizer_factory.torch_adam_is_fused", json!(true)),
        ("optimizer.learning_rate_scheduler.learning_rate", json!(3e-4)),
        ("optimizer.learning_rate_scheduler.lr_warmup_steps", json!(10)),
        ("optimizer.learning_rate_scheduler.lr_warmup_style", json!("linear")),
        ("optimizer.learning_rate_scheduler.lr_decay_style", json!("cosine")),
        ("optimizer.learning_rate_scheduler.min_decay_lr", json!(3e-5)),
        ("tokens.train_steps", json!(100)),
        ("general.project", json!("narrows")),
        ("general.seed", json!(42)),
        ("checkpoints.checkpoints_path", json!("checkpoints")),
        ("checkpoints.checkpoint_interval", json!(1000)),
        ("logging.log_level", json!("info")),
        ("data_stages", json!([stage])),
    ]
}

fn shape(exported: &ExportedPlan) -> Translation {
    let model = exported.model;
    let block = &model.blocks[0];
    // LLaMA's class applies it to the gate, BOOST's to latents.
    let hidden_act = match block.product {
        GatedProduct::Plain | GatedProduct::SwiGlu => "silu",
    };
    let mut options = vec![
        ("model.model_config.hidden_size", json!(model.hidden)),
        ("model.model_config.intermediate_size", json!(block.up.d_out)),
        ("model.model_config.num_hidden_layers", json!(model.blocks.len())),
        ("model.model_config.num_attention_heads", json!(model.heads)),
        ("model.model_config.num_key_value_heads", json!(model.kv_heads)),
        ("model.model_config.vocab_size", json!(model.vocab)),
        ("model.model_config.max_position_embeddings", json!(model.max_sequence_length)),
        ("model.model_config.rms_norm_eps", json!(model.norm_epsilon)),
        ("model.model_config.rope_theta", json!(model.rope.theta)),
        ("model.model_config.rope_interleaved", json!(false)),
        ("model.model_config.hidden_act", json!(hidden_act)),
        ("model.model_config.pad_token_id", json!(model.padding_token)),
        ("model.model_config.tie_word_embeddings", json!(model.tied)),
        ("model.init_method.std", json!(model.initial_std)),
    ];
    // Nanotron has one token that ends a text, and tokens of its own for a model without any.
    let tokens = &model.special_tokens;
    for (option, token) in [
        ("model.model_config.bos_token_id", tokens.bos.as_ref()),
        ("model.model_config.eos_token_id", tokens.eos.first()),
    ] {
        options.extend(token.map(|token| (option, json!(token))));
    }
    if !model.is_low_rank() {
        options.push(("model.model_config.is_llama_config", json!(true)));
    }
    let heads = model.heads * model.head_dim;
    if heads != model.hidden {
        let reason =
            format!("has heads of hidden / heads features: {heads} is not {}", model.hidden);
        return Translation::not_expressible(reason).with(options);
    }
    if let Some(extra) = model.blocks.iter().find_map(Block::vectors_beside_linears) {
        return Translation::not_expressible(format!("would have no {extra}")).with(options);
    }
    if let Some(difference) = common::other_positions(model)
        .or_else(|| common::ignored_window(model))
        .or_else(|| common::ignored_residual(model))
    {
        return Translation::not_expressible(difference).with(options);
    }
    match exported.uniform_block() {
        Ok(_) => {
            Translation::approximated(options, "o and down start with a smaller standard deviation")
        }
        Err(difference) => {
            Translation::not_expressible(format!("has one shape for all blocks: {difference}"))
        }
    }
}

/// Dense linears, or the factor pairs of BOOST's classes.
fn linears(exported: &ExportedPlan) -> Translation {
    let model = exported.model;
    let config = match model.hugging_face_config(ConfigClass::Nanotron) {
        Ok(config) => config,
        Err(defect) => {
            let Defect { field, problem, .. } = defect;
            return Translation::not_expressible(format!("has no such model: {field} {problem}"));
        }
    };
    if !model.is_low_rank() {
        return Translation::implied();
    }
    let norms = exported.strategies(|op| matches!(op, Op::Norm { .. }));
    let norm = match norms[..] {
        [Strategy::Online] => "online",
        [Strategy::Sync, ..] | [Strategy::Online, Strategy::Sync] => "sync",
        // A norm of its own on every device, which has all features.
        _ => "triton",
    };
    let options = [
        ("model.model_config.is_cola_llama_config", json!(true)),
        ("model.model_config.attn_rank", config["attn_rank"].clone()),
        ("model.model_config.mlp_rank", config["mlp_rank"].clone()),
        ("model.model_config.rmsnorm_type", json!(norm)),
    ];
    match norms.len() {
        1 => Translation::exact(options),
        _ => Translation::approximated(options, format!("all norms are {norm}")),
    }
}

fn grad_reduce_dtype(exported: &ExportedPlan) -> Translation {
    let path = "optimizer.accumulate_grad_in_fp32";
    match (exported.plan.precision, exported.plan.grad_reduce_dtype) {
        (Precision::Fp32, _) => Translation::exact([(path, json!(false))]),
        (Precision::MixedBf16, GradReduceDtype::Fp32) => Translation::exact([(path, json!(true))]),
        (Precision::MixedBf16, GradReduceDtype::Bf16) => Translation::approximated(
            [(path, json!(false))],
            "microbatches are accumulated in bf16 too",
        ),
    }
}

fn tensor(exported: &ExportedPlan) -> Translation {
    let (tensor, model) = (exported.plan.mesh.tensor, exported.model);
    let options = [("parallelism.tp", json!(tensor))];
    if model.kv_heads < tensor {
        let reason = format!("needs as many KV heads as devices: {} for {tensor}", model.kv_heads);
        return Translation::not_expressible(reason).with(options);
    }
    Translation::exact(options)
}

fn hidden_layout(exported: &ExportedPlan) -> Translation {
    let mode = |name| [("parallelism.tp_mode", json!(name))];
    match exported.plan.hidden_layout {
        PlanLayout::Replicated => Translation::exact(mode("ALL_REDUCE")),
        PlanLayout::Position => Translation::exact(mode("REDUCE_SCATTER")),
        PlanLayout::Sequence => {
            let difference =
                "positions are sharded in place of whole sequences: the same bytes and kernels";
            Translation::approximated(mode("REDUCE_SCATTER"), difference)
        }
        PlanLayout::Feature if exported.placement() == Placement::Published(Baseline::Btp) => {
            Translation::exact(mode("ALL_REDUCE"))
        }
        PlanLayout::Feature => Translation::not_expressible(
            "shards the hidden state on features in BOOST's BTP classes only",
        )
        .with(mode("ALL_REDUCE")),
    }
}

fn ops(exported: &ExportedPlan) -> Translation {
    match exported.placement() {
        Placement::OneDevice
        | Placement::Published(
            Baseline::FullrankTp
            | Baseline::MegatronSp
            | Baseline::Btp
            | Baseline::VanillaTpPublished,
        ) => Translation::implied(),
        placement => Translation::not_expressible(format!(
            "splits linears as its class does; the plan has {}",
            placement.sentence()
        )),
    }
}

fn saves(exported: &ExportedPlan) -> Translation {
    let gathers_again = ("parallelism.tp_recompute_allgather", json!(!exported.keeps_gathered()));
    let options = |recompute: bool| {
        let recompute = ("parallelism.recompute_layer", json!(recompute));
        vec![recompute, gathers_again.clone()]
    };
    match exported.recomputation() {
        Recomputation::Nothing => Translation::exact(options(false)),
        all if all.is_everything() => Translation::exact(options(true)),
        _ => Translation::approximated(options(true), "every block recomputes everything"),
    }
}

/// Blocks are placed by the parameters of a dense block and of the head; no option moves them.
fn stages(exported: &ExportedPlan) -> Translation {
    let planned = exported.stage_blocks();
    match placed_blocks(exported) {
        Some(placed) if placed == planned => Translation::implied(),
        Some(placed) => Translation::not_expressible(format!(
            "places blocks by their parameters: {} in its stages",
            placed.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        )),
        None => Translation::not_expressible("places the head before the last stage"),
    }
}

/// The blocks of each stage as `build_model` of `src/nanotron/models/base.py` places them: a module that takes the sum of
/// parameters beyond the share of the stages so far is the last of its stage. `None` where the last stage gets no head.
fn placed_blocks(exported: &ExportedPlan) -> Option<Vec<u64>> {
    let (model, stages) = (exported.model, exported.plan.mesh.pipeline as usize);
    let block = 4 * model.hidden * model.hidden + 3 * model.blocks[0].up.d_out * model.hidden;
    let head = model.vocab * model.hidden;
    let total = (block * model.blocks.len() as u64 + head) as f64;
    let mut placed = vec![0; stages];
    let (mut stage, mut sum) = (0, 0);
    for _ in &model.blocks {
        placed[stage] += 1;
        sum += block;
        if sum as f64 > total * (stage + 1) as f64 / stages as f64 {
            stage += 1;
        }
    }
    (stage + 1 == stages).then_some(placed)
}
