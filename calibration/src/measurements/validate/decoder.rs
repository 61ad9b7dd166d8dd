//! Validation of steps of decoders under a framework's table.

use narrows_cost_model::Executor;
use narrows_plan::strategy::{Baseline, NormRule, WeightRule};

use super::{CHUNKS, MeasurementValidator, TENSOR_AXIS};
use crate::framework::FrameworkTable;
use crate::measurements::file::{DecoderModel, Measurement, StepRecompute, TrainingStep};

impl MeasurementValidator {
    pub(super) fn decoder_step(
        &mut self,
        at: &str,
        model: &DecoderModel,
        step: &TrainingStep,
        measurement: &Measurement,
    ) {
        let field = |name: &str| format!("{at}.{name}");
        let names = || FrameworkTable::names().collect::<Vec<_>>().join(", ");
        match step.framework.as_deref() {
            Some(name) if FrameworkTable::names().any(|known| known == name) => {}
            Some(name) => {
                let problem = format!("there is no table of a framework called `{name}`");
                self.defect_with_hint(&field("framework"), problem, &names());
            }
            None => {
                let problem = "is missing: a `decoder` is priced by the table of a framework";
                self.defect_with_hint(&field("framework"), problem.into(), &names());
            }
        }
        if measurement.executor != Executor::Eager {
            let problem = "a `decoder` is predicted under `eager` only".into();
            self.defect_with_hint("executor", problem, "eager");
        }
        if matches!(step.recompute, StepRecompute::Auto | StepRecompute::Latents) {
            let hint = "none, selective, selective-layers, selective-ops, block";
            let problem = "does not say what a framework recomputes".into();
            self.defect_with_hint(&field("recompute"), problem, hint);
        }
        if step.norm != NormRule::Auto {
            let problem = "the norms of a `decoder` have whole rows: no statistic is reduced";
            self.defect_with_hint(&field("norm"), problem.into(), "omit `norm`");
        }
        if step.weights != WeightRule::Any {
            let problem = "the sharding of the weights of a `decoder` is fixed".into();
            self.defect_with_hint(&field("weights"), problem, "omit `weights`");
        }
        if measurement.mesh.context > 1 {
            let problem = "a `decoder` is predicted without context parallelism".into();
            self.defect_with_hint("mesh.context", problem, "omit `mesh.context`");
        }
        if !step.strategy.is_for_dense_models() {
            let names: Vec<&str> = Baseline::of_dense_models().map(Baseline::name).collect();
            let problem = match step.strategy {
                Baseline::Auto => {
                    "`auto` leaves the sharding to a plan, and a `decoder` has none".into()
                }
                strategy => format!("`{}` shards factor pairs", strategy.name()),
            };
            self.defect_with_hint(&field("strategy"), problem, &names.join(", "));
        }
        self.decoder_sizes(at, model, step, measurement);
    }

    fn decoder_sizes(
        &mut self,
        at: &str,
        model: &DecoderModel,
        step: &TrainingStep,
        measurement: &Measurement,
    ) {
        let (mesh, path) = (measurement.mesh, format!("{at}.model.decoder"));
        for (name, size) in [
            ("layers", model.layers),
            ("hidden", model.hidden),
            ("heads", model.heads),
            ("kv_heads", model.kv_heads),
            ("d_ff", model.d_ff),
            ("vocabulary", model.vocabulary),
        ] {
            self.size(&format!("{path}.{name}"), size);
        }
        if !self.is_valid() {
            return;
        }
        let tokens = [step.workload.micro_batch, step.workload.sequence_length];
        self.fits_device(&path, &[model.hidden.max(model.d_ff), model.d_ff, model.layers]);
        self.fits_device(&path, &[model.vocabulary, model.hidden]);
        let widest = model.hidden.max(model.d_ff).max(model.vocabulary);
        self.fits_device(&path, &[tokens[0], tokens[1], widest]);
        let table = step.framework.as_deref().map(FrameworkTable::built_in);
        let divides_blocks = table.and_then(Result::ok).is_some_and(|table| table.divides_blocks());
        let stages = match (step.interleaving, divides_blocks) {
            (1, false) => 1,
            (chunks, _) => mesh.pipeline.saturating_mul(chunks),
        };
        for (name, size, divisor) in [
            ("hidden", model.hidden, (model.heads, "`heads`")),
            ("heads", model.heads, (model.kv_heads, "`kv_heads`")),
            ("heads", model.heads, (mesh.tensor, TENSOR_AXIS)),
            ("d_ff", model.d_ff, (mesh.tensor, TENSOR_AXIS)),
            ("layers", model.layers, (stages, CHUNKS)),
        ] {
            self.divides(&format!("{path}.{name}"), size, divisor);
        }
        if mesh.pipeline.saturating_mul(step.interleaving) > model.layers {
            let problem = format!("{} blocks for {} stages", model.layers, mesh.pipeline);
            self.defect(&format!("{path}.layers"), problem);
        }
        if step.shards_tokens() && !step.workload.sequence_length.is_multiple_of(mesh.tensor) {
            let problem = format!(
                "{} tokens are not divisible by {} devices that share them",
                step.workload.sequence_length, mesh.tensor
            );
            self.defect(&format!("{at}.workload.sequence_length"), problem);
        }
        self.chunks(at, step, mesh);
    }
}
