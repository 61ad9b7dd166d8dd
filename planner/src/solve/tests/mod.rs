//! Every solver agrees with enumeration, and the status of its outcome is right.

mod enumeration;
mod tables;

use std::time::Duration;

use narrows_cost_model::{CostTable, MemoryRow};
use narrows_plan::random::SplitMix64;
use narrows_plan::{Bytes, Seconds};

use self::enumeration::fastest_by_enumeration;
use self::tables::{
    Draws, chain_table, choice, draw_keep_recompute_table, draw_table, node, seeded_draws,
};
use super::ilp::{self, Incumbent};
use super::outcome::{Conflict, SolveClock, SolveStatus};
use super::presolve::presolve;
use super::{SolveError, SolveLimits, SolveMethod, SolveOutcome, solve_table};

type Solver = fn(&CostTable, &SolveLimits) -> Result<SolveOutcome, SolveError>;

const SOLVERS: [(&str, Solver); 2] = [("solve_table", solve_table), ("solve_by_ilp", solve_by_ilp)];

/// Solves a table by presolve and the integer program alone, without the bounds that [`solve_table`] gives it.
fn solve_by_ilp(table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
    let clock = SolveClock::start(limits);
    let reduced = match presolve(table) {
        Ok(reduced) => reduced,
        Err(conflict) => {
            return Ok(SolveOutcome::infeasible(SolveMethod::Presolve, Some(conflict)));
        }
    };
    let known = Incumbent { bound: Seconds(0.0), assignment: None };
    let mut outcome = ilp::close(&reduced.table, limits, clock, known)?;
    outcome.assignment = outcome.assignment.map(|a| reduced.lift(&a));
    outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
    Ok(outcome)
}

fn close(a: Seconds, b: Seconds) -> bool {
    (a.0 - b.0).abs() <= 1e-9 * a.0.max(b.0)
}

fn run(solver: Solver, table: &CostTable) -> SolveOutcome {
    solver(table, &SolveLimits::default()).unwrap()
}

/// Asserts that an unlimited solve ended with a proof and the expected time; `None` is infeasible.
fn assert_proven(name: &str, table: &CostTable, outcome: &SolveOutcome, expected: Option<Seconds>) {
    let status = if expected.is_some() { SolveStatus::Optimal } else { SolveStatus::Infeasible };
    assert_eq!(outcome.status, status, "{name}");
    assert_eq!(outcome.assignment.is_some(), expected.is_some(), "{name}");
    let (Some(assignment), Some(expected)) = (&outcome.assignment, expected) else { return };
    assert!(table.is_consistent(assignment), "{name}");
    assert!(table.fits(assignment), "{name}");
    assert_eq!(outcome.time, Some(table.time(assignment)), "{name}");
    let time = table.time(assignment);
    assert!(close(time, expected), "{name}: {time:?}, by enumeration {expected:?}");
    assert_eq!((outcome.gap, outcome.bound), (0.0, time), "{name}");
}

fn assert_solvers_agree(table: &CostTable) {
    let expected = fastest_by_enumeration(table).map(|(time, _)| time);
    for (name, solver) in SOLVERS {
        assert_proven(name, table, &run(solver, table), expected);
    }
    if let Ok(reduced) = presolve(table) {
        let inner = fastest_by_enumeration(&reduced.table);
        assert_eq!(inner.is_some(), expected.is_some());
        if let (Some((_, assignment)), Some(expected)) = (inner, expected) {
            assert!(close(table.time(&reduced.lift(&assignment)), expected));
        }
    } else {
        assert_eq!(expected, None);
    }
}

/// Calls `check` with 700 tables of a kind: of up to `draws` draws, with 0 to 3 memory rows.
fn for_each_table(draws: u64, draw: fn(&mut Draws, usize) -> CostTable, check: fn(&CostTable)) {
    for seed in 0..700 {
        let mut random = SplitMix64::new(1000 + seed);
        let (count, rows) = (random.next_u64() % draws, random.next_u64() % 4);
        let table = draw(&mut Draws::new(&seeded_draws(seed, count as usize)), rows as usize);
        println!("seed {seed}");
        check(&table);
    }
}

#[test]
fn solvers_agree_on_any_table() {
    for_each_table(400, draw_table, assert_solvers_agree);
}

#[test]
fn solvers_agree_on_saving_and_recomputing() {
    for_each_table(300, draw_keep_recompute_table, assert_solvers_agree);
}

#[test]
fn presolve_names_the_conflict() {
    let mut table = CostTable {
        nodes: vec![node("a", vec![choice(1.0, &[(0, 5)]), choice(2.0, &[(0, 3)])])],
        links: vec![],
        rows: vec![MemoryRow { name: "row".into(), limit: Bytes(2) }],
    };
    let conflict = Conflict::Row { row: narrows_cost_model::MemoryRowId(0), least: Bytes(3) };
    assert_eq!(run(solve_table, &table).conflict, Some(conflict));
    table.rows[0].limit = Bytes(3);
    assert_eq!(run(solve_table, &table).assignment, Some(vec![1]));
}

