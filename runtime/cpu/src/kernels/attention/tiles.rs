//! Shapes, tiles, scratch memory and the division among threads, for forward and backward.

use narrows_runtime::session::PositionRuns;

use crate::kernels::matrix::{MatrixView, MatrixViewMut};
use crate::kernels::parallel::{ColumnRows, GroupedRows, Parallel, ParallelRows, TaskScratch};
use crate::kernels::simd::{Simd, SimdBody};

/// Queries of a tile.
pub(crate) const TILE_QUERIES: usize = 64;
/// Keys of a tile, at most.
pub(crate) const TILE_KEYS: usize = 256;

/// Sizes of the attention of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens of a sequence with keys, of consecutive positions from 0.
    pub length: usize,
    /// Positions of the queries of a sequence. They may lie after the last key, where there is only a part of the keys.
    pub queries: PositionRuns,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, which divide the query heads.
    pub kv_heads: usize,
    /// Features of a head, w.
    pub head_dim: usize,
    /// Keys that a query attends to, at most; no fewer than the positions of a sequence where there is no sliding window.
    pub window: usize,
}

/// Queries of consecutive positions.
pub(crate) struct QueryTile {
    /// Row of the first query in its sequence.
    pub row: usize,
    /// Position of the first query.
    pub position: usize,
    /// Number of queries, at most [`TILE_QUERIES`].
    pub count: usize,
}

/// The keys that the queries of a tile attend to.
#[derive(Clone, Copy)]
pub(crate) struct TileMask {
    /// Position of the first query of the tile.
    pub first_query: usize,
    /// First key of the tile.
    pub first_key: usize,
    /// Keys of a query, at most.
    pub window: usize,
}

impl TileMask {
    /// The first of the tiles of keys with one that the queries from `first_query` on attend to. It is a multiple of
    /// [`TILE_QUERIES`], and every query of a tile attends to a key of it. Later tiles may have keys after the first
    /// queries.
    pub(super) fn first_key(shape: AttentionShape, first_query: usize) -> usize {
        (first_query + 1).saturating_sub(shape.window) / TILE_QUERIES * TILE_QUERIES
    }

    /// Splits a row of a tile into keys that are too early for its query, visible keys, and keys after the query.
    #[inline(always)]
    pub fn split(self, row: usize, keys: &mut [f32]) -> [&mut [f32]; 3] {
        let end = self.first_query + row + 1;
        let visible_end = end.saturating_sub(self.first_key).min(keys.len());
        let (visible, later) = keys.split_at_mut(visible_end);
        let start = end.saturating_sub(self.window).saturating_sub(self.first_key);
        let (earlier, visible) = visible.split_at_mut(start.min(visible_end));
        [earlier, visible, later]
    }
}

impl AttentionShape {
    /// Scratch elements of forward and of backward.
    pub fn scratch_elements(&self, parallel: Parallel) -> usize {
        parallel.threads() * self.task_scratch_elements()
    }

    /// Two tiles, and the transposes of k and v of one head.
    fn task_scratch_elements(&self) -> usize {
        2 * self.tile_elements() + 2 * self.length * self.head_dim
    }

    fn tile_elements(&self) -> usize {
        TILE_QUERIES * TILE_KEYS.min(self.length)
    }

    /// Queries of all sequences.
    pub(super) fn query_rows(&self) -> usize {
        self.sequences * self.queries.count
    }

    /// The queries of a sequence in tiles of consecutive positions.
    pub(super) fn query_tiles(self) -> impl Iterator<Item = QueryTile> {
        let mut row = 0;
        self.queries.runs().flat_map(move |run| {
            let first_row = row;
            row += run.len();
            run.clone().step_by(TILE_QUERIES).map(move |position| QueryTile {
                row: first_row + position - run.start,
                position,
                count: TILE_QUERIES.min(run.end - position),
            })
        })
    }

