//! One context (mesh, microbatch, ZeRO stage): from its lower bound to its best plan.
//!
//! | file | contents |
//! |---|---|
//! | `average_stage` | memory and step phase of a stage of average size |
//! | `block_room` | memory of the blocks besides the working set of a backward pass |
//! | `lower_bound` | bounds before any block is divided |
//! | `memory_limited_bound` | bound of a step whose stages keep activations within their memory |
//! | `bounds`, `partition_bounds` | bounds from dividing the blocks within the memory of each stage |
//! | `collective_cases`, `collective_step`, `collective_bound` | bounds of a step that waits for gradient reductions or gathers of weights, without and within the memory |
//! | `collective_mean` | the same bounds from means of such steps |
//! | `branching` | bounds and plans from branching on the numbers of blocks of stages |
//! | `solver` | the plan: partitions, corrected until their memory fits |
//! | `last_blocks` | faster solutions for the last blocks of a plan that fits |
//! | `reserves` | bytes that stages keep free, corrected by their arenas |
//! | `sized_plan` | a plan whose arenas are known |
//! | `lowering` | arenas of a partition, and its plan, checked and simulated |
//! | `progress` | best plan and proof so far |
//! | `warm_start` | quick first plans |
//! | `pair_bound` | bounds of passes of two microbatches that count exposed collectives |
//! | `op_weights`, `op_weight_program`, `op_weight_search` | weights of their own for each op in these bounds, and the best of them |
//! | `pair_segments` | segments with other prices of passes of two microbatches |
//! | `pairs` | more plans with passes of two microbatches |
//! | `min_memory` | the plan that needs the least memory |

mod average_stage;
mod block_room;
#[cfg(test)]
mod bound_checks;
mod bounds;
mod branching;
mod collective_bound;
mod collective_cases;
mod collective_mean;
mod collective_step;
mod last_blocks;
mod lower_bound;
mod lowering;
mod memory_limited_bound;
mod min_memory;
mod op_weight_program;
mod op_weight_search;
mod op_weights;
mod pair_bound;
mod pair_segments;
mod pairs;
mod partition_bounds;
mod progress;
mod reserves;
mod sized_plan;
mod solver;
mod warm_start;

pub(crate) use average_stage::resident_bytes_min;
pub(crate) use bounds::ContextBounds;
pub(crate) use branching::{BranchedContext, BranchingTimes};
pub(crate) use lower_bound::{PassLinks, flops_bound};
pub(crate) use progress::ContextSolution;
pub(crate) use solver::ContextSolver;
