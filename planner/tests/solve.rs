//! All solvers agree with enumeration, and say honestly how they ended.

use std::ops::ControlFlow;
use std::time::Duration;

use narrows_cost_model::{CostTable, MemoryRow, MemoryRowId};
use narrows_plan::{Bytes, Seconds};
use narrows_planner::solve::brute::Brute;
use narrows_planner::solve::eliminate::{Eliminate, fastest};
use narrows_planner::solve::exact::Exact;
use narrows_planner::solve::front::{FrontEnd, FrontRequest, front};
use narrows_planner::solve::ilp::{Ilp, IlpLibrary};
use narrows_planner::solve::presolve::presolve;
use narrows_planner::solve::{
    Conflict, Prover, SOLVERS, SolveError, SolveLimits, SolveOutcome, SolveStatus, Solver, exact,
};
use narrows_test_support::tables::{Rolls, any_table, chain, choice, keep_redo_table, node};
use proptest::prelude::*;

fn close(a: Seconds, b: Seconds) -> bool {
    (a.0 - b.0).abs() <= 1e-9 * a.0.max(b.0)
}

fn run(solver: &dyn Solver, table: &CostTable) -> SolveOutcome {
    solver.solve(table, &SolveLimits::default()).unwrap()
}

/// Checks that an unlimited solve ended with a proof that agrees with the oracle's.
fn check(name: &str, table: &CostTable, oracle: &SolveOutcome, outcome: &SolveOutcome) {
    assert_eq!(outcome.status, oracle.status, "{name}");
    if let Some(assignment) = &outcome.assignment {
        assert!(table.is_consistent(assignment), "{name}");
        assert!(table.fits(assignment), "{name}");
        assert_eq!(outcome.time, Some(table.time(assignment)), "{name}");
        let (time, expected) = (outcome.time.unwrap(), oracle.time.unwrap());
        assert!(close(time, expected), "{name} says {time:?}, enumeration {expected:?}");
        assert_eq!((outcome.gap, outcome.bound), (0.0, time), "{name}");
    }
}

