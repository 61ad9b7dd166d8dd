//! GEMM of f32 matrices whose operands are rounded to bf16, on processors with AVX512_BF16.
//!
//! Products of bf16 numbers are exact in f32, in which they are accumulated. Blocks of both operands are packed, and
//! thereby rounded, into panels of rows of A and of columns of B: a [`Line`] of a panel has one pair of neighbours along
//! k for each of them. `vdpbf16ps` adds to 16 sums one product of pairs each. A tile of C has a panel of A and two of B;
//! its sums are registers, whose number bounds it.
//!
//! Each element of C is summed over k in blocks of [`BLOCK_K`] elements in ascending order, whichever tile the element
//! is in: no result depends on the division of C among threads.

#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::gemm_mode::supports_bf16;
use super::matrix::{MatrixView, MatrixViewMut, StridedMatrix, WriteMode};

/// Numbers in a vector register, and columns of a panel of B.
const LANES: usize = 16;
/// Rows of a tile of C and of a panel of A: 28 sums, two lines of B and a pair of A take 31 of 32 registers.
const TILE_ROWS: usize = 14;
/// Columns of a tile of C.
const TILE_COLUMNS: usize = 2 * LANES;
/// Elements along k that are packed at a time: a panel of A takes 16 KiB, a part of the L1 cache.
const BLOCK_K: usize = 512;
/// Rows of A that are packed at a time: 384 KiB, a part of the L2 cache.
const BLOCK_ROWS: usize = 24 * TILE_ROWS;
/// Columns of B that are packed at a time: 4 MiB, a part of the L3 cache.
const BLOCK_COLUMNS: usize = 4096;
/// Columns of B that a panel of A is multiplied with at a time: 256 KiB, a part of the L2 cache.
const GROUP_COLUMNS: usize = 256;
/// Panels of a matrix stored by columns that are packed at a time, since memory is read faster in longer runs.
const GROUP_PANELS: usize = 32;

/// One pair of bf16 neighbours along k for each row or column of a panel.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u32; LANES]);

