//! Predictions of the step of a model under a framework's table.

use indexmap::IndexMap;
use narrows_cost_model::profile::Provenance;
use narrows_cost_model::{Executor, Profile};
use narrows_plan::model::{AttentionMask, Block, Model, presets};
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_plan::{Defect, Defects, Mesh, Workload, Zero};

use super::file::FrameworkTable;
use super::step::decoder_step_time_s;
use super::terms::decoder_term_shares;
use crate::measurements::{
    Citation, DecoderModel, EmbeddingKind, MeasuredQuantity, Measurement, MeasurementUnit,
    MeasurementsFile, MeasurementsFormat, MlpKind, StepLinears, StepRecompute, TrainedModel,
    TrainingStep, validate,
};
use crate::step_terms::StepTerm;

/// A training step under a framework.
#[derive(Clone, Debug)]
pub struct FrameworkStep {
    /// The name of a table.
    pub framework: String,
    /// Devices of each axis.
    pub mesh: Mesh,
    /// Batch and sequence.
    pub workload: Workload,
    /// Activations that the backward pass recomputes.
    pub recompute: StepRecompute,
    /// The ZeRO stage; by default that of the framework.
    pub zero: Option<Zero>,
    /// Whether the residual stream is sharded on tokens over the tensor axis; by default as in the framework.
    pub shards_tokens: Option<bool>,
    /// Model chunks of each pipeline stage.
    pub chunks: u64,
}

/// The predicted step of a model under a framework.
#[derive(Clone, Debug)]
pub struct FrameworkPrediction {
    /// The framework in one or two sentences.
    pub description: String,
    /// Name and generation of its attention kernel.
    pub attention_kernel: String,
    /// The ZeRO stage.
    pub zero: Zero,
    /// Whether the residual stream is sharded on tokens over the tensor axis.
    pub shards_tokens: bool,
    /// The step time in seconds.
    pub step_time_s: f64,
    /// The 90 % interval of the step time in seconds.
    pub step_time_interval_s: [f64; 2],
    /// Terms of the step with their shares of its time.
    pub terms: Vec<(StepTerm, f64)>,
    /// Sources of the values of the table.
    pub provenance: Provenance,
    /// Source of the interval.
    pub interval_provenance: Provenance,
}

/// The names of all frameworks with a table.
pub fn framework_names() -> impl Iterator<Item = &'static str> {
    FrameworkTable::names()
}

/// Predicts a step of a full-rank model under a framework.
///
/// # Errors
/// Every defect, with the field that a measurement of this step would have (`measured.step.recompute`), or `model` and
/// `hardware`.
pub fn predict_framework_step(
    step: &FrameworkStep,
    model: &Model,
    profile: &Profile,
) -> Result<FrameworkPrediction, Defects> {
    let table = FrameworkTable::built_in(&step.framework)?;
    table.check_precision(profile).map_err(Defects::single)?;
    let decoder = DecoderModel::of(model)?;
    let zero = step.zero.unwrap_or(table.parameters.zero);
    let shards_tokens = step.shards_tokens.unwrap_or(table.tokens.are_sharded());
    let shards_tokens = shards_tokens && step.mesh.tensor > 1;
    let training = TrainingStep {
        model: TrainedModel::Decoder(decoder),
        workload: step.workload,
        strategy: Baseline::of_dense_model(shards_tokens),
        recompute: step.recompute,
        framework: Some(step.framework.clone()),
        interleaving: step.chunks,
        norm: NormRule::Auto,
        weights: WeightRule::Any,
        zero,
        overlap_tensor_collectives: false,
        linears: StepLinears::Any,
        accumulate_grad_in_fp32: None,
    };
    check(&training, step.mesh, profile)?;
    let time_s = decoder_step_time_s(&table, decoder, &training, step.mesh, profile);
    let (error, interval) = table.errors.of(&training, step.mesh, profile);
    Ok(FrameworkPrediction {
        zero,
        shards_tokens,
        step_time_s: time_s,
        step_time_interval_s: interval.map(|ratio| time_s * ratio),
        terms: decoder_term_shares(&table, decoder, &training, step.mesh, profile),
        interval_provenance: error.provenance.clone(),
        description: table.description,
        attention_kernel: table.attention.kernel,
        provenance: table.provenance,
    })
}

/// Checks a step as one of a measurements file.
fn check(step: &TrainingStep, mesh: Mesh, profile: &Profile) -> Result<(), Defects> {
    let name = "step".to_owned();
    let citation = Citation { citation: name.clone(), conditions: String::new() };
    let measurement = Measurement {
        name: name.clone(),
        table: name.clone(),
        source: name.clone(),
        hardware: profile.name().to_owned(),
        executor: Executor::Eager,
        mesh,
        measured: MeasuredQuantity::Step(Box::new(step.clone())),
        value: 1.0,
        unit: MeasurementUnit::S,
        comparison_group: None,
        fitted: false,
    };
    let file = MeasurementsFile {
        format: MeasurementsFormat::V1,
        description: String::new(),
        sources: IndexMap::from([(name.clone(), citation)]),
        measurements: vec![measurement],
        name,
    };
    validate(&file, |_| String::new())
}

impl DecoderModel {
    /// The sizes of a full-rank model with equal blocks.
    ///
    /// # Errors
    /// Factor pairs, blocks that differ, and heads that are not shares of the width.
    fn of(model: &Model) -> Result<DecoderModel, Defect> {
        let defect = |problem: String, hint: String| Defect::new("model", problem).hint(hint);
        if model.is_low_rank() {
            let problem =
                format!("`{}` has factor pairs, and frameworks train dense linears", model.name);
            let dense = model.dense_counterpart().name;
            let hint = match presets::find(&dense) {
                Ok(_) => format!("{dense}, its dense counterpart"),
                Err(_) => "a model file of its dense counterpart: every linear \"dense\"".into(),
            };
            return Err(defect(problem, hint));
        }
        let Some((block, others)) = model.blocks.split_first() else {
            return Err(Defect::new("model", "has no blocks"));
        };
        if others.iter().any(|other| other.gate.d_out != block.gate.d_out) {
            let problem = format!("the blocks of `{}` differ in their inner width", model.name);
            return Err(defect(problem, "a model whose blocks are equal".into()));
        }
        let has_window = |block: &Block| block.attention != AttentionMask::Full;
        if let Some(index) = model.blocks.iter().position(has_window) {
            let problem = format!(
                "block {index} of `{}` has a sliding window, within which frameworks are not priced",
                model.name
            );
            return Err(defect(problem, "a model without sliding windows".into()));
        }
        let has_more = |block: &Block| block.vectors_beside_linears();
        if let Some((index, more)) =
            (0..).zip(&model.blocks).find_map(|(index, block)| Some((index, has_more(block)?)))
        {
            let problem = format!(
                "block {index} of `{}` has {more}, which are not priced for frameworks",
                model.name
            );
            return Err(defect(problem, "a model such as llama-7b".into()));
        }
        if model.heads * model.head_dim != model.hidden {
            let problem = format!(
                "{} heads of {} features are not the width {} of `{}`",
                model.heads, model.head_dim, model.hidden, model.name
            );
            return Err(defect(problem, "a model without `head_dim`".into()));
        }
        let embedding = if model.tied { EmbeddingKind::Tied } else { EmbeddingKind::Untied };
        Ok(DecoderModel {
            layers: model.blocks.len() as u64,
            hidden: model.hidden,
            heads: model.heads,
            kv_heads: model.kv_heads,
            d_ff: block.gate.d_out,
            mlp: MlpKind::Gated,
            vocabulary: model.vocab,
            embedding,
        })
    }
}
