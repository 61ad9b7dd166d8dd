//! cublasLtMatmul as NVIDIA documents it, with exact sums.

use narrows_cuda::{Matmul, MatmulKey, MatrixAddress, StoredMatrix, Transpose};
use narrows_plan::DType;

use super::formats::{bf16_bits, decode};

/// A member of a batch, column-major: the element in a row and a column has the index `column·leading + row`.
#[derive(Clone, Copy)]
struct BatchMember {
    /// Offset of the first byte in the arena.
    begin: usize,
    stored: StoredMatrix,
}

impl BatchMember {
    fn new(address: MatrixAddress, stored: StoredMatrix, member: u64) -> BatchMember {
        let begin = address.offset + member * stored.batch_stride * stored.dtype.width();
        BatchMember { begin: begin as usize, stored }
    }

    /// Bytes of a column.
    fn column(&self, column: u64) -> std::ops::Range<usize> {
        let width = self.stored.dtype.width();
        let begin = self.begin + (column * self.stored.leading_dimension * width) as usize;
        begin..begin + (self.stored.rows * width) as usize
    }

    fn read_column(&self, arena: &[u8], column: u64) -> Vec<f64> {
        let elements = decode(&arena[self.column(column)], self.stored.dtype);
        elements.into_iter().map(f64::from).collect()
    }

    fn write_column(&self, arena: &mut [u8], column: u64, elements: &[f64]) {
        let bytes = &mut arena[self.column(column)];
        match self.stored.dtype {
            DType::Bf16 => bytes.chunks_exact_mut(2).zip(elements).for_each(|(to, element)| {
                to.copy_from_slice(&bf16_bits(*element as f32).to_le_bytes());
            }),
            _ => bytes.chunks_exact_mut(4).zip(elements).for_each(|(to, element)| {
                to.copy_from_slice(&(*element as f32).to_le_bytes());
            }),
        }
    }

    /// op of the matrix, as its columns.
    fn columns(&self, arena: &[u8], operation: Transpose) -> Vec<Vec<f64>> {
        let columns: Vec<Vec<f64>> =
            (0..self.stored.columns).map(|column| self.read_column(arena, column)).collect();
        match operation {
            Transpose::N => columns,
            Transpose::T => (0..self.stored.rows as usize)
                .map(|row| columns.iter().map(|column| column[row]).collect())
                .collect(),
        }
    }
}

/// D = op(A)·op(B) + β·C for every member of the batch. Sums are in f64, in the order of k, and rounded once.
pub fn execute(arena: &mut [u8], matmul: &Matmul) {
    let MatmulKey { m, n, batch, operation_a, operation_b, accumulate, .. } = matmul.key;
    for member in 0..batch {
        let member = |address, stored| BatchMember::new(address, stored, member);
        let a = member(matmul.a, matmul.key.a).columns(arena, operation_a);
        let b = member(matmul.b, matmul.key.b).columns(arena, operation_b);
        let [c, d] = [matmul.c, matmul.d].map(|address| member(address, matmul.key.c));
        for (column, factors) in (0..n).zip(&b) {
            let mut sums = vec![0.0; m as usize];
            for (a_column, factor) in a.iter().zip(factors) {
                sums.iter_mut().zip(a_column).for_each(|(sum, x)| *sum += x * factor);
            }
            if accumulate {
                let before = c.read_column(arena, column);
                sums.iter_mut().zip(before).for_each(|(sum, before)| *sum += before);
            }
            d.write_column(arena, column, &sums);
        }
    }
}
