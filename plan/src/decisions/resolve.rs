//! Resolves a plan file against its model: names become ids, and every layout is checked.

use std::sync::Arc;

use crate::context::{Context, ContextAttention};
use crate::graph::{
    BlockShape, BoundaryTensor, Op, Segment, ValueId, block_segment, embedding_segment,
    head_segment,
};
use crate::model::{ExactStepObstacle, Model};
use crate::program::ModelConstants;
use crate::strategy::{
    BoundaryLayout, Flow, OpChoice, OpOption, Save, SegmentChoice, Strategy, TiedWeightLayout,
    WeightRule, boundary_layouts, flow_is_legal, op_choices,
};
use crate::{Defect, Defects, EdgeLayout};

use super::saves::{SaveDecisions, check_saves};
use super::{Plan, SegmentDecisions, StagePlan};

/// A segment with its decisions.
#[derive(Clone, Debug)]
pub struct SegmentPlan {
    /// The op graph.
    pub segment: Segment,
    /// A choice for every op and value.
    pub choice: SegmentChoice,
}

/// A block of a stage, with its decisions.
#[derive(Clone, Debug)]
pub struct ResolvedBlock {
    /// Index of the layer in the model.
    pub layer: u64,
    /// The tensors passed to the next block, the hidden state first.
    pub outgoing: Vec<BoundaryTensor>,
    /// Graph and decisions, shared by blocks of equal shape and decisions.
    pub plan: Arc<SegmentPlan>,
}

/// A plan that fits its model: every name exists, every strategy and every flow is legal.
#[derive(Clone, Debug)]
pub struct ResolvedPlan {
    /// Mesh, workload and formats.
    pub context: Context,
    /// Layouts of the tensors between segments.
    pub boundary: BoundaryLayout,
    /// Constants of the model that fused ops need.
    pub constants: ModelConstants,
    /// Whether embedding and head are one weight.
    pub tied: bool,
    /// The embedding.
    pub embedding: SegmentPlan,
    /// The tensors passed to the first block: the hidden state.
    pub embedding_outgoing: Vec<BoundaryTensor>,
    /// The blocks of each virtual stage; the first and the last of several may have none.
    pub stages: Vec<Vec<ResolvedBlock>>,
    /// The head.
    pub head: SegmentPlan,
}

impl Plan {
    /// Resolves every name and layout of the plan against its model.
    ///
    /// # Errors
    /// Every defect, each with its field.
    pub fn resolve(&self, model: &Model) -> Result<ResolvedPlan, Defects> {
        let context = self.context()?;
        if context.workload.sequence_length > model.max_sequence_length {
            return Err(sequence_too_long(&context, model).into());
        }
        if !context.context_attention.divides_heads(&context.mesh, model) {
            return Err(heads_do_not_divide(&context, model).into());
        }
        if let Some(window) = model.least_window(context.workload.sequence_length)
            && context.rotates_keys()
        {
            return Err(ring_in_window(window).into());
        }
        if context.loro_every.is_some()
            && let Some(ExactStepObstacle { reason, hint }) = model.exact_step_obstacle()
        {
            return Err(Defect::new("loro_every", reason).hint(hint).into());
        }
        let shapes = BlockShape::all(model);
        let boundary = self.boundary_layout(&shapes, model, &context)?;
        let mut defects = Defects::default();
        let resolver =
            PlanResolver { context: &context, shapes: &shapes, boundary, defects: &mut defects };
        let (embedding, head, stages) = resolver.resolve_all(self, model);
        if model.tied && defects.0.is_empty() {
            check_tied(&embedding, &head, &mut defects);
        }
        let resolved = ResolvedPlan {
            context,
            boundary,
            constants: ModelConstants::of(model),
            tied: model.tied,
            embedding,
            embedding_outgoing: vec![BoundaryTensor::hidden(model.hidden)],
            stages,
            head,
        };
        defects.into_result(resolved)
    }

