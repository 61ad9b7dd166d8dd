//! The widths of the model of a miniature.
//!
//! The decisions that a width allows depend on its divisibility by the tensor axis and on which other
//! widths it equals (linears of equal widths are grouped, latents of equal ranks cross). The distinct
//! widths are therefore mapped in ascending order, each to the least number above the previous one
//! with the same divisibility. No width grows. Heads are mapped under the same conditions on their
//! number, and on how query heads share KV heads.

use std::collections::BTreeMap;

use narrows_plan::Plan;
use narrows_plan::model::{CrossingGate, Model, Rope, RopeScaling, Weight};

use super::workload::smallest_alike;

/// Least width, unless the width itself is smaller.
const WIDTH_MIN: u64 = 8;

/// Heads of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ShrunkHeads {
    query: u64,
    key_value: u64,
    head_dim: u64,
}

/// Scales down the widths of the model of a plan; it keeps all blocks.
pub(super) fn shrink_model(model: &Model, plan: &Plan) -> Model {
    let heads = shrink_heads(
        ShrunkHeads { query: model.heads, key_value: model.kv_heads, head_dim: model.head_dim },
        plan.context_attention.head_parts(&plan.mesh),
    );
    let (query, key_value) = (heads.query * heads.head_dim, heads.key_value * heads.head_dim);
    let small = shrink_widths(model, plan.mesh.tensor);
    let scaled = |width: u64| small.get(&width).copied().unwrap_or(width);
    let mut shrunk = model.clone();
    (shrunk.hidden, shrunk.vocab) = (scaled(model.hidden), scaled(model.vocab));
    shrunk.padding_token = model.padding_token.map(|token| token.min(shrunk.vocab - 1));
    (shrunk.heads, shrunk.kv_heads, shrunk.head_dim) =
        (heads.query, heads.key_value, heads.head_dim);
    shrunk.rope = shrink_rope(&model.rope, model.head_dim, heads.head_dim);
    for block in &mut shrunk.blocks {
        let d_ff = scaled(block.up.d_out);
        let hidden = shrunk.hidden;
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
            pair.rank = scaled(pair.rank);
            if let Some(crossing) = &mut pair.crossing
                && let CrossingGate::Tensor { a, b } = &mut crossing.gate
            {
                (*a, *b) = near_square(pair.rank);
            }
        }
    }
    shrunk
}

/// RoPE of heads of `small` in place of `large` features: of all of them, or else of half of them.
fn shrink_rope(rope: &Rope, large: u64, small: u64) -> Rope {
    let mut shrunk = rope.clone();
    shrunk.dim = match rope.dim == large {
        true => small,
        false => (small / 4 * 2).max(2).min(rope.dim),
    };
    if let Some(RopeScaling::LongRope { short, long, .. }) = &mut shrunk.scaling {
        [short, long].into_iter().for_each(|divisors| divisors.truncate(shrunk.dim as usize / 2));
    }
    shrunk
}

/// Scaled-down widths by width, for all distinct widths except those of heads.
fn shrink_widths(model: &Model, tensor: u64) -> BTreeMap<u64, u64> {
    let ranks = model.blocks.iter().flat_map(|block| {
        let ranks = block.linears().into_iter().filter_map(|(_, linear)| linear.rank());
        ranks.chain([block.up.d_out]).collect::<Vec<_>>()
    });
    let distinct: std::collections::BTreeSet<u64> =
        ranks.chain([model.hidden, model.vocab]).collect();
    let mut small = BTreeMap::new();
    let mut next = 1;
    for width in distinct {
        let scaled = smallest_alike(next.max(WIDTH_MIN).min(width), width, &[tensor]);
        small.insert(width, scaled);
        next = scaled + 1;
    }
    small
}

/// The least numbers of heads with the same divisibility by the devices that divide them, and the same sharing of KV heads.
fn shrink_heads(large: ShrunkHeads, devices: u64) -> ShrunkHeads {
    let is_alike = |small: &ShrunkHeads| {
        let properties = |heads: &ShrunkHeads| {
            let widths = [heads.query * heads.head_dim, heads.key_value * heads.head_dim];
            let split = [heads.query, heads.key_value].into_iter().chain(widths);
            let split: Vec<bool> = split.map(|size| size.is_multiple_of(devices)).collect();
            // KV heads that cannot be sharded may be replicated.
            let replicated = !split[1] && devices.is_multiple_of(heads.key_value);
            (split, replicated, heads.query == heads.key_value)
        };
        properties(small) == properties(&large)
    };
    let head_dims = (4.min(large.head_dim)..=large.head_dim).filter(|dim| dim % 2 == 0);
    let queries = move |head_dim| (1..=large.query).map(move |query| (head_dim, query));
    let all = head_dims.flat_map(queries).flat_map(|(head_dim, query)| {
        let shares = (1..=query.min(large.key_value)).filter(move |kv| query % kv == 0);
        shares.map(move |key_value| ShrunkHeads { query, key_value, head_dim })
    });
    all.filter(|small| small.query > 1 || large.query == 1).find(is_alike).unwrap_or(large)
}

/// The factorisation a·b = rank with a ≤ b and a as large as possible.
fn near_square(rank: u64) -> (u64, u64) {
    let a = (1..=rank.isqrt()).rev().find(|a| rank.is_multiple_of(*a)).unwrap_or(1);
    (a, rank / a)
}

#[cfg(test)]
mod tests {
    use narrows_plan::model::presets;

    use super::*;

    #[test]
    fn heads_keep_divisibility_and_sharing() {
        let small = |query, key_value, tensor| {
            let heads = shrink_heads(ShrunkHeads { query, key_value, head_dim: 128 }, tensor);
            [heads.query, heads.key_value, heads.head_dim]
        };
        assert_eq!(small(32, 32, 4), [4, 4, 4]);
        assert_eq!(small(32, 8, 4), [8, 4, 4]);
        assert_eq!(small(32, 8, 8), [16, 8, 4]);
        // Fewer KV heads than devices.
        assert_eq!(small(32, 2, 8), [8, 2, 4]);
        // Not divisible.
        assert_eq!(small(10, 10, 4), [3, 3, 4]);
        assert_eq!(small(32, 32, 1), [2, 2, 4]);
    }

    #[test]
    fn widths_keep_order_and_divisibility() {
        for name in presets::names() {
            let model = presets::find(&name).unwrap();
            for tensor in [1, 2, 4, 8, 16] {
                let small = shrink_widths(&model, tensor);
                assert!(small.values().is_sorted_by(|a, b| a < b), "{name}: {small:?}");
                for (large, small) in &small {
                    assert!(small <= large && *small <= 16 * tensor, "{name}: {large} → {small}");
                    assert_eq!(small.is_multiple_of(tensor), large.is_multiple_of(tensor));
                }
            }
        }
    }

    #[test]
    fn small_widths_do_not_change() {
        assert_eq!(smallest_alike(5, 5, &[2]), 5);
        assert_eq!(near_square(12), (3, 4));
    }
}