    /// Query heads of a key head.
    pub(super) fn queries_per_key(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// All pairs of a sequence and a query head.
    pub(super) fn sequence_heads(self) -> impl Iterator<Item = (usize, usize)> {
        let sequences = 0..self.sequences;
        sequences.flat_map(move |sequence| (0..self.heads).map(move |head| (sequence, head)))
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Asserts the sizes (rows, columns) of operands with query heads and of operands with key heads.
    pub(super) fn check(&self, query_sizes: &[(usize, usize)], key_sizes: &[(usize, usize)]) {
        assert!(self.heads.is_multiple_of(self.kv_heads), "{self:?}");
        let fits = |sizes: &[(usize, usize)], rows: usize, heads: usize| {
            sizes.iter().all(|size| *size == (self.sequences * rows, heads * self.head_dim))
        };
        let queries_fit = fits(query_sizes, self.queries.count, self.heads);
        assert!(queries_fit && fits(key_sizes, self.length, self.kv_heads), "{self:?}");
    }

    /// The shape of a task's part of the operands.
    pub(super) fn of_task(self, q: &MatrixView<'_>, k: &MatrixView<'_>) -> AttentionShape {
        AttentionShape {
            sequences: q.rows() / self.queries.count,
            heads: q.columns() / self.head_dim,
            kv_heads: k.columns() / self.head_dim,
            ..self
        }
    }
}

/// Whether threads divide sequences: where there are enough of them. Otherwise they divide key heads.
pub(crate) fn divides_sequences(shape: AttentionShape, parallel: Parallel) -> bool {
    shape.sequences.is_multiple_of(parallel.threads()) || shape.sequences >= 4 * parallel.threads()
}

/// Scratch memory divided among tasks.
pub(crate) fn task_scratch(shape: AttentionShape, scratch: &mut [f32]) -> TaskScratch<'_> {
    TaskScratch { elements_per_task: shape.task_scratch_elements(), memory: scratch }
}

/// An operand divided by sequences, of each of which it has this many rows.
pub(crate) fn by_sequence<T: ParallelRows>(rows: usize, operand: T) -> GroupedRows<T> {
    GroupedRows { group_size: rows, operand }
}

/// An operand divided by key heads, each of which has `columns` columns.
pub(crate) fn by_key_head<T>(columns: usize, operand: T) -> GroupedRows<ColumnRows<T>>
where
    ColumnRows<T>: ParallelRows,
{
    GroupedRows { group_size: columns, operand: ColumnRows(operand) }
}

/// Scratch memory of one task.
pub(crate) struct AttentionScratch<'a> {
    /// Two tiles, `[queries, keys]`.
    pub tiles: (&'a mut [f32], &'a mut [f32]),
    /// Transposes of k and v of one head, `[w, length]`.
    pub transposed: (&'a mut [f32], &'a mut [f32]),
}

impl<'a> AttentionScratch<'a> {
    pub fn new(shape: AttentionShape, scratch: TaskScratch<'a>) -> Self {
        let memory = &mut scratch.memory[..scratch.elements_per_task];
        let (tiles, transposed) = memory.split_at_mut(2 * shape.tile_elements());
        AttentionScratch {
            tiles: tiles.split_at_mut(shape.tile_elements()),
            transposed: transposed.split_at_mut(shape.length * shape.head_dim),
        }
    }
}

/// Writes the transpose of a view to a slice.
pub(crate) struct TransposeMatrix;

impl SimdBody<(MatrixView<'_>, &mut [f32])> for TransposeMatrix {
    #[inline(always)]
    fn run<S: Simd>((from, to): (MatrixView<'_>, &mut [f32])) {
        const BLOCK_ROWS: usize = 16;
        let (rows, columns) = (from.rows(), from.columns());
        for first in (0..rows).step_by(BLOCK_ROWS) {
            let count = BLOCK_ROWS.min(rows - first);
            for column in 0..columns {
                let to = &mut to[column * rows + first..][..count];
                for (row, to) in to.iter_mut().enumerate() {
                    *to = from.row(first + row)[column];
                }
            }
        }
    }
}

/// One head of one sequence, `[rows, w]`.
pub(crate) fn head_view(
    shape: AttentionShape,
    operand: MatrixView<'_>,
    sequence: usize,
    head: usize,
) -> MatrixView<'_> {
    let columns = operand.column_range(head * shape.head_dim, shape.head_dim);
    let rows = operand.rows() / shape.sequences;
    columns.row_range(sequence * rows, rows)
}

/// One head of one sequence, `[rows, w]`.
pub(crate) fn head_view_mut<'a>(
    shape: AttentionShape,
    operand: &'a mut MatrixViewMut<'_>,
    sequence: usize,
    head: usize,
) -> MatrixViewMut<'a> {
    let rows = operand.rows() / shape.sequences;
    let columns = operand.reborrow().column_range(head * shape.head_dim, shape.head_dim);
    columns.row_range(sequence * rows, rows)
}
