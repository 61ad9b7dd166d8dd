//! Comparison of the miniature of a plan with unsharded training.

use narrows_plan::model::ParameterId;
use narrows_reference::{GRADIENT_TOLERANCE, LOSS_TOLERANCE, Miniature, NumericComparison};
use serde::Serialize;

use super::Report;
use super::page::Page;
use crate::args::Detail;
use crate::errors::Problem;
use crate::text::plural;

/// Number of reported gradients, the largest differences first.
const REPORTED: usize = 5;

/// The field `numeric` of `check --numeric`.
#[derive(Serialize)]
pub struct NumericReport {
    equal: bool,
    devices: u64,
    blocks: u64,
    hidden: u64,
    loss: f64,
    reference_loss: f64,
    loss_relative_difference: f64,
    loss_tolerance: f64,
    gradients_compared: u64,
    /// The largest ‖a − b‖ / ‖b‖ of gradients.
    gradient_relative_differences: Vec<GradientDifference>,
    gradient_tolerance: f64,
}

#[derive(Serialize)]
struct GradientDifference {
    name: String,
    relative_difference: f64,
    /// Larger than `gradient_tolerance` where the gradient is ill-conditioned.
    tolerance: f64,
}

impl NumericReport {
    /// The comparison of a miniature with the reference.
    pub fn new(miniature: &Miniature, comparison: &NumericComparison) -> NumericReport {
        let furthest = comparison.gradient_errors.iter().take(REPORTED);
        let difference = |(id, relative_difference): &(ParameterId, f64)| GradientDifference {
            name: id.to_string(),
            relative_difference: *relative_difference,
            tolerance: comparison.tolerance(*id),
        };
        NumericReport {
            equal: comparison.agrees(),
            devices: miniature.plan.mesh.devices(),
            blocks: miniature.model.blocks.len() as u64,
            hidden: miniature.model.hidden,
            loss: comparison.loss,
            reference_loss: comparison.reference_loss,
            loss_relative_difference: comparison.loss_error(),
            loss_tolerance: LOSS_TOLERANCE,
            gradients_compared: comparison.gradient_errors.len() as u64,
            gradient_relative_differences: furthest.map(difference).collect(),
            gradient_tolerance: GRADIENT_TOLERANCE,
        }
    }

    /// The problem of a plan that computes another function than its model.
    pub fn problem(&self, file: &str) -> Option<Problem> {
        let cause = format!("because in its miniature {}", self.differences());
        let problem = Problem::new(file, "the plan does not compute its model").because([cause]);
        (!self.equal).then_some(problem)
    }

    fn differences(&self) -> String {
        let loss = format!("the loss differs by {:.1e}", self.loss_relative_difference);
        match self.gradient_relative_differences.first() {
            None => loss,
            Some(GradientDifference { name, relative_difference, .. }) => {
                format!("{loss}, and no gradient by more than {relative_difference:.1e} ({name})")
            }
        }
    }
}

impl Report for NumericReport {
    fn page(&self, _: Detail) -> Page {
        let mut page = Page::default();
        page.heading("The plan computes its model");
        page.paragraph(&format!(
            "Its miniature, {} of width {}, ran on {} as threads. Compared with unsharded training in \
             f64, {}, of {}.",
            plural(self.blocks, "block"),
            self.hidden,
            plural(self.devices, "device"),
            self.differences(),
            plural(self.gradients_compared, "gradient"),
        ));
        page
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::{Model, Rope, presets};
    use narrows_planner::Request;

    use super::*;

    #[test]
    fn a_plan_that_computes_another_function_is_a_problem() {
        let model = presets::find("cola-tiny").unwrap();
        let profile = narrows_cost_model::profile::preset("a100-80gb").unwrap();
        let request = Request::new(model.clone(), profile, 2, 4, 64);
        let plan = narrows_planner::search(&request).best.unwrap().plan;
        let miniature = Miniature::new(&plan, &model).unwrap();
        let open = |model: &Model, program| narrows_cpu::session(model, program, 1);
        let same = NumericReport::new(&miniature, &miniature.compare(&open, 1).unwrap());
        assert!(same.problem("plan.json").is_none());
        let rope = Rope { theta: 100.0, ..miniature.model.rope.clone() };
        let other = Model { rope, ..miniature.model.clone() };
        let numeric =
            NumericReport::new(&miniature, &miniature.compare_with(&open, &other, 1).unwrap());
        assert!(numeric.problem("plan.json").is_some());
        assert!(!numeric.equal && numeric.gradient_relative_differences[0].tolerance < 1e-3);
    }
}
