//! Chooses one column for each of several groups of interchangeable blocks, within a byte budget.
//!
//! ```text
//! minimise    Σ cost(g, k)·y(g, k)
//! subject to  Σₖ y(g, k) = count(g)             for every group g
//!             Σ bytes(g, k)·y(g, k) ≤ budget
//!             y ≥ 0, integer
//! ```
//! Blocks of one shape are interchangeable, so variables count blocks: the program has the same size for a
//! hundred layers as for one.

use super::ilp::{
    IlpAnswer, IlpRequest, LinearProgram, LinearRow, TIME_SCALE, bytes_unit, solve_program,
};
use super::outcome::{SolveError, SolveLimits};

/// Interchangeable blocks with the columns to choose from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ColumnGroup {
    /// Number of blocks.
    pub count: u64,
    /// Cost and bytes of each column.
    pub columns: Vec<(f64, u64)>,
}

/// Number of blocks by group and column.
pub(crate) type ColumnCounts = Vec<Vec<u64>>;

/// Chooses columns, starting from the counts in `start`: the cheapest, unless a limit ends the program first. `None`
/// when no columns fit, or none were found in time.
///
/// # Errors
/// The library failed, or its rounded solution exceeds the budget.
pub(crate) fn choose_columns(
    groups: &[ColumnGroup],
    budget: u64,
    start: &ColumnCounts,
    limits: &SolveLimits,
) -> Result<Option<ColumnCounts>, SolveError> {
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
        time_limit: limits.time,
        gap: limits.gap,
    };
    let values = match solve_program(request)? {
        IlpAnswer::Solved { values, .. } => values,
        IlpAnswer::NoSolution | IlpAnswer::Infeasible => return Ok(None),
    };
    let mut values = values.into_iter().map(|value| value.round() as u64);
    let counts: ColumnCounts =
        groups.iter().map(|g| values.by_ref().take(g.columns.len()).collect()).collect();
    let chosen =
        groups.iter().zip(&counts).flat_map(|(group, counts)| group.columns.iter().zip(counts));
    let is_complete =
        groups.iter().zip(&counts).all(|(group, counts)| counts.iter().sum::<u64>() == group.count);
    let bytes: u128 = chosen.map(|((_, bytes), n)| u128::from(*bytes) * u128::from(*n)).sum();
    if !is_complete || bytes > u128::from(budget) {
        return Err(SolveError::Library("the rounded solution does not fit".into()));
    }
    Ok(Some(counts))
}

#[cfg(test)]
mod tests {
    use narrows_plan::random::SplitMix64;

    use super::*;

    /// The smallest cost of columns for groups of blocks, each with its number of blocks, by enumeration; `None`
    /// when none fit.
    fn cheapest_by_enumeration(groups: &[(u64, &[(f64, u64)])], budget: u64) -> Option<f64> {
        let Some(((blocks, columns), others)) = groups.split_first() else { return Some(0.0) };
        let Some(((cost, bytes), columns)) = columns.split_first() else {
            return if *blocks == 0 { cheapest_by_enumeration(others, budget) } else { None };
        };
        let with_count = |count: u64| {
            let budget = budget.checked_sub(bytes * count)?;
            let groups = [&[(blocks - count, columns)], others].concat();
            Some(cost * count as f64 + cheapest_by_enumeration(&groups, budget)?)
        };
        (0..=*blocks).filter_map(with_count).min_by(f64::total_cmp)
    }

    #[test]
    fn columns_are_chosen_as_cheaply_as_by_enumeration() {
        for seed in 0..700 {
            let mut random = SplitMix64::new(seed);
            let mut below = |end: u64| random.next_u64() % end;
            let scale = [1, 1 << 20, 1 << 33][below(3) as usize];
            let mut groups = vec![];
            for _ in 0..1 + below(2) {
                let (count, columns) = (1 + below(5), 1 + below(3));
                let mut column = |_| ((1 + below(999)) as f64 * 1e-3, below(1000) * scale);
                groups
                    .push(ColumnGroup { count, columns: (0..columns).map(&mut column).collect() });
            }
            let most: u64 = groups
                .iter()
                .map(|g| g.count * g.columns.iter().map(|(_, bytes)| *bytes).max().unwrap())
                .sum();
            let budget = (most as f64 * below(1200) as f64 / 1000.0) as u64;
            // The start is the smallest column of each group.
            let start: ColumnCounts = groups
                .iter()
                .map(|g| {
                    let smallest = (0..g.columns.len()).min_by_key(|k| g.columns[*k].1).unwrap();
                    (0..g.columns.len()).map(|k| if k == smallest { g.count } else { 0 }).collect()
                })
                .collect();
            let counts = choose_columns(&groups, budget, &start, &SolveLimits::default()).unwrap();
            let cost = counts.map(|counts| {
                let chosen =
                    groups.iter().zip(&counts).flat_map(|(g, counts)| g.columns.iter().zip(counts));
                chosen.map(|((cost, _), n)| cost * *n as f64).sum::<f64>()
            });
            let enumerated: Vec<_> = groups.iter().map(|g| (g.count, &g.columns[..])).collect();
            let expected = cheapest_by_enumeration(&enumerated, budget);
            assert_eq!(cost.is_some(), expected.is_some(), "seed {seed}");
            if let (Some(cost), Some(expected)) = (cost, expected) {
                assert!(
                    (cost - expected).abs() <= 1e-9 * expected,
                    "seed {seed}: {cost} {expected}"
                );
            }
        }
    }
}
