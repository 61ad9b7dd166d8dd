//! Predicted exact steps of LORO in words.

use narrows_plan::{Bytes, Seconds};
use narrows_planner::ExactStepPrediction;

use crate::text;

/// The interval, the time and the work of exact steps.
pub fn phrase(exact_step: &ExactStepPrediction) -> String {
    let ExactStepPrediction { every, host_flops, bytes, time_s, per_step_s, rates, .. } =
        exact_step;
    format!(
        "an exact step {} takes {} more ({host_flops:.1e} operations on the hosts, {} copied, at {} rates), {} of the \
         average step",
        text::every(*every, "step"),
        Seconds(*time_s),
        Bytes(*bytes),
        rates.name(),
        Seconds(*per_step_s),
    )
}
