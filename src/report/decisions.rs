//! The decisions of a plan as tables: one row an op.

use std::collections::BTreeMap;

use narrows_plan::decisions::{ResolvedPlan, SegmentPlan};
use narrows_plan::emit::{
    InstrTemplate, WeightSplit, copy_forward, flow_backward, op_backward, op_forward, op_parameters,
};
use narrows_plan::graph::{Grouping, OpId, SegmentKind, ValueId};
use narrows_plan::mesh::Axis;
use narrows_plan::program::Action;
use narrows_plan::strategy::{Context, Save};
use narrows_plan::{Bytes, Plan};

use super::page::{Align, TextPage};

const COLUMNS: [(&str, Align); 7] = [
    ("op", Align::Left),
    ("strategy", Align::Left),
    ("weight", Align::Left),
    ("result", Align::Left),
    ("forward", Align::Left),
    ("backward", Align::Left),
    ("for backward", Align::Left),
];

/// The tables of embedding, blocks and head.
pub fn tables(page: &mut TextPage, plan: &Plan, resolved: &ResolvedPlan) {
    let context = &resolved.context;
    ends(page, resolved);
    for (name, decisions) in &plan.blocks {
        let layers = layers_of(plan, name);
        let Some(first) = layers.first().map(|(first, _)| *first) else { continue };
        let block = resolved.stages.iter().flatten().find(|block| block.layer == first);
        let Some(block) = block else { continue };
        let blocks = match layers[..] {
            [(first, end)] if end == first + 1 => "Block",
            _ => "Blocks",
        };
        let ranges: Vec<String> = layers.into_iter().map(range).collect();
        page.heading(format!("{blocks} {} (`{name}`)", ranges.join(", ")));
        page.line(grouping(decisions.grouping));
        page.table(&COLUMNS, &rows(&block.plan, context));
    }
}

fn ends(page: &mut TextPage, resolved: &ResolvedPlan) {
    page.heading("Embedding and head");
    let mut made = rows(&resolved.embedding, &resolved.context);
    made.extend(rows(&resolved.head, &resolved.context));
    page.table(&COLUMNS, &made);
}

/// Runs of blocks, by stage, joined where they meet.
fn layers_of(plan: &Plan, name: &str) -> Vec<(u64, u64)> {
    let mut layers: Vec<(u64, u64)> = vec![];
    for run in plan.stages.iter().flat_map(|stage| &stage.runs) {
        if run.decisions != name {
            continue;
        }
        match layers.last_mut() {
            Some((_, end)) if *end == run.first => *end += run.count,
            _ => layers.push((run.first, run.first + run.count)),
        }
    }
    layers
}

fn range((first, end): (u64, u64)) -> String {
    if end == first + 1 { first.to_string() } else { format!("{first}–{}", end - 1) }
}

fn grouping(grouping: Grouping) -> String {
    let together = |on, names| format!("{names} {}", if on { "as one product" } else { "apart" });
    [together(grouping.qkv, "q, k, v"), together(grouping.gate_up, "gate, up")].join("; ")
}

fn rows(plan: &SegmentPlan, context: &Context) -> Vec<Vec<String>> {
    let block = plan.segment.kind == SegmentKind::Block;
    let entries = plan.segment.inputs.iter().filter(|_| block);
    let entries = entries.map(|id| entry_row(plan, *id, context));
    entries.chain(plan.segment.op_ids().map(|id| row(plan, id, context))).collect()
}

/// What is kept of the hidden state, or of a crossing latent, that comes in.
fn entry_row(plan: &SegmentPlan, id: ValueId, context: &Context) -> Vec<String> {
    let forward = exchanges(&value_forward(plan, id, context));
    let backward = exchanges(&value_backward(plan, id, context));
    let name = match plan.segment.carried(id) {
        Some(0) | None => "(input)".to_string(),
        Some(_) => format!("({})", plan.segment.value(id).name),
    };
    let cells = [&name, "", "", &layouts(plan, id, context), &forward, &backward, &saved(plan, id)];
    cells.map(str::to_owned).to_vec()
}

