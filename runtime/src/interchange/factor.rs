//! Factor pairs from dense matrices.
//!
//! The best approximation of W of rank r in the Frobenius norm is its truncated singular value decomposition
//! (Eckart & Young 1936). With W = U·Σ·Vᵀ, the factors share the singular values:
//!
//! ```text
//! A = U_r·Σ_r^½          B = Σ_r^(-½)·U_rᵀ·W = Σ_r^½·V_rᵀ
//! ```
//!
//! U and Σ² are the eigenvectors and eigenvalues of W·Wᵀ, or V and Σ² of Wᵀ·W where W has fewer columns, in
//! f64: singular values below 1e-8 of the largest are noise, as they are in f32 weights.

use faer::{Mat, MatRef};
use narrows_plan::Defect;
use narrows_plan::model::{
    Activation, FactorPair, LinearKind, Model, ParameterId, Weight, WeightId,
};
use rayon::prelude::*;

use crate::eigenpairs::{Eigenpairs, eigenpairs};
use crate::session::ModelTensors;

/// Choice of the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RankChoice {
    /// One rank for all linears.
    Rank(u64),
    /// For each linear the least rank that keeps this share of the sum of squared singular values. A linear
    /// stays dense where its factors would have as many parameters.
    Energy(f64),
}

/// A linear that was factored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FactoredLinear {
    /// The block.
    pub block: u64,
    /// The linear.
    pub kind: LinearKind,
    /// Rank of the pair; `None` where the linear stays dense.
    pub rank: Option<u64>,
    /// ‖W − A·B‖/‖W‖ in the Frobenius norm, of the factors in f32.
    pub relative_error: f64,
}

/// A low-rank model with its weights.
#[derive(Clone, Debug)]
pub struct FactoredModel {
    /// The model: factor pairs without an activation.
    pub model: Model,
    /// Weights of the model.
    pub weights: ModelTensors,
    /// All linears, by block.
    pub linears: Vec<FactoredLinear>,
}

/// Factors of a matrix.
struct Factors {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: u64,
    relative_error: f64,
}

/// Factors every linear of a dense model.
///
/// # Errors
/// A linear that is a factor pair, or with fewer inputs or outputs than the rank, or whose weights have no decomposition.
///
/// # Panics
/// When a linear of the model has no weights.
pub fn factor_weights(
    model: &Model,
    mut weights: ModelTensors,
    choice: RankChoice,
) -> Result<FactoredModel, Defect> {
    let blocks = model.blocks.iter().enumerate();
    let linears: Vec<_> = blocks
        .flat_map(|(index, block)| {
            block.linears().map(|(kind, linear)| (index as u64, kind, linear))
        })
        .collect();
    let largest_rank = linears.iter().map(|(_, _, linear)| linear.d_in.min(linear.d_out)).min();
    for (block, kind, linear) in &linears {
        let place = format!("layer {block} {kind}");
        let widest = linear.d_in.min(linear.d_out);
        match (&linear.weight, choice) {
            (Weight::Pair(_), _) => {
                return Err(Defect::new(place, "is a factor pair already"));
            }
            (Weight::Dense, RankChoice::Rank(rank)) if rank > widest => {
                let problem = format!("has rank {widest} at most, which is below {rank}");
                return Err(Defect::new(place, problem)
                    .hint(format!("--rank {}", largest_rank.unwrap_or(widest))));
            }
            (Weight::Dense, _) => {}
        }
    }
    let dense_id = |block, kind| ParameterId { block: Some(block), weight: WeightId::Dense(kind) };
    let factored: Vec<Option<Factors>> = linears
        .par_iter()
        .map(|(block, kind, linear)| {
            let weight = &weights[&dense_id(*block, *kind)];
            let w =
                MatRef::from_row_major_slice(weight, linear.d_in as usize, linear.d_out as usize);
            factor(w, choice)
                .map_err(|problem| Defect::new(format!("layer {block} {kind}"), problem))
        })
        .collect::<Result<_, _>>()?;
    // A decomposition has no residual apart from the matrix.
    let mut low_rank = Model { latent_residual: None, ..model.clone() };
    let mut report = vec![];
    for ((block, kind, _), factors) in linears.into_iter().zip(factored) {
        let id = |weight| ParameterId { block: Some(block), weight };
        let Some(Factors { a, b, rank, relative_error }) = factors else {
            report.push(FactoredLinear { block, kind, rank: None, relative_error: 0.0 });
            continue;
        };
        weights.remove(&dense_id(block, kind));
        weights.insert(id(WeightId::FactorA(kind)), a);
        weights.insert(id(WeightId::FactorB(kind)), b);
        let pair = FactorPair { rank, activation: Activation::Identity, crossing: None };
        low_rank.blocks[block as usize].linear_mut(kind).weight = Weight::Pair(pair);
        report.push(FactoredLinear { block, kind, rank: Some(rank), relative_error });
    }
    Ok(FactoredModel { model: low_rank, weights, linears: report })
}

