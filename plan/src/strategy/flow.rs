//! Flows of values from producers to consumers, and which copies are saved for the backward pass.
//!
//! The producer computes the value in one layout. For each further layout that consumers require, one
//! reshard computes a *copy*, which these consumers share. Each copy is kept, recomputed or dropped on
//! its own (DESIGN §3.5).
//!
//! In the backward pass, contributions of equal layout are summed where they are computed; then each sum
//! is resharded to the producer's layout and added. The last consumer contributes first and writes its
//! sum; the sum of a layout that the last consumer does not use starts from zeros.
//!
//! A value uses at most two distinct layouts at its consumers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::graph::{Op, OpId, Segment, SegmentKind, ValueId};
use crate::model::Activation;
use crate::{EdgeLayout, Layout};

use super::rules::Recompute;
use super::{BoundaryLayout, OpChoice, Strategy};

/// Save decision of one copy of a value for the backward pass.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Save {
    /// The copy is freed after the forward pass.
    Dropped,
    /// The copy of the forward pass is kept in memory.
    Kept,
    /// The copy is recomputed when first needed.
    #[serde(rename = "redone")]
    Recomputed,
}

/// The layouts of one value, and the save decisions of its copies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Layouts at the producer.
    pub producer: EdgeLayout,
    /// Layouts at the last consumer: the next segment, for outputs.
    pub primary: EdgeLayout,
    /// A second pair of layouts that other consumers use.
    pub second: Option<EdgeLayout>,
    /// Save decision of each copy, in the order of [`Flow::copies`].
    pub saves: Vec<Save>,
}

impl Flow {
    /// Distinct forward layouts, the producer's first.
    pub fn copies(&self) -> Vec<Layout> {
        let mut copies = Vec::with_capacity(3);
        copies.push(self.producer.forward);
        for edge in std::iter::once(&self.primary).chain(&self.second) {
            if !copies.contains(&edge.forward) {
                copies.push(edge.forward);
            }
        }
        copies
    }

    /// Distinct layouts of gradient contributions, the last consumer's first.
    pub fn gradients(&self) -> Vec<Layout> {
        let mut gradients = vec![self.primary.backward];
        gradients.extend(self.second.map(|edge| edge.backward).filter(|b| gradients[0] != *b));
        gradients
    }

    /// Index in [`Flow::copies`] of the copy in this layout.
    ///
    /// # Panics
    /// When no copy has this layout. A legal flow has copies in the layouts of all consumers.
    pub(crate) fn copy_in(&self, layout: Layout) -> usize {
        match self.copies().iter().position(|copy| *copy == layout) {
            Some(copy) => copy,
            None => unreachable!("the flow has no {layout} copy"),
        }
    }

    /// Index in [`Flow::gradients`] of the sum of contributions in this layout.
    ///
    /// # Panics
    /// When no consumer of the flow contributes in this layout.
    pub(crate) fn gradient_in(&self, layout: Layout) -> usize {
        match self.gradients().iter().position(|gradient| *gradient == layout) {
            Some(gradient) => gradient,
            None => unreachable!("the flow has no {layout} gradient contribution"),
        }
    }

    /// Whether an all-reduce turns the producer's copy into this one in place.
    pub(crate) fn in_place(&self, copy: usize) -> bool {
        copy > 0
            && self.producer.forward == Layout::Partial
            && self.copies()[copy] == Layout::Replicated
    }

    /// Whether the copy in this layout is kept or recomputed.
    pub fn is_saved(&self, layout: Layout) -> bool {
        let saved = |(copy, save): (Layout, &Save)| copy == layout && *save != Save::Dropped;
        self.copies().into_iter().zip(&self.saves).any(saved)
    }
}

/// Whether the backward pass of an op reads its inputs.
pub fn backward_reads_input(op: &Op) -> bool {
    match op {
        Op::Linear(_)
        | Op::Norm { .. }
        | Op::QkNorm(_)
        | Op::GatedProduct { .. }
        | Op::Attention(_) => true,
        Op::LatentNorm { .. } | Op::TensorGate { .. } => true,
        Op::Latent(latent) => latent.activation == Activation::Silu,
        Op::Embedding { .. }
        | Op::Bias(_)
        | Op::GateBias { .. }
        | Op::Add { .. }
        | Op::Cross { .. }
        | Op::Loss { .. } => false,
    }
}

/// Whether the backward pass of an op reads its outputs.
pub fn backward_reads_output(op: &Op, strategy: Strategy) -> bool {
    match op {
        Op::Attention(_) => true,
        Op::Latent(latent) => {
            latent.activation == Activation::Identity && strategy == Strategy::Recover
        }
        _ => false,
    }
}

