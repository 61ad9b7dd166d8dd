//! Sensitivity of a step time to the numbers that it is predicted from.
//!
//! With T(x) the step time as a function of one number x, all others fixed, the elasticity at the present value is
//!
//! ```text
//! ε = d ln T / d ln x ≈ (ln T(x₊) − ln T(x₋)) / (ln x₊ − ln x₋)
//! ```
//! T is either the time of the fastest plan for x, searched anew, or the time of the present plan, repriced. The 90 %
//! interval of ε is that of the same quotient in the draws of the prediction interval, which have the same errors at
//! both ends ([`ErrorModel::step_log_ratios`](narrows_cost_model::interval::ErrorModel::step_log_ratios)).
//!
//! | file | contents |
//! |---|---|
//! | `number.rs` | the numbers that are varied, and their values for a factor |
//! | `variant.rs` | the step times for one value: planned anew, and under the present plan |
//! | `difference.rs` | elasticities and gains, with their intervals |
//! | `analysis.rs` | all variants in parallel, and the nearest values that change the plan |

mod analysis;
mod difference;
mod number;
mod variant;

pub use analysis::UPGRADES;
pub use analysis::{Analysis, AssumedParameter, ParameterElasticity, Upgrade, analyse};
pub use difference::Estimate;
pub use number::{ParameterGroup, VariedParameter};
pub use variant::StepSample;
