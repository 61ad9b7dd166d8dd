//! Random plans: points drawn from the whole search space, of many models, meshes and workloads.

use indexmap::IndexMap;
use narrows_plan::graph::{
    BlockShape, Grouping, OpId, Segment, ValueId, block_segment, embedding_segment, head_segment,
};
use narrows_plan::lower;
use narrows_plan::model::{self, Model};
use narrows_plan::program::Program;
use narrows_plan::random::SplitMix64;
use narrows_plan::{
    BlockDecisions, BlockRun, PLAN_FORMAT, PlanLayout, PlanSource, SegmentDecisions, StagePlan,
};
use narrows_plan::{
    Context, Zero,
    strategy::{
        Flow, OpOption, Rules, Save, SegmentChoice, SegmentSpace, TiedWeightLayout,
        backward_reads_input, backward_reads_output, boundary_layouts, flow_is_legal,
    },
};
use narrows_plan::{EdgeLayout, Plan, Precision};
use narrows_plan::{Mesh, Workload};

/// SplitMix64 with the draws that tests need, the same on every machine.
pub struct TestRng(SplitMix64);

impl TestRng {
    pub fn new(seed: u64) -> TestRng {
        TestRng(SplitMix64::new(seed))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`, by remainder: the plans that the seeds of tests draw depend on it.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next_u64() % end as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> Option<&'a T> {
        if list.is_empty() { None } else { Some(&list[self.below(list.len())]) }
    }

    pub fn coin(&mut self) -> bool {
        self.next_u64() & 1 == 1
    }
}

const PRESETS: [&str; 5] = ["cola-tiny", "llama-60m", "svd-60m", "cola-60m", "lax-60m"];

/// heads, kv_heads, rest of `blocks`.
const CUSTOM: [(u64, u64, &str); 9] = [
    (8, 8, r#""default": {"product": "swiglu", "all": "dense"}"#),
    (8, 2, r#""default": {"product": "plain", "all": {"rank": 64, "activation": "silu"}}"#),
    (16, 2, r#""default": {"product": "swiglu", "all": {"rank": 32, "activation": "identity"}}"#),
    (
        8,
        4,
        r#""default": {"product": "swiglu", "all": "dense"},
       "overrides": {"1-2": {"q": {"rank": 64, "activation": "silu"}}}"#,
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
       "o": "dense", "v": {"rank": 24}}"#,
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
       "up": {"crossing": {"form": "released", "gate": "dense"}}},
       "overrides": {"2": {"v": {"crossing": "none"}, "down": "dense"}, "3": {"down": {"crossing": "none"}}}"#,
    ),
];

pub fn drawable_models() -> Vec<Model> {
    let mut models: Vec<Model> =
        PRESETS.iter().map(|name| model::presets::find(name).expect("a preset")).collect();
    for (heads, kv_heads, blocks) in CUSTOM {
        for tied in [false, true] {
            let text = format!(
                r#"{{"format": "narrows-model/1", "hidden": 256, "vocab": 512, "heads": {heads},
                "kv_heads": {kv_heads}, "d_ff": 688, "tied": {tied},
                "blocks": {{"count": 4, {blocks}}}}}"#
            );
            let name = format!("custom-{heads}-{kv_heads}-{tied}.json");
            models.push(model::read(&name, &text).expect("a valid model"));
        }
    }
    models
}

/// A plan drawn from the space of a model, with what it ran into.
pub struct DrawnPlan {
    pub plan: Plan,
    pub model: Model,
}

impl DrawnPlan {
    pub fn program(&self) -> Program {
        let resolved = self.plan.resolve(&self.model).unwrap_or_else(|defects| {
            panic!("a drawn plan must resolve: {defects}\n{}", to_json(&self.plan))
        });
        lower(&resolved)
    }
}

pub fn to_json(plan: &Plan) -> String {
    serde_json::to_string_pretty(plan).expect("plans serialise")
}

fn context(dice: &mut TestRng) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 2, 4, 4, 8][dice.below(6)],
        pipeline: 1 + dice.below(3) as u64,
        data: 1 + dice.below(2) as u64,
    };
    let micro_batch = [1, 2, 4, 8][dice.below(4)];
    let microbatches = 1 + dice.below(5) as u64;
    let workload = Workload {
        global_batch: micro_batch * mesh.data * microbatches,
        sequence_length: 64,
        micro_batch,
    };
    let precision = [Precision::MixedBf16, Precision::Full32][dice.below(2)];
    let zero = [Zero::Off, Zero::One][dice.below(2)];
    Context { mesh, workload, precision, zero }
}

/// Draws until a consistent plan is found.
pub fn draw_case(dice: &mut TestRng, models: &[Model]) -> DrawnPlan {
    loop {
        let model = dice.pick(models).expect("there are models").clone();
        let context = context(dice);
        if let Some(plan) = draw_plan(dice, &model, context) {
            return DrawnPlan { plan, model };
        }
    }
}

pub fn draw_plan(dice: &mut TestRng, model: &Model, context: Context) -> Option<Plan> {
    let shapes = BlockShape::all(model);
    let crossing = BlockShape::crossing_widths(&shapes);
    let border = *dice.pick(&boundary_layouts(model.hidden, &crossing, &context))?;
    let tied = model.tied.then(|| TiedWeightLayout::ALL[dice.below(4)]);
    let segment = |dice: &mut TestRng, segment: Segment, tied_weight| {
        let space =
            SegmentSpace::new(segment, border, context, &Rules::ALL, model.tied, tied_weight);
        let choice = (0..200).find_map(|_| draw_choice(dice, &space))?;
        Some(SegmentDecisions::from_choice(&space.segment, &choice))
    };
    let embedding = segment(dice, embedding_segment(model), tied)?;
    let head = segment(dice, head_segment(model), tied)?;
    let mut blocks = IndexMap::new();
    let mut stages = vec![];
    let (layers, count) = (model.blocks.len() as u64, context.mesh.pipeline);
    let mut first = 0;
    for stage in 0..count {
        // Every stage at least one block; each block with decisions of its own.
        let end =
            if stage + 1 == count { layers } else { (first + 1 + dice.next_u64() % 2).min(layers) };
        let mut runs = vec![];
        for layer in first..end {
            let grouping = Grouping::ALL[dice.below(4)];
            let graph = block_segment(model, &shapes[layer as usize], grouping);
            let decisions = segment(dice, graph, None)?;
            let name = format!("block {layer}");
            blocks.insert(name.clone(), BlockDecisions::new(grouping, decisions));
            runs.push(BlockRun { first: layer, count: 1, decisions: name });
        }
        first = end;
        stages.push(StagePlan { runs });
    }
    let origin = PlanSource { name: model.name.clone(), fingerprint: String::new() };
    Some(Plan {
        format: PLAN_FORMAT.into(),
        model: origin.clone(),
        hardware: origin,
        executor: Default::default(),
        precision: context.precision,
        mesh: context.mesh,
        workload: context.workload,
        zero: context.zero,
        hidden_layout: PlanLayout::from_edge(border.hidden)?,
        crossing_layout: (!crossing.is_empty()).then_some(PlanLayout::from_edge(border.latents)?),
        stages,
        embedding,
        blocks,
        head,
    })
}

/// A random consistent point of a segment's space, or `None` when a dead end was met.
pub fn draw_choice(dice: &mut TestRng, space: &SegmentSpace) -> Option<SegmentChoice> {
    let segment = &space.segment;
    let mut ops: Vec<OpOption> = vec![];
    for id in segment.op_ids() {
        let fitting: Vec<&OpOption> = space.ops[id.0 as usize]
            .iter()
            .filter(|option| !option.recompute && fits(space, &ops, id, option))
            .collect();
        ops.push((*dice.pick(&fitting)?).clone());
    }
    let mut flows: Vec<Option<Flow>> = vec![None; segment.values.len()];
    for id in segment.value_ids().rev() {
        let flow = draw_flow(dice, space, &ops, id)?;
        if flow.saves[0] == Save::Recomputed
            && let Some(op) = segment.value(id).producer
        {
            ops[op.0 as usize].recompute = true;
        }
        flows[id.0 as usize] = Some(flow);
    }
    Some(SegmentChoice { ops, flows: flows.into_iter().collect::<Option<_>>()? })
}

fn producer(space: &SegmentSpace, ops: &[OpOption], value: ValueId) -> EdgeLayout {
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
        let from = producer(space, ops, *value);
        edges.len() <= 2 && flow_is_legal(from, edge, None)
    });
    let outputs = node.outputs.iter().enumerate().all(|(port, value)| {
        let from = option.choice.outputs[port];
        let exit = space.boundary.output_edge(segment, *value);
        exit.is_none_or(|exit| flow_is_legal(from, exit, None))
    });
    inputs && outputs
}

/// A flow between the chosen layouts that saves what the chosen ops need.
fn draw_flow(
    dice: &mut TestRng,
    space: &SegmentSpace,
    ops: &[OpOption],
    id: ValueId,
) -> Option<Flow> {
    let segment = &space.segment;
    let value = segment.value(id);
    let from = producer(space, ops, id);
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
    dice.pick(&fitting).map(|flow| (*flow).clone())
}
