//! Validation of what a step says of the program that ran it.

use narrows_cost_model::Executor;
use narrows_plan::strategy::Baseline;

use super::MeasurementValidator;
use crate::measurements::file::{Measurement, StepLinears, TrainedModel, TrainingStep};

impl MeasurementValidator {
    /// Checks `linears`, `accumulate_grad_in_fp32` and `overlap_tensor_collectives` of a step: the program must be one whose
    /// difference from a plan is priced.
    pub(super) fn program(&mut self, kind: &str, step: &TrainingStep, measurement: &Measurement) {
        let separate = step.linears == StepLinears::Separate;
        let stated = [
            ("linears", separate),
            ("accumulate_grad_in_fp32", step.accumulate_grad_in_fp32.is_some()),
        ];
        let mesh = measurement.mesh;
        let planned = matches!(step.model, TrainedModel::Preset(_) | TrainedModel::Described(_));
        for (name, _) in stated.into_iter().filter(|(_, is_stated)| *is_stated) {
            let field = format!("measured.{kind}.{name}");
            if kind != "step" || !planned {
                let problem = "is stated of planned steps alone: tables of frameworks state it themselves, and the \
                               cost of recomputation does not depend on it";
                self.defect_with_hint(&field, problem.into(), "leave it out");
            } else if measurement.executor != Executor::Eager {
                let problem = "differs from a plan in frameworks that launch operator by operator";
                self.defect_with_hint(&field, problem.into(), "leave it out, or `executor` eager");
            } else if mesh.devices() != mesh.tensor {
                let problem = "is priced on one replica of one stage";
                self.defect_with_hint(&field, problem.into(), "leave it out on such a mesh");
            }
        }
        if step.overlap_tensor_collectives && !planned {
            let problem =
                "is stated of planned steps alone: tables of frameworks state it themselves";
            let field = format!("measured.{kind}.overlap_tensor_collectives");
            self.defect_with_hint(&field, problem.into(), "leave it out");
        }
        let field = format!("measured.{kind}.linears");
        if separate && !step.strategy.has_whole_inputs() {
            let strategies = Baseline::ALL.into_iter().filter(|it| it.has_whole_inputs());
            let names: Vec<&str> = strategies.map(Baseline::name).collect();
            let problem = format!("`separate` is priced with {} alone", names.join(", "));
            self.defect_with_hint(&field, problem, "leave it out");
        }
        if separate && step.overlap_tensor_collectives {
            let problem = "`separate` is priced without overlap of tensor-axis collectives".into();
            self.defect_with_hint(&field, problem, "omit `overlap_tensor_collectives`");
        }
    }
}
