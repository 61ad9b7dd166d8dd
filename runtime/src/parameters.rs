//! The logical parameters of a model: names, shapes and initial values.
//!
//! A *logical* parameter is a whole, unsharded tensor. Buffers of programs hold shards of logical
//! parameters, identified by [`ParameterId`]. Two kinds of shards have other shapes than their logical
//! parameters: the head of a tied model, hidden × vocab, is the transpose of `embedding`; and the
//! square matrices of a tensor gate are one row each, in the same order of elements.
//!
//! | name | rows × columns | initial value |
//! |---|---|---|
//! | `embedding` | vocab × hidden | N(0, s²); zeros in the row of the padding token |
//! | `layer N norm1`, `norm2` | 1 × hidden | 1 |
//! | `layer N q` (dense) | d_in × d_out | N(0, s²) |
//! | `layer N q.a` | d_in × r | N(0, σ²), σ = r^(-1/4)·(d_in + d_out)^(-1/4) |
//! | `layer N q.b` | r × d_out | the same σ; with a latent residual of strength α, plus α/√K in row ⌊n/K⌋ of column n |
//! | `layer N q.gate` | r_prev × r | identity |
//! | `layer N q.gate.bias` | 1 × r | 0 |
//! | `layer N q.gate.u`, `q.gate.v` | a × a, b × b | identity |
//! | `layer N q.latent_norm.scale`, `.bias` | 1 × r | 1, 0 |
//! | `final_norm` | 1 × hidden | 1 |
//! | `head`, unless tied | hidden × vocab | N(0, s²) |
//!
//! Likewise for k, v, o, gate, up and down; s is [`Model::initial_std`], 0.02 as in LLaMA unless the
//! model sets it. Matrices are row-major, (in, out): `y = x·W`. The σ of
//! factors is that of CoLA's released code; an entry of A·B, a sum of r terms, then has standard
//! deviation σ²·√r = (d_in + d_out)^(-1/2), whatever the rank: 0.022 between widths of 1024, where
//! a dense matrix has 0.02. All gates start as the identity gate, so that the three kinds
//! compute the same function at first; a dense gate between unequal ranks starts with ones on its
//! diagonal and zeros elsewhere.
//!
//! A latent residual (DLR: Wang et al. 2026) adds α/√K·z[⌊n/K⌋] to output n of a pair, K = ⌈d_out/r⌉, so that z·(B + α/√K·R) is
//! the output. The original trains B, and adds the fixed α/√K·R at the end. Here B contains it from the beginning: gradients, and so
//! the steps of AdamW without weight decay, are those of the original.
//!
//! # Sharded initialisation
//! Element i of a parameter is a function of the run's seed, the parameter's [`random_stream_name`] and i
//! alone, by a counter-based generator ([`CounterRng`]). A device generates its shard alone, and every plan of a
//! model starts from the same weights.

use narrows_plan::model::{
    CrossingForm, CrossingGate, FactorPair, LatentCrossing, Linear, LinearKind, Model, ParameterId,
    Weight, WeightId,
};

use crate::random::{CounterRng, random_stream_name};

/// One whole, unsharded parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct LogicalParameter {
    /// Place in the model; as text `layer 3 q.a` or `embedding`.
    pub id: ParameterId,
    /// Rows; 1 for scales and biases.
    pub rows: u64,
    /// Columns.
    pub columns: u64,
    /// Whether weight decay applies.
    pub kind: ParameterKind,
    /// Initial values.
    pub initialisation: Initialisation,
}

/// Kind of a parameter, which decides whether weight decay applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterKind {
    /// A matrix, with weight decay.
    Matrix,
    /// The scale or bias of a norm, or the bias of a linear, without weight decay.
    Vector,
}

/// Distribution of initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialisation {
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
    /// Ones where row and column are equal, zeros elsewhere.
    Identity,
    /// Independent normal deviates with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
        /// A row of zeros: that of the padding token in the embedding.
        zero_row: Option<u64>,
    },
    /// Independent normal deviates with mean `residual` where row and ⌊column / `repeats`⌋ are equal, and 0 elsewhere.
    Duplicated {
        /// Standard deviation.
        std: f64,
        /// α/√K.
        residual: f64,
        /// K.
        repeats: u64,
    },
}