thread_local! {
    /// Packed blocks of A and B, which grow to what the GEMMs of the thread need.
    static PACKED: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// GEMM on the calling thread: `C[m,n] (+)= A[m,k] · B[k,n]`, with A and B rounded to bf16.
pub(super) fn matmul(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    c: MatrixViewMut<'_>,
    write: WriteMode,
) {
    assert!(supports_bf16(), "this processor does not have AVX512_BF16");
    let (m, k, n) = (a.rows(), a.columns(), b.columns());
    assert_eq!(
        (k, m, n),
        (b.rows(), c.rows(), c.columns()),
        "[{m}, {k}] times [{}, {n}]",
        b.rows()
    );
    // SAFETY: the processor has the instructions.
    unsafe { multiply(a, b, c, write) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply(
    a: StridedMatrix<'_>,
    b: StridedMatrix<'_>,
    mut c: MatrixViewMut<'_>,
    write: WriteMode,
) {
    let (m, k, n) = (a.rows(), a.columns(), b.columns());
    PACKED.with_borrow_mut(|[a_packed, b_packed]| {
        for first_column in (0..n).step_by(BLOCK_COLUMNS) {
            let columns = BLOCK_COLUMNS.min(n - first_column);
            let b = b.column_range(first_column, columns).transposed();
            // Without elements along k, one empty block writes the result.
            for first_k in (0..k.max(1)).step_by(BLOCK_K) {
                let depth = BLOCK_K.min(k - first_k);
                let b = pack_panels::<LANES>(b.column_range(first_k, depth), b_packed);
                let write = if first_k == 0 { write } else { WriteMode::Add };
                for first_row in (0..m).step_by(BLOCK_ROWS) {
                    let rows = BLOCK_ROWS.min(m - first_row);
                    let a = a.row_range(first_row, rows).column_range(first_k, depth);
                    let a = pack_panels::<TILE_ROWS>(a, a_packed);
                    let c = c.reborrow().row_range(first_row, rows);
                    let c = c.column_range(first_column, columns);
                    multiply_block((a, b), depth.div_ceil(2), c, write);
                }
            }
        }
    });
}

/// Adds the product of packed blocks, whose panels have `lines` lines, to a block of C, or replaces it.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply_block(
    (a, b): (&[Line], &[Line]),
    lines: usize,
    mut c: MatrixViewMut<'_>,
    write: WriteMode,
) {
    let (m, n) = (c.rows(), c.columns());
    for group in (0..n).step_by(GROUP_COLUMNS) {
        let group = group..n.min(group + GROUP_COLUMNS);
        for row in (0..m).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(m - row);
            let a = &a[row / TILE_ROWS * lines..][..lines];
            for column in group.clone().step_by(TILE_COLUMNS) {
                let columns = TILE_COLUMNS.min(n - column);
                let b = &b[column / LANES * lines..];
                // A last panel without a right neighbour is multiplied twice, and written once.
                let right = if columns > LANES { &b[lines..] } else { b };
                let panels = [a, b, right];
                let tile = c.reborrow().row_range(row, rows).column_range(column, columns);
                macro_rules! multiply_rows {
                    ($($rows:literal)*) => {
                        match rows {
                            $($rows => multiply_tile::<$rows>(panels, tile, write),)*
                            _ => unreachable!("a tile has 1 to {TILE_ROWS} rows"),
                        }
                    };
                }
                multiply_rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
            }
        }
    }
}

/// One tile of C, from a panel of A and two of B. C is fetched while the sums are computed.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply_tile<const ROWS: usize>(
    [a, left, right]: [&[Line]; 3],
    mut c: MatrixViewMut<'_>,
    write: WriteMode,
) {
    for row in 0..ROWS {
        c.row(row).chunks(LANES).for_each(prefetch);
    }
    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
    let (left, right) = (&left[..a.len()], &right[..a.len()]);
    for line in 0..a.len() {
        let (left, right) = (bf16_pairs(left[line]), bf16_pairs(right[line]));
        // A constant number of iterations, so that the sums stay in registers.
        for (row, sums) in sums.iter_mut().enumerate() {
            let pair = bf16_pairs(Line([a[line].0[row]; LANES]));
            sums[0] = _mm512_dpbf16_ps(sums[0], pair, left);
            sums[1] = _mm512_dpbf16_ps(sums[1], pair, right);
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (c, sum) in c.row_mut(row).chunks_mut(LANES).zip(sums) {
            match write {
                WriteMode::Replace => store(c, sum),
                WriteMode::Add => store(c, _mm512_add_ps(load(c), sum)),
            }
        }
    }
}

/// Packs all rows of a matrix into panels of up to `ROWS` rows, and returns these: line l of a panel has the pair of
/// elements 2·l and 2·l + 1 of each row. What is missing is 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_panels<'a, const ROWS: usize>(
    source: StridedMatrix<'_>,
    packed: &'a mut Vec<Line>,
) -> &'a [Line] {
    let lines = source.columns().div_ceil(2);
    let needed = source.rows().div_ceil(ROWS) * lines;
    if packed.len() < needed {
        packed.resize(needed, Line([0; LANES]));
    }
    let (stored, transposed) = source.stored();
    let step = if transposed { GROUP_PANELS * ROWS } else { ROWS };
    for first in (0..source.rows()).step_by(step) {
        let rows = step.min(source.rows() - first);
        let panels = &mut packed[first / ROWS * lines..][..rows.div_ceil(ROWS) * lines];
        match transposed {
            true => pack_columns::<ROWS>(stored.column_range(first, rows), lines, panels),
            false => pack_rows(stored.row_range(first, rows), panels),
        }
    }
    &packed[..needed]
}

