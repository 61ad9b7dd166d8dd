//! Enumerates the legal strategies of an op.

use crate::context::{Context, ContextAttention};
use crate::graph::{AttentionOp, LatentOp, LinearForm, LinearOp, Op, OpNode, Segment};
use crate::{Dim, EdgeLayout};

use super::rules::WeightRule;
use super::{OpChoice, Strategy};

const WHOLE: EdgeLayout = EdgeLayout::REPLICATED;
const FEATURES: EdgeLayout = EdgeLayout::sharded(Dim::Feature);

/// Every legal strategy of an op. Never empty under [`WeightRule::Any`].
pub(crate) fn op_choices(
    segment: &Segment,
    node: &OpNode,
    context: &Context,
    weights: WeightRule,
) -> Vec<OpChoice> {
    let devices = context.tensor_size();
    let ports = (node.inputs.len(), node.outputs.len());
    let mut choices = ChoiceList { ports, list: vec![] };
    if context.mesh.context > 1 && matches!(node.op, Op::Attention(_)) {
        context_attention_choice(segment, node, context, &mut choices);
        return choices.list;
    }
    let replicable = weights == WeightRule::Any || devices == 1 || !holds_matrix(&node.op);
    if replicable {
        choices.uniform(Strategy::Replicate, WHOLE);
    }
    if devices == 1 {
        return choices.list;
    }
    if replicable
        && let Some(dim) = context.token_dim()
        && !(matches!(node.op, Op::Attention(_)) && dim == Dim::Position)
    {
        choices.uniform(Strategy::Token, EdgeLayout::sharded(dim));
    }
    match &node.op {
        Op::Embedding { vocab, width } => {
            choices.add_if(width % devices == 0, Strategy::Column, vec![], vec![FEATURES]);
            let partial = vec![EdgeLayout::PARTIAL];
            choices.add_if(vocab % devices == 0, Strategy::Vocabulary, vec![], partial);
        }
        Op::Norm { width, .. } if width % devices == 0 => {
            choices.uniform(Strategy::Sync, FEATURES);
            choices.add(Strategy::Online, vec![FEATURES], vec![FEATURES.with_norm_pending()]);
        }
        Op::Linear(linear) => linear_choices(linear, devices, &mut choices),
        Op::Bias(heads) | Op::QkNorm(heads) if heads.divide_among(devices) => {
            choices.uniform(Strategy::Feature, FEATURES);
        }
        Op::Latent(latent) => latent_choices(latent, devices, &mut choices),
        Op::Attention(attention) => {
            attention_choices(attention, segment, node, devices, &mut choices)
        }
        Op::GatedProduct { width, .. }
        | Op::Add { width }
        | Op::Cross { width }
        | Op::GateBias { width, .. }
            if width % devices == 0 =>
        {
            choices.uniform(Strategy::Feature, FEATURES);
        }
        Op::Loss { vocab } if vocab % devices == 0 => {
            choices.uniform(Strategy::Vocabulary, FEATURES);
        }
        Op::Norm { .. }
        | Op::Bias(_)
        | Op::QkNorm(_)
        | Op::GatedProduct { .. }
        | Op::Add { .. }
        | Op::Cross { .. }
        | Op::GateBias { .. } => {}
        // Every feature of the result depends on all features of the latent.
        Op::LatentNorm { .. } | Op::TensorGate { .. } => {}
        Op::Loss { .. } => {}
    }
    choices.list
}

fn holds_matrix(op: &Op) -> bool {
    matches!(op, Op::Embedding { .. } | Op::Linear(_))
}

fn linear_choices(linear: &LinearOp, devices: u64, choices: &mut ChoiceList) {
    let whole_heads = linear.head_dim.unwrap_or(1);
    let columns = linear.members.iter().all(|m| (m.d_out / whole_heads).is_multiple_of(devices));
    choices.add_if(columns, Strategy::Column, vec![EdgeLayout::GRADIENT_PARTIAL], vec![FEATURES]);
    let rows = linear.members.iter().all(|m| m.d_in.is_multiple_of(devices));
    choices.add_if(rows, Strategy::Row, vec![FEATURES], vec![EdgeLayout::PARTIAL]);
    let norm_may_be_pending =
        rows && linear.norm.is_some() && linear.form == LinearForm::Concatenated;
    let outputs = vec![EdgeLayout::PARTIAL.with_norm_pending()];
    let inputs = vec![FEATURES.with_norm_pending()];
    choices.add_if(norm_may_be_pending, Strategy::PendingNormRow, inputs, outputs);
}

