//! Profiles from JSON text.

use narrows_plan::{Defect, Defects, json};

use super::checked::Profile;
use super::file::ProfileFile;

/// Reads and validates a profile; `name` is the file's name in messages.
///
/// # Errors
/// Every defect, with the path of its field. A syntax error or an unknown field is reported alone.
pub fn read(name: &str, text: &str) -> Result<Profile, Defects> {
    let file: ProfileFile = json::read(text).map_err(|defect| {
        Defect::new(defect.field, format!("{name} is not a profile: {}", defect.problem))
            .hint("the files under profiles/ are complete examples")
    })?;
    file.resolve()
}

/// The JSON Schema of profile files.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ProfileFile).to_value()
}
