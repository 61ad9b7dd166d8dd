//! The search space of a segment: every op's choices and every value's flows.

use std::sync::Arc;

use crate::context::{Context, ContextAttention};
use crate::graph::{OpId, Segment, SegmentKind, ValueId};
use crate::{Dim, Layout};

use super::rules::{NormRule, Recompute, Rules};
use super::{
    BoundaryLayout, Flow, OpChoice, OpParameters, Save, Strategy, flows, op_choices, op_parameters,
};

/// One alternative of an op: its choice, and whether the backward pass recomputes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpOption {
    /// Strategy and layouts.
    pub choice: OpChoice,
    /// Whether the backward pass runs the forward template again.
    pub recompute: bool,
}

/// Every alternative of every op and value of a segment, for one boundary layout. Clones share the alternatives.
#[derive(Clone, Debug)]
pub struct SegmentSpace {
    /// The op graph.
    pub segment: Arc<Segment>,
    /// Layouts of inputs and outputs.
    pub boundary: BoundaryLayout,
    /// Mesh, workload and number formats.
    pub context: Context,
    /// Whether embedding and head share one weight, so that the embedding owns none.
    pub tied: bool,
    /// Alternatives of each op.
    pub ops: Arc<[Vec<OpOption>]>,
    /// Alternatives of each value.
    pub flows: Arc<[Vec<Flow>]>,
}

/// Layout of a weight that embedding and head share: both must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TiedWeightLayout {
    /// Whole on every device, with a replicated (false) or partial (true) gradient.
    Whole(bool),
    /// Split on the vocabulary.
    Vocabulary,
    /// Split on the hidden features.
    Hidden,
}

impl TiedWeightLayout {
    /// All layouts.
    pub const ALL: [TiedWeightLayout; 4] = [
        TiedWeightLayout::Vocabulary,
        TiedWeightLayout::Hidden,
        TiedWeightLayout::Whole(false),
        TiedWeightLayout::Whole(true),
    ];

    /// The layout of the weight when the embedding or head runs under `strategy`.
    pub fn of(segment: SegmentKind, strategy: Strategy) -> TiedWeightLayout {
        match (segment, strategy) {
            (_, Strategy::Token) => TiedWeightLayout::Whole(true),
            (SegmentKind::Embedding, Strategy::Vocabulary)
            | (SegmentKind::Head, Strategy::Column) => TiedWeightLayout::Vocabulary,
            (SegmentKind::Embedding, Strategy::Column) | (SegmentKind::Head, Strategy::Row) => {
                TiedWeightLayout::Hidden
            }
            _ => TiedWeightLayout::Whole(false),
        }
    }
}

/// All of a context that the alternatives of a segment depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AlternativesContext {
    tensor: u64,
    token_dim: Option<Dim>,
    /// `None` without a context axis.
    context_attention: Option<ContextAttention>,
}

impl AlternativesContext {
    /// The properties of a context.
    pub fn of(context: &Context) -> AlternativesContext {
        AlternativesContext {
            tensor: context.tensor_size(),
            token_dim: context.token_dim(),
            context_attention: (context.mesh.context > 1).then_some(context.context_attention),
        }
    }
}

impl SegmentSpace {
    /// Enumerates the space of a segment under `rules`. `tied_weight` fixes the layout of the weight of
    /// embedding or head.
    pub fn new(
        segment: Arc<Segment>,
        boundary: BoundaryLayout,
        context: Context,
        rules: &Rules,
        tied: bool,
        tied_weight: Option<TiedWeightLayout>,
    ) -> SegmentSpace {
        let choices: Vec<Vec<OpChoice>> = segment
            .op_ids()
            .map(|id| restricted_choices(&segment, id, &context, rules, tied_weight))
            .collect();
        let flows = segment
            .value_ids()
            .map(|id| flows(&segment, id, &choices, boundary, rules.recompute))
            .collect();
        let may_recompute =
            segment.kind == SegmentKind::Block && rules.recompute != Recompute::None;
        let ops = choices
            .into_iter()
            .map(|list| {
                let recompute = if may_recompute { &[false, true][..] } else { &[false][..] };
                list.into_iter()
                    .flat_map(|choice| {
                        recompute
                            .iter()
                            .map(move |&recompute| OpOption { choice: choice.clone(), recompute })
                    })
                    .collect()
            })
            .collect();
        SegmentSpace { segment, boundary, context, tied, ops, flows }
    }

    /// The same alternatives in another context with the same [`AlternativesContext`].
    pub fn in_context(&self, context: Context) -> SegmentSpace {
        debug_assert_eq!(AlternativesContext::of(&context), AlternativesContext::of(&self.context));
        SegmentSpace { context, ..self.clone() }
    }

