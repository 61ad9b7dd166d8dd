//! The shim itself: runs correct kernels, and reports mistakes.

use narrows_cuda::{Argument, ByteRows, KernelFamily, Launch, MemoryAccess, MemorySpace};
use narrows_plan::DType;

use super::formats::{assert_near, bf16_bits, random_values, rounded};
use super::shim::{self, ExecutionOrder, ShimMemory};

pub const SOURCE: &str = include_str!("probes.cu");

/// A pointer to a place of the arena, as an argument of a kernel.
pub fn arena_pointer(begin: u64, access: MemoryAccess) -> Argument {
    let memory = MemorySpace::Arena;
    Argument::Pointer(ByteRows { memory, begin, rows: 1, row_bytes: 0, stride_bytes: 0, access })
}

fn pointer(begin: u64) -> Argument {
    arena_pointer(begin, MemoryAccess::Update)
}

/// Runs one block of a probe on an arena.
fn run(
    kernel: &str,
    threads: u32,
    arguments: Vec<Argument>,
    arena: &mut [u8],
    order: ExecutionOrder,
) -> Option<Result<(), String>> {
    let kernels = shim::load("probes", SOURCE)?;
    let launch = Launch {
        family: KernelFamily::Norm,
        kernel: kernel.into(),
        grid: [1; 3],
        block: [threads, 1, 1],
        shared_bytes: 0,
        arguments,
        table: vec![],
    };
    Some(kernels.run(&launch, &mut ShimMemory { arena, ..ShimMemory::default() }, order))
}

#[test]
fn mistakes_are_reported_without_a_hang() {
    let cases = [
        ("last_warp_misses_a_barrier", ["thread 0 waits in __syncthreads", "thread 96 has ended"]),
        ("waits_in_two_places", ["thread 0 waits in __syncthreads", "thread 40 waits in"]),
        ("half_a_warp_shuffles", ["thread 0 waits in __shfl_xor_sync", "thread 16 has ended"]),
        ("leaves_lanes_out", ["__shfl_xor_sync at", "not all lanes are in its mask"]),
    ];
    for (kernel, expected) in cases {
        for order in [ExecutionOrder::Ascending, ExecutionOrder::Descending] {
            let mut arena = vec![0; 4096];
            let Some(result) = run(kernel, 128, vec![pointer(0)], &mut arena, order) else {
                return;
            };
            let error = result.expect_err(kernel);
            assert!(expected.iter().all(|words| error.contains(words)), "{kernel}: {error}");
        }
    }
    let wrong = [
        (vec![Argument::U32(1)], 32, "the kernel takes p, and receives u"),
        (vec![], 32, "the kernel takes p, and receives "),
        (vec![pointer(0)], 33, "whole warps"),
    ];
    for (arguments, threads, expected) in wrong {
        let mut arena = vec![0; 4096];
        let result = run("shuffles", threads, arguments, &mut arena, ExecutionOrder::Ascending);
        let error = result.map(|result| result.expect_err(expected));
        assert!(error.is_none_or(|error| error.contains(expected)));
    }
}

/// A missing barrier changes the result in one of the two orders.
#[test]
fn the_two_orders_reveal_races() {
    let both = |kernel: &str| -> Option<Vec<Vec<u8>>> {
        let run = |order| {
            let mut arena = vec![0; 4096];
            run(kernel, 128, vec![pointer(0)], &mut arena, order)?.expect(kernel);
            Some(arena)
        };
        [ExecutionOrder::Ascending, ExecutionOrder::Descending].into_iter().map(run).collect()
    };
    for racing in ["reads_too_early", "writes_too_early"] {
        let Some(results) = both(racing) else { return };
        assert_ne!(results[0], results[1], "{racing}");
    }
    let correct = both("reads_after_a_barrier").unwrap();
    assert_eq!(correct[0], correct[1]);
    let first_values: &[u8] = &correct[0][..16];
    assert_eq!(first_values, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
}

#[test]
fn shuffles_exchange_values_between_lanes() {
    let mut arena = vec![0; 64 * 16];
    let result = run("shuffles", 64, vec![pointer(0)], &mut arena, ExecutionOrder::Ascending);
    let Some(result) = result else { return };
    result.unwrap();
    for (thread, values) in arena.chunks_exact(16).enumerate() {
        let at = |i: usize| u32::from_le_bytes(values[4 * i..][..4].try_into().unwrap()) as usize;
        let (lane, first) = (thread % 32, thread / 32 * 32);
        let down = if lane + 4 < 32 { thread + 4 } else { thread };
        let up = if lane >= 2 { thread - 2 } else { thread };
        let expected = [first + 5, first + (lane ^ 3), down, up + 1000 * lane];
        assert_eq!([at(0), at(1), at(2), at(3)], expected, "thread {thread}");
    }
}

#[test]
fn a_warp_multiplies_matrices() {
    let [a, b] = [(1, 256), (2, 128)].map(|(seed, n)| rounded(DType::Bf16, random_values(seed, n)));
    let expected: Vec<f32> =
        (0..128).map(|at| (0..16).map(|k| a[at / 8 * 16 + k] * b[k * 8 + at % 8]).sum()).collect();
    let bytes: Vec<u8> = a.iter().chain(&b).flat_map(|x| bf16_bits(*x).to_le_bytes()).collect();
    for waits in [1, 0] {
        // Aligned as device memory is.
        let mut memory = vec![0u128; 128];
        let arena: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        arena[..bytes.len()].copy_from_slice(&bytes);
        let arguments = vec![pointer(0), pointer(512), pointer(1024), Argument::U32(waits)];
        let Some(done) = run("matmul", 32, arguments, arena, ExecutionOrder::Ascending) else {
            return;
        };
        done.unwrap();
        let got: &[f32] = bytemuck::cast_slice(&arena[1024..1024 + 512]);
        if waits == 1 {
            assert_near(DType::F32, got, &expected, 1e-6);
        } else {
            assert!(got.iter().all(|x| x.is_nan()), "copies arrive only when they are waited for");
        }
    }
}
