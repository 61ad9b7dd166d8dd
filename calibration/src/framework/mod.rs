//! Steps of full-rank GPTs under a framework that launches operator by operator.
//!
//! The planner knows LLaMA-like models under this project's own programs. Many published step times are of another
//! architecture and of another program; this module prices those with the same
//! [`Prices`](narrows_cost_model::Prices). [`Framework`] has the coefficients of the framework and its host, fitted to
//! published steps ([`FITTED_FRAMEWORK`]); none is indexed by a model, a mesh or a row.

mod fit;
mod fitted_rows;
mod interval;
mod model;
mod operators;

pub use fit::{COEFFICIENT_NAMES, Coefficients, HoldOut, StepRow, StepRows};
pub use fitted_rows::{FitConditions, fit_conditions_of, row_digest};
pub use interval::{BootstrapFit, IntervalModel, shipped_interval_model};
pub use model::{FITTED_FRAMEWORK, Framework, step_time_s};
