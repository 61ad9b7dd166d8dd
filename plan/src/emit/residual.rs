//! Residual additions in the GEMMs of linears.
//!
//! Where a residual addition reads the product of a linear in the layout in which the linear computes it, the GEMM of
//! the linear adds its product to the residual: D = C + A·B. Nothing stores the product, and no kernel reads it. The
//! template takes the place of the templates of both ops, so that the price of such a flow is the difference.

use crate::Layout;
use crate::context::Context;
use crate::graph::{Op, OpId, Segment, ValueId};
use crate::program::Action;
use crate::strategy::{Flow, OpChoice, Save};

use super::{InstrTemplate, OperandSlot, TemplateOperand, op_forward};

/// A residual addition in the GEMM of a linear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidualSum {
    /// The linear.
    pub linear: OpId,
    /// The addition.
    pub add: OpId,
    /// The port of the residual at the addition.
    pub residual_port: usize,
}

impl ResidualSum {
    /// The addition in the GEMM that computes a value; `None` where the value needs an instruction of its own: it is
    /// resharded, partial, kept for the backward pass, or read by another op than an addition.
    pub fn of(segment: &Segment, value: ValueId, flow: &Flow) -> Option<ResidualSum> {
        let sum = ResidualSum::of_some_flow(segment, value)?;
        let is_stored = flow.copies().len() > 1
            || flow.producer.forward == Layout::Partial
            || flow.producer.norm_pending
            || flow.saves[0] == Save::Kept;
        (!is_stored).then_some(sum)
    }

    /// The addition that the GEMM computes under some flows of the value.
    pub fn of_some_flow(segment: &Segment, value: ValueId) -> Option<ResidualSum> {
        let (linear, _) = segment.output_port(value)?;
        let [(add, port)] = segment.value(value).consumers[..] else { return None };
        let is_one_gemm = match &segment.op(linear).op {
            Op::Linear(linear) => linear.members.len() == 1 && linear.rotary_sections.is_empty(),
            _ => false,
        };
        let is_sum =
            matches!(segment.op(add).op, Op::Add { .. }) && segment.op(add).inputs.len() == 2;
        (is_one_gemm && is_sum && !segment.is_output(value)).then(|| ResidualSum {
            linear,
            add,
            residual_port: 1 - port,
        })
    }

    /// The GEMM of the linear under its choice, which adds its product to the residual and writes the sum.
    pub fn gemm(self, segment: &Segment, choice: &OpChoice, context: &Context) -> InstrTemplate {
        let mut templates = op_forward(segment, self.linear, choice, context);
        let mut template = templates.swap_remove(0);
        if let Action::Gemm(gemm) = &mut template.action {
            gemm.accumulate = true;
        }
        let residual = TemplateOperand { slot: OperandSlot::Residual, ..template.writes[0] };
        template.reads.push(residual);
        template
    }
}
