//! Every solver agrees with enumeration, and its outcome states correctly how it ended.

use std::time::Duration;

use narrows_cost_model::{CostTable, MemoryRow};
use narrows_plan::{Bytes, Seconds};
use narrows_planner::solve::{
    ColumnGroup, Conflict, Prover, SolveError, SolveLimits, SolveOutcome, SolveStatus,
    choose_columns, presolve, solve_by_ilp, solve_table,
};
use narrows_test_support::fastest_by_enumeration;
use narrows_test_support::tables::{
    Draws, chain_table, choice, draw_keep_recompute_table, draw_table, node, seeded_draws,
};
use proptest::prelude::*;

type Solver = fn(&CostTable, &SolveLimits) -> Result<SolveOutcome, SolveError>;

const SOLVERS: [(&str, Solver); 2] = [("solve_table", solve_table), ("solve_by_ilp", solve_by_ilp)];

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
    assert!(close(time, expected), "{name} says {time:?}, enumeration {expected:?}");
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

/// The smallest cost of columns for groups of blocks, each with its number of blocks, by enumeration; `None`
/// when none fit.
fn cheapest_by_enumeration(groups: &[(u64, &[(f64, u64)])], budget: u64) -> Option<f64> {
    let Some(((blocks, columns), others)) = groups.split_first() else { return Some(0.0) };
    let Some(((cost, bytes), columns)) = columns.split_first() else {
        return if *blocks == 0 { cheapest_by_enumeration(others, budget) } else { None };
    };
    let with_count = |count: u64| {
        let budget = budget.checked_sub(bytes * count)?;
        let groups = [&[(blocks - count, columns)], others].concat();
        Some(cost * count as f64 + cheapest_by_enumeration(&groups, budget)?)
    };
    (0..=*blocks).filter_map(with_count).min_by(f64::total_cmp)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(700) })]

    #[test]
    fn solvers_agree_on_any_table(draws in prop::collection::vec(any::<u16>(), 0..400), rows in 0usize..4) {
        assert_solvers_agree(&draw_table(&mut Draws::new(&draws), rows));
    }

    #[test]
    fn solvers_agree_on_saving_and_recomputing(draws in prop::collection::vec(any::<u16>(), 0..300), rows in 0usize..4) {
        assert_solvers_agree(&draw_keep_recompute_table(&mut Draws::new(&draws), rows));
    }

    #[test]
    fn columns_are_chosen_as_cheaply_as_by_enumeration(
        groups in prop::collection::vec(
            (1u64..6, prop::collection::vec((1u32..1000, 0u64..1000), 1..4)), 1..3),
        share in 0.0f64..1.2,
        scale in prop::sample::select(vec![1u64, 1 << 20, 1 << 33]),
    ) {
        let groups: Vec<ColumnGroup> = groups
            .into_iter()
            .map(|(count, columns)| ColumnGroup {
                count,
                columns: columns.into_iter().map(|(t, b)| (f64::from(t) * 1e-3, b * scale)).collect(),
            })
            .collect();
        let most: u64 = groups
            .iter()
            .map(|g| g.count * g.columns.iter().map(|(_, bytes)| *bytes).max().unwrap())
            .sum();
        let budget = (most as f64 * share) as u64;
        // The start is the smallest column of each group.
        let start: Vec<Vec<u64>> = groups
            .iter()
            .map(|g| {
                let smallest = (0..g.columns.len()).min_by_key(|k| g.columns[*k].1).unwrap();
                (0..g.columns.len()).map(|k| if k == smallest { g.count } else { 0 }).collect()
            })
            .collect();
        let choice = choose_columns(&groups, budget, &start, &SolveLimits::default()).unwrap();
        let enumerated: Vec<_> = groups.iter().map(|g| (g.count, &g.columns[..])).collect();
        let expected = cheapest_by_enumeration(&enumerated, budget);
        prop_assert_eq!(choice.is_some(), expected.is_some());
        if let (Some(choice), Some(expected)) = (choice, expected) {
            prop_assert!(choice.is_optimal);
            prop_assert!((choice.cost - expected).abs() <= 1e-9 * expected, "{} {}", choice.cost, expected);
        }
    }
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
    assert_eq!(eliminated.prover, Prover::Elimination);
    assert!(close(eliminated.time.unwrap(), run(solve_by_ilp, &table).time.unwrap()));
}

#[test]
fn windows_lose_nothing_against_the_whole_program() {
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
        let draws = seeded_draws(seed, 4000);
        let mut dice = Draws::new(&draws);
        for choice in table.nodes.iter_mut().flat_map(|node| &mut node.choices) {
            choice.time.0 *= [1.0, 1.0, 1e3, 1e-2][dice.below(4)];
            let odd = |bytes: &mut Bytes| bytes.0 = bytes.0 * 37 + dice.below(1000) as u64;
            choice.bytes.iter_mut().map(|(_, bytes)| bytes).for_each(odd);
        }
        table.rows.iter_mut().for_each(|row| row.limit.0 *= 37);
        let whole = run(solve_by_ilp, &table);
        assert_proven("solve_table", &table, &run(solve_table, &table), whole.time);
    }
}

/// The random tables are worth solving: most have solutions, some do not, and rows often bind.
#[test]
fn random_tables_vary() {
    let (mut infeasible, mut by_elimination, mut by_ilp) = (0, 0, 0);
    for seed in 0..300 {
        let draws = seeded_draws(seed, 400);
        let outcome = run(solve_table, &draw_table(&mut Draws::new(&draws), 2));
        infeasible += u32::from(outcome.status == SolveStatus::Infeasible);
        by_elimination += u32::from(outcome.prover == Prover::Elimination);
        by_ilp += u32::from(outcome.prover == Prover::Ilp);
    }
    assert!((10..200).contains(&infeasible), "{infeasible} infeasible");
    assert!((50..250).contains(&by_elimination), "{by_elimination} by elimination");
    assert!(by_ilp > 5, "{by_ilp} by the integer program");
}

#[test]
fn without_time_there_is_no_assignment_and_no_claim() {
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
