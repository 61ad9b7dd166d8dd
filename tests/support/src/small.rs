//! Small models and contexts, of which plans are drawn.

use narrows_plan::Precision;
use narrows_plan::model::{self, Model};
use narrows_plan::{Context, Zero};
use narrows_plan::{Mesh, Workload};

use crate::plans::{TestRng, drawable_models};

/// The models of the draws that are small enough to be run.
pub fn small_models() -> Vec<Model> {
    drawable_models().into_iter().filter(|model| model.hidden == 256).collect()
}

/// A mesh of all three axes, one or two microbatches of few tokens, ZeRO or not.
pub fn small_context(dice: &mut TestRng, precision: Precision) -> Context {
    let mesh = Mesh {
        tensor: [1, 2, 4, 8][dice.below(4)],
        pipeline: 1 + dice.below(2) as u64,
        data: 1 + dice.below(2) as u64,
    };
    let micro_batch = [1, 2, 4][dice.below(3)];
    let global_batch = micro_batch * mesh.data * (1 + dice.below(2) as u64);
    let workload = Workload { global_batch, sequence_length: 8, micro_batch };
    let zero = [Zero::Off, Zero::One][dice.below(2)];
    Context { mesh, workload, precision, zero }
}

/// One of a list.
pub fn pick_copied<T: Copy>(dice: &mut TestRng, list: &[T]) -> T {
    list[dice.below(list.len())]
}

/// Ranks, φ and crossings of a block's linears.
fn linears(dice: &mut TestRng, crossing: &str) -> String {
    let mut parts = vec![];
    for name in ["q", "k", "v", "o", "gate", "up", "down"] {
        let rank = if crossing.contains("identity") || crossing.contains("tensor") {
            12
        } else {
            pick_copied(dice, &[1, 3, 4, 7, 8, 16])
        };
        let activation = pick_copied(dice, &["silu", "identity"]);
        parts.push(match dice.below(6) {
            0 => format!(r#""{name}": "dense""#),
            _ => format!(r#""{name}": {{"rank": {rank}, "activation": "{activation}"{crossing}}}"#),
        });
    }
    parts.join(", ")
}

/// A model that nobody publishes; `None` where what was drawn is none.
pub fn unusual_model(dice: &mut TestRng) -> Option<Model> {
    let (heads, kv_heads) =
        pick_copied(dice, &[(1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (6, 2), (8, 1), (8, 2)]);
    let head_dim = pick_copied(dice, &[2, 4, 6]);
    let hidden = pick_copied(dice, &[5, 8, 12, 16, 24, 31]);
    let d_ff = pick_copied(dice, &[1, 7, 8, 16, 24]);
    let vocab = pick_copied(dice, &[3, 8, 17, 32]);
    let count = pick_copied(dice, &[1, 2, 3, 4]);
    let tied = dice.coin();
    let epsilon = pick_copied(dice, &["1e-12", "1e-5", "0.1", "10.0"]);
    let theta = pick_copied(dice, &["1.5", "10000.0", "1e7"]);
    let product = pick_copied(dice, &["plain", "swiglu"]);
    let crossing = pick_copied(
        dice,
        &[
            "",
            "",
            r#", "crossing": {"form": "paper", "gate": "identity"}"#,
            r#", "crossing": {"form": "paper", "gate": "dense"}"#,
            r#", "crossing": {"form": "released", "gate": "dense"}"#,
            r#", "crossing": {"form": "released", "gate": {"tensor": {"a": 3, "b": 4}}}"#,
        ],
    );
    let blocks: Vec<String> =
        (0..count).map(|block| format!(r#""{block}": {{{}}}"#, linears(dice, crossing))).collect();
    let text = format!(
        r#"{{"format": "narrows-model/1", "name": "unusual", "hidden": {hidden}, "vocab": {vocab},
        "heads": {heads}, "kv_heads": {kv_heads}, "head_dim": {head_dim}, "d_ff": {d_ff},
        "tied": {tied}, "norm_epsilon": {epsilon}, "rope_theta": {theta},
        "blocks": {{"count": {count}, "default": {{"product": "{product}", "all": "dense"}},
        "overrides": {{{}}}}}}}"#,
        blocks.join(", ")
    );
    // A dense linear before a crossing one leaves it nothing to cross with.
    model::read("unusual", &text).ok()
}
