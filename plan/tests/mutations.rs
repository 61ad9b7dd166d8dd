//! Mutated programs: the check must refuse every one.
//!
//! Each kind of damage is one a careless edit or a wrong lowering could do. A damage that changes
//! nothing (two sums in another order, a rotation before or after the sum it is linear in) is never
//! made: it would not be damage. Nothing is skipped afterwards.

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
    let mut dice = TestRng::new(2);
    let models = drawable_models();
    let programs: Vec<Program> =
        (0..PROGRAMS).map(|_| draw_case(&mut dice, &models).program()).collect();
    for program in &programs {
        CheckedProgram::check(program.clone()).unwrap_or_else(|errors| panic!("{errors}"));
    }
    let mut refused: BTreeMap<&str, u64> = BTreeMap::new();
    let mut accepted = vec![];
    for index in 0..count() {
        let (name, kind) = MUTATIONS[index % MUTATIONS.len()];
        let (damaged, what) = damage(&mut dice, &programs, kind);
        match CheckedProgram::check(damaged) {
            Err(errors) => {
                assert!(!errors.0.is_empty() && errors.0.iter().all(|e| !e.problem.is_empty()));
                *refused.entry(name).or_default() += 1;
            }
            Ok(_) => accepted.push(format!("{name}: {what}")),
        }
    }
    println!("refused: {refused:#?}");
    assert!(accepted.is_empty(), "{} accepted:\n{}", accepted.len(), accepted.join("\n"));
    assert!(refused.len() == MUTATIONS.len() && refused.values().sum::<u64>() >= 1000);
}

/// Draws programs until the damage can be done to one.
fn damage(dice: &mut TestRng, programs: &[Program], kind: Mutation) -> (Program, String) {
    for _ in 0..10_000 {
        let mut program = programs[dice.below(programs.len())].clone();
        if let Some(what) = kind(dice, &mut program) {
            return (program, what);
        }
    }
    panic!("no program can be damaged like this");
}

/// Several mutations may cancel each other, but never crash the check.
#[test]
fn several_mutations_never_panic() {
    let mut dice = TestRng::new(3);
    let models = drawable_models();
    for _ in 0..300 {
        let mut program = draw_case(&mut dice, &models).program();
        for _ in 0..6 {
            let (_, kind) = MUTATIONS[dice.below(MUTATIONS.len())];
            // A damage looks up what earlier ones may have removed.
            let whole = program.stages.iter().all(|stage| {
                let instrs = stage.forward.iter().chain(&stage.backward).chain(&stage.step);
                !stage.schedule.is_empty()
                    && instrs.clone().all(|i| !i.reads.is_empty() || !i.writes.is_empty())
            });
            if whole {
                kind(&mut dice, &mut program);
            }
        }
        if let Err(errors) = CheckedProgram::check(program) {
            assert!(!errors.to_string().is_empty());
        }
    }
}
