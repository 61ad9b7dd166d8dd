//! Validation of measured steps: a step must be one that can be predicted as it was measured.

use narrows_cost_model::Executor;
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};
use narrows_plan::{Defect, Defects, Mesh, Zero};

use super::{CHUNKS, MeasurementValidator, TENSOR_AXIS, nested};
use crate::measurements::file::{
    GPT_FRAMEWORKS, GptModel, Measurement, StepRecompute, TrainedModel, TrainingStep,
};

/// Limits the simulation, which has two passes for each microbatch and chunk of a stage.
const MICROBATCHES_MAX: u64 = 1 << 16;

impl MeasurementValidator {
    pub(super) fn recomputation(&mut self, step: &TrainingStep) {
        if matches!(step.recompute, StepRecompute::Auto | StepRecompute::None) {
            let problem = "must name what is recomputed".into();
            self.defect_with_hint("measured.recomputation.recompute", problem, "latents, block");
        }
        let unplanned = match step.model {
            TrainedModel::Gpt(_) => Some(("gpt", "GPT")),
            TrainedModel::Decoder(_) => Some(("decoder", "decoder")),
            TrainedModel::Preset(_) | TrainedModel::Described(_) => None,
        };
        if let Some((field, name)) = unplanned {
            let field = format!("measured.recomputation.model.{field}");
            let problem = format!("the memory of a {name} is not predicted");
            self.defect_with_hint(&field, problem, "its step, as `measured.step`");
        }
    }

    pub(super) fn step(&mut self, kind: &str, step: &TrainingStep, measurement: &Measurement) {
        let (mesh, work, at) = (measurement.mesh, step.workload, format!("measured.{kind}"));
        for (name, size) in [
            ("global_batch", work.global_batch),
            ("sequence_length", work.sequence_length),
            ("micro_batch", work.micro_batch),
        ] {
            self.size(&format!("{at}.workload.{name}"), size);
        }
        self.size(&format!("{at}.interleaving"), step.interleaving);
        if self.is_valid() {
            self.microbatches(&at, step, mesh);
        }
        let is_planned = matches!(step.model, TrainedModel::Preset(_) | TrainedModel::Described(_));
        if step.framework.is_some() && is_planned {
            let problem = "names a framework, and the model is neither a `decoder` nor a `gpt`";
            let hint = "leave it out, or describe the model as a `decoder`";
            self.defect_with_hint(&format!("{at}.framework"), problem.into(), hint);
        }
        self.program(kind, step, measurement);
        match &step.model {
            TrainedModel::Gpt(gpt) => self.gpt_step(&at, gpt, step, measurement),
            TrainedModel::Decoder(model) => self.decoder_step(&at, model, step, measurement),
            TrainedModel::Preset(name) => match presets::find(name) {
                Ok(model) => self.planned_step(&at, &model, step, mesh),
                Err(defect) => {
                    let unknown = Defect { field: "model.preset".into(), ..defect };
                    self.defects_at(&at, unknown.into());
                }
            },
            TrainedModel::Described(file) => match file.as_ref().clone().resolve() {
                Ok(model) => self.planned_step(&at, &model, step, mesh),
                Err(defects) => self.defects_at(&at, nested("model.described", defects)),
            },
        }
    }

    fn defects_at(&mut self, at: &str, defects: Defects) {
        self.defects.0.extend(nested(&format!("{}{at}", self.prefix), defects).0);
    }

    fn microbatches(&mut self, at: &str, step: &TrainingStep, mesh: Mesh) {
        let (work, field) = (step.workload, format!("{at}.workload.global_batch"));
        let sequences = mesh.data.saturating_mul(work.micro_batch);
        if let Some(problem) = work.indivisible_batch(&mesh) {
            self.defect(&field, problem);
        } else if work.global_batch / sequences > MICROBATCHES_MAX {
            self.defect(&field, format!("more than {MICROBATCHES_MAX} microbatches"));
        } else if work.global_batch / sequences * step.interleaving > MICROBATCHES_MAX {
            let problem = format!(
                "{} microbatches through {} chunks are more than {MICROBATCHES_MAX} passes",
                work.global_batch / sequences,
                step.interleaving
            );
            self.defect(&format!("{at}.interleaving"), problem);
        }
    }

    /// A step of a model that the planner knows.
    fn planned_step(&mut self, at: &str, model: &Model, step: &TrainingStep, mesh: Mesh) {
        let work = step.workload;
        if work.sequence_length > model.max_sequence_length {
            let problem = format!(
                "{} tokens exceed the maximum of {} of `{}`",
                work.sequence_length, model.max_sequence_length, model.name
            );
            self.defect(&format!("{at}.workload.sequence_length"), problem);
        }
        if let Err(defect) = step.recompute.of_plan() {
            self.defects_at(at, defect.into());
        }
        if step.interleaving != 1 {
            let problem =
                "the chunks of a stage are for GPTs: planned models are predicted with 1F1B";
            self.defect_with_hint(
                &format!("{at}.interleaving"),
                problem.into(),
                "omit `interleaving`",
            );
        }
        if mesh.pipeline > model.stages_max() {
            let (stages, blocks) = (mesh.pipeline, model.blocks.len());
            let problem = format!("{stages} stages for {blocks} blocks, embedding and head");
            let hint = "at most one stage per block, one for the embedding and one for the head";
            self.defect_with_hint("mesh.pipeline", problem, hint);
        }
        let mut linears = model.blocks.iter().flat_map(|block| block.linears());
        let low_rank = linears.any(|(_, linear)| linear.rank().is_some());
        if step.strategy.is_for_dense_models() && low_rank {
            let problem = format!(
                "`{}` shards dense linears, and `{}` has factor pairs",
                step.strategy.name(),
                model.name
            );
            let others = Baseline::ALL.into_iter().filter(|other| !other.is_for_dense_models());
            let others: Vec<&str> = others.map(Baseline::name).collect();
            let hint = format!("{}; or the dense model, if that was measured", others.join(", "));
            self.defect_with_hint(&format!("{at}.strategy"), problem, &hint);
        }
    }