#[test]
fn one_byte_decides_beside_tens_of_gigabytes() {
    let large = 40 << 30;
    let table = |limit| CostTable {
        nodes: vec![
            node("a", vec![choice(1.0, &[(0, large + 1)]), choice(2.0, &[(0, large - 7)])]),
            node("b", vec![choice(1.0, &[(0, large)]), choice(3.0, &[(0, 11)])]),
            node("c", vec![choice(1.0, &[(0, 3)]), choice(7.0, &[(0, 0)])]),
        ],
        links: vec![],
        rows: vec![MemoryRow { name: "row".into(), limit: Bytes(limit) }],
    };
    for (limit, time) in [(2 * large + 4, 3.0), (2 * large + 3, 4.0), (2 * large - 5, 5.0)] {
        for (name, solver) in SOLVERS {
            assert_eq!(run(solver, &table(limit)).time, Some(Seconds(time)), "{name} {limit}");
        }
    }
}

#[test]
fn a_chain_without_rows_is_proven_by_elimination_and_equals_the_program() {
    let table = chain_table(45, 3, None);
    let eliminated = run(solve_table, &table);
    assert_eq!(eliminated.method, SolveMethod::Elimination);
    assert!(close(eliminated.time.unwrap(), run(solve_by_ilp, &table).time.unwrap()));
}

#[test]
fn windows_find_the_optimum_of_the_whole_program() {
    for seed in 0..6 {
        for share in [0.5, 0.3, 0.15, 0.1] {
            let table = chain_table(12, seed, Some(share));
            let whole = run(solve_by_ilp, &table);
            assert_proven("solve_table", &table, &run(solve_table, &table), whole.time);
        }
    }
}

/// Byte counts that differ by a millionth make bases that microlp calls singular.
#[test]
fn nearly_equal_bytes_do_not_break_the_program() {
    for seed in (100..150).step_by(2) {
        let mut table = chain_table(16, seed, Some(0.2));
        let seeded = seeded_draws(seed, 4000);
        let mut draws = Draws::new(&seeded);
        for choice in table.nodes.iter_mut().flat_map(|node| &mut node.choices) {
            choice.time.0 *= [1.0, 1.0, 1e3, 1e-2][draws.below(4)];
            let odd = |bytes: &mut Bytes| bytes.0 = bytes.0 * 37 + draws.below(1000) as u64;
            choice.bytes.iter_mut().map(|(_, bytes)| bytes).for_each(odd);
        }
        table.rows.iter_mut().for_each(|row| row.limit.0 *= 37);
        let whole = run(solve_by_ilp, &table);
        assert_proven("solve_table", &table, &run(solve_table, &table), whole.time);
    }
}

/// Most random tables have solutions, some do not, and rows often bind.
#[test]
fn random_tables_need_all_methods() {
    let (mut infeasible, mut by_elimination, mut by_ilp) = (0, 0, 0);
    for seed in 0..300 {
        let draws = seeded_draws(seed, 400);
        let outcome = run(solve_table, &draw_table(&mut Draws::new(&draws), 2));
        infeasible += u32::from(outcome.status == SolveStatus::Infeasible);
        by_elimination += u32::from(outcome.method == SolveMethod::Elimination);
        by_ilp += u32::from(outcome.method == SolveMethod::Ilp);
    }
    assert!((10..200).contains(&infeasible), "{infeasible} infeasible");
    assert!((50..250).contains(&by_elimination), "{by_elimination} by elimination");
    assert!(by_ilp > 5, "{by_ilp} by the integer program");
}

#[test]
fn without_time_no_status_claims_a_proof() {
    let table = chain_table(20, 4, Some(0.3));
    let limits = SolveLimits { time: Some(Duration::ZERO), gap: 0.0 };
    let outcome = solve_by_ilp(&table, &limits).unwrap();
    assert_eq!(outcome.status, SolveStatus::TimeLimit(Duration::ZERO));
    assert_eq!((outcome.assignment, outcome.time), (None, None));
    assert!(outcome.gap.is_infinite());
    let optimum = run(solve_table, &table).time.unwrap();
    let outcome = solve_table(&table, &limits).unwrap();
    assert_ne!(outcome.status, SolveStatus::Optimal);
    assert!(outcome.bound <= optimum);
}

#[test]
fn a_gap_limit_is_respected_and_reported() {
    let table = chain_table(25, 5, Some(0.25));
    let optimum = run(solve_table, &table).time.unwrap();
    for (name, solver) in SOLVERS {
        let outcome = solver(&table, &SolveLimits { time: None, gap: 0.2 }).unwrap();
        let time = outcome.time.unwrap();
        assert!(outcome.bound.0 <= optimum.0 * (1.0 + 1e-9), "{name}");
        assert!(time.0 >= optimum.0 * (1.0 - 1e-9), "{name}");
        assert!(outcome.gap <= 0.2, "{name}");
        assert!(
            matches!(outcome.status, SolveStatus::Optimal | SolveStatus::GapLimit(0.2)),
            "{name}"
        );
    }
}
