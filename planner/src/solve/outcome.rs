//! Limits and outcomes of solvers.

use std::time::{Duration, Instant};

use narrows_cost_model::{Assignment, CostTable, MemoryRowId, TableNodeId};
use narrows_plan::{Bytes, Seconds};

/// Limits that end a solve before its proof.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SolveLimits {
    /// Wall time; unlimited when absent.
    pub time: Option<Duration>,
    /// Sufficient relative gap `(time − bound) / time`; zero asks for a proof.
    pub gap: f64,
}

/// Status of a solve; limits carry their value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SolveStatus {
    /// The assignment is proven fastest.
    Optimal,
    /// The assignment is within this relative gap of the fastest.
    GapLimit(f64),
    /// The time limit passed; there may be an assignment.
    TimeLimit(Duration),
    /// No assignment exists, by proof.
    Infeasible,
}

/// The method that ended a solve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SolveMethod {
    /// Constraint propagation alone.
    Presolve,
    /// Variable elimination: the fastest assignment fits every row.
    Elimination,
    /// The Lagrangian bound met an assignment.
    Lagrange,
    /// Branch and bound over the integer program.
    Ilp,
}

/// A proof by propagation alone that no assignment exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Every choice of the node contradicts the links and rows around it.
    Node(TableNodeId),
    /// The least bytes of all nodes together exceed the row's limit.
    Row {
        /// The row.
        row: MemoryRowId,
        /// Sum over the nodes of their least bytes.
        least: Bytes,
    },
}

/// Result of a solve.
#[derive(Clone, Debug, PartialEq)]
pub struct SolveOutcome {
    /// Status of the solve.
    pub status: SolveStatus,
    /// The best assignment; it satisfies every link and row.
    pub assignment: Option<Assignment>,
    /// The time of `assignment`, by [`CostTable::time`].
    pub time: Option<Seconds>,
    /// Lower bound on the time of every assignment; infinite when infeasible.
    pub bound: Seconds,
    /// `(time − bound) / time`; infinite when the time limit passed without an assignment.
    pub gap: f64,
    /// The method that ended the solve.
    pub method: SolveMethod,
    /// The conflict that propagation found, if any.
    pub conflict: Option<Conflict>,
}

/// The reason why a solver has no outcome. Another solver may have one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// The graph of links is too far from a tree.
    #[error("eliminating a node needs a table of {cells:.1e} cells, more than {max:.0e}")]
    TooWide {
        /// Cells of the table.
        cells: f64,
        /// Largest number of cells.
        max: f64,
    },
    /// The integer programming library failed, or returned a solution that does not verify.
    #[error("the integer program failed: {0}")]
    Library(String),
}

impl SolveOutcome {
    /// Whether the solve ended with a proof: optimal, or infeasible.
    pub fn is_proven(&self) -> bool {
        matches!(self.status, SolveStatus::Optimal | SolveStatus::Infeasible)
    }

    /// An assignment that is proven fastest.
    pub(super) fn optimal(
        table: &CostTable,
        assignment: Assignment,
        method: SolveMethod,
    ) -> SolveOutcome {
        let time = table.time(&assignment);
        SolveOutcome {
            status: SolveStatus::Optimal,
            assignment: Some(assignment),
            time: Some(time),
            bound: time,
            gap: 0.0,
            method,
            conflict: None,
        }
    }

    /// A proof that there is no assignment.
    pub(super) fn infeasible(method: SolveMethod, conflict: Option<Conflict>) -> SolveOutcome {
        SolveOutcome {
            status: SolveStatus::Infeasible,
            assignment: None,
            time: None,
            bound: Seconds(f64::INFINITY),
            gap: 0.0,
            method,
            conflict,
        }
    }

    /// The end of a solve without a proof, with the best assignment and bound.
    pub(super) fn stopped(
        status: SolveStatus,
        table: &CostTable,
        assignment: Option<Assignment>,
        bound: Seconds,
        method: SolveMethod,
    ) -> SolveOutcome {
        let time = assignment.as_ref().map(|a| table.time(a));
        let bound = Seconds(time.map_or(bound.0, |t| bound.0.min(t.0)).max(0.0));
        let gap = time.map_or(f64::INFINITY, |t| relative_gap(t, bound));
        SolveOutcome { status, assignment, time, bound, gap, method, conflict: None }
    }
}

/// `(time − bound) / time`; zero when both are.
pub(super) fn relative_gap(time: Seconds, bound: Seconds) -> f64 {
    if time.0 <= bound.0 { 0.0 } else { (time.0 - bound.0) / time.0 }
}

/// The clock of a time limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct SolveClock {
    started: Instant,
    limit: Option<Duration>,
}

impl SolveClock {
    /// A clock that starts now.
    pub(super) fn start(limits: &SolveLimits) -> SolveClock {
        SolveClock { started: Instant::now(), limit: limits.time }
    }

    /// Time left; `None` when unlimited.
    pub(super) fn remaining(&self) -> Option<Duration> {
        self.limit.map(|limit| limit.saturating_sub(self.started.elapsed()))
    }

    /// The status to report once no time is left.
    pub(super) fn expired(&self) -> Option<SolveStatus> {
        let limit = self.limit?;
        (self.started.elapsed() >= limit).then_some(SolveStatus::TimeLimit(limit))
    }
}

/// Number of solves of cost tables that one method ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSolves {
    /// Solves that ended with a proof: optimal, or infeasible.
    pub proven: u64,
    /// Solves that a limit ended.
    pub limited: u64,
}
