//! The narrow waist of Narrows.
//!
//! Everything that both the planner and the runtime must agree on lives here: what a
//! [`Model`](model::Model) is, how a tensor may lie over the devices ([`Layout`]), which kernels a
//! device runs ([`Kernel`]), what a plan decides, and how a plan is lowered to a checked program.
//! Nothing in this crate reads a file, knows a price, or searches.

pub mod check;
pub mod decisions;
pub mod defect;
pub mod dtype;
pub mod emit;
pub mod graph;
pub mod json;
pub mod kernel;
pub mod layout;
pub mod lower;
pub mod mesh;
pub mod model;
pub mod program;
pub mod random;
pub mod strategy;
pub mod units;

pub use check::{CheckErrors, CheckedProgram};
pub use decisions::Plan;
pub use defect::{Defect, Defects};
pub use dtype::{DType, Precision};
pub use kernel::Kernel;
pub use layout::{Dim, EdgeLayout, Layout};
pub use mesh::{Axis, Mesh, Workload};
pub use units::{Bytes, Flops, Seconds};
