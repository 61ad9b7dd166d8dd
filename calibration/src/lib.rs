//! Measurements, fits of hardware profiles to them, and predictions beside measurements.
//!
//! [`measurements`] reads files of published measurements, [`fit`] turns the measurements of `narrows calibrate` into a
//! profile, and [`validation`] compares predictions with measurements. Steps of other frameworks, which the
//! planner does not know, are priced by the private module `framework`.

mod bootstrap;
mod coordinate_descent;
mod csv;
pub mod fit;
mod framework;
pub mod measurements;
mod statistics;
mod step_rows;
mod step_terms;
pub mod validation;

pub use bootstrap::{Bootstrap, bootstrap, independent_units};
pub use coordinate_descent::CoordinateDescent;
pub use csv::{CsvDefaults, measurements_from_csv};
pub use framework::{
    FrameworkPrediction, FrameworkStep, LeftOut, PredictedRow, TableParameter, TableRows,
    framework_names, predict_framework_step,
};
pub use statistics::upper_median;
pub use step_rows::measurements_from_rows;
pub use step_terms::StepTerm;
