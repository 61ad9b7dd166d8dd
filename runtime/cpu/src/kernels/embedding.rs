//! The embedding: `Gather` and `ScatterAdd`.
//!
//! The table is `[vocabulary, width]`, or a shard of it: the rows from `first` (other tokens are
//! another device's), or some columns. A token outside the whole vocabulary is the caller's error.

use super::parallel::{ColumnRows, SharedOperand};
use super::simd::{Simd, SimdBody};
use super::{MatrixView, MatrixViewMut, Parallel};

/// `Gather`: the row of each token; zeros for tokens outside the shard.
pub fn embedding_gather(
    tokens: &[u32],
    table: MatrixView<'_>,
    first: usize,
    out: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(out.rows() == tokens.len() && out.columns() == table.columns());
    parallel.for_rows::<GatherRows, _>(
        tokens.len(),
        (tokens, out, SharedOperand(table), SharedOperand(first)),
    );
}

type Gather<'a> =
    (&'a [u32], MatrixViewMut<'a>, SharedOperand<MatrixView<'a>>, SharedOperand<usize>);

struct GatherRows;

impl SimdBody<Gather<'_>> for GatherRows {
    #[inline(always)]
    fn run<S: Simd>((tokens, mut out, SharedOperand(table), SharedOperand(first)): Gather<'_>) {
        for (row, token) in tokens.iter().enumerate() {
            let out = out.row_mut(row);
            match local(*token, first, table.rows()) {
                Some(at) => out.copy_from_slice(table.row(at)),
                None => out.fill(0.0),
            }
        }
    }
}

#[inline(always)]
fn local(token: u32, first: usize, rows: usize) -> Option<usize> {
    (token as usize).checked_sub(first).filter(|at| *at < rows)
}

/// `ScatterAdd`: adds each token's gradient to its row of the table's gradient, in the order of the
/// tokens, whatever the threads: they divide the columns.
pub fn embedding_scatter_add(
    tokens: &[u32],
    dy: MatrixView<'_>,
    first: usize,
    dtable: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(dy.rows() == tokens.len() && dy.columns() == dtable.columns());
    let work = (ColumnRows(dy), ColumnRows(dtable), SharedOperand(tokens), SharedOperand(first));
    parallel.for_rows::<ScatterColumns, _>(dy.columns(), work);
}

type Scatter<'a> = (
    ColumnRows<MatrixView<'a>>,
    ColumnRows<MatrixViewMut<'a>>,
    SharedOperand<&'a [u32]>,
    SharedOperand<usize>,
);

struct ScatterColumns;

impl SimdBody<Scatter<'_>> for ScatterColumns {
    #[inline(always)]
    fn run<S: Simd>(
        (ColumnRows(dy), ColumnRows(mut dtable), SharedOperand(tokens), SharedOperand(first)): Scatter<'_>,
    ) {
        for (row, token) in tokens.iter().enumerate() {
            if let Some(at) = local(*token, first, dtable.rows()) {
                for (sum, dy) in dtable.row_mut(at).iter_mut().zip(dy.row(row)) {
                    *sum += dy;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::random;

    const VOCABULARY: usize = 40;
    const WIDTH: usize = 130;

    fn tokens() -> Vec<u32> {
        random(7, 200).iter().map(|x| ((x + 1.0) * 20.0) as u32).collect()
    }

    /// Shards of the vocabulary sum to the whole, shards of the features lie side by side.
    #[test]
    fn gathers() {
        let (tokens, table) = (tokens(), random(1, VOCABULARY * WIDTH));
        let table = MatrixView::new(&table, VOCABULARY, WIDTH);
        let wanted: Vec<f32> =
            tokens.iter().flat_map(|token| table.row(*token as usize).to_vec()).collect();
        let rows = tokens.len();
        for threads in [1, 2] {
            let parallel = Parallel::new(threads);
            let mut sum = vec![0.0; rows * WIDTH];
            for device in 0..4 {
                let mut part = vec![f32::NAN; rows * WIDTH];
                let shard = table.row_range(device * 10, 10);
                embedding_gather(
                    &tokens,
                    shard,
                    device * 10,
                    MatrixViewMut::new(&mut part, rows, WIDTH),
                    parallel,
                );
                sum.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part);
            }
            assert_eq!(sum, wanted);
            let out = MatrixViewMut::new(&mut sum, rows, WIDTH).column_range(65, 65);
            embedding_gather(&tokens, table.column_range(65, 65), 0, out, parallel);
            assert_eq!(sum, wanted);
        }
    }

    /// Bitwise equal whatever the threads, and to one sum for each row.
    #[test]
    fn scatters() {
        let (tokens, dy) = (tokens(), random(2, 200 * WIDTH));
        let dy = MatrixView::new(&dy, 200, WIDTH);
        let mut wanted = vec![0.5; VOCABULARY * WIDTH];
        for (row, token) in tokens.iter().enumerate() {
            let sums = &mut wanted[*token as usize * WIDTH..][..WIDTH];
            sums.iter_mut().zip(dy.row(row)).for_each(|(sum, dy)| *sum += dy);
        }
        for threads in [1, 2, 3] {
            let mut made = vec![0.5; VOCABULARY * WIDTH];
            for (device, shard) in made.chunks_exact_mut(10 * WIDTH).enumerate() {
                let shard = MatrixViewMut::new(shard, 10, WIDTH);
                embedding_scatter_add(&tokens, dy, device * 10, shard, Parallel::new(threads));
            }
            assert_eq!(made, wanted);
        }
    }
}
