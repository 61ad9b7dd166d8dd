//! Converts a resolved model to a compact file: the most frequent block is the default, its most frequent
//! linear is `all`, and equal neighbouring blocks share one override.

use indexmap::IndexMap;

use super::file::{
    BlockFile, BlocksFile, CrossingFile, LinearFile, ModelFile, ModelFormat, PairFile,
};
use super::{AttentionMask, Block, Linear, Model, Positions, Weight};

impl From<&Model> for ModelFile {
    /// The canonical file: it resolves to an equal model, and equal models give equal files.
    fn from(model: &Model) -> ModelFile {
        let typical = most_frequent_block(&model.blocks);
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
            d_ff: typical.gate.d_out,
            max_sequence_length: model.max_sequence_length,
            norm_epsilon: model.norm_epsilon,
            latent_norm_epsilon: model.latent_norm_epsilon,
            rope_theta: model.rope.theta,
            rotary_dim: Some(model.rope.dim).filter(|dim| *dim != model.head_dim),
            rope_scaling: model.rope.scaling.clone(),
            initial_std: model.initial_std,
            latent_residual: model.latent_residual,
            padding_token: model.padding_token,
            special_tokens: model.special_tokens.clone(),
            tied: model.tied,
            blocks: BlocksFile {
                count: model.blocks.len() as u64,
                default: default_layer(typical),
                overrides: overrides(&model.blocks, typical),
            },
        }
    }
}

/// The most frequent block, the first among equally frequent ones. Block 0 counts only in a model of one
/// block: without crossings it differs from the others even in a uniform model.
fn most_frequent_block(blocks: &[Block]) -> &Block {
    let candidates = if blocks.len() > 1 { &blocks[1..] } else { blocks };
    // Runs of equal blocks are long, so the classes stay few.
    let mut classes: Vec<(&Block, usize)> = Vec::new();
    for block in candidates {
        match classes.iter_mut().find(|(class, _)| *class == block) {
            Some((_, count)) => *count += 1,
            None => classes.push((block, 1)),
        }
    }
    most_frequent(&classes)
}

fn most_frequent<T: Copy>(classes: &[(T, usize)]) -> T {
    let (mut typical, mut most) = classes[0];
    for &(class, count) in &classes[1..] {
        if count > most {
            (typical, most) = (class, count);
        }
    }
    typical
}

fn default_layer(block: &Block) -> BlockFile {
    let linears = block.linears().map(|(_, linear)| linear_file(linear));
    let mut classes: Vec<(usize, usize)> = Vec::new();
    for (slot, linear) in linears.iter().enumerate() {
        match classes.iter_mut().find(|(class, _)| linears[*class] == *linear) {
            Some((_, count)) => *count += 1,
            None => classes.push((slot, 1)),
        }
    }
    let all = linears[most_frequent(&classes)].clone();
    let mut layer = BlockFile {
        product: Some(block.product),
        positions: Some(block.positions).filter(|positions| *positions != Positions::default()),
        attention: Some(block.attention).filter(|mask| *mask != AttentionMask::default()),
        qkv_bias: block.qkv_bias.then_some(true),
        qk_norm: block.qk_norm.then_some(true),
        all: Some(all.clone()),
        ..Default::default()
    };
    for (file, linear) in layer.linears_mut().into_iter().zip(linears) {
        *file = (linear != all).then_some(linear);
    }
    layer
}

/// The file of a linear with all fields set, so that earlier layers have no effect.
fn linear_file(linear: &Linear) -> LinearFile {
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

fn overrides(blocks: &[Block], typical: &Block) -> IndexMap<String, BlockFile> {
    let layers: Vec<BlockFile> = blocks
        .iter()
        .enumerate()
        .map(|(index, block)| difference(block, typical, index == 0))
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

fn difference(block: &Block, typical: &Block, first: bool) -> BlockFile {
    let mut layer = BlockFile {
        d_ff: (block.gate.d_out != typical.gate.d_out).then_some(block.gate.d_out),
        product: (block.product != typical.product).then_some(block.product),
        positions: (block.positions != typical.positions).then_some(block.positions),
        attention: (block.attention != typical.attention).then_some(block.attention),
        qkv_bias: (block.qkv_bias != typical.qkv_bias).then_some(block.qkv_bias),
        qk_norm: (block.qk_norm != typical.qk_norm).then_some(block.qk_norm),
        ..Default::default()
    };
    let pairs = block.linears().into_iter().zip(typical.linears());
    for (file, ((_, linear), (_, typical))) in layer.linears_mut().into_iter().zip(pairs) {
        // Resolution drops the crossing of block 0.
        let same = match (&linear.weight, &typical.weight) {
            (Weight::Pair(linear), Weight::Pair(typical)) if first => {
                linear.rank == typical.rank && linear.activation == typical.activation
            }
            (linear, typical) => linear == typical,
        };
        *file = (!same).then(|| linear_file(linear));
    }
    layer
}
