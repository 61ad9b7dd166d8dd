//! Matmuls of small integers, whose sums are exact in every format.

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

use crate::device::{self, DeviceArray};
use narrows_fake_cuda::child;
use narrows_plan::random::SplitMix64;

const F32: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_32F;
const BF16: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_16BF;

/// A column-major matrix with gaps between columns and between batch members.
#[derive(Clone)]
struct StridedMatrix {
    dtype: sys::cudaDataType,
    rows: usize,
    columns: usize,
    leading: usize,
    batch: usize,
    stride: usize,
    elements: Vec<f32>,
    address: u64,
}

impl StridedMatrix {
    /// Uniform integers from −2 to 2.
    fn random(
        dtype: sys::cudaDataType,
        rows: usize,
        columns: usize,
        batch: usize,
        rng: &mut SplitMix64,
    ) -> StridedMatrix {
        let leading = rows + 3;
        let stride = leading * columns + 8;
        let elements = (0..stride * batch).map(|_| rng.below(5) as f32 - 2.0).collect();
        let matrix =
            StridedMatrix { dtype, rows, columns, leading, batch, stride, elements, address: 0 };
        let bytes = matrix.bytes();
        // SAFETY: the memory has this size.
        let address = unsafe { result::malloc_sync(bytes.len()) }.unwrap();
        unsafe { result::memcpy_htod_sync(address, &bytes) }.unwrap();
        StridedMatrix { address, ..matrix }
    }

