//! The widths of a twin's model.
//!
//! What a plan may do with a width depends on two things: whether the tensor axis divides it, and
//! which other widths it equals (linears of equal widths are grouped, latents of equal ranks cross).
//! So the distinct widths are mapped, in their order, each to the least number beyond the one
//! before that is divided as it is. No width grows. Heads follow from the same conditions on their
//! number, and on how the heads of queries share those of keys and values.

use std::collections::BTreeMap;

use narrows_plan::model::{CrossingGate, Model, Weight};

use super::workload::least;

/// Where small widths begin.
const WIDTH_LEAST: u64 = 8;

/// Heads of a twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ShrunkHeads {
    query: u64,
    key_value: u64,
    head_dim: u64,
}

/// The model with small widths and all its blocks.
pub(super) fn shrunk(model: &Model, tensor: u64) -> Model {
    let heads = heads(
        ShrunkHeads { query: model.heads, key_value: model.kv_heads, head_dim: model.head_dim },
        tensor,
    );
    let (query, key_value) = (heads.query * heads.head_dim, heads.key_value * heads.head_dim);
    let small = widths(model, tensor);
    let of = |width: u64| small.get(&width).copied().unwrap_or(width);
    let mut made = model.clone();
    (made.hidden, made.vocab) = (of(model.hidden), of(model.vocab));
    (made.heads, made.kv_heads, made.head_dim) = (heads.query, heads.key_value, heads.head_dim);
    for block in &mut made.blocks {
        let d_ff = of(block.up.d_out);
        let hidden = made.hidden;
        for (linear, d_in, d_out) in [
            (&mut block.q, hidden, query),
            (&mut block.k, hidden, key_value),
            (&mut block.v, hidden, key_value),
            (&mut block.o, query, hidden),
            (&mut block.gate, hidden, d_ff),
            (&mut block.up, hidden, d_ff),
            (&mut block.down, d_ff, hidden),
        ] {
            (linear.d_in, linear.d_out) = (d_in, d_out);
            let Weight::Pair(pair) = &mut linear.weight else { continue };
            pair.rank = of(pair.rank);
            if let Some(crossing) = &mut pair.crossing
                && let CrossingGate::Tensor { a, b } = &mut crossing.gate
            {
                (*a, *b) = near_square(pair.rank);
            }
        }
    }
    made
}

/// Every distinct width but those of heads, with its small one.
fn widths(model: &Model, tensor: u64) -> BTreeMap<u64, u64> {
    let ranks = model.blocks.iter().flat_map(|block| {
        let ranks = block.linears().into_iter().filter_map(|(_, linear)| linear.rank());
        ranks.chain([block.up.d_out]).collect::<Vec<_>>()
    });
    let distinct: std::collections::BTreeSet<u64> =
        ranks.chain([model.hidden, model.vocab]).collect();
    let mut small = BTreeMap::new();
    let mut next = 1;
    for width in distinct {
        let made = least(next.max(WIDTH_LEAST).min(width), width, tensor);
        small.insert(width, made);
        next = made + 1;
    }
    small
}

/// The fewest heads that are split, shared and grouped as these are.
fn heads(large: ShrunkHeads, tensor: u64) -> ShrunkHeads {
    let is_alike = |small: &ShrunkHeads| {
        let divided = |heads: &ShrunkHeads| {
            let widths = [heads.query * heads.head_dim, heads.key_value * heads.head_dim];
            let split = [heads.query, heads.key_value].into_iter().chain(widths);
            let split: Vec<bool> = split.map(|size| size.is_multiple_of(tensor)).collect();
            // What cannot be split may be held whole by all that share it.
            let shared = !split[1] && tensor.is_multiple_of(heads.key_value);
            (split, shared, heads.query == heads.key_value)
        };
        divided(small) == divided(&large)
    };
    let head_dims = (4.min(large.head_dim)..=large.head_dim).filter(|dim| dim % 2 == 0);
    let queries = move |head_dim| (1..=large.query).map(move |query| (head_dim, query));
    let all = head_dims.flat_map(queries).flat_map(|(head_dim, query)| {
        let shares = (1..=query.min(large.key_value)).filter(move |kv| query % kv == 0);
        shares.map(move |key_value| ShrunkHeads { query, key_value, head_dim })
    });
    all.filter(|small| small.query > 1 || large.query == 1).find(is_alike).unwrap_or(large)
}

/// Two factors as near to each other as they come.
fn near_square(rank: u64) -> (u64, u64) {
    let a = (1..=rank.isqrt()).rev().find(|a| rank.is_multiple_of(*a)).unwrap_or(1);
    (a, rank / a)
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::presets;

    use super::*;

    #[test]
    fn heads_are_split_and_shared_as_before() {
        let small = |query, key_value, tensor| {
            let made = heads(ShrunkHeads { query, key_value, head_dim: 128 }, tensor);
            [made.query, made.key_value, made.head_dim]
        };
        assert_eq!(small(32, 32, 4), [4, 4, 4]);
        assert_eq!(small(32, 8, 4), [8, 4, 4]);
        assert_eq!(small(32, 8, 8), [16, 8, 4]);
        // Fewer heads of keys and values than devices.
        assert_eq!(small(32, 2, 8), [8, 2, 4]);
        // Not divided at all.
        assert_eq!(small(10, 10, 4), [3, 3, 4]);
        assert_eq!(small(32, 32, 1), [2, 2, 4]);
    }

    #[test]
    fn widths_keep_their_order_and_what_divides_them() {
        for name in presets::names() {
            let model = presets::find(&name).unwrap();
            for tensor in [1, 2, 4, 8, 16] {
                let small = widths(&model, tensor);
                assert!(small.values().is_sorted_by(|a, b| a < b), "{name}: {small:?}");
                for (large, small) in &small {
                    assert!(small <= large && *small <= 16 * tensor, "{name}: {large} → {small}");
                    assert_eq!(small.is_multiple_of(tensor), large.is_multiple_of(tensor));
                }
            }
        }
    }

    #[test]
    fn a_small_model_is_left_as_it_is() {
        assert_eq!(least(5, 5, 2), 5);
        assert_eq!(near_square(12), (3, 4));
    }
}
