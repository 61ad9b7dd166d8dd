//! Integer programming: `program` states it, `backend` hands it to a library, and this file adds
//! the memory rows as they are needed and checks what comes back.
//!
//! The program starts without memory rows. While its optimum exceeds some, those are added and it
//! is solved again: each optimum along the way is a lower bound, since it solves a relaxation.
//! Few rows ever bind, and a program without the others is several times faster. The library's
//! tolerances decide nothing: values are rounded to an assignment, its links and rows are checked
//! in integers, and its time is summed from the table. An assignment that exceeds a row already
//! present, by less than the row's rounding, is cut off by a cover inequality in 0/1 coefficients.
//! When a library fails numerically, the rows are rounded more coarsely and it is tried again.

mod backend;
mod program;

use narrows_cost_model::{Assignment, CostTable, MemoryRowId};
use narrows_plan::Seconds;

pub use backend::IlpLibrary;

use super::presolve::presolve;
use super::{Prover, SolveClock, SolveError, SolveLimits, SolveOutcome, SolveStatus, Solver};
use backend::{IlpAnswer, IlpRequest, IlpTermination};
use program::IntegerProgram;

/// Presolve, then the integer program.
#[derive(Clone, Copy, Debug)]
pub struct Ilp(pub IlpLibrary);

impl Solver for Ilp {
    fn solve(&self, table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError> {
        let clock = SolveClock::start(limits);
        let reduced = match presolve(table) {
            Ok(reduced) => reduced,
            Err(conflict) => return Ok(SolveOutcome::infeasible(Prover::Presolve, Some(conflict))),
        };
        let known = Incumbent { bound: Seconds(0.0), incumbent: None };
        let mut outcome = close(&reduced.table, self.0, limits, clock, known)?;
        outcome.assignment = outcome.assignment.map(|a| reduced.lift(&a));
        outcome.time = outcome.assignment.as_ref().map(|a| table.time(a));
        Ok(outcome)
    }
}

/// What is known of a table before the integer program.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    /// No assignment is faster.
    pub bound: Seconds,
    /// An assignment that satisfies every link and row.
    pub incumbent: Option<Assignment>,
}

impl Incumbent {
    /// Keeps an assignment that fits when it is the fastest so far.
    pub fn offer(&mut self, table: &CostTable, assignment: &[u32]) {
        let time = table.time(assignment);
        if self.incumbent.as_ref().is_none_or(|best| time < table.time(best)) {
            self.incumbent = Some(assignment.to_vec());
        }
    }
}

/// Grains of the memory rows, relative to their limits: each is tried when the one before failed.
const GRAINS: [f64; 4] =
    [1.0 / (1 << 14) as f64, 1.0 / (1 << 12) as f64, 1.0 / (1 << 9) as f64, 1.0 / (1 << 6) as f64];

/// Closes the gap of a presolved table.
pub(super) fn close(
    table: &CostTable,
    backend: IlpLibrary,
    limits: &SolveLimits,
    clock: SolveClock,
    mut known: Incumbent,
) -> Result<SolveOutcome, SolveError> {
    let mut failure = None;
    for grain in GRAINS {
        match attempt(table, backend, limits, clock, &mut known, grain) {
            Err(SolveError::Backend(reason)) => failure = Some(SolveError::Backend(reason)),
            ended => return ended,
        }
    }
    Err(failure.expect("there is a grain, and it failed"))
}

/// [`close`] with one grain. What is learnt stays known when it fails.
fn attempt(
    table: &CostTable,
    backend: IlpLibrary,
    limits: &SolveLimits,
    clock: SolveClock,
    known: &mut Incumbent,
    grain: f64,
) -> Result<SolveOutcome, SolveError> {
    let mut program = IntegerProgram::new(table, known.bound, grain);
    let mut present = vec![false; table.rows.len()];
    if let Some(incumbent) = &known.incumbent {
        // Something bound before; the rows it fills are likely to bind again.
        let used = table.bytes(incumbent);
        for (r, (row, used)) in table.rows.iter().zip(used).enumerate() {
            if used.0 as f64 > 0.9 * row.limit.0 as f64 {
                program.add_memory(table, MemoryRowId(r as u32));
                present[r] = true;
            }
        }
    }
    loop {
        if let Some(status) = clock.expired() {
            return Ok(stopped(status, table, known.clone()));
        }
        let start = known.incumbent.as_ref().map(|a| program.values(a));
        let request =
            IlpRequest { program: &program, start, time_left: clock.left(), gap: limits.gap };
        let (values, bound, ended) = match backend.run(request)? {
            IlpAnswer::Solved { values, bound, ended } => (values, bound, ended),
            IlpAnswer::Infeasible if known.incumbent.is_some() => {
                return Err(SolveError::Backend("called infeasible what has a solution".into()));
            }
            IlpAnswer::Infeasible => return Ok(SolveOutcome::infeasible(Prover::Ilp, None)),
            IlpAnswer::Nothing => {
                let status = SolveStatus::TimeLimit(limits.time.unwrap_or_default());
                return Ok(stopped(status, table, known.clone()));
            }
        };
        let assignment = program.assignment(&values);
        if !table.is_consistent(&assignment) {
            return Err(SolveError::Backend("the rounded solution breaks a link".into()));
        }
        known.bound = Seconds(known.bound.0.max(program.time(bound).0));
        let exceeded = exceeded_rows(table, &assignment);
        if exceeded.is_empty() {
            known.offer(table, &assignment);
        }
        match ended {
            IlpTermination::Time => {
                let status = SolveStatus::TimeLimit(limits.time.unwrap_or_default());
                return Ok(stopped(status, table, known.clone()));
            }
            IlpTermination::Proven if exceeded.is_empty() => {
                return Ok(SolveOutcome::optimal(table, assignment, Prover::Ilp));
            }
            IlpTermination::Gap if exceeded.is_empty() => {
                return Ok(stopped(SolveStatus::GapLimit(limits.gap), table, known.clone()));
            }
            _ => {}
        }
        for row in exceeded {
            match std::mem::replace(&mut present[row.0 as usize], true) {
                false => program.add_memory(table, row),
                true => program.add_cover(table, row, &assignment),
            }
        }
    }
}

fn stopped(status: SolveStatus, table: &CostTable, known: Incumbent) -> SolveOutcome {
    SolveOutcome::stopped(status, table, known.incumbent, known.bound, Prover::Ilp)
}

fn exceeded_rows(table: &CostTable, assignment: &[u32]) -> Vec<MemoryRowId> {
    let used = table.bytes(assignment).into_iter().zip(&table.rows).enumerate();
    used.filter(|(_, (used, row))| *used > row.limit).map(|(r, _)| MemoryRowId(r as u32)).collect()
}
