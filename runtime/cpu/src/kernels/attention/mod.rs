//! Causal attention in linear memory, by tiles.
//!
//! Of one head, with q, k, v `[length, w]` and scale w^-½: S = scale·q·kᵀ where key ≤ query,
//! P = softmax(S), out = P·v, and lse = ln Σ exp(S) of each row. A tile is some queries by some
//! keys; its two products are those of [`multiply`](super::matrix::multiply), and what lies above
//! the diagonal is left out block by block. Forward keeps a running maximum and sum of each row
//! where the keys take more than one tile.
//!
//! Backward makes P = exp(S − lse) of each tile anew. With D = Σ dout⊙out of each row:
//! dv += Pᵀ·dout, dS = scale·P⊙(dout·vᵀ − D), dq += dS·k, dk += dSᵀ·q.
//!
//! A product whose operands both lie along the contracted features must be packed: k, and backward
//! v too, are transposed once a head instead of once a tile.
//!
//! Query head h reads key head h·kv_heads/heads. Tokens are whole sequences one after the other.
//! Shapes: q, out and their gradients `[tokens, heads·w]`; k, v and theirs `[tokens, kv_heads·w]`;
//! lse `[tokens, heads]`. Each is a view, so that q, k and v may be columns of one matrix.

mod backward;
mod forward;
#[cfg(test)]
mod tests;

pub use backward::{AttentionGradients, AttentionSaved, attention_backward};
pub use forward::attention_forward;

use super::parallel::{ColumnRows, GroupedRows, ParallelRows, TaskScratch};
use super::simd::{Simd, SimdBody};
use super::{MatrixView, MatrixViewMut, Parallel};

/// Queries of a tile.
const QUERIES: usize = 64;
/// Keys of a tile, at most.
const KEYS: usize = 256;

/// What one device attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; they divide the query heads.
    pub kv_heads: usize,
    /// Features of a head, w.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Numbers of scratch memory that both directions need.
    pub fn scratch_elements(&self, parallel: Parallel) -> usize {
        parallel.threads() * self.task_scratch()
    }

    /// Two tiles, and k and v of one head transposed.
    fn task_scratch(&self) -> usize {
        2 * self.tile() + 2 * self.length * self.head_dim
    }

    fn tile(&self) -> usize {
        QUERIES * KEYS.min(self.length)
    }

    fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    /// Query heads of a key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Sequences with their query heads.
    fn every_head(self) -> impl Iterator<Item = (usize, usize)> {
        let sequences = 0..self.sequences;
        sequences.flat_map(move |sequence| (0..self.heads).map(move |head| (sequence, head)))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    fn check(&self, of_queries: &[(usize, usize)], of_keys: &[(usize, usize)]) {
        assert!(self.heads.is_multiple_of(self.kv_heads), "{self:?}");
        let fits = |sizes: &[(usize, usize)], heads: usize| {
            sizes.iter().all(|size| *size == (self.tokens(), heads * self.head_dim))
        };
        assert!(fits(of_queries, self.heads) && fits(of_keys, self.kv_heads), "{self:?}");
    }
}

/// Divides among threads by sequences where there are enough of them, otherwise by key heads.
fn by_sequences(shape: AttentionShape, parallel: Parallel) -> bool {
    shape.sequences.is_multiple_of(parallel.threads()) || shape.sequences >= 4 * parallel.threads()
}

/// A part's tile memory.
fn lent(shape: AttentionShape, scratch: &mut [f32]) -> TaskScratch<'_> {
    TaskScratch { elements_per_task: shape.task_scratch(), memory: scratch }
}

/// An operand divided by sequences.
fn sequences<T: ParallelRows>(shape: AttentionShape, of: T) -> GroupedRows<T> {
    GroupedRows { group_size: shape.length, operand: of }
}

/// An operand of which each key head has `each` columns.
fn heads<T>(each: usize, of: T) -> GroupedRows<ColumnRows<T>>
where
    ColumnRows<T>: ParallelRows,
{
    GroupedRows { group_size: each, operand: ColumnRows(of) }
}

/// Scratch memory of one task.
struct AttentionScratch<'a> {
    /// Two tiles.
    tiles: (&'a mut [f32], &'a mut [f32]),
    /// Room for k and v of one head, `[w, length]`.
    transposed: (&'a mut [f32], &'a mut [f32]),
}

impl<'a> AttentionScratch<'a> {
    fn new(shape: AttentionShape, lent: TaskScratch<'a>) -> Self {
        let (tiles, transposed) =
            lent.memory[..lent.elements_per_task].split_at_mut(2 * shape.tile());
        AttentionScratch {
            tiles: tiles.split_at_mut(shape.tile()),
            transposed: transposed.split_at_mut(shape.length * shape.head_dim),
        }
    }
}

/// Writes the transpose of `of` to `to`.
struct Transpose;

impl SimdBody<(MatrixView<'_>, &mut [f32])> for Transpose {
    #[inline(always)]
    fn run<S: Simd>((of, to): (MatrixView<'_>, &mut [f32])) {
        const BLOCK: usize = 16;
        let (rows, columns) = (of.rows(), of.columns());
        for first in (0..rows).step_by(BLOCK) {
            let some = BLOCK.min(rows - first);
            for column in 0..columns {
                let to = &mut to[column * rows + first..][..some];
                for (row, to) in to.iter_mut().enumerate() {
                    *to = of.row(first + row)[column];
                }
            }
        }
    }
}

/// One head of one sequence.
fn head(shape: AttentionShape, of: MatrixView<'_>, sequence: usize, head: usize) -> MatrixView<'_> {
    let columns = of.column_range(head * shape.head_dim, shape.head_dim);
    columns.row_range(sequence * shape.length, shape.length)
}

fn head_mut<'a>(
    shape: AttentionShape,
    of: &'a mut MatrixViewMut<'_>,
    sequence: usize,
    head: usize,
) -> MatrixViewMut<'a> {
    let columns = of.reborrow().column_range(head * shape.head_dim, shape.head_dim);
    columns.row_range(sequence * shape.length, shape.length)
}
