//! Predicts a plan from its checked program: step time with its interval, memory, utilisation.

use std::collections::BTreeMap;

use indexmap::IndexMap;
use narrows_cost_model::interval::{ErrorModel, UnmeasuredKernel};
use narrows_cost_model::profile::ProvenanceKind;
use narrows_cost_model::{Breakdown, ExactStepTime, Executor, Prices, Profile, simulate};
use narrows_plan::emit::{
    InstrTemplate, flow_backward, flow_forward, flow_recompute, op_backward, op_forward,
    op_recompute,
};
use narrows_plan::graph::AttentionOp;
use narrows_plan::kernel::{Attention, CollectiveKind, Direction};
use narrows_plan::model::Model;
use narrows_plan::program::{Action, Phase, Program};
use narrows_plan::{
    Bytes, CheckErrors, CheckedProgram, DType, Defects, Flops, Kernel, Plan, ResolvedPlan, Seconds,
    lower,
};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

/// A prediction for one plan on one profile.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Prediction {
    /// Step time in seconds; with exact steps of LORO, that of the average step.
    pub step_time_s: f64,
    /// 90 % interval of the step time, by the bootstrap of [`narrows_cost_model::interval`].
    pub step_time_interval_s: [f64; 2],
    /// Tokens of the global batch divided by the step time.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation: FLOPs of the model (recomputation excluded, causal attention counted
    /// once) divided by the peak FLOPs of the devices.
    pub mfu: f64,
    /// FLOPs of the model, as for `mfu`, that a device computes in a second.
    pub flops_per_s_per_device: f64,
    /// Arena of each stage, in bytes.
    pub peak_memory_bytes: Vec<u64>,
    /// Parts of the step time, in seconds.
    pub breakdown_s: Breakdown,
    /// Payload of the tensor-axis collectives of the middle block, for one microbatch.
    pub block_collective_bytes: BlockCollectives,
    /// Paths in the profile of values that are assumed, not measured.
    pub assumed: Vec<String>,
    /// Whether the profile has any measured shape.
    pub shapes_measured: bool,
    /// Kernels of the step that lie further than a factor of two from every measured shape, by
    /// descending share of the time.
    pub unmeasured: Vec<UnmeasuredKernel>,
    /// Exact steps of LORO, whose average share is in the step time and in the part `other`; absent without them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exact_step: Option<ExactStepPrediction>,
    /// Warning that the measurements of the profile are unreliable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Predicted exact steps of LORO.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ExactStepPrediction {
    /// Steps from one exact step to the next.
    pub every: u64,
    /// Floating-point operations of all hosts in an exact step.
    pub host_flops: f64,
    /// Bytes between devices and hosts in an exact step.
    pub bytes: u64,
    /// Time that an exact step adds to its step.
    pub time_s: f64,
    /// Time that exact steps add to a step on average.
    pub per_step_s: f64,
    /// 90 % interval of this time.
    pub per_step_interval_s: [f64; 2],
    /// Provenance of the rates of hosts.
    pub rates: ProvenanceKind,
}

impl From<ExactStepTime> for ExactStepPrediction {
    fn from(exact_step: ExactStepTime) -> ExactStepPrediction {
        let ExactStepTime { every, time, flops, copied, rates } = exact_step;
        ExactStepPrediction {
            every,
            host_flops: flops.0,
            bytes: copied.0,
            time_s: time.0,
            per_step_s: exact_step.per_step().0,
            per_step_interval_s: exact_step.per_step_interval().map(|bound| bound.0),
            rates,
        }
    }
}

impl Prediction {
    /// The prediction of the steps between exact steps; the same without these.
    pub fn between_exact_steps(&self) -> Prediction {
        let Some(exact_step) = &self.exact_step else { return self.clone() };
        let (share, [low_share, high_share]) =
            (exact_step.per_step_s, exact_step.per_step_interval_s);
        let [low, high] = self.step_time_interval_s;
        let step_time_s = self.step_time_s - share;
        let speedup = self.step_time_s / step_time_s;
        let Breakdown { other, .. } = self.breakdown_s;
        Prediction {
            step_time_s,
            step_time_interval_s: [low - low_share, high - high_share],
            tokens_per_s: self.tokens_per_s * speedup,
            mfu: self.mfu * speedup,
            flops_per_s_per_device: self.flops_per_s_per_device * speedup,
            breakdown_s: Breakdown { other: other - share, ..self.breakdown_s },
            ..self.clone()
        }
    }

