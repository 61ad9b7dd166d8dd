//! Products, against sums that are exact: small whole numbers, in every format.

use std::ffi::c_void;
use std::mem::{size_of, size_of_val};
use std::ptr;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::*;
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t::*;
use cudarc::cublaslt::sys::cublasLtMatrixLayoutAttribute_t::*;
use cudarc::cublaslt::sys::cublasStatus_t::*;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{CudaStream, result};

use crate::gpu::{self, Numbers};
use narrows_fake_cuda::child;

const F32: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_32F;
const BF16: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_16BF;

/// A matrix column by column, with gaps between columns and between members of a batch.
#[derive(Clone)]
struct Matrix {
    dtype: sys::cudaDataType,
    rows: usize,
    columns: usize,
    leading: usize,
    batch: usize,
    stride: usize,
    numbers: Vec<f32>,
    at: u64,
}

impl Matrix {
    fn drawn(
        dtype: sys::cudaDataType,
        rows: usize,
        columns: usize,
        batch: usize,
        draw: &mut impl FnMut() -> u32,
    ) -> Matrix {
        let leading = rows + 3;
        let stride = leading * columns + 8;
        let numbers = (0..stride * batch).map(|_| draw() as f32 - 2.0).collect();
        let made = Matrix { dtype, rows, columns, leading, batch, stride, numbers, at: 0 };
        let bytes = made.bytes();
        // SAFETY: there is room for all of them.
        let at = unsafe { result::malloc_sync(bytes.len()) }.unwrap();
        unsafe { result::memcpy_htod_sync(at, &bytes) }.unwrap();
        Matrix { at, ..made }
    }

    fn bytes(&self) -> Vec<u8> {
        let bytes = |number: &f32| match self.dtype {
            F32 => number.to_le_bytes().to_vec(),
            // Exact: the numbers are whole and small.
            _ => ((number.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        };
        self.numbers.iter().flat_map(bytes).collect()
    }

    /// What the device holds.
    fn read(&self) -> Vec<f32> {
        result::ctx::synchronize().unwrap();
        let mut bytes = self.bytes();
        // SAFETY: there are as many.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.at) }.unwrap();
        match self.dtype {
            F32 => bytes.chunks(4).map(|of| f32::from_le_bytes(of.try_into().unwrap())).collect(),
            _ => {
                let widened =
                    |of: &[u8]| f32::from_bits(u32::from(of[1]) << 24 | u32::from(of[0]) << 16);
                bytes.chunks(2).map(widened).collect()
            }
        }
    }

    fn place(&self, member: usize, row: usize, column: usize) -> usize {
        member * self.stride + column * self.leading + row
    }

    fn layout(&self) -> sys::cublasLtMatrixLayout_t {
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        let made =
            lt::create_matrix_layout(self.dtype, rows, columns, self.leading as i64).unwrap();
        let (batch, stride) = (self.batch as i32, self.stride as i64);
        // SAFETY: the layout was just made, and the attributes have these types.
        unsafe {
            set(&batch, |of, size| {
                lt::set_matrix_layout_attribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, of, size)
            });
            set(&stride, |of, size| {
                lt::set_matrix_layout_attribute(
                    made,
                    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    of,
                    size,
                )
            });
        }
        made
    }
}

fn set<T>(value: &T, with: impl FnOnce(*const c_void, usize) -> Result<(), CublasError>) {
    with(ptr::from_ref(value).cast(), size_of::<T>()).unwrap();
}

/// C = op(A)·op(B) + β·C.
struct Product {
    transposed: [bool; 2],
    matrices: [Matrix; 3],
    beta: f32,
    handle: sys::cublasLtHandle_t,
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

type Found = sys::cublasLtMatmulHeuristicResult_t;

impl Product {
    fn new(transposed: [bool; 2], matrices: [Matrix; 3], beta: f32) -> Product {
        let handle = lt::create_handle().unwrap();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = lt::create_matmul_desc(compute, F32).unwrap();
        let names = [CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB];
        for (name, transposed) in names.into_iter().zip(transposed) {
            let operation = i32::from(transposed);
            // SAFETY: the description was just made, and the attribute has this type.
            set(&operation, |of, size| unsafe {
                lt::set_matmul_desc_attribute(description, name, of, size)
            });
        }
        let layouts = [0, 1, 2].map(|at| matrices[at].layout());
        Product { transposed, matrices, beta, handle, description, layouts }
    }

