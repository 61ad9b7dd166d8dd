//! Rotary position embedding on half-rotated pairs, in place.
//!
//! Of the first w features of a head, features i and i + w/2 rotate at position p by the angle of pair i:
//! (a, b) becomes (a·cos − b·sin, b·cos + a·sin). Further features keep their values. Backward rotates
//! gradients by the opposite angle.

use narrows_plan::model::Rope;
use narrows_runtime::session::PositionRuns;

use super::matrix::MatrixViewMut;
use super::parallel::{FirstRow, Parallel, SharedOperand};
use super::simd::{Simd, SimdBody};

/// Cosines and sines of all positions, computed in f64.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// For every position, w/2 cosines and then w/2 sines.
    angles: Vec<f32>,
    /// Features of a head that are rotated: w.
    rotated: usize,
    head_dim: usize,
}

impl RopeTable {
    /// The table of positions 0 to `positions` − 1, for heads of `head_dim` features.
    ///
    /// # Panics
    /// When heads have fewer features than are rotated, or when these are not pairs.
    pub fn new(positions: usize, head_dim: usize, rope: &Rope) -> Self {
        let rotated = rope.dim as usize;
        assert!(
            rotated.is_multiple_of(2) && rotated <= head_dim,
            "rotary embedding rotates pairs of features: {rotated} of a head of {head_dim}"
        );
        let frequencies = rope.frequencies(positions as u64);
        let rows = (0..positions as u64).flat_map(|position| frequencies.row(position));
        RopeTable { angles: rows.map(|value| value as f32).collect(), rotated, head_dim }
    }

    /// Cosines and sines at a position.
    #[inline(always)]
    fn at(&self, position: usize) -> (&[f32], &[f32]) {
        self.angles[position * self.rotated..][..self.rotated].split_at(self.rotated / 2)
    }
}

/// `Rope`: rotates all heads of `x`, `[tokens, heads·w]`, whose rows are these positions of each sequence.
pub fn rope_forward(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRuns,
    parallel: Parallel,
) {
    rotate(x, table, positions, 1.0, parallel);
}

/// `RopeBackward`: rotates the gradients `dx`, `[tokens, heads·w]`, back.
pub fn rope_backward(
    dx: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRuns,
    parallel: Parallel,
) {
    rotate(dx, table, positions, -1.0, parallel);
}

fn rotate(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRuns,
    sign: f32,
    parallel: Parallel,
) {
    assert_eq!(x.columns() % table.head_dim, 0, "whole heads of {}", table.head_dim);
    let rows = x.rows();
    let operands = (FirstRow(0), x, SharedOperand((table, positions, sign)));
    parallel.for_rows::<RotateRows, _>(rows, operands);
}

type RotateOperands<'a> =
    (FirstRow, MatrixViewMut<'a>, SharedOperand<(&'a RopeTable, PositionRuns, f32)>);

struct RotateRows;

impl SimdBody<RotateOperands<'_>> for RotateRows {
    #[inline(always)]
    fn run<S: Simd>(
        (FirstRow(first), mut x, SharedOperand((table, positions, sign))): RotateOperands<'_>,
    ) {
        for row in 0..x.rows() {
            let (cos, sin) = table.at(positions.position((first + row) % positions.count));
            for head in x.row_mut(row).chunks_exact_mut(table.head_dim) {
                let (a, b) = head[..table.rotated].split_at_mut(table.rotated / 2);
                for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                    let sin = sign * sin;
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_close_f32, random};

    const THETA: f64 = 10_000.0;

    #[test]
    fn pairs_rotate_by_their_angle_and_back() {
        let (sequences, length, heads, width, stride) = (2, 7, 3, 10, 41);
        let rows = sequences * length;
        let x = random(1, rows * stride);
        let mut expected: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for row in 0..rows {
            for head in 0..heads {
                for i in 0..width / 2 {
                    let first = row * stride + head * width + i;
                    let second = first + width / 2;
                    let angle = (row % length) as f64 * THETA.powf(-2.0 * i as f64 / width as f64);
                    let (a, b) = (expected[first], expected[second]);
                    expected[first] = a * angle.cos() - b * angle.sin();
                    expected[second] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        let table = RopeTable::new(length, width, &Rope::plain(THETA, width as u64));
        let positions = PositionRuns::consecutive(0, length);
        let mut rotated = x.clone();
        let view = MatrixViewMut::strided(&mut rotated, rows, heads * width, stride);
        rope_forward(view, &table, positions, Parallel::SERIAL);
        assert_close(&rotated, &expected, 1e-6);
        // The derivative of a rotation is its transpose, which is its inverse.
        let view = MatrixViewMut::strided(&mut rotated, rows, heads * width, stride);
        rope_backward(view, &table, positions, Parallel::SERIAL);
        assert_close_f32(&rotated, &x, 1e-6);
    }

    /// The second of two devices that divide positions, with any number of threads.
    #[test]
    fn a_shard_of_positions_rotates_like_the_whole() {
        let (sequences, length, columns) = (16, 32, 64);
        let x = random(1, sequences * length * columns);
        let table = RopeTable::new(length, 64, &Rope::plain(THETA, 64));
        let mut whole = x.clone();
        let view = MatrixViewMut::new(&mut whole, sequences * length, columns);
        rope_forward(view, &table, PositionRuns::consecutive(0, length), Parallel::SERIAL);
        let half = length / 2;
        let second_half = |x: &[f32]| -> Vec<f32> {
            let sequences = x.chunks_exact(length * columns);
            sequences.flat_map(|x| x[half * columns..].to_vec()).collect()
        };
        let positions = PositionRuns::consecutive(half, half);
        for threads in [1, 2, 3] {
            let mut shard = second_half(&x);
            let view = MatrixViewMut::new(&mut shard, sequences * half, columns);
            rope_forward(view, &table, positions, Parallel::new(threads));
            assert_eq!(shard, second_half(&whole));
        }
    }
}
