//! The JSON form of measurements, `narrows-measurements/1`.
//!
//! A measurement says what ran (kernels one after the other, or a step of training), on which
//! hardware, under which executor, how long it took, and who says so.

use indexmap::IndexMap;
use narrows_plan::model::ModelFile;
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_plan::{Bytes, Mesh, Workload};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sources;
use narrows_cost_model::Executor;

/// Measurements as written; [`read`](super::read) also checks them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Narrows measurements")]
pub struct MeasurementsFile {
    /// The form of this file.
    pub format: MeasurementsFormat,
    /// What the file is called in reports: lower-case letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// One or two sentences for a reader.
    pub description: String,
    /// Who measured, by a name that measurements refer to.
    #[serde(deserialize_with = "sources::each_once")]
    pub sources: IndexMap<String, Citation>,
    /// The figures.
    pub measurements: Vec<Measurement>,
}

/// The form of a file of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MeasurementsFormat {
    /// The only form so far.
    #[serde(rename = "narrows-measurements/1")]
    V1,
}

/// Where figures come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Citation {
    /// Publication, repository and file, or who ran what.
    pub citation: String,
    /// Under which conditions: software, number formats, repetitions, what is known not to be alike.
    pub conditions: String,
}

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// What it is called in reports. Unique in a file.
    pub name: String,
    /// The table it is counted in; errors are averaged within one.
    pub table: String,
    /// A key of `sources`.
    pub source: String,
    /// The name of a preset, or of a profile that is given to `validate`.
    pub hardware: String,
    /// How kernels were launched.
    pub executor: Executor,
    /// The devices that took part.
    pub mesh: Mesh,
    /// What was measured.
    pub measured: MeasuredQuantity,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: MeasurementUnit,
    /// Measurements of one race do the same job in different ways: the faster one must be predicted
    /// to be the faster one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub race: Option<String>,
    /// Whether something was fitted to this figure. What is fitted is no prediction.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fitted: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What a value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasurementUnit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// The operations of products over the peak of the devices' data sheet for inputs of that format, in
    /// percent. Kernels only.
    PercentOfPeak,
    /// Megabytes (10⁶ bytes) of peak memory that recomputation frees for each millisecond it adds to a
    /// step. Recomputation only.
    MbPerMs,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredQuantity {
    /// Kernels that one device ran one after the other; the time is that of all together.
    Kernels(Vec<KernelRun>),
    /// One step of training, optimizer included.
    Step(Box<TrainingStep>),
    /// What recomputing costs: the step as described, beside the same step that recomputes nothing.
    Recomputation(Box<TrainingStep>),
}

/// A kernel, so many times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelRun {
    /// A product C\[m,n\] = A\[m,k\]·B\[k,n\] in the format that training computes in: 16 bits on a GPU.
    Product(GemmRun),
    /// An all-reduce among the devices of the tensor axis.
    AllReduce(AllReduceRun),
    /// An RMSNorm, forward, whose features are sharded over the tensor axis.
    Norm(NormRun),
}

/// A product.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GemmRun {
    /// Rows of the result.
    pub m: u64,
    /// The contracted size.
    pub k: u64,
    /// Columns of the result.
    pub n: u64,
    /// Equal products in one launch.
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
    /// What every device contributes and gets.
    pub payload_bytes: Bytes,
    /// Launches.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub times: u64,
}

/// An RMSNorm over sharded features, in the steps that a program has for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NormRun {
    /// Tokens.
    pub rows: u64,
    /// Features of a whole row.
    pub features: u64,
    /// How it gets its statistic: `sync`, a sum, its all-reduce and the rest; `online`, the norm of the
    /// shard, and what the latents are multiplied with once their sum is there.
    pub norm: NormRule,
    /// Width of all latents that an online norm is applied to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub latents: u64,
    /// How often.
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
    /// What was trained.
    pub model: TrainedModel,
    /// Batch and sequence.
    pub workload: Workload,
    /// How tensors lay over the tensor axis. For a GPT: `fullrank-tp`.
    pub strategy: Baseline,
    /// What the backward pass computed again.
    pub recompute: Recompute,
    /// How a norm over sharded features got its statistic.
    #[serde(default = "any_norm")]
    pub norm: NormRule,
    /// Whether weights were all sharded over the tensor axis.
    #[serde(default = "any_weights")]
    pub weights: WeightRule,
    /// Sharding of optimizer states over replicas.
    #[serde(default = "no_zero")]
    pub zero: Zero,
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

/// What was trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrainedModel {
    /// A preset's name, as `narrows plan --model` takes it.
    Preset(String),
    /// A model file, written here.
    Described(Box<ModelFile>),
    /// A GPT of full rank.
    Gpt(GptModel),
}

/// A GPT as GPT-2 and GPT-3 are: LayerNorm, learned positions, biases, a GELU MLP of width 4h,
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
