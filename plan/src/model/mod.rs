//! The model: the function that is trained, independent of its sharding.
//!
//! A [`Model`] results from a [`ModelFile`], a Hugging Face `config.json` ([`read()`] distinguishes the two)
//! or the name of one of the [`presets`]. Resolution reports every defect at once, and a resolved model is
//! valid.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defect::Defect;

mod attention_mask;
mod canonical;
mod defect_report;
mod exact_steps;
mod file;
mod fingerprint;
mod fold;
mod function;
mod hugging_face;
mod layers;
mod limits;
mod parameter;
pub mod presets;
mod read;
mod repeated;
mod resolve;
mod rope;

pub use attention_mask::AttentionMask;
pub use exact_steps::ExactStepObstacle;
pub use file::{
    BlockFile, BlocksFile, CrossingFile, LinearFile, ModelFile, ModelFormat, PairFile, schema,
};
pub use function::FunctionDifference;
pub use hugging_face::ConfigClass;
pub use parameter::{LinearKind, ParameterId, WeightId, WeightShape};
pub use read::{read, read_with_warnings};
pub use rope::{Rope, RopeFrequencies, RopeScaling};

/// A LLaMA-style decoder (DESIGN §3.1) whose every linear is dense or a factor pair.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Name for messages and file names.
    pub name: String,
    /// Width d of the residual stream.
    pub hidden: u64,
    /// Tokens in the vocabulary.
    pub vocab: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// Features of one head.
    pub head_dim: u64,
    /// ε of every RMSNorm.
    pub norm_epsilon: f64,
    /// ε of the LayerNorm over a crossed latent, where a crossing has the released form.
    pub latent_norm_epsilon: f64,
    /// The rotary position embedding of queries and keys.
    pub rope: Rope,
    /// Initial standard deviation of embedding, head and dense linears.
    pub initial_std: f64,
    /// Strength α of the latent residual of DLR (Wang et al. 2026): each linear with factors adds α/√K·z[⌊n/K⌋] to its output n,
    /// where z is the input of B and K = ⌈d_out/r⌉. The residual is a part of B from the first step on.
    pub latent_residual: Option<f64>,
    /// Token whose row of the embedding starts at zero and gets no gradient from the lookup, as PyTorch's
    /// `padding_idx`. The row of a tied embedding still gets the gradient of the head.
    pub padding_token: Option<u64>,
    /// Tokens at which texts begin and end, for programs that generate text. The model's function does not depend on them, nor
    /// does its fingerprint.
    pub special_tokens: SpecialTokens,
    /// Longest supported sequence, in tokens.
    pub max_sequence_length: u64,
    /// Whether embedding and head are one weight.
    pub tied: bool,
    /// The blocks, first to last; never empty.
    pub blocks: Vec<Block>,
}

/// Tokens at which texts begin and end. They are kept as a file states them, also where the vocabulary has no such token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SpecialTokens {
    /// Token at the beginning of a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<u64>,
    /// Tokens that end a text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub eos: Vec<u64>,
}

impl SpecialTokens {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bos.is_none() && self.eos.is_empty()
    }
}

/// One pre-norm block.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Query projection, `hidden → heads·head_dim`.
    pub q: Linear,
    /// Key projection, `hidden → kv_heads·head_dim`.
    pub k: Linear,
    /// Value projection, `hidden → kv_heads·head_dim`.
    pub v: Linear,
    /// Output projection, `heads·head_dim → hidden`.
    pub o: Linear,
    /// Gate projection, `hidden → d_ff`.
    pub gate: Linear,
    /// Up projection, `hidden → d_ff`.
    pub up: Linear,
    /// Down projection, `d_ff → hidden`.
    pub down: Linear,
    /// Product of gate and up.
    pub product: GatedProduct,
    /// Dependence of queries and keys on their positions.
    pub positions: Positions,
    /// The keys that a query attends to.
    pub attention: AttentionMask,
    /// Whether biases are added to the outputs of q, k and v, before queries and keys are rotated.
    pub qkv_bias: bool,
    /// Whether every head of q and k has an RMSNorm, before it is rotated. Its scale is the same for all heads.
    pub qk_norm: bool,
}

