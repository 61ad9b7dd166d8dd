//! Kernels: the properties of an instruction that its duration depends on.
//!
//! Every instruction of a program has exactly one kernel, and a strategy is priced by the kernels of its
//! templates. The JSON form is that of measurements in a profile.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mesh::DeviceGroup;
use crate::{Bytes, DType, Flops};

/// One unit of work on one device (or on one group, for a collective).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// A GEMM.
    Gemm(Gemm),
    /// Causal flash attention, forward or backward.
    Attention(Attention),
    /// A memory-bound element-wise or reduction pass.
    #[serde(rename = "pass")]
    Fused(FusedKernel),
    /// A collective over one group.
    Collective(Collective),
    /// A point-to-point transfer between neighbouring stages, as the sender or the receiver sees it.
    Transfer(Transfer),
}

/// `C[m,n] (+)= A[m,k]·B[k,n]`, `batch` times with one launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// The contracted size.
    pub k: u64,
    /// GEMMs of equal shape in one strided-batched launch.
    pub batch: u64,
    /// Whether C is read and added to.
    pub accumulate: bool,
    /// Whether the sum is written elsewhere than to C: `D = C + A·B`, a residual addition in the GEMM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub residual: bool,
    /// Format of A and B.
    pub input: DType,
    /// Format of C.
    pub output: DType,
}

impl Gemm {
    /// 2·m·n·k for each GEMM of the batch.
    pub fn flops(&self) -> Flops {
        Flops(2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64)
    }

    /// Bytes read and written when each element crosses the memory bus once.
    pub fn traffic(&self) -> Bytes {
        let inputs = self.input.bytes(self.m * self.k + self.k * self.n);
        let passes_over_c = if self.accumulate { 2 } else { 1 };
        (inputs + self.output.bytes(self.m * self.n) * passes_over_c) * self.batch
    }
}

/// The direction of a pass over the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Towards the loss.
    Forward,
    /// From the loss.
    Backward,
}

/// Causal attention over whole sequences, or within a sliding window.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// Forward or backward.
    pub direction: Direction,
    /// Sequences on this device.
    pub sequences: u64,
    /// Tokens of a sequence.
    pub length: u64,
    /// Query heads on this device.
    pub heads: u64,
    /// Key and value heads on this device.
    pub kv_heads: u64,
    /// Features of a head.
    pub head_dim: u64,
    /// Format of queries, keys, values and output.
    pub input: DType,
    /// Keys of a query at most, itself included, where these are fewer than the tokens of a sequence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Devices that each have two of equally many chunks of the queries of a sequence, and all of its keys; 1 where
    /// each has all queries.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub query_parts: u64,
    /// The devices around which the keys and values of the parts rotate; `None` where each device has all keys of its
    /// queries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<DeviceGroup>,
}

fn one() -> u64 {
    1
}

fn is_one(parts: &u64) -> bool {
    *parts == 1
}

impl Attention {
    /// Whether the parts of the queries are all queries, or two equal chunks each.
    pub fn has_equal_query_parts(&self) -> bool {
        match self.query_parts {
            0 => false,
            1 => true,
            parts => parts.checked_mul(2).is_some_and(|chunks| self.length.is_multiple_of(chunks)),
        }
    }

    /// Queries of a sequence.
    pub fn queries(&self) -> u64 {
        self.length / self.query_parts
    }

    /// Scores of a sequence that the mask leaves, on the device that has the most. All have equally many but in a
    /// window, where the device with the middle positions has the most.
    pub fn scores(&self) -> f64 {
        if self.query_parts == 1 {
            return self.scores_before(self.length as f64);
        }
        let [middle, half] = [self.length, self.queries()].map(|positions| positions as f64 / 2.0);
        self.scores_before(middle + half) - self.scores_before(middle - half)
    }

    /// Scores of the first n positions: n(n + 1)/2, or nw − w(w − 1)/2 in a window of w keys.
    fn scores_before(&self, positions: f64) -> f64 {
        let window = self.window.map_or(positions, |window| positions.min(window as f64));
        positions * window - window * (window - 1.0) / 2.0
    }

