//! Parameters of an op: where they lie, and what happens to them once a step.
//!
//! Per step: partial gradients are all-reduced over the tensor axis, all gradients over the data
//! axis (ZeRO-1: reduce-scattered), their squares summed for clipping, AdamW applied, and with
//! ZeRO-1 the new weights all-gathered. All of it is priced once a step, per strategy.

use crate::graph::{Op, OpNode, SegmentKind};
use crate::kernel::CollectiveKind;
use crate::mesh::Axis;
use crate::model::WeightId;
use crate::program::{Action, CollectiveOp, Extent, FusedOp, Reduction};
use crate::strategy::{Context, Strategy, Zero};
use crate::{Bytes, DType, Layout, Precision};

use super::{InstrTemplate, OperandSlot, TemplateOperand};

/// How a weight matrix lies over the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightSplit {
    /// Every device holds all of it.
    Whole,
    /// Split on its rows (a linear's input features, the embedding's vocabulary).
    Rows,
    /// Split on its columns.
    Columns,
}

/// One parameter of a buffer, with its whole (unsharded) shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShardMember {
    /// The parameter within its segment.
    pub weight: WeightId,
    /// Rows of the whole parameter.
    pub rows: u64,
    /// Columns of the whole parameter.
    pub columns: u64,
}

impl ShardMember {
    /// A parameter of this shape.
    pub fn new(weight: WeightId, rows: u64, columns: u64) -> ShardMember {
        ShardMember { weight, rows, columns }
    }

    /// Elements of the whole parameter.
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }
}

/// What a parameter is, as far as its optimizer must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterRole {
    /// A matrix.
    Matrix,
    /// The scale of a norm, and the bias beside it.
    Scale,
}

/// The parameters of one op: one buffer, which holds the members of a group side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpParameters {
    /// Matrix or scale.
    pub role: ParameterRole,
    /// The parameters side by side in the buffer.
    pub members: Vec<ShardMember>,
    /// How each member is split over the tensor axis.
    pub split: WeightSplit,
    /// Whether each device only has its own tokens' summand of the gradient.
    pub gradient_partial: bool,
}

impl OpParameters {
    /// Elements one device of the tensor axis holds.
    pub fn elements(&self, context: &Context) -> u64 {
        let whole: u64 = self.members.iter().map(ShardMember::elements).sum();
        if self.split == WeightSplit::Whole { whole } else { whole / context.tensor_size() }
    }

    /// Elements one device updates: with ZeRO-1 its part along the data axis, rounded up.
    pub fn updated_elements(&self, context: &Context) -> u64 {
        let elements = self.elements(context);
        match context.zero {
            Zero::Off => elements,
            Zero::One => elements.div_ceil(context.mesh.data),
        }
    }

    /// Elements of the weight's and the gradient's buffer. With ZeRO-1 the buffer is padded to
    /// equal parts, because reduce-scatter and all-gather work in place on it.
    fn padded_elements(&self, context: &Context) -> u64 {
        match context.zero {
            Zero::Off => self.elements(context),
            Zero::One => self.updated_elements(context) * context.mesh.data,
        }
    }

    /// The buffer of the weight.
    fn weight(&self, context: &Context) -> TemplateOperand {
        let extent = Extent::flat(self.padded_elements(context), context.compute_dtype());
        TemplateOperand { slot: OperandSlot::Weight(0), extent }
    }

    /// The buffer of the fp32 gradient.
    pub fn gradient(&self, context: &Context) -> TemplateOperand {
        let extent = Extent::flat(self.padded_elements(context), DType::F32);
        TemplateOperand { slot: OperandSlot::WeightGradient(0), extent }
    }

    /// The fp32 buffers of the optimizer: both moments and, in mixed precision, the master copy.
    fn optimizer_states(&self, context: &Context) -> Vec<TemplateOperand> {
        let extent = Extent::flat(self.updated_elements(context), DType::F32);
        let mut slots = vec![OperandSlot::FirstMoment(0), OperandSlot::SecondMoment(0)];
        if context.precision == Precision::MixedBf16 {
            slots.push(OperandSlot::Master(0));
        }
        slots.into_iter().map(|slot| TemplateOperand { slot, extent }).collect()
    }

    /// All resident buffers: weight, gradient and optimizer states.
    pub(crate) fn buffers(&self, context: &Context) -> Vec<TemplateOperand> {
        let mut buffers = vec![self.weight(context), self.gradient(context)];
        buffers.extend(self.optimizer_states(context));
        buffers
    }

    /// Bytes that one device keeps for the parameter between steps: weight, fp32 gradient, fp32
    /// moments and, in mixed precision, the fp32 master copy.
    pub fn resident_bytes(&self, context: &Context) -> Bytes {
        self.buffers(context).iter().map(|operand| operand.extent.bytes()).sum()
    }
}

