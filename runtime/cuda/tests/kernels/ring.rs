//! Ring attention, for which the backend has no kernels.

use narrows_plan::kernel::{Attention, Direction};
use narrows_plan::program::Action;
use narrows_plan::{Axis, ContextAttention, DType, DeviceGroup};

use super::case::KernelCase;

#[test]
fn ring_attention_is_refused() {
    for direction in [Direction::Forward, Direction::Backward] {
        let attention = Attention {
            direction,
            sequences: 1,
            length: 8,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            input: DType::Bf16,
            window: None,
            query_parts: 2,
            ring: Some(DeviceGroup { axis: Axis::Context, size: 2, stride: 1 }),
        };
        let mut case = KernelCase::of(Action::Attention(attention), 1, (1, 8));
        case.context.mesh.context = 2;
        case.context.context_attention = ContextAttention::Ring;
        let error = case.launches().expect_err("no kernel");
        assert!(error.contains("context_attention `ring`, which only CPUs run"), "{error}");
    }
}