    /// Two GEMMs forward and five backward, of which only the [`scores`](Attention::scores) that the mask leaves are
    /// counted.
    pub fn flops(&self) -> Flops {
        let gemms = match self.direction {
            Direction::Forward => 2.0,
            Direction::Backward => 5.0,
        };
        let heads = self.sequences as f64 * self.heads as f64;
        Flops(gemms * 2.0 * self.scores() * self.head_dim as f64 * heads)
    }
}

/// A memory-bound kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FusedKernel {
    /// Kind.
    pub kind: FusedKind,
    /// Bytes read and written by one fused kernel.
    #[serde(rename = "traffic_bytes")]
    pub traffic: Bytes,
    /// Bytes read and written by an executor without fusion, which runs operators one by one.
    #[serde(rename = "unfused_traffic_bytes")]
    pub unfused_traffic: Bytes,
    /// Kernels launched by an executor without fusion, for each parameter.
    pub unfused_launches: u32,
    /// Parameters of a sum of squares or of an update; 1 of other kernels.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub parameters: u64,
}

impl FusedKernel {
    /// One pass over memory with so many bytes read and written, fused or not.
    pub fn memory_pass(traffic: Bytes) -> FusedKernel {
        FusedKernel {
            kind: FusedKind::Add,
            traffic,
            unfused_traffic: traffic,
            unfused_launches: 1,
            parameters: 1,
        }
    }
}

/// The kind of a [`FusedKernel`]; the breakdown of a prediction groups by it.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum FusedKind {
    /// RMSNorm, any variant, forward or backward.
    Norm,
    /// SiLU on a latent, 1/rms recovery, latent crossing.
    Latent,
    /// The product of gate and up, plain or SwiGLU.
    GatedProduct,
    /// The residual addition, and sums of gradients.
    Add,
    /// Rotary position embedding.
    Rope,
    /// Embedding gather and scatter-add.
    Embedding,
    /// Cross-entropy, forward and backward.
    Loss,
    /// Packing, unpacking and slicing around a reshard.
    Copy,
    /// Gradient norm and AdamW.
    Optimizer,
}

impl FusedKind {
    /// The name in JSON and in messages.
    pub fn name(self) -> &'static str {
        match self {
            FusedKind::Norm => "norm",
            FusedKind::Latent => "latent",
            FusedKind::GatedProduct => "gated_product",
            FusedKind::Add => "add",
            FusedKind::Rope => "rope",
            FusedKind::Embedding => "embedding",
            FusedKind::Loss => "loss",
            FusedKind::Copy => "copy",
            FusedKind::Optimizer => "optimizer",
        }
    }
}

/// Kind of a collective.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    /// Partial → replicated.
    AllReduce,
    /// Partial → sharded.
    ReduceScatter,
    /// Sharded → replicated.
    AllGather,
    /// Sharded on one dim → sharded on another.
    AllToAll,
    /// Each member sends its part to the next one, and the last to the first: a step of ring attention.
    Shift,
}

impl CollectiveKind {
    /// Every kind.
    pub const ALL: [CollectiveKind; 5] = [
        CollectiveKind::AllReduce,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
        CollectiveKind::Shift,
    ];

    /// The key used in JSON breakdowns.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::AllToAll => "all_to_all",
            CollectiveKind::Shift => "shift",
        }
    }
}

/// A collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Collective {
    /// Kind.
    pub kind: CollectiveKind,
    /// Bytes of the whole (unsharded) tensors, for every kind, statistics included.
    #[serde(rename = "payload_bytes")]
    pub payload: Bytes,
    /// The participating devices.
    pub group: DeviceGroup,
}

/// A point-to-point transfer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Bytes one device sends.
    pub bytes: Bytes,
    /// The pipeline group, whose stride decides whether the transfer crosses nodes.
    pub group: DeviceGroup,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kinds_equal_those_in_json() {
        use FusedKind::*;
        for kind in [Norm, Latent, GatedProduct, Add, Rope, Embedding, Loss, Copy, Optimizer] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
