//! The kernels of a GPT under a framework, counted from the operators that it runs.
//!
//! For n rows (sequences · tokens) of width h, a heads, t devices of the tensor axis, bytes are those of
//! 16-bit elements (1 for a dropout mask, 4 where the loss computes in fp32). `E` is an element:
//!
//! | forward pass | bytes | | backward pass | bytes |
//! |---|---|---|---|---|
//! | LayerNorm, twice | 4·nh | | LayerNorm and its scales, twice | 10·nh |
//! | softmax of the scores | 4 E | | softmax | 6 E |
//! | dropout of the scores | 5 E | | dropout | 5 E |
//! | transposed context | 4·nh/t | | gradients of q, k and v put together, bias | 18·nh/t |
//! | bias, dropout, residual, twice | 7·nh | | the same, twice | 7·nh |
//! | bias and GELU | 4·4nh/t | | the same | 8·4nh/t |
//! | | | | sums of the residual's gradients, twice | 6·nh |
//! | | | | gradients of weights added up | 6 a weight |

use narrows_plan::kernel::{
    Collective, CollectiveKind, FusedKernel, FusedKind, Gemm, Kernel, Transfer,
};
use narrows_plan::mesh::{Axis, DeviceGroup};
use narrows_plan::{Bytes, DType, Mesh};

use crate::measurements::GptModel;

/// A list of kernels, and how many operators the host launches for it.
#[derive(Clone, Debug, Default)]
pub struct OperatorList {
    /// What the device runs.
    pub kernels: Vec<Kernel>,
}

/// One microbatch on one device.
#[derive(Clone, Copy, Debug)]
pub struct MicrobatchShape {
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
    fn product(&mut self, m: u64, k: u64, n: u64, batch: u64) {
        let (input, output) = (DType::Bf16, DType::Bf16);
        let gemm = Gemm { m, n, k, batch, accumulate: false, input, output };
        self.kernels.push(Kernel::Gemm(gemm));
    }

    /// The products of the gradients of A\[m,k\] and B\[k,n\].
    fn gradients(&mut self, m: u64, k: u64, n: u64, batch: u64) {
        self.product(m, n, k, batch);
        self.product(k, m, n, batch);
    }

    fn pass(&mut self, bytes: u64) {
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
    /// Whether the framework's kernel for softmax takes these scores: four matrices at a time.
    /// Otherwise it casts, scales, masks and casts back, operator by operator.
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

    /// Width of one part of a block's inner tensors.
    fn part(&self) -> u64 {
        self.gpt.hidden / self.mesh.tensor
    }

    fn linears(&self) -> [(u64, u64); 4] {
        let (h, part) = (self.gpt.hidden, self.part());
        [(h, 3 * part), (part, h), (h, 4 * part), (4 * part, h)]
    }

    fn attention(&self) -> [(u64, u64, u64, u64); 2] {
        let head = self.gpt.hidden / self.gpt.heads;
        let batch = self.sequences * self.gpt.heads / self.mesh.tensor;
        [(self.length, head, self.length, batch), (self.length, self.length, head, batch)]
    }

    /// A block, forward.
    pub fn block_forward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let (n, h, part) = (self.rows(), self.gpt.hidden, self.part());
        for (k, width) in self.linears() {
            work.product(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            work.product(m, k, width, batch);
        }
        for bytes in [4 * n * h, 4 * n * h, 7 * n * h, 7 * n * h] {
            work.pass(bytes);
        }
        for bytes in [4 * self.scores(), 5 * self.scores(), 4 * n * part, 16 * n * part] {
            work.pass(bytes);
        }
        if !self.fused_softmax() {
            // To fp32, scaled, masked, back to 16 bits.
            for bytes in [6, 8, 9, 6] {
                work.pass(bytes * self.scores());
            }
        }
        for _ in 0..2 {
            work.all_reduce(2 * n * h, self.tensor_group());
        }
        work
    }

    /// A block, backward, with nothing computed again.
    pub fn block_backward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let (n, h, part) = (self.rows(), self.gpt.hidden, self.part());
        for (k, width) in self.linears() {
            work.gradients(n, k, width, 1);
        }
        for (m, k, width, batch) in self.attention() {
            work.gradients(m, k, width, batch);
        }
        for bytes in [10 * n * h, 7 * n * h, 6 * n * h] {
            work.pass(bytes);
            work.pass(bytes);
        }
        for bytes in [6 * self.scores(), 5 * self.scores(), 18 * n * part, 32 * n * part] {
            work.pass(bytes);
        }
        if !self.fused_softmax() {
            for bytes in [6, 9, 8, 6] {
                work.pass(bytes * self.scores());
            }
        }
        work.pass(6 * self.block_weights());
        for _ in 0..2 {
            work.all_reduce(2 * n * h, self.tensor_group());
        }
        work
    }