/// Dependence of queries and keys on their positions.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Positions {
    /// The rotary position embedding.
    #[default]
    Rotary,
    /// None: only the causal mask distinguishes positions (NoPE).
    None,
}

/// Product of gate and up.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum GatedProduct {
    /// `gate ⊙ up`, with the activation in the latents: CoLA's `only_lr_act`.
    Plain,
    /// `SiLU(gate) ⊙ up`.
    SwiGlu,
}

impl GatedProduct {
    /// All products.
    pub const ALL: [GatedProduct; 2] = [GatedProduct::Plain, GatedProduct::SwiGlu];
}

/// A linear map; the biases of q, k and v belong to the [`Block`].
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Input features.
    pub d_in: u64,
    /// Output features.
    pub d_out: u64,
    /// Dense or factored.
    pub weight: Weight,
}

/// The weight of a [`Linear`].
#[derive(Clone, Debug, PartialEq)]
pub enum Weight {
    /// One matrix `d_in × d_out`.
    Dense,
    /// `y = φ(x·A)·B`.
    Pair(FactorPair),
}

/// A factor pair `y = φ(x·A)·B` with `A: d_in × r` and `B: r × d_out`.
#[derive(Clone, Debug, PartialEq)]
pub struct FactorPair {
    /// The inner width r.
    pub rank: u64,
    /// φ.
    pub activation: Activation,
    /// A crossing from the same linear's latent in the previous block (LaX). Block 0 has none.
    pub crossing: Option<LatentCrossing>,
}

/// φ, applied to the latent.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// φ(z) = z: SVD, LORO.
    Identity,
    /// φ(z) = z·σ(z): CoLA.
    Silu,
}

/// A latent crossing between neighbouring blocks (LaX).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LatentCrossing {
    /// One of the two published forms.
    pub form: CrossingForm,
    /// The gate of the previous latent.
    pub gate: CrossingGate,
}

/// The two published forms of a crossing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CrossingForm {
    /// The paper's `y = B(h + Gate(h_prev))`: `h` is this linear's latent after φ, and `h_prev` the
    /// previous block's, before its own crossing.
    Paper,
    /// The released code's `h = φ(LayerNorm_r(x·A + Gate(h_prev)))`; `h_prev` is the crossed latent
    /// after its own norm and φ. The LayerNorm has a scale and a bias of width r.
    Released,
}

/// The gate that is applied to the previous latent before the addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum CrossingGate {
    /// No gate; both ranks are equal.
    Identity,
    /// A dense `r_prev × r` matrix.
    Dense,
    /// A dense `r_prev × r` matrix and a bias of width r, as in the released code.
    Affine,
    /// Two matrices `a×a` and `b×b` on the latent reshaped to `a×b`, r = a·b.
    Tensor {
        /// First factor.
        a: u64,
        /// Second factor.
        b: u64,
    },
}

impl Linear {
    /// The rank of a factor pair, `None` for a dense weight.
    pub fn rank(&self) -> Option<u64> {
        match &self.weight {
            Weight::Dense => None,
            Weight::Pair(pair) => Some(pair.rank),
        }
    }

    /// Number of parameters, including those of a crossing between equal ranks.
    pub fn parameters(&self) -> u64 {
        match &self.weight {
            Weight::Dense => self.d_in * self.d_out,
            Weight::Pair(pair) => {
                let crossing = pair.crossing.as_ref().map_or(0, |c| c.parameters(pair.rank));
                pair.rank * (self.d_in + self.d_out) + crossing
            }
        }
    }

    /// Number of parameters, including those of a crossing from `previous`, the same linear of the previous
    /// block.
    fn parameters_after(&self, previous: &Linear) -> u64 {
        match (&self.weight, previous.rank()) {
            (
                Weight::Pair(FactorPair { rank, crossing: Some(crossing), .. }),
                Some(previous_rank),
            ) if crossing.gate.has_matrix() => {
                self.parameters() - rank * rank + previous_rank * rank
            }
            _ => self.parameters(),
        }
    }
}

