//! The front of time against the bytes of one row.
//!
//! The first point is the fastest assignment with that row unlimited. Each next one is the fastest
//! that uses less there than the last, by at least a step, until none exists. A point is therefore
//! proven fastest among all assignments within its own bytes; what a step skips is not on the list.

use std::ops::ControlFlow;
use std::time::Duration;

use narrows_cost_model::{Assignment, CostTable, MemoryRowId};
use narrows_plan::{Bytes, Seconds};

use super::{Prover, SolveError, SolveLimits, SolveOutcome, SolveStatus, Solver};

/// Which front to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct FrontRequest {
    /// The row whose limit is tightened. The other rows keep theirs.
    pub row: MemoryRowId,
    /// The least difference in bytes between two points; at least one.
    pub step_min: Bytes,
    /// The most points.
    pub points_max: usize,
    /// The most time for each point. A point that is not proven in time ends the front.
    pub time_per_point: Option<Duration>,
}

/// A proven point of the front.
#[derive(Clone, Debug, PartialEq)]
pub struct FrontPoint {
    /// Its time.
    pub time: Seconds,
    /// The bytes it uses in the row.
    pub bytes: Bytes,
    /// The assignment that attains both.
    pub assignment: Assignment,
    /// Which method proved it.
    pub prover: Prover,
}

/// Why a front has no further points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FrontEnd {
    /// No assignment uses less.
    Complete,
    /// The points allowed are used up.
    PointsMax,
    /// The caller stopped it.
    Stopped,
    /// A point was not proven in its time.
    Unproven(SolveStatus),
}

/// Points of falling bytes and rising time.
#[derive(Clone, Debug, PartialEq)]
pub struct Front {
    /// The points, the fastest first.
    pub points: Vec<FrontPoint>,
    /// Why there are no more.
    pub end: FrontEnd,
}

/// Computes a front with `solver`. `progress` sees each point as it is proven, and may stop the
/// front, at a deadline say. A point that a later one dominates (as fast, with less) is dropped
/// from the result, though `progress` has seen it.
pub fn front(
    table: &CostTable,
    request: &FrontRequest,
    solver: &dyn Solver,
    mut progress: impl FnMut(&FrontPoint) -> ControlFlow<()>,
) -> Result<Front, SolveError> {
    let row = request.row.0 as usize;
    let limits = SolveLimits { time: request.time_per_point, gap: 0.0 };
    let mut table = table.clone();
    table.rows[row].limit = Bytes(u64::MAX);
    let mut points: Vec<FrontPoint> = Vec::new();
    let end = loop {
        if points.len() >= request.points_max {
            break FrontEnd::PointsMax;
        }
        let outcome = solver.solve(&table, &limits)?;
        let (assignment, time) = match outcome {
            SolveOutcome {
                status: SolveStatus::Optimal,
                assignment: Some(a),
                time: Some(t),
                ..
            } => (a, t),
            SolveOutcome { status: SolveStatus::Infeasible, .. } => break FrontEnd::Complete,
            SolveOutcome { status, .. } => break FrontEnd::Unproven(status),
        };
        let bytes = table.bytes(&assignment)[row];
        let point = FrontPoint { time, bytes, assignment, prover: outcome.prover };
        let flow = progress(&point);
        points.pop_if(|last| last.time >= point.time);
        points.push(point);
        if flow.is_break() {
            break FrontEnd::Stopped;
        }
        match bytes.0.checked_sub(request.step_min.0.max(1)) {
            Some(limit) => table.rows[row].limit = Bytes(limit),
            None => break FrontEnd::Complete,
        }
    };
    Ok(Front { points, end })
}
