//! The decisions of a plan: for every op its strategy, its layouts, its collectives, and what is stored for the
//! backward pass.

use std::collections::BTreeMap;
use std::fmt;

use narrows_plan::emit::{InstrTemplate, copy_forward, flow_backward, op_backward, op_forward};
use narrows_plan::graph::{Grouping, OpId, SegmentKind, ValueId};
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::strategy::{Save, op_parameters};
use narrows_plan::{Bytes, Context, Plan, ResolvedPlan, SegmentPlan, WeightSplit};
use schemars::JsonSchema;
use serde::Serialize;

use super::page::{Align, Page};
use crate::args::Detail;
use crate::collectives::tensor_collectives;

const COLUMNS: [(&str, Align); 5] = [
    ("op", Align::Left),
    ("strategy", Align::Left),
    ("output layout", Align::Left),
    ("forward", Align::Left),
    ("backward", Align::Left),
];

const LEGEND: &str = "* stored for the backward pass, + recomputed in it. Collectives over the \
    tensor axis, per microbatch: AR all-reduce, RS reduce-scatter, AG all-gather, A2A all-to-all.";

/// One op, or an input of a block.
struct OpRow {
    name: String,
    strategy: &'static str,
    weight: Option<WeightSplit>,
    /// Layouts of the outputs, with symbols for copies that are stored or recomputed.
    layouts: String,
    forward: String,
    backward: String,
    stored: bool,
    recomputed: bool,
}

/// The decisions for one op, or for an input of a block.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct OpDecision {
    /// Name of the strategy; empty for inputs.
    strategy: &'static str,
    /// Layouts of the outputs, the producer's first: `partial → sequence*`. `*` marks copies stored for the backward
    /// pass, `+` recomputed ones.
    layouts: String,
}

impl fmt::Display for OpDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpDecision { strategy, layouts } = self;
        let separator = if strategy.is_empty() || layouts.is_empty() { "" } else { ": " };
        write!(f, "{strategy}{separator}{layouts}")
    }
}

/// The decisions for all ops of a segment, by name.
pub fn op_decisions(plan: &SegmentPlan, context: &Context) -> Vec<(String, OpDecision)> {
    let decision = |OpRow { name, strategy, layouts, .. }| (name, OpDecision { strategy, layouts });
    op_rows(plan, context).into_iter().map(decision).collect()
}

/// The decisions for the embedding, the head and each kind of block.
pub fn tables(page: &mut Page, plan: &Plan, resolved: &ResolvedPlan, detail: Detail) {
    let context = &resolved.context;
    page.heading("Embedding and head");
    let mut rows = op_rows(&resolved.embedding, context);
    rows.extend(op_rows(&resolved.head, context));
    table(page, &rows, context, detail);
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
        table(page, &op_rows(&block.plan, context), context, detail);
    }
    if context.tensor_size() > 1 {
        page.paragraph(LEGEND);
    }
}

/// Ranges of the blocks with these decisions, joined across stages.
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
    let phrase = |grouped, names| {
        format!("{names} {}", if grouped { "grouped into one GEMM" } else { "separate" })
    };
    [phrase(grouping.qkv, "q, k, v"), phrase(grouping.gate_up, "gate, up")].join("; ")
}

/// A table where ops are split over the tensor axis; without one, what is stored and recomputed.
fn table(page: &mut Page, rows: &[OpRow], context: &Context, detail: Detail) {
    if context.tensor_size() == 1 {
        names(page, "Stored for the backward pass", rows, |row| row.stored);
        names(page, "Recomputed in the backward pass", rows, |row| row.recomputed);
        return;
    }
    let cells = |row: &OpRow| {
        let OpRow { name, strategy, layouts, forward, backward, .. } = row;
        [name, *strategy, layouts, forward, backward].map(str::to_owned).to_vec()
    };
    page.table(&COLUMNS, &rows.iter().map(cells).collect::<Vec<_>>());
    if detail == Detail::Full {
        let has_split = |split| move |row: &OpRow| row.weight == Some(split);
        names(page, "Weights split by rows", rows, has_split(WeightSplit::Rows));
        names(page, "Weights split by columns", rows, has_split(WeightSplit::Columns));
        names(page, "Weights replicated", rows, has_split(WeightSplit::Whole));
    }
}

/// The names of some ops, if there are any.
fn names(page: &mut Page, title: &str, rows: &[OpRow], predicate: impl Fn(&OpRow) -> bool) {
    let names: Vec<&str> = rows.iter().filter(|row| predicate(row)).map(|row| &*row.name).collect();
    if !names.is_empty() {
        page.paragraph(&format!("{title}: {}.", names.join(", ")));
    }
}

