//! Blocks without RoPE (SmolLM3): `no_rope_layers` and `no_rope_layer_interval`.

use indexmap::IndexMap;
use serde_json::Value;

use super::fields::ConfigFields;
use crate::defect::Defect;
use crate::model::limits::MAX_BLOCKS;
use crate::model::{BlockFile, Positions};

/// Interval of blocks without RoPE in SmolLM3's class.
const DEFAULT_INTERVAL: u64 = 4;

/// Overrides of the blocks without RoPE, of `count` blocks: those with a 0 in `no_rope_layers`, or the last of each
/// interval.
pub(super) fn overrides(count: u64, fields: &mut ConfigFields<'_>) -> IndexMap<String, BlockFile> {
    // Resolution reports larger counts.
    let count = count.min(MAX_BLOCKS);
    let interval = fields.size("no_rope_layer_interval").unwrap_or(DEFAULT_INTERVAL);
    let listed = fields.get("no_rope_layers").map(|list| uses_of_rope(list, count));
    let has_rope: Vec<bool> = match listed {
        Some(Some(uses)) => uses,
        Some(None) => {
            let problem =
                format!("must be a list of {count} numbers: 0 for a block without RoPE, or 1");
            fields.defects.push(Defect::new("no_rope_layers", problem));
            return IndexMap::new();
        }
        None => {
            (1..=count).map(|ordinal| interval == 0 || !ordinal.is_multiple_of(interval)).collect()
        }
    };
    let without = has_rope.iter().enumerate().filter(|(_, has_rope)| !**has_rope);
    let none = || BlockFile { positions: Some(Positions::None), ..BlockFile::default() };
    without.map(|(block, _)| (block.to_string(), none())).collect()
}

/// Whether each block has RoPE; `None` unless all `count` blocks have a 0 or 1.
fn uses_of_rope(list: &Value, count: u64) -> Option<Vec<bool>> {
    let uses = list.as_array()?.iter().map(|value| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => None,
    });
    uses.collect::<Option<Vec<bool>>>().filter(|uses| uses.len() as u64 == count)
}
