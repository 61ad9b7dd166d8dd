//! Files of measurements, in the format of `docs/measurements-format.md`.
//!
//! A [`MeasurementsFile`] is the JSON form. [`read`] also checks that every measurement can be predicted.

mod file;
mod kernels;
mod sources;
mod validate;

use narrows_plan::{Defect, Defects, json};

pub use file::{MeasuredQuantity, MeasurementUnit, MeasurementsFile, StepRecompute};
pub use kernels::priced_kernels;
pub use sources::Citation;

pub(crate) use file::{
    DecoderModel, EmbeddingKind, GptModel, KernelRun, Measurement, MeasurementsFormat, MlpKind,
    TrainedModel, TrainingStep,
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
    SHIPPED.iter().map(|(name, text)| read(name, text)).collect()
}

/// Reads and validates measurements. `name` is the file's name, for messages.
///
/// # Errors
/// Every defect, with the path of its field. A syntax error or an unknown field is reported alone, because parsing stops there.
pub fn read(name: &str, text: &str) -> Result<MeasurementsFile, Defects> {
    let file: MeasurementsFile = json::read(text).map_err(|defect| {
        let problem = format!("{name} is not a measurements file: {}", defect.problem);
        Defect::new(defect.field, problem).hint("`narrows schema measurements` prints the format")
    })?;
    validate(&file, |index| format!("measurements[{index}]."))?;
    Ok(file)
}

/// The JSON Schema of measurements files.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(MeasurementsFile).to_value()
}
