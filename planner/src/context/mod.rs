//! One context (mesh, microbatch, ZeRO stage): from its lower bound to its best plan.
//!
//! | file | what it holds |
//! |---|---|
//! | `lower_bound` | bounds before any block is divided |
//! | `bounds`, `partition_bounds` | bounds from dividing the blocks within the memory of each stage |
//! | `solver` | the plan: partitioned, lowered, placed in memory, simulated |
//! | `progress` | best plan and proof so far |
//! | `warm_start` | first plans, found quickly |
//! | `min_memory` | the plan that needs the least memory |

mod bounds;
mod lower_bound;
mod min_memory;
mod partition_bounds;
mod progress;
mod solver;
mod warm_start;

pub use bounds::ContextBounds;
pub use lower_bound::{flops_bound, lower_bound};
pub use progress::ContextSolution;
pub use solver::ContextSolver;
