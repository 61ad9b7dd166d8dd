//! A resolved model written down again, as a person would: what most blocks share is the default,
//! what most linears of it share is `all`, and equal neighbours share one override.

use indexmap::IndexMap;

use super::file::{
    BlockFile, BlocksFile, CrossingFile, LinearFile, ModelFile, ModelFormat, PairFile,
};
use super::{Block, Linear, Model, Weight};

impl From<&Model> for ModelFile {
    /// The canonical file: it resolves to an equal model, and equal models give equal files.
    fn from(model: &Model) -> ModelFile {
        let usual = usual_block(&model.blocks);
        ModelFile {
            schema: None,
            format: ModelFormat::V1,
            name: Some(model.name.clone()),
            description: None,
            hidden: model.hidden,
            vocab: model.vocab,
            heads: model.heads,
            kv_heads: Some(model.kv_heads),
            head_dim: Some(model.head_dim),
            d_ff: usual.gate.d_out,
            max_sequence_length: model.max_sequence_length,
            norm_epsilon: model.norm_epsilon,
            rope_theta: model.rope_theta,
            tied: model.tied,
            blocks: BlocksFile {
                count: model.blocks.len() as u64,
                default: default_layer(usual),
                overrides: overrides(&model.blocks, usual),
            },
        }
    }
}

/// The most frequent block, the first of equals. Block 0 counts only when it is alone: without its
/// crossings it is unlike the others even in a uniform model.
fn usual_block(blocks: &[Block]) -> &Block {
    let candidates = if blocks.len() > 1 { &blocks[1..] } else { blocks };
    // Runs of equal blocks are long, so the classes stay few.
    let mut classes: Vec<(&Block, usize)> = Vec::new();
    for block in candidates {
        match classes.iter_mut().find(|(class, _)| *class == block) {
            Some((_, count)) => *count += 1,
            None => classes.push((block, 1)),
        }
    }
    first_of_most(&classes)
}

fn first_of_most<T: Copy>(classes: &[(T, usize)]) -> T {
    let (mut usual, mut most) = classes[0];
    for &(class, count) in &classes[1..] {
        if count > most {
            (usual, most) = (class, count);
        }
    }
    usual
}

fn default_layer(block: &Block) -> BlockFile {
    let linears = block.linears().map(|(_, linear)| whole(linear));
    let mut classes: Vec<(usize, usize)> = Vec::new();
    for (slot, linear) in linears.iter().enumerate() {
        match classes.iter_mut().find(|(class, _)| linears[*class] == *linear) {
            Some((_, count)) => *count += 1,
            None => classes.push((slot, 1)),
        }
    }
    let all = linears[first_of_most(&classes)].clone();
    let mut layer =
        BlockFile { product: Some(block.product), all: Some(all.clone()), ..Default::default() };
    for (said, linear) in layer.linears_mut().into_iter().zip(linears) {
        *said = (linear != all).then_some(linear);
    }
    layer
}

/// Everything about one linear, so that no layer below shines through.
fn whole(linear: &Linear) -> LinearFile {
    match &linear.weight {
        Weight::Dense => LinearFile::Dense,
        Weight::Pair(pair) => LinearFile::Pair(PairFile {
            rank: Some(pair.rank),
            activation: Some(pair.activation),
            crossing: Some(match &pair.crossing {
                None => CrossingFile::None,
                Some(crossing) => CrossingFile::Some(crossing.clone()),
            }),
        }),
    }
}

fn overrides(blocks: &[Block], usual: &Block) -> IndexMap<String, BlockFile> {
    let layers: Vec<BlockFile> = blocks
        .iter()
        .enumerate()
        .map(|(index, block)| difference(block, usual, index == 0))
        .collect();
    let mut overrides = IndexMap::new();
    let mut first = 0;
    for run in layers.chunk_by(PartialEq::eq) {
        let last = first + run.len() - 1;
        if run[0] != BlockFile::default() {
            let key = if first == last { first.to_string() } else { format!("{first}-{last}") };
            overrides.insert(key, run[0].clone());
        }
        first = last + 1;
    }
    overrides
}

fn difference(block: &Block, usual: &Block, first: bool) -> BlockFile {
    let mut layer = BlockFile {
        d_ff: (block.gate.d_out != usual.gate.d_out).then_some(block.gate.d_out),
        product: (block.product != usual.product).then_some(block.product),
        ..Default::default()
    };
    let pairs = block.linears().into_iter().zip(usual.linears());
    for (said, ((_, linear), (_, usual))) in layer.linears_mut().into_iter().zip(pairs) {
        // Block 0 drops its crossing by itself.
        let same = match (&linear.weight, &usual.weight) {
            (Weight::Pair(linear), Weight::Pair(usual)) if first => {
                linear.rank == usual.rank && linear.activation == usual.activation
            }
            (linear, usual) => linear == usual,
        };
        *said = (!same).then(|| whole(linear));
    }
    layer
}
