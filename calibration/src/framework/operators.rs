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
}

impl OperatorList {
    fn gemm(&mut self, m: u64, k: u64, n: u64, batch: u64) {
        let (input, output) = (DType::Bf16, DType::Bf16);
        let gemm = Gemm { m, n, k, batch, accumulate: false, input, output };
        self.kernels.push(Kernel::Gemm(gemm));
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
        let (kind, payload) = (CollectiveKind::AllReduce, Bytes(bytes));
        self.kernels.push(Kernel::Collective(Collective { kind, payload, group }));
    }
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

    /// A block, forward.
    pub fn block_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h, shard) = (self.rows(), self.gpt.hidden, self.shard_width());
        for (k, width) in self.linears() {
            operators.gemm(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            operators.gemm(m, k, width, batch);
        }
        for bytes in [4 * n * h, 4 * n * h, 7 * n * h, 7 * n * h] {
            operators.elementwise(bytes);
        }
        for bytes in [4 * self.scores(), 5 * self.scores(), 4 * n * shard, 16 * n * shard] {
            operators.elementwise(bytes);
        }
        if !self.fused_softmax() {
            // Cast to fp32, scale, mask, cast to 16 bits.
            for bytes in [6, 8, 9, 6] {
                operators.elementwise(bytes * self.scores());
            }
        }
        for _ in 0..2 {
            operators.all_reduce(2 * n * h, self.tensor_group());
        }
        operators
    }

    /// A block, backward, without recomputation.
    pub fn block_backward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h, shard) = (self.rows(), self.gpt.hidden, self.shard_width());
        for (k, width) in self.linears() {
            operators.gradient_gemms(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            operators.gradient_gemms(m, k, width, batch);
        }
        for bytes in [10 * n * h, 7 * n * h, 6 * n * h] {
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
        for _ in 0..2 {
            operators.all_reduce(2 * n * h, self.tensor_group());
        }
        operators
    }

    /// The embedding of tokens and positions, forward.
    pub fn embedding_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let bytes = self.rows() * self.gpt.hidden;
        for times in [4, 6, 5] {
            operators.elementwise(times * bytes);
        }
        operators.all_reduce(2 * bytes, self.tensor_group());
        operators
    }

    /// The embedding's gradients.
    pub fn embedding_backward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let bytes = self.rows() * self.gpt.hidden;
        for times in [5, 6, 6] {
            operators.elementwise(times * bytes);
        }
        operators.elementwise(6 * self.gpt.vocabulary / self.mesh.tensor * self.gpt.hidden);
        operators
    }

    /// The last norm, the logits and the loss, forward. The loss is computed in fp32, operator by operator: cast,
    /// maximum, subtraction, exponential, sum, division.
    pub fn head_forward(&self) -> OperatorList {
        let mut operators = OperatorList::default();
        let (n, h) = (self.rows(), self.gpt.hidden);
        let width = self.gpt.vocabulary / self.mesh.tensor;
        operators.elementwise(4 * n * h);
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
        operators.elementwise(10 * n * h);
        operators.elementwise(6 * width * h);
        operators.all_reduce(2 * n * h, self.tensor_group());
        operators
    }

    /// The P2P transfer from a stage to the next one.
    pub fn transfer(&self) -> Kernel {
        let stride = self.mesh.tensor * self.mesh.data;
        let group = DeviceGroup { axis: Axis::Pipeline, size: self.mesh.pipeline, stride };
        Kernel::Transfer(Transfer { bytes: Bytes(2 * self.rows() * self.gpt.hidden), group })
    }

    /// The weights of a stage on one device.
    fn stage_weights(&self, stage: u64) -> u64 {
        let ends = u64::from(stage == 0) + u64::from(stage + 1 == self.mesh.pipeline);
        let tables = if self.mesh.pipeline == 1 { 1 } else { ends };
        let table = self.gpt.vocabulary * self.gpt.hidden / self.mesh.tensor;
        self.gpt.layers / self.mesh.pipeline * self.block_weights() + tables * table
    }

    /// The gradient reductions of a stage, with `gradient_bytes` bytes per gradient: over the replicas, and between the
    /// first and the last stage, which share the embedding.
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
        operators
    }
}
