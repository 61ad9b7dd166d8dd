//! Segments: the embedding, the blocks and the head, each solved once and cached.

mod bounds;
mod cache;
mod context_keys;
mod elimination_orders;
mod fastest;
mod hull_cache;
mod hulls;
mod keys;
mod model_layers;
mod pair_prices;
mod pass_lines;
mod pass_parts;
mod passes;
mod prepared;
mod solver;
mod spec;

pub(crate) use bounds::CheapestDecisions;
pub(crate) use cache::SegmentCache;
pub(crate) use fastest::ASYMPTOTIC_MICROBATCHES;
pub(crate) use keys::PassKey;
#[cfg(test)]
pub(crate) use pair_prices::PassWork;
pub(crate) use pair_prices::{ExposedShares, PairPrices, PairWeights};
pub(crate) use pass_lines::RelaxedPasses;
pub(crate) use pass_parts::{
    NodeOfPass, PASSES, PassCosts, PassNode, PassParts, PassTimes, Recomputation,
};
pub(crate) use passes::LeastPasses;
pub use solver::SegmentSolver;
pub use spec::{SegmentSpec, SolvedSegment};
