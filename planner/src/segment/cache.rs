//! Tables and solutions of segments that searches share.
//!
//! | level | shared by searches with equal | contents |
//! |---|---|---|
//! | [`AlternativesCache`] | model, rules and groupings | alternatives, links, elimination orders |
//! | [`ArenaCache`] | plan | arenas of its stages |
//! | [`PricedCache`] | model, rules, groupings, profile, executor and devices | priced tables, solutions without a memory limit |
//!
//! All entries are functions of their keys, so that a shared cache changes no result. Hulls, which are refined on
//! demand, stay with their search.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use narrows_cost_model::{Executor, OpTimes, Prices, StepPhases};
use narrows_plan::graph::{Grouping, SegmentKind};
use narrows_plan::model::Model;
use narrows_plan::strategy::{Rules, TiedWeightLayout};
use narrows_plan::{Context, Dim, Mesh};

use super::elimination_orders::{EliminationOrders, lock};
use super::prepared::{PreparedSegment, Sweepers};
use super::spec::{SegmentSpec, SolvedSegment};
use crate::arenas::ArenaCache;
use crate::request::{GroupingRule, Request};

/// All that the alternatives of a segment depend on besides model and rules: its grouping, the tensor axis, and the dim
/// on which tokens may be sharded.
pub(super) type AlternativesKey = (SegmentSpec, Grouping, u64, Option<Dim>);

/// All that the times of a segment's ops depend on: its spec without the boundary layout, its grouping and the context.
pub(super) type OpTimesKey = (SegmentKind, usize, Option<TiedWeightLayout>, Grouping, Context);

/// The fastest solution of a segment; `None` for a segment without legal decisions.
pub(super) type FastestSolution = Option<Arc<SolvedSegment>>;

/// Segments of one model under one set of rules.
#[derive(Default)]
pub(super) struct AlternativesCache {
    /// The first segment prepared with each set of alternatives.
    pub prepared: Mutex<HashMap<AlternativesKey, Arc<PreparedSegment>>>,
    pub elimination_orders: EliminationOrders,
}

/// Priced segments of one model, rules, profile, executor and number of devices.
pub(super) struct PricedCache {
    /// Prices of all meshes with this number of devices.
    pub prices: Prices,
    pub prepared: Mutex<HashMap<(SegmentSpec, Grouping, Context), Arc<PreparedSegment>>>,
    pub op_times: Mutex<HashMap<OpTimesKey, OpTimes>>,
    pub step_phases: Mutex<HashMap<OpTimesKey, Arc<StepPhases>>>,
    pub step_phase_ranges: Mutex<HashMap<(SegmentSpec, Context), [f64; 2]>>,
    pub fastest: Mutex<HashMap<(SegmentSpec, Context), FastestSolution>>,
    pub sweepers: Mutex<HashMap<(SegmentSpec, Context), Sweepers>>,
}

impl PricedCache {
    /// Number of tables and solutions.
    fn len(&self) -> usize {
        lock(&self.prepared).len()
            + lock(&self.sweepers).len()
            + lock(&self.step_phases).len()
            + lock(&self.fastest).len()
    }

    fn new(request: &Request) -> PricedCache {
        // Prices depend on the number of devices alone.
        let mesh = Mesh { tensor: 1, pipeline: 1, data: request.devices };
        PricedCache {
            prices: Prices::new(&request.profile, request.executor, &mesh),
            prepared: Mutex::default(),
            op_times: Mutex::default(),
            step_phases: Mutex::default(),
            step_phase_ranges: Mutex::default(),
            fastest: Mutex::default(),
            sweepers: Mutex::default(),
        }
    }
}

/// Tables and solutions of segments, for several searches. Searches on any threads may share one cache; their results
/// are those of searches without one.
/// Clones share their contents.
#[derive(Clone, Default)]
pub struct SearchCache {
    /// The most recently used first.
    models: Arc<Mutex<Vec<CachedModel>>>,
    arenas: Arc<ArenaCache>,
}

struct CachedModel {
    model: Model,
    rules: Rules,
    grouping: GroupingRule,
    alternatives: Arc<AlternativesCache>,
    /// The most recently used first.
    priced: Vec<(PricesKey, Arc<PricedCache>)>,
}

#[derive(Clone, PartialEq, Eq)]
struct PricesKey {
    profile: String,
    executor: Executor,
    devices: u64,
}

/// Largest number of models and rules in a cache. A search under restricted rules uses up to five.
const MODELS_MAX: usize = 12;

/// Largest number of priced caches of one model.
const PRICED_MAX: usize = 8;

/// Tables and solutions from which on a priced cache is replaced by an empty one: about 100 MB.
const TABLES_MAX: usize = 20_000;

impl SearchCache {
    /// The arenas of all plans.
    pub(super) fn arenas(&self) -> &ArenaCache {
        &self.arenas
    }

    /// The caches for a request.
    pub(super) fn of_request(
        &self,
        request: &Request,
    ) -> (Arc<AlternativesCache>, Arc<PricedCache>) {
        let mut models = lock(&self.models);
        let is_same = |cached: &CachedModel| {
            (cached.rules, cached.grouping) == (request.rules, request.grouping)
                && cached.model == request.model
        };
        let new = || CachedModel {
            model: request.model.clone(),
            rules: request.rules,
            grouping: request.grouping,
            alternatives: Arc::default(),
            priced: vec![],
        };
        let cached = most_recent(&mut models, MODELS_MAX, is_same, new);
        let key = PricesKey {
            profile: request.profile.fingerprint().to_owned(),
            executor: request.executor,
            devices: request.devices,
        };
        let new = || (key.clone(), Arc::new(PricedCache::new(request)));
        cached.priced.retain(|(_, priced)| priced.len() < TABLES_MAX);
        let (_, priced) =
            most_recent(&mut cached.priced, PRICED_MAX, |(other, _)| *other == key, new);
        (cached.alternatives.clone(), priced.clone())
    }
}

/// The entry that satisfies `is_same`, moved to the front, or a new one. Keeps the `max` entries used last.
fn most_recent<T>(
    entries: &mut Vec<T>,
    max: usize,
    is_same: impl Fn(&T) -> bool,
    new: impl FnOnce() -> T,
) -> &mut T {
    let entry = match entries.iter().position(is_same) {
        Some(index) => entries.remove(index),
        None => new(),
    };
    entries.truncate(max - 1);
    entries.insert(0, entry);
    &mut entries[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_unused_longest_is_dropped() {
        let mut entries: Vec<usize> = vec![];
        for value in (0..PRICED_MAX).chain([0, PRICED_MAX]) {
            assert_eq!(
                *most_recent(&mut entries, PRICED_MAX, |entry| *entry == value, || value),
                value
            );
        }
        assert_eq!(entries.len(), PRICED_MAX);
        assert!(entries.contains(&0) && !entries.contains(&1));
    }
}
