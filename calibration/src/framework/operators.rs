//! Kernels of a GPT under a framework, counted from its operators.
//!
//! Bytes of traffic for n rows (sequences · tokens) of width h, a heads and t devices of the tensor axis. Elements have 2
//! bytes, those of dropout masks 1, and those of the loss 4 (fp32). E is the number of elements of the scores on one
//! device:
//!
//! | forward pass | bytes | | backward pass | bytes |
//! |---|---|---|---|---|
//! | LayerNorm, twice | 4·nh | | LayerNorm and its scales, twice | 10·nh |
//! | softmax of the scores | 4 E | | softmax | 6 E |
//! | dropout of the scores | 5 E | | dropout | 5 E |
//! | transposed context | 4·nh/t | | concatenated gradients of q, k and v, bias | 18·nh/t |
//! | bias, dropout, residual, twice | 7·nh | | the same, twice | 7·nh |
//! | bias and GELU | 4·4nh/t | | the same | 8·4nh/t |
//! | | | | sums of the residual's gradients, twice | 6·nh |
//! | | | | gradients of weights added up | 6 a weight |
//!
//! With sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
//! 2205.05198), LayerNorms, dropout and additions of the residual stream have n/t rows: nh becomes nh/t. An all-reduce of
//! a block becomes a reduce-scatter, and an all-gather before the next column linear; the backward pass mirrors both. It
//! also gathers the sharded inputs of column linears again for the gradients of their weights, beside the GEMM of the
//! input's gradient: of such an all-gather only the time beyond this GEMM counts. Gradients of the scales and biases on
//! sharded rows are summed over the tensor axis once a step, and stages send shards to each other.
//!
//! Selective recomputation repeats the core of attention in the backward pass: both GEMMs, softmax, dropout, and the
//! transposed context.

use narrows_plan::kernel::{
    Collective, CollectiveKind, FusedKernel, FusedKind, Gemm, Kernel, Transfer,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

use crate::measurements::GptModel;

/// Operators that the host launches, as kernels on one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct OperatorList {
    /// One kernel for each operator.
    pub kernels: Vec<Kernel>,
    /// Collectives beside a GEMM, which is one of `kernels`.
    pub overlapped: Vec<OverlappedCollective>,
}

/// A collective beside a GEMM.
#[derive(Clone, Debug)]
pub(crate) struct OverlappedCollective {
    /// The collective.
    pub collective: Kernel,
    /// The GEMM.
    pub gemm: Kernel,
}

/// Rows of the residual stream on one device of the tensor axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResidualStream {
    /// All rows.
    Replicated,
    /// A share of the tokens (sequence parallelism).
    Sharded,
}

/// The sizes of one microbatch on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MicrobatchShape {
    /// The model.
    pub gpt: GptModel,
    /// The mesh.
    pub mesh: Mesh,
    /// Sequences of a microbatch.
    pub sequences: u64,
    /// Tokens of a sequence.
    pub length: u64,
    /// The residual stream.
    pub residual: ResidualStream,
}

impl OperatorList {
    fn gemm(&mut self, m: u64, k: u64, n: u64, batch: u64) {
        self.kernels.push(gemm(m, k, n, batch));
    }

    /// The GEMMs of the gradients of A\[m,k\] and B\[k,n\].
    fn gradient_gemms(&mut self, m: u64, k: u64, n: u64, batch: u64) {
        self.gemm(m, n, k, batch);
        self.gemm(k, m, n, batch);
    }

    fn elementwise(&mut self, bytes: u64) {
        let kind = FusedKind::Add;
        let (traffic, unfused_launches) = (Bytes(bytes), 1);
        self.kernels.push(Kernel::Fused(FusedKernel {
            kind,
            traffic,
            unfused_traffic: traffic,
            unfused_launches,
        }));
    }

    fn all_reduce(&mut self, bytes: u64, group: DeviceGroup) {
        self.kernels.push(collective(CollectiveKind::AllReduce, bytes, group));
    }
}

fn gemm(m: u64, k: u64, n: u64, batch: u64) -> Kernel {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Kernel::Gemm(Gemm { m, n, k, batch, accumulate: false, residual: false, input, output })
}

