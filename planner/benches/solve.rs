//! Times each step of an exact solve on a table like that of a transformer block: a chain of nodes with 5 to 60
//! choices and a few skips, without and with memory rows.

use std::time::Duration;

use divan::{Bencher, black_box};
use narrows_cost_model::CostTable;
use narrows_planner::solve::{
    EliminationOrder, SolveLimits, choice_times, presolve, solve_by_ilp, solve_table,
};
use narrows_test_support::tables::chain_table;

const NODES: usize = 45;
/// Position of the rows' limits between the smallest and the largest bytes possible; `None` without rows.
const SHARES: [Option<f64>; 4] = [None, Some(0.4), Some(0.25), Some(0.1)];
const LIMITS: SolveLimits = SolveLimits { time: Some(Duration::from_secs(60)), gap: 0.0 };

fn main() {
    divan::main();
}

fn table(share: &Option<f64>) -> CostTable {
    chain_table(NODES, 7, *share)
}

#[divan::bench(args = SHARES.iter())]
fn presolve_alone(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    bencher.bench_local(|| presolve(black_box(&table)));
}

/// One sweep over a prepared order: the cost of each step of the price search.
#[divan::bench(args = SHARES.iter())]
fn elimination_sweep(bencher: Bencher, share: &Option<f64>) {
    let table = presolve(&table(share)).unwrap().table;
    let order = EliminationOrder::new(&table).unwrap();
    let costs = choice_times(&table);
    bencher.bench_local(|| order.cheapest(black_box(&costs)));
}

#[divan::bench(args = SHARES.iter(), sample_count = 5, sample_size = 1)]
fn integer_program_alone(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    bencher.bench_local(|| solve_by_ilp(black_box(&table), &LIMITS));
}

#[divan::bench(args = SHARES.iter(), sample_count = 5, sample_size = 1)]
fn all_methods(bencher: Bencher, share: &Option<f64>) {
    let table = table(share);
    bencher.bench_local(|| solve_table(black_box(&table), &LIMITS));
}