    fn bytes(&self) -> Vec<u8> {
        let bytes = |element: &f32| match self.dtype {
            F32 => element.to_le_bytes().to_vec(),
            // Exact for small integers.
            _ => ((element.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
        };
        self.elements.iter().flat_map(bytes).collect()
    }

    /// Reads the matrix from the device.
    fn read(&self) -> Vec<f32> {
        result::ctx::synchronize().unwrap();
        let mut bytes = self.bytes();
        // SAFETY: the matrix has this size.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address) }.unwrap();
        match self.dtype {
            F32 => bytes.chunks(4).map(|of| f32::from_le_bytes(of.try_into().unwrap())).collect(),
            _ => {
                let widened =
                    |of: &[u8]| f32::from_bits(u32::from(of[1]) << 24 | u32::from(of[0]) << 16);
                bytes.chunks(2).map(widened).collect()
            }
        }
    }

    fn index(&self, member: usize, row: usize, column: usize) -> usize {
        member * self.stride + column * self.leading + row
    }

    fn layout(&self) -> sys::cublasLtMatrixLayout_t {
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        let layout =
            lt::create_matrix_layout(self.dtype, rows, columns, self.leading as i64).unwrap();
        let (batch, stride) = (self.batch as i32, self.stride as i64);
        // SAFETY: the layout is valid, and the attributes have these types.
        unsafe {
            set(&batch, |value, size| {
                lt::set_matrix_layout_attribute(
                    layout,
                    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                    value,
                    size,
                )
            });
            set(&stride, |value, size| {
                lt::set_matrix_layout_attribute(
                    layout,
                    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                    value,
                    size,
                )
            });
        }
        layout
    }
}

fn set<T>(value: &T, with: impl FnOnce(*const c_void, usize) -> Result<(), CublasError>) {
    with(ptr::from_ref(value).cast(), size_of::<T>()).unwrap();
}

/// C = op(A)·op(B) + β·C.
struct MatmulCase {
    transposed: [bool; 2],
    matrices: [StridedMatrix; 3],
    beta: f32,
    handle: sys::cublasLtHandle_t,
    descriptor: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

type Heuristic = sys::cublasLtMatmulHeuristicResult_t;

impl MatmulCase {
    fn new(transposed: [bool; 2], matrices: [StridedMatrix; 3], beta: f32) -> MatmulCase {
        let handle = lt::create_handle().unwrap();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let descriptor = lt::create_matmul_desc(compute, F32).unwrap();
        let names = [CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB];
        for (name, transposed) in names.into_iter().zip(transposed) {
            let operation = i32::from(transposed);
            // SAFETY: the descriptor is valid, and the attribute has this type.
            set(&operation, |value, size| unsafe {
                lt::set_matmul_desc_attribute(descriptor, name, value, size)
            });
        }
        let layouts = [0, 1, 2].map(|at| matrices[at].layout());
        MatmulCase { transposed, matrices, beta, handle, descriptor, layouts }
    }

    /// Algorithms for a workspace, reduction schemes and an alignment.
    fn algorithms(&self, workspace: u64, schemes: u32, alignment: u32) -> Vec<Heuristic> {
        let preference = lt::create_matmul_pref().unwrap();
        let set_preference = |name, value, size| unsafe {
            lt::set_matmul_pref_attribute(preference, name, value, size)
        };
        set(&workspace, |value, size| {
            set_preference(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, value, size)
        });
        set(&schemes, |value, size| {
            set_preference(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, value, size)
        });
        for name in [
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(&alignment, |value, size| set_preference(name, value, size));
        }
        let [a, b, c] = self.layouts;
        let mut heuristics = Vec::<Heuristic>::with_capacity(8);
        let mut count = 0;
        // SAFETY: the library created all handles, and the array has room for the requested number.
        unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                self.descriptor,
                a,
                b,
                c,
                c,
                preference,
                8,
                heuristics.as_mut_ptr(),
                &raw mut count,
            )
            .result()
            .unwrap();
            heuristics.set_len(count as usize);
        }
        heuristics
    }

    fn run(
        &self,
        heuristic: &Heuristic,
        workspace: DeviceArray,
        stream: &CudaStream,
    ) -> Result<(), CublasError> {
        let [a, b, c] = [0, 1, 2].map(|at| self.matrices[at].address as *mut c_void);
        let [a_layout, b_layout, c_layout] = self.layouts;
        let (alpha, beta) = (ptr::from_ref(&1.0f32).cast(), ptr::from_ref(&self.beta).cast());
        // SAFETY: the fake library checks addresses.
        unsafe {
            lt::matmul(
                self.handle,
                self.descriptor,
                alpha,
                beta,
                a,
                a_layout,
                b,
                b_layout,
                c,
                c_layout,
                c,
                c_layout,
                &heuristic.algo,
                workspace.pointer(),
                workspace.count * 4,
                stream.cu_stream().cast(),
            )
        }
    }

    /// The expected C; gaps between columns are unchanged.
    fn expected(&self) -> Vec<f32> {
        let [a, b, c] = &self.matrices;
        let mut expected = c.elements.clone();
        let depth = if self.transposed[0] { a.rows } else { a.columns };
        let element = |matrix: &StridedMatrix, transposed, member, i, j| {
            let (row, column) = if transposed { (j, i) } else { (i, j) };
            matrix.elements[matrix.index(member, row, column)]
        };
        for member in 0..c.batch {
            for i in 0..c.rows {
                for j in 0..c.columns {
                    let term = |k| {
                        element(a, self.transposed[0], member, i, k)
                            * element(b, self.transposed[1], member, k, j)
                    };
                    let sum: f32 = (0..depth).map(term).sum();
                    let index = c.index(member, i, j);
                    expected[index] =
                        sum + if self.beta == 0.0 { 0.0 } else { self.beta * expected[index] };
                }
            }
        }
        expected
    }
}

/// m, n, k and batch. Sums stay below 256, which is exact in bf16.
const SHAPES: [[usize; 4]; 3] = [[9, 13, 37, 3], [32, 8, 16, 1], [1, 5, 3, 2]];
const SUM_IN_F32: u32 = 2;

#[test]
fn matmuls_are_exact() {
    child::under_one_seed("matmul::matmuls_are_exact", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let workspace = DeviceArray::new(1 << 16);
        let mut rng = SplitMix64::new(1);
        let mut workspaces = vec![];
        for [m, n, k, batch] in SHAPES {
            for case in 0..24 {
                let transposed = [case & 1 != 0, case & 2 != 0];
                let beta = if case & 4 != 0 { 1.0 } else { 0.0 };
                let (operand_dtype, result_dtype) =
                    [(BF16, BF16), (BF16, F32), (F32, F32)][case / 8];
                let (a, b) = (
                    if transposed[0] { (k, m) } else { (m, k) },
                    if transposed[1] { (n, k) } else { (k, n) },
                );
                let shapes = [(operand_dtype, a), (operand_dtype, b), (result_dtype, (m, n))];
                let random = shapes.map(|(dtype, (rows, columns))| {
                    StridedMatrix::random(dtype, rows, columns, batch, &mut rng)
                });
                let mut matmul = MatmulCase::new(transposed, random, beta);
                let algorithms = matmul.algorithms(1 << 18, SUM_IN_F32, 2);
                assert_eq!(algorithms.len(), 2, "one splits k, one has no requirements");
                for heuristic in algorithms {
                    matmul.run(&heuristic, workspace, &stream).unwrap();
                    let expected = matmul.expected();
                    assert_eq!(
                        matmul.matrices[2].read(),
                        expected,
                        "{m}×{n}×{k} {batch}, case {case}"
                    );
                    matmul.matrices[2].elements =
                        expected.iter().map(|element| element % 3.0).collect();
                    let reset = &matmul.matrices[2];
                    // SAFETY: the memory has this size.
                    unsafe { result::memcpy_htod_sync(reset.address, &reset.bytes()) }.unwrap();
                    workspaces.push(heuristic.workspaceSize);
                }
            }
        }
        assert!(workspaces.iter().any(|bytes| *bytes > 0));
    });
}

