//! The graph of a block: ops with their weights, the layouts between them, and the collectives that change layouts.

use narrows_cost_model::KernelPrice;
use narrows_plan::emit::{
    InstrTemplate, copy_forward, gradient_backward, op_backward, op_forward, op_recompute,
};
use narrows_plan::graph::{Op, OpId, OpNode, ValueId};
use narrows_plan::model::AttentionMask;
use narrows_plan::strategy::{Flow, Save, op_parameters};
use narrows_plan::{
    Bytes, Context, Dim, EdgeLayout, Kernel, Layout, Seconds, SegmentPlan, WeightSplit,
};
use narrows_runtime::TimeCategory;

use super::category_colour;
use super::layered_graph::{DrawnEdge, DrawnNode, LayeredGraph};
use super::picture::Picture;
use crate::breakdown;
use crate::collectives::activation_collectives;
use crate::text::thousands;

const NOTE: &str = "↓ forward and ↑ backward: times of one microbatch on one device; bytes of the unsharded tensors";

/// The graph of a block at these prices; `None` without ops.
pub fn block_picture(
    title: &str,
    plan: &SegmentPlan,
    context: &Context,
    price: KernelPrice,
) -> Option<Picture> {
    let mut drawing =
        BlockDrawing { plan, context, price, nodes: vec![], edges: vec![], routes: vec![] };
    drawing.draw();
    let has_collectives = context.has_activation_collectives();
    let legend = [
        TimeCategory::Gemm,
        TimeCategory::Attention,
        TimeCategory::Elementwise,
        TimeCategory::CollectiveExposed,
    ];
    let legend =
        legend.into_iter().filter(|c| has_collectives || *c != TimeCategory::CollectiveExposed);
    let name = |category| match category {
        TimeCategory::CollectiveExposed => "collectives".to_owned(),
        _ => breakdown::title(category).to_owned(),
    };
    let graph = LayeredGraph {
        title: title.to_owned(),
        note: NOTE.to_owned(),
        legend: legend.map(|category| (name(category), category_colour(category))).collect(),
        nodes: drawing.nodes,
        edges: drawing.edges,
    };
    graph.picture()
}

struct BlockDrawing<'a> {
    plan: &'a SegmentPlan,
    context: &'a Context,
    price: KernelPrice<'a>,
    nodes: Vec<DrawnNode>,
    edges: Vec<DrawnEdge>,
    /// Copies of values, for their consumers.
    routes: Vec<Route>,
}

/// A copy of a value: the node that it comes from, and its layout.
struct Route {
    value: ValueId,
    edge: EdgeLayout,
    node: usize,
    label: String,
}

