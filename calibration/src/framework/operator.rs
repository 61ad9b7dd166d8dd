//! Operators that the host launches, as kernels on one device.

use narrows_plan::kernel::{Collective, FusedKernel, Gemm, Kernel};
use narrows_plan::{Bytes, DType};

/// An operator of a segment.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operator {
    /// A kernel.
    Kernel(Kernel),
    /// A collective beside a GEMM that is an operator of its own: only the time beyond the GEMM counts.
    Beside {
        /// The collective.
        collective: Collective,
        /// The GEMM.
        gemm: Gemm,
    },
}

/// A GEMM of 16-bit matrices.
pub(super) fn gemm(m: u64, k: u64, n: u64, batch: u64) -> Gemm {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Gemm { m, n, k, batch, accumulate: false, residual: false, input, output }
}

/// The operator of a GEMM.
pub(super) fn matmul((m, k, n, batch): (u64, u64, u64, u64)) -> Operator {
    Operator::Kernel(Kernel::Gemm(gemm(m, k, n, batch)))
}

/// The GEMMs of the gradients of A\[m,k\] and B\[k,n\].
pub(super) fn gradient_gemms((m, k, n, batch): (u64, u64, u64, u64)) -> [Operator; 2] {
    [(m, n, k, batch), (k, m, n, batch)].map(matmul)
}

/// The GEMM of a weight's gradient, which is added to the fp32 gradient.
pub(super) fn accumulating(gemm: Gemm) -> Gemm {
    Gemm { accumulate: true, output: DType::F32, ..gemm }
}

/// A pass over memory.
pub(super) fn memory_pass(bytes: u64) -> Kernel {
    Kernel::Fused(FusedKernel::memory_pass(Bytes(bytes)))
}

/// Both lists in order, with the passes spread evenly between the other operators.
pub(super) fn interleaved(passes: Vec<Operator>, others: Vec<Operator>) -> Vec<Operator> {
    let (count, total) = (others.len(), passes.len());
    let mut passes = passes.into_iter();
    let mut operators = vec![];
    for (index, other) in others.into_iter().enumerate() {
        operators.push(other);
        let due = (index + 1) * total / count - index * total / count;
        operators.extend(passes.by_ref().take(due));
    }
    operators.extend(passes);
    operators
}
