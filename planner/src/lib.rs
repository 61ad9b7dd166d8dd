//! Finds the fastest plan and proves it.
//!
//! [`search`](search::search) enumerates meshes, bounds each from below, and solves the promising
//! ones: every segment by an exact solver over a priced cost table ([`solve`]), stages by exact
//! division ([`stages`]), memory by lowering. Nothing here knows a baseline by name.

pub mod assemble;
mod bound;
pub mod candidates;
pub mod causes;
pub mod deadline;
pub mod divide;
mod ends;
pub mod explain;
pub mod extras;
pub mod fit;
mod impossible;
mod opening;
mod outlook;
mod plans;
pub mod predict;
pub mod request;
pub mod search;
pub mod segments;
mod smallest;
pub mod solve;
pub mod stages;
mod tried;
mod verdict;

pub use request::{GroupingRule, MemoryLimit, Request};
pub use search::search;
