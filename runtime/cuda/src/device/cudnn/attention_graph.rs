//! Attention as a graph of operations, in the form that cuDNN recognises and fuses.
//!
//! With S = scale·Q·Kᵀ masked to −∞ above the diagonal, for each query i and head
//!
//! ```text
//! forward    m = max S,  L = m + ln Σ exp(S − m),  P = exp(S − m) / Σ exp(S − m),  O = P·V
//! backward   P = exp(S − L),  D = Σ dO∘O,  dV = Pᵀ·dO,  dS = scale·P∘(dO·Vᵀ − D),  dK = dSᵀ·Q,  dQ = dS·K
//! ```
//!
//! L is the statistic that the forward pass keeps. Gradients of heads that share keys and values are summed. dQ is
//! first summed in f32 in the workspace: the blocks that add to it have no fixed order.

use cudarc::cudnn::sys::{
    self, cudnnDataType_t as DataType, cudnnPointwiseMode_t as Pointwise,
    cudnnReduceTensorOp_t as Reduction,
};

use super::descriptor::CudnnError;
use super::graph::{Dimensions, OperationGraph, Storage, TensorId, packed};
use crate::launch::{AttentionKey, AttentionTensor};

const BF16: DataType = DataType::CUDNN_DATA_BFLOAT16;
const F32: DataType = DataType::CUDNN_DATA_FLOAT;

/// Identifiers of the values in host memory.
const SCALE_ID: i64 = 101;
const MASKED_SCORE_ID: i64 = 102;
const ONE_ID: i64 = 103;

/// Identifiers of the f32 tensors in the workspace: D, and dQ before it is rounded.
const ROW_SUM_ID: i64 = 201;
const Q_GRADIENT_SUM_ID: i64 = 202;

/// The first version that takes −∞ for a masked score; before, the least finite number.
const INFINITE_SCORES_VERSION: usize = 91_000;

/// A fused attention's operations.
pub(super) fn operations(key: &AttentionKey) -> Result<OperationGraph, CudnnError> {
    let mut builder = Builder { graph: OperationGraph::default(), key };
    match key.is_backward {
        false => builder.forward()?,
        true => builder.backward()?,
    }
    Ok(builder.graph)
}

/// Sizes of the f32 tensors in the workspace, with their identifiers.
pub(super) fn workspace_tensors(key: &AttentionKey) -> Vec<(i64, u64)> {
    let rows = key.sequences * key.heads * key.length;
    match key.is_backward {
        false => vec![],
        true => vec![(ROW_SUM_ID, 4 * rows), (Q_GRADIENT_SUM_ID, 4 * rows * key.head_dim)],
    }
}

/// The values in host memory that the operations read, with their identifiers.
pub(super) fn scalars(key: &AttentionKey) -> Vec<(i64, f32)> {
    // SAFETY: the library is loaded.
    let masked = match unsafe { sys::cudnnGetVersion() } {
        INFINITE_SCORES_VERSION.. => f32::NEG_INFINITY,
        _ => f32::MIN,
    };
    let mut scalars =
        vec![(SCALE_ID, 1.0 / (key.head_dim as f32).sqrt()), (MASKED_SCORE_ID, masked)];
    if key.is_backward {
        scalars.push((ONE_ID, 1.0));
    }
    scalars
}

struct Builder<'a> {
    graph: OperationGraph,
    key: &'a AttentionKey,
}

