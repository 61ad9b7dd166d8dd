//! Sums, zeros and changes of format: the same bits as the processor's.

use narrows_cuda::launch::{Cast, cast};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::Case;
use super::numbers::{bf16_bits, random, rounded};
use super::shim::{self, Memories, Order};

const COUNTS: [u64; 5] = [1, 7, 256, 4099, 70_003];

#[test]
fn sums_and_zeros() {
    for (count, dtype) in COUNTS.into_iter().flat_map(|n| [(n, DType::Bf16), (n, DType::F32)]) {
        let shape = (1, count);
        let (x, y) = (rounded(dtype, random(1, count)), rounded(dtype, random(2, count)));
        let sums = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let wanted: Vec<f32> = rounded(dtype, sums);

        let mut case = Case::new(FusedOp::Add, 1, (1, 1));
        let reads = [&x, &y].map(|numbers| case.buffer(shape, dtype, Some(numbers)));
        let sum = case.buffer(shape, dtype, None);
        case.reads(&reads).writes(&[sum]);
        let Some(outcome) = case.run() else { return };
        assert_eq!(outcome.numbers(sum), wanted);

        let mut case = Case::new(FusedOp::AddInto, 1, (1, 1));
        let [x, y] = [&x, &y].map(|numbers| case.buffer(shape, dtype, Some(numbers)));
        case.reads(&[x, y]).writes(&[y]);
        assert_eq!(case.run().map(|outcome| outcome.numbers(y)), Some(wanted));

        let mut case = Case::new(FusedOp::Fill, 1, (1, 1));
        let to = case.buffer(shape, dtype, None);
        case.writes(&[to]);
        let zeros = vec![0.0; count as usize];
        assert_eq!(case.run().map(|outcome| outcome.numbers(to)), Some(zeros));
    }
}

/// Every bf16 survives the way there and back; f32 is rounded to the nearest, ties to even.
#[test]
fn casts() {
    let ties = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16 | 0x8000));
    let exact = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    let numbers: Vec<f32> =
        ties.chain(exact).chain(random(1, 1001)).filter(|x| !x.is_nan()).collect();
    let count = numbers.len() as u64;
    let to = 4 * count.next_multiple_of(64);
    let back = 2 * to;
    for shift in [0, 2] {
        let mut arena = vec![0u8; (back + 4 * count + 64) as usize];
        arena[..4 * numbers.len()].copy_from_slice(bytemuck::cast_slice(&numbers));
        for launch in [
            cast(Cast::F32ToBf16, count, 0, to + shift).unwrap(),
            cast(Cast::Bf16ToF32, count, to + shift, back).unwrap(),
        ] {
            assert_eq!(launch.kernel.ends_with("v8"), shift == 0, "{}", launch.kernel);
            let Some(kernels) = shim::kernels(launch.family) else { return };
            let mut memory = Memories { arena: &mut arena, ..Memories::default() };
            kernels.run(&launch, &mut memory, Order::Ascending).unwrap();
        }
        let got = arena[back as usize..].chunks_exact(4).take(numbers.len());
        for (got, number) in got.zip(&numbers) {
            let wanted = u32::from(bf16_bits(*number)) << 16;
            assert_eq!(u32::from_le_bytes(got.try_into().unwrap()), wanted, "{number:e}");
        }
    }
}
