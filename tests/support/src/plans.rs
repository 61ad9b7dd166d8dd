//! Random plans: points drawn from the whole search space, of many models, meshes and workloads.

use std::num::NonZeroU64;

use indexmap::IndexMap;
use narrows_plan::graph::{
    BlockShape, Grouping, OpId, Segment, ValueId, block_segment, effective_grouping,
    embedding_segment, head_segment,
};
use narrows_plan::model::{self, Model};
use narrows_plan::program::Program;
use narrows_plan::random::SplitMix64;
use narrows_plan::strategy::{
    Flow, OpOption, Rules, Save, SegmentChoice, SegmentSpace, TiedWeightLayout,
    backward_reads_input, backward_reads_output, boundary_layouts, flow_is_legal,
};
use narrows_plan::{
    BlockDecisions, BlockRun, BucketSplit, Context, ContextAttention, EdgeLayout, GradReduceDtype,
    Mesh, PLAN_FORMAT, PipelineSchedule, Plan, PlanLayout, PlanSource, Precision, SegmentDecisions,
    StagePlan, Workload, Zero, lower,
};

/// SplitMix64 with the distributions that tests need.
pub struct TestRng(SplitMix64);

impl TestRng {
    pub fn new(seed: u64) -> TestRng {
        TestRng(SplitMix64::new(seed))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`: the next 64 bits modulo `end`. The plans of all seeds depend on this definition.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end as u64) as usize
    }

    /// A random element, or `None` of an empty list, without drawing.
    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { Some(&list[self.below(list.len())]) }
    }

    /// A random bit of the next draw, which is not consumed: later draws stay as they are.
    pub fn peek_bool(&self) -> bool {
        self.peek_bit(63)
    }

    /// One bit of the next draw, which is not consumed.
    fn peek_bit(&self, bit: u32) -> bool {
        self.0.clone().next_u64() >> bit & 1 == 1
    }

    pub fn random_bool(&mut self) -> bool {
        self.next_u64() & 1 == 1
    }
}

const PRESETS: [&str; 5] = ["cola-tiny", "llama-60m", "svd-60m", "cola-60m", "lax-60m"];

/// Heads, KV heads, and the JSON of `blocks` without its count.
const CUSTOM: [(u64, u64, &str); 9] = [
    (8, 8, r#""default": {"product": "swiglu", "all": "dense"}"#),
    (8, 2, r#""default": {"product": "plain", "all": {"rank": 64, "activation": "silu"}}"#),
    (
        16,
        2,
        r#""default": {"product": "swiglu", "all": {"rank": 32, "activation": "identity"},
       "qk_norm": true}"#,
    ),
    (
        8,
        4,
        r#""default": {"product": "swiglu", "all": "dense", "qkv_bias": true},
       "overrides": {"1-2": {"q": {"rank": 64, "activation": "silu"}, "attention": {"sliding_window": 5}}}"#,
    ),
    (
        8,
        8,
        r#""default": {"product": "plain", "all": {"rank": 64, "activation": "identity"},
       "k": {"rank": 32}}, "overrides": {"0": {"down": "dense"}}"#,
    ),
    (
        8,
        8,
        r#""default": {"product": "swiglu", "all": {"rank": 64, "activation": "silu"},
       "o": "dense", "v": {"rank": 24}, "qkv_bias": true, "qk_norm": true,
       "attention": {"sliding_window": 3}}"#,
    ),
    (
        8,
        8,
        r#""default": {"product": "plain", "all": {"rank": 64, "activation": "silu",
       "crossing": {"form": "paper", "gate": "identity"}}}"#,
    ),
    (
        8,
        4,
        r#""default": {"product": "swiglu", "all": {"rank": 64, "activation": "identity",
       "crossing": {"form": "paper", "gate": "dense"}}, "o": "dense"},
       "overrides": {"1": {"q": {"rank": 32}}}"#,
    ),
    (
        8,
        8,
        r#""default": {"product": "plain", "all": {"rank": 64, "activation": "silu",
       "crossing": {"form": "released", "gate": {"tensor": {"a": 4, "b": 16}}}},
       "up": {"crossing": {"form": "released", "gate": "affine"}}},
       "overrides": {"2": {"v": {"crossing": "none"}, "down": "dense"}, "3": {"down": {"crossing": "none"}}}"#,
    ),
];

/// Five presets and 18 models of width 128: all kinds of linears, gates and crossings, tied and not.
pub fn drawable_models() -> Vec<Model> {
    let mut models: Vec<Model> =
        PRESETS.iter().map(|name| model::presets::find(name).expect("a preset")).collect();
    for (heads, kv_heads, blocks) in CUSTOM {
        for tied in [false, true] {
            let text = format!(
                r#"{{"format": "narrows-model/1", "hidden": 128, "vocab": 256, "heads": {heads},
                "kv_heads": {kv_heads}, "d_ff": 344, "tied": {tied},
                "blocks": {{"count": 4, {blocks}}}}}"#
            );
            let name = format!("custom-{heads}-{kv_heads}-{tied}.json");
            models.push(model::read(&name, &text).expect("a valid model"));
        }
    }
    models
}

/// A random plan and its model.
pub struct DrawnPlan {
    pub plan: Plan,
    pub model: Model,
}

impl DrawnPlan {
    /// The lowered plan.
    pub fn program(&self) -> Program {
        let resolved = self.plan.resolve(&self.model).unwrap_or_else(|defects| {
            panic!("a drawn plan must resolve: {defects}\n{}", to_json(&self.plan))
        });
        lower(&resolved)
    }
}

pub fn to_json(plan: &Plan) -> String {
    serde_json::to_string_pretty(plan).expect("plans serialize")
}

fn draw_context(rng: &mut TestRng) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 2, 4, 4, 8][rng.below(6)],
        pipeline: 1 + rng.below(3) as u64,
        data: [1, 2, 4][rng.below(3)],
        context: [1, 1, 2, 4][rng.below(4)],
    };
    let micro_batch = [1, 2, 4, 8][rng.below(4)];
    let microbatches = 1 + rng.below(5) as u64;
    let workload = Workload {
        global_batch: micro_batch * mesh.data * microbatches,
        sequence_length: 64,
        micro_batch,
    };
    let precision = [Precision::MixedBf16, Precision::Fp32][rng.below(2)];
    let (zero, shard_size) = draw_zero(rng, mesh.replicas());
    let (overlap_grad_reduce, overlap_tensor_collectives) = (rng.random_bool(), rng.random_bool());
    let context = Context {
        grad_reduce_dtype: peek_grad_reduce_dtype(rng, precision),
        overlap_grad_reduce,
        // No draw of its own, so that the cases stay those that they were.
        overlap_param_gather: overlap_grad_reduce != overlap_tensor_collectives,
        overlap_tensor_collectives,
        shard_size,
        context_attention: peek_context_attention(rng),
        last_gradient_bucket: peek_bucket_split(rng, 61),
        first_gather_bucket: peek_bucket_split(rng, 59),
        loro_every: NonZeroU64::new(2).filter(|_| rng.peek_bit(57)),
        ..Context::new(mesh, workload, precision, zero)
    };
    let context = draw_schedule(rng, context);
    peek_microbatch_pairs(rng, context)
}

/// The format in which gradients are reduced: a random one in mixed precision.
pub fn peek_grad_reduce_dtype(rng: &TestRng, precision: Precision) -> GradReduceDtype {
    match precision == Precision::MixedBf16 && rng.peek_bool() {
        true => GradReduceDtype::Bf16,
        false => GradReduceDtype::Fp32,
    }
}

/// A random form of attention on a context axis.
pub fn peek_context_attention(rng: &TestRng) -> ContextAttention {
    match [62, 55].map(|bit| rng.peek_bit(bit)) {
        [false, _] => ContextAttention::Exchange,
        [true, false] => ContextAttention::Gather,
        [true, true] => ContextAttention::Ring,
    }
}

/// A random division of buckets of first blocks, from two bits of the next draw.
pub fn peek_bucket_split(rng: &TestRng, bit: u32) -> BucketSplit {
    match [bit, bit - 1].map(|bit| rng.peek_bit(bit)) {
        [true, _] => BucketSplit::ByLinear,
        [false, true] => BucketSplit::AtAttention,
        [false, false] => BucketSplit::Whole,
    }
}

/// The context, at random with two microbatches a pass where it can have them.
pub fn peek_microbatch_pairs(rng: &TestRng, context: Context) -> Context {
    let overlap_microbatch_pairs = context.can_pair_microbatches() && rng.peek_bit(57);
    Context { overlap_microbatch_pairs, ..context }
}

/// The context with a random schedule.
pub fn draw_schedule(rng: &mut TestRng, context: Context) -> Context {
    use PipelineSchedule::{Interleaved, OneForwardOneBackward, ZeroBubble};
    let schedule = PipelineSchedule::ALL[rng.below(PipelineSchedule::ALL.len())];
    match schedule {
        OneForwardOneBackward | ZeroBubble => Context { schedule, ..context },
        Interleaved if context.mesh.pipeline > 1 => interleaved(context, 2),
        Interleaved => context,
    }
}

/// The context with this many chunks per stage, and as many microbatches for each stage as it had before in all.
pub fn interleaved(context: Context, chunks: u64) -> Context {
    let schedule = PipelineSchedule::Interleaved;
    let global_batch = context.workload.global_batch * context.mesh.pipeline;
    let workload = Workload { global_batch, ..context.workload };
    let accumulates_gradients = workload.microbatches(&context.mesh) > 1;
    Context { schedule, chunks, workload, accumulates_gradients, ..context }
}

/// A random ZeRO stage, and the replicas of a shard group.
pub fn draw_zero(rng: &mut TestRng, replicas: u64) -> (Zero, u64) {
    let zero = [Zero::Off, Zero::One, Zero::Two, Zero::Three][rng.below(4)];
    let sizes: Vec<u64> = (2..=replicas).filter(|size| replicas.is_multiple_of(*size)).collect();
    match rng.pick(&sizes) {
        Some(size) if zero != Zero::Off => (zero, *size),
        _ if zero == Zero::Off => (zero, 1),
        _ => (zero, replicas),
    }
}

/// A random model with a random context and plan.
pub fn draw_case(rng: &mut TestRng, models: &[Model]) -> DrawnPlan {
    loop {
        let model = rng.pick(models).expect("there are models").clone();
        let context = draw_context(rng);
        if let Some(plan) = draw_plan(rng, &model, context) {
            return DrawnPlan { plan, model };
        }
    }
}

/// A random plan of a model in a context, or `None` when the draws lead to no consistent plan.
pub fn draw_plan(rng: &mut TestRng, model: &Model, context: Context) -> Option<Plan> {
    // Ring attention has no sliding windows.
    let hides_keys = model.least_window(context.workload.sequence_length).is_some();
    let attention = match context.context_attention {
        ContextAttention::Ring if hides_keys => ContextAttention::Gather,
        attention => attention,
    };
    let context = Context { context_attention: attention, ..context };
    let divides_positions =
        attention.divides_positions(&context.mesh, context.workload.sequence_length);
    if !attention.divides_heads(&context.mesh, model) || !divides_positions {
        return None;
    }
    let shapes = BlockShape::all(model);
    let crossing = BlockShape::crossing_widths(&shapes);
    let boundary = *rng.pick(&boundary_layouts(model.hidden, &crossing, &context))?;
    let tied = model.tied.then(|| TiedWeightLayout::ALL[rng.below(4)]);
    let segment = |rng: &mut TestRng, segment: Segment, tied_weight| {
        let space = SegmentSpace::new(
            segment.into(),
            boundary,
            context,
            &Rules::ALL,
            model.tied,
            tied_weight,
        );
        let choice = (0..200).find_map(|_| draw_choice(rng, &space))?;
        Some(SegmentDecisions::from_choice(&space.segment, &choice))
    };
    let embedding = segment(rng, embedding_segment(model), tied)?;
    let head = segment(rng, head_segment(model), tied)?;
    let mut blocks = IndexMap::new();
    let mut stages = vec![];
    let (layers, count) = (model.blocks.len() as u64, context.virtual_stages() as u64);
    if layers < count {
        return None;
    }
    let mut first = 0;
    for stage in 0..count {
        // At least one block a stage or chunk, at first; every block has its own decisions.
        let later_stages = count - stage - 1;
        let end = match later_stages {
            0 => layers,
            _ => (first + 1 + rng.next_u64() % 2).min(layers - later_stages),
        };
        let mut runs = vec![];
        for layer in first..end {
            let grouping = draw_grouping(rng, &shapes[layer as usize], &context);
            let graph = block_segment(model, &shapes[layer as usize], grouping);
            let decisions = segment(rng, graph, None)?;
            let name = format!("block {layer}");
            blocks.insert(name.clone(), BlockDecisions::new(grouping, decisions));
            runs.push(BlockRun { first: layer, count: 1, decisions: name });
        }
        first = end;
        stages.push(StagePlan { runs });
    }
    empty_ends(rng, &mut stages);
    let origin = PlanSource { name: model.name.clone(), fingerprint: String::new() };
    Some(Plan {
        format: PLAN_FORMAT.into(),
        model: origin.clone(),
        hardware: origin,
        executor: Default::default(),
        precision: context.precision,
        grad_reduce_dtype: context.grad_reduce_dtype,
        mesh: context.mesh,
        context_attention: match context.mesh.context {
            1 => ContextAttention::Exchange,
            _ => attention,
        },
        workload: context.workload,
        zero: context.zero,
        shard_size: context.partial_shard_size(),
        schedule: context.schedule,
        overlap_grad_reduce: context.overlap_grad_reduce,
        overlap_param_gather: context.overlap_param_gather,
        overlap_tensor_collectives: context.overlap_tensor_collectives,
        overlap_microbatch_pairs: context.overlap_microbatch_pairs,
        last_gradient_bucket: context.last_gradient_bucket,
        first_gather_bucket: context.first_gather_bucket,
        loro_every: context.loro_every.filter(|_| model.exact_step_obstacle().is_none()),
        hidden_layout: PlanLayout::from_edge(boundary.hidden)?,
        crossing_layout: (!crossing.is_empty()).then_some(PlanLayout::from_edge(boundary.latents)?),
        stages,
        embedding,
        blocks,
        head,
    })
}

/// A random grouping, with which queries are a tensor of their own where keys and values are gathered.
fn draw_grouping(rng: &mut TestRng, shape: &BlockShape, context: &Context) -> Grouping {
    let grouping = Grouping::ALL[rng.below(4)];
    let qkv = grouping.qkv && !(context.gathers_keys() && effective_grouping(shape, grouping).qkv);
    Grouping { qkv, ..grouping }
}

/// Of one in four pipelines, the blocks of the first stage or chunk join those of the next; of one in four, the blocks of
/// the last join those of the one before.
fn empty_ends(rng: &mut TestRng, stages: &mut [StagePlan]) {
    let last = stages.len() - 1;
    if last > 0 && rng.below(4) == 0 {
        let mut runs = std::mem::take(&mut stages[0].runs);
        runs.append(&mut stages[1].runs);
        stages[1].runs = runs;
    }
    if last > 0 && rng.below(4) == 0 {
        let mut runs = std::mem::take(&mut stages[last].runs);
        stages[last - 1].runs.append(&mut runs);
    }
}

/// A random consistent choice for all ops and values of a segment, or `None` when the ops and values drawn
/// first leave one of the others no consistent option.
fn draw_choice(rng: &mut TestRng, space: &SegmentSpace) -> Option<SegmentChoice> {
    let segment = &space.segment;
    let mut ops: Vec<OpOption> = vec![];
    for id in segment.op_ids() {
        let fitting: Vec<&OpOption> = space.ops[id.0 as usize]
            .iter()
            .filter(|option| !option.recompute && fits(space, &ops, id, option))
            .collect();
        ops.push((*rng.pick(&fitting)?).clone());
    }
    let mut flows: Vec<Option<Flow>> = vec![None; segment.values.len()];
    for id in segment.value_ids().rev() {
        let flow = draw_flow(rng, space, &ops, id)?;
        if flow.saves[0] == Save::Recomputed
            && let Some(op) = segment.value(id).producer
        {
            ops[op.0 as usize].recompute = true;
        }
        flows[id.0 as usize] = Some(flow);
    }
    Some(SegmentChoice { ops, flows: flows.into_iter().collect::<Option<_>>()? })
}

fn producer_layout(space: &SegmentSpace, ops: &[OpOption], value: ValueId) -> EdgeLayout {
    match space.segment.output_port(value) {
        Some((op, port)) => ops[op.0 as usize].choice.outputs[port],
        None => space.boundary.input_edge(&space.segment, value),
    }
}

fn fits(space: &SegmentSpace, ops: &[OpOption], id: OpId, option: &OpOption) -> bool {
    let segment = &space.segment;
    let node = segment.op(id);
    let inputs = node.inputs.iter().enumerate().all(|(port, value)| {
        let edge = option.choice.inputs[port];
        let mut edges: Vec<EdgeLayout> = segment
            .value(*value)
            .consumers
            .iter()
            .filter(|(op, _)| op.0 < id.0)
            .map(|(op, port)| ops[op.0 as usize].choice.inputs[*port])
            .chain([edge])
            .chain(space.boundary.output_edge(segment, *value))
            .collect();
        edges.sort();
        edges.dedup();
        let from = producer_layout(space, ops, *value);
        edges.len() <= 2 && flow_is_legal(from, edge, None)
    });
    let outputs = node.outputs.iter().enumerate().all(|(port, value)| {
        let from = option.choice.outputs[port];
        let exit = space.boundary.output_edge(segment, *value);
        exit.is_none_or(|exit| flow_is_legal(from, exit, None))
    });
    inputs && outputs
}

/// A random flow between the chosen layouts that saves the tensors which the chosen ops read again.
fn draw_flow(
    rng: &mut TestRng,
    space: &SegmentSpace,
    ops: &[OpOption],
    id: ValueId,
) -> Option<Flow> {
    let segment = &space.segment;
    let value = segment.value(id);
    let from = producer_layout(space, ops, id);
    let edge = |&(op, port): &(OpId, usize)| ops[op.0 as usize].choice.inputs[port];
    let primary = space.boundary.output_edge(segment, id).or(value.consumers.last().map(edge))?;
    let second = value.consumers.iter().map(edge).find(|other| *other != primary);
    let serves = |flow: &&Flow| {
        let inputs = value.consumers.iter().all(|(op, port)| {
            let option = &ops[op.0 as usize];
            let read = option.recompute || backward_reads_input(&segment.op(*op).op);
            !read || flow.is_saved(option.choice.inputs[*port].forward)
        });
        let output = value.producer.is_none_or(|op| {
            let strategy = ops[op.0 as usize].choice.strategy;
            !backward_reads_output(&segment.op(op).op, strategy) || flow.saves[0] != Save::Dropped
        });
        let layouts = (flow.producer, flow.primary, flow.second) == (from, primary, second);
        layouts && inputs && output
    };
    let fitting: Vec<&Flow> = space.flows[id.0 as usize].iter().filter(serves).collect();
    rng.pick(&fitting).map(|flow| (*flow).clone())
}