impl CrossingGate {
    /// Whether the gate has a dense matrix, between any two ranks.
    pub fn has_matrix(self) -> bool {
        matches!(self, CrossingGate::Dense | CrossingGate::Affine)
    }
}

impl LatentCrossing {
    /// Number of parameters of the gate and of the LayerNorm, for equal ranks on both sides.
    fn parameters(&self, rank: u64) -> u64 {
        let gate = match self.gate {
            CrossingGate::Identity => 0,
            CrossingGate::Dense => rank * rank,
            CrossingGate::Affine => rank * rank + rank,
            CrossingGate::Tensor { a, b } => a * a + b * b,
        };
        let norm = match self.form {
            CrossingForm::Paper => 0,
            CrossingForm::Released => 2 * rank,
        };
        gate + norm
    }
}

impl Block {
    /// One of the seven linears.
    pub fn linear(&self, kind: LinearKind) -> &Linear {
        match kind {
            LinearKind::Q => &self.q,
            LinearKind::K => &self.k,
            LinearKind::V => &self.v,
            LinearKind::O => &self.o,
            LinearKind::Gate => &self.gate,
            LinearKind::Up => &self.up,
            LinearKind::Down => &self.down,
        }
    }

    /// One of the seven linears, mutable.
    pub fn linear_mut(&mut self, kind: LinearKind) -> &mut Linear {
        match kind {
            LinearKind::Q => &mut self.q,
            LinearKind::K => &mut self.k,
            LinearKind::V => &mut self.v,
            LinearKind::O => &mut self.o,
            LinearKind::Gate => &mut self.gate,
            LinearKind::Up => &mut self.up,
            LinearKind::Down => &mut self.down,
        }
    }

    /// The seven linears, in the order in which they are computed.
    pub fn linears(&self) -> [(LinearKind, &Linear); 7] {
        LinearKind::ALL.map(|kind| (kind, self.linear(kind)))
    }

    /// The seven linears, mutable, in the order of [`Block::linears`].
    fn linears_mut(&mut self) -> [&mut Linear; 7] {
        [
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.o,
            &mut self.gate,
            &mut self.up,
            &mut self.down,
        ]
    }

    /// Number of parameters of the linears, without biases and the scales of norms.
    fn linear_parameters(&self) -> u64 {
        self.linears().iter().map(|(_, linear)| linear.parameters()).sum()
    }

    /// The vectors that a block has beside the linears and norms of LLaMA's, as a phrase for messages.
    pub fn vectors_beside_linears(&self) -> Option<&'static str> {
        match (self.qkv_bias, self.qk_norm) {
            (true, true) => Some("biases of q, k and v, and norms of the heads of q and k"),
            (true, false) => Some("biases of q, k and v"),
            (false, true) => Some("norms of the heads of q and k"),
            (false, false) => None,
        }
    }

    /// Number of parameters of biases, and of norms of heads of this width.
    fn vector_parameters(&self, head_dim: u64) -> u64 {
        let biases = if self.qkv_bias { self.q.d_out + self.k.d_out + self.v.d_out } else { 0 };
        biases + if self.qk_norm { 2 * head_dim } else { 0 }
    }
}

impl Model {
    /// The least number of keys of a query in a sliding window that hides keys of sequences of `length` tokens; `None`
    /// where none does.
    pub fn least_window(&self, length: u64) -> Option<u64> {
        self.blocks.iter().filter_map(|block| block.attention.window(length)).min()
    }

    /// Number of parameters; a tied embedding counts once.
    pub fn parameters(&self) -> u64 {
        let embeddings = self.vocab * self.hidden * if self.tied { 1 } else { 2 };
        let blocks: u64 = (0..self.blocks.len())
            .map(|index| {
                let vectors = self.blocks[index].vector_parameters(self.head_dim);
                self.block_linear_parameters(index) + vectors + 2 * self.hidden
            })
            .sum();
        embeddings + blocks + self.hidden
    }