/// Every legal flow of a value, given the choices of the ops around it.
///
/// `boundary` has the layouts of inputs and outputs. The next segment is the last consumer of an output,
/// so its gradient contribution comes first.
pub(crate) fn flows(
    segment: &Segment,
    id: ValueId,
    choices: &[Vec<OpChoice>],
    boundary: BoundaryLayout,
    recompute: Recompute,
) -> Vec<Flow> {
    let value = segment.value(id);
    let producers = match segment.output_port(id) {
        Some((op, port)) => distinct(&choices[op.0 as usize], |choice| choice.outputs[port]),
        None => vec![boundary.input_edge(segment, id)],
    };
    let edges = |consumers: &[(OpId, usize)]| -> Vec<EdgeLayout> {
        let mut edges: Vec<EdgeLayout> =
            consumers.iter().flat_map(|consumer| inputs(choices, *consumer)).collect();
        edges.sort();
        edges.dedup();
        edges
    };
    let (primaries, seconds) =
        match (boundary.output_edge(segment, id), value.consumers.split_last()) {
            (Some(output), _) => (vec![output], edges(&value.consumers)),
            (None, Some((last, others))) => (inputs(choices, *last), edges(others)),
            (None, None) => return vec![],
        };
    let save_options = SaveChoices::new(segment, id, recompute);
    let mut options = vec![];
    for &producer in &producers {
        let legal = |edge: &&EdgeLayout| flow_is_legal(producer, **edge, None);
        let seconds: Vec<EdgeLayout> = seconds.iter().filter(legal).copied().collect();
        for &primary in primaries.iter().filter(legal) {
            let others = seconds.iter().copied().filter(|second| *second != primary).map(Some);
            for second in std::iter::once(None).chain(others) {
                let flow = Flow { producer, primary, second, saves: vec![] };
                let saves = save_options.choices(&flow).into_iter();
                options.extend(saves.map(|saves| Flow { saves, ..flow }));
            }
        }
    }
    options
}

fn distinct(choices: &[OpChoice], edge: impl Fn(&OpChoice) -> EdgeLayout) -> Vec<EdgeLayout> {
    let mut edges: Vec<EdgeLayout> = choices.iter().map(edge).collect();
    edges.sort();
    edges.dedup();
    edges
}

fn inputs(choices: &[Vec<OpChoice>], (op, port): (OpId, usize)) -> Vec<EdgeLayout> {
    distinct(&choices[op.0 as usize], |choice| choice.inputs[port])
}

/// Whether reshards exist for both directions of a flow, and a pending division by a norm stays pending
/// at every consumer.
pub fn flow_is_legal(
    producer: EdgeLayout,
    primary: EdgeLayout,
    second: Option<EdgeLayout>,
) -> bool {
    std::iter::once(primary).chain(second).all(|edge| {
        // A pending division stays pending through an all-reduce, which reduces the statistic too.
        let norm_fits = edge.norm_pending == producer.norm_pending
            && (!producer.norm_pending
                || edge.forward == producer.forward
                || (producer.forward, edge.forward) == (Layout::Partial, Layout::Replicated));
        norm_fits
            && producer.forward.reshards_to(edge.forward)
            && edge.backward.reshards_to(producer.backward)
    })
}

/// Possible save decisions of the copies of a value, for all flows.
struct SaveChoices<'a> {
    segment: &'a Segment,
    id: ValueId,
    may_keep: bool,
    may_recompute: bool,
}

impl SaveChoices<'_> {
    fn new(segment: &Segment, id: ValueId, recompute: Recompute) -> SaveChoices<'_> {
        let shares_storage = segment.values.iter().any(|other| other.aliases == Some(id));
        let may_keep = !shares_storage && may_keep(segment, id, recompute);
        let may_recompute = segment.kind == SegmentKind::Block && recompute != Recompute::None;
        SaveChoices { segment, id, may_keep, may_recompute }
    }

    /// The combinations of saves for the copies of a flow.
    fn choices(&self, flow: &Flow) -> Vec<Vec<Save>> {
        let copies = flow.copies();
        let value = self.segment.value(self.id);
        if value.consumers.is_empty() {
            return vec![vec![Save::Dropped; copies.len()]];
        }
        let mut options = vec![];
        let mut saves = Vec::with_capacity(copies.len());
        self.extend(flow, &copies, &mut saves, &mut options);
        options
    }

    fn extend(
        &self,
        flow: &Flow,
        copies: &[Layout],
        saves: &mut Vec<Save>,
        options: &mut Vec<Vec<Save>>,
    ) {
        let copy = saves.len();
        if copy == copies.len() {
            options.extend(is_useful(self.segment, self.id, flow, saves).then(|| saves.clone()));
            return;
        }
        let recomputable = copy > 0 || self.segment.value(self.id).producer.is_some();
        let states = [
            (Save::Dropped, true),
            (Save::Kept, self.may_keep && copies[copy] != Layout::Partial),
            (Save::Recomputed, self.may_recompute && recomputable),
        ];
        for (state, _) in states.into_iter().filter(|(_, allowed)| *allowed) {
            saves.push(state);
            self.extend(flow, copies, saves, options);
            saves.pop();
        }
    }
}

fn may_keep(segment: &Segment, id: ValueId, recompute: Recompute) -> bool {
    let value = segment.value(id);
    match recompute {
        _ if segment.kind != SegmentKind::Block || value.producer.is_none() => true,
        Recompute::Auto | Recompute::None => true,
        Recompute::Latents => segment.is_factor_output(id) || value.aliases.is_some(),
        Recompute::Block => false,
    }
}

/// Whether no save is impossible or superfluous: a copy can be recomputed only from a saved copy of the
/// producer, and a producer's copy that no consumer reads is saved only as the source of such reshards.
fn is_useful(segment: &Segment, id: ValueId, flow: &Flow, saves: &[Save]) -> bool {
    let recomputes_copies = saves[1..].contains(&Save::Recomputed);
    if recomputes_copies && saves[0] == Save::Dropped {
        return false;
    }
    let layout = flow.producer.forward;
    let read_directly = flow.primary.forward == layout
        || flow.second.is_some_and(|edge| edge.forward == layout)
        || segment
            .value(id)
            .producer
            .is_some_and(|op| matches!(segment.op(op).op, Op::Attention(_) | Op::Latent(_)));
    read_directly || saves[0] == Save::Dropped || recomputes_copies
}
