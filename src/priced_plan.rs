//! A plan with its program and its prediction, whether it was searched or read from a file.

use narrows_cost_model::{StepEstimate, TrainingRunEstimate, TrainingRunTerms};
use narrows_plan::{CheckedProgram, Plan, ResolvedPlan};
use narrows_planner::{FeasiblePlan, Prediction, Request, predict_program};

use crate::errors::{CommandResult, Failure, Problem};

/// Location of defects in plans of the planner, which would be bugs of the planner.
const SEARCHED_PLAN: &str = "the plan found";

/// A proven and priced plan.
#[derive(Debug)]
pub struct PricedPlan {
    /// The plan, which names the hardware that it was priced on.
    pub plan: Plan,
    /// The plan resolved against its model.
    pub resolved: ResolvedPlan,
    /// Program of the plan.
    pub program: CheckedProgram,
    /// Prediction of the plan.
    pub prediction: Prediction,
}

impl PricedPlan {
    /// Prices the plan that the search of `request` found.
    ///
    /// # Errors
    /// A plan that does not fit the model of the request, which is a bug of the planner.
    pub fn of_search(request: &Request, best: FeasiblePlan) -> CommandResult<PricedPlan> {
        let Request { model, profile, executor, .. } = request;
        let FeasiblePlan { plan, program, .. } = best;
        let resolved =
            plan.resolve(model).map_err(|defects| Failure::file(SEARCHED_PLAN, defects))?;
        let prediction = predict_program(model, profile, *executor, &resolved, &program);
        Ok(PricedPlan { plan, resolved, program, prediction })
    }

    /// The training run that repeats the step of this plan, if one is to be estimated.
    ///
    /// # Errors
    /// Failures so frequent that the run makes no progress.
    pub fn training_run(
        &self,
        terms: Option<&TrainingRunTerms>,
    ) -> CommandResult<Option<TrainingRunEstimate>> {
        let step = StepEstimate {
            devices: self.plan.mesh.devices(),
            tokens: self.tokens_per_step(),
            time_s: self.prediction.step_time_s,
            interval_s: self.prediction.step_time_interval_s,
        };
        estimate_run(terms, &step)
    }

    /// Tokens of the global batch.
    pub fn tokens_per_step(&self) -> u64 {
        let workload = &self.plan.workload;
        workload.global_batch * workload.sequence_length
    }
}

/// The training run that repeats a step, if one is to be estimated.
///
/// # Errors
/// Failures so frequent that the run makes no progress.
pub fn estimate_run(
    terms: Option<&TrainingRunTerms>,
    step: &StepEstimate,
) -> CommandResult<Option<TrainingRunEstimate>> {
    terms.map(|terms| terms.estimate(step)).transpose().map_err(|error| {
        let problem = Problem::new("--mtbf-hours", error.to_string());
        Failure::input(problem.hint("hours of one device, such as 50000; fewer devices"))
    })
}
