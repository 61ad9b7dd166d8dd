//! Measurements: what somebody's clock said of something that has a price here.
//!
//! A [`MeasurementsFile`] is what was written; [`read`] also checks that every figure can be
//! compared. Errors are relative, `predicted / measured − 1`, and summed up by [`RelativeErrors`];
//! [`Orderings`] counts whether the faster of two ways to do one job is predicted to be faster.

mod check;
mod errors;
mod file;
mod kernels;
mod rows;
mod sources;

use narrows_plan::{Defect, Defects};

pub use errors::{OrderingCase, Orderings, RelativeErrors};
pub use file::*;
pub use kernels::{kernels, predicted_s};
pub use rows::{RowDefaults, from_rows};

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
/// None, unless the program was built with a damaged file.
pub fn shipped() -> Result<Vec<MeasurementsFile>, Defects> {
    SHIPPED.iter().map(|(name, text)| read(name, text)).collect()
}

/// Reads measurements. `name` is the file's name, for messages.
///
/// # Errors
/// Every defect with the path of its field; a syntax error or an unknown field ends the reading
/// and is the only one reported.
pub fn read(name: &str, text: &str) -> Result<MeasurementsFile, Defects> {
    let mut json = serde_json::Deserializer::from_str(text);
    let file: MeasurementsFile = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path };
        Defect::new(field, format!("{name} does not hold measurements: {}", error.inner()))
            .hint("`narrows schema measurements` prints their form")
    })?;
    json.end()
        .map_err(|error| Defect::new("", format!("{name} goes on after its end: {error}")))?;
    check::check(&file)?;
    Ok(file)
}

/// The JSON schema of a file of measurements.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(MeasurementsFile).to_value()
}
