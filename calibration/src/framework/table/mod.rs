//! Step times of full-rank decoders under other frameworks, by tables in `profiles/frameworks`.
//!
//! [`FrameworkTable`] says what a framework launches; the kernels of a decoder ([`shape`]) have the prices of the
//! hardware profile; [`LaunchQueue`](narrows_cost_model::LaunchQueue) is the host's launch queue, and [`step`] puts the passes together.

mod file;
mod fitted_steps;
mod prediction;
mod refit;
mod shape;
mod step;
mod terms;
#[cfg(test)]
mod tests;

pub(crate) use file::FrameworkTable;
pub(crate) use fitted_steps::is_fitted_step;
pub use prediction::{FrameworkPrediction, FrameworkStep, framework_names, predict_framework_step};
pub use refit::{LeftOut, PredictedRow, TableParameter, TableRows};
pub(crate) use step::decoder_step_time_s;
pub(crate) use terms::decoder_term_shares;
