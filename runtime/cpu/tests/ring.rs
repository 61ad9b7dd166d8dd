//! Ring attention computes the function of the reference interpreter, in as many bytes as the program says.

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::Model;
use narrows_plan::{
    Axis, CheckedProgram, Context, ContextAttention, Mesh, Precision, Workload, Zero, lower,
};
use narrows_reference::Miniature;
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{RunError, count_step};
use narrows_test_support::plans::{TestRng, draw_plan, to_json};
use narrows_test_support::small_models::small_models;

fn open(model: &Model, program: CheckedProgram) -> Result<Session, RunError> {
    narrows_cpu::session(model, program, 2)
}

/// Of one to three sequences and microbatches, with and without a tensor axis, stages and replicas; with GQA, grouped
/// q, k and v, and recomputation, as plans are drawn.
#[test]
fn plans_with_ring_attention_agree_with_the_reference() {
    let models = small_models();
    let mut rng = TestRng::new(31);
    let (mut plans, mut grouped, mut shared, mut recomputed) = (0, 0, 0, 0);
    let mut worst = 0.0_f64;
    for (tensor, context, data, pipeline) in [
        (1, 2, 1, 1),
        (1, 3, 1, 1),
        (1, 4, 1, 1),
        (1, 8, 1, 1),
        (2, 2, 1, 1),
        (2, 4, 1, 1),
        (1, 2, 2, 1),
        (1, 2, 1, 2),
        (2, 3, 1, 2),
    ] {
        let mesh = Mesh { tensor, pipeline, data, context };
        for round in 0..6 {
            let model = rng.pick(&models).unwrap().clone();
            let micro_batch = 1 + round % 3;
            let sequence_length = 2 * context * (1 + round);
            let global_batch = micro_batch * data * (1 + round % 2);
            let workload = Workload { global_batch, sequence_length, micro_batch };
            let zero = [Zero::Off, Zero::One, Zero::Three][rng.below(3)];
            let context = Context {
                context_attention: ContextAttention::Ring,
                overlap_grad_reduce: round % 2 == 1,
                ..Context::new(mesh, workload, Precision::Fp32, zero)
            };
            let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
            if plan.context_attention != ContextAttention::Ring {
                continue;
            }
            let case = || format!("{model:?}\n{}", to_json(&plan));
            let blocks = || plan.blocks.values();
            grouped += usize::from(blocks().any(|block| block.grouping.qkv));
            shared += usize::from(model.kv_heads < model.heads);
            recomputed += usize::from(blocks().any(|block| !block.recompute.is_empty()));
            let miniature = Miniature { model: model.clone(), plan: plan.clone() };
            let comparison =
                miniature.compare(&open, 1).unwrap_or_else(|error| panic!("{error}: {}", case()));
            let errors = comparison.gradient_errors.first();
            assert!(comparison.agrees(), "{} {errors:?} of {}", comparison.loss_error(), case());
            worst = worst.max(comparison.largest_gradient_error());
            let program = lower(&plan.resolve(&model).unwrap());
            let program = CheckedProgram::check(program).unwrap();
            let expected = count_step(&program).unwrap();
            let shifts = expected
                .stages
                .iter()
                .filter_map(|stage| stage.collectives.get(&(CollectiveKind::Shift, Axis::Context)));
            assert!(shifts.map(|count| count.sent.0).sum::<u64>() > 0, "{}", case());
            let mut session = open(&model, program).unwrap();
            session.initialise(&model, 1).unwrap();
            let tokens = vec![1; (global_batch * sequence_length) as usize];
            let input = StepInput { tokens: &tokens, targets: &tokens };
            let report = session.compute_gradients(input).unwrap().report;
            assert_eq!(report, expected, "{}", case());
            plans += 1;
        }
    }
    println!("{plans} plans, largest gradient error {worst:.1e}");
    assert!(plans >= 25 && grouped >= 4 && shared >= 4 && recomputed >= 4, "{plans}");
}
