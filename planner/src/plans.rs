//! Plans of elimination that microbatches and meshes share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use narrows_cost_model::segment::PricedSpace;
use narrows_cost_model::table::TableLink;
use narrows_plan::graph::Grouping;

use crate::segments::{SegmentSpec, lock};
use crate::solve::eliminate::EliminationOrder;

/// Which plans may have the same links: those for a part of any shape, grouped alike, with as many
/// devices on the tensor axis.
type LinkSetKey = (SegmentSpec, Grouping, u64);

/// Plans of elimination, one for each set of links: microbatches and meshes share them.
#[derive(Default)]
pub(crate) struct EliminationOrders {
    known: Mutex<HashMap<LinkSetKey, Vec<CachedOrder>>>,
}

/// A plan with the links it is for; none when they are too far from a tree.
type CachedOrder = (Vec<TableLink>, Option<Arc<EliminationOrder>>);

impl EliminationOrders {
    /// The plan for the links of a space; made once.
    pub fn plan(&self, key: LinkSetKey, priced: &PricedSpace) -> Option<Arc<EliminationOrder>> {
        let links = priced.links();
        let same = |known: &&CachedOrder| known.0 == links;
        if let Some((_, plan)) = lock(&self.known).entry(key).or_default().iter().find(same) {
            return plan.clone();
        }
        let plan = EliminationOrder::of_links(&priced.sizes(), links).ok().map(Arc::new);
        lock(&self.known).entry(key).or_default().push((links.to_vec(), plan.clone()));
        plan
    }
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use super::*;
    use crate::candidates::contexts;
    use crate::deadline::Deadline;
    use crate::divide::block_part;
    use crate::request::Request;
    use crate::segments::SegmentSolver;

    /// A grouping that cannot be swept is missing from the hull: what is found is no proof.
    #[test]
    fn a_grouping_too_wide_to_sweep_leaves_no_proof() {
        let model = presets::find("cola-60m").expect("a preset");
        let profile = profile::preset("a100-80gb").expect("a preset");
        let request = Request { tensor: Some(2), ..Request::new(model, profile, 2, 2, 1024) };
        let context = contexts(&request)[0];
        let swept = SegmentSolver::new(&request, Deadline::none());
        let part = block_part(0, swept.borders(&context)[0]);
        assert!(!swept.hull(part, &context, 1, None).is_empty() && !swept.has_unproven());

        let narrow = SegmentSolver::new(&request, Deadline::none());
        let grouping = swept.groupings(part)[0];
        let links = swept.prepared(part, grouping, &context).priced.links().to_vec();
        let key = (SegmentSpec { shape: 0, ..part }, grouping, context.tensor());
        lock(&narrow.plans.known).insert(key, vec![(links, None)]);
        assert!(!narrow.hull(part, &context, 1, None).is_empty(), "other groupings are left");
        assert!(narrow.has_unproven());
    }
}
