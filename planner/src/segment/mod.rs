//! Segments: the embedding, the blocks and the head, each solved once and cached.

mod elimination_orders;
mod solver;
mod spec;

pub use solver::{ASYMPTOTIC_MICROBATCHES, SegmentSolver};
pub use spec::{SegmentSpec, SolvedSegment};
