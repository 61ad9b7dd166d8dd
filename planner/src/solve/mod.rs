//! Exact solvers for a priced search space. They see numbers only.
//!
//! A [`CostTable`](narrows_cost_model::CostTable) asks for one choice `c(n)` of every node `n`:
//!
//! ```text
//! minimise    Σₙ time(n, c(n))
//! subject to  (c(from), c(to)) ∈ R(link)          for every link, a binary relation
//!             Σₙ bytes(row, n, c(n)) ≤ limit(row)  for every memory row
//! ```
//!
//! Without rows this is min-sum inference on a graph, which [`EliminationOrder`] solves by dynamic
//! programming in time exponential in the graph's width only; blocks of a transformer are nearly
//! trees. Rows couple all nodes. Prices on bytes (`time + λ·bytes`, `λ ≥ 0`; `lagrange`) keep the tree and
//! bound the optimum from below for every λ; over one row their minimisers are the vertices of the
//! [`Hull`] of time against bytes. An integer program (`ilp`) closes the gap that remains, over the
//! choices that the prices leave in question (`window`). [`solve_table`] runs these in order, cheap
//! proofs first.
//!
//! Blocks that share the memory of a stage are chosen from columns, each a solution of one block, by a
//! second integer program ([`choose_columns`]).
//!
//! Every outcome states how it ended: a time limit with a gap is never called optimal, and infeasible
//! means proven.

mod column_ilp;
mod constraint_graph;
mod elimination;
mod hull;
mod ilp;
mod join;
mod lagrange;
mod outcome;
mod presolve;
mod table_solver;
mod window;

use fixedbitset::FixedBitSet;

pub use column_ilp::{ColumnChoice, ColumnGroup, choose_columns};
pub use elimination::{EliminationOrder, MinCostAssignment, choice_times};
pub use hull::{Hull, Sweeper, Vertex};
pub use ilp::IlpLibrary;
pub use outcome::{Conflict, Prover, SolveError, SolveLimits, SolveOutcome, SolveStatus};
pub use presolve::{ReducedTable, presolve};
pub use table_solver::{solve_by_ilp, solve_table};

/// A full set over `0..size`.
fn full_set(size: usize) -> FixedBitSet {
    let mut set = FixedBitSet::with_capacity(size);
    set.insert_range(..);
    set
}
