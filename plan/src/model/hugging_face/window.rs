//! Sliding windows: `sliding_window`, and by architecture which blocks have one. Qwen's and SmolLM3's classes read a list of them,
//! Mistral's and Phi-3's do not.

use serde_json::Value;

use super::architecture::Architecture;
use super::fields::{ConfigFields, excerpt};
use crate::counts::{plural, plural_with};
use crate::defect::Defect;
use crate::model::limits::MAX_BLOCKS;
use crate::model::{AttentionMask, BlocksFile, Positions};

/// Window of Qwen's classes unless a config sets it.
const DEFAULT_QWEN_WINDOW: u64 = 4096;

/// First block with a window in Qwen's classes unless a config sets it.
const DEFAULT_MAX_WINDOW_LAYERS: u64 = 28;

/// Sets the masks of the blocks: those with a window are listed in `layer_types`, or else chosen by the class.
pub(super) fn set_masks(
    blocks: &mut BlocksFile,
    architecture: Architecture,
    fields: &mut ConfigFields<'_>,
) {
    // Resolution reports larger counts.
    let count = blocks.count.min(MAX_BLOCKS);
    let mut listed = layer_types(count, fields);
    let is_used = fields.flag("use_sliding_window");
    let window = fields.size("sliding_window");
    let first_windowed = fields.size("max_window_layers").unwrap_or(DEFAULT_MAX_WINDOW_LAYERS);
    let (window, of_class): (_, Vec<bool>) = match architecture {
        Architecture::Mistral | Architecture::Phi3 => {
            if window.is_some() && listed.take().is_some_and(|listed| listed.contains(&false)) {
                let problem = format!(
                    "lists blocks without a window, which {}'s class ignores: all have one",
                    architecture.name()
                );
                fields.warnings.push(Defect::new("layer_types", problem));
            }
            (window, vec![true; count as usize])
        }
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let is_absent = !fields.is_present("sliding_window");
            let window = if is_absent { Some(DEFAULT_QWEN_WINDOW) } else { window };
            let windowed = (0..count).map(|block| block >= first_windowed).collect();
            (window.filter(|_| is_used == Some(true)), windowed)
        }
        Architecture::SmolLm3 => {
            let has_rope = |block: u64| {
                let file = blocks.overrides.get(&block.to_string());
                file.is_none_or(|file| file.positions != Some(Positions::None))
            };
            let windowed = (0..count).map(|block| !has_rope(block)).collect();
            (window.filter(|_| is_used == Some(true)), windowed)
        }
        Architecture::Llama
        | Architecture::InternLm2
        | Architecture::Cola
        | Architecture::Boost => {
            if let Some(window) = window.filter(|_| is_used != Some(false)) {
                let problem = format!(
                    "is {window}, which {}'s class ignores: attention is over whole sequences",
                    architecture.name()
                );
                fields.warnings.push(Defect::new("sliding_window", problem));
            }
            return;
        }
    };
    let Some(window) = window else { return };
    let mask = Some(AttentionMask::SlidingWindow(window));
    let is_windowed = listed.unwrap_or(of_class);
    let windowed: Vec<u64> =
        (0..count).zip(is_windowed).filter_map(|(block, is)| is.then_some(block)).collect();
    if windowed.len() as u64 == count {
        blocks.default.attention = mask;
        return;
    }
    for block in windowed {
        blocks.overrides.entry(block.to_string()).or_default().attention = mask;
    }
}

/// Whether each block has a window according to `layer_types`; `None` when absent. Other kinds of attention, and a list of
/// another length, are reported.
fn layer_types(count: u64, fields: &mut ConfigFields<'_>) -> Option<Vec<bool>> {
    let value = fields.get("layer_types")?;
    let kinds = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let is = |kind: &Value, name: &str| kind.as_str() == Some(name);
    let is_other = |kind: &&Value| !is(kind, "full_attention") && !is(kind, "sliding_attention");
    let hint = "\"full_attention\" or \"sliding_attention\"";
    if let Some(other) = kinds.iter().find(is_other) {
        let problem = format!("{} is not supported", excerpt(other));
        fields.defects.push(Defect::new("layer_types", problem).hint(hint));
    } else if kinds.len() as u64 != count {
        let entries = plural_with(kinds.len() as u64, "entry", "entries");
        let problem = format!("has {entries} for {}", plural(count, "block"));
        fields.defects.push(Defect::new("layer_types", problem).hint(hint));
    }
    Some(kinds.iter().map(|kind| is(kind, "sliding_attention")).collect())
}
