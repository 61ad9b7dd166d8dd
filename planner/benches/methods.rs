//! Counts which method assigns the blocks of the chosen plan, and how each search ends, over 200
//! requests: ten models on 1 to 16 devices under four memory limits. Also counts which method ended each solve of
//! a cost table.
//!
//! `cargo bench -p narrows-planner --bench methods`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use narrows_cost_model::profile;
use narrows_plan::Bytes;
use narrows_plan::model::presets;
use narrows_planner::{
    AssignmentMethod, MemoryLimit, Request, SearchStatus, SolveMethod, TableSolves, search,
};

const MODELS: [&str; 10] = [
    "cola-60m",
    "cola-350m",
    "cola-1b",
    "cola-7b",
    "cola-13b",
    "lax-1b",
    "svd-3b",
    "llama-1b",
    "llama-7b",
    "llama-13b",
];
const DEVICES: [u64; 5] = [1, 2, 4, 8, 16];
const LIMITS_GIB: [u64; 4] = [72, 32, 16, 8];

/// One column of the table.
#[derive(Default)]
struct Count {
    optimal: usize,
    with_gap: usize,
    gap_max: f64,
    time: Duration,
}

fn main() {
    let hardware = profile::preset("a100-80gb-8").expect("a preset");
    let mut counts: BTreeMap<Option<AssignmentMethod>, Count> = BTreeMap::new();
    let mut table_solves: BTreeMap<SolveMethod, TableSolves> = BTreeMap::new();
    let (mut segment_solves, mut failed_solves) = (0, 0);
    for model in MODELS {
        for devices in DEVICES {
            for limit in LIMITS_GIB {
                let model = presets::find(model).expect("a preset");
                let mut request = Request::new(model, hardware.clone(), devices, 32, 2048);
                request.memory_limit = MemoryLimit::Bytes(Bytes(limit << 30));
                let started = Instant::now();
                let result = search(&request);
                let count = counts.entry(result.best.as_ref().map(|best| best.method)).or_default();
                count.time += started.elapsed();
                segment_solves += result.report.segment_solves;
                failed_solves += result.report.failed_solves;
                for (method, solves) in &result.report.table_solves {
                    let sum = table_solves.entry(*method).or_default();
                    sum.proven += solves.proven;
                    sum.limited += solves.limited;
                }
                match result.report.status {
                    SearchStatus::Optimal | SearchStatus::Infeasible => count.optimal += 1,
                    _ => {
                        count.with_gap += 1;
                        count.gap_max = count.gap_max.max(result.report.gap);
                    }
                }
            }
        }
    }
    println!("blocks assigned by    requests  proven  with a gap  largest gap  time");
    for (method, count) in counts {
        let name = match method {
            None => "no plan fits",
            Some(AssignmentMethod::Elimination) => "elimination",
            Some(AssignmentMethod::Hull) => "hull vertices kept",
            Some(AssignmentMethod::IntegerProgram) => "integer program",
        };
        println!(
            "{name:<20} {:>9} {:>7} {:>11} {:>10.2} % {:>6.1} s",
            count.optimal + count.with_gap,
            count.optimal,
            count.with_gap,
            100.0 * count.gap_max,
            count.time.as_secs_f64(),
        );
    }
    let tables: u64 = table_solves.values().map(|solves| solves.proven + solves.limited).sum();
    println!("\nsolved by elimination alone: {} segments", segment_solves - tables);
    println!("tables ended by       proven  by a limit");
    for (method, solves) in table_solves {
        let name = match method {
            SolveMethod::Presolve => "presolve",
            SolveMethod::Elimination => "elimination",
            SolveMethod::Lagrange => "Lagrangian bound",
            SolveMethod::Ilp => "integer program",
        };
        println!("{name:<20} {:>7} {:>11}", solves.proven, solves.limited);
    }
    println!("integer programs that the library failed to solve: {failed_solves}");
}