    /// A step of a GPT: only the shardings of dense models are priced.
    fn gpt_step(
        &mut self,
        at: &str,
        gpt: &GptModel,
        step: &TrainingStep,
        measurement: &Measurement,
    ) {
        if measurement.executor != Executor::Eager {
            let problem = "a GPT is predicted under `eager` only".into();
            self.defect_with_hint("executor", problem, "eager");
        }
        let field = |name: &str| format!("{at}.{name}");
        let framework = step.framework.as_deref();
        if let Some(name) = framework.filter(|name| !GPT_FRAMEWORKS.contains(name)) {
            let problem = format!("`{name}` is not a framework that runs a `gpt`");
            let hint =
                format!("{}; or describe the model as a `decoder`", GPT_FRAMEWORKS.join(", "));
            self.defect_with_hint(&field("framework"), problem, &hint);
        }
        let priced = [StepRecompute::None, StepRecompute::Selective, StepRecompute::Block];
        if !priced.contains(&step.recompute) {
            let problem = "a GPT's step is predicted without recomputation, or with that of attention's core or of \
                           whole blocks";
            self.defect_with_hint(&field("recompute"), problem.into(), "none, selective, block");
        }
        if step.norm != NormRule::Auto {
            let problem = "the LayerNorms of a GPT have whole rows: no statistic is reduced".into();
            self.defect_with_hint(&field("norm"), problem, "omit `norm`");
        }
        if step.weights != WeightRule::Any {
            let problem = "the sharding of a GPT's weights is fixed".into();
            self.defect_with_hint(&field("weights"), problem, "omit `weights`");
        }
        if step.zero != Zero::Off {
            self.defect_with_hint(&field("zero"), "a GPT is predicted without ZeRO".into(), "off");
        }
        if measurement.mesh.context > 1 {
            let problem = "a GPT is predicted without context parallelism".into();
            self.defect_with_hint("mesh.context", problem, "omit `mesh.context`");
        }
        if !step.strategy.is_for_dense_models() {
            let names: Vec<&str> = Baseline::of_dense_models().map(Baseline::name).collect();
            let problem = format!(
                "a GPT is predicted with `{}`, not `{}`",
                names.join("` or `"),
                step.strategy.name()
            );
            self.defect_with_hint(&field("strategy"), problem, &names.join(", "));
        }
        self.gpt_sizes(at, gpt, step, measurement.mesh);
    }

    /// The schedule of interleaved stages runs groups of as many microbatches as there are stages.
    pub(super) fn chunks(&mut self, at: &str, step: &TrainingStep, mesh: Mesh) {
        if step.interleaving == 1 {
            return;
        }
        let (work, pipeline) = (step.workload, mesh.pipeline);
        let microbatches = work.microbatches(&mesh);
        if pipeline == 1 {
            let problem =
                format!("{} chunks of a stage, and the pipeline axis is 1", step.interleaving);
            self.defect_with_hint(
                &format!("{at}.interleaving"),
                problem,
                "leave it out, or a pipeline axis of as many devices as there are stages",
            );
        } else if !microbatches.is_multiple_of(pipeline) {
            let problem =
                format!("{microbatches} microbatches are not divisible by {pipeline} stages");
            let hint =
                "interleaved stages run microbatches in groups of as many as there are stages";
            self.defect_with_hint(&format!("{at}.workload.global_batch"), problem, hint);
        }
    }

    fn gpt_sizes(&mut self, at: &str, gpt: &GptModel, step: &TrainingStep, mesh: Mesh) {
        let model = &format!("{at}.model.gpt");
        let sizes = [("layers", gpt.layers), ("hidden", gpt.hidden), ("heads", gpt.heads)];
        for (name, size) in sizes.into_iter().chain([("vocabulary", gpt.vocabulary)]) {
            self.size(&format!("{model}.{name}"), size);
        }
        if !self.is_valid() {
            return;
        }
        let work = step.workload;
        let (tokens, inner) = ([work.micro_batch, work.sequence_length], 4 * gpt.hidden);
        self.fits_device(model, &[inner, inner, gpt.layers]);
        self.fits_device(model, &[gpt.vocabulary, gpt.hidden]);
        self.fits_device(model, &[tokens[0], tokens[1], inner.max(gpt.vocabulary)]);
        self.fits_device(model, &[tokens[0], gpt.heads, tokens[1], tokens[1]]);
        for (name, size, divisor) in [
            ("layers", gpt.layers, (mesh.pipeline.saturating_mul(step.interleaving), CHUNKS)),
            ("heads", gpt.heads, (mesh.tensor, TENSOR_AXIS)),
            ("hidden", gpt.hidden, (gpt.heads, "`heads`")),
            ("vocabulary", gpt.vocabulary, (mesh.tensor, TENSOR_AXIS)),
        ] {
            self.divides(&format!("{model}.{name}"), size, divisor);
        }
        if step.shards_tokens() && !work.sequence_length.is_multiple_of(mesh.tensor) {
            let problem = format!(
                "{} tokens are not divisible by {} devices that share them",
                work.sequence_length, mesh.tensor
            );
            self.defect(&format!("{at}.workload.sequence_length"), problem);
        }
        self.chunks(at, step, mesh);
    }
}
