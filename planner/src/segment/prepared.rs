//! Segments and their cost tables, prepared for solves and sweeps.

use std::sync::Arc;

use narrows_cost_model::PricedSpace;
use narrows_plan::graph::Grouping;

use crate::solve::{EliminationOrder, Sweeper};

/// A segment's priced space, usable in every context with the same tensor axis and microbatch.
pub(super) struct PreparedSegment {
    pub priced: PricedSpace,
    /// `None` when the links are too far from a tree for elimination.
    pub order: Option<Arc<EliminationOrder>>,
}

/// The cost tables of a segment's groupings, ready for sweeps.
pub(super) type Sweepers = Arc<Vec<(Grouping, Arc<Sweeper>)>>;
