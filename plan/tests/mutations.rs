//! The check refuses every mutated program.
//!
//! Each mutation is one that an edit or a bug of lowering could cause. Mutations are drawn such that they
//! change the function (not, say, the order of two sums), so every accepted mutant is a failure.

use std::collections::BTreeMap;

use narrows_plan::CheckedProgram;
use narrows_plan::program::Program;
use narrows_test_support::mutations::{MUTATIONS, Mutation};
use narrows_test_support::plans::{TestRng, draw_case, drawable_models};

const PROGRAMS: usize = 120;

fn count() -> usize {
    std::env::var("NARROWS_CHECK_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(1800)
}

#[test]
fn every_mutated_program_is_refused() {
    let mut rng = TestRng::new(2);
    let models = drawable_models();
    let programs: Vec<Program> =
        (0..PROGRAMS).map(|_| draw_case(&mut rng, &models).program()).collect();
    for program in &programs {
        CheckedProgram::check(program.clone()).unwrap_or_else(|errors| panic!("{errors}"));
    }
    let mut refused: BTreeMap<&str, u64> = BTreeMap::new();
    let mut accepted = vec![];
    for index in 0..count() {
        let (name, mutation) = MUTATIONS[index % MUTATIONS.len()];
        let (mutated, description) = mutate(&mut rng, &programs, mutation);
        match CheckedProgram::check(mutated) {
            Err(errors) => {
                assert!(!errors.0.is_empty() && errors.0.iter().all(|e| !e.problem.is_empty()));
                *refused.entry(name).or_default() += 1;
            }
            Ok(_) => accepted.push(format!("{name}: {description}")),
        }
    }
    println!("refused: {refused:#?}");
    assert!(accepted.is_empty(), "{} accepted:\n{}", accepted.len(), accepted.join("\n"));
    assert!(refused.len() == MUTATIONS.len() && refused.values().sum::<u64>() >= 1000);
}

/// Draws programs until the mutation applies to one.
fn mutate(rng: &mut TestRng, programs: &[Program], mutation: Mutation) -> (Program, String) {
    for _ in 0..10_000 {
        let mut program = programs[rng.below(programs.len())].clone();
        if let Some(description) = mutation(rng, &mut program) {
            return (program, description);
        }
    }
    panic!("the mutation applies to no program");
}

/// Several mutations may cancel out, but the check does not panic.
#[test]
fn several_mutations_never_panic() {
    let mut rng = TestRng::new(3);
    let models = drawable_models();
    for _ in 0..300 {
        let mut program = draw_case(&mut rng, &models).program();
        for _ in 0..6 {
            let (_, mutation) = MUTATIONS[rng.below(MUTATIONS.len())];
            // A mutation reads instructions that earlier mutations may have emptied.
            let is_mutable = program.stages.iter().all(|stage| {
                let mut instrs = stage.all_instructions();
                !stage.schedule.is_empty()
                    && instrs.all(|i| !i.reads.is_empty() || !i.writes.is_empty())
            });
            if is_mutable {
                mutation(&mut rng, &mut program);
            }
        }
        if let Err(errors) = CheckedProgram::check(program) {
            assert!(!errors.to_string().is_empty());
        }
    }
}
