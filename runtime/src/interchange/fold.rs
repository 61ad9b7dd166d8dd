//! Products of factor pairs.

use narrows_plan::model::{Model, ParameterId, WeightId};
use rayon::prelude::*;

use crate::session::ModelTensors;

/// The weights of a model's [folded](Model::folded) counterpart: A·B in place of A and B, each sum in f64.
///
/// # Errors
/// The first linear whose product exceeds the range of f32.
///
/// # Panics
/// When a factor of the model has no weights.
pub fn fold_weights(model: &Model, mut weights: ModelTensors) -> Result<ModelTensors, ParameterId> {
    for (index, block) in model.blocks.iter().enumerate() {
        for (kind, linear) in block.linears() {
            let Some(rank) = linear.rank() else { continue };
            let id = |weight| ParameterId { block: Some(index as u64), weight };
            let factors = [WeightId::FactorA(kind), WeightId::FactorB(kind)];
            let [a, b] = factors.map(|factor| weights.remove(&id(factor)).unwrap_or_default());
            let product = multiply(&a, &b, rank as usize, linear.d_out as usize);
            let id = id(WeightId::Dense(kind));
            if product.iter().any(|element| !element.is_finite()) {
                return Err(id);
            }
            weights.insert(id, product);
        }
    }
    Ok(weights)
}

/// A·B, with A of `inner` columns and B of `columns`.
fn multiply(a: &[f32], b: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let mut product = vec![0.0; a.len() / inner * columns];
    product.par_chunks_mut(columns).zip(a.par_chunks(inner)).for_each(|(row, a)| {
        let mut sums = vec![0.0; columns];
        for (a, b) in a.iter().zip(b.chunks(columns)) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += f64::from(*a) * f64::from(*b);
            }
        }
        row.iter_mut().zip(sums).for_each(|(element, sum)| *element = sum as f32);
    });
    product
}
