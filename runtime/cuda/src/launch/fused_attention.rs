//! Attention as cuDNN executes it: one operation forward, one backward.
//!
//! An [`AttentionKey`] is everything but the addresses, and instructions of one key share a plan. The results are those of
//! the kernels of `launch/attention.rs`, which run where there is no plan and within sliding windows: both keep the logarithm of the sum of
//! exponentials of each query and head, so that either can follow the other.

use narrows_plan::DType;
use narrows_plan::kernel::{Attention, Direction};

use super::attention::{backward_operands, forward_operands};
use super::operand::{LaunchResult, MatrixOperand};
use super::site::InstrSite;

/// Widest head that cuDNN supports on every GPU since the A100, in features.
const HEAD_DIM_MAX: u64 = 128;

/// Alignment of operands and rows that is promised to cuDNN, in bytes.
pub(crate) const ATTENTION_ALIGNMENT: u64 = 16;

/// A fused attention without its addresses: causal, in bf16, with scores scaled by 1/√(head size).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttentionKey {
    /// Whether gradients are computed.
    pub is_backward: bool,
    /// Sequences.
    pub sequences: u64,
    /// Tokens per sequence.
    pub length: u64,
    /// Query heads.
    pub heads: u64,
    /// KV heads, a divisor of the query heads.
    pub kv_heads: u64,
    /// Features per head.
    pub head_dim: u64,
    /// Elements from one token to the next, of the queries and their gradients.
    pub q_stride: u64,
    /// The same of the keys.
    pub k_stride: u64,
    /// The same of the values.
    pub v_stride: u64,
    /// The same of the output and its gradient.
    pub out_stride: u64,
}

/// An operand of a fused attention. The statistics are one f32 per token and head, in this order of dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AttentionTensor {
    /// Queries.
    Q = 1,
    /// Keys.
    K,
    /// Values.
    V,
    /// Output.
    Out,
    /// Logarithm of the sum of exponentials.
    Statistics,
    /// Gradient of the output.
    OutGradient,
    /// Gradient of the queries.
    QGradient,
    /// Gradient of the keys.
    KGradient,
    /// Gradient of the values.
    VGradient,
}

/// A fused attention.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedAttention {
    /// Everything but the addresses.
    pub key: AttentionKey,
    /// Operands with the offsets of their first bytes in the arena.
    pub operands: Vec<(AttentionTensor, u64)>,
}

/// The fused form of an attention; `None` where cuDNN has none.
pub(super) fn fused(site: &InstrSite<'_, &Attention>) -> LaunchResult<Option<FusedAttention>> {
    use AttentionTensor::*;
    let op = site.op;
    // Rows of q, k, v and out, and whether those of their gradients are as long.
    let (operands, strides, same_strides) = match op.direction {
        Direction::Forward => {
            let forward = forward_operands(site)?;
            let (heads, out, statistics) = (forward.heads, forward.out, forward.lse);
            let operands = vec![
                (Q, heads.q),
                (K, heads.k),
                (V, heads.v),
                (Out, out),
                (Statistics, statistics),
            ];
            (operands, [heads.q, heads.k, heads.v, out].map(|operand| operand.stride), true)
        }
        Direction::Backward => {
            let backward = backward_operands(site)?;
            let (read, written) = (backward.read, backward.written);
            // The gradients of KV heads that this device does not use are zeros, and cuDNN sums the gradient of the
            // queries in no fixed order: devices of a tensor axis that compute the same must have the same bits.
            if read.local_kv_heads != op.kv_heads || site.device.context.tensor_size() > 1 {
                return Ok(None);
            }
            let strides = [read.q, read.k, read.v, backward.out].map(|operand| operand.stride);
            let gradients = [written.q, written.all_k, written.all_v, backward.out_gradient];
            let operands = vec![
                (Q, read.q),
                (K, read.k),
                (V, read.v),
                (Out, backward.out),
                (Statistics, backward.lse),
                (OutGradient, backward.out_gradient),
                (QGradient, written.q),
                (KGradient, written.all_k),
                (VGradient, written.all_v),
            ];
            (operands, strides, gradients.map(|operand| operand.stride) == strides)
        }
    };
    let [q_stride, k_stride, v_stride, out_stride] = strides;
    let key = AttentionKey {
        is_backward: op.direction == Direction::Backward,
        sequences: op.sequences,
        length: op.length,
        heads: op.heads,
        kv_heads: op.kv_heads,
        head_dim: op.head_dim,
        q_stride,
        k_stride,
        v_stride,
        out_stride,
    };
    // Statistics are accessed one at a time.
    let is_aligned = |(tensor, operand): &(AttentionTensor, MatrixOperand)| match tensor {
        Statistics => operand.begin.is_multiple_of(ATTENTION_ALIGNMENT),
        _ => operand.is_aligned(ATTENTION_ALIGNMENT / DType::Bf16.width()),
    };
    let supported = op.input == DType::Bf16
        && op.window.is_none()
        && op.sequences * op.length > 0
        && op.head_dim <= HEAD_DIM_MAX
        && op.head_dim.is_multiple_of(8)
        && same_strides
        && operands.iter().all(is_aligned);
    let operands = operands.into_iter().map(|(tensor, operand)| (tensor, operand.begin)).collect();
    Ok(supported.then_some(FusedAttention { key, operands }))
}