impl Builder<'_> {
    fn sizes(&self, heads: u64, columns: u64) -> Dimensions {
        [self.key.sequences, heads, self.key.length, columns].map(|size| size as i64)
    }

    /// Strides of heads side by side in rows of this stride.
    fn strides(&self, row: u64) -> Dimensions {
        [self.key.length * row, self.key.head_dim, row, 1].map(|stride| stride as i64)
    }

    /// An operand of the instruction, with one row per token.
    fn operand(&mut self, tensor: AttentionTensor) -> Result<TensorId, CudnnError> {
        use AttentionTensor::*;
        let key = self.key;
        let (heads, row) = match tensor {
            Q | QGradient => (key.heads, key.q_stride),
            K | KGradient => (key.kv_heads, key.k_stride),
            V | VGradient => (key.kv_heads, key.v_stride),
            Out | OutGradient => (key.heads, key.out_stride),
            Statistics => {
                let strides = [key.length * key.heads, 1, key.heads, 1].map(|of| of as i64);
                let sizes = self.sizes(key.heads, 1);
                return self.graph.tensor(Storage::Memory(tensor as i64), F32, sizes, strides);
            }
        };
        let (sizes, strides) = (self.sizes(heads, key.head_dim), self.strides(row));
        self.graph.tensor(Storage::Memory(tensor as i64), BF16, sizes, strides)
    }

    /// Keys or values with rows and columns exchanged: one column per token. Also returns the strides.
    fn transposed_operand(
        &mut self,
        tensor: AttentionTensor,
        row: u64,
    ) -> Result<(TensorId, Dimensions), CudnnError> {
        let [sequences, heads, rows, columns] = self.sizes(self.key.kv_heads, self.key.head_dim);
        let [of_sequence, of_head, of_row, of_column] = self.strides(row);
        let (sizes, strides) =
            ([sequences, heads, columns, rows], [of_sequence, of_head, of_column, of_row]);
        let storage = Storage::Memory(tensor as i64);
        Ok((self.graph.tensor(storage, BF16, sizes, strides)?, strides))
    }

    /// One score per query and key of every head.
    fn scores(&self) -> Dimensions {
        self.sizes(self.key.heads, self.key.length)
    }

    /// Replaces scores of later keys.
    fn mask(&mut self, scores: TensorId) -> Result<TensorId, CudnnError> {
        let row = self.graph.index(scores, 2)?;
        let column = self.graph.index(scores, 3)?;
        let visible = self.graph.intermediate(DataType::CUDNN_DATA_BOOLEAN, self.scores())?;
        let compare = Pointwise::CUDNN_POINTWISE_CMP_GE;
        self.graph.pointwise_into(compare, row, &[column], visible)?;
        let masked = self.graph.scalar(MASKED_SCORE_ID)?;
        let select = Pointwise::CUDNN_POINTWISE_BINARY_SELECT;
        self.graph.pointwise(select, scores, &[masked, visible])
    }

    fn forward(&mut self) -> Result<(), CudnnError> {
        use AttentionTensor::*;
        use Pointwise::*;
        let q = self.operand(Q)?;
        let (k_transposed, _) = self.transposed_operand(K, self.key.k_stride)?;
        let v = self.operand(V)?;
        let (out, statistics) = (self.operand(Out)?, self.operand(Statistics)?);
        let scale = self.graph.scalar(SCALE_ID)?;

        let scores = self.graph.intermediate(F32, self.scores())?;
        self.graph.matmul(q, k_transposed, scores)?;
        let scores = self.graph.pointwise(CUDNN_POINTWISE_MUL, scores, &[scale])?;
        let scores = self.mask(scores)?;
        let maxima = self.graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_MAX, scores)?;
        let reduced = self.graph.pointwise(CUDNN_POINTWISE_SUB, scores, &[maxima])?;
        let exponentials = self.graph.pointwise(CUDNN_POINTWISE_EXP, reduced, &[])?;
        let sums = self.graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, exponentials)?;
        let logarithms = self.graph.pointwise(CUDNN_POINTWISE_LOG, sums, &[])?;
        self.graph.pointwise_into(CUDNN_POINTWISE_ADD, maxima, &[logarithms], statistics)?;
        let probabilities = self.graph.intermediate(BF16, self.scores())?;
        self.graph.pointwise_into(CUDNN_POINTWISE_DIV, exponentials, &[sums], probabilities)?;
        self.graph.matmul(probabilities, v, out)
    }

    fn backward(&mut self) -> Result<(), CudnnError> {
        use AttentionTensor::*;
        use Pointwise::*;
        let key = self.key;
        let q = self.operand(Q)?;
        let (k_transposed, k_strides) = self.transposed_operand(K, key.k_stride)?;
        let (v_transposed, _) = self.transposed_operand(V, key.v_stride)?;
        let (out, statistics) = (self.operand(Out)?, self.operand(Statistics)?);
        let out_gradient = self.operand(OutGradient)?;
        let gradients =
            [self.operand(QGradient)?, self.operand(KGradient)?, self.operand(VGradient)?];
        let [q_gradient, k_gradient, v_gradient] = gradients;
        let (scale, one) = (self.graph.scalar(SCALE_ID)?, self.graph.scalar(ONE_ID)?);
        let head_sizes = self.sizes(key.heads, key.head_dim);
        let row_sizes = self.sizes(key.heads, 1);

        let terms = self.graph.pointwise(CUDNN_POINTWISE_MUL, out_gradient, &[out])?;
        let sums = self.graph.reduce_rows(Reduction::CUDNN_REDUCE_TENSOR_ADD, terms)?;
        let memory = Storage::Memory(ROW_SUM_ID);
        let row_sums = self.graph.tensor(memory, F32, row_sizes, packed(row_sizes))?;
        self.graph.pointwise_into(CUDNN_POINTWISE_MUL, sums, &[one], row_sums)?;

        let scores = self.graph.intermediate(F32, self.scores())?;
        self.graph.matmul(q, k_transposed, scores)?;
        let scores = self.graph.pointwise(CUDNN_POINTWISE_MUL, scores, &[scale])?;
        let scores = self.graph.pointwise(CUDNN_POINTWISE_SUB, scores, &[statistics])?;
        let scores = self.mask(scores)?;
        let probabilities = self.graph.pointwise(CUDNN_POINTWISE_EXP, scores, &[])?;
        let strides = packed(self.scores());
        let transposed = self.graph.transpose(probabilities, strides)?;
        self.sum_over_groups(transposed, out_gradient, v_gradient)?;

        let products = self.graph.intermediate(F32, self.scores())?;
        self.graph.matmul(out_gradient, v_transposed, products)?;
        let products = self.graph.pointwise(CUDNN_POINTWISE_SUB, products, &[row_sums])?;
        let products = self.graph.pointwise(CUDNN_POINTWISE_MUL, products, &[probabilities])?;
        let score_gradients = self.graph.pointwise(CUDNN_POINTWISE_MUL, products, &[scale])?;
        let transposed = self.graph.transpose(score_gradients, strides)?;
        self.sum_over_groups(transposed, q, k_gradient)?;

        let k = self.graph.transpose(k_transposed, k_strides)?;
        let memory = Storage::Memory(Q_GRADIENT_SUM_ID);
        let sum = self.graph.tensor(memory, F32, head_sizes, packed(head_sizes))?;
        self.graph.matmul(score_gradients, k, sum)?;
        self.graph.pointwise_into(CUDNN_POINTWISE_IDENTITY, sum, &[], q_gradient)
    }

    /// Adds `into = a·b`, summed over the query heads that share a KV head.
    fn sum_over_groups(
        &mut self,
        a: TensorId,
        b: TensorId,
        into: TensorId,
    ) -> Result<(), CudnnError> {
        let key = self.key;
        if key.heads == key.kv_heads {
            return self.graph.matmul(a, b, into);
        }
        let of_heads = self.graph.intermediate(BF16, self.sizes(key.heads, key.head_dim))?;
        self.graph.matmul(a, b, of_heads)?;
        self.graph.reduce(Reduction::CUDNN_REDUCE_TENSOR_ADD, of_heads, into)
    }
}
