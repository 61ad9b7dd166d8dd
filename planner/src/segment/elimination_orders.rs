//! A cache of elimination orders, which depend on the links of a table alone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use narrows_cost_model::{PricedSpace, TableLink};
use narrows_plan::graph::Grouping;

use super::spec::SegmentSpec;
use crate::lock::lock;
use crate::solve::EliminationOrder;

/// Key of segments that may have equal links: any block shapes and tensor axes with the same grouping.
type LinkSetKey = (SegmentSpec, Grouping);

/// Elimination orders by sets of links. Block shapes and meshes with equal links share an order.
#[derive(Default)]
pub(super) struct EliminationOrders {
    orders: Mutex<HashMap<LinkSetKey, Vec<CachedOrder>>>,
}

/// Links with their order; `None` when they are too far from a tree for elimination.
type CachedOrder = (Vec<TableLink>, Option<Arc<EliminationOrder>>);

impl EliminationOrders {
    /// The order for the links of a priced space, computed once.
    pub(super) fn order(
        &self,
        key: LinkSetKey,
        priced: &PricedSpace,
    ) -> Option<Arc<EliminationOrder>> {
        let links = priced.links();
        let same = |cached: &&CachedOrder| cached.0 == links;
        if let Some((_, order)) = lock(&self.orders).entry(key).or_default().iter().find(same) {
            return order.clone();
        }
        let order = EliminationOrder::of_links(&priced.choice_counts(), links).ok().map(Arc::new);
        lock(&self.orders).entry(key).or_default().push((links.to_vec(), order.clone()));
        order
    }

    /// Declares links too far from a tree for elimination.
    #[cfg(test)]
    pub(crate) fn forbid(&self, key: LinkSetKey, links: Vec<TableLink>) {
        lock(&self.orders).insert(key, vec![(links, None)]);
    }
}
