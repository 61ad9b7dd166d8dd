//! Whether a measured step is one that can be predicted as it was measured.

use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Baseline, NormRule, Recompute, WeightRule, Zero};
use narrows_plan::{Defect, Mesh};

use crate::measurements::{GptModel, Measurement, TrainedModel, TrainingStep};
use narrows_cost_model::Executor;

use super::MeasurementValidator;

/// A simulated step has each of them.
const MICROBATCHES_MAX: u64 = 1 << 16;

impl MeasurementValidator {
    pub(super) fn recomputation(&mut self, step: &TrainingStep) {
        if matches!(step.recompute, Recompute::Auto | Recompute::None) {
            let problem = "say what is computed again".into();
            self.hinted("measured.recomputation.recompute", problem, "latents, block");
        }
        if let TrainedModel::Gpt(_) = step.model {
            let problem = "the memory of a GPT is not predicted".into();
            self.hinted(
                "measured.recomputation.model.gpt",
                problem,
                "its step, as `measured.step`",
            );
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
        if self.sound() {
            self.microbatches(&at, step, mesh);
        }
        match &step.model {
            TrainedModel::Gpt(gpt) => self.gpt(&at, gpt, step, measurement),
            TrainedModel::Preset(name) => match presets::find(name) {
                Ok(model) => self.model(&at, &model, step, mesh),
                Err(defect) => self
                    .defects
                    .push(Defect { field: format!("{}{at}.model.preset", self.place), ..defect }),
            },
            TrainedModel::Described(file) => match file.as_ref().clone().resolve() {
                Ok(model) => self.model(&at, &model, step, mesh),
                Err(found) => {
                    let place = format!("{}{at}.model.described", self.place);
                    for defect in found.0 {
                        let dot = if defect.field.is_empty() { "" } else { "." };
                        let field = format!("{place}{dot}{}", defect.field);
                        self.defects.push(Defect { field, ..defect });
                    }
                }
            },
        }
    }

    fn microbatches(&mut self, at: &str, step: &TrainingStep, mesh: Mesh) {
        let (work, field) = (step.workload, format!("{at}.workload.global_batch"));
        let turn = mesh.data.saturating_mul(work.micro_batch);
        if !work.global_batch.is_multiple_of(turn) {
            let problem = format!(
                "{} sequences do not divide into microbatches of {} on {} replicas",
                work.global_batch, work.micro_batch, mesh.data
            );
            self.defect(&field, problem);
        } else if work.global_batch / turn > MICROBATCHES_MAX {
            self.defect(&field, format!("more than {MICROBATCHES_MAX} microbatches"));
        }
    }

    /// A model that is planned.
    fn model(&mut self, at: &str, model: &Model, step: &TrainingStep, mesh: Mesh) {
        let work = step.workload;
        if work.sequence_length > model.max_sequence_length {
            let problem = format!(
                "{} tokens are more than the {} that `{}` is made for",
                work.sequence_length, model.max_sequence_length, model.name
            );
            self.defect(&format!("{at}.workload.sequence_length"), problem);
        }
        let blocks = model.blocks.len() as u64;
        if mesh.pipeline > blocks {
            let problem = format!("{} stages are more than {blocks} blocks", mesh.pipeline);
            self.hinted("mesh.pipeline", problem, "at most one stage a block");
        }
        let mut linears = model.blocks.iter().flat_map(|block| block.linears());
        let low_rank = linears.any(|(_, linear)| linear.rank().is_some());
        if step.strategy == Baseline::FullrankTp && low_rank {
            let problem = format!(
                "`fullrank-tp` is a way of sharding dense linears, and `{}` has factors",
                model.name
            );
            let others = Baseline::ALL.into_iter().filter(|other| *other != step.strategy);
            let others: Vec<&str> = others.map(Baseline::name).collect();
            let hint = format!("{}; or the dense model that was measured", others.join(", "));
            self.hinted(&format!("{at}.strategy"), problem, &hint);
        }
    }

    /// A GPT has one program: what its fields can say otherwise is not what would be priced.
    fn gpt(&mut self, at: &str, gpt: &GptModel, step: &TrainingStep, measurement: &Measurement) {
        if measurement.executor != Executor::Eager {
            let problem = "a GPT is predicted under `eager` alone".into();
            self.hinted("executor", problem, "eager");
        }
        let field = |name: &str| format!("{at}.{name}");
        if !matches!(step.recompute, Recompute::None | Recompute::Block) {
            let problem =
                "a GPT's step recomputes nothing, or whole blocks: no other is priced".into();
            self.hinted(&field("recompute"), problem, "none, block");
        }
        if step.norm != NormRule::Auto {
            let problem = "a GPT's LayerNorms are whole on every device: none is sharded".into();
            self.hinted(&field("norm"), problem, "leave it out");
        }
        if step.weights != WeightRule::Any {
            let problem =
                "how a GPT's weights lie is part of its program: no other is priced".into();
            self.hinted(&field("weights"), problem, "leave it out");
        }
        if step.zero != Zero::Off {
            self.hinted(&field("zero"), "a GPT is predicted without ZeRO".into(), "off");
        }
        if step.strategy != Baseline::FullrankTp {
            let problem =
                format!("a GPT is predicted as full rank, not `{}`", step.strategy.name());
            self.hinted(&field("strategy"), problem, "fullrank-tp");
        }
        self.gpt_sizes(&field("model.gpt"), gpt, step, measurement.mesh);
    }

    fn gpt_sizes(&mut self, model: &str, gpt: &GptModel, step: &TrainingStep, mesh: Mesh) {
        let sizes = [("layers", gpt.layers), ("hidden", gpt.hidden), ("heads", gpt.heads)];
        for (name, size) in sizes.into_iter().chain([("vocabulary", gpt.vocabulary)]) {
            self.size(&format!("{model}.{name}"), size);
        }
        if !self.sound() {
            return;
        }
        let work = step.workload;
        let (tokens, wide) = ([work.micro_batch, work.sequence_length], 4 * gpt.hidden);
        self.holds(model, &[wide, wide, gpt.layers]);
        self.holds(model, &[gpt.vocabulary, gpt.hidden]);
        self.holds(model, &[tokens[0], tokens[1], wide.max(gpt.vocabulary)]);
        self.holds(model, &[tokens[0], gpt.heads, tokens[1], tokens[1]]);
        for (name, size, by) in [
            ("layers", gpt.layers, mesh.pipeline),
            ("heads", gpt.heads, mesh.tensor),
            ("hidden", gpt.hidden, gpt.heads),
            ("vocabulary", gpt.vocabulary, mesh.tensor),
        ] {
            if !size.is_multiple_of(by) {
                self.defect(&format!("{model}.{name}"), format!("{size} does not divide by {by}"));
            }
        }
    }
}
