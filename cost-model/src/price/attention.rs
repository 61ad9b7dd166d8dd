//! The price of causal flash attention.
//!
//! ```text
//! time = start + max(flops / (peak · η(length) · h(head_dim)), bytes / (bandwidth · η_fused))
//! h(D) = min(1, D/(D + D½) · (128 + D½)/128)
//! ```
//! The FLOPs count the causal half of the scores once; η is interpolated between the profile's points in the
//! logarithm of the length, and constant beyond them. The bytes are queries, keys, values and output once, and
//! their gradients in the backward pass.
//! (FlashAttention-2, arXiv 2307.08691, section 4.1, counts the same FLOPs.)

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::{DType, Seconds};

use crate::profile::{AttentionCurve, DeviceSpec, EfficiencyPoint, FusedCurve};

/// The head size of the profile's points.
const REFERENCE_HEAD_DIM: f64 = 128.0;

/// Prices attention; see the [module](self).
#[derive(Clone, Debug)]
pub(super) struct AttentionPrice {
    start_s: f64,
    head_dim_half: f64,
    bf16_flops_per_s: f64,
    f32_flops_per_s: f64,
    bytes_per_s: f64,
    forward: Vec<EfficiencyPoint>,
    backward: Vec<EfficiencyPoint>,
}

impl AttentionPrice {
    /// From parts of a validated profile.
    pub(super) fn new(curve: &AttentionCurve, device: &DeviceSpec, fused: &FusedCurve) -> Self {
        AttentionPrice {
            start_s: curve.start_s,
            head_dim_half: curve.head_dim_half,
            bf16_flops_per_s: device.peak_flops_per_s.bf16,
            f32_flops_per_s: device.peak_flops_per_s.f32,
            bytes_per_s: device.memory_bandwidth_bytes_per_s * fused.efficiency,
            forward: curve.forward.clone(),
            backward: curve.backward.clone(),
        }
    }

    /// Seconds without the launch gap.
    pub(super) fn price(&self, attention: &Attention) -> Seconds {
        let (curve, traffic_factor) = match attention.direction {
            Direction::Forward => (&self.forward, 1.0),
            // Queries, keys, values, output and its gradient are read, three gradients written.
            Direction::Backward => (&self.backward, 2.0),
        };
        let peak = match attention.input {
            DType::Bf16 => self.bf16_flops_per_s,
            DType::F32 | DType::U32 => self.f32_flops_per_s,
        };
        let efficiency =
            interpolate(curve, attention.length) * self.head_dim_efficiency(attention.head_dim);
        let work = attention.flops().0 / (peak * efficiency);
        let rows = attention.sequences as f64 * attention.length as f64;
        let heads = 2.0 * (attention.heads as f64 + attention.kv_heads as f64);
        let width = attention.input.width() as f64 * attention.head_dim as f64;
        let traffic = traffic_factor * rows * heads * width / self.bytes_per_s;
        Seconds(self.start_s + work.max(traffic))
    }

    /// h(D): the efficiency relative to that of the reference head size.
    fn head_dim_efficiency(&self, head_dim: u64) -> f64 {
        let ramp = |features: f64| features / (features + self.head_dim_half);
        (ramp(head_dim.max(1) as f64) / ramp(REFERENCE_HEAD_DIM)).min(1.0)
    }
}

/// The curve at `length`: linear in ln(length) between its points, constant beyond them.
fn interpolate(points: &[EfficiencyPoint], length: u64) -> f64 {
    let after = points.partition_point(|point| point.length <= length);
    if after == 0 {
        return points[0].efficiency;
    }
    let low = points[after - 1];
    let Some(high) = points.get(after) else { return low.efficiency };
    let position = |length: u64| (length as f64).ln();
    let fraction =
        (position(length) - position(low.length)) / (position(high.length) - position(low.length));
    low.efficiency + fraction * (high.efficiency - low.efficiency)
}
