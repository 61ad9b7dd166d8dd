//! Merging the layers of a model file: what a block's linear is after everything that names it.
//!
//! A draft remembers where each part was said, so that a defect points at the text the user wrote
//! and not at the thousand blocks that inherited it.

use super::defect_report::DefectReport;
use super::file::{BlockFile, BlocksFile, CrossingFile, LinearFile};
use super::limits::MAX_BLOCKS;
use super::{Activation, GatedProduct, LatentCrossing};

/// One layer with the blocks it covers and its place in the file.
pub(super) struct BlockOverride<'a> {
    pub place: String,
    pub first: u64,
    pub last: u64,
    pub says: &'a BlockFile,
}

/// A block after all its layers, still with holes.
#[derive(Default)]
pub(super) struct BlockDraft {
    pub d_ff: Option<u64>,
    pub product: Option<GatedProduct>,
    pub linears: [LinearDraft; 7],
}

/// A linear after all its layers, still with holes.
#[derive(Default)]
pub(super) struct LinearDraft {
    pub named: bool,
    pub dense: bool,
    pub rank: Option<u64>,
    pub activation: Option<Activation>,
    pub crossing: Option<LatentCrossing>,
    /// The last place that named this linear.
    pub place: String,
    /// The place that said the crossing.
    pub crossing_place: String,
}

impl BlockDraft {
    /// Block `index` after every layer that covers it.
    pub fn new(index: u64, layers: &[BlockOverride<'_>]) -> BlockDraft {
        let mut draft = BlockDraft::default();
        for layer in layers.iter().filter(|layer| (layer.first..=layer.last).contains(&index)) {
            draft.d_ff = layer.says.d_ff.or(draft.d_ff);
            draft.product = layer.says.product.or(draft.product);
            for (linear, (name, says)) in draft.linears.iter_mut().zip(layer.says.linears()) {
                if let Some(all) = &layer.says.all {
                    linear.apply(all, || format!("{}.all", layer.place));
                }
                if let Some(says) = says {
                    linear.apply(says, || format!("{}.{name}", layer.place));
                }
            }
        }
        draft
    }
}

impl LinearDraft {
    fn apply(&mut self, says: &LinearFile, place: impl FnOnce() -> String) {
        self.place = place();
        self.named = true;
        match says {
            LinearFile::Dense => {
                self.dense = true;
                // A rank said before must not come back when a later layer makes a pair of it
                // again without saying which.
                self.rank = None;
            }
            LinearFile::Pair(pair) => {
                self.dense = false;
                self.rank = pair.rank.or(self.rank);
                self.activation = pair.activation.or(self.activation);
                if let Some(crossing) = &pair.crossing {
                    self.crossing_place = format!("{}.crossing", self.place);
                    self.crossing = match crossing {
                        CrossingFile::None => None,
                        CrossingFile::Some(crossing) => Some(crossing.clone()),
                    };
                }
            }
        }
    }
}

/// The layers of a file, the default first. Reports keys that name no block.
pub(super) fn layers<'a>(
    blocks: &'a BlocksFile,
    report: &mut DefectReport,
) -> Vec<BlockOverride<'a>> {
    let place = "blocks.default".to_owned();
    let mut layers =
        vec![BlockOverride { place, first: 0, last: MAX_BLOCKS, says: &blocks.default }];
    for (key, says) in &blocks.overrides {
        let place = format!("blocks.overrides.{key}");
        match block_range(key) {
            None => report.hint(
                place,
                format!("`{key}` names no block"),
                "a number such as \"3\", counted from 0, or a range such as \"3-7\"",
            ),
            Some((first, last)) if last < first => report.hint(
                place,
                format!("the range `{key}` runs backwards"),
                format!("\"{last}-{first}\""),
            ),
            Some((_, last)) if last >= blocks.count => report.defect(
                place,
                format!("there is no block {last}: the model has {} blocks", blocks.count),
            ),
            Some((first, last)) => layers.push(BlockOverride { place, first, last, says }),
        }
    }
    layers
}

/// `"3"` or `"3-7"`, both ends included.
fn block_range(key: &str) -> Option<(u64, u64)> {
    // `parse` alone would take "+3".
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
        for bad in ["", "-", "-3", "3-", "+3", "3..7", "q", "99999999999999999999"] {
            assert_eq!(block_range(bad), None, "{bad}");
        }
    }
}
