//! cublasLtMatmul as it is documented, one number at a time.

use narrows_cuda::products::{Matmul, MatmulKey, MatrixAddress, StoredMatrix, Transpose};
use narrows_plan::DType;

use super::numbers::{bf16_bits, of_bf16};

/// Numbers of a format.
pub fn numbers(bytes: &[u8], dtype: DType) -> Vec<f32> {
    bytes.chunks_exact(dtype.width() as usize).map(|bytes| number(bytes, dtype)).collect()
}

/// The bytes of numbers.
pub fn bytes_of(numbers: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => numbers.iter().flat_map(|x| bf16_bits(*x).to_le_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn number(bytes: &[u8], dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => of_bf16(u16::from_le_bytes([bytes[0], bytes[1]])),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// A member of a batch, column-major: the number in a row and a column is at `column·leading + row`.
#[derive(Clone, Copy)]
struct Member {
    begin: u64,
    stored: StoredMatrix,
}

impl Member {
    fn new(place: MatrixAddress, stored: StoredMatrix, member: u64) -> Member {
        let begin = place.offset + member * stored.batch_stride * stored.dtype.width();
        Member { begin, stored }
    }

    fn at(&self, row: u64, column: u64) -> std::ops::Range<usize> {
        let width = self.stored.dtype.width();
        let begin = (self.begin + (column * self.stored.leading + row) * width) as usize;
        begin..begin + width as usize
    }

    fn read(&self, arena: &[u8], row: u64, column: u64) -> f64 {
        number(&arena[self.at(row, column)], self.stored.dtype).into()
    }

    fn write(&self, arena: &mut [u8], (row, column): (u64, u64), number: f64) {
        let at = self.at(row, column);
        match self.stored.dtype {
            DType::Bf16 => arena[at].copy_from_slice(&bf16_bits(number as f32).to_le_bytes()),
            _ => arena[at].copy_from_slice(&(number as f32).to_le_bytes()),
        }
    }

    /// All numbers of op of it, of so many rows and columns, row by row.
    fn factor(&self, arena: &[u8], operation: Transpose, rows: u64, columns: u64) -> Vec<f64> {
        let places = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let read = |(row, column)| match operation {
            Transpose::N => self.read(arena, row, column),
            Transpose::T => self.read(arena, column, row),
        };
        places.map(read).collect()
    }
}

/// C = op(A)·op(B) + β·C for every member. Sums are exact, and rounded once.
pub fn execute(arena: &mut [u8], matmul: &Matmul) {
    let MatmulKey { m, n, k, batch, operation_a, operation_b, accumulate, .. } = matmul.key;
    for member in 0..batch {
        let member = |place, stored| Member::new(place, stored, member);
        let a = member(matmul.a, matmul.key.a).factor(arena, operation_a, m, k);
        let b = member(matmul.b, matmul.key.b).factor(arena, operation_b, k, n);
        let c = member(matmul.c, matmul.key.c);
        for row in 0..m {
            let mut sums = vec![0.0; n as usize];
            for inner in 0..k {
                let x = a[(row * k + inner) as usize];
                let others = &b[(inner * n) as usize..][..n as usize];
                sums.iter_mut().zip(others).for_each(|(sum, y)| *sum += x * y);
            }
            for (column, sum) in (0..n).zip(sums) {
                let before = if accumulate { c.read(arena, row, column) } else { 0.0 };
                c.write(arena, (row, column), before + sum);
            }
        }
    }
}