/// Factors a matrix; `None` where it stays dense. An error is what prevents its decomposition.
fn factor(weight: MatRef<'_, f32>, choice: RankChoice) -> Result<Option<Factors>, &'static str> {
    let (rows, columns) = weight.shape();
    let w = Mat::from_fn(rows, columns, |i, j| f64::from(weight[(i, j)]));
    let wide = rows <= columns;
    let gram = if wide { &w * w.transpose() } else { w.transpose() * &w };
    let Eigenpairs { values: squares, vectors } = eigenpairs(&gram)
        .ok_or("has weights that are not finite, or a decomposition that does not converge")?;
    let squares: Vec<f64> = squares.into_iter().map(|square| square.max(0.0)).collect();
    let rank = match choice {
        RankChoice::Rank(rank) => rank as usize,
        RankChoice::Energy(energy) => least_rank(&squares, energy),
    };
    if matches!(choice, RankChoice::Energy(_)) && rank * (rows + columns) >= rows * columns {
        return Ok(None);
    }
    let vectors = vectors.subcols(0, rank);
    // The square root of the singular value; a value of zero has no direction, whose scale is arbitrary.
    let scale = |n: usize| if squares[n] > 0.0 { squares[n].sqrt().sqrt() } else { 1.0 };
    let rounded = |matrix: MatRef<'_, f64>, exponent: i32| {
        Mat::from_fn(matrix.nrows(), rank, |i, n| (matrix[(i, n)] * scale(n).powi(exponent)) as f32)
    };
    let (a, b) = if wide {
        (rounded(vectors, 1), rounded((w.transpose() * vectors).as_ref(), -1))
    } else {
        (rounded((&w * vectors).as_ref(), -1), rounded(vectors, 1))
    };
    let widened =
        |matrix: &Mat<f32>| Mat::from_fn(matrix.nrows(), rank, |i, n| f64::from(matrix[(i, n)]));
    let product = widened(&a) * widened(&b).transpose();
    let norm = w.norm_l2();
    let relative_error = if norm > 0.0 { (product - w).norm_l2() / norm } else { 0.0 };
    let row_major = |matrix: MatRef<'_, f32>| -> Vec<f32> {
        matrix.row_iter().flat_map(|row| row.iter().copied()).collect()
    };
    let (a, b) = (row_major(a.as_ref()), row_major(b.transpose()));
    Ok(Some(Factors { a, b, rank: rank as u64, relative_error }))
}

/// The least rank, of at least 1, that keeps a share of the sum of squares, which are in descending order.
fn least_rank(squares: &[f64], energy: f64) -> usize {
    let total: f64 = squares.iter().sum();
    let mut kept = 0.0;
    let reached = squares.iter().position(|square| {
        kept += square;
        kept >= energy * total
    });
    reached.map_or(squares.len(), |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::CounterRng;

    /// A matrix with these singular values: a product of random orthogonal matrices with them.
    fn matrix(rows: usize, columns: usize, singular: &[f64]) -> Mat<f32> {
        let orthogonal = |seed, size: usize| {
            let stream = CounterRng::new(seed, "orthogonal");
            Mat::from_fn(size, size, |i, j| stream.normal((i * size + j) as u64)).qr().compute_Q()
        };
        let mut middle = Mat::zeros(rows, columns);
        singular.iter().enumerate().for_each(|(n, value)| middle[(n, n)] = *value);
        let w: Mat<f64> = orthogonal(1, rows) * middle * orthogonal(2, columns);
        Mat::from_fn(rows, columns, |i, j| w[(i, j)] as f32)
    }

    fn factors(w: &Mat<f32>, choice: RankChoice) -> Option<Factors> {
        factor(w.as_ref(), choice).expect("converges")
    }

    #[test]
    fn errors_are_those_of_the_truncated_decomposition() {
        let singular = [8.0, 4.0, 2.0, 1.0, 0.5, 0.0];
        let total: f64 = singular.iter().map(|s| s * s).sum();
        for (rows, columns) in [(6, 9), (9, 6), (6, 6)] {
            let w = matrix(rows, columns, &singular);
            for rank in 1..=6 {
                let factors = factors(&w, RankChoice::Rank(rank as u64)).unwrap();
                let tail: f64 = singular[rank..].iter().map(|s| s * s).sum();
                let expected = (tail / total).sqrt();
                let error = (factors.relative_error - expected).abs();
                assert!(error < 1e-6, "{rows}×{columns} rank {rank}: {}", factors.relative_error);
                assert_eq!((factors.a.len(), factors.b.len()), (rows * rank, rank * columns));
            }
        }
    }

    #[test]
    fn energy_chooses_the_least_rank_or_none() {
        let squares = [64.0, 16.0, 4.0, 1.0];
        for (energy, rank) in [(0.5, 1), (0.75, 1), (0.76, 2), (0.99, 4), (1.0, 4)] {
            assert_eq!(least_rank(&squares, energy), rank, "{energy}");
        }
        let w = matrix(8, 8, &[8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(factors(&w, RankChoice::Energy(0.89)).unwrap().rank, 2);
        // Four ranks have as many parameters as the matrix.
        assert!(factors(&w, RankChoice::Energy(0.95)).is_none());
    }
}
