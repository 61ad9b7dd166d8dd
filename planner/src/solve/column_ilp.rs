//! Chooses one column for each of several groups of interchangeable blocks, within a byte budget.
//!
//! ```text
//! minimise    Σ cost(g, k)·y(g, k)
//! subject to  Σₖ y(g, k) = count(g)             for every group g
//!             Σ bytes(g, k)·y(g, k) ≤ budget
//!             y ≥ 0, integer
//! ```
//! Blocks of one shape are interchangeable, so a variable counts blocks instead of naming them: the
//! program is as small for a hundred layers as for one.

use super::ilp::{
    IlpAnswer, IlpLibrary, IlpRequest, IlpTermination, LinearProgram, LinearRow, TIME_SCALE,
    bytes_unit,
};
use super::outcome::{SolveError, SolveLimits};

/// Interchangeable blocks with the columns to choose from.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnGroup {
    /// Number of blocks.
    pub count: u64,
    /// Cost and bytes of each column.
    pub columns: Vec<(f64, u64)>,
}

/// The columns chosen for all groups.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnChoice {
    /// By group and column: number of blocks.
    pub counts: Vec<Vec<u64>>,
    /// Sum of the costs.
    pub cost: f64,
    /// Whether the choice is proven cheapest.
    pub is_optimal: bool,
}

/// Chooses columns; `start` holds counts to begin with. `None` when none fit.
///
/// # Errors
/// The library failed, or its rounded solution exceeds the budget.
pub fn choose_columns(
    groups: &[ColumnGroup],
    budget: u64,
    start: &[Vec<u64>],
    limits: &SolveLimits,
) -> Result<Option<ColumnChoice>, SolveError> {
    let cost_max = groups.iter().flat_map(|g| &g.columns).map(|(cost, _)| *cost);
    let scale = TIME_SCALE / cost_max.fold(f64::MIN_POSITIVE, f64::max);
    let unit = bytes_unit(budget);
    let mut program = LinearProgram::default();
    let mut memory = LinearRow { terms: vec![], is_equality: false, rhs: budget as f64 / unit };
    for group in groups {
        let first = program.costs.len();
        for (cost, bytes) in &group.columns {
            memory.terms.push((program.costs.len(), *bytes as f64 / unit));
            program.costs.push(cost * scale);
            program.upper_bounds.push(group.count as f64);
        }
        let terms = (first..program.costs.len()).map(|variable| (variable, 1.0)).collect();
        program.rows.push(LinearRow { terms, is_equality: true, rhs: group.count as f64 });
    }
    program.rows.push(memory);
    let request = IlpRequest {
        program: &program,
        start: Some(start.iter().flatten().map(|count| *count as f64).collect()),
        time_left: limits.time,
        gap: limits.gap,
    };
    let (values, end) = match IlpLibrary::IN_USE.run(request)? {
        IlpAnswer::Solved { values, end, .. } => (values, end),
        IlpAnswer::NoSolution | IlpAnswer::Infeasible => return Ok(None),
    };
    let mut values = values.into_iter().map(|value| value.round() as u64);
    let counts: Vec<Vec<u64>> =
        groups.iter().map(|g| values.by_ref().take(g.columns.len()).collect()).collect();
    let chosen =
        || groups.iter().zip(&counts).flat_map(|(group, counts)| group.columns.iter().zip(counts));
    let is_complete =
        groups.iter().zip(&counts).all(|(group, counts)| counts.iter().sum::<u64>() == group.count);
    let bytes: u128 = chosen().map(|((_, bytes), n)| u128::from(*bytes) * u128::from(*n)).sum();
    if !is_complete || bytes > u128::from(budget) {
        return Err(SolveError::Library("the rounded solution does not fit".into()));
    }
    let cost = chosen().map(|((cost, _), n)| cost * *n as f64).sum();
    Ok(Some(ColumnChoice { counts, cost, is_optimal: end == IlpTermination::Optimal }))
}
