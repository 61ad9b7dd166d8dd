//! 90 % intervals of predictions.
//!
//! An interval is the middle 90 % of what a prediction x comes to in many draws of its uncertain parts:
//!
//! ```text
//! ln x(θ_b) + scale(x) · e_b
//! ```
//! θ_b are the fitted numbers by draw b of a bootstrap: fitted again to the measurements drawn with replacement, as
//! many as there are. e is an error that remains beside a fit, ln(measured / predicted), drawn from residuals of
//! measurements that the fit had not seen. The scale grows with the distance from the measurements
//! ([`error_scale`](crate::error_scale)). n residuals are spread by √((n + 1)/(n − 1)), the ratio of the next value of
//! a normal distribution to a sample of n. The point prediction always lies within the interval.
//!
//! [`ErrorModel`] does this for kernels and steps of a program; [`prediction_interval`] for any prediction whose
//! draws and residuals are given.

mod error_model;
mod statistics;

pub use error_model::{ErrorModel, UnmeasuredKernel};
pub use statistics::{
    COVERAGE, draw_error, equal_quantiles, prediction_interval, quantile, small_sample_factor,
    thin_to_quantiles,
};