    fn boundary_layout(
        &self,
        shapes: &[BlockShape],
        model: &Model,
        context: &Context,
    ) -> Result<BoundaryLayout, Defects> {
        let crossing: Vec<u64> = BlockShape::crossing_widths(shapes);
        let names = |layouts: &mut dyn Iterator<Item = EdgeLayout>| {
            let mut names: Vec<String> = layouts.map(|edge| edge.to_string()).collect();
            names.sort();
            names.dedup();
            names.join(" or ")
        };
        let legal = boundary_layouts(model.hidden, &crossing, context);
        let over = format!("over {} devices", context.tensor_size());
        let mut defects = Defects::default();
        let hidden = self.hidden_layout.edge();
        if !legal.iter().any(|boundary| boundary.hidden == hidden) {
            let problem = format!("the hidden state cannot be laid out as {hidden} {over}");
            let hint = names(&mut legal.iter().map(|boundary| boundary.hidden));
            defects.push(Defect::new("hidden_layout", problem).hint(hint));
        }
        let latents = self.crossing_layout.map(|layout| layout.edge());
        let hint = names(&mut legal.iter().map(|boundary| boundary.latents));
        match latents {
            None if !crossing.is_empty() => {
                let problem = "is missing, but latents cross between the blocks of this model";
                defects.push(Defect::new("crossing_layout", problem).hint(hint));
            }
            Some(_) if crossing.is_empty() => {
                let problem = "is set, but no latents cross between the blocks of this model";
                defects
                    .push(Defect::new("crossing_layout", problem).hint("omit `crossing_layout`"));
            }
            Some(latents) if !legal.iter().any(|boundary| boundary.latents == latents) => {
                let problem =
                    format!("the crossing latents cannot be laid out as {latents} {over}");
                defects.push(Defect::new("crossing_layout", problem).hint(hint));
            }
            _ => {}
        }
        let latents = latents.unwrap_or(EdgeLayout::REPLICATED);
        defects.into_result(BoundaryLayout { hidden, latents })
    }
}

impl ResolvedPlan {
    /// The tensors that a virtual stage passes to the next one; empty for an index without a stage.
    pub(crate) fn boundary_tensors(&self, stage: usize) -> &[BoundaryTensor] {
        let Some(stages) = self.stages.get(..=stage) else { return &[] };
        let last = stages.iter().flatten().next_back();
        last.map_or(&self.embedding_outgoing, |block| &block.outgoing)
    }
}

fn heads_do_not_divide(context: &Context, model: &Model) -> Defect {
    let Context { mesh, context_attention, .. } = context;
    let (field, axes, hint) = match context_attention {
        ContextAttention::Exchange => (
            "mesh.context",
            "tensor × context",
            "a smaller context or tensor axis, or the context_attention `gather`",
        ),
        ContextAttention::Gather | ContextAttention::Ring => {
            ("mesh.tensor", "tensor", "a smaller tensor axis")
        }
    };
    let problem = format!(
        "attention divides {} query heads and {} KV heads evenly over {axes} = {} devices",
        model.heads,
        model.kv_heads,
        context_attention.head_parts(mesh)
    );
    Defect::new(field, problem).hint(hint)
}

fn ring_in_window(window: u64) -> Defect {
    let problem = format!(
        "`ring` passes all keys around, but a sliding window of {window} keys hides some of them"
    );
    Defect::new("context_attention", problem).hint("gather")
}

fn sequence_too_long(context: &Context, model: &Model) -> Defect {
    let problem = format!(
        "{} tokens are more than the {} that `{}` supports",
        context.workload.sequence_length, model.max_sequence_length, model.name
    );
    let hint = "a shorter sequence, or a larger max_position_embeddings in the model";
    Defect::new("workload.sequence_length", problem).hint(hint)
}

fn check_tied(embedding: &SegmentPlan, head: &SegmentPlan, defects: &mut Defects) {
    let weight = |plan: &SegmentPlan| {
        let op = plan.segment.vocabulary_op()?;
        let strategy = plan.choice.ops[op.0 as usize].choice.strategy;
        Some(TiedWeightLayout::of(plan.segment.kind, strategy))
    };
    if weight(embedding) != weight(head) {
        let problem =
            "embedding and head are one weight, but their strategies give it different layouts";
        defects.push(
            Defect::new("embedding.ops.embedding", problem)
                .hint("embedding `vocabulary` with head `column`, or `column` with `row`"),
        );
    }
}

struct PlanResolver<'a> {
    context: &'a Context,
    shapes: &'a [BlockShape],
    boundary: BoundaryLayout,
    defects: &'a mut Defects,
}

