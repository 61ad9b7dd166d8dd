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

use super::ilp::{self, Backend, Known};
use super::lagrange::{self, Priced};
use super::outcome::relative_gap;
use super::presolve::presolve;
use super::{Clock, Limits, Outcome, Prover, SolveError, Solver, Status, eliminate, window};

/// [`exact()`] as a solver.
#[derive(Clone, Copy, Debug)]
pub struct Exact;

impl Solver for Exact {
    fn solve(&self, table: &CostTable, limits: &Limits) -> Result<Outcome, SolveError> {
        exact(table, limits)
    }
}

/// Solves a table by the cheapest method that proves its answer; [`Outcome::prover`] says which.
///
/// ```
/// use narrows_cost_model::table::{Choice, CostTable, Link, Node, NodeId};
/// use narrows_plan::Seconds;
/// use narrows_planner::solve::{Limits, exact};
///
/// let choice = |time| Choice { time: Seconds(time), bytes: vec![] };
/// let node = |times: &[f64]| Node {
///     name: String::new(),
///     choices: times.iter().map(|&t| choice(t)).collect(),
/// };
/// let table = CostTable {
///     nodes: vec![node(&[1.0, 2.0]), node(&[5.0, 1.0])],
///     // The first choices go together, and the second ones.
///     links: vec![Link {
///         from: NodeId(0),
///         to: NodeId(1),
///         demand: vec![Some(0), Some(1)],
///         offer: vec![0b01, 0b10],
///     }],
///     rows: vec![],
/// };
/// let outcome = exact(&table, &Limits::default()).unwrap();
/// assert_eq!(outcome.assignment, Some(vec![1, 1]));
/// assert_eq!(outcome.status.name(), "optimal");
/// ```
pub fn exact(table: &CostTable, limits: &Limits) -> Result<Outcome, SolveError> {
    let clock = Clock::start(limits);
    let reduced = match presolve(table) {
        Ok(reduced) => reduced,
        Err(conflict) => return Ok(Outcome::infeasible(Prover::Presolve, Some(conflict))),
    };
    let bound = match eliminate::fastest(&reduced.table) {
        Ok(None) => return Ok(Outcome::infeasible(Prover::Eliminate, None)),
        Ok(Some(a)) if reduced.table.fits(&a) => {
            return Ok(Outcome::optimal(table, reduced.lift(&a), Prover::Eliminate));
        }
        Ok(Some(a)) => reduced.table.time(&a),
        // Too wide for tables; the integer program has no such limit.
        Err(_) => Seconds(0.0),
    };
    let inner = &reduced.table;
    let priced = lagrange::price_rows(inner, clock);
    let mut outcome = match &priced {
        Some(priced) if priced.bound > lagrange::slowest(inner) => {
            return Ok(Outcome::infeasible(Prover::Lagrange, None));
        }
        Some(priced) => match met(inner, priced, limits) {
            Some(outcome) => outcome,
            None => window::solve(inner, Backend::MicroLp, limits, clock, priced)?,
        },
        None => {
            let known = Known { bound, incumbent: None };
            ilp::close(inner, Backend::MicroLp, limits, clock, known)?
        }
    };
    outcome.assignment = outcome.assignment.map(|a| reduced.lift(&a));
    outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
    Ok(outcome)
}

/// The outcome when prices alone close the gap, or enough of it.
fn met(table: &CostTable, priced: &Priced, limits: &Limits) -> Option<Outcome> {
    let assignment = priced.assignment.clone()?;
    let gap = relative_gap(table.time(&assignment), priced.bound);
    if gap <= lagrange::ROUNDING {
        return Some(Outcome::optimal(table, assignment, Prover::Lagrange));
    }
    let status = Status::GapLimit(limits.gap);
    (gap <= limits.gap)
        .then(|| Outcome::stopped(status, table, Some(assignment), priced.bound, Prover::Lagrange))
}