/// A collective on `bytes` bytes of the whole tensor.
fn collective(kind: CollectiveKind, bytes: u64, group: DeviceGroup) -> Kernel {
    Kernel::Collective(Collective { kind, payload: Bytes(bytes), group })
}

impl MicrobatchShape {
    /// Whether the framework's fused softmax applies, which processes four score matrices at a time. Otherwise the
    /// framework casts, scales, masks and casts back, operator by operator.
    fn fused_softmax(&self) -> bool {
        (self.gpt.heads / self.mesh.tensor * self.sequences).is_multiple_of(4)
    }

    fn rows(&self) -> u64 {
        self.sequences * self.length
    }

    /// Rows of the residual stream on one device.
    fn residual_rows(&self) -> u64 {
        match self.residual {
            ResidualStream::Replicated => self.rows(),
            ResidualStream::Sharded => self.rows() / self.mesh.tensor,
        }
    }

    /// The sum of partial results of all rows: an all-reduce, or a reduce-scatter to the rows of each device.
    fn reduction(&self) -> Kernel {
        let kind = match self.residual {
            ResidualStream::Replicated => CollectiveKind::AllReduce,
            ResidualStream::Sharded => CollectiveKind::ReduceScatter,
        };
        collective(kind, self.stream_bytes(), self.tensor_group())
    }

    /// Adds the sum of partial results of all rows.
    fn reduce(&self, operators: &mut OperatorList) {
        operators.kernels.push(self.reduction());
    }

    /// Adds the sum of the partial gradients of the input of a column linear of width `width`, which runs beside the GEMM
    /// of its weight's gradient.
    fn reduce_beside_weight_gradient(&self, operators: &mut OperatorList, width: u64) {
        let gemm = gemm(self.gpt.hidden, self.rows(), width, 1);
        operators.overlapped.push(OverlappedCollective { collective: self.reduction(), gemm });
    }

    /// Adds the all-gather of a sharded residual stream.
    fn gather(&self, operators: &mut OperatorList) {
        if self.residual == ResidualStream::Sharded {
            operators.kernels.push(self.all_gather());
        }
    }

    /// Adds the all-gather of the sharded input of a column linear of width `width`, which runs beside the GEMM of this
    /// input's gradient.
    fn gather_for_weight_gradient(&self, operators: &mut OperatorList, width: u64) {
        if self.residual == ResidualStream::Sharded {
            let gemm = gemm(self.rows(), width, self.gpt.hidden, 1);
            let collective = self.all_gather();
            operators.overlapped.push(OverlappedCollective { collective, gemm });
        }
    }

    fn all_gather(&self) -> Kernel {
        collective(CollectiveKind::AllGather, self.stream_bytes(), self.tensor_group())
    }

    /// Bytes of all rows of the residual stream.
    fn stream_bytes(&self) -> u64 {
        2 * self.rows() * self.gpt.hidden
    }

    fn tensor_group(&self) -> DeviceGroup {
        DeviceGroup { axis: Axis::Tensor, size: self.mesh.tensor, stride: 1 }
    }

    /// Elements of the scores on one device.
    fn scores(&self) -> u64 {
        self.gpt.heads / self.mesh.tensor * self.sequences * self.length * self.length
    }

    /// The weights of a block on one device.
    fn block_weights(&self) -> u64 {
        12 * self.gpt.hidden * self.gpt.hidden / self.mesh.tensor
    }

    /// Width of one device's shard of a block's inner tensors.
    fn shard_width(&self) -> u64 {
        self.gpt.hidden / self.mesh.tensor
    }

    /// k and n of the GEMMs of the linears.
    fn linears(&self) -> [(u64, u64); 4] {
        let (h, shard) = (self.gpt.hidden, self.shard_width());
        [(h, 3 * shard), (shard, h), (h, 4 * shard), (4 * shard, h)]
    }

    /// m, k, n and batch of the GEMMs of attention.
    fn attention(&self) -> [(u64, u64, u64, u64); 2] {
        let head = self.gpt.hidden / self.gpt.heads;
        let batch = self.sequences * self.gpt.heads / self.mesh.tensor;
        [(self.length, head, self.length, batch), (self.length, self.length, head, batch)]
    }

