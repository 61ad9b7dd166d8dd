//! Counts of the CPU backend compared with those of the null backend, and miniatures compared with the
//! reference, for random plans.

use narrows_plan::model::{self, LinearKind, Model, WeightId};
use narrows_plan::{CheckedProgram, lower};
use narrows_reference::{GRADIENT_TOLERANCE, Miniature};
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{RunError, count_step};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};
use narrows_test_support::small_models::{small_cpu_context, small_models};

fn open(model: &Model, program: CheckedProgram) -> Result<Session, RunError> {
    narrows_cpu::session(model, program, 1)
}

#[test]
fn counts_and_memory_equal_those_of_the_program() {
    let models = small_models();
    let mut rng = TestRng::new(23);
    let mut plans = 0;
    while plans < 40 {
        let model = rng.pick(&models).unwrap().clone();
        let context = small_cpu_context(&mut rng);
        let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
        plans += 1;
        let miniature = Miniature::new(&plan, &model).unwrap_or_else(|defects| panic!("{defects}"));
        let program = lower(&miniature.plan.resolve(&miniature.model).unwrap());
        let arenas: Vec<u64> = program.stages.iter().map(|stage| stage.arena.0).collect();
        let program = CheckedProgram::check(program).unwrap();
        let expected = count_step(&program).unwrap();
        let mut session = narrows_cpu::session(&miniature.model, program, 1).unwrap();
        session.initialise(&miniature.model, 1).unwrap();
        let workload = miniature.plan.workload;
        let tokens = vec![1; (workload.global_batch * workload.sequence_length) as usize];
        let result =
            session.compute_gradients(StepInput { tokens: &tokens, targets: &tokens }).unwrap();
        assert_eq!(result.report, expected, "{}", to_json(&miniature.plan));
        for device in expected.devices() {
            let stage = device.stage(&expected.mesh);
            assert_eq!(session.allocated_bytes()[device.0 as usize], arenas[stage]);
        }
    }
}

#[test]
fn miniatures_of_random_plans_agree_with_the_reference() {
    let models = drawable_models();
    let mut rng = TestRng::new(29);
    let (mut plans, mut worst) = (0, 0.0_f64);
    while plans < 30 {
        let model = rng.pick(&models).unwrap().clone();
        let context = small_cpu_context(&mut rng);
        let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
        plans += 1;
        let miniature = Miniature::new(&plan, &model).unwrap_or_else(|defects| panic!("{defects}"));
        let comparison = miniature.compare(&open, 1).unwrap_or_else(|error| panic!("{error}"));
        worst = worst.max(comparison.largest_gradient_error());
        assert!(comparison.loss_error() < 1e-6, "{comparison:?}");
        assert!(
            comparison.agrees(),
            "{:?} of {}",
            comparison.gradient_errors.first(),
            to_json(&miniature.plan)
        );
        let ill_conditioned =
            comparison.gradient_errors.iter().filter(|(_, error)| *error > GRADIENT_TOLERANCE);
        for (id, error) in ill_conditioned {
            println!(
                "{id}: error {error:.1e}, rounding sensitivity {:.1e}",
                comparison.rounding_sensitivity[id]
            );
        }
    }
    println!("largest gradient error {worst:e}");
}

/// A reference whose norms have a different ε disagrees.
#[test]
fn a_different_epsilon_is_detected() {
    let model = model::presets::find("cola-tiny").unwrap();
    let mut rng = TestRng::new(31);
    let plan = loop {
        let context = small_cpu_context(&mut rng);
        if let Some(plan) = draw_plan(&mut rng, &model, context) {
            break plan;
        }
    };
    let miniature = Miniature::new(&plan, &model).unwrap();
    let other = Model { norm_epsilon: 1e-4, ..miniature.model.clone() };
    assert!(miniature.compare(&open, 1).unwrap().agrees());
    let comparison = miniature.compare_with(&open, &other, 1).unwrap();
    assert!(!comparison.agrees() && comparison.largest_gradient_error() > 1e-3, "{comparison:?}");
}

/// The check does not distinguish gate and up, which have equal shapes, so it accepts a program that exchanges their
/// weights.
#[test]
fn exchanged_weights_are_detected() {
    let model = model::presets::find("llama-60m").unwrap();
    let mut rng = TestRng::new(37);
    let mut plans = 0;
    for _ in 0..40 {
        let context = small_cpu_context(&mut rng);
        let Some(plan) = draw_plan(&mut rng, &model, context) else { continue };
        let miniature = Miniature::new(&plan, &model).unwrap();
        let mut program = lower(&miniature.plan.resolve(&miniature.model).unwrap());
        for stage in &mut program.stages {
            for buffer in &mut stage.buffers {
                let Some(shard) = &mut buffer.shard else { continue };
                for member in &mut shard.members {
                    member.weight = match member.weight {
                        WeightId::Dense(LinearKind::Up) => WeightId::Dense(LinearKind::Gate),
                        WeightId::Dense(LinearKind::Gate) => WeightId::Dense(LinearKind::Up),
                        _ => continue,
                    };
                }
            }
        }
        let Ok(program) = CheckedProgram::check(program) else { continue };
        plans += 1;
        let comparison = miniature.compare_program(&open, program, &miniature.model, 1).unwrap();
        assert!(
            !comparison.agrees() && comparison.largest_gradient_error() > 1e-2,
            "{comparison:?}"
        );
        if plans == 5 {
            return;
        }
    }
    panic!("only {plans} programs passed the check");
}
