//! The way to solve a table: cheap proofs first.
//!
//! 1. [`presolve`](super::presolve) shrinks the table or refutes it.
//! 2. [`eliminate`] finds the fastest assignment without rows. If it fits them,
//!    it is optimal; otherwise its time is a bound.
//! 3. [`lagrange`] prices the rows: a better bound, assignments that fit, and
//!    a bound for every choice. Bound and assignment may meet.
//! 4. [`ilp`] closes the rest, over windows of choices that can matter.

use narrows_cost_model::CostTable;
use narrows_plan::Seconds;

use super::ilp::{self, IlpLibrary, Incumbent};
use super::lagrange::{self, LagrangianBound};
use super::outcome::relative_gap;
use super::presolve::presolve;
use super::{
    Prover, SolveClock, SolveError, SolveLimits, SolveOutcome, SolveStatus, Solver, eliminate,
    window,
};

/// [`exact()`] as a solver.
#[derive(Clone, Copy, Debug)]
pub struct Exact;

impl Solver for Exact {
    fn solve(&self, table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
        exact(table, limits)
    }
}

/// Solves a table by the cheapest method that proves its answer; [`SolveOutcome::prover`] says which.
///
/// ```
/// use narrows_cost_model::{CostTable, TableChoice, TableLink, TableNode, TableNodeId};
/// use narrows_plan::Seconds;
/// use narrows_planner::solve::{SolveLimits, exact};
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
/// let outcome = exact(&table, &SolveLimits::default()).unwrap();
/// assert_eq!(outcome.assignment, Some(vec![1, 1]));
/// assert_eq!(outcome.status.name(), "optimal");
/// ```
pub fn exact(table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
    let clock = SolveClock::start(limits);
    let reduced = match presolve(table) {
        Ok(reduced) => reduced,
        Err(conflict) => return Ok(SolveOutcome::infeasible(Prover::Presolve, Some(conflict))),
    };
    let bound = match eliminate::fastest(&reduced.table) {
        Ok(None) => return Ok(SolveOutcome::infeasible(Prover::Eliminate, None)),
        Ok(Some(a)) if reduced.table.fits(&a) => {
            return Ok(SolveOutcome::optimal(table, reduced.lift(&a), Prover::Eliminate));
        }
        Ok(Some(a)) => reduced.table.time(&a),
        // Too wide for tables; the integer program has no such limit.
        Err(_) => Seconds(0.0),
    };
    let inner = &reduced.table;
    let priced = lagrange::price_rows(inner, clock);
    let mut outcome = match &priced {
        Some(priced) if priced.bound > lagrange::slowest(inner) => {
            return Ok(SolveOutcome::infeasible(Prover::Lagrange, None));
        }
        Some(priced) => match met(inner, priced, limits) {
            Some(outcome) => outcome,
            None => window::solve(inner, IlpLibrary::MicroLp, limits, clock, priced)?,
        },
        None => {
            let known = Incumbent { bound, incumbent: None };
            ilp::close(inner, IlpLibrary::MicroLp, limits, clock, known)?
        }
    };
    outcome.assignment = outcome.assignment.map(|a| reduced.lift(&a));
    outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
    Ok(outcome)
}

/// The outcome when prices alone close the gap, or enough of it.
fn met(table: &CostTable, priced: &LagrangianBound, limits: &SolveLimits) -> Option<SolveOutcome> {
    let assignment = priced.assignment.clone()?;
    let gap = relative_gap(table.time(&assignment), priced.bound);
    if gap <= lagrange::ROUNDING {
        return Some(SolveOutcome::optimal(table, assignment, Prover::Lagrange));
    }
    let status = SolveStatus::GapLimit(limits.gap);
    (gap <= limits.gap).then(|| {
        SolveOutcome::stopped(status, table, Some(assignment), priced.bound, Prover::Lagrange)
    })
}
