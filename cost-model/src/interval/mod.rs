//! 90 % intervals of predictions.
//!
//! An interval is the middle 90 % of the values of a prediction x over many draws of its uncertain parts:
//!
//! ```text
//! ln x(θ_b) + scale(x) · e_b
//! ```
//! θ_b are the parameters fitted to draw b of a bootstrap: n of the n measurements, with replacement. e_b is an error
//! that no fit removes, ln(measured / predicted), drawn from the residuals of measurements outside the fit. The scale
//! grows with the distance from the measurements ([`error_scale`](crate::error_scale)). n residuals are widened by
//! √((n + 1)/(n − 1)), the ratio of the spread of the next value of a normal distribution to that of a sample of n.
//! The point prediction always lies within the interval.
//!
//! [`ErrorModel`] computes the intervals of kernels and steps of a program; [`prediction_interval`] takes any draws and
//! residuals.

mod error_model;
mod statistics;

pub use error_model::{ErrorModel, UnmeasuredKernel};
pub use statistics::{
    COVERAGE, RESIDUALS_MIN, draw_error, equal_quantiles, prediction_interval, quantile,
    small_sample_factor, thin_to_quantiles,
};
