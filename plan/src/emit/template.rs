//! A template instruction: an action on slots that lowering binds to buffers.

use crate::kernel::Kernel;
use crate::program::{Action, Extent};

/// What an operand of a template stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OperandSlot {
    /// Input port of the op, in the layout its strategy asks for.
    Input(u8),
    /// Output port.
    Output(u8),
    /// Gradient of an output port.
    OutputGradient(u8),
    /// Gradient of an input port.
    InputGradient(u8),
    /// Weight number n of the op.
    Weight(u8),
    /// Its gradient, fp32, accumulated over microbatches.
    WeightGradient(u8),
    /// AdamW's first moment, fp32.
    FirstMoment(u8),
    /// AdamW's second moment, fp32.
    SecondMoment(u8),
    /// The fp32 master copy, in mixed precision.
    Master(u8),
    /// The sum of squared gradients of the stage, one number.
    SquareSum,
    /// The statistic the op saves for its backward pass (norm, attention).
    Statistic,
    /// The statistic of the norm that a latent divides by.
    NormStatistic,
    /// The gradient of an online norm's statistic, summed over the latents that read it.
    NormStatisticGradient,
    /// A short-lived buffer of this template.
    Temporary(u8),
    /// The token ids of the microbatch.
    Tokens,
    /// The token ids to predict.
    Targets,
    /// The loss of the microbatch, one number.
    Loss,
    /// A tensor that crosses to or from another stage: 0 is the hidden state.
    BoundaryTensor(u8),
    /// The tensor before a reshard.
    Before,
    /// The tensor after a reshard.
    After,
}

/// A slot with the extent one device holds of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TemplateOperand {
    /// What it stands for.
    pub slot: OperandSlot,
    /// How large it is.
    pub extent: Extent,
}

/// An instruction whose operands are slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstrTemplate {
    /// What is done.
    pub action: Action,
    /// What is read. Operands updated in place are on both sides.
    pub reads: Vec<TemplateOperand>,
    /// What is written.
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
