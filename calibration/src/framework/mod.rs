//! Step times of full-rank GPTs under a framework that launches operator by operator.
//!
//! The planner prices LLaMA-like models under its own programs. Many published step times are of GPTs in other
//! frameworks; this module prices them with the same [`Prices`](narrows_cost_model::Prices). [`FrameworkModel`](model::FrameworkModel) has the
//! coefficients of a framework and its host, fitted to published steps ([`FITTED_FRAMEWORK`]). No coefficient depends on
//! the model, the mesh or the row.

mod coefficients;
mod fit;
mod fitted_rows;
mod interval;
mod model;
mod operators;
mod refit;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use fitted_rows::{FitConditions, fit_conditions_of};
pub(crate) use interval::built_in_interval_model;
pub(crate) use model::{FITTED_FRAMEWORK, step_time_s, term_shares};
pub use refit::{FrameworkFit, FrameworkRows};
pub use table::{
    FrameworkPrediction, FrameworkStep, LeftOut, PredictedRow, TableParameter, TableRows,
    framework_names, predict_framework_step,
};
pub(crate) use table::{FrameworkTable, decoder_step_time_s, decoder_term_shares, is_fitted_step};
