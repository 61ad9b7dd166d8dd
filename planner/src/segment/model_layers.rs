//! The layers of a model, by the distinct shapes of their blocks.

use narrows_plan::graph::{BlockShape, BoundaryTensor};
use narrows_plan::model::{Block, Linear, Model, Weight};

use crate::predict::model_flops;

/// The layers of a model.
pub(super) struct ModelLayers {
    /// The distinct block shapes.
    pub shapes: Vec<BlockShape>,
    /// Index of each layer's block shape.
    pub layer_shapes: Vec<usize>,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// FLOPs of one sequence, forward and backward.
    pub sequence_flops: f64,
    /// Number of parameters of a block on average, rounded down.
    pub block_parameters: u64,
    /// Least number of parameters of the linears of a block, without those of crossing latents.
    pub block_parameters_min: u64,
    /// Widths of the latents that cross from one block to the next.
    pub crossing_widths: Vec<u64>,
    /// The narrowest set of tensors between two neighbouring blocks.
    pub narrowest_carried: Vec<BoundaryTensor>,
}

impl ModelLayers {
    pub(super) fn new(model: &Model, sequence_length: u64) -> ModelLayers {
        let layers = BlockShape::all(model);
        let crossing_widths = BlockShape::crossing_widths(&layers);
        let narrowest_carried = narrowest_carried(&layers, model.hidden);
        let mut shapes: Vec<BlockShape> = vec![];
        let layer_shapes: Vec<usize> = layers
            .into_iter()
            .map(|layer| {
                shapes.iter().position(|shape| *shape == layer).unwrap_or_else(|| {
                    shapes.push(layer);
                    shapes.len() - 1
                })
            })
            .collect();
        let parameters = model.parameters();
        let vocabulary = model.vocab * model.hidden;
        let ends = vocabulary * if model.tied { 1 } else { 2 } + model.hidden;
        let block_parameters = (parameters - ends) / layer_shapes.len() as u64;
        let block_parameters_min = model.blocks.iter().map(linear_parameters).min();
        ModelLayers {
            shapes,
            layer_shapes,
            parameters,
            sequence_flops: model_flops(model, sequence_length),
            block_parameters,
            block_parameters_min: block_parameters_min.unwrap_or(0),
            crossing_widths,
            narrowest_carried,
        }
    }
}

/// Number of parameters of the linears of a block, without those of crossing latents.
fn linear_parameters(block: &Block) -> u64 {
    let of_linear = |linear: &Linear| match &linear.weight {
        Weight::Dense => linear.d_in * linear.d_out,
        Weight::Pair(pair) => pair.rank * (linear.d_in + linear.d_out),
    };
    block.linears().into_iter().map(|(_, linear)| of_linear(linear)).sum()
}

/// The narrowest set of tensors between two neighbouring blocks.
fn narrowest_carried(layers: &[BlockShape], hidden: u64) -> Vec<BoundaryTensor> {
    let inner = &layers[..layers.len() - 1];
    let width =
        |carried: &Vec<BoundaryTensor>| carried.iter().map(|tensor| tensor.width).sum::<u64>();
    inner.iter().map(|layer| layer.outgoing_tensors(hidden)).min_by_key(width).unwrap_or_default()
}
