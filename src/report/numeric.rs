//! How far the small twin of a plan is from unsharded training.

use narrows_reference::{Comparison, GRADIENT_TOLERANCE, LOSS_TOLERANCE, Miniature};
use serde::Serialize;

use super::page::{TextPage, plural};
use crate::errors::Problem;

/// Gradients that are reported, the furthest first.
const REPORTED: usize = 5;

/// The outcome; its JSON form is `numeric` of `check --numeric --format json`.
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
    /// ‖a−b‖/‖b‖ of those that are furthest.
    gradient_relative_differences: Vec<GradientDifference>,
    gradient_tolerance: f64,
}

#[derive(Serialize)]
struct GradientDifference {
    name: String,
    relative_difference: f64,
    /// More than `gradient_tolerance` where the gradient is ill-conditioned.
    tolerance: f64,
}

impl NumericReport {
    /// Of a twin that was compared.
    pub fn of(twin: &Miniature, found: &Comparison) -> NumericReport {
        let largest = found.gradient_errors.iter().take(REPORTED);
        let difference = |(name, off): &(String, f64)| GradientDifference {
            name: name.clone(),
            relative_difference: *off,
            tolerance: found.tolerance(name),
        };
        NumericReport {
            equal: found.agrees(),
            devices: twin.plan.mesh.devices(),
            blocks: twin.model.blocks.len() as u64,
            hidden: twin.model.hidden,
            loss: found.loss,
            reference_loss: found.reference_loss,
            loss_relative_difference: found.loss_error(),
            loss_tolerance: LOSS_TOLERANCE,
            gradients_compared: found.gradient_errors.len() as u64,
            gradient_relative_differences: largest.map(difference).collect(),
            gradient_tolerance: GRADIENT_TOLERANCE,
        }
    }

    /// That the plan is another function, when it is.
    pub fn problem(&self, name: &str) -> Option<Problem> {
        let problem = "the plan does not compute its model";
        let because = [format!("because {}", self.differences())];
        (!self.equal).then(|| Problem::new(name, problem).because(because))
    }

    fn differences(&self) -> String {
        let gradient = self.gradient_relative_differences.first();
        let gradient = gradient.map_or(
            String::new(),
            |GradientDifference { name, relative_difference, .. }| {
                format!(", and no gradient by more than {relative_difference:.1e} ({name})")
            },
        );
        format!("its twin's loss is off by {:.1e}{gradient}", self.loss_relative_difference)
    }

    /// For people, when they are equal.
    pub fn text(&self) -> String {
        let mut page = TextPage::default();
        page.heading("It computes its model");
        page.paragraph(&format!(
            "A twin of {} and width {} was run on {} as threads, and held against unsharded training \
             in f64: {}, of {} compared.",
            plural(self.blocks, "block"),
            self.hidden,
            plural(self.devices, "device"),
            self.differences(),
            plural(self.gradients_compared, "gradient"),
        ));
        page.finish()
    }
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::{Model, presets};
    use narrows_planner::Request;

    use super::*;

    #[test]
    fn a_plan_of_another_function_is_a_problem() {
        let model = presets::find("cola-tiny").unwrap();
        let profile = narrows_cost_model::profile::preset("a100-80gb").unwrap();
        let request = Request::new(model.clone(), profile, 2, 4, 64);
        let plan = narrows_planner::search(&request).best.unwrap().plan;
        let twin = Miniature::new(&plan, &model).unwrap();
        let open = |model: &Model, program| narrows_cpu::session(model, program, 1);
        let same = NumericReport::of(&twin, &twin.compare(&open, 1).unwrap());
        assert!(same.problem("plan.json").is_none());
        let other = Model { rope_theta: 100.0, ..twin.model.clone() };
        let numeric = NumericReport::of(&twin, &twin.compare_with(&open, &other, 1).unwrap());
        assert!(numeric.problem("plan.json").is_some());
        assert!(!numeric.equal && numeric.gradient_relative_differences[0].tolerance < 1e-3);
    }
}
