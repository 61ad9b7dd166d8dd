//! The shim itself: it runs what is right, and reports what is wrong.

use narrows_cuda::launch::{ByteRows, MemoryAccess};
use narrows_cuda::{Argument, KernelFamily, Launch, MemorySpace};
use narrows_plan::DType;

use super::numbers::{assert_near, bf16_bits, random, rounded};
use super::shim::{self, Memories, Order};

pub const TEXT: &str = include_str!("probes.cu");

fn pointer(begin: u64) -> Argument {
    let (memory, touch) = (MemorySpace::Arena, MemoryAccess::Update);
    Argument::Memory(ByteRows { memory, begin, rows: 1, row_bytes: 0, stride_bytes: 0, touch })
}

/// One block of a probe, over this arena.
fn run(
    kernel: &str,
    threads: u32,
    arguments: Vec<Argument>,
    arena: &mut [u8],
    order: Order,
) -> Option<Result<(), String>> {
    let kernels = shim::source("probes", TEXT)?;
    let launch = Launch {
        family: KernelFamily::Norm,
        kernel: kernel.into(),
        grid: [1; 3],
        block: [threads, 1, 1],
        shared_bytes: 0,
        arguments,
    };
    Some(kernels.run(&launch, &mut Memories { arena, ..Memories::default() }, order))
}

#[test]
fn mistakes_are_reported_and_do_not_hang() {
    let cases = [
        ("last_warp_misses_a_barrier", ["thread 0 waits in __syncthreads", "thread 96 has ended"]),
        ("waits_in_two_places", ["thread 0 waits in __syncthreads", "thread 40 waits in"]),
        ("half_a_warp_shuffles", ["thread 0 waits in __shfl_xor_sync", "thread 16 has ended"]),
        ("leaves_lanes_out", ["__shfl_xor_sync at", "not all lanes are in its mask"]),
    ];
    for (kernel, said) in cases {
        for order in [Order::Ascending, Order::Descending] {
            let mut arena = vec![0; 4096];
            let Some(done) = run(kernel, 128, vec![pointer(0)], &mut arena, order) else { return };
            let error = done.expect_err(kernel);
            assert!(said.iter().all(|words| error.contains(words)), "{kernel}: {error}");
        }
    }
    let wrong = [
        (vec![Argument::U32(1)], 32, "the kernel takes p, it is given u"),
        (vec![], 32, "the kernel takes p, it is given "),
        (vec![pointer(0)], 33, "whole warps"),
    ];
    for (arguments, threads, said) in wrong {
        let mut arena = vec![0; 4096];
        let done = run("shuffles", threads, arguments, &mut arena, Order::Ascending);
        let error = done.map(|done| done.expect_err(said));
        assert!(error.is_none_or(|error| error.contains(said)));
    }
}

/// A missing barrier shows in one order of threads or in the other.
#[test]
fn both_orders_show_races() {
    let both = |kernel: &str| -> Option<Vec<Vec<u8>>> {
        let run = |order| {
            let mut arena = vec![0; 4096];
            run(kernel, 128, vec![pointer(0)], &mut arena, order)?.expect(kernel);
            Some(arena)
        };
        [Order::Ascending, Order::Descending].into_iter().map(run).collect()
    };
    for racing in ["reads_too_early", "writes_too_early"] {
        let Some(made) = both(racing) else { return };
        assert_ne!(made[0], made[1], "{racing}");
    }
    let in_time = both("reads_in_time").unwrap();
    assert_eq!(in_time[0], in_time[1]);
    let numbers: &[u8] = &in_time[0][..16];
    assert_eq!(numbers, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
}

#[test]
fn lanes_see_each_other() {
    let mut arena = vec![0; 64 * 16];
    let done = run("shuffles", 64, vec![pointer(0)], &mut arena, Order::Ascending);
    let Some(done) = done else { return };
    done.unwrap();
    for (thread, made) in arena.chunks_exact(16).enumerate() {
        let at = |i: usize| u32::from_le_bytes(made[4 * i..][..4].try_into().unwrap()) as usize;
        let (lane, first) = (thread % 32, thread / 32 * 32);
        let down = if lane + 4 < 32 { thread + 4 } else { thread };
        let up = if lane >= 2 { thread - 2 } else { thread };
        let wanted = [first + 5, first + (lane ^ 3), down, up + 1000 * lane];
        assert_eq!([at(0), at(1), at(2), at(3)], wanted, "thread {thread}");
    }
}

#[test]
fn a_warp_multiplies() {
    let [a, b] = [(1, 256), (2, 128)].map(|(seed, n)| rounded(DType::Bf16, random(seed, n)));
    let wanted: Vec<f32> =
        (0..128).map(|at| (0..16).map(|k| a[at / 8 * 16 + k] * b[k * 8 + at % 8]).sum()).collect();
    let bytes: Vec<u8> = a.iter().chain(&b).flat_map(|x| bf16_bits(*x).to_le_bytes()).collect();
    for waits in [1, 0] {
        // Aligned as device memory is.
        let mut memory = vec![0u128; 128];
        let arena: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        arena[..bytes.len()].copy_from_slice(&bytes);
        let arguments = vec![pointer(0), pointer(512), pointer(1024), Argument::U32(waits)];
        let Some(done) = run("product", 32, arguments, arena, Order::Ascending) else { return };
        done.unwrap();
        let got: &[f32] = bytemuck::cast_slice(&arena[1024..1024 + 512]);
        if waits == 1 {
            assert_near(DType::F32, got, &wanted, 1e-6);
        } else {
            assert!(got.iter().all(|x| x.is_nan()), "what was not waited for has not arrived");
        }
    }
}
