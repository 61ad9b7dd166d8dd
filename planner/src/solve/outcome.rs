//! How a solve ended: limits, statuses, bounds.

use std::time::{Duration, Instant};

use narrows_cost_model::{Assignment, CostTable, MemoryRowId, TableNodeId};
use narrows_plan::{Bytes, Seconds};

/// When to stop short of a proof.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SolveLimits {
    /// The most wall-clock time to spend, unlimited when absent.
    pub time: Option<Duration>,
    /// The relative gap `(time − bound) / time` that is good enough. Zero asks for a proof.
    pub gap: f64,
}

/// How a solve ended. A limit carries the value that fired.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SolveStatus {
    /// The assignment is proven fastest.
    Optimal,
    /// The assignment is within this relative gap of the fastest.
    GapLimit(f64),
    /// The time ran out. There may be an assignment.
    TimeLimit(Duration),
    /// No assignment exists, proven.
    Infeasible,
}

impl SolveStatus {
    /// The status as reports spell it.
    pub fn name(&self) -> &'static str {
        match self {
            SolveStatus::Optimal => "optimal",
            SolveStatus::GapLimit(_) => "gap_limit",
            SolveStatus::TimeLimit(_) => "time_limit",
            SolveStatus::Infeasible => "infeasible",
        }
    }
}

/// Which method ended the solve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prover {
    /// Constraint propagation alone.
    Presolve,
    /// Variable elimination: the fastest assignment happens to fit every row.
    Eliminate,
    /// The Lagrangian bound met an assignment.
    Lagrange,
    /// Branch and bound over the integer program.
    Ilp,
    /// Enumeration.
    Brute,
}

/// A reason why no assignment exists that propagation alone found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Every choice of the node contradicts the links and rows around it.
    Node(TableNodeId),
    /// Even the least that all nodes need exceeds the row's limit.
    Row {
        /// The row.
        row: MemoryRowId,
        /// The sum over the nodes of the least each can use.
        least: Bytes,
    },
}

/// What a solve found and proved.
#[derive(Clone, Debug, PartialEq)]
pub struct SolveOutcome {
    /// How it ended.
    pub status: SolveStatus,
    /// The best assignment known; it satisfies every link and row.
    pub assignment: Option<Assignment>,
    /// The objective of `assignment`, summed by [`CostTable::time`].
    pub time: Option<Seconds>,
    /// No assignment is faster than this. Infinite when infeasible.
    pub bound: Seconds,
    /// `(time − bound) / time`; infinite when the time ran out without an assignment.
    pub gap: f64,
    /// Which method had the last word.
    pub prover: Prover,
    /// Why no assignment exists, when propagation alone showed it.
    pub conflict: Option<Conflict>,
}

impl SolveOutcome {
    /// An assignment that is proven fastest.
    pub(crate) fn optimal(
        table: &CostTable,
        assignment: Assignment,
        prover: Prover,
    ) -> SolveOutcome {
        let time = table.time(&assignment);
        SolveOutcome {
            status: SolveStatus::Optimal,
            assignment: Some(assignment),
            time: Some(time),
            bound: time,
            gap: 0.0,
            prover,
            conflict: None,
        }
    }

    /// A proof that there is no assignment.
    pub(crate) fn infeasible(prover: Prover, conflict: Option<Conflict>) -> SolveOutcome {
        SolveOutcome {
            status: SolveStatus::Infeasible,
            assignment: None,
            time: None,
            bound: Seconds(f64::INFINITY),
            gap: 0.0,
            prover,
            conflict,
        }
    }

    /// An end short of a proof, with what is known by then.
    pub(crate) fn stopped(
        status: SolveStatus,
        table: &CostTable,
        assignment: Option<Assignment>,
        bound: Seconds,
        prover: Prover,
    ) -> SolveOutcome {
        let time = assignment.as_ref().map(|a| table.time(a));
        let bound = Seconds(time.map_or(bound.0, |t| bound.0.min(t.0)).max(0.0));
        let gap = time.map_or(f64::INFINITY, |t| relative_gap(t, bound));
        SolveOutcome { status, assignment, time, bound, gap, prover, conflict: None }
    }
}

/// `(time − bound) / time`, zero when both are.
pub(crate) fn relative_gap(time: Seconds, bound: Seconds) -> f64 {
    if time.0 <= bound.0 { 0.0 } else { (time.0 - bound.0) / time.0 }
}

/// The time left of a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SolveClock {
    started: Instant,
    limit: Option<Duration>,
}

impl SolveClock {
    /// Starts now.
    pub(crate) fn start(limits: &SolveLimits) -> SolveClock {
        SolveClock { started: Instant::now(), limit: limits.time }
    }

    /// What is left, `None` when unlimited.
    pub(crate) fn left(&self) -> Option<Duration> {
        self.limit.map(|limit| limit.saturating_sub(self.started.elapsed()))
    }

    /// The status to report once nothing is left.
    pub(crate) fn expired(&self) -> Option<SolveStatus> {
        let limit = self.limit?;
        (self.started.elapsed() >= limit).then_some(SolveStatus::TimeLimit(limit))
    }
}
