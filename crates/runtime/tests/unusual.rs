//! Models that nobody publishes: odd widths, a rank for every linear of every block, fewer heads of
//! keys and values than devices, one block, one token, norms with large and tiny ε. Every plan drawn
//! for them computes what the reference interpreter does.

#[path = "../../plan/tests/check_support/mod.rs"]
mod check_support;

use check_support::{Dice, describe, draw_plan};
use narrows_plan::Precision;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::{self, Model};
use narrows_plan::strategy::{Context, Zero};
use narrows_runtime::numeric::Twin;

const PLANS: usize = 60;

/// One of a list.
fn one<T: Copy>(dice: &mut Dice, list: &[T]) -> T {
    list[dice.below(list.len())]
}

/// Ranks, φ and crossings of a block's linears.
fn linears(dice: &mut Dice, crossing: &str) -> String {
    let mut parts = vec![];
    for name in ["q", "k", "v", "o", "gate", "up", "down"] {
        let rank = if crossing.contains("identity") || crossing.contains("tensor") {
            12
        } else {
            one(dice, &[1, 3, 4, 7, 8, 16])
        };
        let activation = one(dice, &["silu", "identity"]);
        parts.push(match dice.below(6) {
            0 => format!(r#""{name}": "dense""#),
            _ => format!(r#""{name}": {{"rank": {rank}, "activation": "{activation}"{crossing}}}"#),
        });
    }
    parts.join(", ")
}

fn unusual(dice: &mut Dice) -> Option<Model> {
    let (heads, kv_heads) =
        one(dice, &[(1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (6, 2), (8, 1), (8, 2)]);
    let head_dim = one(dice, &[2, 4, 6]);
    let hidden = one(dice, &[5, 8, 12, 16, 24, 31]);
    let d_ff = one(dice, &[1, 7, 8, 16, 24]);
    let vocab = one(dice, &[3, 8, 17, 32]);
    let count = one(dice, &[1, 2, 3, 4]);
    let tied = dice.coin();
    let epsilon = one(dice, &["1e-12", "1e-5", "0.1", "10.0"]);
    let theta = one(dice, &["1.5", "10000.0", "1e7"]);
    let product = one(dice, &["plain", "swiglu"]);
    let crossing = one(
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

fn context(dice: &mut Dice, model: &Model) -> Context {
    let mesh = Mesh {
        tensor: one(dice, &[1, 2, 2, 3, 4, 8]),
        pipeline: 1 + dice.below(model.blocks.len().min(3)) as u64,
        data: 1 + dice.below(3) as u64,
    };
    let micro_batch = one(dice, &[1, 1, 2, 3, 4]);
    let global_batch = micro_batch * mesh.data * one(dice, &[1, 2, 3, 5]);
    let sequence_length = one(dice, &[1, 2, 3, 7, 8]);
    let workload = Workload { global_batch, sequence_length, micro_batch };
    let zero = one(dice, &[Zero::Off, Zero::One]);
    Context { mesh, workload, precision: Precision::Full32, zero }
}

#[test]
fn plans_of_unusual_models_compute_what_the_reference_does() {
    let mut dice = Dice(53);
    let (mut seen, mut models, mut worst) = (0, 0, 0.0_f64);
    while seen < PLANS {
        let Some(model) = unusual(&mut dice) else { continue };
        models += 1;
        for seed in 0..3 {
            let context = context(&mut dice, &model);
            let Some(plan) = draw_plan(&mut dice, &model, context) else { continue };
            let what = || format!("{model:?}\n{}", describe(&plan));
            let twin = Twin { model: model.clone(), plan: plan.clone() };
            let found = twin.compare(seed).unwrap_or_else(|error| panic!("{error}: {}", what()));
            let furthest = found.gradients.first();
            assert!(found.is_equal(), "{} {furthest:?} of {}", found.loss_off(), what());
            worst = worst.max(found.gradient_off());
            seen += 1;
        }
    }
    println!("{seen} plans of {models} models, gradients off by {worst:.1e}");
}
