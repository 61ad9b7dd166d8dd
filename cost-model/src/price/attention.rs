//! The price of causal flash attention.
//!
//! ```text
//! time = start + max(g · flops / (peak · η(length) · h(head_dim)), bytes / (bandwidth · η_fused))
//! h(D) = min(1, D/(D + D½) · (128 + D½)/128)
//! ```
//! with g = 7/5 for a backward pass by own kernels ([`BackwardKernel`]), and 1 otherwise.
//! The FLOPs count the scores that the mask leaves once; η is interpolated between the profile's points in the
//! logarithm of the length, and constant beyond them. Within a sliding window, η is that of the sequences in which a query
//! has as many keys on average, an assumption. The bytes are queries, keys, values and output once, and
//! their gradients in the backward pass.
//! (FlashAttention-2, arXiv 2307.08691, section 4.1, counts the same FLOPs.)

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::{DType, Kernel, Mesh, Seconds};

use crate::profile::{EfficiencyPoint, Executor, ProfileFile};

/// The head size of the profile's points.
const REFERENCE_HEAD_DIM: f64 = 128.0;

/// The kernel of a backward pass.
///
/// Captured graphs are those of this runtime. On GPUs it calls cuDNN, but within a sliding window, for queries that are
/// a part of a sequence, in the steps of a ring, and along a tensor axis, whose devices must compute the same bits, it
/// runs its own kernels, which compute the probabilities twice: seven GEMMs instead of the five that
/// [`Attention::flops`] counts. That own kernels reach the rate of the curve is an assumption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BackwardKernel {
    /// cuDNN's or FlashAttention's, or a kernel that was measured as it runs.
    Measured,
    /// The own kernel, which was not measured.
    Own,
}

impl BackwardKernel {
    /// The kernel that runs on `mesh`, with or without a mask other than that of whole sequences. Measurements of
    /// attention on several devices are of the kernel that runs there.
    fn of(file: &ProfileFile, executor: Executor, mesh: &Mesh, is_masked: bool) -> Self {
        let measured = file.measured.iter().flat_map(|measured| &measured.points);
        let on_several_devices =
            |kernel: &Kernel, devices| devices > 1 && matches!(kernel, Kernel::Attention(_));
        let is_own = executor == Executor::Captured
            && file.has_gpus()
            && (mesh.tensor > 1 || is_masked)
            && !measured.into_iter().any(|point| on_several_devices(&point.kernel, point.devices));
        if is_own { BackwardKernel::Own } else { BackwardKernel::Measured }
    }

    /// g: executed GEMMs over counted ones.
    fn gemm_ratio(self) -> f64 {
        match self {
            BackwardKernel::Measured => 1.0,
            BackwardKernel::Own => 7.0 / 5.0,
        }
    }
}

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
    backward_kernel: BackwardKernel,
    /// The kernel within a sliding window, and of queries that are a part of a sequence.
    masked_backward_kernel: BackwardKernel,
}

impl AttentionPrice {
    /// Prices of the kernels that run on `mesh`, from a validated profile.
    pub(super) fn new(file: &ProfileFile, executor: Executor, mesh: &Mesh) -> Self {
        AttentionPrice {
            backward_kernel: BackwardKernel::of(file, executor, mesh, false),
            masked_backward_kernel: BackwardKernel::of(file, executor, mesh, true),
            ..AttentionPrice::measured(file)
        }
    }

    /// Prices by the curves of a validated profile alone, with which measurements are compared.
    pub(super) fn measured(file: &ProfileFile) -> Self {
        let ProfileFile { attention: curve, device, fused, .. } = file;
        AttentionPrice {
            start_s: curve.start_s,
            head_dim_half: curve.head_dim_half,
            bf16_flops_per_s: device.peak_flops_per_s.bf16,
            f32_flops_per_s: device.peak_flops_per_s.f32,
            bytes_per_s: device.memory_bandwidth_bytes_per_s * fused.efficiency,
            forward: curve.forward.clone(),
            backward: curve.backward.clone(),
            backward_kernel: BackwardKernel::Measured,
            masked_backward_kernel: BackwardKernel::Measured,
        }
    }

    /// Whether the attention runs in an own kernel that was not measured.
    pub(super) fn is_own(&self, attention: &Attention) -> bool {
        attention.direction == Direction::Backward
            && self.backward_kernel(attention) == BackwardKernel::Own
    }

    fn backward_kernel(&self, attention: &Attention) -> BackwardKernel {
        match (attention.window, attention.query_parts, &attention.ring) {
            (None, 1, None) => self.backward_kernel,
            _ => self.masked_backward_kernel,
        }
    }

    /// Seconds without the launch gap.
    pub(super) fn price(&self, attention: &Attention) -> Seconds {
        let (curve, traffic_factor, gemm_ratio) = match attention.direction {
            Direction::Forward => (&self.forward, 1.0, 1.0),
            // Queries, keys, values, output and its gradient are read, three gradients written.
            Direction::Backward => {
                (&self.backward, 2.0, self.backward_kernel(attention).gemm_ratio())
            }
        };
        let peak = match attention.input {
            DType::Bf16 => self.bf16_flops_per_s,
            DType::F32 | DType::U32 => self.f32_flops_per_s,
        };
        let efficiency = interpolate(curve, equivalent_length(attention))
            * self.head_dim_efficiency(attention.head_dim);
        let work = gemm_ratio * attention.flops().0 / (peak * efficiency);
        let [queries, keys] = [attention.queries(), attention.length].map(|rows| rows as f64);
        let rows = 2.0 * (queries * attention.heads as f64 + keys * attention.kv_heads as f64);
        let width = attention.input.width() as f64 * attention.head_dim as f64;
        let traffic = traffic_factor * attention.sequences as f64 * rows * width / self.bytes_per_s;
        Seconds(self.start_s + work.max(traffic))
    }

    /// h(D): the efficiency relative to that of the reference head size.
    fn head_dim_efficiency(&self, head_dim: u64) -> f64 {
        let ramp = |features: f64| features / (features + self.head_dim_half);
        (ramp(head_dim.max(1) as f64) / ramp(REFERENCE_HEAD_DIM)).min(1.0)
    }
}

/// The length of sequences whose queries have as many keys on average.
fn equivalent_length(attention: &Attention) -> f64 {
    match attention.window {
        None => attention.length as f64,
        Some(_) => 2.0 * attention.scores() / attention.queries() as f64 - 1.0,
    }
}

/// The curve at `length`: linear in ln(length) between its points, constant beyond them.
fn interpolate(points: &[EfficiencyPoint], length: f64) -> f64 {
    let after = points.partition_point(|point| point.length as f64 <= length);
    if after == 0 {
        return points[0].efficiency;
    }
    let low = points[after - 1];
    let Some(high) = points.get(after) else { return low.efficiency };
    let (low_position, high_position) = ((low.length as f64).ln(), (high.length as f64).ln());
    let fraction = (length.ln() - low_position) / (high_position - low_position);
    low.efficiency + fraction * (high.efficiency - low.efficiency)
}
