//! What is printed: for people ([`text`]) and for programs ([`json`]).

pub mod calibration;
pub mod decisions;
pub mod doctor;
pub mod infeasible;
pub mod json;
pub mod numeric;
pub mod page;
pub mod parts;
pub mod proof;
pub mod rivals;
pub mod run;
pub mod text;
pub mod tokens;
pub mod trace;
pub mod unmeasured;
pub mod validation;

use narrows_cost_model::{Executor, Profile};
use narrows_plan::decisions::ResolvedPlan;
use narrows_plan::model::Model;
use narrows_plan::{Bytes, Plan};
use narrows_planner::{Prediction, SearchReport};

/// Everything there is to say about a priced plan.
#[derive(Clone, Copy)]
pub struct PlanReport<'a> {
    /// What is trained.
    pub model: &'a Model,
    /// On what.
    pub profile: &'a Profile,
    /// How kernels are launched.
    pub executor: Executor,
    /// What a device may hold.
    pub memory_limit: Bytes,
    /// The decisions.
    pub plan: &'a Plan,
    /// The decisions, resolved against the model.
    pub resolved: &'a ResolvedPlan,
    /// What they are expected to do.
    pub prediction: &'a Prediction,
    /// How they were found, if they were.
    pub search: Option<&'a SearchReport>,
}

/// A limit for people and JSON: `None` when there is none.
pub fn limited(limit: Bytes) -> Option<Bytes> {
    (limit != Bytes(u64::MAX)).then_some(limit)
}