fn latent_choices(latent: &LatentOp, devices: u64, choices: &mut ChoiceList) {
    if latent.sections.iter().all(|width| width.is_multiple_of(devices)) {
        choices.uniform(Strategy::Feature, FEATURES);
    }
    if latent.norm.is_some() {
        let outputs = vec![WHOLE; choices.ports.1];
        choices.add(Strategy::Recover, vec![WHOLE.with_norm_pending()], outputs);
    }
}

/// The strategy of attention on a context axis. Every position attends to all before it, so that the devices of the
/// axis exchange positions for heads, gather keys and values, or pass them around within attention. Where they are
/// gathered, queries that are a part of the same tensor cannot stay.
fn context_attention_choice(
    segment: &Segment,
    node: &OpNode,
    context: &Context,
    choices: &mut ChoiceList,
) {
    let by_position = context.heads_by_position();
    let queries = EdgeLayout::new(by_position, by_position);
    match context.context_attention {
        ContextAttention::Exchange => choices.uniform(Strategy::Heads, EdgeLayout::HEADS),
        ContextAttention::Ring => choices.uniform(Strategy::Heads, queries),
        ContextAttention::Gather if has_separate_query(segment, node) => {
            let mut inputs = vec![EdgeLayout::GATHERED; node.inputs.len()];
            inputs[0] = queries;
            choices.add(Strategy::Heads, inputs, vec![queries]);
        }
        ContextAttention::Gather => {}
    }
}

/// Whether the queries of attention are a tensor without keys and values, which gathered keys need.
pub fn has_separate_queries(segment: &Segment) -> bool {
    let mut attentions = segment.ops.iter().filter(|node| matches!(node.op, Op::Attention(_)));
    attentions.all(|node| has_separate_query(segment, node))
}

fn has_separate_query(segment: &Segment, node: &OpNode) -> bool {
    segment.value(node.inputs[0]).sections.len() == 1 && node.inputs.len() > 1
}

fn attention_choices(
    attention: &AttentionOp,
    segment: &Segment,
    node: &OpNode,
    devices: u64,
    choices: &mut ChoiceList,
) {
    if !attention.heads.is_multiple_of(devices) {
        return;
    }
    if attention.kv_heads.is_multiple_of(devices) {
        choices.uniform(Strategy::Heads, FEATURES);
        return;
    }
    // Fewer KV heads than devices: each device attends with its own query heads to all keys and values,
    // whose gradients are therefore partial.
    if has_separate_query(segment, node) && devices.is_multiple_of(attention.kv_heads) {
        let mut inputs = vec![EdgeLayout::GRADIENT_PARTIAL; node.inputs.len()];
        inputs[0] = FEATURES;
        choices.add(Strategy::SharedKv, inputs, vec![FEATURES]);
    }
}

struct ChoiceList {
    ports: (usize, usize),
    list: Vec<OpChoice>,
}

impl ChoiceList {
    fn add(&mut self, strategy: Strategy, inputs: Vec<EdgeLayout>, outputs: Vec<EdgeLayout>) {
        debug_assert_eq!((inputs.len(), outputs.len()), self.ports);
        self.list.push(OpChoice { strategy, inputs, outputs });
    }

    fn add_if(
        &mut self,
        legal: bool,
        strategy: Strategy,
        inputs: Vec<EdgeLayout>,
        outputs: Vec<EdgeLayout>,
    ) {
        if legal {
            self.add(strategy, inputs, outputs);
        }
    }

    /// Adds a strategy with the same layout at every port.
    fn uniform(&mut self, strategy: Strategy, edge: EdgeLayout) {
        self.add(strategy, vec![edge; self.ports.0], vec![edge; self.ports.1]);
    }
}
