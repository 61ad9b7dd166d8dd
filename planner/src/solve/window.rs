//! Solves integer programs over growing windows of choices.
//!
//! Multipliers on bytes bound not only the table but every choice `c`: no assignment with `c` is faster than
//! `m(c)`. The choices with `m(c) ≤ w` therefore suffice for all assignments within a window `time ≤ w`, and
//! their integer program is much smaller. Let `t` be its optimum:
//!
//! - `t ≤ w`: no assignment outside the window is faster, so `t` is the optimum of the whole table;
//! - `t > w`, or no assignment: the optimum is at least `w`. The next window is wider, at most up to `t`; a
//!   window up to `t` is the last.

use narrows_cost_model::{CostTable, TableLink};
use narrows_plan::Seconds;

use super::ilp::{self, Incumbent};
use super::lagrange::{LagrangianBound, slowest};
use super::outcome::{SolveClock, SolveError, SolveLimits, SolveMethod, SolveOutcome, SolveStatus};
use super::presolve::presolve;

/// Width of the first window, relative to the bound.
const FIRST_WIDTH: f64 = 0.01;
/// Factor from the width of a window to that of the next.
const GROWTH: f64 = 2.0;
/// Room for rounding in the bounds of choices.
const SLACK: f64 = 1e-10;

/// Solves a presolved table.
pub(super) fn solve(
    table: &CostTable,
    limits: &SolveLimits,
    clock: SolveClock,
    lagrangian: &LagrangianBound,
) -> Result<SolveOutcome, SolveError> {
    let mut known =
        Incumbent { bound: lagrangian.bound, assignment: lagrangian.assignment.clone() };
    let Ok(bounds) = lagrangian.bounds_by_choice(table) else {
        return ilp::close(table, limits, clock, known);
    };
    let slowest = slowest(table);
    let mut width = FIRST_WIDTH;
    loop {
        let best = known.assignment.as_ref().map_or(slowest, |a| table.time(a));
        let window = Seconds((lagrangian.bound.0 * (1.0 + width)).min(best.0));
        let is_last = window.0 >= best.0;
        width *= GROWTH;
        let mut outcome = within(table, &bounds, window, limits, clock, &known)?;
        if let Some(assignment) = &outcome.assignment {
            known.offer(table, assignment);
        }
        let is_inside = outcome.time.is_some_and(|time| time <= window);
        match outcome.status {
            SolveStatus::Infeasible if is_last && known.assignment.is_none() => return Ok(outcome),
            SolveStatus::Infeasible if is_last => {}
            SolveStatus::Optimal if is_inside || is_last => {}
            SolveStatus::Infeasible | SolveStatus::Optimal => {
                known.bound = Seconds(known.bound.0.max(window.0));
                continue;
            }
            // The bound of the window holds inside it only.
            SolveStatus::GapLimit(_) | SolveStatus::TimeLimit(_) => {
                let bound = Seconds(outcome.bound.0.min(window.0).max(known.bound.0));
                let best = known.assignment;
                outcome =
                    SolveOutcome::stopped(outcome.status, table, best, bound, SolveMethod::Ilp);
                let is_out_of_time = matches!(outcome.status, SolveStatus::TimeLimit(_));
                if is_out_of_time || is_last || outcome.gap <= limits.gap {
                    return Ok(outcome);
                }
                known = Incumbent { bound, assignment: outcome.assignment };
                continue;
            }
        }
        let best = known.assignment.expect("the last window holds an assignment");
        return Ok(SolveOutcome::optimal(table, best, SolveMethod::Ilp));
    }
}

/// Solves the restriction of a table to the choices that may lie within a window.
fn within(
    table: &CostTable,
    bounds: &[Vec<f64>],
    window: Seconds,
    limits: &SolveLimits,
    clock: SolveClock,
    known: &Incumbent,
) -> Result<SolveOutcome, SolveError> {
    let time_cutoff = window.0 * (1.0 + SLACK);
    let kept: Vec<Vec<u32>> = bounds
        .iter()
        .map(|bounds| {
            (0..bounds.len() as u32).filter(|&c| bounds[c as usize] <= time_cutoff).collect()
        })
        .collect();
    if kept.iter().any(Vec::is_empty) {
        return Ok(SolveOutcome::infeasible(SolveMethod::Lagrange, None));
    }
    let part = restrict(table, &kept);
    let Ok(reduced) = presolve(&part) else {
        return Ok(SolveOutcome::infeasible(SolveMethod::Presolve, None));
    };
    let inside = Incumbent { bound: known.bound, assignment: None };
    let mut outcome = ilp::close(&reduced.table, limits, clock, inside)?;
    let lift = |a: Vec<u32>| -> Vec<u32> {
        reduced.lift(&a).iter().zip(&kept).map(|(&c, kept)| kept[c as usize]).collect()
    };
    outcome.assignment = outcome.assignment.map(lift);
    outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
    Ok(outcome)
}

/// The table with some of its choices.
fn restrict(table: &CostTable, kept: &[Vec<u32>]) -> CostTable {
    let mut part = table.clone();
    for (node, kept) in part.nodes.iter_mut().zip(kept) {
        node.choices = kept.iter().map(|&c| node.choices[c as usize].clone()).collect();
    }
    for TableLink { from, to, demand, offer } in &mut part.links {
        let (from, to) = (&kept[from.0 as usize], &kept[to.0 as usize]);
        *demand = from.iter().map(|&c| demand[c as usize]).collect();
        *offer = to.iter().map(|&c| offer[c as usize]).collect();
    }
    part
}
