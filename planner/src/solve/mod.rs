//! Exact solvers for a priced search space.
//!
//! A [`CostTable`] asks for one choice `c(n)` of every node `n`:
//!
//! ```text
//! minimise    Σₙ time(n, c(n))
//! subject to  (c(from), c(to)) ∈ R(link)          for every link: a binary relation
//!             Σₙ bytes(row, n, c(n)) ≤ limit(row)  for every row
//! ```
//!
//! Without rows this is min-sum inference on a graph, and [`eliminate`] solves it by dynamic
//! programming in time exponential in the graph's width only; blocks of a transformer are nearly
//! trees. Rows couple all nodes, and then there are two ways: [`lagrange`] prices the bytes
//! (`time + λ·bytes`, `λ ≥ 0`), which leaves the tree intact and bounds the optimum from below
//! for every λ; [`ilp`] closes what gap remains, over the choices that those prices leave in
//! question (`window.rs`). [`presolve`] shrinks the table for both, and
//! [`brute`] is the oracle that shares no code with them. [`exact()`] is the way to solve a table;
//! [`front`] solves a sequence of them.
//!
//! Every answer says how it ended: a time limit with a gap is never called optimal, and
//! infeasible means proven.
//!
//! To add a solver: write one file with a [`Solver`] and add a line to [`SOLVERS`];
//! `eliminate.rs` ends with the smallest one.

mod bits;
pub mod brute;
pub mod eliminate;
pub mod exact;
pub mod front;
pub mod hull;
pub mod ilp;
mod join;
pub mod lagrange;
mod order;
mod outcome;
pub mod presolve;
mod window;

use narrows_cost_model::CostTable;
use narrows_plan::Seconds;

pub use eliminate::{EliminationOrder, MinCostAssignment};
pub use exact::exact;
pub use hull::{Hull, Sweeper};
pub use outcome::{Conflict, Prover, SolveLimits, SolveOutcome, SolveStatus};

pub(crate) use outcome::SolveClock;

/// A way of solving a [`CostTable`].
pub trait Solver: Sync {
    /// Solves `table` within `limits`, or says why this solver cannot.
    fn solve(&self, table: &CostTable, limits: &SolveLimits) -> Result<SolveOutcome, SolveError>;
}

/// All solvers by name. The first is the one to use unless there is a reason.
pub const SOLVERS: &[(&str, &dyn Solver)] = &[
    ("exact", &exact::Exact),
    ("ilp", &ilp::Ilp(ilp::IlpLibrary::MicroLp)),
    #[cfg(feature = "highs")]
    ("ilp-highs", &ilp::Ilp(ilp::IlpLibrary::Highs)),
    ("eliminate", &eliminate::Eliminate),
    ("brute", &brute::Brute),
];

/// Why a solver could not answer. The table may still be solvable by another one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// The enumeration would take too long.
    #[error("{combinations:.1e} combinations are more than the {max:.0e} that may be enumerated")]
    TooManyCombinations {
        /// The product of the numbers of choices.
        combinations: f64,
        /// The most this solver accepts.
        max: f64,
    },
    /// The graph of links is too far from a tree.
    #[error(
        "eliminating a node needs a table of {cells:.1e} cells, more than the {max:.0e} allowed"
    )]
    TooWide {
        /// Cells of the smallest table that does not fit.
        cells: f64,
        /// The most this solver accepts.
        max: f64,
    },
    /// The fastest assignment exceeds a memory row, and this solver does not see rows.
    #[error("the fastest assignment ({bound}) exceeds a memory row; only a bound is known")]
    RowsBind {
        /// No assignment is faster than this.
        bound: Seconds,
    },
    /// The integer programming library failed or returned something that does not verify.
    #[error("the integer program failed: {0}")]
    Backend(String),
}
