//! The profile files that come with the program, before they are validated.

use std::sync::OnceLock;

use narrows_profiles::PROFILES;

use super::file::ProfileFile;
use crate::kernel_shape::MeasuredShapes;

/// The names of all presets.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

/// The shapes that a preset's numbers were fitted to; `None` for a preset that was not fitted, and for other names.
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
