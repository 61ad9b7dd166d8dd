//! Models that nobody publishes: odd widths, a rank for every linear of every block, fewer heads of
//! keys and values than devices, one block, one token, norms with large and tiny ε. Every plan drawn
//! for them computes what the reference interpreter does.

use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Precision};
use narrows_plan::{Context, Zero};
use narrows_plan::{Mesh, Workload};
use narrows_reference::Miniature;
use narrows_runtime::RunError;
use narrows_runtime::session::Session;
use narrows_test_support::plans::{TestRng, draw_plan, to_json};
use narrows_test_support::small::{pick_copied, unusual_model};

/// Opens a session on the processors.
fn open(model: &Model, program: CheckedProgram) -> Result<Session, RunError> {
    narrows_cpu::session(model, program, 1)
}

const PLANS: usize = 60;

fn context(dice: &mut TestRng, model: &Model) -> Context {
    let mesh = Mesh {
        tensor: pick_copied(dice, &[1, 2, 2, 3, 4, 8]),
        pipeline: 1 + dice.below(model.blocks.len().min(3)) as u64,
        data: 1 + dice.below(3) as u64,
    };
    let micro_batch = pick_copied(dice, &[1, 1, 2, 3, 4]);
    let global_batch = micro_batch * mesh.data * pick_copied(dice, &[1, 2, 3, 5]);
    let sequence_length = pick_copied(dice, &[1, 2, 3, 7, 8]);
    let workload = Workload { global_batch, sequence_length, micro_batch };
    let zero = pick_copied(dice, &[Zero::Off, Zero::One]);
    Context { mesh, workload, precision: Precision::Full32, zero }
}

#[test]
fn plans_of_unusual_models_compute_what_the_reference_does() {
    let mut dice = TestRng(53);
    let (mut seen, mut models, mut worst) = (0, 0, 0.0_f64);
    while seen < PLANS {
        let Some(model) = unusual_model(&mut dice) else { continue };
        models += 1;
        for seed in 0..3 {
            let context = context(&mut dice, &model);
            let Some(plan) = draw_plan(&mut dice, &model, context) else { continue };
            let what = || format!("{model:?}\n{}", to_json(&plan));
            let twin = Miniature { model: model.clone(), plan: plan.clone() };
            let found =
                twin.compare(&open, seed).unwrap_or_else(|error| panic!("{error}: {}", what()));
            let furthest = found.gradient_errors.first();
            assert!(found.agrees(), "{} {furthest:?} of {}", found.loss_error(), what());
            worst = worst.max(found.largest_gradient_error());
            seen += 1;
        }
    }
    println!("{seen} plans of {models} models, gradients off by {worst:.1e}");
}
