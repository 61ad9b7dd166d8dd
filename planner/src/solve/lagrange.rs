//! Lagrangian relaxation of the memory rows: multipliers on bytes.
//!
//! For multipliers `λ ≥ 0`, one for each row,
//!
//! ```text
//! L(λ) = min over consistent c of  Σ time + Σ_r λ_r·(bytes_r − limit_r)
//! ```
//!
//! is a lower bound on the optimum, and the minimum is an elimination. `bytes_r − limit_r` at the
//! minimiser is a supergradient of the concave `L`; following it raises the multiplier of full rows and
//! lowers that of slack rows. Minimisers that fit all rows are assignments to compare the bound with. On
//! a tree the best `L` equals the linear relaxation of the integer program.

use narrows_cost_model::{Assignment, CostTable, MemoryRowId};
use narrows_plan::{Bytes, Seconds};

use super::elimination::{EliminationOrder, MinCostAssignment, choice_times};
use super::outcome::{SolveClock, SolveError};

/// Largest number of eliminations.
const STEPS_MAX: usize = 100;
/// Steps without a better bound after which the step length is halved.
const PATIENCE: usize = 4;
/// A relative difference that sums of floats in different order can have.
pub(super) const ROUNDING: f64 = 1e-13;

/// Result of relaxing the memory rows of a table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LagrangianBound {
    /// Lower bound on assignments that fit the rows. Above the slowest assignment of all when none
    /// fits.
    pub bound: Seconds,
    /// The fastest minimiser that fits.
    pub assignment: Option<Assignment>,
    /// The multipliers that gave the bound, in seconds for each row's whole limit.
    pub multipliers: Vec<f64>,
}

impl LagrangianBound {
    /// For every choice, a lower bound on the assignments with this choice that fit the rows.
    pub(super) fn bounds_by_choice(&self, table: &CostTable) -> Result<Vec<Vec<f64>>, SolveError> {
        let costs =
            penalised_times(table, &choice_times(table), &self.multipliers, &row_limits(table));
        let multiplier_sum: f64 = self.multipliers.iter().sum();
        let of_node = |node: usize| -> Result<Vec<f64>, SolveError> {
            let marginals = EliminationOrder::rooted(table, Some(node))?.marginals(&costs);
            Ok(marginals.into_iter().map(|cost| cost - multiplier_sum).collect())
        };
        (0..table.nodes.len()).map(of_node).collect()
    }
}

fn row_limits(table: &CostTable) -> Vec<f64> {
    table.rows.iter().map(|row| row.limit.as_f64().max(1.0)).collect()
}

/// Maximises the Lagrangian bound. `None` when the table is too wide for elimination or has no
/// consistent assignment.
pub(super) fn maximise_bound(table: &CostTable, clock: SolveClock) -> Option<LagrangianBound> {
    let order = EliminationOrder::new(table).ok()?;
    let limits = row_limits(table);
    let slowest = slowest(table).0;
    let times = choice_times(table);
    // In units of each row's limit, so that multipliers are times.
    let mut multipliers = vec![0.0; limits.len()];
    let mut best =
        LagrangianBound { bound: Seconds(0.0), assignment: None, multipliers: multipliers.clone() };
    let mut best_time = f64::INFINITY;
    let mut step = 1.0;
    let mut stale = 0;
    for _ in 0..STEPS_MAX {
        let MinCostAssignment { cost, assignment } =
            order.cheapest(&penalised_times(table, &times, &multipliers, &limits))?;
        let bound = cost - multipliers.iter().sum::<f64>();
        if bound > best.bound.0 * (1.0 + 1e-9) {
            stale = 0;
        } else {
            stale += 1;
        }
        if bound > best.bound.0 {
            best.bound = Seconds(bound);
            best.multipliers.clone_from(&multipliers);
        }
        if bound > slowest {
            break;
        }
        let time = table.time(&assignment).0;
        if time < best_time && table.fits(&assignment) {
            best_time = time;
            best.assignment = Some(assignment.clone());
        }
        if stale > PATIENCE {
            step *= 0.5;
            stale = 0;
            multipliers.clone_from(&best.multipliers);
            continue;
        }
        if best_time <= best.bound.0 * (1.0 + ROUNDING) || step < 1e-3 || clock.expired().is_some()
        {
            break;
        }
        let excess: Vec<f64> = table
            .bytes(&assignment)
            .iter()
            .zip(&limits)
            .zip(&multipliers)
            .map(|((used, limit), multiplier)| match used.as_f64() / limit - 1.0 {
                over if over < 0.0 && *multiplier == 0.0 => 0.0,
                over => over,
            })
            .collect();
        let norm: f64 = excess.iter().map(|e| e * e).sum();
        if norm == 0.0 {
            break;
        }
        // Polyak's step towards the best known time, or towards an estimate.
        let target =
            if best_time.is_finite() { best_time } else { 1.1 * best.bound.0 + bound.abs() };
        let length = step * (target - bound).max(1e-6 * best.bound.0) / norm;
        multipliers.iter_mut().zip(&excess).for_each(|(p, e)| *p = (*p + length * e).max(0.0));
    }
    Some(best)
}

/// Upper bound on the time of every assignment, with room for rounding.
pub(super) fn slowest(table: &CostTable) -> Seconds {
    let times = choice_times(table);
    let total: f64 = times.iter().map(|times| times.iter().copied().fold(0.0, f64::max)).sum();
    Seconds(total * (1.0 + 1e-6))
}

fn penalised_times(
    table: &CostTable,
    times: &[Vec<f64>],
    multipliers: &[f64],
    limits: &[f64],
) -> Vec<Vec<f64>> {
    let mut costs = times.to_vec();
    for (node, costs) in table.nodes.iter().zip(&mut costs) {
        for (choice, cost) in node.choices.iter().zip(costs) {
            let penalty = |(row, bytes): &(MemoryRowId, Bytes)| {
                let row = row.0 as usize;
                multipliers[row] * bytes.as_f64() / limits[row]
            };
            *cost += choice.bytes.iter().map(penalty).sum::<f64>();
        }
    }
    costs
}
