//! Measurements, fits of hardware profiles to them, and predictions beside measurements.
//!
//! [`measurements`] reads files of published figures, [`fit`] turns what `narrows calibrate` measured into a profile,
//! [`framework`] prices steps of full-rank GPTs under another framework, and [`validation`] compares predictions with
//! measurements.

mod bootstrap;
mod coordinate_descent;
mod csv;
pub mod fit;
pub mod framework;
pub mod measurements;
pub mod validation;

pub use bootstrap::{Bootstrap, ResamplingUnit, bootstrap, independent_units};
pub use coordinate_descent::CoordinateDescent;
pub use csv::{CsvDefaults, measurements_from_csv};
