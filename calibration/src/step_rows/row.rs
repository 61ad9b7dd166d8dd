//! The JSON form of rows.

use narrows_cost_model::Executor;
use narrows_plan::Mesh;
use narrows_plan::model::ModelFile;
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::measurements::{StepLinears, TrainedModel};

/// A file of rows.
#[derive(Deserialize)]
pub(super) struct RowsFile {
    #[serde(default)]
    pub about: String,
    pub rows: Vec<PublishedRow>,
}

/// A published step or throughput.
#[derive(Deserialize)]
pub(super) struct PublishedRow {
    pub source: String,
    pub framework: String,
    pub family: String,
    pub model: RowModel,
    pub device: String,
    pub devices: u64,
    pub tensor: u64,
    pub pipeline: u64,
    pub data: u64,
    #[serde(default = "one")]
    pub context: u64,
    pub sharding: String,
    pub micro_batch: u64,
    pub global_batch: u64,
    pub sequence: u64,
    pub dtype: Option<String>,
    pub recompute: String,
    #[serde(default = "one")]
    pub interleaving: u64,
    pub executor: Option<Executor>,
    pub strategy: Option<Baseline>,
    #[serde(default = "any_norm")]
    pub norm: NormRule,
    #[serde(default = "any_weights")]
    pub weights: WeightRule,
    #[serde(default)]
    pub overlap_tensor_collectives: bool,
    #[serde(default)]
    pub linears: StepLinears,
    pub accumulate_grad_in_fp32: Option<bool>,
    #[serde(default)]
    pub fitted: bool,
    pub tokens_per_s: Option<f64>,
    pub step_s: Option<f64>,
}

fn one() -> u64 {
    1
}

fn any_norm() -> NormRule {
    NormRule::Auto
}

fn any_weights() -> WeightRule {
    WeightRule::Any
}

/// The model of a row.
#[derive(Clone, PartialEq)]
pub(super) enum RowModel {
    /// A full-rank decoder by its sizes.
    Decoder(DecoderSizes),
    /// A model with a plan, as in measurements files.
    Planned(TrainedModel),
}

/// Sizes of a full-rank decoder.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct DecoderSizes {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub d_ff: u64,
    pub gated: bool,
    pub vocab: u64,
    pub tied: bool,
}

/// Fields of both kinds of models.
#[derive(Deserialize)]
struct ModelFields {
    preset: Option<String>,
    described: Option<Box<ModelFile>>,
    layers: Option<u64>,
    hidden: Option<u64>,
    heads: Option<u64>,
    kv_heads: Option<u64>,
    d_ff: Option<u64>,
    gated: Option<bool>,
    vocab: Option<u64>,
    tied: Option<bool>,
}

impl<'de> Deserialize<'de> for RowModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RowModel, D::Error> {
        let fields = ModelFields::deserialize(deserializer)?;
        let missing = D::Error::missing_field;
        match (fields.preset, fields.described) {
            (Some(_), Some(_)) => {
                Err(D::Error::custom("has both `preset` and `described`: state one of them"))
            }
            (Some(name), None) => Ok(RowModel::Planned(TrainedModel::Preset(name))),
            (None, Some(file)) => Ok(RowModel::Planned(TrainedModel::Described(file))),
            (None, None) => Ok(RowModel::Decoder(DecoderSizes {
                layers: fields.layers.ok_or_else(|| missing("layers"))?,
                hidden: fields.hidden.ok_or_else(|| missing("hidden"))?,
                heads: fields.heads.ok_or_else(|| missing("heads"))?,
                kv_heads: fields.kv_heads.ok_or_else(|| missing("kv_heads"))?,
                d_ff: fields.d_ff.ok_or_else(|| missing("d_ff"))?,
                gated: fields.gated.ok_or_else(|| missing("gated"))?,
                vocab: fields.vocab.ok_or_else(|| missing("vocab"))?,
                tied: fields.tied.ok_or_else(|| missing("tied"))?,
            })),
        }
    }
}

impl RowModel {
    /// The model in names of measurements: its sizes, or its own name.
    fn label(&self) -> String {
        match self {
            RowModel::Decoder(DecoderSizes { layers, hidden, .. }) => {
                format!("{hidden} × {layers}")
            }
            RowModel::Planned(TrainedModel::Described(file)) => {
                file.name.clone().unwrap_or_default()
            }
            RowModel::Planned(TrainedModel::Preset(name)) => name.clone(),
            RowModel::Planned(TrainedModel::Gpt(_) | TrainedModel::Decoder(_)) => String::new(),
        }
    }
}

impl PublishedRow {
    pub(super) fn mesh(&self) -> Mesh {
        Mesh {
            tensor: self.tensor,
            pipeline: self.pipeline,
            data: self.data,
            context: self.context,
        }
    }

    pub(super) fn name(&self, index: usize) -> String {
        let Mesh { tensor, pipeline, data, context } = self.mesh();
        let context = if context == 1 { String::new() } else { format!(" C{context}") };
        format!(
            "row {index}: {}, {} × {} tokens, T{tensor} P{pipeline} D{data}{context}, {}",
            self.model.label(),
            self.micro_batch,
            self.sequence,
            self.recompute
        )
    }

    /// The work of the row, where another row of the file does the same.
    pub(super) fn comparison_group(&self, rows: &[PublishedRow]) -> Option<String> {
        let work = |row: &PublishedRow| (row.devices, row.global_batch, row.sequence);
        let same = |row: &&PublishedRow| {
            row.family == self.family
                && row.device == self.device
                && row.model == self.model
                && work(row) == work(self)
        };
        let (devices, batch, length) = work(self);
        (rows.iter().filter(same).count() > 1).then(|| {
            format!(
                "{} {} on {devices} {}, {batch} × {length}",
                self.family,
                self.model.label(),
                self.device
            )
        })
    }
}
