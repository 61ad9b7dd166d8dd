//! Copies around reshards, and the rotary embedding.

use narrows_cpu::kernels::{
    MatrixViewMut, Parallel, PartitionShape, PositionRange, RopeTable, pack_shards, rope_backward,
    rope_forward, slice_shard, unpack_shards,
};
use narrows_cuda::launch::rotary_table;
use narrows_plan::program::{Access, Extent, FusedOp};
use narrows_plan::{DType, Dim};

use super::case::Case;
use super::numbers::{assert_near, random, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

/// Sequences, positions, the sections of a token, parts.
const VALUES: [(u64, u64, &[u64], u64); 6] = [
    (2, 2, &[2], 2),
    (4, 6, &[8, 4, 12], 2),
    (4, 8, &[64, 32, 32], 4),
    (2, 4, &[6, 2], 2),
    (4, 1028, &[24], 4),
    (8, 40, &[1032], 2),
];

#[test]
fn copies_are_the_processors() {
    for (sequences, positions, sections, parts) in VALUES {
        let width: u64 = sections.iter().sum();
        let rows = sequences * positions;
        let held: Vec<usize> = sections.iter().map(|width| *width as usize).collect();
        for (dtype, dim) in FORMATS
            .into_iter()
            .flat_map(|dtype| [Dim::Feature, Dim::Sequence, Dim::Position].map(|dim| (dtype, dim)))
        {
            let whole = rounded(dtype, random(1, rows * width));
            let form = PartitionShape {
                sequences: sequences as usize,
                positions: positions as usize,
                sections: &held,
                dim,
                shards: parts as usize,
            };
            for op in [FusedOp::Pack { dim }, FusedOp::Unpack { dim }, FusedOp::Slice { dim }] {
                let mut case = Case::new(op, parts, (sequences, positions));
                case.tensor = parts - 1;
                let part = match dim {
                    Dim::Feature => (rows, width / parts),
                    _ => (rows / parts, width),
                };
                let slice = matches!(op, FusedOp::Slice { .. });
                let result = if slice { part } else { (rows, width) };
                let from = case.buffer((rows, width), dtype, Some(&whole));
                let to = case.buffer(result, dtype, None);
                for buffer in [from, to] {
                    case.stage.buffers[buffer.0 as usize].sections = sections.to_vec();
                }
                case.reads(&[from]).writes(&[to]);
                let Some(outcome) = case.run() else { return };
                let mut wanted = vec![0.0; (result.0 * result.1) as usize];
                match op {
                    FusedOp::Pack { .. } => pack_shards(form, &whole, &mut wanted, SERIAL),
                    FusedOp::Unpack { .. } => unpack_shards(form, &whole, &mut wanted, SERIAL),
                    _ => slice_shard(form, parts as usize - 1, &whole, &mut wanted, SERIAL),
                }
                assert_eq!(outcome.numbers(to), wanted, "{op:?} of {sections:?} in {parts}");
            }
        }
    }
}

/// Parts that are no equal parts have no launches.
#[test]
fn ragged_parts_are_refused() {
    let mut case = Case::new(FusedOp::Pack { dim: Dim::Feature }, 2, (1, 4));
    let [from, to] = [(); 2].map(|()| case.buffer((4, 8), DType::F32, None));
    case.stage.buffers[from.0 as usize].sections = vec![5, 3];
    case.reads(&[from]).writes(&[to]);
    let error = case.launches().expect_err("parts of 5");
    assert!(error.contains("2 equal parts of rows of [5, 3] of 8"), "{error}");
}

/// Heads of several widths, the first of wider rows; of all tokens, and of the last positions.
#[test]
fn rotations_are_the_processors() {
    let theta = 500.0;
    for (head_dim, heads, rest) in [(2, 1, 0), (6, 3, 5), (16, 2, 16), (64, 4, 8), (128, 20, 128)] {
        let columns = head_dim * heads;
        let stride = columns + rest;
        for (devices, sequences, positions) in [(1, 2, 5), (2, 1, 6)] {
            let count = positions / devices;
            let rows = sequences * count;
            for (dtype, forward) in FORMATS.into_iter().flat_map(|d| [(d, true), (d, false)]) {
                let op = match forward {
                    true => FusedOp::Rope { head_dim },
                    false => FusedOp::RopeBackward { head_dim },
                };
                let mut case = Case::new(op, devices, (sequences, positions));
                case.tensor = devices - 1;
                case.rotary = rotary_table(positions, head_dim, theta);
                let x = rounded(dtype, random(1, rows * stride));
                let buffer = case.buffer((rows, stride), dtype, Some(&x));
                let part = Access { buffer, extent: Extent { rows, columns, dtype } };
                case.accesses(vec![part], vec![part]);
                let Some(outcome) = case.run() else { return };

                let mut wanted = x;
                let table = RopeTable::new(positions as usize, head_dim as usize, theta);
                let first = (count * case.tensor) as usize;
                let at = PositionRange { first, count: count as usize };
                let made = MatrixViewMut::new(&mut wanted, rows as usize, stride as usize)
                    .column_range(0, columns as usize);
                match forward {
                    true => rope_forward(made, &table, at, SERIAL),
                    false => rope_backward(made, &table, at, SERIAL),
                }
                assert_near(dtype, &outcome.numbers(buffer), &wanted, 1e-6);
            }
        }
    }
}
