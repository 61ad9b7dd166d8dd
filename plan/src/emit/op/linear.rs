//! GEMMs of a linear: Y = X·W forward, dX = dY·Wᵀ and dW += Xᵀ·dY backward, or dW = Xᵀ·dY where a step has one microbatch.
//! Where replicas accumulate only their parts of gradients, a microbatch has gradients of its own, in the format of their
//! reduction: dW = Xᵀ·dY.

use crate::DType;
use crate::graph::{LinearForm, LinearOp};
use crate::program::{Action, Extent, GemmOp, GemmRole};
use crate::strategy::Strategy;

use super::{InstrTemplate, OpEmitter, OperandSlot, TemplateOperand, rotary};

/// Shape of one GEMM of the batch on one device.
struct LocalGemmShape {
    rows: u64,
    d_in: u64,
    d_out: u64,
    batch: u64,
}

impl LocalGemmShape {
    fn of(emitter: &OpEmitter, linear: &LinearOp) -> LocalGemmShape {
        let devices = emitter.context.tensor_size();
        let first = &linear.members[0];
        let (mut d_in, mut d_out, batch) = match linear.form {
            LinearForm::Concatenated => {
                (first.d_in, linear.members.iter().map(|m| m.d_out).sum::<u64>(), 1)
            }
            LinearForm::Batched => (first.d_in, first.d_out, linear.members.len() as u64),
        };
        match emitter.choice.strategy {
            Strategy::Column => d_out /= devices,
            Strategy::Row | Strategy::PendingNormRow => d_in /= devices,
            _ => {}
        }
        let rows = emitter.context.rows(emitter.layout(OperandSlot::Input(0)));
        LocalGemmShape { rows, d_in, d_out, batch }
    }

    fn weight(&self, slot: OperandSlot, dtype: DType) -> TemplateOperand {
        let extent = Extent { rows: self.d_in, columns: self.d_out * self.batch, dtype };
        TemplateOperand { slot, extent }
    }
}

pub(super) fn forward(emitter: &OpEmitter, linear: &LinearOp) -> Vec<InstrTemplate> {
    let shape = LocalGemmShape::of(emitter, linear);
    let output = emitter.activation(OperandSlot::Output(0));
    let gemm = GemmOp {
        role: GemmRole::Forward,
        m: shape.rows,
        n: shape.d_out,
        k: shape.d_in,
        batch: shape.batch,
        accumulate: false,
    };
    let reads = vec![
        emitter.activation(OperandSlot::Input(0)),
        shape.weight(OperandSlot::Weight(0), emitter.context.compute_dtype()),
    ];
    let mut templates =
        vec![InstrTemplate { action: Action::Gemm(gemm), reads, writes: vec![output] }];
    templates.extend(rotation(emitter, linear, false));
    templates
}

pub(super) fn backward(emitter: &OpEmitter, linear: &LinearOp) -> Vec<InstrTemplate> {
    let shape = LocalGemmShape::of(emitter, linear);
    let gradient = emitter.activation(OperandSlot::OutputGradient(0));
    let mut templates: Vec<InstrTemplate> = rotation(emitter, linear, true).into_iter().collect();

    let mut reads =
        vec![gradient, shape.weight(OperandSlot::Weight(0), emitter.context.compute_dtype())];
    let input_gradient = emitter.input_gradient(0, &mut reads);
    let gemm = GemmOp {
        role: GemmRole::InputGradient,
        m: shape.rows,
        n: shape.d_in,
        k: shape.d_out,
        batch: shape.batch,
        accumulate: emitter.accumulates(0),
    };
    templates.push(InstrTemplate {
        action: Action::Gemm(gemm),
        reads,
        writes: vec![input_gradient],
    });

    let dtype = match emitter.has_microbatch_gradients() {
        true => emitter.context.grad_reduce_dtype.dtype(),
        false => DType::F32,
    };
    let weight_gradient = shape.weight(OperandSlot::WeightGradient(0), dtype);
    let gemm = GemmOp {
        role: GemmRole::WeightGradient,
        m: shape.d_in,
        n: shape.d_out,
        k: shape.rows,
        batch: shape.batch,
        accumulate: emitter.context.accumulates_gradients && !emitter.has_microbatch_gradients(),
    };
    let mut reads = vec![emitter.activation(OperandSlot::Input(0)), gradient];
    reads.extend(gemm.accumulate.then_some(weight_gradient));
    templates.push(InstrTemplate {
        action: Action::Gemm(gemm),
        reads,
        writes: vec![weight_gradient],
    });
    templates
}

fn rotation(emitter: &OpEmitter, linear: &LinearOp, backward: bool) -> Option<InstrTemplate> {
    let width = linear.rotary_sections.iter().map(|s| linear.members[*s].d_out).sum();
    rotary::rotary(emitter, (width, linear.head_dim.unwrap_or(width)), backward)
}
