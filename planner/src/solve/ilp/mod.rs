//! Integer programming: `program` formulates a table, `library` calls the library, and this file adds memory rows
//! as they are needed and verifies the solutions.
//!
//! The program starts without memory rows. While its optimum exceeds some rows, these are added and the program is
//! solved again; each optimum on the way is that of a relaxation, and a lower bound. Few rows ever bind, and a program
//! without the slack rows is several times faster. No result depends on the tolerances of the library: values are
//! rounded to an assignment, links and rows are checked in integers, and the time is summed from the table. An
//! assignment that exceeds a row of the program, by less than the row's rounding, is cut off by a cover inequality
//! with 0/1 coefficients. When the library fails numerically, the rows are rounded more coarsely and the program is
//! solved again.

mod library;
mod program;

use narrows_cost_model::{Assignment, CostTable, MemoryRowId};
use narrows_plan::Seconds;

use super::outcome::{SolveClock, SolveError, SolveLimits, SolveMethod, SolveOutcome, SolveStatus};
use program::TableProgram;

pub(super) use library::TIME_SCALE;
pub(super) use library::{IlpAnswer, IlpRequest, IlpTermination, bytes_unit, solve_program};
pub(crate) use library::{LinearProgram, LinearRow, Relaxation, solve_relaxation};

/// Bound and assignment of a table that are known before its integer program.
#[derive(Clone, Debug)]
pub(super) struct Incumbent {
    /// Lower bound on every assignment.
    pub bound: Seconds,
    /// An assignment that satisfies every link and row.
    pub assignment: Option<Assignment>,
}

impl Incumbent {
    /// Keeps an assignment that fits, if it is the fastest so far.
    pub(super) fn offer(&mut self, table: &CostTable, assignment: &[u32]) {
        let time = table.time(assignment);
        if self.assignment.as_ref().is_none_or(|best| time < table.time(best)) {
            self.assignment = Some(assignment.to_vec());
        }
    }
}

/// Grains of the memory rows, relative to their limits; the next one is tried when the library fails.
const GRAINS: [f64; 4] =
    [1.0 / (1 << 14) as f64, 1.0 / (1 << 12) as f64, 1.0 / (1 << 9) as f64, 1.0 / (1 << 6) as f64];

/// Closes the gap of a presolved table.
///
/// # Errors
/// The library failed with every grain.
pub(super) fn close(
    table: &CostTable,
    limits: &SolveLimits,
    clock: SolveClock,
    mut known: Incumbent,
) -> Result<SolveOutcome, SolveError> {
    let mut failure = None;
    for grain in GRAINS {
        match close_with_grain(table, limits, clock, &mut known, grain) {
            Err(SolveError::Library(reason)) => failure = Some(SolveError::Library(reason)),
            result => return result,
        }
    }
    Err(failure.expect("there is a grain, and it failed"))
}

/// [`close`] with one grain. Bounds and assignments stay in `known` when the library fails.
fn close_with_grain(
    table: &CostTable,
    limits: &SolveLimits,
    clock: SolveClock,
    known: &mut Incumbent,
    grain: f64,
) -> Result<SolveOutcome, SolveError> {
    let mut program = TableProgram::new(table, known.bound, grain);
    let mut present = vec![false; table.rows.len()];
    if let Some(incumbent) = &known.assignment {
        // The rows that an incumbent fills are likely to bind again.
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
        let start = known.assignment.as_ref().map(|a| program.values(a));
        let request = IlpRequest {
            program: program.linear(),
            start,
            time_limit: clock.remaining(),
            gap: limits.gap,
        };
        let (values, bound, termination) = match solve_program(request)? {
            IlpAnswer::Solved { values, bound, termination } => (values, bound, termination),
            IlpAnswer::Infeasible if known.assignment.is_some() => {
                return Err(SolveError::Library("a feasible program was called infeasible".into()));
            }
            IlpAnswer::Infeasible => return Ok(SolveOutcome::infeasible(SolveMethod::Ilp, None)),
            IlpAnswer::NoSolution => {
                let status = SolveStatus::TimeLimit(limits.time.unwrap_or_default());
                return Ok(stopped(status, table, known.clone()));
            }
        };
        let assignment = program.assignment(&values);
        if !table.is_consistent(&assignment) {
            return Err(SolveError::Library("the rounded solution breaks a link".into()));
        }
        known.bound = Seconds(known.bound.0.max(program.time(bound).0));
        let exceeded = exceeded_rows(table, &assignment);
        if exceeded.is_empty() {
            known.offer(table, &assignment);
        }
        match termination {
            IlpTermination::Time => {
                let status = SolveStatus::TimeLimit(limits.time.unwrap_or_default());
                return Ok(stopped(status, table, known.clone()));
            }
            IlpTermination::Optimal if exceeded.is_empty() => {
                return Ok(SolveOutcome::optimal(table, assignment, SolveMethod::Ilp));
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
    SolveOutcome::stopped(status, table, known.assignment, known.bound, SolveMethod::Ilp)
}

fn exceeded_rows(table: &CostTable, assignment: &[u32]) -> Vec<MemoryRowId> {
    let used = table.bytes(assignment).into_iter().zip(&table.rows).enumerate();
    used.filter(|(_, (used, row))| *used > row.limit).map(|(r, _)| MemoryRowId(r as u32)).collect()
}