fn row(plan: &SegmentPlan, id: OpId, context: &Context) -> Vec<String> {
    let node = plan.segment.op(id);
    let choice = &plan.choice.ops[id.0 as usize].choice;
    let split = context.tensor_size() > 1;
    let mut forward = op_forward(&plan.segment, id, choice, context);
    let mut backward = op_backward(&plan.segment, id, choice, context);
    let (mut result, mut kept) = (vec![], vec![]);
    for &output in &node.outputs {
        forward.extend(value_forward(plan, output, context));
        backward.extend(value_backward(plan, output, context));
        result.push(layouts(plan, output, context));
        kept.push(saved(plan, output));
    }
    let strategy = if split { choice.strategy.name() } else { "" };
    vec![
        node.name.clone(),
        strategy.to_owned(),
        if split { weight(plan, id, context) } else { String::new() },
        joined(result),
        exchanges(&forward),
        exchanges(&backward),
        joined(kept),
    ]
}

/// Several outputs that agree are told once.
fn joined(mut parts: Vec<String>) -> String {
    parts.retain(|part| !part.is_empty());
    parts.dedup();
    parts.join("; ")
}

fn weight(plan: &SegmentPlan, id: OpId, context: &Context) -> String {
    let strategy = plan.choice.ops[id.0 as usize].choice.strategy;
    let Some(parameter) = op_parameters(plan.segment.op(id), strategy, context) else {
        return String::new();
    };
    match parameter.split {
        WeightSplit::Whole => "whole".into(),
        WeightSplit::Rows => format!("rows ÷ {}", context.tensor_size()),
        WeightSplit::Columns => format!("columns ÷ {}", context.tensor_size()),
    }
}

/// The layouts a value takes on its way, the producer's first.
fn layouts(plan: &SegmentPlan, id: ValueId, context: &Context) -> String {
    if context.tensor_size() == 1 {
        return String::new();
    }
    let copies = plan.choice.flows[id.0 as usize].copies();
    let mut names = copies.iter().map(|layout| layout.to_string());
    let made = names.next().unwrap_or_default();
    let turned: Vec<String> = names.collect();
    if turned.is_empty() { made } else { format!("{made} → {}", turned.join(", ")) }
}

fn saved(plan: &SegmentPlan, id: ValueId) -> String {
    let flow = &plan.choice.flows[id.0 as usize];
    let copies = flow.copies();
    let told = |(index, save): (usize, &Save)| {
        let what = match save {
            Save::Dropped => return None,
            Save::Kept => "keep",
            Save::Recomputed => "redo",
        };
        let layout = copies.get(index).filter(|_| copies.len() > 1);
        Some(layout.map_or(what.to_owned(), |layout| format!("{what} {layout}")))
    };
    flow.saves.iter().enumerate().filter_map(told).collect::<Vec<_>>().join(", ")
}

fn value_forward(plan: &SegmentPlan, id: ValueId, context: &Context) -> Vec<InstrTemplate> {
    let (value, flow) = (plan.segment.value(id), &plan.choice.flows[id.0 as usize]);
    let copies = 1..flow.copies().len();
    copies.flat_map(|copy| copy_forward(value, flow, copy, context)).collect()
}

fn value_backward(plan: &SegmentPlan, id: ValueId, context: &Context) -> Vec<InstrTemplate> {
    flow_backward(plan.segment.value(id), &plan.choice.flows[id.0 as usize], context)
}

/// The tensor-axis collectives of some instructions: `all_reduce 96.0 MiB`.
fn exchanges(templates: &[InstrTemplate]) -> String {
    let mut kinds: BTreeMap<&str, Bytes> = BTreeMap::new();
    for template in templates {
        if let Action::Collective(exchange) = &template.action
            && exchange.axis == Axis::Tensor
        {
            // What rides along with a payload is told in the table of volumes.
            let alone = exchange.payload == Bytes(0);
            *kinds.entry(exchange.kind.name()).or_default() +=
                if alone { exchange.statistic } else { exchange.payload };
        }
    }
    let told = |(kind, bytes): (&str, Bytes)| format!("{kind} {bytes}");
    kinds.into_iter().map(told).collect::<Vec<_>>().join(", ")
}
