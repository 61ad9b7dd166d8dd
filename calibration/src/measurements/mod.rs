//! Files of measurements, in the format of `docs/measurements-format.md`.
//!
//! A [`MeasurementsFile`] is the JSON form; [`read`] also checks that every figure has a prediction.

mod file;
mod kernels;
mod sources;
mod validate;

use narrows_plan::{Defect, Defects, json};

pub use file::{
    AllReduceRun, Citation, GemmRun, GptModel, KernelRun, MeasuredQuantity, Measurement,
    MeasurementUnit, MeasurementsFile, MeasurementsFormat, NormRun, TrainedModel, TrainingStep,
};
pub use kernels::{predicted_time_s, priced_kernels};
pub(crate) use validate::validate;

/// The published figures that come with the program, by name.
const SHIPPED: [(&str, &str); 1] =
    [("boost-a100", include_str!("../../data/measurements/boost-a100.json"))];

/// The files of published figures that come with the program.
///
/// ```
/// let files = narrows_calibration::measurements::shipped().unwrap();
/// assert_eq!(files[0].name, "boost-a100");
/// ```
///
/// # Errors
/// Only in a program that was built with a damaged file.
pub fn shipped() -> Result<Vec<MeasurementsFile>, Defects> {
    SHIPPED.iter().map(|(name, text)| read(name, text)).collect()
}

/// Reads and validates measurements. `name` is the file's name, for messages.
///
/// # Errors
/// Every defect with the path of its field; a syntax error or an unknown field ends the reading
/// and is the only one reported.
pub fn read(name: &str, text: &str) -> Result<MeasurementsFile, Defects> {
    let file: MeasurementsFile = json::read(text).map_err(|defect| {
        let problem = format!("{name} is not a measurements file: {}", defect.problem);
        Defect::new(defect.field, problem).hint("`narrows schema measurements` prints the format")
    })?;
    validate(&file)?;
    Ok(file)
}

/// The JSON Schema of measurements files.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(MeasurementsFile).to_value()
}
