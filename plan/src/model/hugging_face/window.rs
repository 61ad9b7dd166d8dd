//! Sliding windows: `sliding_window`, `use_sliding_window` and `layer_types`.

use serde_json::Value;

use super::fields::{ConfigFields, excerpt};
use crate::defect::Defect;

/// The longest sequence of a model of `max_length` positions, in tokens: no longer than a window, up to which a
/// window has no effect. A window that shortens sequences is a warning.
pub(super) fn longest_sequence(max_length: u64, fields: &mut ConfigFields<'_>) -> u64 {
    let is_used = fields.flag("use_sliding_window");
    let window = fields.size("sliding_window");
    let is_unused = [is_used, has_windowed_layers(fields)].contains(&Some(false));
    let Some(window) = window.filter(|window| *window < max_length && !is_unused) else {
        return max_length;
    };
    let problem = format!(
        "is {window}: sequences are limited to {window} tokens, up to which the window has no effect"
    );
    fields.warnings.push(Defect::new("sliding_window", problem));
    window
}

/// Whether `layer_types` has a layer with a window; `None` when absent. Other kinds of attention are reported.
fn has_windowed_layers(fields: &mut ConfigFields<'_>) -> Option<bool> {
    let value = fields.get("layer_types")?;
    let kinds = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let is = |kind: &Value, name: &str| kind.as_str() == Some(name);
    let is_other = |kind: &&Value| !is(kind, "full_attention") && !is(kind, "sliding_attention");
    if let Some(other) = kinds.iter().find(is_other) {
        let problem = format!("{} is not supported", excerpt(other));
        let hint = "\"full_attention\" or \"sliding_attention\"";
        fields.defects.push(Defect::new("layer_types", problem).hint(hint));
    }
    Some(kinds.iter().any(|kind| is(kind, "sliding_attention")))
}
