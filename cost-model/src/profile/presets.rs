//! Presets by name.

use narrows_plan::{Defect, Defects};
use narrows_profiles::PROFILES;

use super::read::read;
use super::resolved::Profile;
use super::shipped::preset_names;

/// Names within this edit distance of a mistyped one are suggested.
const SUGGESTED_DISTANCE: usize = 2;

/// The preset called `name`.
///
/// # Errors
/// No preset has that name; the hint gives the nearest ones, or all of them.
///
/// ```
/// let a100 = narrows_cost_model::profile::preset("a100-80gb").unwrap();
/// assert_eq!(a100.devices_per_node(), 4);
/// assert!(narrows_cost_model::profile::preset("a100-80g").unwrap_err().to_string().contains("a100-80gb"));
/// ```
pub fn preset(name: &str) -> Result<Profile, Defects> {
    if let Some((_, text)) = PROFILES.iter().find(|(known, _)| *known == name) {
        return read(name, text);
    }
    let lower = name.to_ascii_lowercase();
    let similar: Vec<&str> = preset_names()
        .filter(|known| {
            known.starts_with(&lower) || strsim::levenshtein(&lower, known) <= SUGGESTED_DISTANCE
        })
        .collect();
    let suggested = if similar.is_empty() { preset_names().collect() } else { similar };
    let hint = format!("{}, or the path of a profile file", suggested.join(", "));
    Err(Defect::new("hardware", format!("there is no hardware profile called `{name}`"))
        .hint(hint)
        .into())
}