    /// What cuBLASLt offers for so much workspace, these ways of adding parts, and this alignment.
    fn algorithms(&self, workspace: u64, schemes: u32, alignment: u32) -> Vec<Found> {
        let preference = lt::create_matmul_pref().unwrap();
        let say =
            |name, of, size| unsafe { lt::set_matmul_pref_attribute(preference, name, of, size) };
        set(&workspace, |of, size| say(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, of, size));
        set(&schemes, |of, size| say(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, of, size));
        for name in [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(&alignment, |of, size| say(name, of, size));
        }
        let [a, b, c] = self.layouts;
        let mut found = Vec::<Found>::with_capacity(8);
        let mut count = 0;
        // SAFETY: all was made by the library, and there is room for as many as are asked for.
        unsafe {
            let of = self.description;
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                of,
                a,
                b,
                c,
                c,
                preference,
                8,
                found.as_mut_ptr(),
                &raw mut count,
            )
            .result()
            .unwrap();
            found.set_len(count as usize);
        }
        found
    }

    fn run(
        &self,
        with: &Found,
        workspace: Numbers,
        stream: &CudaStream,
    ) -> Result<(), CublasError> {
        let [a, b, c] = [0, 1, 2].map(|at| self.matrices[at].at as *mut c_void);
        let [of_a, of_b, of_c] = self.layouts;
        let (alpha, beta) = (ptr::from_ref(&1.0f32).cast(), ptr::from_ref(&self.beta).cast());
        // SAFETY: the stand-in checks what lies where.
        unsafe {
            lt::matmul(
                self.handle,
                self.description,
                alpha,
                beta,
                a,
                of_a,
                b,
                of_b,
                c,
                of_c,
                c,
                of_c,
                &with.algo,
                workspace.pointer(),
                workspace.count * 4,
                stream.cu_stream().cast(),
            )
        }
    }

    /// C as it should become; what lies between its columns stays.
    fn expected(&self) -> Vec<f32> {
        let [a, b, c] = &self.matrices;
        let mut expected = c.numbers.clone();
        let depth = if self.transposed[0] { a.rows } else { a.columns };
        let of = |matrix: &Matrix, transposed, member, i, j| {
            let (row, column) = if transposed { (j, i) } else { (i, j) };
            matrix.numbers[matrix.place(member, row, column)]
        };
        for member in 0..c.batch {
            for i in 0..c.rows {
                for j in 0..c.columns {
                    let term = |k| {
                        of(a, self.transposed[0], member, i, k)
                            * of(b, self.transposed[1], member, k, j)
                    };
                    let sum: f32 = (0..depth).map(term).sum();
                    let place = c.place(member, i, j);
                    expected[place] =
                        sum + if self.beta == 0.0 { 0.0 } else { self.beta * expected[place] };
                }
            }
        }
        expected
    }
}

fn drawer(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32 % 5
    }
}

/// m, n, k and the batch; sums stay below 256, which bf16 holds exactly.
const SHAPES: [[usize; 4]; 3] = [[9, 13, 37, 3], [32, 8, 16, 1], [1, 5, 3, 2]];
const SUM_IN_F32: u32 = 2;

#[test]
fn products_are_exact() {
    child::once("products::products_are_exact", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let workspace = Numbers::new(1 << 16);
        let mut draw = drawer(1);
        let mut used = vec![];
        for [m, n, k, batch] in SHAPES {
            for case in 0..24 {
                let transposed = [case & 1 != 0, case & 2 != 0];
                let beta = if case & 4 != 0 { 1.0 } else { 0.0 };
                let (of, to) = [(BF16, BF16), (BF16, F32), (F32, F32)][case / 8];
                let (a, b) = (
                    if transposed[0] { (k, m) } else { (m, k) },
                    if transposed[1] { (n, k) } else { (k, n) },
                );
                let shapes = [(of, a), (of, b), (to, (m, n))];
                let drawn = shapes.map(|(dtype, (rows, columns))| {
                    Matrix::drawn(dtype, rows, columns, batch, &mut draw)
                });
                let mut product = Product::new(transposed, drawn, beta);
                let found = product.algorithms(1 << 18, SUM_IN_F32, 2);
                assert_eq!(found.len(), 2, "one splits, one asks for nothing");
                for with in found {
                    product.run(&with, workspace, &stream).unwrap();
                    let expected = product.expected();
                    assert_eq!(
                        product.matrices[2].read(),
                        expected,
                        "{m}×{n}×{k} {batch}, case {case}"
                    );
                    product.matrices[2].numbers =
                        expected.iter().map(|number| number % 3.0).collect();
                    let reset = &product.matrices[2];
                    // SAFETY: there is room for all of them.
                    unsafe { result::memcpy_htod_sync(reset.at, &reset.bytes()) }.unwrap();
                    used.push(with.workspaceSize);
                }
            }
        }
        assert!(used.iter().any(|bytes| *bytes > 0));
    });
}

