//! The op graph of one *segment* of the model: the embedding, one block, or the head.
//!
//! A segment is a bipartite graph of ops and values. A value with several consumers is the explicit
//! fan-out of DESIGN §3.2: the consumers share its reshards, and their gradient contributions are summed
//! before they are reduced. Blocks of equal shape share one segment, and so one solve.

mod build;
mod op;
mod shape;

use crate::model::WeightId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use build::{block_segment, effective_grouping, embedding_segment, head_segment};
pub use op::{AttentionOp, LatentOp, LinearForm, LinearMember, LinearOp, Op, QkvHeads};
pub use shape::{BlockShape, BoundaryTensor, BoundaryTensorId};

/// Index of an op within its segment, in topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u32);

/// Index of a value within its segment, in order of production.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// Factors with a common input that run as one GEMM (DESIGN §3.4).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct Grouping {
    /// q, k and v together.
    pub qkv: bool,
    /// Gate and up together.
    pub gate_up: bool,
}

impl Grouping {
    /// All four combinations, everything grouped first.
    pub const ALL: [Grouping; 4] = [
        Grouping { qkv: true, gate_up: true },
        Grouping { qkv: true, gate_up: false },
        Grouping { qkv: false, gate_up: true },
        Grouping { qkv: false, gate_up: false },
    ];
}

/// A tensor that flows between ops: `[tokens, Σ sections]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Unique within the segment; the name in plans.
    pub name: String,
    /// Feature widths of the tensors side by side: one, or one per member of a group.
    pub sections: Vec<u64>,
    /// The op that computes it; `None` for inputs of the segment.
    pub producer: Option<OpId>,
    /// The ops that read it, in topological order, with the input port of each.
    pub consumers: Vec<(OpId, usize)>,
    /// For the first latent of an online norm: the norm whose statistic is reduced in the same launch.
    pub carries_statistic_of: Option<OpId>,
    /// When the producer works in place (a latent without φ): the value in the same buffer.
    pub aliases: Option<ValueId>,
}

impl Value {
    /// Features of one token.
    pub fn width(&self) -> u64 {
        self.sections.iter().sum()
    }
}

/// An op with its place in the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct OpNode {
    /// Unique within the segment; the name in plans.
    pub name: String,
    /// The function.
    pub op: Op,
    /// Values read, by port.
    pub inputs: Vec<ValueId>,
    /// Values computed, by port.
    pub outputs: Vec<ValueId>,
}

/// The part of the model that a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SegmentKind {
    /// Token embedding.
    Embedding,
    /// One block.
    Block,
    /// Final norm, head and loss.
    Head,
}

/// The op graph of one segment.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Part of the model.
    pub kind: SegmentKind,
    /// Ops in topological order.
    pub ops: Vec<OpNode>,
    /// Values in order of production.
    pub values: Vec<Value>,
    /// Values from the previous segment: the hidden state, then the crossing latents in the order of the
    /// linears. Empty for the embedding.
    pub inputs: Vec<ValueId>,
    /// Values passed to the next segment, in the order of its inputs. Empty for the head.
    pub outputs: Vec<ValueId>,
}

impl Segment {
    /// The op with this id.
    pub fn op(&self, id: OpId) -> &OpNode {
        &self.ops[id.0 as usize]
    }

    /// The value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// All op ids in topological order.
    pub fn op_ids(&self) -> impl DoubleEndedIterator<Item = OpId> + use<> {
        (0..self.ops.len() as u32).map(OpId)
    }

    /// All value ids in order of production.
    pub fn value_ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// Whether a value is passed to the next segment, which is then its last consumer.
    pub fn is_output(&self, value: ValueId) -> bool {
        self.outputs.contains(&value)
    }

    /// Whether the gradient that an op contributes to its input is accumulated onto the contributions of
    /// other consumers. The last consumer is the first of the backward pass, and does not accumulate.
    pub fn accumulates(&self, op: OpId, port: usize) -> bool {
        let input = self.op(op).inputs[port];
        self.is_output(input) || self.value(input).consumers.last() != Some(&(op, port))
    }

    /// Whether a value is the latent that a first factor computes, before any crossing and φ.
    pub fn is_factor_output(&self, value: ValueId) -> bool {
        let producer = self.value(value).producer.map(|op| &self.op(op).op);
        matches!(producer, Some(Op::Linear(linear)) if linear.is_first_factor())
    }

    /// The op of the embedding or head segment whose weight is the other's transpose in a tied model;
    /// `None` in a block.
    pub fn vocabulary_op(&self) -> Option<OpId> {
        self.op_ids().find(|id| match &self.op(*id).op {
            Op::Embedding { .. } => true,
            Op::Linear(linear) => linear.members[0].parameter == WeightId::Head,
            _ => false,
        })
    }

    /// Index of an input among the boundary tensors: 0 for the hidden state.
    pub fn input_index(&self, value: ValueId) -> Option<usize> {
        self.inputs.iter().position(|input| *input == value)
    }

    /// Index of an output among the boundary tensors: 0 for the hidden state.
    pub fn output_index(&self, value: ValueId) -> Option<usize> {
        self.outputs.iter().position(|output| *output == value)
    }

    /// Index of an input or output among the boundary tensors: 0 for the hidden state.
    pub fn boundary_index(&self, value: ValueId) -> Option<usize> {
        self.input_index(value).or_else(|| self.output_index(value))
    }

    /// The op and output port that compute `value`.
    pub fn output_port(&self, value: ValueId) -> Option<(OpId, usize)> {
        let producer = self.value(value).producer?;
        let port = self.op(producer).outputs.iter().position(|v| *v == value)?;
        Some((producer, port))
    }
}
