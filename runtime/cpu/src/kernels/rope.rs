//! Rotary position embedding on half-rotated pairs, in place.
//!
//! Of a head of width w, features i and i + w/2 turn by the angle p·θ^(−2i/w) at position p:
//! (a, b) becomes (a·cos − b·sin, b·cos + a·sin). Backward turns the gradients back.

use super::parallel::{FirstRow, SharedOperand};
use super::simd::{Simd, SimdBody};
use super::{MatrixViewMut, Parallel};

/// Cosines and sines of all positions, computed in f64 once a session.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// For every position, w/2 cosines and then w/2 sines.
    angles: Vec<f32>,
    head_dim: usize,
}

impl RopeTable {
    /// For positions 0 to `positions` − 1.
    pub fn new(positions: usize, head_dim: usize, theta: f64) -> Self {
        assert!(
            head_dim.is_multiple_of(2),
            "features turn in pairs: a head of {head_dim} has none for one"
        );
        let half = head_dim / 2;
        let mut angles = Vec::with_capacity(positions * head_dim);
        for position in 0..positions {
            let turn = |i: usize| position as f64 * theta.powf(-2.0 * i as f64 / head_dim as f64);
            angles.extend((0..half).map(|i| turn(i).cos() as f32));
            angles.extend((0..half).map(|i| turn(i).sin() as f32));
        }
        RopeTable { angles, head_dim }
    }

    #[inline(always)]
    fn at(&self, position: usize) -> (&[f32], &[f32]) {
        self.angles[position * self.head_dim..][..self.head_dim].split_at(self.head_dim / 2)
    }
}

/// Which position a row has: rows are `[sequences, positions]` of the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionRange {
    /// The position of the shard's first token in its sequence.
    pub first: usize,
    /// Positions of each sequence that this device holds.
    pub count: usize,
}

/// `Rope`: turns all heads of `x`, `[tokens, heads·w]`.
pub fn rope_forward(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    parallel: Parallel,
) {
    run(x, table, positions, 1.0, parallel);
}

/// `RopeBackward`: turns gradients back.
pub fn rope_backward(
    dx: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    parallel: Parallel,
) {
    run(dx, table, positions, -1.0, parallel);
}

fn run(
    x: MatrixViewMut<'_>,
    table: &RopeTable,
    positions: PositionRange,
    sign: f32,
    parallel: Parallel,
) {
    assert_eq!(x.columns() % table.head_dim, 0, "whole heads of {}", table.head_dim);
    let work =
        (FirstRow(0), x, SharedOperand(table), SharedOperand(positions), SharedOperand(sign));
    parallel.for_rows::<RotateRows, _>(work.1.rows(), work);
}

type RotaryRows<'a> = (
    FirstRow,
    MatrixViewMut<'a>,
    SharedOperand<&'a RopeTable>,
    SharedOperand<PositionRange>,
    SharedOperand<f32>,
);

struct RotateRows;

impl SimdBody<RotaryRows<'_>> for RotateRows {
    #[inline(always)]
    fn run<S: Simd>(
        (
            FirstRow(first),
            mut x,
            SharedOperand(table),
            SharedOperand(positions),
            SharedOperand(sign),
        ): RotaryRows<'_>,
    ) {
        for row in 0..x.rows() {
            let (cos, sin) = table.at(positions.first + (first + row) % positions.count);
            for head in x.row_mut(row).chunks_exact_mut(table.head_dim) {
                let (a, b) = head.split_at_mut(table.head_dim / 2);
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
    use crate::kernels::testing::{assert_close, assert_same, random};

    const THETA: f64 = 10_000.0;

    #[test]
    fn pairs_turn_by_their_angle() {
        let (sequences, length, heads, width, stride) = (2, 7, 3, 10, 41);
        let rows = sequences * length;
        let x = random(1, rows * stride);
        let mut wanted: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for row in 0..rows {
            for head in 0..heads {
                for i in 0..width / 2 {
                    let first = row * stride + head * width + i;
                    let second = first + width / 2;
                    let angle = (row % length) as f64 * THETA.powf(-2.0 * i as f64 / width as f64);
                    let (a, b) = (wanted[first], wanted[second]);
                    wanted[first] = a * angle.cos() - b * angle.sin();
                    wanted[second] = b * angle.cos() + a * angle.sin();
                }
            }
        }
        let table = RopeTable::new(length, width, THETA);
        let positions = PositionRange { first: 0, count: length };
        let mut made = x.clone();
        let view = MatrixViewMut::strided(&mut made, rows, heads * width, stride);
        rope_forward(view, &table, positions, Parallel::SERIAL);
        assert_close(&made, &wanted, 1e-6);
        // A rotation's derivative is its transpose, and that is its inverse.
        let view = MatrixViewMut::strided(&mut made, rows, heads * width, stride);
        rope_backward(view, &table, positions, Parallel::SERIAL);
        assert_same(&made, &x, 1e-6);
    }

    /// The second of two devices that cut positions, and any number of threads, turn alike.
    #[test]
    fn shards_of_positions() {
        let (sequences, length, columns) = (16, 32, 64);
        let x = random(1, sequences * length * columns);
        let table = RopeTable::new(length, 64, THETA);
        let mut whole = x.clone();
        let view = MatrixViewMut::new(&mut whole, sequences * length, columns);
        rope_forward(view, &table, PositionRange { first: 0, count: length }, Parallel::SERIAL);
        let half = length / 2;
        let second = |x: &[f32]| -> Vec<f32> {
            let sequences = x.chunks_exact(length * columns);
            sequences.flat_map(|x| x[half * columns..].to_vec()).collect()
        };
        for threads in [1, 2, 3] {
            let mut shard = second(&x);
            let view = MatrixViewMut::new(&mut shard, sequences * half, columns);
            rope_forward(
                view,
                &table,
                PositionRange { first: half, count: half },
                Parallel::new(threads),
            );
            assert_eq!(shard, second(&whole));
        }
    }
}