fn square(side: usize) -> Product {
    let mut draw = drawer(2);
    let mut drawn = |dtype| Matrix::drawn(dtype, side, side, 1, &mut draw);
    let matrices = [drawn(BF16), drawn(BF16), drawn(F32)];
    Product::new([false, false], matrices, 0.0)
}

/// What an algorithm was not promised is refused, and so is one that nobody offered.
#[test]
fn promises_are_held() {
    child::once("products::promises_are_held", &[], || {
        let context = gpu::context(0);
        let stream = context.new_stream().unwrap();
        let workspace = Numbers::new(1 << 16);
        let mut product = square(16);
        let ids =
            |found: &[Found]| found.iter().map(|found| found.algo.data[1]).collect::<Vec<_>>();
        assert_eq!(ids(&product.algorithms(0, 7, 2)), [23]);
        assert_eq!(ids(&product.algorithms(1 << 18, 0, 16)), [22, 23]);
        let all = product.algorithms(1 << 18, 7, 16);
        assert_eq!(ids(&all), [21, 22, 23]);
        assert_eq!(all[0].algo.data[3], 4, "parts in the result's format, where that is allowed");
        for with in &all {
            let mut checked = *with;
            checked.workspaceSize = 0;
            let [a, b, c] = product.layouts;
            // SAFETY: all was made by the library.
            let status = unsafe {
                sys::cublasLtMatmulAlgoCheck(
                    product.handle,
                    product.description,
                    a,
                    b,
                    c,
                    c,
                    &raw const with.algo,
                    &raw mut checked,
                )
            };
            assert_eq!(
                (status, checked.workspaceSize),
                (CUBLAS_STATUS_SUCCESS, with.workspaceSize)
            );
        }
        let status = |made: Result<(), CublasError>| made.err().map(|error| error.0);
        let small = Numbers { count: 16, ..workspace };
        assert_eq!(status(product.run(&all[0], small, &stream)), Some(CUBLAS_STATUS_INVALID_VALUE));
        let mut other = all[0];
        other.algo.data = [7; 8];
        assert_eq!(
            status(product.run(&other, workspace, &stream)),
            Some(CUBLAS_STATUS_INVALID_VALUE)
        );
        // Two bytes further, an operand is not where the second algorithm needs it.
        product.matrices[0].at += 2;
        assert_eq!(
            status(product.run(&all[1], workspace, &stream)),
            Some(CUBLAS_STATUS_INVALID_VALUE)
        );
        product.matrices[0].at -= 2;
        assert_eq!(status(product.run(&all[1], workspace, &stream)), None);
        stream.synchronize().unwrap();
        // A matrix that ends behind its memory.
        product.matrices[1].at += 256;
        assert_eq!(status(product.run(&all[2], workspace, &stream)), None);
        assert!(stream.synchronize().is_err());
        assert_eq!(size_of_val(&all[0].algo), 64);
    });
}

/// Two products at once. `shared`: with one workspace.
fn at_once(shared: bool) -> bool {
    let context = gpu::context(0);
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let workspaces = [Numbers::new(1 << 16), Numbers::new(1 << 16)];
    let products = [square(24), square(32)];
    for (at, (product, stream)) in products.iter().zip(&streams).enumerate() {
        let with = product.algorithms(1 << 18, SUM_IN_F32, 16)[0];
        product.run(&with, workspaces[if shared { 0 } else { at }], stream).unwrap();
    }
    products.iter().all(|product| product.matrices[2].read() == product.expected())
}

#[test]
fn a_shared_workspace_is_seen() {
    let said = child::seeded("products::a_shared_workspace_is_seen", 8, &[], || {
        println!("shared {}", at_once(true));
        assert!(at_once(false));
    });
    if !said.is_empty() {
        assert!(said.iter().any(|said| said.contains("shared false")), "no seed shows it");
    }
}
