//! Files of measurements, in the format of `docs/measurements-format.md`.
//!
//! A [`MeasurementsFile`] is the JSON form. [`read`] also checks that every measurement can be predicted.

mod file;
mod kernels;
mod sources;
mod validate;

use narrows_plan::{Defects, json};

pub use file::{MeasuredQuantity, MeasurementUnit, MeasurementsFile, StepRecompute};
pub use kernels::priced_kernels;
pub use sources::Citation;

pub(crate) use file::{
    DecoderModel, EmbeddingKind, GptModel, KernelRun, Measurement, MeasurementsFormat, MlpKind,
    StepLinears, TrainedModel, TrainingStep,
};
pub(crate) use kernels::{KernelTimes, predicted_times};
pub(crate) use validate::{nested, validate};

/// The built-in files of published measurements, by name.
const SHIPPED: [(&str, &str); 1] =
    [("boost-a100", include_str!("../../data/measurements/boost-a100.json"))];

/// The built-in files of published measurements.
///
/// ```
/// let files = narrows_calibration::measurements::shipped().unwrap();
/// assert_eq!(files[0].name, "boost-a100");
/// ```
///
/// # Errors
/// A built-in file that is damaged; the tests read all of them.
pub fn shipped() -> Result<Vec<MeasurementsFile>, Defects> {
    SHIPPED.iter().map(|(_, text)| read(text)).collect()
}

/// Reads and validates measurements.
///
/// # Errors
/// Every defect, with the path of its field. A syntax error or an unknown field is reported alone, because parsing stops there.
pub fn read(text: &str) -> Result<MeasurementsFile, Defects> {
    let file: MeasurementsFile = json::read(text).map_err(|defect| {
        defect.hint("`narrows schema measurements` prints the format of measurements")
    })?;
    validate(&file, |index| format!("measurements[{index}]."))?;
    Ok(file)
}

/// The JSON Schema of measurements files.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(MeasurementsFile).to_value()
}
