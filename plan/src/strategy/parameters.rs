//! The parameters of an op: shapes, sharding over the tensor axis, and resident bytes.

use crate::context::Context;
use crate::emit::OperandSlot;
use crate::extent::Extent;
use crate::graph::{Op, OpNode};
use crate::layout::WeightSplit;
use crate::model::{WeightId, WeightShape};
use crate::{Bytes, DType};

use super::Strategy;

/// The parameters of one op, in one buffer: the members of a group side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpParameters {
    /// The parameters side by side in the buffer.
    pub members: Vec<WeightShape>,
    /// Sharding of each member over the tensor axis.
    pub split: WeightSplit,
    /// Whether the gradient is partial over the tensor axis, because each device has only its own
    /// tokens, or heads that share the parameter.
    pub gradient_partial: bool,
}

impl OpParameters {
    /// Elements on one device of the tensor axis.
    pub(crate) fn elements(&self, context: &Context) -> u64 {
        let whole: u64 = self.members.iter().map(WeightShape::elements).sum();
        if self.split == WeightSplit::Whole { whole } else { whole / context.tensor_size() }
    }

    /// Elements that one device updates: with ZeRO its part of a shard group's copy, rounded up.
    pub(crate) fn updated_elements(&self, context: &Context) -> u64 {
        self.elements(context).div_ceil(context.shard_size)
    }

    /// Elements of all parts together: with ZeRO, padded to equal parts.
    fn padded_elements(&self, context: &Context) -> u64 {
        self.updated_elements(context) * context.shard_size
    }

    /// Whether the parameters belong to a block. ZeRO-2 and ZeRO-3 treat parameters of embedding and head like ZeRO-1.
    fn belongs_to_block(&self) -> bool {
        use WeightId::{Embedding, FinalNorm, Head};
        !self.members.iter().any(|member| matches!(member.weight, Embedding | FinalNorm | Head))
    }

    /// Whether each replica accumulates only its part of the gradient.
    pub fn has_sharded_gradient(&self, context: &Context) -> bool {
        context.shards_gradients() && self.belongs_to_block()
    }

    /// Whether each replica stores only its part of the weight.
    pub fn has_sharded_weight(&self, context: &Context) -> bool {
        context.shards_weights() && self.belongs_to_block()
    }

    /// Extent of the stored weight, in the compute format.
    pub(crate) fn weight_extent(&self, context: &Context) -> Extent {
        match self.has_sharded_weight(context) {
            true => Extent { dtype: context.compute_dtype(), ..self.state_extent(context) },
            false => self.whole_weight_extent(context),
        }
    }

    /// Extent of the accumulated fp32 gradient.
    pub fn gradient_extent(&self, context: &Context) -> Extent {
        match self.has_sharded_gradient(context) {
            true => self.state_extent(context),
            false => self.whole_gradient_extent(context),
        }
    }

    /// Extent of the weight as the passes read it.
    pub fn whole_weight_extent(&self, context: &Context) -> Extent {
        Extent::flat(self.padded_elements(context), context.compute_dtype())
    }

    /// Extent of the whole fp32 gradient.
    pub fn whole_gradient_extent(&self, context: &Context) -> Extent {
        Extent::flat(self.padded_elements(context), DType::F32)
    }

    /// Extent of each fp32 optimizer state: both moments and, in mixed precision, the master copy.
    pub(crate) fn state_extent(&self, context: &Context) -> Extent {
        Extent::flat(self.updated_elements(context), DType::F32)
    }

    /// Resident bytes of the parameters on one device: weight, fp32 gradient and optimizer states.
    pub fn resident_bytes(&self, context: &Context) -> Bytes {
        let states = OperandSlot::optimizer_states(context.precision).len() as u64;
        let weight_and_gradient =
            self.weight_extent(context).bytes() + self.gradient_extent(context).bytes();
        weight_and_gradient + self.state_extent(context).bytes() * states
    }
}

/// The parameters of an op under a strategy; `None` for ops without parameters.
pub fn op_parameters(node: &OpNode, strategy: Strategy, context: &Context) -> Option<OpParameters> {
    let members: Vec<WeightShape> = match &node.op {
        Op::Embedding { vocab, width } => {
            vec![WeightShape::new(WeightId::Embedding, *vocab, *width)]
        }
        Op::Norm { width, scale } => {
            vec![WeightShape::new(*scale, 1, *width)]
        }
        Op::Linear(linear) => {
            let members = linear.members.iter();
            members.map(|m| WeightShape::new(m.parameter, m.d_in, m.d_out)).collect()
        }
        Op::Bias(bias) => {
            let members = bias.members.iter();
            members
                .map(|(kind, width)| WeightShape::new(WeightId::Bias(*kind), 1, *width))
                .collect()
        }
        Op::GateBias { linear, width } => {
            vec![WeightShape::new(WeightId::CrossingGateBias(*linear), 1, *width)]
        }
        Op::QkNorm(norm) => {
            let scale = |linear| WeightShape::new(WeightId::QkNorm(linear), 1, norm.head_dim);
            norm.normed().map(scale).collect()
        }
        Op::LatentNorm { linear, width, .. } => {
            let weights = [WeightId::LatentNormScale(*linear), WeightId::LatentNormBias(*linear)];
            weights.map(|weight| WeightShape::new(weight, 1, *width)).into()
        }
        // Two square matrices of different sizes, each as one row.
        Op::TensorGate { linear, a, b } => {
            let u = WeightShape::new(WeightId::CrossingGateU(*linear), 1, a * a);
            let v = WeightShape::new(WeightId::CrossingGateV(*linear), 1, b * b);
            vec![u, v]
        }
        Op::Latent(_)
        | Op::Attention(_)
        | Op::GatedProduct { .. }
        | Op::Add { .. }
        | Op::Cross { .. }
        | Op::Loss { .. } => return None,
    };
    let split = match (&node.op, strategy) {
        (Op::Embedding { .. }, Strategy::Vocabulary) => WeightSplit::Rows,
        (_, Strategy::Column) => WeightSplit::Columns,
        (_, Strategy::Row | Strategy::PendingNormRow) => WeightSplit::Rows,
        (Op::Norm { .. }, Strategy::Sync | Strategy::Online) => WeightSplit::Columns,
        (Op::Bias(_) | Op::GateBias { .. }, Strategy::Feature) => WeightSplit::Columns,
        _ => WeightSplit::Whole,
    };
    let has_part = match &node.op {
        Op::QkNorm(_) => matches!(strategy, Strategy::Token | Strategy::Feature),
        _ => strategy == Strategy::Token,
    };
    let gradient_partial = has_part && context.tensor_size() > 1;
    Some(OpParameters { members, split, gradient_partial })
}
