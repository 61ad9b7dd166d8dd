//! Finds the fastest plan and proves it.
//!
//! [`search`] enumerates contexts (mesh, microbatch, ZeRO stage), bounds each from below, and solves the
//! promising ones: every segment by an exact solver over a priced cost table ([`solve`]), the division
//! into stages by exact enumeration, memory by lowering. No baseline is special to it.
//!
//! | folder or file | what it holds |
//! |---|---|
//! | `request` | the input |
//! | `search`, `proof`, `report` | the outer search over contexts, and how it ended |
//! | `context/` | one context: bounds, solution, warm start, least memory |
//! | `pipeline/` | blocks divided among stages |
//! | `segment/` | embedding, blocks and head, each solved once |
//! | [`solve`] | solvers that see numbers only |
//! | `plan_writer`, `predict` | the plan file, and its prediction |
//! | `explain`, `diagnosis` | why this plan, or why none |

mod context;
mod contexts;
mod deadline;
mod diagnosis;
mod explain;
mod feasible_plan;
mod infeasible;
mod pipeline;
mod plan_writer;
mod predict;
mod proof;
mod report;
mod request;
mod search;
mod segment;
pub mod solve;

pub use contexts::contexts;
pub use deadline::Deadline;
pub use diagnosis::causes;
pub use explain::{
    Alternative, Bottleneck, Explanation, MemoryBinding, MeshRow, Resource, explain, summary,
};
pub use feasible_plan::{FeasiblePlan, ModelDecisions};
pub use infeasible::{Infeasible, MemoryEvidence};
pub use pipeline::{
    AssignmentMethod, Partition, PruningCutoff, StageAssignment, StageOverhead, division_bound,
    undominated_partitions,
};
pub use plan_writer::write_plan;
pub use predict::{
    BlockCollectives, PredictError, Prediction, kernels, model_flops, predict, predict_program,
};
pub use report::{ContextOutcome, ContextReport, SearchReport, SearchStatus};
pub use request::{
    GroupingRule, MemoryLimit, Request, RequestDefect, RequestDefects, RequestField,
};
pub use search::{SearchResult, search, search_until};
pub use segment::{SegmentSolver, SegmentSpec, SolvedSegment};
