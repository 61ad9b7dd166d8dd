//! Descriptors of a matmul, and preferences in the choice of its algorithms.

use std::mem::size_of;
use std::ptr;

use cudarc::cublas::sys::cublasOperation_t;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulDescAttributes_t as Desc,
    cublasLtMatmulPreferenceAttributes_t as Pref, cublasLtMatrixLayoutAttribute_t as Layout,
    cudaDataType_t,
};
use narrows_plan::DType;

use crate::matmul::{MatmulKey, StoredMatrix, Transpose};

/// Descriptors that are destroyed on drop.
pub(super) struct MatmulDescriptors {
    pub operation: sys::cublasLtMatmulDesc_t,
    pub layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl MatmulDescriptors {
    pub fn new(key: &MatmulKey) -> Result<MatmulDescriptors, CublasError> {
        let (compute, scale) =
            (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        let operation = result::create_matmul_desc(compute, scale)?;
        let mut descriptors = MatmulDescriptors { operation, layouts: [ptr::null_mut(); 3] };
        for (attribute, transpose) in [
            (Desc::CUBLASLT_MATMUL_DESC_TRANSA, key.operation_a),
            (Desc::CUBLASLT_MATMUL_DESC_TRANSB, key.operation_b),
        ] {
            let transpose = match transpose {
                Transpose::N => cublasOperation_t::CUBLAS_OP_N,
                Transpose::T => cublasOperation_t::CUBLAS_OP_T,
            } as i32;
            let (value, size) = (ptr::from_ref(&transpose).cast(), size_of::<i32>());
            // SAFETY: the attribute has 32 bits.
            unsafe { result::set_matmul_desc_attribute(operation, attribute, value, size) }?;
        }
        for (slot, stored) in descriptors.layouts.iter_mut().zip([&key.a, &key.b, &key.c]) {
            *slot = layout(stored, key.batch)?;
        }
        Ok(descriptors)
    }
}

fn layout(stored: &StoredMatrix, batch: u64) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    let dtype = match stored.dtype {
        DType::Bf16 => cudaDataType_t::CUDA_R_16BF,
        _ => cudaDataType_t::CUDA_R_32F,
    };
    let StoredMatrix { rows, columns, leading_dimension, batch_stride, .. } = *stored;
    let layout = result::create_matrix_layout(dtype, rows, columns, leading_dimension as i64)?;
    if batch > 1 {
        let (count, stride) = (batch as i32, batch_stride as i64);
        // SAFETY: the attributes have 32 and 64 bits.
        unsafe {
            let (value, size) = (ptr::from_ref(&count).cast(), size_of::<i32>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
            result::set_matrix_layout_attribute(layout, attribute, value, size)?;
            let (value, size) = (ptr::from_ref(&stride).cast(), size_of::<i64>());
            let attribute = Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            result::set_matrix_layout_attribute(layout, attribute, value, size)?;
        }
    }
    Ok(layout)
}

impl Drop for MatmulDescriptors {
    fn drop(&mut self) {
        // SAFETY: the descriptors are valid, and not used afterwards.
        unsafe {
            for layout in self.layouts.iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(*layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

pub(super) struct MatmulPreference(pub sys::cublasLtMatmulPreference_t);

impl MatmulPreference {
    pub fn set<T>(&self, attribute: Pref, value: T) -> Result<(), CublasError> {
        let (value, size) = (ptr::from_ref(&value).cast(), size_of::<T>());
        // SAFETY: callers pass values of the attribute's type.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size) }
    }
}

impl Drop for MatmulPreference {
    fn drop(&mut self) {
        // SAFETY: the preference is valid, and not used afterwards.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
