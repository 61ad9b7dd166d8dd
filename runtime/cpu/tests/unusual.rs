//! Random plans of unusual models agree with the reference interpreter: odd widths, different ranks of
//! all linears, fewer KV heads than devices, one block, one token, norms with large and tiny ε.

use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Context, Mesh, Precision, Workload};
use narrows_reference::Miniature;
use narrows_runtime::RunError;
use narrows_runtime::session::Session;
use narrows_test_support::plans::{TestRng, draw_plan, draw_zero, peek_context_attention, to_json};
use narrows_test_support::small_models::{pick_copied, unusual_model};

fn open(model: &Model, program: CheckedProgram) -> Result<Session, RunError> {
    narrows_cpu::session(model, program, 1)
}

const PLANS: usize = 60;

fn context(rng: &mut TestRng, model: &Model) -> Context {
    let mesh = Mesh {
        tensor: pick_copied(rng, &[1, 2, 2, 3, 4, 8]),
        pipeline: 1 + rng.below(model.blocks.len().min(3)) as u64,
        data: 1 + rng.below(3) as u64,
        context: pick_copied(rng, &[1, 1, 1, 2, 3]),
    };
    let micro_batch = pick_copied(rng, &[1, 1, 2, 3, 4]);
    let global_batch = micro_batch * mesh.data * pick_copied(rng, &[1, 2, 3, 5]);
    let sequence_length = mesh.context * pick_copied(rng, &[1, 2, 3, 7, 8]);
    let workload = Workload { global_batch, sequence_length, micro_batch };
    let (zero, shard_size) = draw_zero(rng, mesh.replicas());
    let context_attention = peek_context_attention(rng);
    let context = Context::new(mesh, workload, Precision::Fp32, zero);
    Context { shard_size, context_attention, ..context }
}

#[test]
fn plans_of_unusual_models_agree_with_the_reference() {
    let mut rng = TestRng::new(53);
    let (mut plans, mut models, mut worst) = (0, 0, 0.0_f64);
    while plans < PLANS {
        let Some(model) = unusual_model(&mut rng) else { continue };
        models += 1;
        for seed in 0..3 {
            let context = context(&mut rng, &model);
            let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
            let case = || format!("{model:?}\n{}", to_json(&plan));
            let miniature = Miniature { model: model.clone(), plan: plan.clone() };
            let comparison = miniature
                .compare(&open, seed)
                .unwrap_or_else(|error| panic!("{error}: {}", case()));
            let largest = comparison.gradient_errors.first();
            assert!(comparison.agrees(), "{} {largest:?} of {}", comparison.loss_error(), case());
            worst = worst.max(comparison.largest_gradient_error());
            plans += 1;
        }
    }
    println!("{plans} plans of {models} models, largest gradient error {worst:.1e}");
}