fn op_rows(plan: &SegmentPlan, context: &Context) -> Vec<OpRow> {
    let is_block = plan.segment.kind == SegmentKind::Block;
    let entries = plan.segment.inputs.iter().filter(|_| is_block);
    let entries = entries.map(|id| entry_row(plan, *id, context));
    entries.chain(plan.segment.op_ids().map(|id| op_row(plan, id, context))).collect()
}

/// The hidden state or a crossing latent that a block receives.
fn entry_row(plan: &SegmentPlan, id: ValueId, context: &Context) -> OpRow {
    let name = match plan.segment.boundary_index(id) {
        Some(0) | None => "(input)".to_string(),
        Some(_) => format!("({})", plan.segment.value(id).name),
    };
    OpRow {
        name,
        strategy: "",
        weight: None,
        layouts: layouts(plan, id),
        forward: collectives(&value_forward(plan, id, context)),
        backward: collectives(&value_backward(plan, id, context)),
        stored: is_saved(plan, id, Save::Kept),
        recomputed: is_saved(plan, id, Save::Recomputed),
    }
}

fn op_row(plan: &SegmentPlan, id: OpId, context: &Context) -> OpRow {
    let node = plan.segment.op(id);
    let choice = &plan.choice.ops[id.0 as usize].choice;
    let mut forward = op_forward(&plan.segment, id, choice, context);
    let mut backward = op_backward(&plan.segment, id, choice, context);
    let mut outputs = vec![];
    for &output in &node.outputs {
        forward.extend(value_forward(plan, output, context));
        backward.extend(value_backward(plan, output, context));
        outputs.push(layouts(plan, output));
    }
    // Outputs that agree are shown once.
    outputs.dedup();
    let any = |save| node.outputs.iter().any(|output| is_saved(plan, *output, save));
    OpRow {
        name: node.name.clone(),
        strategy: choice.strategy.name(),
        weight: op_parameters(node, choice.strategy, context).map(|parameter| parameter.split),
        layouts: outputs.join("; "),
        forward: collectives(&forward),
        backward: collectives(&backward),
        stored: any(Save::Kept),
        recomputed: any(Save::Recomputed),
    }
}

/// The layouts of a value, the producer's first, with a symbol for each copy that is stored or recomputed.
fn layouts(plan: &SegmentPlan, id: ValueId) -> String {
    let flow = &plan.choice.flows[id.0 as usize];
    let symbol = |index: usize| match flow.saves.get(index) {
        Some(Save::Kept) => "*",
        Some(Save::Recomputed) => "+",
        Some(Save::Dropped) | None => "",
    };
    let copies = flow.copies();
    let mut names =
        copies.iter().enumerate().map(|(index, layout)| format!("{layout}{}", symbol(index)));
    let produced = names.next().unwrap_or_default();
    let resharded: Vec<String> = names.collect();
    match resharded.is_empty() {
        true => produced,
        false => format!("{produced} → {}", resharded.join(", ")),
    }
}

/// Whether any copy of a value has this save decision.
fn is_saved(plan: &SegmentPlan, id: ValueId, save: Save) -> bool {
    plan.choice.flows[id.0 as usize].saves.contains(&save)
}

fn value_forward(plan: &SegmentPlan, id: ValueId, context: &Context) -> Vec<InstrTemplate> {
    let (value, flow) = (plan.segment.value(id), &plan.choice.flows[id.0 as usize]);
    let copies = 1..flow.copies().len();
    copies.flat_map(|copy| copy_forward(value, flow, copy, context)).collect()
}

fn value_backward(plan: &SegmentPlan, id: ValueId, context: &Context) -> Vec<InstrTemplate> {
    flow_backward(plan.segment.value(id), &plan.choice.flows[id.0 as usize], context)
}

/// The tensor-axis collectives of some instructions: `AR 96.0 MiB`. Statistics beside payloads are listed in the table of
/// payloads.
fn collectives(templates: &[InstrTemplate]) -> String {
    let kinds = tensor_collectives(templates).into_iter();
    let kinds: BTreeMap<&str, Bytes> =
        kinds.map(|(kind, bytes)| (abbreviation(kind), bytes)).collect();
    let phrases: Vec<String> =
        kinds.into_iter().map(|(kind, bytes)| format!("{kind} {bytes}")).collect();
    phrases.join(", ")
}

fn abbreviation(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce => "AR",
        CollectiveKind::ReduceScatter => "RS",
        CollectiveKind::AllGather => "AG",
        CollectiveKind::AllToAll => "A2A",
    }
}