impl PlanResolver<'_> {
    fn resolve_all(
        mut self,
        plan: &Plan,
        model: &Model,
    ) -> (SegmentPlan, SegmentPlan, Vec<Vec<ResolvedBlock>>) {
        let embedding = self.segment("embedding", embedding_segment(model), &plan.embedding);
        let head = self.segment("head", head_segment(model), &plan.head);
        let stages = self.stages(plan, model);
        (embedding, head, stages)
    }

    fn stages(&mut self, plan: &Plan, model: &Model) -> Vec<Vec<ResolvedBlock>> {
        if plan.stages.len() != self.context.virtual_stages() {
            let (listed, pipeline) = (plan.stages.len(), self.context.mesh.pipeline);
            let problem = format!("{listed} stages are listed, but the mesh has {pipeline}");
            let hint = match (listed as u64).is_multiple_of(pipeline) && pipeline > 1 {
                true => {
                    "the schedule interleaved, with several model chunks per stage, or another mesh.pipeline"
                }
                false => "one entry for each pipeline stage, or another mesh.pipeline",
            };
            self.defects.push(Defect::new("stages", problem).hint(hint));
        }
        let layers = model.blocks.len() as u64;
        let mut next = 0;
        let mut resolved: Vec<(u64, String, Arc<SegmentPlan>)> = vec![];
        let mut stages = vec![];
        for (s, stage) in plan.stages.iter().enumerate() {
            let mut blocks = vec![];
            for (r, run) in stage.runs.iter().enumerate() {
                let field = format!("stages[{s}].runs[{r}]");
                if run.first != next || run.count == 0 || run.count > layers - next {
                    let problem = format!(
                        "the run covers blocks {} to {}, but the next of the {layers} blocks is block {next}",
                        run.first,
                        run.first.saturating_add(run.count).saturating_sub(1)
                    );
                    self.defects.push(Defect::new(field, problem));
                    return stages;
                }
                next += run.count;
                let Some(decisions) = plan.blocks.get(&run.decisions) else {
                    let problem = format!("there are no block decisions named `{}`", run.decisions);
                    let known = plan.blocks.keys().cloned().collect::<Vec<_>>().join(", ");
                    let field = format!("{field}.decisions");
                    self.defects.push(Defect::new(field, problem).hint(known));
                    continue;
                };
                for layer in run.first..run.first + run.count {
                    let equal = resolved.iter().find(|(other, name, _)| {
                        *name == run.decisions
                            && self.shapes[*other as usize] == self.shapes[layer as usize]
                    });
                    let shape = &self.shapes[layer as usize];
                    let outgoing = shape.outgoing_tensors(model.hidden);
                    if let Some((_, _, plan)) = equal {
                        blocks.push(ResolvedBlock { layer, outgoing, plan: plan.clone() });
                        continue;
                    }
                    let segment = block_segment(model, shape, decisions.grouping);
                    let field = format!("blocks.{}", run.decisions);
                    let plan =
                        Arc::new(self.segment(&field, segment, &decisions.segment_decisions()));
                    resolved.push((layer, run.decisions.clone(), plan.clone()));
                    blocks.push(ResolvedBlock { layer, outgoing, plan });
                }
            }
            if stage.runs.is_empty() && StagePlan::blocks_min(s, plan.stages.len()) > 0 {
                let [part, parts] = match self.context.chunks {
                    1 => ["stage", "stages"],
                    _ => ["model chunk", "chunks"],
                };
                let problem = format!("the {part} has no block");
                let hint = format!(
                    "at least one block for every {part} between the first and the last, or fewer {parts}"
                );
                self.defects.push(Defect::new(format!("stages[{s}].runs"), problem).hint(hint));
            }
            stages.push(blocks);
        }
        let runs = || plan.stages.iter().flat_map(|stage| &stage.runs);
        for name in plan.blocks.keys().filter(|name| runs().all(|run| run.decisions != **name)) {
            let problem = "no run of a stage uses these decisions";
            let defect = Defect::new(format!("blocks.{name}"), problem);
            self.defects.push(defect.hint("remove them, or name them in a run of a stage"));
        }
        if next != layers {
            let problem = format!("blocks {next} to {} are on no stage", layers.saturating_sub(1));
            self.defects.push(Defect::new("stages", problem));
        }
        stages
    }

    fn segment(
        &mut self,
        field: &str,
        segment: Segment,
        decisions: &SegmentDecisions,
    ) -> SegmentPlan {
        let ops = self.ops(field, &segment, decisions);
        let mut choice = SegmentChoice { ops, flows: vec![] };
        let mut saves = SaveDecisions::read(decisions, field, self.defects);
        for id in segment.value_ids() {
            let value = segment.value(id);
            let mut flow = self.flow(field, &segment, &choice, id);
            flow.saves = flow
                .copies()
                .iter()
                .map(|layout| saves.take(&format!("{}@{layout}", value.name)))
                .collect();
            if flow.saves[0] == Save::Recomputed
                && let Some(op) = value.producer
            {
                choice.ops[op.0 as usize].recompute = true;
            }
            choice.flows.push(flow);
        }
        saves.report_unmatched(field, self.defects);
        check_saves(field, &segment, &choice, self.defects);
        SegmentPlan { segment, choice }
    }

    fn ops(
        &mut self,
        field: &str,
        segment: &Segment,
        decisions: &SegmentDecisions,
    ) -> Vec<OpOption> {
        for name in decisions.ops.keys() {
            if !segment.ops.iter().any(|node| node.name == *name) {
                let known: Vec<&str> = segment.ops.iter().map(|node| node.name.as_str()).collect();
                let problem = "is not an op of this segment";
                let defect = Defect::new(format!("{field}.ops.{name}"), problem);
                self.defects.push(defect.hint(known.join(", ")));
            }
        }
        let mut options = vec![];
        for node in &segment.ops {
            let field = format!("{field}.ops.{}", node.name);
            let legal = op_choices(segment, node, self.context, WeightRule::Any);
            let requested = decisions.ops.get(&node.name).copied();
            let choice = legal.iter().find(|choice| Some(choice.strategy) == requested);
            if choice.is_none() {
                let problem = match requested {
                    Some(strategy) => format!(
                        "strategy `{}` is not legal for this op over {} devices",
                        strategy.name(),
                        self.context.tensor_size()
                    ),
                    None => "has no strategy".into(),
                };
                let names: Vec<&str> = legal.iter().map(|choice| choice.strategy.name()).collect();
                // Keys and values are gathered apart from the queries.
                let hint = match names.is_empty() && matches!(node.op, Op::Attention(_)) {
                    true => "`grouping.qkv` false, or `context_attention` exchange".to_owned(),
                    false => names.join(" or "),
                };
                self.defects.push(Defect::new(field, problem).hint(hint));
            }
            let choice = choice.or(legal.first()).cloned().unwrap_or(OpChoice {
                strategy: Strategy::Replicate,
                inputs: vec![EdgeLayout::REPLICATED; node.inputs.len()],
                outputs: vec![EdgeLayout::REPLICATED; node.outputs.len()],
            });
            options.push(OpOption { choice, recompute: false });
        }
        options
    }

    /// The flow that the strategies of producer and consumers imply, without saved copies.
    fn flow(
        &mut self,
        field: &str,
        segment: &Segment,
        choice: &SegmentChoice,
        id: ValueId,
    ) -> Flow {
        let value = segment.value(id);
        let producer = match segment.output_port(id) {
            Some((op, port)) => choice.ops[op.0 as usize].choice.outputs[port],
            None => self.boundary.input_edge(segment, id),
        };
        let mut edges: Vec<EdgeLayout> = value
            .consumers
            .iter()
            .map(|(op, port)| choice.ops[op.0 as usize].choice.inputs[*port])
            .collect();
        edges.extend(self.boundary.output_edge(segment, id));
        let primary = edges.last().copied().unwrap_or(producer);
        let mut others: Vec<EdgeLayout> = edges.into_iter().filter(|e| *e != primary).collect();
        others.dedup();
        let field = format!("{field} (value {})", value.name);
        if others.len() > 1 {
            let problem = "the consumers use more than two different layouts";
            self.defects.push(Defect::new(field.clone(), problem));
        }
        let second = others.first().copied();
        if !flow_is_legal(producer, primary, second) {
            let consumed: Vec<String> =
                std::iter::once(primary).chain(second).map(|edge| edge.to_string()).collect();
            let problem = format!(
                "the value is produced as {producer} but consumed as {}, and no reshard exists between these layouts",
                consumed.join(" and ")
            );
            self.defects.push(Defect::new(field, problem));
        }
        Flow { producer, primary, second, saves: vec![] }
    }
}
