//! Shapes of blocks: their linears and the latents that cross their boundaries.

use crate::model::{Block, LatentCrossing, Linear, LinearKind, Model, Weight};

/// A block with the latents that cross from and to its neighbours. Blocks of equal shape share one op
/// graph and one solve.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockShape {
    /// The block.
    pub block: Block,
    /// For each of the seven linears, the rank of the latent that crosses into it from the previous block,
    /// if any.
    pub incoming_ranks: [Option<u64>; 7],
    /// For each of the seven linears, whether its latent crosses into the next block.
    pub crosses_out: [bool; 7],
}

/// A tensor that one block passes to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundaryTensor {
    /// Identity.
    pub id: BoundaryTensorId,
    /// Features of a token.
    pub width: u64,
}

impl BoundaryTensor {
    /// The hidden state of this width.
    pub fn hidden(width: u64) -> BoundaryTensor {
        BoundaryTensor { id: BoundaryTensorId::Hidden, width }
    }
}

/// Identity of a tensor that one block passes to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BoundaryTensorId {
    /// The hidden state.
    Hidden,
    /// The crossing latent of a linear (LaX).
    Latent(LinearKind),
}

impl BoundaryTensorId {
    /// The name in messages and buffer names: `hidden`, or that of the linear.
    pub fn name(self) -> &'static str {
        match self {
            BoundaryTensorId::Hidden => "hidden",
            BoundaryTensorId::Latent(linear) => linear.name(),
        }
    }
}

impl BlockShape {
    /// The shape of block `layer`.
    ///
    /// # Panics
    /// When the model has no such block.
    pub fn of(model: &Model, layer: usize) -> BlockShape {
        let block = &model.blocks[layer];
        let crossed = |block: &Block| block.linears().map(|(_, linear)| crossing(linear).is_some());
        let mut incoming_ranks = [None; 7];
        if let Some(previous) = layer.checked_sub(1).map(|previous| &model.blocks[previous]) {
            let ranks = previous.linears().map(|(_, linear)| linear.rank());
            for ((incoming_rank, rank), crossed) in
                incoming_ranks.iter_mut().zip(ranks).zip(crossed(block))
            {
                *incoming_rank = rank.filter(|_| crossed);
            }
        }
        let crosses_out = model.blocks.get(layer + 1).map_or([false; 7], crossed);
        BlockShape { block: block.clone(), incoming_ranks, crosses_out }
    }

    /// The shapes of all blocks.
    pub fn all(model: &Model) -> Vec<BlockShape> {
        (0..model.blocks.len()).map(|layer| BlockShape::of(model, layer)).collect()
    }

    /// The distinct widths of all latents that cross between these blocks.
    pub fn crossing_widths(shapes: &[BlockShape]) -> Vec<u64> {
        let latents = shapes.iter().flat_map(|shape| shape.outgoing_tensors(0).into_iter().skip(1));
        let mut widths: Vec<u64> = latents.map(|latent| latent.width).collect();
        widths.sort();
        widths.dedup();
        widths
    }

    /// Tensors passed to the next block, the hidden state of this width first.
    pub fn outgoing_tensors(&self, hidden: u64) -> Vec<BoundaryTensor> {
        let mut tensors = vec![BoundaryTensor::hidden(hidden)];
        for ((kind, linear), crosses_out) in self.block.linears().into_iter().zip(self.crosses_out)
        {
            if crosses_out && let Some(width) = linear.rank() {
                tensors.push(BoundaryTensor { id: BoundaryTensorId::Latent(kind), width });
            }
        }
        tensors
    }
}

/// The crossing into a linear, if any.
pub(super) fn crossing(linear: &Linear) -> Option<&LatentCrossing> {
    match &linear.weight {
        Weight::Pair(pair) => pair.crossing.as_ref(),
        Weight::Dense => None,
    }
}
