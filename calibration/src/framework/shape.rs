//! Operators of a decoder's segments under a framework's table, on one device.

use narrows_plan::kernel::{
    Attention, Collective, CollectiveKind, Direction, Gemm, Kernel, Transfer,
};
use narrows_plan::{Axis, Bytes, DType, DeviceGroup, Mesh};

use super::file::{
    AttentionScores, BlockRecomputation, FrameworkTable, LinearGrouping, MemoryPass, PassCondition,
    PassTensor, StageTransfers, TensorCollectives,
};
use super::operator::{
    Operator, accumulating, gemm, gradient_gemms, interleaved, matmul, memory_pass,
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
    pub fn block_forward(&self) -> Vec<Operator> {
        self.block_part(self.linears().len())
    }

    /// The operators that recomputation of a whole block repeats.
    pub fn recomputed_block(&self) -> Vec<Operator> {
        let linears = self.linears().len();
        self.block_part(match self.table.block_recomputation {
            BlockRecomputation::UntilLastSaved => linears - 1,
            BlockRecomputation::Whole => linears,
        })
    }

    /// A block, forward, with this number of its linears. The sum over the tensor axis and the pass after the last linear
    /// belong to that linear.
    fn block_part(&self, linears: usize) -> Vec<Operator> {
        let all = self.linears();
        let of_linear = |(k, n): &(u64, u64)| matmul((self.rows(), *k, *n, 1));
        let mut operators: Vec<Operator> = all.iter().take(linears).map(of_linear).collect();
        operators.extend(self.attention(Direction::Forward));
        let mut collectives = self.stream_collectives();
        let mut passes = self.passes(&self.table.passes.attention_core, 0);
        passes.extend(self.passes(&self.table.passes.block_forward, self.block_weights()));
        if linears < all.len() {
            collectives.pop();
            passes.pop();
        }
        operators.extend(collectives);
        interleaved(passes, operators)
    }

    /// A block, backward, without recomputation.
    pub fn block_backward(&self) -> Vec<Operator> {
        let gradients = |(k, n)| self.linear_gradients(k, n);
        let mut operators: Vec<Operator> = self.linears().into_iter().flat_map(gradients).collect();
        operators.extend(self.attention(Direction::Backward));
        match self.table.tensor_collectives {
            TensorCollectives::Alone => operators.extend(self.stream_collectives()),
            TensorCollectives::BesideWeightGradients => {
                let into_mlp = if self.model.mlp == MlpKind::Gated { 2 } else { 1 };
                for width in
                    [self.query_width() + 2 * self.key_width(), into_mlp * self.mlp_width()]
                {
                    operators.extend(self.gather());
                    operators.extend(self.column_gradient_collectives(width));
                }
            }
        }
        let passes = self.passes(&self.table.passes.block_backward, self.block_weights());
        interleaved(passes, operators)
    }

    /// The operators of a block that selective recomputation of operators repeats: passes and every second GEMM, the first
    /// of which is kept.
    pub fn recomputed_ops(&self) -> Vec<Operator> {
        let repeated = self.linears().into_iter().skip(1).step_by(2);
        let gemms = repeated.map(|(k, n)| matmul((self.rows(), k, n, 1))).collect();
        interleaved(self.passes(&self.table.passes.block_forward, self.block_weights()), gemms)
    }

    /// The core of attention, forward.
    pub fn attention_core(&self) -> Vec<Operator> {
        let passes = self.passes(&self.table.passes.attention_core, 0);
        interleaved(passes, self.attention(Direction::Forward))
    }

    /// The embedding, forward.
    pub fn embedding_forward(&self) -> Vec<Operator> {
        let passes = &self.table.passes.embedding_forward;
        let mut operators = self.passes(passes, self.embedding_weights());
        operators.extend(self.reduction());
        operators
    }

    /// The embedding's gradients.
    pub fn embedding_backward(&self) -> Vec<Operator> {
        let passes = &self.table.passes.embedding_backward;
        let mut operators = self.passes(passes, self.embedding_weights());
        operators.extend(self.gather());
        operators
    }

    /// Last norm, logits and loss, forward. Devices of the tensor axis share the vocabulary, and reduce three numbers of
    /// each token: the maximum, the sum of exponentials and the target's logit.
    pub fn head_forward(&self) -> Vec<Operator> {
        let mut operators: Vec<Operator> = self.gather().into_iter().collect();
        operators.push(matmul((self.rows(), self.model.hidden, self.logits_width(), 1)));
        let passes = &self.table.passes.head_forward;
        operators.extend(self.passes(passes, self.embedding_weights()));
        if self.mesh.tensor > 1 {
            let bytes = 4 * self.rows();
            let of_tokens = self.over_tensor_axis(CollectiveKind::AllReduce, bytes);
            operators.extend(vec![alone(of_tokens); 3]);
        }
        operators
    }

    /// The same, backward.
    pub fn head_backward(&self) -> Vec<Operator> {
        let (h, width) = (self.model.hidden, self.logits_width());
        let passes = &self.table.passes.head_backward;
        let mut operators = self.passes(passes, self.embedding_weights());
        operators.extend(self.linear_gradients(h, width));
        operators.extend(match self.table.tensor_collectives {
            TensorCollectives::Alone => self.reduction().into_iter().collect(),
            TensorCollectives::BesideWeightGradients => self.column_gradient_collectives(width),
        });
        operators
    }

    /// The P2P transfer from a stage to the next one, with the gather of shares where the framework sends shares.
    pub fn transfer(&self) -> Vec<Kernel> {
        let stride = self.mesh.tensor * self.mesh.data;
        let group = DeviceGroup { axis: Axis::Pipeline, size: self.mesh.pipeline, stride };
        let transfer = |bytes| Kernel::Transfer(Transfer { bytes: Bytes(bytes), group });
        let bytes = 2 * self.stream();
        let sends_shares = self.table.transfers == StageTransfers::Shares && !self.shards_tokens;
        if sends_shares && self.mesh.tensor > 1 {
            let gather = self.over_tensor_axis(CollectiveKind::AllGather, bytes);
            return vec![transfer(bytes / self.mesh.tensor), Kernel::Collective(gather)];
        }
        vec![transfer(bytes)]
    }

    /// The sum of a tied table's gradients on the first and the last stage.
    pub fn tied_table(&self, gradient_bytes: u64) -> Kernel {
        let stride = self.mesh.tensor * self.mesh.data * (self.mesh.pipeline - 1);
        let group = DeviceGroup { axis: Axis::Pipeline, size: 2, stride };
        let payload = Bytes(gradient_bytes * self.embedding_weights());
        Kernel::Collective(Collective { kind: CollectiveKind::AllReduce, payload, group })
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

    /// The GEMMs of the gradients of a linear's input and of its weight.
    fn linear_gradients(&self, k: u64, n: u64) -> [Operator; 2] {
        let input = gemm(self.rows(), n, k, 1);
        [input, self.weight_gradient(k, n)].map(|gemm| Operator::Kernel(Kernel::Gemm(gemm)))
    }

    /// The GEMM of the gradient of a linear's weight.
    fn weight_gradient(&self, k: u64, n: u64) -> Gemm {
        let gemm = gemm(k, self.rows(), n, 1);
        if self.table.parameters.fused_accumulation { accumulating(gemm) } else { gemm }
    }

    /// Matrices of scores on one device.
    fn score_matrices(&self) -> u64 {
        self.model.heads / self.mesh.tensor * self.sequences
    }

    fn attention(&self, direction: Direction) -> Vec<Operator> {
        let (length, head, batch) = (self.length, self.head_dim(), self.score_matrices());
        let products = [(length, head, length, batch), (length, length, head, batch)];
        match (self.table.attention.scores, direction) {
            (AttentionScores::Memory, Direction::Forward) => products.map(matmul).to_vec(),
            (AttentionScores::Memory, Direction::Backward) => {
                products.into_iter().flat_map(gradient_gemms).collect()
            }
            (AttentionScores::Kernel, _) => vec![Operator::Kernel(Kernel::Attention(Attention {
                direction,
                sequences: self.sequences,
                length,
                heads: self.model.heads / self.mesh.tensor,
                kv_heads: (self.model.kv_heads / self.mesh.tensor).max(1),
                head_dim: head,
                input: DType::Bf16,
                window: None,
                query_parts: 1,
                ring: None,
            }))],
        }
    }

    fn over_tensor_axis(&self, kind: CollectiveKind, bytes: u64) -> Collective {
        let group = DeviceGroup { axis: Axis::Tensor, size: self.mesh.tensor, stride: 1 };
        Collective { kind, payload: Bytes(bytes), group }
    }

    /// A collective on the whole residual stream; `None` without a tensor axis.
    fn of_stream(&self, kind: CollectiveKind) -> Option<Collective> {
        let bytes = 2 * self.rows() * self.model.hidden;
        (self.mesh.tensor > 1).then(|| self.over_tensor_axis(kind, bytes))
    }

    /// The kind of sums of partial results: to all devices, or to the rows of each.
    fn reduction_kind(&self) -> CollectiveKind {
        match self.shards_tokens {
            true => CollectiveKind::ReduceScatter,
            false => CollectiveKind::AllReduce,
        }
    }

    /// The sum of partial results of all rows.
    fn reduction(&self) -> Option<Operator> {
        self.of_stream(self.reduction_kind()).map(alone)
    }

    /// The gather of a sharded residual stream.
    fn gather(&self) -> Option<Operator> {
        let gather = self.of_stream(CollectiveKind::AllGather);
        gather.filter(|_| self.shards_tokens).map(alone)
    }

    /// The collectives of a pass through a block over the tensor axis: before and after attention and the MLP.
    fn stream_collectives(&self) -> Vec<Operator> {
        let of_half = || self.gather().into_iter().chain(self.reduction());
        of_half().chain(of_half()).collect()
    }

    /// The collectives beside GEMMs in the backward pass of a column linear of this width: the sum of its input's gradients
    /// beside its weight's gradient, and the gather of a sharded input, which that needs, beside the input's gradient.
    fn column_gradient_collectives(&self, width: u64) -> Vec<Operator> {
        let (n, h) = (self.rows(), self.model.hidden);
        let gather = self.of_stream(CollectiveKind::AllGather).filter(|_| self.shards_tokens);
        let gather = gather.map(|collective| (collective, gemm(n, width, h, 1)));
        let reduction = self.of_stream(self.reduction_kind());
        let reduction = reduction.map(|collective| (collective, self.weight_gradient(h, width)));
        let beside = |(collective, gemm)| Operator::Beside { collective, gemm };
        gather.into_iter().chain(reduction).map(beside).collect()
    }

    /// The passes of a segment with `weights` weights.
    fn passes(&self, passes: &[MemoryPass], weights: u64) -> Vec<Operator> {
        let fused = self.table.attention.fused_softmax_matrices;
        let applies = |pass: &&MemoryPass| match pass.only {
            PassCondition::All => true,
            PassCondition::Gated => self.model.mlp == MlpKind::Gated,
            PassCondition::Plain => self.model.mlp == MlpKind::Plain,
            PassCondition::UnfusedSoftmax => !self.score_matrices().is_multiple_of(fused),
        };
        let launches = |pass: &MemoryPass| {
            let elements = match pass.of {
                PassTensor::Hidden => self.stream(),
                PassTensor::AllHidden => self.rows() * self.model.hidden,
                PassTensor::Scores => self.score_matrices() * self.length * self.length,
                PassTensor::Queries => self.rows() * self.query_width(),
                PassTensor::Keys => self.rows() * self.key_width(),
                PassTensor::Mlp => self.rows() * self.mlp_width(),
                PassTensor::Logits => self.rows() * self.logits_width(),
                PassTensor::Weights => weights,
            };
            let kernel = memory_pass(elements * pass.bytes_per_element);
            vec![Operator::Kernel(kernel); pass.times as usize]
        };
        passes.iter().filter(applies).flat_map(launches).collect()
    }
}

/// The operator of a collective that runs alone.
fn alone(collective: Collective) -> Operator {
    Operator::Kernel(Kernel::Collective(collective))
}
