//! Exact solvers of cost tables.
//!
//! A solution of a [`CostTable`](narrows_cost_model::CostTable) has one choice `c(n)` for every node `n`:
//!
//! ```text
//! minimise    Σₙ time(n, c(n))
//! subject to  (c(from), c(to)) ∈ R(link)          for every link, a binary relation
//!             Σₙ bytes(row, n, c(n)) ≤ limit(row)  for every memory row
//! ```
//!
//! Without rows this is min-sum inference on a graph, which [`EliminationOrder`] solves by dynamic
//! programming in time exponential in the graph's width only; blocks of a transformer are nearly
//! trees. Rows couple all nodes. Multipliers on bytes (`time + λ·bytes`, `λ ≥ 0`; `lagrange`) keep the tree and
//! bound the optimum from below for every λ; over one row their minimisers are the vertices of the
//! lower convex hull of time against bytes (`hull`). An integer program (`ilp`) closes the gap that remains, over the
//! choices that these bounds do not exclude (`window`). [`solve_table`] runs these methods in order,
//! cheap proofs first.
//!
//! For blocks that share the memory of a stage, a second integer program (`column_ilp`) chooses among
//! columns, each a solution of one block.
//!
//! Every outcome has a status: `Optimal` and `Infeasible` are proven; limits are reported with the gap.

mod column_ilp;
mod constraint_graph;
mod elimination;
mod hull;
mod ilp;
mod join;
mod lagrange;
mod mean_program;
mod outcome;
mod presolve;
mod table_solver;
#[cfg(test)]
mod tests;
mod window;

use fixedbitset::FixedBitSet;

pub(crate) use column_ilp::{ColumnCounts, ColumnGroup, choose_columns};
pub(crate) use elimination::{EliminationOrder, MinCostAssignment};
pub(crate) use hull::{
    Hull, RowWeights, SharedCosts, SupportingLine, Vertex, VertexId, WeightedTable, chord,
};
pub(crate) use ilp::{LinearProgram, LinearRow, Relaxation};
pub(crate) use mean_program::{
    MEAN_TOLERANCE, MEANS_MAX, MeanDecisions, MeanMultipliers, MeanProgram,
};
pub(crate) use outcome::{SolveError, SolveLimits, SolveOutcome};
pub use outcome::{SolveMethod, TableSolves};
pub(crate) use table_solver::solve_table;

/// A full set over `0..size`.
fn full_set(size: usize) -> FixedBitSet {
    let mut set = FixedBitSet::with_capacity(size);
    set.insert_range(..);
    set
}