    /// Arena of the stage that needs the most memory: the memory that every device must have.
    pub fn peak_memory(&self) -> Bytes {
        Bytes(self.peak_memory_bytes.iter().copied().max().unwrap_or_default())
    }
}

/// Payloads of the tensor-axis collectives of a block for one microbatch, by pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct BlockCollectives {
    /// Forward pass.
    #[schemars(with = "BTreeMap<String, u64>")]
    pub forward: CollectivePayloads,
    /// Backward pass without recomputation.
    #[schemars(with = "BTreeMap<String, u64>")]
    pub backward: CollectivePayloads,
    /// Recomputation.
    #[serde(rename = "redo")]
    #[schemars(with = "BTreeMap<String, u64>")]
    pub recompute: CollectivePayloads,
}

/// Unsharded bytes of the collectives of one pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CollectivePayloads {
    /// Payload by kind, without statistics; only kinds with a payload.
    pub by_kind: BTreeMap<CollectiveKind, Bytes>,
    /// Sums of norms and of the softmax.
    pub statistics: Bytes,
}

impl CollectivePayloads {
    /// Payload of one kind; zero without such collectives.
    pub fn of(&self, kind: CollectiveKind) -> Bytes {
        self.by_kind.get(&kind).copied().unwrap_or_default()
    }

    /// Bytes of all kinds and of the statistics.
    pub fn total(&self) -> Bytes {
        self.by_kind.values().copied().sum::<Bytes>() + self.statistics
    }

    /// Whether the pass has no collectives.
    pub fn is_empty(&self) -> bool {
        self.total() == Bytes(0)
    }
}

/// A map from names of kinds to bytes in alphabetical order, with the key `statistics` for the statistics. Entries of
/// zero bytes are left out.
impl Serialize for CollectivePayloads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let kinds = self.by_kind.iter().map(|(kind, bytes)| (kind.name(), bytes.0));
        let entries: BTreeMap<&str, u64> =
            kinds.chain([("statistics", self.statistics.0)]).collect();
        serializer.collect_map(entries.into_iter().filter(|(_, bytes)| *bytes > 0))
    }
}