    /// The parameters that an op owns under a strategy, in a context with the same tensor axis as that of
    /// the space; `None` for a tied embedding on the head's stage.
    pub fn parameters(
        &self,
        op: OpId,
        strategy: Strategy,
        context: &Context,
    ) -> Option<OpParameters> {
        owned_parameters(&self.segment, op, strategy, self.tied, context)
    }
}

/// The parameters that an op owns under a strategy. A tied embedding on the head's stage owns none and
/// uses the head's.
pub(crate) fn owned_parameters(
    segment: &Segment,
    op: OpId,
    strategy: Strategy,
    tied: bool,
    context: &Context,
) -> Option<OpParameters> {
    let uses_head = tied && segment.kind == SegmentKind::Embedding && context.mesh.pipeline == 1;
    if uses_head { None } else { op_parameters(segment.op(op), strategy, context) }
}

fn restricted_choices(
    segment: &Segment,
    id: OpId,
    context: &Context,
    rules: &Rules,
    tied_weight: Option<TiedWeightLayout>,
) -> Vec<OpChoice> {
    let node = segment.op(id);
    let mut choices = op_choices(segment, node, context, rules.weights);
    if context.tensor_size() > 1 {
        choices.retain(|choice| match (rules.norm, choice.strategy) {
            (NormRule::Sync, Strategy::Online) | (NormRule::Online, Strategy::Sync) => {
                // The head has no latents whose all-reduce could include the statistic.
                segment.kind != SegmentKind::Block
            }
            _ => true,
        });
        if segment.kind == SegmentKind::Block {
            let devices = context.tensor_size();
            choices.retain(|choice| rules.baseline.allows(node, choice.strategy, devices));
        }
    }
    if let Some(layout) = tied_weight
        && segment.vocabulary_op() == Some(id)
    {
        choices.retain(|choice| TiedWeightLayout::of(segment.kind, choice.strategy) == layout);
    }
    choices
}

/// The decisions for one segment: a choice for each op, a flow for each value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentChoice {
    /// Choice of each op, by op id.
    pub ops: Vec<OpOption>,
    /// Flow of each value, by value id.
    pub flows: Vec<Flow>,
}

impl SegmentChoice {
    /// The layout of the copy of an input that an op reads.
    pub(crate) fn input_layout(&self, op: OpId, port: usize) -> Layout {
        self.ops[op.0 as usize].choice.inputs[port].forward
    }

    /// Whether consumers use all second layouts of flows: a plan has no others.
    pub fn uses_all_layouts(&self, segment: &Segment) -> bool {
        segment.value_ids().all(|id| {
            let second = self.flows[id.0 as usize].second;
            let mut consumers = segment.value(id).consumers.iter();
            second.is_none_or(|second| {
                consumers.any(|(op, port)| self.ops[op.0 as usize].choice.inputs[*port] == second)
            })
        })
    }

    /// Drops every saved copy that the backward pass does not read, so that plans of equal function are
    /// written equally, whichever solver found them.
    pub fn drop_unread_saves(&mut self, segment: &Segment) {
        // A recomputed op reads its inputs, so its outputs are visited first.
        for id in segment.value_ids().rev() {
            self.drop_unread_saves_of(segment, id);
            if let Some((op, _)) = segment.output_port(id) {
                let recomputed = segment
                    .op(op)
                    .outputs
                    .iter()
                    .any(|output| self.flows[output.0 as usize].saves[0] == Save::Recomputed);
                self.ops[op.0 as usize].recompute = recomputed;
            }
        }
    }

    fn drop_unread_saves_of(&mut self, segment: &Segment, id: ValueId) {
        let flow = &self.flows[id.0 as usize];
        let copies = flow.copies();
        let mut needed = vec![false; copies.len()];
        for &(op, port) in &segment.value(id).consumers {
            let option = &self.ops[op.0 as usize];
            if option.recompute || super::backward_reads_input(&segment.op(op).op) {
                let layout = option.choice.inputs[port].forward;
                needed[flow.copy_in(layout)] = true;
            }
        }
        if let Some(op) = segment.value(id).producer {
            let strategy = self.ops[op.0 as usize].choice.strategy;
            needed[0] |= super::backward_reads_output(&segment.op(op).op, strategy);
        }
        let mut saves = flow.saves.clone();
        for copy in (0..copies.len()).rev() {
            let feeds = copy == 0 && saves[1..].contains(&Save::Recomputed);
            if !needed[copy] && !feeds {
                saves[copy] = Save::Dropped;
            }
        }
        self.flows[id.0 as usize].saves = saves;
    }
}
