//! The decisions for every op of a segment: its strategy, its layouts, its collectives, and what is stored for the backward
//! pass.

use std::collections::BTreeMap;
use std::fmt;

use narrows_plan::emit::{InstrTemplate, copy_forward, flow_backward, op_backward, op_forward};
use narrows_plan::graph::{OpId, SegmentKind, ValueId};
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::strategy::{Save, op_parameters};
use narrows_plan::{Bytes, Context, SegmentPlan, WeightSplit};
use schemars::JsonSchema;
use serde::Serialize;

use crate::collectives::activation_collectives;

/// One op, or an input of a block, with its decisions in words.
pub struct OpRow {
    /// Name of the op; of an input, in parentheses.
    pub name: String,
    /// Name of the strategy; empty for inputs.
    pub strategy: &'static str,
    /// Split of the weight over the tensor axis; `None` for ops without one.
    pub weight: Option<WeightSplit>,
    /// Layouts of the outputs, with symbols for copies that are stored or recomputed.
    pub layouts: String,
    /// Collectives of the forward pass.
    pub forward: String,
    /// Collectives of the backward pass.
    pub backward: String,
    /// Whether any output is stored for the backward pass.
    pub stored: bool,
    /// Whether any output is recomputed in the backward pass.
    pub recomputed: bool,
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

/// The rows of a segment: of a block its inputs first, then the ops.
pub fn op_rows(plan: &SegmentPlan, context: &Context) -> Vec<OpRow> {
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
    let kinds = activation_collectives(templates).into_iter();
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
        CollectiveKind::Shift => "SH",
    }
}