/// Packs the columns of a matrix into panels of up to `ROWS` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_columns<const ROWS: usize>(stored: MatrixView<'_>, lines: usize, panels: &mut [Line]) {
    for line in 0..lines {
        let even = stored.row(2 * line);
        let odd = if 2 * line + 1 < stored.rows() { stored.row(2 * line + 1) } else { &[] };
        // Rows may be far from each other, where processors do not fetch ahead by themselves.
        for ahead in (2 * line + 4..stored.rows()).take(2) {
            stored.row(ahead).chunks(LANES).for_each(prefetch);
        }
        for (index, first) in (0..even.len()).step_by(ROWS).enumerate() {
            let part = first..even.len().min(first + ROWS);
            let odd = odd.get(part.clone()).unwrap_or_default();
            panels[index * lines + line] = interleave(load(&even[part]), load(odd));
        }
    }
}

/// Packs up to 16 rows of a matrix into a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pack_rows(stored: MatrixView<'_>, panel: &mut [Line]) {
    for (index, to) in panel.chunks_mut(LANES).enumerate() {
        let mut rows = [_mm512_setzero_si512(); LANES];
        for (row, pairs) in rows.iter_mut().enumerate().take(stored.rows()) {
            let elements = &stored.row(row)[index * 2 * LANES..];
            let (low, high) = elements.split_at(LANES.min(elements.len()));
            *pairs = round(load(low), load(high));
        }
        for (to, line) in to.iter_mut().zip(transpose(rows)) {
            *to = line_of(line);
        }
    }
}

/// Rounds 32 numbers to the nearest bf16, ties to even: `low`, then `high`.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 512 bits, all values of which are valid.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rounds two vectors, and pairs their elements.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn interleave(first: __m512, second: __m512) -> Line {
    const ORDER: [u16; 2 * LANES] = {
        let mut order = [0; 2 * LANES];
        let mut index = 0;
        while index < order.len() {
            order[index] = (index / 2 + LANES * (index % 2)) as u16;
            index += 1;
        }
        order
    };
    // SAFETY: both types are 512 bits, all values of which are valid.
    let order = unsafe { std::mem::transmute::<[u16; 2 * LANES], __m512i>(ORDER) };
    line_of(_mm512_permutexvar_epi16(order, round(first, second)))
}

/// Transpose of a 16 × 16 matrix of 32-bit elements.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn transpose(mut rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut pairs = [_mm512_setzero_si512(); LANES];
    for i in (0..LANES).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Afterwards the quarter q of the vector 4·g + c has column 4·q + c of the rows from 4·g.
    for i in (0..LANES).step_by(4) {
        rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut columns = [_mm512_setzero_si512(); LANES];
    for c in 0..4 {
        let even_upper = _mm512_shuffle_i32x4::<0x88>(rows[c], rows[4 + c]);
        let odd_upper = _mm512_shuffle_i32x4::<0xdd>(rows[c], rows[4 + c]);
        let even_lower = _mm512_shuffle_i32x4::<0x88>(rows[8 + c], rows[12 + c]);
        let odd_lower = _mm512_shuffle_i32x4::<0xdd>(rows[8 + c], rows[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0x88>(even_upper, even_lower);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_upper, odd_lower);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_upper, even_lower);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_upper, odd_lower);
    }
    columns
}

/// Fetches the cache line of the first of some elements, while other work is done.
fn prefetch(elements: &[f32]) {
    // SAFETY: a prefetch has no effect on memory, and cannot fail.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(elements.as_ptr().cast()) }
}

/// Up to 16 elements, followed by zeros.
#[target_feature(enable = "avx512f")]
fn load(elements: &[f32]) -> __m512 {
    // SAFETY: only elements of the slice are read.
    unsafe { _mm512_maskz_loadu_ps(mask(elements), elements.as_ptr()) }
}

/// Replaces up to 16 elements by the first of a vector.
#[target_feature(enable = "avx512f")]
fn store(elements: &mut [f32], vector: __m512) {
    // SAFETY: only elements of the slice are written.
    unsafe { _mm512_mask_storeu_ps(elements.as_mut_ptr(), mask(elements), vector) }
}

/// Lanes that a slice fills.
fn mask(elements: &[f32]) -> u16 {
    if elements.len() < LANES { (1 << elements.len()) - 1 } else { u16::MAX }
}