    /// Rows of the embedding and their positions, forward; the same bytes and more go backward.
    pub fn embedding_forward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let bytes = self.rows() * self.gpt.hidden;
        for times in [4, 6, 5] {
            work.pass(times * bytes);
        }
        work.all_reduce(2 * bytes, self.tensor_group());
        work
    }

    /// The embedding's gradients.
    pub fn embedding_backward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let bytes = self.rows() * self.gpt.hidden;
        for times in [5, 6, 6] {
            work.pass(times * bytes);
        }
        work.pass(6 * self.gpt.vocabulary / self.mesh.tensor * self.gpt.hidden);
        work
    }

    /// The last norm, the logits and the loss, forward. The loss computes in fp32, operator by
    /// operator: a cast, the maximum, its subtraction, the exponential, its sum, the division.
    pub fn head_forward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let (n, h) = (self.rows(), self.gpt.hidden);
        let width = self.gpt.vocabulary / self.mesh.tensor;
        work.pass(4 * n * h);
        work.product(n, h, width, 1);
        for bytes in [6, 4, 8, 8, 4, 8] {
            work.pass(bytes * n * width);
        }
        for _ in 0..3 {
            work.all_reduce(4 * n, self.tensor_group());
        }
        work
    }

    /// The gradients of the loss, the logits and the last norm.
    pub fn head_backward(&self) -> OperatorList {
        let mut work = OperatorList::default();
        let (n, h) = (self.rows(), self.gpt.hidden);
        let width = self.gpt.vocabulary / self.mesh.tensor;
        for bytes in [8, 6] {
            work.pass(bytes * n * width);
        }
        work.gradients(n, h, width, 1);
        work.pass(10 * n * h);
        work.pass(6 * width * h);
        work.all_reduce(2 * n * h, self.tensor_group());
        work
    }

    /// What a stage hands to the next one.
    pub fn transfer(&self) -> Kernel {
        let stride = self.mesh.tensor * self.mesh.data;
        let group = DeviceGroup { axis: Axis::Pipeline, size: self.mesh.pipeline, stride };
        Kernel::Transfer(Transfer { bytes: Bytes(2 * self.rows() * self.gpt.hidden), group })
    }

    /// The weights of a stage on one device.
    pub fn stage_weights(&self, stage: u64) -> u64 {
        let ends = u64::from(stage == 0) + u64::from(stage + 1 == self.mesh.pipeline);
        let tables = if self.mesh.pipeline == 1 { 1 } else { ends };
        let table = self.gpt.vocabulary * self.gpt.hidden / self.mesh.tensor;
        self.gpt.layers / self.mesh.pipeline * self.block_weights() + tables * table
    }

    /// The reductions of gradients of so many bytes a weight: over the replicas, and of the embedding
    /// that the first and the last stage share.
    pub fn gradient_reductions(&self, stage: u64, bytes: u64) -> OperatorList {
        let mut work = OperatorList::default();
        let data = DeviceGroup { axis: Axis::Data, size: self.mesh.data, stride: self.mesh.tensor };
        work.all_reduce(bytes * self.stage_weights(stage), data);
        let shared = stage == 0 || stage + 1 == self.mesh.pipeline;
        if self.mesh.pipeline > 1 && shared {
            let table = self.gpt.vocabulary * self.gpt.hidden / self.mesh.tensor;
            let stride = self.mesh.tensor * self.mesh.data * (self.mesh.pipeline - 1);
            let ends = DeviceGroup { axis: Axis::Pipeline, size: 2, stride };
            work.all_reduce(bytes * table, ends);
        }
        work
    }
}