fn check_all(table: &CostTable) {
    let oracle = run(&Brute, table);
    for (name, solver) in SOLVERS {
        match solver.solve(table, &SolveLimits::default()) {
            Ok(outcome) => check(name, table, &oracle, &outcome),
            Err(SolveError::RowsBind { bound }) => {
                assert_eq!(*name, "eliminate");
                let best = oracle.time.map_or(f64::INFINITY, |t| t.0);
                assert!(bound.0 <= best * (1.0 + 1e-12));
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    if let Ok(reduced) = presolve(table) {
        let inner = run(&Brute, &reduced.table);
        assert_eq!(inner.status, oracle.status);
        if let (Some(a), Some(expected)) = (inner.assignment, oracle.time) {
            assert!(close(table.time(&reduced.lift(&a)), expected));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(700) })]

    #[test]
    fn solvers_agree_on_any_table(rolls in prop::collection::vec(any::<u16>(), 0..400), rows in 0usize..4) {
        check_all(&any_table(&mut Rolls::new(&rolls), rows));
    }

    #[test]
    fn solvers_agree_on_keeping_and_redoing(rolls in prop::collection::vec(any::<u16>(), 0..300), rows in 0usize..4) {
        check_all(&keep_redo_table(&mut Rolls::new(&rolls), rows));
    }

    #[test]
    fn a_front_is_what_enumeration_says(rolls in prop::collection::vec(any::<u16>(), 0..200)) {
        let table = keep_redo_table(&mut Rolls::new(&rolls), 2);
        let request = FrontRequest {
            row: MemoryRowId(0), step_min: Bytes(1), points_max: 30, time_per_point: None,
        };
        let by = |solver: &dyn Solver| front(&table, &request, solver, |_| ControlFlow::Continue(())).unwrap();
        let (found, expected) = (by(&Exact), by(&Brute));
        // Equally fast points may differ in bytes, but not once dominated ones are gone.
        prop_assert_eq!(found.end, FrontEnd::Complete);
        prop_assert_eq!(found.points.len(), expected.points.len());
        for (a, b) in found.points.iter().zip(&expected.points) {
            prop_assert!(close(a.time, b.time));
        }
    }
}

#[test]
fn elimination_ignores_rows_and_says_so() {
    let mut table = chain(12, 1, None);
    table.nodes[0].choices.iter_mut().for_each(|c| c.bytes = vec![(MemoryRowId(0), Bytes(8))]);
    table.rows = vec![MemoryRow { name: "small".into(), limit: Bytes(7) }];
    let bound = table.time(&fastest(&table).unwrap().unwrap());
    let refusal = Eliminate.solve(&table, &SolveLimits::default());
    assert_eq!(refusal, Err(SolveError::RowsBind { bound }));
}

#[test]
fn presolve_names_what_contradicts() {
    let mut table = CostTable {
        nodes: vec![node("a", vec![choice(1.0, &[(0, 5)]), choice(2.0, &[(0, 3)])])],
        links: vec![],
        rows: vec![MemoryRow { name: "row".into(), limit: Bytes(2) }],
    };
    let conflict = Conflict::Row { row: MemoryRowId(0), least: Bytes(3) };
    assert_eq!(exact(&table, &SolveLimits::default()).unwrap().conflict, Some(conflict));
    table.rows[0].limit = Bytes(3);
    assert_eq!(exact(&table, &SolveLimits::default()).unwrap().assignment, Some(vec![1]));
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
        for solver in [&Exact as &dyn Solver, &Ilp(IlpLibrary::MicroLp)] {
            assert_eq!(run(solver, &table(limit)).time, Some(Seconds(time)), "{limit}");
        }
    }
}

#[test]
fn a_chain_without_rows_is_proven_by_elimination_and_equals_the_program() {
    let table = chain(45, 3, None);
    let eliminated = run(&Exact, &table);
    assert_eq!(eliminated.prover, Prover::Eliminate);
    assert!(close(eliminated.time.unwrap(), run(&Ilp(IlpLibrary::MicroLp), &table).time.unwrap()));
}

#[test]
fn windows_lose_nothing_against_the_whole_program() {
    for seed in 0..6 {
        for share in [0.5, 0.3, 0.15, 0.1] {
            let table = chain(12, seed, Some(share));
            let whole = run(&Ilp(IlpLibrary::MicroLp), &table);
            check("exact", &table, &whole, &run(&Exact, &table));
        }
    }
}

/// Byte counts that differ by a millionth make bases that microlp calls singular.
#[test]
fn nearly_equal_bytes_do_not_break_the_program() {
    for seed in (100..150).step_by(2) {
        let mut table = chain(16, seed, Some(0.2));
        let rolls = narrows_test_support::tables::rolls(seed, 4000);
        let mut dice = Rolls::new(&rolls);
        for choice in table.nodes.iter_mut().flat_map(|node| &mut node.choices) {
            choice.time.0 *= [1.0, 1.0, 1e3, 1e-2][dice.roll(4)];
            let odd = |bytes: &mut Bytes| bytes.0 = bytes.0 * 37 + dice.roll(1000) as u64;
            choice.bytes.iter_mut().map(|(_, bytes)| bytes).for_each(odd);
        }
        table.rows.iter_mut().for_each(|row| row.limit.0 *= 37);
        check("exact", &table, &run(&Ilp(IlpLibrary::MicroLp), &table), &run(&Exact, &table));
    }
}

/// The random tables are worth solving: most have solutions, some do not, and rows often bind.
#[test]
fn random_tables_vary() {
    let (mut infeasible, mut binding, mut proven_by_program) = (0, 0, 0);
    for seed in 0..300 {
        let rolls = narrows_test_support::tables::rolls(seed, 400);
        let table = any_table(&mut Rolls::new(&rolls), 2);
        let outcome = run(&Exact, &table);
        infeasible += u32::from(outcome.status == SolveStatus::Infeasible);
        let refused = Eliminate.solve(&table, &SolveLimits::default());
        binding += u32::from(matches!(refused, Err(SolveError::RowsBind { .. })));
        proven_by_program += u32::from(outcome.prover == Prover::Ilp);
    }

    assert!((10..200).contains(&infeasible), "{infeasible} infeasible");
    assert!(binding > 50, "{binding} binding");
    assert!(proven_by_program > 5, "{proven_by_program} by the integer program");
}

#[test]
fn no_time_is_no_assignment_and_no_claim() {
    let table = chain(20, 4, Some(0.3));
    let limits = SolveLimits { time: Some(Duration::ZERO), gap: 0.0 };
    let outcome = Ilp(IlpLibrary::MicroLp).solve(&table, &limits).unwrap();
    assert_eq!(outcome.status, SolveStatus::TimeLimit(Duration::ZERO));
    assert_eq!((outcome.assignment, outcome.time), (None, None));
    assert!(outcome.gap.is_infinite());
    let optimum = run(&Exact, &table).time.unwrap();
    let outcome = exact(&table, &limits).unwrap();
    assert_ne!(outcome.status, SolveStatus::Optimal);
    assert!(outcome.bound <= optimum);
}

#[test]
fn a_gap_is_kept_and_reported() {
    let table = chain(25, 5, Some(0.25));
    let optimum = run(&Exact, &table).time.unwrap();
    for solver in [&Exact as &dyn Solver, &Ilp(IlpLibrary::MicroLp)] {
        let outcome = solver.solve(&table, &SolveLimits { time: None, gap: 0.2 }).unwrap();
        let time = outcome.time.unwrap();
        assert!(outcome.bound.0 <= optimum.0 * (1.0 + 1e-9) && time.0 >= optimum.0 * (1.0 - 1e-9));
        assert!(outcome.gap <= 0.2);
        assert!(matches!(outcome.status, SolveStatus::Optimal | SolveStatus::GapLimit(0.2)));
    }
}

#[test]
fn a_front_stops_when_told() {
    let table = chain(10, 6, Some(0.9));
    let request = FrontRequest {
        row: MemoryRowId(0),
        step_min: Bytes(1 << 20),
        points_max: 9,
        time_per_point: None,
    };
    let mut seen = 0;
    let stopped = front(&table, &request, &Exact, |_| {
        seen += 1;
        if seen == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let stopped = stopped.unwrap();
    assert_eq!((stopped.end, seen), (FrontEnd::Stopped, 3));
    for pair in stopped.points.windows(2) {
        assert!(pair[0].time < pair[1].time && pair[0].bytes > pair[1].bytes);
    }
    let full = front(&table, &request, &Exact, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((full.end, full.points.len() <= 9), (FrontEnd::PointsMax, true));
}
