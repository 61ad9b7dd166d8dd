//! What a run moves and holds is what its program says: drawn plans on processors and on the null
//! backend.

use narrows_plan::lower;
use narrows_plan::model::{self, Model};
use narrows_plan::model::{LinearKind, WeightId};
use narrows_plan::{CheckedProgram, Precision};
use narrows_reference::{GRADIENT_TOLERANCE, Miniature};
use narrows_runtime::RunError;
use narrows_runtime::count_step;
use narrows_runtime::session::{Session, StepInput};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};
use narrows_test_support::small::{small_context, small_models};

/// Opens a session on the processors.
fn open(model: &Model, program: CheckedProgram) -> Result<Session, RunError> {
    narrows_cpu::session(model, program, 1)
}

#[test]
fn what_is_moved_and_held_is_what_the_program_says() {
    let models = small_models();
    let mut dice = TestRng(23);
    let mut seen = 0;
    while seen < 40 {
        let model = dice.pick(&models).unwrap().clone();
        let context = small_context(&mut dice, Precision::Full32);
        let Some(plan) = draw_plan(&mut dice, &model, context) else { continue };
        seen += 1;
        let twin = Miniature::new(&plan, &model).unwrap_or_else(|defects| panic!("{defects}"));
        let program = lower(&twin.plan.resolve(&twin.model).unwrap());
        let arenas: Vec<u64> = program.stages.iter().map(|stage| stage.arena.0).collect();
        let program = CheckedProgram::check(program).unwrap();
        let counted = count_step(&program).unwrap();
        let mut session = narrows_cpu::session(&twin.model, program, 1).unwrap();
        session.initialise(&twin.model, 1).unwrap();
        let work = twin.plan.workload;
        let tokens = vec![1; (work.global_batch * work.sequence_length) as usize];
        let done =
            session.compute_gradients(StepInput { tokens: &tokens, targets: &tokens }).unwrap();
        assert_eq!(done.report, counted, "{}", to_json(&twin.plan));
        for device in counted.devices() {
            let stage = device.stage(&counted.mesh);
            assert_eq!(session.allocated_bytes()[device.0 as usize], arenas[stage]);
        }
    }
}

/// The twin of a plan of every kind of model is its model's function.
#[test]
fn twins_of_drawn_plans_are_equal_to_the_reference() {
    let models = drawable_models();
    let mut dice = TestRng(29);
    let (mut seen, mut worst) = (0, 0.0_f64);
    while seen < 30 {
        let model = dice.pick(&models).unwrap().clone();
        let context = small_context(&mut dice, Precision::Full32);
        let Some(plan) = draw_plan(&mut dice, &model, context) else { continue };
        seen += 1;
        let twin = Miniature::new(&plan, &model).unwrap_or_else(|defects| panic!("{defects}"));
        let found = twin.compare(&open, 1).unwrap_or_else(|error| panic!("{error}"));
        worst = worst.max(found.largest_gradient_error());
        assert!(found.loss_error() < 1e-6, "{found:?}");
        assert!(found.agrees(), "{:?} of {}", found.gradient_errors.first(), to_json(&twin.plan));
        let beyond = found.gradient_errors.iter().filter(|(_, off)| *off > GRADIENT_TOLERANCE);
        for (name, off) in beyond {
            println!(
                "{name} off by {off:.1e}, reference by {:.1e}",
                found.rounding_sensitivity[name]
            );
        }
    }
    println!("gradients off by {worst:e}");
}

/// Another ε of the norms is another function, and that is seen.
#[test]
fn another_function_is_told_apart() {
    let model = model::presets::find("cola-tiny").unwrap();
    let mut dice = TestRng(31);
    let plan = loop {
        let context = small_context(&mut dice, Precision::Full32);
        if let Some(plan) = draw_plan(&mut dice, &model, context) {
            break plan;
        }
    };
    let twin = Miniature::new(&plan, &model).unwrap();
    let other = Model { norm_epsilon: 1e-4, ..twin.model.clone() };
    assert!(twin.compare(&open, 1).unwrap().agrees());
    let found = twin.compare_with(&open, &other, 1).unwrap();
    assert!(!found.agrees() && found.largest_gradient_error() > 1e-3, "{found:?}");
}

/// A program that is sound and wrong: nothing in it says which of two equal linears is which.
#[test]
fn a_program_with_exchanged_weights_is_told_apart() {
    let model = model::presets::find("llama-60m").unwrap();
    let mut dice = TestRng(37);
    let mut seen = 0;
    for _ in 0..40 {
        let context = small_context(&mut dice, Precision::Full32);
        let Some(plan) = draw_plan(&mut dice, &model, context) else { continue };
        let twin = Miniature::new(&plan, &model).unwrap();
        let mut program = lower(&twin.plan.resolve(&twin.model).unwrap());
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
        seen += 1;
        let found = twin.compare_program(&open, program, &twin.model, 1).unwrap();
        assert!(!found.agrees() && found.largest_gradient_error() > 1e-2, "{found:?}");
        if seen == 5 {
            return;
        }
    }
    panic!("{seen} programs to run");
}