/// The reason why a plan cannot be priced.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PredictError {
    /// The plan does not fit its model.
    #[error(transparent)]
    Plan(#[from] Defects),
    /// The program fails the check.
    #[error(transparent)]
    Program(#[from] CheckErrors),
}

/// Prices a plan: resolves, lowers, checks and simulates it.
pub fn predict(
    model: &Model,
    profile: &Profile,
    executor: Executor,
    plan: &Plan,
) -> Result<(Prediction, CheckedProgram), PredictError> {
    let resolved = plan.resolve(model)?;
    let program = CheckedProgram::check(lower(&resolved))?;
    let prediction = predict_program(model, profile, executor, &resolved, &program);
    Ok((prediction, program))
}

/// Prices a lowered plan.
pub fn predict_program(
    model: &Model,
    profile: &Profile,
    executor: Executor,
    resolved: &ResolvedPlan,
    program: &CheckedProgram,
) -> Prediction {
    let context = &resolved.context;
    let prices = Prices::new(profile, executor, &context.mesh);
    let price = |kernel: &Kernel| prices.kernel_time(kernel);
    let timeline = simulate(program, prices.streams(&price));
    let program = program.program();
    let costs = profile.launch_costs(executor);
    let exact_step = ExactStepTime::of(program, profile);
    let exact_share = exact_step.map_or(Seconds(0.0), |exact_step| exact_step.per_step());
    let exact_interval = exact_step.map_or([Seconds(0.0); 2], |step| step.per_step_interval());
    let program_time = timeline.step_time * costs.step_factor + Seconds(costs.step_s);
    let step = program_time + exact_share;
    let mut breakdown_s = timeline.breakdown.scaled(costs.step_factor);
    breakdown_s.bubble += costs.step_s;
    breakdown_s.other += exact_share.0;
    let kernels = kernels(program);
    let errors = ErrorModel::new(profile, executor, &context.mesh);
    let interval = errors.step_interval(&kernels);
    let tokens = (context.workload.global_batch * context.workload.sequence_length) as f64;
    let peak = profile.total_peak_flops_per_s(context.mesh.devices(), context.compute_dtype());
    let flops =
        model_flops(model, context.workload.sequence_length) * context.workload.global_batch as f64;
    Prediction {
        step_time_s: step.0,
        step_time_interval_s: [0, 1]
            .map(|side: usize| program_time.0 * interval[side] + exact_interval[side].0),
        tokens_per_s: tokens / step.0,
        mfu: flops / (peak * step.0),
        flops_per_s_per_device: flops / (step.0 * context.mesh.devices() as f64),
        peak_memory_bytes: program.stages.iter().map(|stage| stage.arena.0).collect(),
        breakdown_s,
        block_collective_bytes: block_collectives(resolved),
        assumed: profile.assumed_paths(),
        shapes_measured: errors.has_measured_shapes(),
        unmeasured: errors.unmeasured_kernels(&kernels),
        exact_step: exact_step.map(ExactStepPrediction::from),
        warning: profile.warning(),
    }
}

/// The kernels of all stages, each with its number of runs in a step.
pub fn kernels(program: &Program) -> Vec<(Kernel, f64)> {
    let mut counts: IndexMap<Kernel, f64> = IndexMap::new();
    let passes = program.context.passes() as f64;
    for stage in &program.stages {
        for at in stage.chunk_phases() {
            let times = if at.phase == Phase::Step { 1.0 } else { passes };
            for instr in stage.instructions(at) {
                *counts.entry(instr.kernel()).or_default() += times;
            }
        }
    }
    counts.into_iter().collect()
}

/// FLOPs of one sequence, forward and backward: six for each token and weight of a GEMM, and the
/// scores of attention that the mask leaves.
pub fn model_flops(model: &Model, length: u64) -> f64 {
    let weights: u64 = (0..model.blocks.len()).map(|layer| model.block_macs_per_token(layer)).sum();
    let head = model.vocab * model.hidden;
    let blocks = model.blocks.iter().map(|block| AttentionOp::of(model, block));
    let attention: f64 = blocks.map(|op| attention_flops(&op, length).0).sum();
    6.0 * (weights + head) as f64 * length as f64 + attention
}

/// Two GEMMs forward and four backward; the scores that flash attention recomputes are not counted.
fn attention_flops(op: &AttentionOp, length: u64) -> Flops {
    let forward = Attention {
        query_parts: 1,
        ring: None,
        direction: Direction::Forward,
        sequences: 1,
        length,
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        input: DType::Bf16,
        window: op.mask.window(length),
    };
    Flops(3.0 * forward.flops().0)
}

/// Counts the collectives of one middle block.
fn block_collectives(resolved: &ResolvedPlan) -> BlockCollectives {
    let blocks: Vec<_> = resolved.stages.iter().flatten().collect();
    let Some(block) = blocks.get(blocks.len() / 2) else { return BlockCollectives::default() };
    let (segment, choice) = (&block.plan.segment, &block.plan.choice);
    let context = &resolved.context;
    let mut counted = BlockCollectives::default();
    for id in segment.op_ids() {
        let option = &choice.ops[id.0 as usize];
        count(&op_forward(segment, id, &option.choice, context), &mut counted.forward);
        count(&op_backward(segment, id, &option.choice, context), &mut counted.backward);
        if option.recompute {
            count(&op_recompute(segment, id, &option.choice, context), &mut counted.recompute);
        }
    }
    for id in segment.value_ids() {
        let (value, flow) = (segment.value(id), &choice.flows[id.0 as usize]);
        count(&flow_forward(value, flow, context), &mut counted.forward);
        count(&flow_backward(value, flow, context), &mut counted.backward);
        count(&flow_recompute(value, flow, context), &mut counted.recompute);
    }
    counted
}

fn count(templates: &[InstrTemplate], payloads: &mut CollectivePayloads) {
    for template in templates {
        if let Action::Attention(attention) = &template.action {
            for (count, shift) in attention.ring_shifts() {
                *payloads.by_kind.entry(shift.kind).or_default() += shift.payload * count;
            }
        }
        let Action::Collective(collective) = &template.action else { continue };
        if !collective.axis.shards_activations() {
            continue;
        }
        if collective.payload > Bytes(0) {
            *payloads.by_kind.entry(collective.kind()).or_default() += collective.payload;
        }
        payloads.statistics += collective.statistic;
    }
}
