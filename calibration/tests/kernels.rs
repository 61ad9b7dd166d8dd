//! Kernels for fits to simulated measurements.

use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, FusedKernel, FusedKind, Gemm, Kernel,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup};

/// `m × k` times `k × n`, of one format.
pub fn gemm(format: DType, [m, n, k]: [u64; 3]) -> Kernel {
    let (input, output) = (format, format);
    Kernel::Gemm(Gemm { m, n, k, batch: 1, accumulate: false, residual: false, input, output })
}

/// Attention of four sequences, with as many KV heads as query heads.
pub fn attention(
    input: DType,
    direction: Direction,
    length: u64,
    (heads, head_dim): (u64, u64),
) -> Kernel {
    let (sequences, kv_heads, window) = (4, heads, None);
    Kernel::Attention(Attention {
        direction,
        sequences,
        length,
        heads,
        kv_heads,
        head_dim,
        input,
        window,
        query_parts: 1,
        ring: None,
    })
}

/// An addition with this traffic, and twice as much in two launches when it is not fused.
pub fn fused(bytes: u64) -> Kernel {
    let (traffic, unfused_traffic) = (Bytes(bytes), Bytes(2 * bytes));
    Kernel::Fused(FusedKernel {
        kind: FusedKind::Add,
        traffic,
        unfused_traffic,
        unfused_launches: 2,
        parameters: 1,
    })
}

/// A collective over the tensor axis.
pub fn collective(kind: CollectiveKind, bytes: u64, size: u64, stride: u64) -> Kernel {
    let group = DeviceGroup { axis: Axis::Tensor, size, stride };
    Kernel::Collective(Collective { kind, payload: Bytes(bytes), group })
}
