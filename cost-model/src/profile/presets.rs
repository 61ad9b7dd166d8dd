//! The profiles that come with the program, by name.

use std::sync::OnceLock;

use narrows_plan::{Defect, Defects};
use narrows_profiles::PROFILES;

use super::checked::Profile;
use super::file::ProfileFile;
use super::read::read;
use crate::kernel_shape::MeasuredShapes;

/// Largest edit distance from a mistyped name at which a preset is suggested.
const SUGGESTED_DISTANCE_MAX: usize = 2;

/// The names of all presets.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

/// The preset called `name`.
///
/// # Errors
/// No preset has that name; the hint lists the nearest names, or all of them.
///
/// ```
/// let a100 = narrows_cost_model::profile::preset("a100-80gb").unwrap();
/// assert_eq!(a100.devices_per_node(), 4);
/// assert!(narrows_cost_model::profile::preset("a100-80g").unwrap_err().to_string().contains("a100-80gb"));
/// ```
pub fn preset(name: &str) -> Result<Profile, Defects> {
    if let Some((_, text)) = PROFILES.iter().find(|(known, _)| *known == name) {
        return read(text);
    }
    let lower = name.to_ascii_lowercase();
    let is_near = |known: &&str| {
        known.starts_with(&lower) || strsim::levenshtein(&lower, known) <= SUGGESTED_DISTANCE_MAX
    };
    let near: Vec<&str> = preset_names().filter(is_near).collect();
    let suggested = if near.is_empty() { preset_names().collect() } else { near };
    let hint = format!("{}, or the path of a profile file", suggested.join(", "));
    Err(Defect::new("hardware", format!("there is no hardware profile called `{name}`"))
        .hint(hint)
        .into())
}

/// The shapes of the measurements that a preset was fitted to; `None` for other presets and other names.
///
/// Reads preset files without validating them: the validation of a profile calls this for the preset that
/// [`form_of`](ProfileFile::form_of) names.
pub(crate) fn fitted_shapes(name: &str) -> Option<&'static MeasuredShapes> {
    static SHAPES: OnceLock<Vec<(&str, MeasuredShapes)>> = OnceLock::new();
    let all = SHAPES.get_or_init(|| {
        let shapes = |(name, text): &(&'static str, &str)| {
            let refits = serde_json::from_str::<ProfileFile>(text).ok()?.refits?;
            Some((*name, MeasuredShapes::from_kernels(&refits.kernels)))
        };
        PROFILES.iter().filter_map(shapes).collect()
    });
    all.iter().find(|(known, _)| *known == name).map(|(_, shapes)| shapes)
}