impl BlockDrawing<'_> {
    fn draw(&mut self) {
        let segment = &self.plan.segment;
        for input in &segment.inputs {
            let node = self
                .node(boundary_lines("from the block before", &segment.value(*input).name), None);
            self.value(*input, node);
        }
        for id in segment.op_ids() {
            let op = segment.op(id);
            let kernels =
                op_forward(segment, id, &self.plan.choice.ops[id.0 as usize].choice, self.context);
            let category = kernels
                .iter()
                .map(|template| category(&template.kernel()))
                .find(|c| *c != TimeCategory::CollectiveExposed);
            let lines = self.op_lines(id, op);
            let node = self.node(lines, category);
            for (port, input) in op.inputs.iter().enumerate() {
                let edge = self.plan.choice.ops[id.0 as usize].choice.inputs[port];
                self.connect(*input, edge, node);
            }
            for output in &op.outputs {
                self.value(*output, node);
            }
        }
        for output in &segment.outputs {
            let node =
                self.node(boundary_lines("to the next block", &segment.value(*output).name), None);
            let edge = self.plan.choice.flows[output.0 as usize].primary;
            self.connect(*output, edge, node);
        }
    }

    fn node(&mut self, lines: Vec<String>, category: Option<TimeCategory>) -> usize {
        let colour = category_colour(category.unwrap_or(TimeCategory::Other));
        self.nodes.push(DrawnNode { lines, colour });
        self.nodes.len() - 1
    }

    /// Name and strategy, weights, times and collectives of an op.
    fn op_lines(&self, id: OpId, op: &OpNode) -> Vec<String> {
        let segment = &self.plan.segment;
        let option = &self.plan.choice.ops[id.0 as usize];
        let strategy = option.choice.strategy;
        let mut lines = vec![match self.context.tensor_size() {
            1 => op.name.clone(),
            _ => format!("{}: {}", op.name, strategy.name()),
        }];
        let split = op_parameters(op, strategy, self.context).map(|parameter| parameter.split);
        lines.extend(shape(&op.op, split, self.context));
        let forward = op_forward(segment, id, &option.choice, self.context);
        let mut backward = op_backward(segment, id, &option.choice, self.context);
        if option.recompute {
            backward.extend(op_recompute(segment, id, &option.choice, self.context));
        }
        let recomputed = if option.recompute { " with recomputation" } else { "" };
        let [down, up] = [&forward, &backward].map(|templates| self.time(templates));
        let time = |arrow: &str, time: Seconds| (time.0 > 0.0).then(|| format!("{arrow} {time}"));
        let times: Vec<String> = time("↓", down).into_iter().chain(time("↑", up)).collect();
        lines.push(match times.is_empty() {
            true => "no kernel".into(),
            false => times.join("  ") + recomputed,
        });
        lines.extend(self.collective_lines(&forward, &backward));
        lines
    }

    /// Registers the copies of a value that `node` produces, with a node for each pair of reshards.
    fn value(&mut self, id: ValueId, node: usize) {
        let flow = &self.plan.choice.flows[id.0 as usize];
        let value = self.plan.segment.value(id);
        let copies = flow.copies();
        let (mut copy_nodes, mut gradients) = (vec![(0, node)], vec![]);
        for edge in std::iter::once(flow.primary).chain(flow.second) {
            let copy = copies.iter().position(|layout| *layout == edge.forward).unwrap_or(0);
            let known = copy_nodes.iter().find(|(known, _)| *known == copy).map(|(_, node)| *node);
            let forward = match known {
                Some(_) => vec![],
                None => copy_forward(value, flow, copy, self.context),
            };
            let gradient =
                flow.gradients().iter().position(|layout| *layout == edge.backward).unwrap_or(0);
            let backward = match gradients.contains(&gradient) {
                true => vec![],
                false => gradient_backward(value, flow, gradient, self.context),
            };
            gradients.push(gradient);
            let lines = self.collective_lines(&forward, &backward);
            let source = known.unwrap_or(node);
            let source = match lines.is_empty() {
                true => source,
                false => {
                    let reshard = self.node(lines, Some(TimeCategory::CollectiveExposed));
                    let label =
                        copy_label(flow, if known.is_some() { copy } else { 0 }, self.context);
                    self.edges.push(DrawnEdge { from: source, to: reshard, label });
                    reshard
                }
            };
            if known.is_none() {
                copy_nodes.push((copy, source));
            }
            let label = copy_label(flow, copy, self.context);
            self.routes.push(Route { value: id, edge, node: source, label });
        }
    }

    /// Draws the edge from the copy of a value to its consumer.
    fn connect(&mut self, value: ValueId, edge: EdgeLayout, to: usize) {
        let found = self.routes.iter().find(|route| route.value == value && route.edge == edge);
        let Some(Route { node, label, .. }) = found else { return };
        let edge = DrawnEdge { from: *node, to, label: label.clone() };
        if !self.edges.iter().any(|known| (known.from, known.to) == (edge.from, to)) {
            self.edges.push(edge);
        }
    }

    fn time(&self, templates: &[InstrTemplate]) -> Seconds {
        let kernels = templates.iter().map(InstrTemplate::kernel);
        kernels
            .filter(|kernel| !matches!(kernel, Kernel::Collective(_)))
            .map(|kernel| (self.price)(&kernel))
            .sum()
    }

    /// Kinds, bytes and times of collectives.
    fn collective_lines(
        &self,
        forward: &[InstrTemplate],
        backward: &[InstrTemplate],
    ) -> Vec<String> {
        let line = |(arrow, templates): (&str, &[InstrTemplate])| {
            let kinds: Vec<String> = activation_collectives(templates)
                .into_iter()
                .map(|(kind, bytes): (_, Bytes)| {
                    format!("{} {bytes}", kind.name().replace('_', "-"))
                })
                .collect();
            let kernels = templates.iter().map(InstrTemplate::kernel);
            let collectives = kernels.filter(|kernel| matches!(kernel, Kernel::Collective(_)));
            let times: Vec<Seconds> = collectives.map(|kernel| (self.price)(&kernel)).collect();
            let kinds = (!kinds.is_empty()).then(|| format!("{arrow} {}", kinds.join(", ")))?;
            // The shifts of ring attention are in the time of the op.
            let time: Seconds = times.iter().copied().sum();
            Some(if times.is_empty() { kinds } else { format!("{kinds}, {time}") })
        };
        [("↓", forward), ("↑", backward)].into_iter().filter_map(line).collect()
    }
}

