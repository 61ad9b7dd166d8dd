//! Profiles from JSON text.

use narrows_plan::{Defects, json};

use super::checked::Profile;
use super::file::ProfileFile;

/// Reads and validates a profile.
///
/// # Errors
/// Every defect, with the path of its field. A syntax error or an unknown field is reported alone.
pub fn read(text: &str) -> Result<Profile, Defects> {
    let file: ProfileFile = json::read(text)
        .map_err(|defect| defect.hint("`narrows schema profile` prints the format of profiles"))?;
    file.resolve()
}

/// The JSON Schema of profile files.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ProfileFile).to_value()
}
