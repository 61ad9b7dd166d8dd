//! The profiles that come with the program.
//!
//! `profiles/` holds them; `profiles/src/lib.rs` is the list.

use std::sync::OnceLock;

use narrows_plan::{Defect, Defects};
use narrows_profiles::PROFILES;

use super::{Profile, ProfileFile, read};
use crate::price::shapes::MeasuredShapes;

/// The names that [`preset`] knows.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

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
    let wanted = name.to_ascii_lowercase();
    let near: Vec<&str> = preset_names()
        .filter(|known| known.starts_with(&wanted) || edits(&wanted, known) <= 2)
        .collect();
    let named = if near.is_empty() { preset_names().collect() } else { near };
    let hint = format!("{}, or the path of a profile file", named.join(", "));
    Err(Defect::new("hardware", format!("there is no hardware profile called `{name}`"))
        .hint(hint)
        .into())
}

/// The shapes that a preset's numbers were fitted to; `None` where they were fitted to none, or it is no preset.
pub(crate) fn measured_shapes(name: &str) -> Option<&'static MeasuredShapes> {
    static KNOWN: OnceLock<Vec<(&str, MeasuredShapes)>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| {
        let shapes = |(name, text): &(&'static str, &str)| {
            let refits = serde_json::from_str::<ProfileFile>(text).ok()?.refits?;
            Some((*name, MeasuredShapes::of(&refits.kernels)))
        };
        PROFILES.iter().filter_map(shapes).collect()
    });
    known.iter().find(|(known, _)| *known == name).map(|(_, shapes)| shapes)
}

/// Levenshtein's distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
