//! What each step of an exact solve costs on a table like a transformer block's: a chain of nodes
//! with 5 to 60 choices and a few skips, without and with memory rows.

use std::ops::ControlFlow;

use divan::{Bencher, black_box};
use narrows_cost_model::{CostTable, MemoryRowId};
use narrows_plan::Bytes;
use narrows_planner::solve::eliminate::{EliminationOrder, fastest, times};
use narrows_planner::solve::exact::Exact;
use narrows_planner::solve::front::{FrontRequest, front};
use narrows_planner::solve::ilp::{Ilp, IlpLibrary};
use narrows_planner::solve::presolve::presolve;
use narrows_planner::solve::{SolveLimits, Solver, exact};
use narrows_test_support::tables::chain;

const NODES: usize = 45;
/// Where between the least and the most possible the rows' limits lie; none without rows.
const SHARES: [Option<f64>; 4] = [None, Some(0.4), Some(0.25), Some(0.1)];

fn main() {
    divan::main();
}

fn table(share: &Option<f64>) -> CostTable {
    chain(NODES, 7, *share)
}

#[divan::bench(args = SHARES.iter())]
fn presolving(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    bencher.bench_local(|| presolve(black_box(&table)));
}

#[divan::bench(args = SHARES.iter())]
fn elimination_ignoring_rows(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    bencher.bench_local(|| fastest(black_box(&table)));
}

/// One sweep over a prepared order: what each step of the price search costs.
#[divan::bench(args = SHARES.iter())]
fn one_sweep(bencher: Bencher, share: &Option<f64>) {
    let table = presolve(&table(share)).unwrap().table;
    let plan = EliminationOrder::new(&table).unwrap();
    let costs = times(&table);
    bencher.bench_local(|| plan.cheapest(black_box(&costs)));
}

#[divan::bench(args = SHARES.iter(), sample_count = 5, sample_size = 1)]
fn integer_program(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    let limits = SolveLimits { time: Some(std::time::Duration::from_secs(60)), gap: 0.0 };
    bencher.bench_local(|| Ilp(IlpLibrary::MicroLp).solve(black_box(&table), &limits));
}

#[cfg(feature = "highs")]
#[divan::bench(args = SHARES.iter(), sample_count = 5, sample_size = 1)]
fn integer_program_highs(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    let limits = SolveLimits { time: Some(std::time::Duration::from_secs(60)), gap: 0.0 };
    bencher.bench_local(|| Ilp(IlpLibrary::Highs).solve(black_box(&table), &limits));
}

/// Ten points of a front, the other rows half full.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn front_of_ten_points(bencher: Bencher) {
    let table = table(&Some(0.5));
    let step_min = Bytes(table.rows[0].limit.0 / 30);
    let request =
        FrontRequest { row: MemoryRowId(0), step_min, points_max: 10, time_per_point: None };
    bencher
        .bench_local(|| front(black_box(&table), &request, &Exact, |_| ControlFlow::Continue(())));
}

#[divan::bench(args = SHARES.iter(), sample_count = 5, sample_size = 1)]
fn combined(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    let limits = SolveLimits { time: Some(std::time::Duration::from_secs(60)), gap: 0.0 };
    bencher.bench_local(|| exact(black_box(&table), &limits));
}
