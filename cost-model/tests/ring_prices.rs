//! Prices of ring attention.

use narrows_cost_model::profile::{preset, preset_names};
use narrows_cost_model::{Executor, Prices};
use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, FusedKernel, Kernel, Transfer,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh, Seconds};

/// Each step of a ring computes attention to one part, merges the result, and is at least as long as the shift beside it.
/// In one step between the first and the last, the two chunks of queries are merged apart.
/// Keys move in all steps but the last, and their fp32 gradients from the second step on and once more at the end.
#[test]
fn rings_are_priced_step_by_step() {
    for (name, size) in preset_names().flat_map(|name| [2, 4, 16].map(|size| (name, size))) {
        let profile = preset(name).unwrap();
        let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: size };
        let prices = Prices::new(&profile, Executor::Captured, &mesh);
        let time_s = |kernel: Kernel| prices.kernel_time(&kernel).0;
        for direction in [Direction::Forward, Direction::Backward] {
            let (sequences, heads, kv_heads, head_dim) = (3, 16, 4, 128);
            let tokens = sequences * 4096;
            let group = mesh.group(Axis::Context);
            let attention = |size, length| {
                Kernel::Attention(Attention {
                    direction,
                    sequences,
                    length,
                    heads,
                    kv_heads,
                    head_dim,
                    input: DType::Bf16,
                    window: None,
                    query_parts: size,
                    ring: Some(DeviceGroup { size, ..group }),
                })
            };
            let keys = 2 * tokens * kv_heads * head_dim;
            let shift = |bytes_per_element| {
                let kind = CollectiveKind::Shift;
                let payload = Bytes(keys * bytes_per_element * size);
                Collective { kind, payload, group }
            };
            let shift_s = |bytes| time_s(Kernel::Collective(shift(bytes)));
            // So many kernels that together read and write so many bytes for each element.
            let fused_s = |kernels: u64, elements: u64, bytes_per_element: u64| {
                let traffic = Bytes(bytes_per_element * elements / kernels);
                kernels as f64 * time_s(Kernel::Fused(FusedKernel::memory_pass(traffic)))
            };
            // Sums of 4 bytes are read and written, results of 2 bytes read.
            let merged = match direction {
                Direction::Forward => tokens * heads * (head_dim + 1),
                Direction::Backward => tokens * heads * head_dim,
            };
            let first_s = time_s(attention(1, 4096));
            let [later_s, apart_s] =
                [1, 2].map(|kernels| first_s + fused_s(kernels, merged, 4 + 2 + 4));
            // Copies of keys and of values, conversions of their gradients, and sums of these.
            let (pack_s, convert_s) = (fused_s(2, keys, 2 + 2), fused_s(1, keys, 2 + 4));
            let write_s = fused_s(2, keys, 2 + 4);
            let add_s = fused_s(1, keys, 4 + 2 + 4);
            let step_s = |beside_s: f64, without_s: f64, shift_s: f64| {
                let added_s = match prices.overlap_slowdown() {
                    Some(slowdown) => slowdown.exposed(Seconds(shift_s), Seconds(beside_s)).0,
                    None => shift_s,
                };
                beside_s + without_s + added_s
            };
            let between_s = |without_s: f64, shift_s: f64| {
                let of = |beside_s: f64| step_s(beside_s, without_s, shift_s);
                if size == 2 { 0.0 } else { of(apart_s) + (size - 3) as f64 * of(later_s) }
            };
            let expected = match direction {
                Direction::Forward => {
                    step_s(first_s, pack_s, shift_s(2)) + between_s(0.0, shift_s(2)) + later_s
                }
                Direction::Backward => {
                    step_s(first_s + convert_s, pack_s, shift_s(2))
                        + between_s(add_s, shift_s(2 + 4))
                        + step_s(later_s, add_s, shift_s(4))
                        + shift_s(4)
                        + write_s
                }
            };
            let time = time_s(attention(size, 4096 * size));
            assert!((time / expected - 1.0).abs() < 1e-12, "{name}, {size}: {time}, {expected}");
            assert!(time >= size as f64 * first_s, "{name}, {size}");
        }
        // A shift is a transfer to the neighbour.
        let group = mesh.group(Axis::Context);
        let (payload, kind) = (Bytes(size << 20), CollectiveKind::Shift);
        let shift = Kernel::Collective(Collective { kind, payload, group });
        let transfer = Kernel::Transfer(Transfer { bytes: Bytes(1 << 20), group });
        if profile.file().measured.is_none() {
            assert_eq!(prices.kernel_time(&shift), prices.kernel_time(&transfer), "{name}");
        }
    }
}

/// However much computation and collectives slow each other, a ring takes no longer than its steps one after the other.
#[test]
fn overlap_costs_a_ring_no_time() {
    let mut file = preset("a100-80gb").unwrap().file().clone();
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 1, context: 4 };
    let mut time_with = |overlap| {
        file.overlap = overlap;
        let profile = file.clone().resolve().unwrap();
        let attention = Attention {
            direction: Direction::Backward,
            sequences: 1,
            length: 4096,
            heads: 16,
            kv_heads: 16,
            head_dim: 64,
            input: DType::Bf16,
            window: None,
            query_parts: 4,
            ring: Some(mesh.group(Axis::Context)),
        };
        let prices = Prices::new(&profile, Executor::Captured, &mesh);
        prices.kernel_time(&Kernel::Attention(attention))
    };
    let factors = preset("a100-80gb").unwrap().file().overlap.clone().expect("factors");
    let mut slow = factors.clone();
    (slow.compute_slowdown, slow.collective_slowdown) = (3.0, 3.0);
    let [in_order, overlapped, slowed] = [None, Some(factors), Some(slow)].map(&mut time_with);
    assert!(overlapped < in_order, "{overlapped} and {in_order}");
    assert!(slowed <= in_order * (1.0 + 1e-12), "{slowed} and {in_order}");
}
