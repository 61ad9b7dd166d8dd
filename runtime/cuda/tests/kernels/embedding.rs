//! The embedding.

use narrows_cpu::kernels::{
    LookupTokens, MatrixView, MatrixViewMut, Parallel, embedding_gather, embedding_scatter_add,
};
use narrows_plan::DType;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

const FORMATS: [DType; 2] = [DType::Bf16, DType::F32];
const SERIAL: Parallel = Parallel::SERIAL;
const VOCABULARY: u64 = 40;

fn tokens(count: u64) -> Vec<u32> {
    // Frequent, rare and missing tokens.
    random_values(7, count).iter().map(|x| (x * x * VOCABULARY as f32) as u32).collect()
}

/// Tokens, columns, entries of the vocabulary shard, and the device that holds it.
const TABLES: [(u64, u64, u64, u64); 5] =
    [(1, 1, 40, 0), (7, 64, 40, 0), (300, 33, 20, 1), (1500, 24, 10, 2), (20, 2056, 10, 0)];

#[test]
fn embeddings_match_the_cpu() {
    for (count, columns, local, device) in TABLES {
        let ids = tokens(count);
        let first = (device * local) as usize;
        let [rows, width, table_rows] = [count, columns, local].map(|size| size as usize);
        for dtype in FORMATS {
            let table = rounded(dtype, random_values(1, local * columns));
            let mut case = KernelCase::new(FusedOp::Gather, VOCABULARY / local, (1, count));
            (case.tensor, case.constants.vocab) = (device, VOCABULARY);
            let reads = [case.token_ids(&ids), case.buffer((local, columns), dtype, Some(&table))];
            let out = case.buffer((count, columns), dtype, None);
            case.reads(&reads).writes(&[out]);
            let Some(outcome) = case.run() else { return };
            let mut expected = vec![0.0; rows * width];
            let view = MatrixView::new(&table, table_rows, width);
            let result = MatrixViewMut::new(&mut expected, rows, width);
            embedding_gather(&ids, view, first, result, SERIAL);
            assert_eq!(outcome.elements(out), expected);

            let (dy, before) = (
                rounded(dtype, random_values(2, count * columns)),
                random_values(3, local * columns),
            );
            let mut case = KernelCase::new(FusedOp::ScatterAdd, VOCABULARY / local, (1, count));
            (case.tensor, case.constants.vocab) = (device, VOCABULARY);
            let padding = (dtype == DType::F32).then_some(ids[0]);
            case.constants.padding_token = padding.map(u64::from);
            let ids_buffer = case.token_ids(&ids);
            let sum = case.buffer((local, columns), DType::F32, Some(&before));
            let dy_buffer = case.buffer((count, columns), dtype, Some(&dy));
            case.reads(&[ids_buffer, sum, dy_buffer]).writes(&[sum]);
            let Some(outcome) = case.run() else { return };
            let mut expected = before;
            let result = MatrixViewMut::new(&mut expected, table_rows, width);
            let tokens = LookupTokens { ids: &ids, padding };
            embedding_scatter_add(tokens, MatrixView::new(&dy, rows, width), first, result, SERIAL);
            assert_near(DType::F32, &outcome.elements(sum), &expected, 2e-6);
        }
    }
}
