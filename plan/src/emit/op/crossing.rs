//! Ops of a latent that crosses between blocks (LaX): the tensor gate before the addition and, in the
//! released form, the LayerNorm with φ after it. Both need whole rows.

use crate::model::Activation;
use crate::program::FusedOp;

use super::{InstrTemplate, OpEmitter, row_parameters};

pub(super) fn norm(emitter: &OpEmitter, width: u64, activation: Activation) -> Vec<InstrTemplate> {
    vec![row_parameters::forward(emitter, FusedOp::LatentNorm { activation }, 2 * width)]
}

pub(super) fn norm_backward(
    emitter: &OpEmitter,
    width: u64,
    activation: Activation,
) -> Vec<InstrTemplate> {
    vec![row_parameters::backward(emitter, FusedOp::LatentNormBackward { activation }, 2 * width)]
}

pub(super) fn gate(emitter: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    vec![row_parameters::forward(emitter, FusedOp::TensorGate { a, b }, a * a + b * b)]
}

pub(super) fn gate_backward(emitter: &OpEmitter, a: u64, b: u64) -> Vec<InstrTemplate> {
    vec![row_parameters::backward(emitter, FusedOp::TensorGateBackward { a, b }, a * a + b * b)]
}
