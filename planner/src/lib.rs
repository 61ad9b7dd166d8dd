//! Finds the best plan of a request under an objective, such as the step time, with a bound on its distance from the
//! optimum.
//!
//! [`search`] enumerates contexts (mesh, microbatch, ZeRO stage), bounds each from below, and solves the
//! promising ones: every segment by an exact solver over a priced cost table (`solve/`), the division
//! into stages by exact enumeration, memory by lowering. Published baselines are not treated specially; where memory binds and
//! the gap is large, their rules are some of the restricted rules under which plans are searched again.
//!
//! | folder or file | contents |
//! |---|---|
//! | `request` | the input |
//! | `objective` | the quantity that a search minimises, and the better of two plans |
//! | `search`, `bounded_context`, `restricted`, `proof`, `report` | the outer search over contexts, its status and its report |
//! | `device_counts` | the numbers of devices of a search for the least cost |
//! | `least_memory` | the search for the least memory |
//! | `search_cache`, `search_key`, `search_result` | results and caches that searches share |
//! | `context/` | one context: bounds, solution, warm start, smallest memory |
//! | `pipeline/` | blocks divided among stages |
//! | `segment/` | embedding, blocks and head, each solved once, with a cache that searches may share |
//! | `solve/` | exact solvers of cost tables |
//! | `lowered_plans` | arenas and programs of lowered plans, shared by searches |
//! | `plan_writer`, `predict` | the plan file, and its prediction |
//! | `alternatives`, `explain`, `diagnosis` | the alternatives to a plan; the causes of infeasibility |

/// The allocator of the command line, so that unit tests take no longer for allocations than searches do.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod alternatives;
mod bottlenecks;
mod bounded_context;
mod context;
mod context_axis;
mod context_queue;
mod context_solvers;
mod context_space;
mod deadline;
mod device_counts;
mod diagnosis;
mod explain;
mod feasible_plan;
mod infeasible;
mod least_memory;
mod least_time;
mod lock;
mod lowered_plans;
mod most_recent;
mod objective;
mod pipeline;
mod plan_writer;
mod predict;
mod proof;
mod report;
mod request;
mod restricted;
mod search;
mod search_cache;
mod search_key;
mod search_result;
mod segment;
#[cfg(test)]
mod slower_links;
mod solve;

pub use alternatives::baseline_requests;
pub use bottlenecks::{Bottleneck, MemoryBinding, Resource};
pub use context_space::contexts;
pub use deadline::Deadline;
pub use diagnosis::{Diagnosis, diagnose};
pub use explain::{Alternative, Explanation, MeshRow, explain};
pub use feasible_plan::{FeasiblePlan, ModelDecisions};
pub use infeasible::{Infeasible, MemoryEvidence};
pub use objective::Objective;
pub use pipeline::{
    AssignmentMethod, DivisionSearch, Partition, PruningCutoff, StageAssignment, StageBlocks,
    StageOverhead, StepSchedule,
};
pub use plan_writer::write_plan;
pub use predict::{
    BlockCollectives, CollectivePayloads, ExactStepPrediction, PredictError, Prediction, kernels,
    model_flops, predict, predict_program,
};
pub use report::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
pub use request::{
    GroupingRule, MemoryLimit, Request, RequestDefect, RequestDefects, RequestField,
};
pub use search::{search, search_until_interrupted, search_until_stopped, search_with_cache};
pub use search_cache::SearchCache;
pub use search_key::{SearchKey, equal_searches};
pub use search_result::SearchResult;
pub use segment::{SegmentSolver, SegmentSpec, SolvedSegment};
pub use solve::{SolveMethod, TableSolves};