impl LogicalParameter {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.rows * self.columns
    }

    /// A function that fills a run of elements, from the given one on, with their initial values in a run with this seed.
    pub fn initial_fill(&self, seed: u64) -> impl Fn(u64, &mut [f32]) + Sync + use<> {
        let value = self.initial_value(seed);
        let stream = CounterRng::new(seed, &random_stream_name(self.id));
        let (initialisation, columns) = (self.initialisation, self.columns);
        move |first, target| match initialisation {
            Initialisation::Normal { std, zero_row } => {
                for (target, normal) in target.iter_mut().zip(stream.normals_from(first)) {
                    *target = (std * normal) as f32;
                }
                if let Some(row) = zero_row {
                    let [begin, end] = [row, row + 1]
                        .map(|row| (row * columns).saturating_sub(first).min(target.len() as u64));
                    target[begin as usize..end as usize].fill(0.0);
                }
            }
            Initialisation::Duplicated { std, residual, repeats } => {
                let normals = stream.normals_from(first).zip(first..);
                for (target, (normal, element)) in target.iter_mut().zip(normals) {
                    let is_copied = element % columns / repeats == element / columns;
                    let mean = if is_copied { residual } else { 0.0 };
                    *target = (mean + std * normal) as f32;
                }
            }
            _ => {
                for (target, element) in target.iter_mut().zip(first..) {
                    *target = value(element / columns, element % columns) as f32;
                }
            }
        }
    }

    /// The initial value as a function of (row, column), in a run with this seed.
    pub fn initial_value(&self, seed: u64) -> impl Fn(u64, u64) -> f64 + use<> {
        let stream = CounterRng::new(seed, &random_stream_name(self.id));
        let (initialisation, columns) = (self.initialisation, self.columns);
        move |row, column| match initialisation {
            Initialisation::Zeros => 0.0,
            Initialisation::Ones => 1.0,
            Initialisation::Identity => f64::from(u8::from(row == column)),
            Initialisation::Normal { zero_row, .. } if zero_row == Some(row) => 0.0,
            Initialisation::Normal { std, .. } => std * stream.normal(row * columns + column),
            Initialisation::Duplicated { std, residual, repeats } => {
                let mean = if column / repeats == row { residual } else { 0.0 };
                mean + std * stream.normal(row * columns + column)
            }
        }
    }
}

/// All parameters of a model, in the order of the forward pass. A tied head is not among them.
pub fn logical_parameters(model: &Model) -> Vec<LogicalParameter> {
    let outside_blocks = |weight| ParameterId { block: None, weight };
    let std = model.initial_std;
    let table = Initialisation::Normal { std, zero_row: model.padding_token };
    let embedding = outside_blocks(WeightId::Embedding);
    let mut parameters = vec![matrix(embedding, model.vocab, model.hidden, table)];
    for (index, block) in model.blocks.iter().enumerate() {
        let previous = index.checked_sub(1).map(|previous| model.blocks[previous].linears());
        let in_block = |weight| ParameterId { block: Some(index as u64), weight };
        for (slot, (kind, linear)) in block.linears().into_iter().enumerate() {
            let norm = match kind {
                LinearKind::Q => Some(WeightId::Norm1),
                LinearKind::Gate => Some(WeightId::Norm2),
                _ => None,
            };
            parameters.extend(norm.map(|norm| scale(in_block(norm), model.hidden)));
            let previous_rank = previous.as_ref().and_then(|previous| previous[slot].1.rank());
            let place = (index as u64, kind);
            parameters.extend(linear_parameters(place, linear, previous_rank, model));
            if block.qkv_bias && matches!(kind, LinearKind::Q | LinearKind::K | LinearKind::V) {
                let bias = scale(in_block(WeightId::Bias(kind)), linear.d_out);
                parameters.push(LogicalParameter { initialisation: Initialisation::Zeros, ..bias });
            }
            if block.qk_norm && matches!(kind, LinearKind::Q | LinearKind::K) {
                parameters.push(scale(in_block(WeightId::QkNorm(kind)), model.head_dim));
            }
        }
    }
    parameters.push(scale(outside_blocks(WeightId::FinalNorm), model.hidden));
    if !model.tied {
        let head = outside_blocks(WeightId::Head);
        parameters.push(matrix(head, model.hidden, model.vocab, normal(std)));
    }
    parameters
}

/// The parameters of one linear; `previous_rank` is the rank of the same linear in the previous block. Of the model, its
/// initial values count.
fn linear_parameters(
    (block, kind): (u64, LinearKind),
    linear: &Linear,
    previous_rank: Option<u64>,
    model: &Model,
) -> Vec<LogicalParameter> {
    let &Linear { d_in, d_out, .. } = linear;
    let in_block = |weight| ParameterId { block: Some(block), weight };
    let Weight::Pair(FactorPair { rank, crossing, .. }) = &linear.weight else {
        return vec![matrix(
            in_block(WeightId::Dense(kind)),
            d_in,
            d_out,
            normal(model.initial_std),
        )];
    };
    let std = factor_std(d_in, d_out, *rank);
    let initial_b = match model.latent_residual {
        None => normal(std),
        Some(alpha) => {
            let repeats = d_out.div_ceil(*rank);
            Initialisation::Duplicated { std, residual: alpha / (repeats as f64).sqrt(), repeats }
        }
    };
    let mut parameters = vec![
        matrix(in_block(WeightId::FactorA(kind)), d_in, *rank, normal(std)),
        matrix(in_block(WeightId::FactorB(kind)), *rank, d_out, initial_b),
    ];
    if let (Some(crossing), Some(previous_rank)) = (crossing, previous_rank) {
        parameters.extend(crossing_parameters((block, kind), crossing, previous_rank, *rank));
    }
    parameters
}

