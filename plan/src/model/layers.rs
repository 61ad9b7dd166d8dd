//! Merges the layers of a model file into one draft for each block.
//!
//! A draft records the field of each part, so that a defect names the field of the file and not the
//! blocks that inherit it.

use super::defect_report::DefectReport;
use super::file::{BlockFile, BlocksFile, CrossingFile, LinearFile};
use super::limits::MAX_BLOCKS;
use super::{Activation, AttentionMask, GatedProduct, LatentCrossing, Positions};

/// One layer of a model file, with its blocks and its field in the file.
pub(super) struct BlockOverride<'a> {
    pub field: String,
    pub first: u64,
    pub last: u64,
    pub file: &'a BlockFile,
}

/// A block merged from its layers; parts that no layer sets are absent.
#[derive(Default)]
pub(super) struct BlockDraft {
    pub d_ff: Option<u64>,
    pub product: Option<GatedProduct>,
    pub positions: Option<Positions>,
    pub attention: Option<AttentionMask>,
    pub qkv_bias: Option<bool>,
    pub qk_norm: Option<bool>,
    pub linears: [LinearDraft; 7],
}

/// A linear merged from its layers; parts that no layer sets are absent.
#[derive(Default)]
pub(super) struct LinearDraft {
    pub is_set: bool,
    pub dense: bool,
    pub rank: Option<u64>,
    pub activation: Option<Activation>,
    pub crossing: Option<LatentCrossing>,
    /// The last field that sets this linear.
    pub field: String,
    /// The field that sets the crossing.
    pub crossing_field: String,
}

impl BlockDraft {
    /// Merges the layers of block `index`.
    pub fn new(index: u64, layers: &[BlockOverride<'_>]) -> BlockDraft {
        let mut draft = BlockDraft::default();
        for layer in layers.iter().filter(|layer| (layer.first..=layer.last).contains(&index)) {
            draft.d_ff = layer.file.d_ff.or(draft.d_ff);
            draft.product = layer.file.product.or(draft.product);
            draft.positions = layer.file.positions.or(draft.positions);
            draft.attention = layer.file.attention.or(draft.attention);
            draft.qkv_bias = layer.file.qkv_bias.or(draft.qkv_bias);
            draft.qk_norm = layer.file.qk_norm.or(draft.qk_norm);
            for (linear, (name, file)) in draft.linears.iter_mut().zip(layer.file.linears()) {
                if let Some(all) = &layer.file.all {
                    linear.apply(all, || format!("{}.all", layer.field));
                }
                if let Some(file) = file {
                    linear.apply(file, || format!("{}.{name}", layer.field));
                }
            }
        }
        draft
    }
}

impl LinearDraft {
    fn apply(&mut self, file: &LinearFile, field: impl FnOnce() -> String) {
        self.field = field();
        self.is_set = true;
        match file {
            LinearFile::Dense => {
                self.dense = true;
                // A later layer that factors the linear again must set its rank.
                self.rank = None;
            }
            LinearFile::Pair(pair) => {
                self.dense = false;
                self.rank = pair.rank.or(self.rank);
                self.activation = pair.activation.or(self.activation);
                if let Some(crossing) = &pair.crossing {
                    self.crossing_field = format!("{}.crossing", self.field);
                    self.crossing = match crossing {
                        CrossingFile::None => None,
                        CrossingFile::Some(crossing) => Some(crossing.clone()),
                    };
                }
            }
        }
    }
}

/// The layers of a file, the default first. Reports invalid keys of overrides.
pub(super) fn layers<'a>(
    blocks: &'a BlocksFile,
    report: &mut DefectReport,
) -> Vec<BlockOverride<'a>> {
    let field = "blocks.default".to_owned();
    let mut layers =
        vec![BlockOverride { field, first: 0, last: MAX_BLOCKS, file: &blocks.default }];
    for (key, file) in &blocks.overrides {
        let field = format!("blocks.overrides.{key}");
        match block_range(key) {
            None => report.hint(
                field,
                format!("`{key}` is not a block or a range of blocks"),
                "a number such as \"3\", counted from 0, or a range such as \"3-7\"",
            ),
            Some((first, last)) if last < first => report.hint(
                field,
                format!("the range `{key}` runs backwards"),
                format!("\"{last}-{first}\""),
            ),
            Some((_, last)) if last >= blocks.count => report.defect(
                field,
                format!("there is no block {last}: the model has {} blocks", blocks.count),
            ),
            Some((first, last)) => layers.push(BlockOverride { field, first, last, file }),
        }
    }
    layers
}

/// Parses `"3"` or `"3-7"` as an inclusive range.
fn block_range(key: &str) -> Option<(u64, u64)> {
    // `parse` alone accepts "+3".
    let number = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok())?
    };
    match key.split_once('-') {
        None => number(key).map(|index| (index, index)),
        Some((first, last)) => number(first).zip(number(last)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_blocks_or_ranges() {
        assert_eq!(block_range("3"), Some((3, 3)));
        assert_eq!(block_range("3-7"), Some((3, 7)));
        for invalid in ["", "-", "-3", "3-", "+3", "3..7", "q", "99999999999999999999"] {
            assert_eq!(block_range(invalid), None, "{invalid}");
        }
    }
}