fn boundary_lines(place: &str, value: &str) -> Vec<String> {
    vec![value.to_owned(), place.to_owned()]
}

/// Layout of a copy, and whether the backward pass reads it from memory.
fn copy_label(flow: &Flow, copy: usize, context: &Context) -> String {
    let layout = match flow.copies()[copy] {
        Layout::Heads => "split on heads",
        Layout::Gathered => "all positions",
        _ if context.tensor_size() == 1 => "",
        Layout::Replicated => "replicated",
        Layout::Sharded(Dim::Feature) => "split on features",
        Layout::Sharded(Dim::Sequence) => "split on sequences",
        Layout::Sharded(Dim::Position) => "split on positions",
        Layout::Partial => "partial sum",
    };
    let saved = match flow.saves.get(copy) {
        Some(Save::Kept) => "stored",
        Some(Save::Recomputed) => "recomputed",
        Some(Save::Dropped) | None => "",
    };
    let separator = if layout.is_empty() || saved.is_empty() { "" } else { ", " };
    format!("{layout}{separator}{saved}")
}

/// Weights of a linear, and heads of an attention, with their shards.
fn shape(op: &Op, split: Option<WeightSplit>, context: &Context) -> Option<String> {
    let devices = context.tensor_size();
    match op {
        Op::Linear(linear) => {
            let first = &linear.members[0];
            let same =
                linear.members.iter().all(|m| (m.d_in, m.d_out) == (first.d_in, first.d_out));
            let shapes: Vec<String> = match (same, linear.members.len()) {
                (true, 1) => vec![matrix(first.d_in, first.d_out)],
                (true, count) => vec![format!("{count} of {}", matrix(first.d_in, first.d_out))],
                (false, _) => linear.members.iter().map(|m| matrix(m.d_in, m.d_out)).collect(),
            };
            let split = match split {
                Some(WeightSplit::Rows) => format!(", rows / {devices}"),
                Some(WeightSplit::Columns) => format!(", columns / {devices}"),
                Some(WeightSplit::Whole) | None => String::new(),
            };
            Some(format!("{}{split}", shapes.join(", ")))
        }
        Op::Attention(attention) => {
            let heads = format!("{} heads of {}", attention.heads, attention.head_dim);
            let kv = if attention.kv_heads == attention.heads {
                String::new()
            } else {
                format!(", {} for k and v", attention.kv_heads)
            };
            let window = match attention.mask {
                AttentionMask::SlidingWindow(window) => format!(", window {}", thousands(window)),
                AttentionMask::Full => String::new(),
            };
            Some(format!("{heads}{kv}{window}"))
        }
        _ => None,
    }
}

fn matrix(rows: u64, columns: u64) -> String {
    format!("{} × {}", thousands(rows), thousands(columns))
}

fn category(kernel: &Kernel) -> TimeCategory {
    match kernel {
        Kernel::Gemm(_) => TimeCategory::Gemm,
        Kernel::Attention(_) => TimeCategory::Attention,
        Kernel::Fused(_) => TimeCategory::Elementwise,
        Kernel::Collective(_) => TimeCategory::CollectiveExposed,
        Kernel::Transfer(_) => TimeCategory::Other,
    }
}
