//! The layers of a model, by the distinct shapes of their blocks.

use narrows_plan::graph::{BlockShape, BoundaryTensor};
use narrows_plan::model::Model;

/// The layers of a model.
pub(super) struct ModelLayers {
    /// The distinct block shapes.
    pub shapes: Vec<BlockShape>,
    /// Index of each layer's block shape.
    pub layer_shapes: Vec<usize>,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of parameters of a block on average, rounded down.
    pub block_parameters: u64,
    /// Widths of the latents that cross from one block to the next.
    pub crossing_widths: Vec<u64>,
    /// The narrowest set of tensors between two neighbouring blocks.
    pub narrowest_carried: Vec<BoundaryTensor>,
}

impl ModelLayers {
    pub(super) fn new(model: &Model) -> ModelLayers {
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
        ModelLayers {
            shapes,
            layer_shapes,
            parameters,
            block_parameters,
            crossing_widths,
            narrowest_carried,
        }
    }
}

/// The narrowest set of tensors between two neighbouring blocks.
fn narrowest_carried(layers: &[BlockShape], hidden: u64) -> Vec<BoundaryTensor> {
    let inner = &layers[..layers.len() - 1];
    let width =
        |carried: &Vec<BoundaryTensor>| carried.iter().map(|tensor| tensor.width).sum::<u64>();
    inner.iter().map(|layer| layer.outgoing_tensors(hidden)).min_by_key(width).unwrap_or_default()
}
