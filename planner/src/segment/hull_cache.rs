//! The hulls of segments that one search has refined.

use std::sync::{Arc, Mutex};

use narrows_cost_model::InFlight;
use narrows_plan::Context;
use rustc_hash::FxHashMap;

use super::spec::{SegmentSpec, SolvedSegment};
use crate::solve::{Hull, VertexId};

/// A segment in a context, and the microbatches in flight.
pub(super) type HullKey = (SegmentSpec, Context, InFlight);

/// The hulls of one search. They are refined on demand, so that their vertices depend on earlier calls.
#[derive(Default)]
pub(super) struct Hulls {
    pub by_key: Mutex<FxHashMap<HullKey, Arc<Mutex<Option<CachedHull>>>>>,
}

/// Solutions of a hull's vertices, by the vertex.
pub(super) type VertexSolutions = FxHashMap<VertexId, Arc<SolvedSegment>>;

/// A partly refined hull, with the solutions of its vertices.
pub(super) struct CachedHull {
    /// `None` for a segment without legal decisions.
    pub hull: Option<Hull>,
    pub solutions: VertexSolutions,
}