    /// Bytes of the element-wise operators of attention's core with a fused softmax: softmax, dropout, context.
    fn core_bytes(&self) -> [u64; 3] {
        [4 * self.scores(), 5 * self.scores(), 4 * self.rows() * self.shard_width()]
    }

    /// Bytes of the operators that an unfused softmax adds: cast to fp32, scale, mask, cast to 16 bits.
    fn unfused_softmax_bytes(&self) -> Vec<u64> {
        let bytes: &[u64] = if self.fused_softmax() { &[] } else { &[6, 8, 9, 6] };
        bytes.iter().map(|bytes| bytes * self.scores()).collect()
    }

    /// The core of attention, forward, as selective recomputation repeats it.
    pub fn attention_core(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        for (m, k, width, batch) in self.attention() {
            operators.gemm(m, k, width, batch);
        }
        for bytes in self.core_bytes().into_iter().chain(self.unfused_softmax_bytes()) {
            operators.elementwise(bytes);
        }
        operators
    }

    /// A block, forward.
    pub fn block_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h, shard) = (self.rows(), self.gpt.hidden, self.shard_width());
        let stream = self.residual_rows() * h;
        for (k, width) in self.linears() {
            operators.gemm(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            operators.gemm(m, k, width, batch);
        }
        for bytes in [4 * stream, 4 * stream, 7 * stream, 7 * stream] {
            operators.elementwise(bytes);
        }
        for bytes in self.core_bytes().into_iter().chain([16 * n * shard]) {
            operators.elementwise(bytes);
        }
        for bytes in self.unfused_softmax_bytes() {
            operators.elementwise(bytes);
        }
        for _ in 0..2 {
            self.gather(&mut operators);
            self.reduce(&mut operators);
        }
        operators
    }

    /// A block, backward, without recomputation.
    pub fn block_backward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h, shard) = (self.rows(), self.gpt.hidden, self.shard_width());
        let stream = self.residual_rows() * h;
        for (k, width) in self.linears() {
            operators.gradient_gemms(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            operators.gradient_gemms(m, k, width, batch);
        }
        for bytes in [10 * stream, 7 * stream, 6 * stream] {
            operators.elementwise(bytes);
            operators.elementwise(bytes);
        }
        for bytes in [6 * self.scores(), 5 * self.scores(), 18 * n * shard, 32 * n * shard] {
            operators.elementwise(bytes);
        }
        if !self.fused_softmax() {
            for bytes in [6, 9, 8, 6] {
                operators.elementwise(bytes * self.scores());
            }
        }
        operators.elementwise(6 * self.block_weights());
        // The linears of the residual stream are those of q, k and v, and the first of the MLP.
        for width in [3 * shard, 4 * shard] {
            self.gather(&mut operators);
            self.gather_for_weight_gradient(&mut operators, width);
            self.reduce_beside_weight_gradient(&mut operators, width);
        }
        operators
    }

    /// The embedding of tokens and positions, forward.
    pub fn embedding_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (all, stream) = (self.rows() * self.gpt.hidden, self.residual_rows() * self.gpt.hidden);
        operators.elementwise(4 * all);
        operators.elementwise(6 * all);
        if self.residual == ResidualStream::Sharded {
            // Each device copies its rows of the sum.
            operators.elementwise(4 * stream);
        }
        operators.elementwise(5 * stream);
        operators.all_reduce(self.stream_bytes(), self.tensor_group());
        operators
    }

    /// The embedding's gradients.
    pub fn embedding_backward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (all, stream) = (self.rows() * self.gpt.hidden, self.residual_rows() * self.gpt.hidden);
        for bytes in [5 * stream, 6 * all, 6 * all] {
            operators.elementwise(bytes);
        }
        operators.elementwise(6 * self.gpt.vocabulary / self.mesh.tensor * self.gpt.hidden);
        self.gather(&mut operators);
        operators
    }

    /// The last norm, the logits and the loss, forward. The loss is computed in fp32, operator by operator: cast,
    /// maximum, subtraction, exponential, sum, division.
    pub fn head_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h) = (self.rows(), self.gpt.hidden);
        let width = self.gpt.vocabulary / self.mesh.tensor;
        operators.elementwise(4 * self.residual_rows() * h);
        self.gather(&mut operators);
        operators.gemm(n, h, width, 1);
        for bytes in [6, 4, 8, 8, 4, 8] {
            operators.elementwise(bytes * n * width);
        }
        for _ in 0..3 {
            operators.all_reduce(4 * n, self.tensor_group());
        }
        operators
    }

    /// The gradients of the loss, the logits and the last norm.
    pub fn head_backward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h) = (self.rows(), self.gpt.hidden);
        let width = self.gpt.vocabulary / self.mesh.tensor;
        for bytes in [8, 6] {
            operators.elementwise(bytes * n * width);
        }
        operators.gradient_gemms(n, h, width, 1);
        operators.elementwise(10 * self.residual_rows() * h);
        operators.elementwise(6 * width * h);
        self.gather_for_weight_gradient(&mut operators, width);
        self.reduce_beside_weight_gradient(&mut operators, width);
        operators
    }

    /// The P2P transfer from a stage to the next one. Each device of the tensor axis sends its share, and replicated rows
    /// are gathered from the shares of all (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    /// Clusters Using Megatron-LM", arXiv 2104.04473, section 4.1).
    pub fn transfer(&self) -> OperatorList {
        let stride = self.mesh.tensor * self.mesh.data;
        let group = DeviceGroup { axis: Axis::Pipeline, size: self.mesh.pipeline, stride };
        let bytes = Bytes(self.stream_bytes() / self.mesh.tensor);
        let mut operators = OperatorList::default();
        operators.kernels.push(Kernel::Transfer(Transfer { bytes, group }));
        if self.residual == ResidualStream::Replicated && self.mesh.pipeline > 1 {
            operators.kernels.push(self.all_gather());
        }
        operators
    }

    /// The weights of a stage on one device.
    fn stage_weights(&self, stage: u64) -> u64 {
        let ends = u64::from(stage == 0) + u64::from(stage + 1 == self.mesh.pipeline);
        let tables = if self.mesh.pipeline == 1 { 1 } else { ends };
        let table = self.gpt.vocabulary * self.gpt.hidden / self.mesh.tensor;
        self.gpt.layers / self.mesh.pipeline * self.block_weights() + tables * table
    }

    /// Scales and biases of a stage that are applied to rows of the residual stream: those of two LayerNorms and two
    /// biases of row linears in a block, and those of the last LayerNorm.
    fn stream_vectors(&self, stage: u64) -> u64 {
        let last = u64::from(stage + 1 == self.mesh.pipeline);
        (6 * self.gpt.layers / self.mesh.pipeline + 2 * last) * self.gpt.hidden
    }

    /// The gradient reductions of a stage, with `gradient_bytes` bytes per gradient: over the replicas, between the
    /// first and the last stage, which share the embedding, and over the devices that have rows of a sharded residual
    /// stream.
    pub fn gradient_reductions(&self, stage: u64, gradient_bytes: u64) -> OperatorList {
        let mut operators = OperatorList::default();
        let data = DeviceGroup { axis: Axis::Data, size: self.mesh.data, stride: self.mesh.tensor };
        operators.all_reduce(gradient_bytes * self.stage_weights(stage), data);
        let shared = stage == 0 || stage + 1 == self.mesh.pipeline;
        if self.mesh.pipeline > 1 && shared {
            let table = self.gpt.vocabulary * self.gpt.hidden / self.mesh.tensor;
            let stride = self.mesh.tensor * self.mesh.data * (self.mesh.pipeline - 1);
            let ends = DeviceGroup { axis: Axis::Pipeline, size: 2, stride };
            operators.all_reduce(gradient_bytes * table, ends);
        }
        if self.residual == ResidualStream::Sharded {
            operators.all_reduce(gradient_bytes * self.stream_vectors(stage), self.tensor_group());
        }
        operators
    }
}
