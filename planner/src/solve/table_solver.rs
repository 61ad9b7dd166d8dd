//! Solves a cost table, cheap proofs first.
//!
//! 1. [`presolve`] shrinks the table or refutes it.
//! 2. Elimination finds the fastest assignment without rows. If it fits the rows, it is optimal;
//!    otherwise its time is a bound.
//! 3. Prices on bytes give a better bound, assignments that fit, and a bound for every choice. Bound and
//!    assignment may meet.
//! 4. Integer programs over windows of choices close the remaining gap.

use narrows_cost_model::CostTable;
use narrows_plan::Seconds;

use super::elimination::fastest_ignoring_rows;
use super::ilp::{self, Incumbent};
use super::lagrange::{self, LagrangianBound};
use super::outcome::{
    SolveClock, SolveError, SolveLimits, SolveMethod, SolveOutcome, SolveStatus, relative_gap,
};
use super::presolve::presolve;
use super::window;

/// Solves a table by the cheapest method that proves its outcome; [`SolveOutcome::method`] names it.
///
/// # Errors
/// The integer programming library failed.
///
/// ```
/// use narrows_cost_model::{CostTable, TableChoice, TableLink, TableNode, TableNodeId};
/// use narrows_plan::Seconds;
/// use narrows_planner::solve::{SolveLimits, SolveStatus, solve_table};
///
/// let choice = |time| TableChoice { time: Seconds(time), bytes: vec![] };
/// let node = |times: &[f64]| TableNode {
///     name: String::new(),
///     choices: times.iter().map(|&t| choice(t)).collect(),
/// };
/// let table = CostTable {
///     nodes: vec![node(&[1.0, 2.0]), node(&[5.0, 1.0])],
///     // The first choices go together, and the second ones.
///     links: vec![TableLink {
///         from: TableNodeId(0),
///         to: TableNodeId(1),
///         demand: vec![Some(0), Some(1)],
///         offer: vec![0b01, 0b10],
///     }],
///     rows: vec![],
/// };
/// let outcome = solve_table(&table, &SolveLimits::default()).unwrap();
/// assert_eq!(outcome.assignment, Some(vec![1, 1]));
/// assert_eq!(outcome.status, SolveStatus::Optimal);
/// ```
pub fn solve_table(table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
    let clock = SolveClock::start(limits);
    let reduced = match presolve(table) {
        Ok(reduced) => reduced,
        Err(conflict) => {
            return Ok(SolveOutcome::infeasible(SolveMethod::Presolve, Some(conflict)));
        }
    };
    let bound = match fastest_ignoring_rows(&reduced.table) {
        Ok(None) => return Ok(SolveOutcome::infeasible(SolveMethod::Elimination, None)),
        Ok(Some(a)) if reduced.table.fits(&a) => {
            return Ok(SolveOutcome::optimal(table, reduced.lift(&a), SolveMethod::Elimination));
        }
        Ok(Some(a)) => reduced.table.time(&a),
        // Too wide for elimination; the integer program has no such limit.
        Err(_) => Seconds(0.0),
    };
    let inner = &reduced.table;
    let priced = lagrange::price_rows(inner, clock);
    let mut outcome = match &priced {
        Some(priced) if priced.bound > lagrange::slowest(inner) => {
            return Ok(SolveOutcome::infeasible(SolveMethod::Lagrange, None));
        }
        Some(priced) => match bound_meets_assignment(inner, priced, limits) {
            Some(outcome) => outcome,
            None => window::solve(inner, limits, clock, priced)?,
        },
        None => {
            let known = Incumbent { bound, assignment: None };
            ilp::close(inner, limits, clock, known)?
        }
    };
    outcome.assignment = outcome.assignment.map(|a| reduced.lift(&a));
    outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
    Ok(outcome)
}

/// Solves a table by presolve and the integer program alone: the check of [`solve_table`]'s bounds.
///
/// # Errors
/// The integer programming library failed.
pub fn solve_by_ilp(table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
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

/// The outcome when prices alone close the gap, or enough of it.
fn bound_meets_assignment(
    table: &CostTable,
    priced: &LagrangianBound,
    limits: &SolveLimits,
) -> Option<SolveOutcome> {
    let assignment = priced.assignment.clone()?;
    let gap = relative_gap(table.time(&assignment), priced.bound);
    if gap <= lagrange::ROUNDING {
        return Some(SolveOutcome::optimal(table, assignment, SolveMethod::Lagrange));
    }
    let status = SolveStatus::GapLimit(limits.gap);
    let (assignment, prover) = (Some(assignment), SolveMethod::Lagrange);
    (gap <= limits.gap)
        .then(|| SolveOutcome::stopped(status, table, assignment, priced.bound, prover))
}
