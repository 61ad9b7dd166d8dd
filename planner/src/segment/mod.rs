//! Segments: the embedding, the blocks and the head, each solved once and cached.

mod bounds;
mod cache;
mod elimination_orders;
mod hulls;
mod prepared;
mod solver;
mod solves;
mod spec;

pub(crate) use cache::SegmentCache;
pub use solver::SegmentSolver;
pub(crate) use solves::ASYMPTOTIC_MICROBATCHES;
pub use spec::{SegmentSpec, SolvedSegment};
