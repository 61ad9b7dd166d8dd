//! The JSON form of measurements, `narrows-measurements/1`.
//!
//! A measurement states the measured work (kernels in sequence, or a training step), its hardware, executor, value and
//! source.

use indexmap::IndexMap;
use narrows_cost_model::Executor;
use narrows_plan::model::ModelFile;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule};
use narrows_plan::{Bytes, Defect, Mesh, Workload, Zero};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sources::{self, Citation};

/// The JSON form of measurements; [`read`](super::read) also validates them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Narrows measurements")]
pub struct MeasurementsFile {
    /// The form of this file.
    pub format: MeasurementsFormat,
    /// The name of the file in reports: lower-case letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// The sources of the measurements, by the key in `source`.
    #[serde(deserialize_with = "sources::unique_sources")]
    pub sources: IndexMap<String, Citation>,
    /// The measurements.
    pub measurements: Vec<Measurement>,
}

/// The form of a file of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MeasurementsFormat {
    /// The only form so far.
    #[serde(rename = "narrows-measurements/1")]
    V1,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Name in reports. Unique in a file.
    pub name: String,
    /// The table that it is counted in; errors are averaged within a table.
    pub table: String,
    /// A key of `sources`.
    pub source: String,
    /// The name of a preset, or of a profile given to `validate`.
    pub hardware: String,
    /// The executor that launched kernels.
    pub executor: Executor,
    /// The devices that took part.
    pub mesh: Mesh,
    /// The work that was measured.
    pub measured: MeasuredQuantity,
    /// The measured value.
    pub value: f64,
    /// Unit of the value.
    pub unit: MeasurementUnit,
    /// Comparison group: its measurements do the same job in different ways, and the faster one must be predicted to be
    /// the faster one.
    #[serde(rename = "race", default, skip_serializing_if = "Option::is_none")]
    pub comparison_group: Option<String>,
    /// Whether a prediction was fitted to this measurement, so that its error is not an error of a prediction.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fitted: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Unit of a measured value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasurementUnit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// The FLOPs of GEMMs over the data sheet's peak for inputs of that format, in percent. Kernels only.
    PercentOfPeak,
    /// Megabytes (10⁶ bytes) of peak memory that recomputation frees for each millisecond that it adds to a step.
    /// Recomputation only.
    MbPerMs,
}

/// The work that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredQuantity {
    /// Kernels that one device ran one after the other; the time is that of all together.
    Kernels(Vec<KernelRun>),
    /// One step of training, optimizer included.
    Step(Box<TrainingStep>),
    /// The cost of recomputation: this step beside the same step without recomputation.
    Recomputation(Box<TrainingStep>),
}

/// A kernel and how often it was launched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelRun {
    /// A GEMM C\[m,n\] = A\[m,k\]·B\[k,n\] in the format that training computes in: 16 bits on a GPU.
    #[serde(rename = "product")]
    Gemm(GemmRun),
    /// An all-reduce among the devices of the tensor axis.
    AllReduce(AllReduceRun),
    /// An RMSNorm, forward, with its features sharded over the tensor axis.
    Norm(NormRun),
}

/// A GEMM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmRun {
    /// Rows of the result.
    pub m: u64,
    /// The contracted size.
    pub k: u64,
    /// Columns of the result.
    pub n: u64,
    /// Equal GEMMs in one launch.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub batch: u64,
    /// Launches.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub times: u64,
}

/// An all-reduce.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AllReduceRun {
    /// Bytes that every device contributes and receives.
    pub payload_bytes: Bytes,
    /// Launches.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub times: u64,
}

/// An RMSNorm over sharded features, in the instructions of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NormRun {
    /// Tokens.
    pub rows: u64,
    /// Features of a whole row.
    pub features: u64,
    /// Reduction of the statistic: `sync`, by an all-reduce of its own; `online`, with the latents, which are scaled
    /// once their sum is known.
    pub norm: NormRule,
    /// Width of all latents that an online norm scales.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latents: u64,
    /// Launches.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub times: u64,
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn one() -> u64 {
    1
}

fn is_one(value: &u64) -> bool {
    *value == 1
}

/// A step of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainingStep {
    /// The model.
    pub model: TrainedModel,
    /// Batch and sequence.
    pub workload: Workload,
    /// Sharding over the tensor axis. For a GPT: one of dense models.
    pub strategy: Baseline,
    /// Activations that the backward pass recomputed.
    pub recompute: StepRecompute,
    /// The framework that ran a `decoder` or a `gpt`: a table of `profiles/frameworks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub framework: Option<String>,
    /// Model chunks of each pipeline stage: more than one ran interleaved 1F1B. GPTs only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub interleaving: u64,
    /// Reduction of the statistic of a norm over sharded features.
    #[serde(default = "any_norm")]
    pub norm: NormRule,
    /// Whether all weights were sharded over the tensor axis.
    #[serde(default = "any_weights")]
    pub weights: WeightRule,
    /// Sharding of optimizer states over replicas.
    #[serde(default = "no_zero")]
    pub zero: Zero,
    /// Whether tensor-axis collectives of activation gradients overlapped with weight-gradient GEMMs. Planned models only:
    /// tables of frameworks state it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlap_tensor_collectives: bool,
    /// Linears with a common input: q, k and v; gate and up.
    #[serde(default, skip_serializing_if = "StepLinears::is_any")]
    pub linears: StepLinears,
    /// Whether microbatches added their gradients in fp32, and the optimizer updated weights in fp32, as Nanotron's option of
    /// this name says; omitted, gradients and updates are those of the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulate_grad_in_fp32: Option<bool>,
}

