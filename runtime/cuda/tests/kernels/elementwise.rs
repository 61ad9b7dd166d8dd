//! Element-wise sums, fills, and conversions between formats: the same bits as on the CPU.

use narrows_cuda::{Argument, KernelFamily, Launch, MemoryAccess};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{bf16_bits, random_values, rounded};
use super::probes;
use super::shim::{self, ExecutionOrder, ShimMemory};

const COUNTS: [u64; 5] = [1, 7, 256, 4099, 70_003];

#[test]
fn sums_and_fills_match_the_cpu() {
    for (count, dtype) in COUNTS.into_iter().flat_map(|n| [(n, DType::Bf16), (n, DType::F32)]) {
        let shape = (1, count);
        let (x, y) =
            (rounded(dtype, random_values(1, count)), rounded(dtype, random_values(2, count)));
        let sums = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let expected: Vec<f32> = rounded(dtype, sums);

        let mut case = KernelCase::new(FusedOp::Add, 1, (1, 1));
        let reads = [&x, &y].map(|values| case.buffer(shape, dtype, Some(values)));
        let sum = case.buffer(shape, dtype, None);
        case.reads(&reads).writes(&[sum]);
        let Some(outcome) = case.run() else { return };
        assert_eq!(outcome.elements(sum), expected);

        let mut case = KernelCase::new(FusedOp::AddInto, 1, (1, 1));
        let [x, y] = [&x, &y].map(|values| case.buffer(shape, dtype, Some(values)));
        case.reads(&[x, y]).writes(&[y]);
        assert_eq!(case.run().map(|outcome| outcome.elements(y)), Some(expected));

        let mut case = KernelCase::new(FusedOp::Fill, 1, (1, 1));
        let to = case.buffer(shape, dtype, None);
        case.writes(&[to]);
        let zeros = vec![0.0; count as usize];
        assert_eq!(case.run().map(|outcome| outcome.elements(to)), Some(zeros));
    }
}

/// Casts, and additions of bf16 to f32, widen exactly and round once.
#[test]
fn casts_and_mixed_sums_match_the_cpu() {
    for (count, narrow) in COUNTS.into_iter().flat_map(|n| [(n, true), (n, false)]) {
        let (from, to) = match narrow {
            true => (DType::F32, DType::Bf16),
            false => (DType::Bf16, DType::F32),
        };
        let x = rounded(from, random_values(1, count));
        let mut case = KernelCase::new(FusedOp::Cast, 1, (1, 1));
        let read = case.buffer((1, count), from, Some(&x));
        let written = case.buffer((1, count), to, None);
        case.reads(&[read]).writes(&[written]);
        let Some(outcome) = case.run() else { return };
        assert_eq!(outcome.elements(written), rounded(to, x.clone()));

        if narrow {
            continue;
        }
        let y = random_values(2, count);
        let mut case = KernelCase::new(FusedOp::AddInto, 1, (1, 1));
        let read = case.buffer((1, count), DType::Bf16, Some(&x));
        let sum = case.buffer((1, count), DType::F32, Some(&y));
        case.reads(&[read, sum]).writes(&[sum]);
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(case.run().map(|outcome| outcome.elements(sum)), Some(expected));
    }
}

/// A launch of a conversion kernel of `probes.cu`, which loads and stores elements as all kernels do.
fn cast(kernel: &str, elements: u64, from: u64, to: u64) -> Launch {
    let vectors = from.is_multiple_of(16) && to.is_multiple_of(16);
    Launch {
        family: KernelFamily::Elementwise,
        kernel: format!("{kernel}_v{}", if vectors { 8 } else { 1 }),
        grid: [64, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        arguments: vec![
            probes::arena_pointer(from, MemoryAccess::Read),
            probes::arena_pointer(to, MemoryAccess::Write),
            Argument::U64(elements),
        ],
        table: vec![],
    }
}

/// bf16 → f32 is exact for every value; f32 → bf16 rounds to nearest, ties to even.
#[test]
fn conversions_round_to_nearest_even() {
    let ties = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000));
    let exact = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    let values: Vec<f32> =
        ties.chain(exact).chain(random_values(1, 1001)).filter(|x| !x.is_nan()).collect();
    let count = values.len() as u64;
    let to = 4 * count.next_multiple_of(64);
    let back = 2 * to;
    for shift in [0, 2] {
        let mut arena = vec![0u8; (back + 4 * count + 64) as usize];
        arena[..4 * values.len()].copy_from_slice(bytemuck::cast_slice(&values));
        for launch in [
            cast("cast_f32_to_bf16", count, 0, to + shift),
            cast("cast_bf16_to_f32", count, to + shift, back),
        ] {
            assert_eq!(launch.kernel.ends_with("v8"), shift == 0, "{}", launch.kernel);
            let Some(kernels) = shim::load("probes", probes::SOURCE) else { return };
            let mut memory = ShimMemory { arena: &mut arena, ..ShimMemory::default() };
            kernels.run(&launch, &mut memory, ExecutionOrder::Ascending).unwrap();
        }
        let got = arena[back as usize..].chunks_exact(4).take(values.len());
        for (got, number) in got.zip(&values) {
            let expected = u32::from(bf16_bits(*number)) << 16;
            assert_eq!(u32::from_le_bytes(got.try_into().unwrap()), expected, "{number:e}");
        }
    }
}
