//! Solves a cost table, cheap proofs first.
//!
//! 1. [`presolve`] shrinks the table or refutes it.
//! 2. Elimination finds the fastest assignment without rows. If it fits the rows, it is optimal;
//!    otherwise its time is a bound.
//! 3. Multipliers on bytes give a better bound, assignments that fit, and a bound for every choice. Bound and
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
    let lagrangian = lagrange::maximise_bound(inner, clock);
    let mut outcome = match &lagrangian {
        Some(lagrangian) if lagrangian.bound > lagrange::slowest(inner) => {
            return Ok(SolveOutcome::infeasible(SolveMethod::Lagrange, None));
        }
        Some(lagrangian) => match bound_meets_assignment(inner, lagrangian, limits) {
            Some(outcome) => outcome,
            None => window::solve(inner, limits, clock, lagrangian)?,
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

/// The outcome when multipliers alone close the gap, or enough of it.
fn bound_meets_assignment(
    table: &CostTable,
    lagrangian: &LagrangianBound,
    limits: &SolveLimits,
) -> Option<SolveOutcome> {
    let assignment = lagrangian.assignment.clone()?;
    let gap = relative_gap(table.time(&assignment), lagrangian.bound);
    if gap <= lagrange::ROUNDING {
        return Some(SolveOutcome::optimal(table, assignment, SolveMethod::Lagrange));
    }
    let status = SolveStatus::GapLimit(limits.gap);
    let (assignment, prover) = (Some(assignment), SolveMethod::Lagrange);
    (gap <= limits.gap)
        .then(|| SolveOutcome::stopped(status, table, assignment, lagrangian.bound, prover))
}
