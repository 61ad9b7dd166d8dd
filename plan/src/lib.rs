//! The narrow waist of Narrows.
//!
//! Everything that both the planner and the runtime must agree on lives here: what a
//! [`Model`](model::Model) is, how a tensor may lie over the devices ([`Layout`]), which kernels a
//! device runs ([`Kernel`]), what a plan decides, and how a plan is lowered to a checked program.
//! Nothing in this crate reads a file, knows a price, or searches.

pub mod emit;
pub mod graph;
pub mod json;
pub mod kernel;
pub mod model;
pub mod program;
pub mod random;
pub mod strategy;

mod check;
mod context;
mod decisions;
mod defect;
mod dtype;
mod extent;
mod layout;
mod lower;
mod mesh;
mod units;

pub use check::{CheckError, CheckErrors, CheckedProgram};
pub use context::{Context, Zero};
pub use decisions::{
    BlockDecisions, BlockRun, Executor, PLAN_FORMAT, Plan, PlanLayout, PlanSource, ResolvedBlock,
    ResolvedPlan, SegmentDecisions, SegmentPlan, StagePlan,
};
pub use defect::{Defect, Defects};
pub use dtype::{DType, Precision};
pub use kernel::Kernel;
pub use layout::{Dim, EdgeLayout, Layout, WeightSplit};
pub use lower::{lower, lower_stage};
pub use mesh::{Axis, DeviceGroup, Mesh, Workload};
pub use units::{Bytes, Flops, Seconds, short_number};