fn square(side: usize) -> MatmulCase {
    let mut rng = SplitMix64::new(2);
    let mut random = |dtype| StridedMatrix::random(dtype, side, side, 1, &mut rng);
    let matrices = [random(BF16), random(BF16), random(F32)];
    MatmulCase::new([false, false], matrices, 0.0)
}

/// Matmuls that violate the requirements of their algorithm, and invalid algorithms, are rejected.
#[test]
fn requirements_of_algorithms_are_checked() {
    child::under_one_seed("matmul::requirements_of_algorithms_are_checked", &[], || {
        let context = device::context(0);
        let stream = context.new_stream().unwrap();
        let workspace = DeviceArray::new(1 << 16);
        let mut matmul = square(16);
        let ids = |heuristics: &[Heuristic]| {
            heuristics.iter().map(|heuristic| heuristic.algo.data[1]).collect::<Vec<_>>()
        };
        assert_eq!(ids(&matmul.algorithms(0, 7, 2)), [23]);
        assert_eq!(ids(&matmul.algorithms(1 << 18, 0, 16)), [22, 23]);
        let all = matmul.algorithms(1 << 18, 7, 16);
        assert_eq!(ids(&all), [21, 22, 23]);
        assert_eq!(all[0].algo.data[3], 4, "adds parts in the result's type where allowed");
        for heuristic in &all {
            let mut checked = *heuristic;
            checked.workspaceSize = 0;
            let [a, b, c] = matmul.layouts;
            // SAFETY: the library created all handles.
            let status = unsafe {
                sys::cublasLtMatmulAlgoCheck(
                    matmul.handle,
                    matmul.descriptor,
                    a,
                    b,
                    c,
                    c,
                    &raw const heuristic.algo,
                    &raw mut checked,
                )
            };
            assert_eq!(
                (status, checked.workspaceSize),
                (CUBLAS_STATUS_SUCCESS, heuristic.workspaceSize)
            );
        }
        let status = |result: Result<(), CublasError>| result.err().map(|error| error.0);
        let small = DeviceArray { count: 16, ..workspace };
        assert_eq!(status(matmul.run(&all[0], small, &stream)), Some(CUBLAS_STATUS_INVALID_VALUE));
        let mut other = all[0];
        other.algo.data = [7; 8];
        assert_eq!(
            status(matmul.run(&other, workspace, &stream)),
            Some(CUBLAS_STATUS_INVALID_VALUE)
        );
        // An operand that is not aligned as the second algorithm requires.
        matmul.matrices[0].address += 2;
        assert_eq!(
            status(matmul.run(&all[1], workspace, &stream)),
            Some(CUBLAS_STATUS_INVALID_VALUE)
        );
        matmul.matrices[0].address -= 2;
        assert_eq!(status(matmul.run(&all[1], workspace, &stream)), None);
        stream.synchronize().unwrap();
        // A matrix that exceeds its allocation.
        matmul.matrices[1].address += 256;
        assert_eq!(status(matmul.run(&all[2], workspace, &stream)), None);
        assert!(stream.synchronize().is_err());
        assert_eq!(size_of_val(&all[0].algo), 64);
    });
}

/// Runs two concurrent matmuls, with one workspace if `shared`. Returns whether both are correct.
fn concurrent_matmuls_are_correct(shared: bool) -> bool {
    let context = device::context(0);
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let workspaces = [DeviceArray::new(1 << 16), DeviceArray::new(1 << 16)];
    let matmuls = [square(24), square(32)];
    for (at, (matmul, stream)) in matmuls.iter().zip(&streams).enumerate() {
        let heuristic = matmul.algorithms(1 << 18, SUM_IN_F32, 16)[0];
        matmul.run(&heuristic, workspaces[if shared { 0 } else { at }], stream).unwrap();
    }
    matmuls.iter().all(|matmul| matmul.matrices[2].read() == matmul.expected())
}

#[test]
fn a_shared_workspace_changes_a_result() {
    let outputs =
        child::under_seeds("matmul::a_shared_workspace_changes_a_result", 0..8, &[], || {
            println!("correct {}", concurrent_matmuls_are_correct(true));
            assert!(concurrent_matmuls_are_correct(false));
        });
    if !outputs.is_empty() {
        assert!(outputs.iter().any(|output| output.contains("correct false")), "no seed shows it");
    }
}
