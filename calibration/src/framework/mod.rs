//! Step times of full-rank decoders under other frameworks, by tables in `profiles/frameworks`.
//!
//! The planner prices programs of this project. Many published step times are of other frameworks; this module prices them
//! with the same [`Prices`](narrows_cost_model::Prices). [`FrameworkTable`] says what a framework launches; the kernels of
//! a decoder ([`shape`]) have the prices of the hardware profile, and [`step`] puts the passes together. A GPT is a
//! decoder with a plain MLP and a tied embedding under the table `megatron`.

mod errors;
mod file;
mod fitted_rows;
mod fitted_steps;
#[cfg(test)]
mod gpt_tests;
#[cfg(test)]
mod needs_rows;
mod operator;
mod parameter;
mod prediction;
mod refit;
mod shape;
mod step;
mod table;
mod terms;
#[cfg(test)]
mod tests;

pub(crate) use file::FrameworkTable;
pub(crate) use fitted_rows::{FitConditions, fit_conditions_of};
pub(crate) use fitted_steps::is_fitted_step;
pub use parameter::TableParameter;
pub use prediction::{FrameworkPrediction, FrameworkStep, framework_names, predict_framework_step};
pub use refit::{LeftOut, PredictedRow, TableRows};
pub(crate) use step::decoder_step_time_s;
pub(crate) use terms::decoder_term_shares;