/// The parameters of an op under a strategy; `None` when it has none.
pub fn op_parameters(node: &OpNode, strategy: Strategy, context: &Context) -> Option<OpParameters> {
    let (role, members) = match &node.op {
        Op::Embedding { vocab, width } => {
            (ParameterRole::Matrix, vec![ShardMember::new(WeightId::Embedding, *vocab, *width)])
        }
        Op::Norm { width, scale } => {
            (ParameterRole::Scale, vec![ShardMember::new(*scale, 1, *width)])
        }
        Op::Linear(linear) => {
            let members = linear.members.iter();
            let members = members.map(|m| ShardMember::new(m.parameter, m.d_in, m.d_out)).collect();
            (ParameterRole::Matrix, members)
        }
        Op::LatentNorm { linear, width, .. } => {
            let weights = [WeightId::LatentNormScale(*linear), WeightId::LatentNormBias(*linear)];
            let members = weights.map(|weight| ShardMember::new(weight, 1, *width));
            (ParameterRole::Scale, members.into())
        }
        // Two square matrices of different sizes, each as one row.
        Op::TensorGate { linear, a, b } => {
            let u = ShardMember::new(WeightId::CrossingGateU(*linear), 1, a * a);
            let v = ShardMember::new(WeightId::CrossingGateV(*linear), 1, b * b);
            (ParameterRole::Matrix, vec![u, v])
        }
        _ => return None,
    };
    let split = match (&node.op, strategy) {
        (Op::Embedding { .. }, Strategy::Vocabulary) => WeightSplit::Rows,
        (_, Strategy::Column) => WeightSplit::Columns,
        (_, Strategy::Row | Strategy::OwedRow) => WeightSplit::Rows,
        (Op::Norm { .. }, Strategy::Sync | Strategy::Online) => WeightSplit::Columns,
        _ => WeightSplit::Whole,
    };
    let gradient_partial = strategy == Strategy::Token && context.tensor_size() > 1;
    Some(OpParameters { role, members, split, gradient_partial })
}

/// The reductions of a parameter's gradient, and its part of the global norm.
pub fn reduce_gradient(parameter: &OpParameters, context: &Context) -> Vec<InstrTemplate> {
    let gradient = parameter.gradient(context);
    let mut made = vec![];
    if parameter.gradient_partial {
        made.push(reduce(Axis::Tensor, CollectiveKind::AllReduce, gradient, context));
    }
    if context.mesh.data > 1 {
        let kind = match context.zero {
            Zero::Off => CollectiveKind::AllReduce,
            Zero::One => CollectiveKind::ReduceScatter,
        };
        made.push(reduce(Axis::Data, kind, gradient, context));
    }
    let mine = updated(gradient, parameter, context);
    let total = TemplateOperand {
        slot: OperandSlot::SquareSum,
        extent: Extent { rows: 1, columns: 1, dtype: DType::F32 },
    };
    made.push(InstrTemplate {
        action: Action::Fused(FusedOp::SquareSum),
        reads: vec![mine, total],
        writes: vec![total],
    });
    made
}

/// The reductions of a parameter that a segment of this kind owns. A tied weight on two stages is one
/// parameter: the head's stage counts its square, and the embedding's does not.
pub fn reduce_owned_gradient(
    kind: SegmentKind,
    parameter: &OpParameters,
    tied: bool,
    context: &Context,
) -> Vec<InstrTemplate> {
    let mut templates = reduce_gradient(parameter, context);
    if tied && kind == SegmentKind::Embedding {
        templates.retain(|template| template.action != Action::Fused(FusedOp::SquareSum));
    }
    templates
}

/// AdamW on a parameter, and with ZeRO-1 the gathering of the new weights.
pub fn update_parameter(parameter: &OpParameters, context: &Context) -> Vec<InstrTemplate> {
    let whole_gradient = parameter.gradient(context);
    let gradient = updated(whole_gradient, parameter, context);
    let weight = parameter.weight(context);
    let mine = updated(weight, parameter, context);
    let mut states = parameter.optimizer_states(context);
    let mut reads = vec![gradient];
    reads.extend(&states);
    if context.precision == Precision::Full32 {
        reads.push(mine);
    }
    // All of the gradient is zeroed: the parts of other replicas hold this one's summands.
    let mut writes = vec![mine, whole_gradient];
    writes.append(&mut states);
    let mut made = vec![InstrTemplate { action: Action::Fused(FusedOp::AdamW), reads, writes }];
    if context.zero == Zero::One && context.mesh.data > 1 {
        made.push(gather_weights(weight, context));
    }
    made
}

/// The part of a padded buffer that this device updates.
fn updated(whole: TemplateOperand, parameter: &OpParameters, context: &Context) -> TemplateOperand {
    let columns = parameter.updated_elements(context);
    TemplateOperand { extent: Extent { columns, ..whole.extent }, ..whole }
}

fn reduce(
    axis: Axis,
    kind: CollectiveKind,
    gradient: TemplateOperand,
    context: &Context,
) -> InstrTemplate {
    let to = match kind {
        CollectiveKind::ReduceScatter => Layout::Sharded(crate::Dim::Feature),
        _ => Layout::Replicated,
    };
    exchange(axis, kind, (Layout::Partial, to), gradient, context)
}

fn gather_weights(weight: TemplateOperand, context: &Context) -> InstrTemplate {
    let layouts = (Layout::Sharded(crate::Dim::Feature), Layout::Replicated);
    exchange(Axis::Data, CollectiveKind::AllGather, layouts, weight, context)
}

fn exchange(
    axis: Axis,
    kind: CollectiveKind,
    (from, to): (Layout, Layout),
    operand: TemplateOperand,
    context: &Context,
) -> InstrTemplate {
    let exchange = CollectiveOp {
        kind,
        axis,
        from,
        to,
        payload: operand.extent.bytes(),
        statistic: Bytes(0),
        reduction: Reduction::Sum,
        group: context.mesh.group(axis),
    };
    InstrTemplate {
        action: Action::Collective(exchange),
        reads: vec![operand],
        writes: vec![operand],
    }
}
