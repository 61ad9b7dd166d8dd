//! The tables of decisions for every op.

use narrows_plan::graph::Grouping;
use narrows_plan::{Context, Plan, ResolvedPlan, WeightSplit};

use super::page::{Align, Page};
use crate::args::Detail;
use crate::op_decisions::{OpRow, op_rows};

const COLUMNS: [(&str, Align); 5] = [
    ("op", Align::Left),
    ("strategy", Align::Left),
    ("output layout", Align::Left),
    ("forward", Align::Left),
    ("backward", Align::Left),
];

/// Meaning of the marks and abbreviations in the tables.
fn legend(context: &Context) -> String {
    let axes = match (context.mesh.tensor > 1, context.mesh.context > 1) {
        (true, true) => "tensor and, around attention, the context axis",
        (false, true) => "context axis",
        _ => "tensor axis",
    };
    let shifts = if context.rotates_keys() { ", SH shifts around a ring" } else { "" };
    format!(
        "* stored for the backward pass, + recomputed in it. Collectives over the {axes}, per \
         microbatch: AR all-reduce, RS reduce-scatter, AG all-gather, A2A all-to-all{shifts}."
    )
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
    if context.has_activation_collectives() {
        page.paragraph(&legend(context));
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

/// A table where activations are split over devices; where they are not, what is stored and recomputed.
fn table(page: &mut Page, rows: &[OpRow], context: &Context, detail: Detail) {
    if !context.has_activation_collectives() {
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