fn crossing_parameters(
    (block, kind): (u64, LinearKind),
    crossing: &LatentCrossing,
    previous_rank: u64,
    rank: u64,
) -> Vec<LogicalParameter> {
    let in_block = |weight| ParameterId { block: Some(block), weight };
    let gate =
        |weight, rows, columns| matrix(in_block(weight), rows, columns, Initialisation::Identity);
    let mut parameters = match crossing.gate {
        CrossingGate::Identity => vec![],
        CrossingGate::Dense => vec![gate(WeightId::CrossingGate(kind), previous_rank, rank)],
        CrossingGate::Affine => {
            let bias = scale(in_block(WeightId::CrossingGateBias(kind)), rank);
            vec![
                gate(WeightId::CrossingGate(kind), previous_rank, rank),
                LogicalParameter { initialisation: Initialisation::Zeros, ..bias },
            ]
        }
        CrossingGate::Tensor { a, b } => vec![
            gate(WeightId::CrossingGateU(kind), a, a),
            gate(WeightId::CrossingGateV(kind), b, b),
        ],
    };
    if crossing.form == CrossingForm::Released {
        parameters.push(scale(in_block(WeightId::LatentNormScale(kind)), rank));
        let bias = scale(in_block(WeightId::LatentNormBias(kind)), rank);
        parameters.push(LogicalParameter { initialisation: Initialisation::Zeros, ..bias });
    }
    parameters
}

/// Initial standard deviation of both factors of a pair: r^(-1/4)·(d_in + d_out)^(-1/4) (CoLA's
/// released code).
fn factor_std(d_in: u64, d_out: u64, rank: u64) -> f64 {
    (rank as f64 * (d_in + d_out) as f64).powf(-0.25)
}

fn normal(std: f64) -> Initialisation {
    Initialisation::Normal { std, zero_row: None }
}

fn matrix(id: ParameterId, rows: u64, columns: u64, initial: Initialisation) -> LogicalParameter {
    let kind = ParameterKind::Matrix;
    LogicalParameter { id, rows, columns, kind, initialisation: initial }
}

fn scale(id: ParameterId, width: u64) -> LogicalParameter {
    LogicalParameter {
        id,
        rows: 1,
        columns: width,
        kind: ParameterKind::Vector,
        initialisation: Initialisation::Ones,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use narrows_plan::model::presets;

    use super::*;

    /// A·B starts with the standard deviation (d_in + d_out)^(-1/2), whatever the rank.
    #[test]
    fn the_variance_of_a_factor_product_does_not_depend_on_the_rank() {
        let (d_in, d_out) = (40, 60);
        for rank in [4, 16] {
            let linear = Linear {
                d_in,
                d_out,
                weight: Weight::Pair(FactorPair {
                    rank,
                    activation: narrows_plan::model::Activation::Identity,
                    crossing: None,
                }),
            };
            let model = presets::find("cola-tiny").unwrap();
            let factors = linear_parameters((0, LinearKind::Q), &linear, None, &model);
            let (a, b) = (factors[0].initial_value(1), factors[1].initial_value(1));
            let entry = |i, j| (0..rank).map(|k| a(i, k) * b(k, j)).sum::<f64>();
            let squares = (0..d_in * d_out).map(|n| entry(n / d_out, n % d_out).powi(2));
            let std = (squares.sum::<f64>() / (d_in * d_out) as f64).sqrt();
            assert!((std / 0.1 - 1.0).abs() < 0.2, "rank {rank}: {std}");
        }
    }

    #[test]
    fn runs_are_filled_with_the_initial_value_of_each_element() {
        let id = ParameterId { block: None, weight: WeightId::Embedding };
        let table = Initialisation::Normal { std: 0.02, zero_row: Some(2) };
        let duplicated = Initialisation::Duplicated { std: 0.5, residual: 2.0, repeats: 2 };
        for initialisation in
            [table, normal(0.5), duplicated, Initialisation::Identity, Initialisation::Ones]
        {
            let parameter = matrix(id, 5, 7, initialisation);
            let (value, fill) = (parameter.initial_value(3), parameter.initial_fill(3));
            for (first, count) in [(0, 35), (3, 20), (13, 2), (14, 7), (20, 15), (21, 0), (34, 1)] {
                let mut filled = vec![f32::NAN; count];
                fill(first, &mut filled);
                for (actual, element) in filled.iter().zip(first..) {
                    let expected = value(element / 7, element % 7) as f32;
                    assert_eq!(actual.to_bits(), expected.to_bits(), "{element} from {first}");
                }
            }
        }
    }

    #[test]
    fn every_parameter_is_listed_once() {
        for name in ["llama-60m", "cola-tiny", "cola-1b", "svd-130m", "lax-60m"] {
            let model = presets::find(name).unwrap();
            let parameters = logical_parameters(&model);
            let elements: u64 = parameters.iter().map(LogicalParameter::elements).sum();
            assert_eq!(elements, model.parameters(), "{name}");
            let ids: BTreeSet<ParameterId> = parameters.iter().map(|p| p.id).collect();
            assert_eq!(ids.len(), parameters.len(), "{name}");
        }
    }
}
