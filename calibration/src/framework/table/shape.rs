//! Kernels of a decoder's segments under a framework's table, on one device.

use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, FusedKernel, FusedKind, Gemm, Kernel,
    Transfer,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

use super::file::{
    BlockRecomputation, FrameworkTable, LinearGrouping, MemoryPass, ModelKind, PassTensor,
};
use crate::measurements::{DecoderModel, EmbeddingKind, MlpKind};

/// The sizes of one microbatch on one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecoderShape<'a> {
    /// The table.
    pub table: &'a FrameworkTable,
    /// The model.
    pub model: DecoderModel,
    /// The mesh.
    pub mesh: Mesh,
    /// Sequences of a microbatch.
    pub sequences: u64,
    /// Tokens of a sequence.
    pub length: u64,
    /// Whether the residual stream is sharded on tokens over the tensor axis.
    pub shards_tokens: bool,
}

impl DecoderShape<'_> {
    fn rows(&self) -> u64 {
        self.sequences * self.length
    }

    /// Elements of the residual stream on one device.
    fn stream(&self) -> u64 {
        let devices = if self.shards_tokens { self.mesh.tensor } else { 1 };
        self.rows() / devices * self.model.hidden
    }

    fn head_dim(&self) -> u64 {
        self.model.hidden / self.model.heads
    }

    fn query_width(&self) -> u64 {
        self.model.hidden / self.mesh.tensor
    }

    fn key_width(&self) -> u64 {
        (self.model.kv_heads / self.mesh.tensor).max(1) * self.head_dim()
    }

    fn mlp_width(&self) -> u64 {
        self.model.d_ff / self.mesh.tensor
    }

    fn logits_width(&self) -> u64 {
        self.model.vocabulary.div_ceil(self.mesh.tensor)
    }

    /// Input and output width of the GEMMs of a block's linears.
    fn linears(&self) -> Vec<(u64, u64)> {
        let (h, q, kv, f) =
            (self.model.hidden, self.query_width(), self.key_width(), self.mlp_width());
        let (into_attention, into_mlp) = match (self.table.linears, self.model.mlp) {
            (LinearGrouping::Grouped, MlpKind::Plain) => (vec![q + 2 * kv], vec![f]),
            (LinearGrouping::Grouped, MlpKind::Gated) => (vec![q + 2 * kv], vec![2 * f]),
            (LinearGrouping::Separate, MlpKind::Plain) => (vec![q, kv, kv], vec![f]),
            (LinearGrouping::Separate, MlpKind::Gated) => (vec![q, kv, kv], vec![f, f]),
        };
        let into = |widths: Vec<u64>| widths.into_iter().map(move |width| (h, width));
        into(into_attention).chain([(q, h)]).chain(into(into_mlp)).chain([(f, h)]).collect()
    }

    /// Weights of a block on one device of the tensor axis.
    pub fn block_weights(&self) -> u64 {
        self.linears().iter().map(|(k, n)| k * n).sum()
    }

    /// Weights of the embedding on one device of the tensor axis.
    pub fn embedding_weights(&self) -> u64 {
        self.logits_width() * self.model.hidden
    }

    /// Weights of the logits on one device that are not those of the embedding.
    pub fn head_weights(&self) -> u64 {
        match self.model.embedding {
            EmbeddingKind::Tied => 0,
            EmbeddingKind::Untied => self.embedding_weights(),
        }
    }

    /// A block, forward.
    pub fn block_forward(&self) -> Vec<Kernel> {
        self.block_part(self.linears().len())
    }

    /// The kernels that recomputation of a whole block repeats.
    pub fn recomputed_block(&self) -> Vec<Kernel> {
        let linears = self.linears().len();
        self.block_part(match self.table.block_recomputation {
            BlockRecomputation::UntilLastSaved => linears - 1,
            BlockRecomputation::Whole => linears,
        })
    }

    /// A block, forward, with this number of its linears. The sum over the tensor axis and the pass after the last linear
    /// belong to that linear.
    fn block_part(&self, linears: usize) -> Vec<Kernel> {
        let all = self.linears();
        let of_linear = |(k, n): &(u64, u64)| gemm(self.rows(), *k, *n);
        let mut kernels: Vec<Kernel> = all.iter().take(linears).map(of_linear).collect();
        kernels.push(self.attention(Direction::Forward));
        let mut collectives = self.stream_collectives();
        let mut passes = self.passes(&self.table.passes.block_forward, self.block_weights());
        if linears < all.len() {
            collectives.pop();
            passes.pop();
        }
        kernels.extend(collectives);
        interleaved(passes, kernels)
    }

    /// A block, backward, without recomputation.
    pub fn block_backward(&self) -> Vec<Kernel> {
        let gradients = |(k, n): (u64, u64)| [gemm(self.rows(), n, k), gemm(k, self.rows(), n)];
        let mut kernels: Vec<Kernel> = self.linears().into_iter().flat_map(gradients).collect();
        kernels.push(self.attention(Direction::Backward));
        kernels.extend(self.stream_collectives());
        interleaved(self.passes(&self.table.passes.block_backward, self.block_weights()), kernels)
    }

    /// The kernels of a block that selective recomputation of operators repeats: passes and every second GEMM, the first
    /// of which is kept.
    pub fn recomputed_ops(&self) -> Vec<Kernel> {
        let gemms: Vec<Kernel> = self
            .linears()
            .into_iter()
            .skip(1)
            .step_by(2)
            .map(|(k, n)| gemm(self.rows(), k, n))
            .collect();
        interleaved(self.passes(&self.table.passes.block_forward, self.block_weights()), gemms)
    }

    /// The core of attention, forward.
    pub fn attention_core(&self) -> Vec<Kernel> {
        vec![self.attention(Direction::Forward)]
    }

    /// The embedding, forward.
    pub fn embedding_forward(&self) -> Vec<Kernel> {
        let mut kernels =
            self.passes(&self.table.passes.embedding_forward, self.embedding_weights());
        if self.mesh.tensor > 1 {
            kernels.push(self.stream_collective(CollectiveKind::AllReduce));
        }
        kernels
    }

    /// The embedding's gradients.
    pub fn embedding_backward(&self) -> Vec<Kernel> {
        self.passes(&self.table.passes.embedding_backward, self.embedding_weights())
    }

    /// Last norm, logits and loss, forward.
    pub fn head_forward(&self) -> Vec<Kernel> {
        let mut kernels = vec![gemm(self.rows(), self.model.hidden, self.logits_width())];
        kernels.extend(self.passes(&self.table.passes.head_forward, self.embedding_weights()));
        kernels
    }

    /// The same, backward.
    pub fn head_backward(&self) -> Vec<Kernel> {
        let (n, h, width) = (self.rows(), self.model.hidden, self.logits_width());
        let mut kernels = self.passes(&self.table.passes.head_backward, self.embedding_weights());
        kernels.extend([gemm(n, width, h), gemm(h, n, width)]);
        if self.mesh.tensor > 1 {
            kernels.push(self.stream_collective(CollectiveKind::AllReduce));
        }
        kernels
    }

    /// The P2P transfer from a stage to the next one.
    pub fn transfer(&self) -> Kernel {
        let stride = self.mesh.tensor * self.mesh.data;
        let group = DeviceGroup { axis: Axis::Pipeline, size: self.mesh.pipeline, stride };
        Kernel::Transfer(Transfer { bytes: Bytes(2 * self.stream()), group })
    }

    /// A collective over the replicas, on `weights` weights of `bytes` bytes each.
    pub fn over_replicas(&self, kind: CollectiveKind, weights: u64, bytes: u64) -> Kernel {
        let group =
            DeviceGroup { axis: Axis::Data, size: self.mesh.data, stride: self.mesh.tensor };
        Kernel::Collective(Collective { kind, payload: Bytes(weights * bytes), group })
    }

    /// The update of `parameters` parameters.
    pub fn update(&self, parameters: u64) -> Kernel {
        memory_pass(parameters * self.table.parameters.update_bytes)
    }

    fn attention(&self, direction: Direction) -> Kernel {
        Kernel::Attention(Attention {
            direction,
            sequences: self.sequences,
            length: self.length,
            heads: self.model.heads / self.mesh.tensor,
            kv_heads: (self.model.kv_heads / self.mesh.tensor).max(1),
            head_dim: self.head_dim(),
            input: DType::Bf16,
            window: None,
        })
    }

    fn stream_collective(&self, kind: CollectiveKind) -> Kernel {
        let group = DeviceGroup { axis: Axis::Tensor, size: self.mesh.tensor, stride: 1 };
        let payload = Bytes(2 * self.rows() * self.model.hidden);
        Kernel::Collective(Collective { kind, payload, group })
    }

    /// The two sums of partial results of a pass through a block over the tensor axis.
    fn stream_collectives(&self) -> Vec<Kernel> {
        let kinds: &[CollectiveKind] = match (self.mesh.tensor, self.shards_tokens) {
            (1, _) => &[],
            (_, true) => &[CollectiveKind::AllGather, CollectiveKind::ReduceScatter],
            (_, false) => &[CollectiveKind::AllReduce],
        };
        kinds.iter().chain(kinds).map(|kind| self.stream_collective(*kind)).collect()
    }

    /// The passes of a segment with `weights` weights.
    fn passes(&self, passes: &[MemoryPass], weights: u64) -> Vec<Kernel> {
        let applies = |pass: &&MemoryPass| match pass.only {
            ModelKind::All => true,
            ModelKind::Gated => self.model.mlp == MlpKind::Gated,
            ModelKind::Plain => self.model.mlp == MlpKind::Plain,
        };
        let launches = |pass: &MemoryPass| {
            let elements = match pass.of {
                PassTensor::Hidden => self.stream(),
                PassTensor::Queries => self.rows() * self.query_width(),
                PassTensor::Keys => self.rows() * self.key_width(),
                PassTensor::Mlp => self.rows() * self.mlp_width(),
                PassTensor::Logits => self.rows() * self.logits_width(),
                PassTensor::Weights => weights,
            };
            let kernel = memory_pass(elements * pass.bytes_per_element);
            vec![kernel; pass.times as usize]
        };
        passes.iter().filter(applies).flat_map(launches).collect()
    }
}

fn gemm(m: u64, k: u64, n: u64) -> Kernel {
    let (input, output) = (DType::Bf16, DType::Bf16);
    Kernel::Gemm(Gemm { m, n, k, batch: 1, accumulate: false, residual: false, input, output })
}

fn memory_pass(bytes: u64) -> Kernel {
    let traffic = Bytes(bytes);
    Kernel::Fused(FusedKernel {
        kind: FusedKind::Add,
        traffic,
        unfused_traffic: traffic,
        unfused_launches: 1,
    })
}

/// Both lists in order, with the passes spread evenly between the other kernels.
fn interleaved(passes: Vec<Kernel>, others: Vec<Kernel>) -> Vec<Kernel> {
    let (count, total) = (others.len(), passes.len());
    let mut passes = passes.into_iter();
    let mut kernels = vec![];
    for (index, other) in others.into_iter().enumerate() {
        kernels.push(other);
        let due = (index + 1) * total / count - index * total / count;
        kernels.extend(passes.by_ref().take(due));
    }
    kernels.extend(passes);
    kernels
}
