//! Step times for one value of a number: of the fastest plan for it, and of the present plan.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use narrows_cost_model::Profile;
use narrows_cost_model::interval::ErrorModel;
use narrows_plan::{CheckedProgram, Plan, PlanSource};
use narrows_planner::{Prediction, Request, SearchCache, kernels, predict, search_until_stopped};

use crate::args::validate;
use crate::errors::CommandResult;
use crate::priced_plan::PricedPlan;
use crate::search_defects::SearchDefects;
use crate::whatif::Scenario;

use super::number::{ScaledValue, VariedParameter};

/// A step time with its draws.
#[derive(Clone, Debug)]
pub struct StepSample {
    /// Step time in seconds.
    pub time_s: f64,
    /// ln(step time in seconds) in every draw of the prediction interval.
    pub log_times: Vec<f64>,
}

/// The step times for one value of a number.
#[derive(Debug)]
pub struct Variant {
    /// Ratio of the value to the present one.
    pub factor: f64,
    /// The fastest plan for the value; `None` where there is none, or the value does not fit the request.
    pub replanned: Option<ReplannedVariant>,
    /// The present plan; `None` where it does not fit the shapes.
    pub kept: Option<KeptVariant>,
    /// Defects of the search.
    pub defects: SearchDefects,
}

/// The fastest plan for a value.
#[derive(Debug)]
pub struct ReplannedVariant {
    /// The plan.
    pub plan: Plan,
    /// Step time of the plan.
    pub step: StepSample,
}

/// The present plan under another value.
#[derive(Debug)]
pub struct KeptVariant {
    /// Step time of the plan.
    pub step: StepSample,
    /// Whether it fits within the memory of a device.
    pub fits: bool,
}

impl StepSample {
    /// The draws of a predicted step.
    pub fn new(request: &Request, prediction: &Prediction, program: &CheckedProgram) -> StepSample {
        let program = program.program();
        let errors = ErrorModel::new(&request.profile, request.executor, &program.context.mesh);
        let time_s = prediction.step_time_s;
        let ratios = errors.step_log_ratios(&kernels(program));
        StepSample { time_s, log_times: ratios.into_iter().map(|r| time_s.ln() + r).collect() }
    }

    /// The step of the present plan with the errors that the variants of a number have. A number that is set is given, so
    /// that its bootstrap draws are dropped: here too, at its present value. `None` where the plan cannot be priced.
    pub fn with_errors_of_variants(
        scenario: &Scenario,
        present: &Plan,
        number: &VariedParameter,
    ) -> Option<StepSample> {
        let request = scenario.request(&number.present()).ok()?;
        kept(present, &request).map(|kept| kept.step)
    }
}

impl Variant {
    /// Plans a request anew with one number at another value, and prices the present plan for it. `None` if `stop` ended
    /// the search.
    ///
    /// # Errors
    /// A value that its field does not take.
    pub fn new(
        scenario: &Scenario,
        present: &Plan,
        value: &ScaledValue,
        cache: &SearchCache,
        stop: &Arc<AtomicBool>,
    ) -> CommandResult<Option<Variant>> {
        let request = scenario.request(&value.settings)?;
        let kept = kept(present, &request);
        let (mut replanned, mut defects) = (None, SearchDefects::default());
        if validate(&request).is_ok() {
            let result = search_until_stopped(&request, cache, stop);
            if result.report.is_interrupted {
                return Ok(None);
            }
            defects = SearchDefects::of(&result.report);
            if let Some(best) = result.best {
                let priced = PricedPlan::of_search(&request, best)?;
                let step = StepSample::new(&request, &priced.prediction, &priced.program);
                replanned = Some(ReplannedVariant { plan: priced.plan, step });
            }
        }
        Ok(Some(Variant { factor: value.factor, replanned, kept, defects }))
    }
}

/// The present plan priced for another request; `None` where it does not fit the request.
fn kept(present: &Plan, request: &Request) -> Option<KeptVariant> {
    let mut plan = Plan { hardware: source(&request.profile), ..present.clone() };
    plan.model.fingerprint = request.model.fingerprint();
    plan.workload.global_batch = request.global_batch;
    plan.workload.sequence_length = request.sequence_length;
    if plan.mesh.devices() != request.devices {
        return None;
    }
    let (prediction, program) =
        predict(&request.model, &request.profile, request.executor, &plan).ok()?;
    let fits = prediction.peak_memory() <= request.arena_limit();
    Some(KeptVariant { step: StepSample::new(request, &prediction, &program), fits })
}

fn source(profile: &Profile) -> PlanSource {
    PlanSource { name: profile.name().into(), fingerprint: profile.fingerprint().into() }
}