    /// Number of parameters of the linears of block `index`, where a dense gate between unequal ranks has
    /// `r_prev × r`.
    ///
    /// # Panics
    /// When there is no block `index`.
    pub fn block_linear_parameters(&self, index: usize) -> u64 {
        let block = &self.blocks[index];
        let Some(previous) = index.checked_sub(1).map(|index| &self.blocks[index]) else {
            return block.linear_parameters();
        };
        let pairs = block.linears().into_iter().zip(previous.linears());
        pairs.map(|((_, linear), (_, previous))| linear.parameters_after(previous)).sum()
    }

    /// Multiply-adds of one token in the GEMMs of block `index`: linears and gates of crossing latents.
    ///
    /// # Panics
    /// When there is no block `index`.
    pub fn block_macs_per_token(&self, index: usize) -> u64 {
        let block = &self.blocks[index];
        let previous = index.checked_sub(1).map(|previous| &self.blocks[previous]);
        let gate = |at: usize, linear: &Linear| {
            let previous_rank = previous.and_then(|previous| previous.linears()[at].1.rank())?;
            let Weight::Pair(FactorPair { rank, crossing: Some(crossing), .. }) = &linear.weight
            else {
                return None;
            };
            Some(match crossing.gate {
                CrossingGate::Identity => 0,
                CrossingGate::Dense | CrossingGate::Affine => previous_rank * rank,
                CrossingGate::Tensor { a, b } => rank * (a + b),
            })
        };
        let macs = |(at, (_, linear)): (usize, &(LinearKind, &Linear))| match linear.rank() {
            Some(rank) => rank * (linear.d_in + linear.d_out) + gate(at, linear).unwrap_or(0),
            None => linear.d_in * linear.d_out,
        };
        block.linears().iter().enumerate().map(macs).sum()
    }

    /// The dense model of the same shape: every factor pair becomes one matrix, and the product becomes
    /// SwiGLU, since a dense MLP has no other nonlinearity.
    ///
    /// The counterpart is named `llama-7b` for the preset `cola-7b`, and `NAME-dense` for other models.
    pub fn dense_counterpart(&self) -> Model {
        let mut dense = self.clone();
        dense.name = presets::dense_name(&self.name);
        dense.latent_residual = None;
        for block in &mut dense.blocks {
            block.product = GatedProduct::SwiGlu;
            for linear in block.linears_mut() {
                linear.weight = Weight::Dense;
            }
        }
        dense
    }

    /// The `config.json` of the model for a published class, which reads as an equal model but for a latent residual: its weights
    /// contain that.
    ///
    /// # Errors
    /// The first property of the model that the class does not have, with its place, such as `layer 3 q`.
    pub fn hugging_face_config(&self, class: ConfigClass) -> Result<serde_json::Value, Defect> {
        hugging_face::config(self, class)
    }

    /// Largest number of pipeline stages: one for each block, and of several one for the embedding and one for the head.
    pub fn stages_max(&self) -> u64 {
        self.blocks.len() as u64 + 2
    }

    /// Whether latents cross between any two blocks (LaX).
    pub fn has_crossings(&self) -> bool {
        let crosses = |linear: &Linear| match &linear.weight {
            Weight::Pair(pair) => pair.crossing.is_some(),
            Weight::Dense => false,
        };
        self.blocks.iter().any(|block| block.linears().iter().any(|(_, l)| crosses(l)))
    }

    /// Whether any crossing has the released form, whose LayerNorm reads
    /// [`latent_norm_epsilon`](Model::latent_norm_epsilon).
    fn has_latent_norms(&self) -> bool {
        let is_released = |linear: &Linear| match &linear.weight {
            Weight::Pair(FactorPair { crossing: Some(crossing), .. }) => {
                crossing.form == CrossingForm::Released
            }
            _ => false,
        };
        self.blocks.iter().any(|block| block.linears().iter().any(|(_, l)| is_released(l)))
    }

    /// Whether any linear of any block is a factor pair.
    pub fn is_low_rank(&self) -> bool {
        self.blocks.iter().any(|block| block.linears().iter().any(|(_, l)| l.rank().is_some()))
    }
}
