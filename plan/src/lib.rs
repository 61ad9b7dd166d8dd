//! Data types and checks shared by the planner and the runtime.
//!
//! They are models ([`Model`](model::Model)), layouts of tensors over devices
//! ([`Layout`]), kernels ([`Kernel`]), the search space of strategies, plans ([`Plan`]), and their
//! lowering to checked programs ([`CheckedProgram`]). The crate has no IO, no prices and no search.

pub mod counts;
pub mod emit;
pub mod graph;
pub mod json;
pub mod kernel;
pub mod model;
pub mod program;
pub mod random;
pub mod ring;
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
mod printable;
mod units;

pub use check::{CheckError, CheckErrors, CheckedProgram, GEMM_SIZE_MAX};
pub use context::{BucketSplit, Context, ContextAttention, PipelineSchedule, Zero};
pub use decisions::{
    BlockDecisions, BlockRun, Executor, PLAN_FORMAT, Plan, PlanLayout, PlanSource, ResolvedBlock,
    ResolvedPlan, SegmentDecisions, SegmentPlan, StagePlan,
};
pub use defect::{Defect, Defects};
pub use dtype::{DType, GradReduceDtype, Precision};
pub use kernel::Kernel;
pub use layout::{Dim, EdgeLayout, Layout, WeightSplit};
pub use lower::{lower, lower_within};
pub use mesh::{Axis, DeviceGroup, Mesh, Workload};
pub use printable::{is_display_control, printable};
pub use units::{Bytes, Flops, Seconds, short_number};
