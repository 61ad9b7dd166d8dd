//! Segments: the embedding, the blocks and the head, each solved once and cached.

mod cache;
mod elimination_orders;
mod hulls;
mod prepared;
mod solver;
mod spec;

pub use cache::SearchCache;
pub(crate) use solver::ASYMPTOTIC_MICROBATCHES;
pub use solver::SegmentSolver;
pub use spec::{SegmentSpec, SolvedSegment};