#[target_feature(enable = "avx512f")]
fn line_of(vector: __m512i) -> Line {
    // SAFETY: both types are 512 bits, all values of which are valid.
    Line(unsafe { std::mem::transmute::<__m512i, [u32; LANES]>(vector) })
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_pairs(line: Line) -> __m512bh {
    // SAFETY: both types are 512 bits, all values of which are valid.
    unsafe { std::mem::transmute::<[u32; LANES], __m512bh>(line.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random};

    /// Whether this processor can run the kernel; prints that a test skips where it cannot.
    fn can_run() -> bool {
        if !supports_bf16() {
            eprintln!("skipped: this processor does not have AVX512_BF16");
        }
        supports_bf16()
    }

    /// The nearest bf16, ties to even, of a finite number.
    fn rounded(x: f32) -> f32 {
        let bits = x.to_bits();
        f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
    }

    /// A `[rows, columns]` matrix stored row after row, or as its transpose.
    fn matrix(
        elements: &[f32],
        rows: usize,
        columns: usize,
        transposed: bool,
    ) -> StridedMatrix<'_> {
        match transposed {
            true => MatrixView::new(elements, columns, rows).transposed(),
            false => MatrixView::new(elements, rows, columns).into(),
        }
    }

    #[test]
    fn a_product_is_that_of_rounded_operands() {
        if !can_run() {
            return;
        }
        let sizes = [[1, 1, 1], [3, 5, 0], [37, 19, 23], [29, 515, 65], [15, 33, 1025]];
        let storages = [(false, false), (false, true), (true, false), (true, true)];
        for ([m, n, k], (a_is_transposed, b_is_transposed)) in
            sizes.into_iter().flat_map(|size| storages.map(|storage| (size, storage)))
        {
            let (a, b, c) = (random(1, m * k), random(2, k * n), random(3, m * n));
            let a_at =
                |i: usize, l: usize| if a_is_transposed { a[l * m + i] } else { a[i * k + l] };
            let b_at =
                |l: usize, j: usize| if b_is_transposed { b[j * k + l] } else { b[l * n + j] };
            for write in [WriteMode::Replace, WriteMode::Add] {
                let element = |at: usize| {
                    let product = |l| {
                        f64::from(rounded(a_at(at / n, l))) * f64::from(rounded(b_at(l, at % n)))
                    };
                    let before = if write == WriteMode::Add { f64::from(c[at]) } else { 0.0 };
                    before + (0..k).map(product).sum::<f64>()
                };
                let expected: Vec<f64> = (0..m * n).map(element).collect();
                let mut result =
                    if write == WriteMode::Add { c.clone() } else { vec![f32::NAN; m * n] };
                let operands =
                    (matrix(&a, m, k, a_is_transposed), matrix(&b, k, n, b_is_transposed));
                let c = MatrixViewMut::new(&mut result, m, n);
                matmul(operands.0, operands.1, c, write);
                assert_close(&result, &expected, 1e-6);
            }
        }
    }

    #[test]
    fn a_part_of_a_product_has_the_bits_of_the_whole() {
        if !can_run() {
            return;
        }
        let (m, n, k) = (45, 70, 600);
        let (a, b) = (random(1, m * k), random(2, k * n));
        let (a, b) = (matrix(&a, m, k, false), matrix(&b, k, n, false));
        let mut whole = vec![0.0; m * n];
        let c = MatrixViewMut::new(&mut whole, m, n);
        matmul(a, b, c, WriteMode::Replace);
        let (rows, columns) = (9..36, 5..64);
        let mut part = vec![0.0; rows.len() * columns.len()];
        let c = MatrixViewMut::new(&mut part, rows.len(), columns.len());
        let a = a.row_range(rows.start, rows.len());
        let b = b.column_range(columns.start, columns.len());
        matmul(a, b, c, WriteMode::Replace);
        let expected = rows.flat_map(|row| &whole[row * n..][columns.clone()]);
        assert!(part.iter().eq(expected));
    }
}
