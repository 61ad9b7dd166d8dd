//! Rotary position embedding.

use narrows_cpu::kernels::{MatrixViewMut, Parallel, RopeTable, rope_backward, rope_forward};
use narrows_cuda::rotary_table;
use narrows_plan::model::Rope;
use narrows_plan::program::{Access, Extent, FusedOp};
use narrows_plan::{ContextAttention, DType};
use narrows_runtime::session::PositionRuns;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;

/// Heads of several widths in rows with further columns, rotated whole or in part; for all tokens, and for the last
/// positions only.
#[test]
fn rotations_match_the_cpu() {
    let theta = 500.0;
    for (head_dim, rotated, heads, other_columns) in [
        (2, 2, 1, 0),
        (6, 6, 3, 5),
        (6, 2, 3, 5),
        (16, 16, 2, 16),
        (64, 64, 4, 8),
        (64, 48, 4, 8),
        (96, 20, 2, 0),
        (128, 128, 20, 128),
    ] {
        let rope = Rope::plain(theta, rotated);
        let columns = head_dim * heads;
        let stride = columns + other_columns;
        for (devices, sequences, positions) in [(1, 2, 5), (2, 1, 6)] {
            let count = positions / devices;
            let rows = sequences * count;
            for (dtype, forward) in FORMATS.into_iter().flat_map(|d| [(d, true), (d, false)]) {
                let op = match forward {
                    true => FusedOp::Rope { head_dim },
                    false => FusedOp::RopeBackward { head_dim },
                };
                let mut case = KernelCase::new(op, devices, (sequences, positions));
                case.tensor = devices - 1;
                case.rotary = rotary_table(positions, &rope);
                case.constants.rope = rope.clone();
                let x = rounded(dtype, random_values(1, rows * stride));
                let buffer = case.buffer((rows, stride), dtype, Some(&x));
                let part = Access { buffer, extent: Extent { rows, columns, dtype } };
                case.accesses(vec![part], vec![part]);
                let Some(outcome) = case.run() else { return };

                let mut expected = x;
                let table = RopeTable::new(positions as usize, head_dim as usize, &rope);
                let first = (count * case.tensor) as usize;
                let at = PositionRuns::consecutive(first, count as usize);
                let rotated_columns =
                    MatrixViewMut::new(&mut expected, rows as usize, stride as usize)
                        .column_range(0, columns as usize);
                match forward {
                    true => rope_forward(rotated_columns, &table, at, SERIAL),
                    false => rope_backward(rotated_columns, &table, at, SERIAL),
                }
                assert_near(dtype, &outcome.elements(buffer), &expected, 1e-6);
            }
        }
    }
}

/// The devices of a context axis that gathers keys have two runs of positions, from either end of a sequence.
#[test]
fn rotations_of_zigzag_positions_match_the_cpu() {
    let (head_dim, heads, sequences, positions, parts) = (64, 2, 2, 12, 3);
    let (rope, columns) = (Rope::plain(500.0, head_dim), head_dim * heads);
    let table = RopeTable::new(positions as usize, head_dim as usize, &rope);
    for (place, dtype) in (0..parts).flat_map(|place| FORMATS.map(|dtype| (place, dtype))) {
        let rows = sequences * positions / parts;
        let op = FusedOp::Rope { head_dim };
        let mut case = KernelCase::new(op, 1, (sequences, positions));
        case.context.mesh.context = parts;
        case.context.context_attention = ContextAttention::Gather;
        case.replica = place;
        case.rotary = rotary_table(positions, &rope);
        case.constants.rope = rope.clone();
        let mut expected = rounded(dtype, random_values(1, rows * columns));
        let buffer = case.buffer((rows, columns), dtype, Some(&expected));
        case.reads(&[buffer]).writes(&[buffer]);
        let Some(outcome) = case.run() else { return };
        let (first, last) = (2 * place as usize, 2 * (5 - place as usize));
        for (sequence, at) in [first, last].into_iter().cycle().take(4).enumerate() {
            let run = MatrixViewMut::new(&mut expected, rows as usize, columns as usize);
            let run = run.row_range(2 * sequence, 2);
            rope_forward(run, &table, PositionRuns::consecutive(at, 2), SERIAL);
        }
        assert_near(dtype, &outcome.elements(buffer), &expected, 1e-6);
    }
}
