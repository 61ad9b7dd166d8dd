//! The embedding: `Gather` and `ScatterAdd`.
//!
//! The table is `[vocabulary, width]` or a shard of it: the rows from token id `first_id`, while
//! other devices hold the other token ids, or some of the columns. Token ids outside the whole
//! vocabulary are an error of the caller, which is not detected here.

use super::matrix::{MatrixView, MatrixViewMut};
use super::parallel::{ColumnRows, Parallel, SharedOperand};
use super::simd::{Simd, SimdBody};

/// `Gather`: the table row of each token, `[tokens, width]`; zeros for tokens outside the shard.
pub fn embedding_gather(
    tokens: &[u32],
    table: MatrixView<'_>,
    first_id: usize,
    output: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(output.rows() == tokens.len() && output.columns() == table.columns());
    let operands = (tokens, output, SharedOperand(table), SharedOperand(first_id));
    parallel.for_rows::<GatherRows, _>(tokens.len(), operands);
}

type GatherOperands<'a> =
    (&'a [u32], MatrixViewMut<'a>, SharedOperand<MatrixView<'a>>, SharedOperand<usize>);

struct GatherRows;

impl SimdBody<GatherOperands<'_>> for GatherRows {
    #[inline(always)]
    fn run<S: Simd>(
        (tokens, mut output, SharedOperand(table), SharedOperand(first_id)): GatherOperands<'_>,
    ) {
        for (row, token) in tokens.iter().enumerate() {
            let output = output.row_mut(row);
            match local_index(*token, first_id, table.rows()) {
                Some(local_row) => output.copy_from_slice(table.row(local_row)),
                None => output.fill(0.0),
            }
        }
    }
}

/// Index of a token id in a shard of `count` ids from `first_id`; `None` outside the shard.
#[inline(always)]
pub(super) fn local_index(token: u32, first_id: usize, count: usize) -> Option<usize> {
    (token as usize).checked_sub(first_id).filter(|index| *index < count)
}

/// Tokens of a lookup whose gradient is scattered.
#[derive(Clone, Copy)]
pub struct LookupTokens<'a> {
    /// Token ids, also those of other shards.
    pub ids: &'a [u32],
    /// The token whose row gets no gradient.
    pub padding: Option<u32>,
}

/// `ScatterAdd`: adds the gradient of each token but the padding token to its row of the table's gradient,
/// in the order of the tokens. Threads divide the columns, so the sums do not depend on their number.
pub fn embedding_scatter_add(
    tokens: LookupTokens<'_>,
    dy: MatrixView<'_>,
    first_id: usize,
    dtable: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert!(dy.rows() == tokens.ids.len() && dy.columns() == dtable.columns());
    let shared = (SharedOperand(tokens), SharedOperand(first_id));
    let operands = (ColumnRows(dy), ColumnRows(dtable), shared);
    parallel.for_rows::<ScatterAddColumns, _>(dy.columns(), operands);
}

type ScatterAddOperands<'a> = (
    ColumnRows<MatrixView<'a>>,
    ColumnRows<MatrixViewMut<'a>>,
    (SharedOperand<LookupTokens<'a>>, SharedOperand<usize>),
);

struct ScatterAddColumns;

impl SimdBody<ScatterAddOperands<'_>> for ScatterAddColumns {
    #[inline(always)]
    fn run<S: Simd>((ColumnRows(dy), ColumnRows(mut dtable), shared): ScatterAddOperands<'_>) {
        let (SharedOperand(tokens), SharedOperand(first_id)) = shared;
        for (row, token) in tokens.ids.iter().enumerate() {
            if tokens.padding == Some(*token) {
                continue;
            }
            if let Some(local_row) = local_index(*token, first_id, dtable.rows()) {
                for (sum, dy) in dtable.row_mut(local_row).iter_mut().zip(dy.row(row)) {
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

    #[test]
    fn gathered_shards_combine_to_the_whole() {
        let (tokens, table) = (tokens(), random(1, VOCABULARY * WIDTH));
        let table = MatrixView::new(&table, VOCABULARY, WIDTH);
        let expected: Vec<f32> =
            tokens.iter().flat_map(|token| table.row(*token as usize).to_vec()).collect();
        let rows = tokens.len();
        for threads in [1, 2] {
            let parallel = Parallel::new(threads);
            let mut sum = vec![0.0; rows * WIDTH];
            for device in 0..4 {
                let mut partial = vec![f32::NAN; rows * WIDTH];
                let (shard, first_id) = (table.row_range(device * 10, 10), device * 10);
                let output = MatrixViewMut::new(&mut partial, rows, WIDTH);
                embedding_gather(&tokens, shard, first_id, output, parallel);
                sum.iter_mut().zip(&partial).for_each(|(sum, partial)| *sum += partial);
            }
            assert_eq!(sum, expected);
            let output = MatrixViewMut::new(&mut sum, rows, WIDTH).column_range(65, 65);
            embedding_gather(&tokens, table.column_range(65, 65), 0, output, parallel);
            assert_eq!(sum, expected);
        }
    }

    #[test]
    fn scatter_add_is_bitwise_equal_with_any_number_of_threads() {
        let (ids, dy) = (tokens(), random(2, 200 * WIDTH));
        let dy = MatrixView::new(&dy, 200, WIDTH);
        for (threads, padding) in [(1, None), (2, Some(ids[3])), (3, Some(ids[0]))] {
            let mut expected = vec![0.5; VOCABULARY * WIDTH];
            for (row, id) in ids.iter().enumerate().filter(|(_, id)| padding != Some(**id)) {
                let sums = &mut expected[*id as usize * WIDTH..][..WIDTH];
                sums.iter_mut().zip(dy.row(row)).for_each(|(sum, dy)| *sum += dy);
            }
            let mut dtable = vec![0.5; VOCABULARY * WIDTH];
            let (parallel, tokens) = (Parallel::new(threads), LookupTokens { ids: &ids, padding });
            for (device, shard) in dtable.chunks_exact_mut(10 * WIDTH).enumerate() {
                let shard = MatrixViewMut::new(shard, 10, WIDTH);
                embedding_scatter_add(tokens, dy, device * 10, shard, parallel);
            }
            assert_eq!(dtable, expected);
        }
    }
}