/// Linears of a measured step with a common input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepLinears {
    /// Grouped or not, as in the fastest plan, which sums the gradient of their input over the tensor axis once.
    #[default]
    Any,
    /// Modules of their own, each of which sums the gradient of its input over the tensor axis.
    Separate,
}

impl StepLinears {
    fn is_any(&self) -> bool {
        *self == StepLinears::Any
    }
}

impl TrainingStep {
    /// The decoder that a framework's table prices, and the name of the table; `None` for a model with a plan.
    pub fn decoder(&self) -> Option<(DecoderModel, &str)> {
        match &self.model {
            TrainedModel::Gpt(gpt) => {
                Some((gpt.decoder(), self.framework.as_deref().unwrap_or(GPT_FRAMEWORKS[0])))
            }
            TrainedModel::Decoder(model) => {
                Some((*model, self.framework.as_deref().unwrap_or_default()))
            }
            TrainedModel::Preset(_) | TrainedModel::Described(_) => None,
        }
    }

    /// Whether the residual stream of a GPT is sharded on tokens (sequence parallelism).
    pub fn shards_tokens(&self) -> bool {
        self.strategy.shards_tokens()
    }

    /// Whether the step has neither sequence parallelism nor interleaved stages: all steps that prices were fitted to
    /// have neither.
    pub fn has_fitted_sharding_and_schedule(&self) -> bool {
        !self.shards_tokens() && self.interleaving == 1
    }
}

/// Activations that the backward pass of a measured step recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StepRecompute {
    /// The activations that the fastest plan recomputes.
    Auto,
    /// Nothing was recomputed.
    None,
    /// Only the latents and the block's input were kept (the published communication-free scheme).
    Latents,
    /// The core of attention: scores, softmax, dropout and context. GPTs and decoders only.
    Selective,
    /// Every second block. Decoders only.
    #[serde(rename = "selective-layers")]
    SelectiveLayers,
    /// All but attention and every second GEMM. Decoders only.
    #[serde(rename = "selective-ops")]
    SelectiveOps,
    /// Only the block's input was kept.
    Block,
}

impl StepRecompute {
    /// The restriction of a plan for this recomputation.
    ///
    /// # Errors
    /// `selective`, at the field `recompute`.
    pub fn of_plan(self) -> Result<Recompute, Defect> {
        match self {
            StepRecompute::Auto => Ok(Recompute::Auto),
            StepRecompute::None => Ok(Recompute::None),
            StepRecompute::Latents => Ok(Recompute::Latents),
            StepRecompute::Block => Ok(Recompute::Block),
            StepRecompute::Selective => {
                let problem =
                    "`selective` is for GPTs: attention of planned models never keeps its scores";
                Err(Defect::new("recompute", problem).hint("none"))
            }
            StepRecompute::SelectiveLayers | StepRecompute::SelectiveOps => {
                let problem = "a plan has no such recomputation: it is that of a `decoder`";
                Err(Defect::new("recompute", problem).hint("auto, none, latents, block"))
            }
        }
    }
}

impl From<Recompute> for StepRecompute {
    fn from(recompute: Recompute) -> StepRecompute {
        match recompute {
            Recompute::Auto => StepRecompute::Auto,
            Recompute::None => StepRecompute::None,
            Recompute::Latents => StepRecompute::Latents,
            Recompute::Block => StepRecompute::Block,
        }
    }
}

fn any_norm() -> NormRule {
    NormRule::Auto
}

fn any_weights() -> WeightRule {
    WeightRule::Any
}

fn no_zero() -> Zero {
    Zero::Off
}

/// A trained model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedModel {
    /// A preset's name, as `narrows plan --model` takes it.
    Preset(String),
    /// A model file, inline.
    Described(Box<ModelFile>),
    /// A full-rank GPT.
    Gpt(GptModel),
    /// A full-rank decoder under the framework that the step names.
    Decoder(DecoderModel),
}

/// A GPT like GPT-2 and GPT-3: LayerNorm, learned positions, biases, a GELU MLP of width 4h,
/// attention whose scores are written to memory, tied embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GptModel {
    /// Blocks.
    pub layers: u64,
    /// Width h.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Rows of the embedding, padding included.
    pub vocabulary: u64,
}

/// The tables that price GPTs, the default first.
pub(super) const GPT_FRAMEWORKS: [&str; 2] = ["megatron-deepspeed", "megatron"];

impl GptModel {
    /// The same model with all sizes.
    fn decoder(&self) -> DecoderModel {
        let GptModel { layers, hidden, heads, vocabulary } = *self;
        DecoderModel {
            layers,
            hidden,
            heads,
            kv_heads: heads,
            d_ff: 4 * hidden,
            mlp: MlpKind::Plain,
            vocabulary,
            embedding: EmbeddingKind::Tied,
        }
    }
}

/// A full-rank decoder, as a framework's table prices it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DecoderModel {
    /// Blocks.
    pub layers: u64,
    /// Width h.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Inner width of the MLP.
    pub d_ff: u64,
    /// Whether the MLP has a gate.
    pub mlp: MlpKind,
    /// Rows of the embedding.
    pub vocabulary: u64,
    /// Whether the logits have weights of their own.
    pub embedding: EmbeddingKind,
}

/// The MLP of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MlpKind {
    /// Two linears and an activation.
    Plain,
    /// Three linears: the activation of one gates the other.
    Gated,
}

/// The weights of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingKind {
    /// The weights of the embedding.
    Tied,
    /// Weights of their own.
    Untied,
}
