//! Templates of instructions, whose operands are slots that lowering binds to buffers.

use crate::Precision;
use crate::kernel::Kernel;
use crate::program::{Action, Extent};

/// Operand of a template, which lowering binds to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OperandSlot {
    /// Input port of the op, in the layout of its strategy.
    Input(u8),
    /// Output port.
    Output(u8),
    /// Gradient of an output port.
    OutputGradient(u8),
    /// Gradient of an input port.
    InputGradient(u8),
    /// The other summand of the residual addition that the GEMM of a linear computes.
    Residual,
    /// The n-th weight of the op.
    Weight(u8),
    /// The gradient of the n-th weight, fp32, accumulated over microbatches.
    WeightGradient(u8),
    /// The gradient of the n-th weight for one microbatch, of which replicas accumulate their parts.
    MicrobatchGradient(u8),
    /// The bf16 copy of one of these gradients, for its reduction over the replicas.
    RoundedGradient(u8),
    /// AdamW's first moment, fp32.
    FirstMoment(u8),
    /// AdamW's second moment, fp32.
    SecondMoment(u8),
    /// The fp32 master copy, in mixed precision.
    Master(u8),
    /// The sum of squared gradients of the stage, a scalar.
    SquareSum,
    /// The statistic that the op saves for its backward pass (norm, attention).
    Statistic,
    /// The statistic of the norm that a latent divides by.
    NormStatistic,
    /// The gradient of the statistic of an online norm, summed over the latents of the norm.
    NormStatisticGradient,
    /// A temporary buffer of this template.
    Temporary(u8),
    /// The token ids of the microbatch.
    Tokens,
    /// The token ids to predict.
    Targets,
    /// The loss of the microbatch, a scalar.
    Loss,
    /// A tensor sent to or received from another stage; 0 is the hidden state.
    BoundaryTensor(u8),
    /// The tensor before a reshard.
    Before,
    /// The tensor after a reshard.
    After,
}

impl OperandSlot {
    /// The optimizer states of a parameter.
    pub(crate) fn optimizer_states(precision: Precision) -> &'static [OperandSlot] {
        use OperandSlot::{FirstMoment, Master, SecondMoment};
        match precision {
            Precision::Fp32 => &[FirstMoment(0), SecondMoment(0)],
            Precision::MixedBf16 => &[FirstMoment(0), SecondMoment(0), Master(0)],
        }
    }
}

/// A slot with its extent on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TemplateOperand {
    /// The operand.
    pub slot: OperandSlot,
    /// Rows, columns and number format on one device.
    pub extent: Extent,
}

/// An instruction whose operands are slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstrTemplate {
    /// The operation.
    pub action: Action,
    /// Operands read. Operands updated in place are on both sides.
    pub reads: Vec<TemplateOperand>,
    /// Operands written.
    pub writes: Vec<TemplateOperand>,
}

impl InstrTemplate {
    /// The kernel of this instruction.
    pub fn kernel(&self) -> Kernel {
        let extents = |operands: &[TemplateOperand]| -> Vec<Extent> {
            operands.iter().map(|operand| operand.extent).collect()
        };
        self.action.kernel(&extents(&self.reads), &extents(&self.writes))
    }
}
