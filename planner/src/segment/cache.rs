//! Tables and solutions of segments that searches share.
//!
//! | level | shared by searches with equal | contents |
//! |---|---|---|
//! | [`AlternativesCache`] | model, rules and groupings | alternatives, links, elimination orders |
//! | [`LoweredPlans`] | plan | arenas of its stages, its program |
//! | [`PricedCache`] | model, rules, groupings, executor, and profile without the links between nodes | priced tables, solutions without a memory limit, eliminations |
//!
//! Links between nodes are in the keys of single entries ([`PassKey`], [`StepKey`] in `keys.rs`), where a device group spans nodes:
//! other entries are shared by all bandwidths and numbers of devices.
//!
//! All entries are functions of their keys, so that a shared cache changes no result. Hulls, which are refined on
//! demand, stay with their search.

use std::sync::{Arc, Mutex};

use narrows_cost_model::{Executor, OpTimes, PassTimesMin, Prices, ShardingMin, StepPhases};
use narrows_plan::graph::Grouping;
use narrows_plan::model::Model;
use narrows_plan::program::StageSchedule;
use narrows_plan::strategy::{Rules, SegmentSpace};
use narrows_plan::{BucketSplit, Mesh};
use rustc_hash::FxHashMap;

use super::elimination_orders::EliminationOrders;
use super::keys::{AlternativesKey, ByteMultipliersKey, OpsKey, PassKey, StepKey, StepPhaseKey};
use super::pass_lines::PassLines;
use super::prepared::{PreparedSegment, WeightedTables};
use super::spec::{SegmentSpec, SolvedSegment};
use crate::lock::lock;
use crate::lowered_plans::LoweredPlans;
use crate::most_recent::MostRecent;
use crate::request::{GroupingRule, Request};

/// Bounds on the step phase of a segment, and on the time that sharded parameters add to its passes, over all of its choices.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepPhaseBounds {
    /// Least and largest time, in seconds.
    pub range: [f64; 2],
    /// Least and most reductions during the last backward pass, in seconds.
    pub overlapped: [f64; 2],
    /// Least time that reductions add beyond the least of other blocks, for a block that is the first of a stage, in seconds.
    pub first_block_min: f64,
    /// For each of [`BucketSplit::ALL`], least gather of the first bucket, and least time of all buckets beyond that of a whole
    /// one, for a block that is the first of a stage, in seconds.
    pub first_gathers_min: [[f64; 2]; BucketSplit::ALL.len()],
    /// Most gathers of updated weights during the next forward pass, in seconds.
    pub gathered_max: f64,
    /// Most of the collectives of sharded parameters beside a forward and a backward pass of one microbatch, in seconds.
    pub sharded_max: [f64; 2],
    /// Least additions to the passes.
    pub sharding_min: ShardingMin,
}

/// The fastest solution of a segment; `None` for a segment without legal decisions.
pub(super) type FastestSolution = Option<Arc<SolvedSegment>>;

/// Segments of one model under one set of rules.
#[derive(Default)]
pub(super) struct AlternativesCache {
    /// The first segment prepared with each set of alternatives.
    pub prepared: Mutex<FxHashMap<AlternativesKey, Arc<PreparedSegment>>>,
    /// The alternatives themselves, each in the first context that asked for them.
    pub spaces: Mutex<FxHashMap<AlternativesKey, SegmentSpace>>,
    pub elimination_orders: EliminationOrders,
    /// Least number of microbatches in flight in any chunk of a stage of an interleaved pipeline.
    pub interleaved_in_flight: Mutex<FxHashMap<StageSchedule, u64>>,
}

/// Prices with the links of a profile, and with faster ones.
#[derive(Clone)]
pub(super) struct LinkPrices {
    pub own: Arc<Prices>,
    /// [`Prices::with_fast_inter_node_links`].
    pub fast_inter_node: Option<Arc<Prices>>,
}

/// Lower bounds on the passes of one microbatch.
pub(super) type PassTimesCache = Mutex<FxHashMap<(SegmentSpec, PassKey), PassTimesMin>>;

/// Priced segments of one model, rules and executor, within the nodes of one profile.
#[derive(Default)]
pub(super) struct PricedCache {
    /// Prices by profile, number of devices, and whether there is a tensor axis.
    prices: Mutex<FxHashMap<(String, u64, bool), LinkPrices>>,
    pub prepared: Mutex<FxHashMap<(SegmentSpec, Grouping, PassKey), Arc<PreparedSegment>>>,
    pub op_times: Mutex<FxHashMap<(OpsKey, PassKey), OpTimes>>,
    pub step_phases: Mutex<FxHashMap<(OpsKey, StepPhaseKey), Arc<StepPhases>>>,
    pub step_phase_bounds: Mutex<FxHashMap<(SegmentSpec, StepPhaseKey), StepPhaseBounds>>,
    pub pass_times: PassTimesCache,
    pub pass_times_with_flows: PassTimesCache,
    /// Least passes of one microbatch through the whole model.
    pub passes: Mutex<FxHashMap<PassKey, Arc<PassLines>>>,
    pub fastest: Mutex<FxHashMap<(SegmentSpec, StepKey), FastestSolution>>,
    pub weighted_tables: Mutex<FxHashMap<(SegmentSpec, StepKey), WeightedTables>>,
    /// Prices of a byte at which the bounds of a stage were tight, for one microbatch: of a step, and of very many
    /// microbatches. Any multipliers give valid bounds, so that plans and proofs do not depend on these.
    pub byte_multipliers: Mutex<FxHashMap<ByteMultipliersKey, [f64; 2]>>,
}

impl PricedCache {
    /// Number of tables and solutions.
    fn len(&self) -> usize {
        lock(&self.prepared).len()
            + lock(&self.weighted_tables).len()
            + lock(&self.step_phases).len()
            + lock(&self.fastest).len()
    }

    /// The prices of the meshes of a request that have a tensor axis, or of those that have none.
    pub(super) fn prices(&self, request: &Request, has_tensor_axis: bool) -> LinkPrices {
        let key = (request.profile.fingerprint().to_owned(), request.devices, has_tensor_axis);
        let new = || {
            // Of a mesh, prices depend on the number of devices and on whether it has a tensor axis.
            let mut mesh = Mesh { tensor: 1, pipeline: 1, data: request.devices, context: 1 };
            if has_tensor_axis {
                (mesh.tensor, mesh.data) = (mesh.data, mesh.tensor);
            }
            let own = Prices::new(&request.profile, request.executor, &mesh);
            let fast_inter_node = own.with_fast_inter_node_links().map(Arc::new);
            LinkPrices { own: Arc::new(own), fast_inter_node }
        };
        lock(&self.prices).entry(key).or_insert_with(new).clone()
    }
}

/// Tables and solutions of segments, for several searches. Clones share their contents.
#[derive(Clone, Default)]
pub(crate) struct SegmentCache {
    models: Arc<Mutex<MostRecent<ModelEntry, MODELS_MAX>>>,
    lowered: Arc<LoweredPlans>,
}

struct ModelEntry {
    model: Model,
    rules: Rules,
    grouping: GroupingRule,
    alternatives: Arc<AlternativesCache>,
    priced: MostRecent<(PricesKey, Arc<PricedCache>), PRICED_MAX>,
}

/// Key of prices within nodes.
#[derive(Clone, PartialEq, Eq)]
struct PricesKey {
    profile: String,
    executor: Executor,
    /// Number of devices where the profile has measurements, which are of one number of devices.
    devices: Option<u64>,
}

/// Largest number of models and rules in a cache. A search under restricted rules uses up to five.
const MODELS_MAX: usize = 12;

/// Largest number of priced caches of one model.
const PRICED_MAX: usize = 8;

/// Tables and solutions from which on a priced cache is replaced by an empty one: about 500 MB. Half of a sweep's time
/// would be preparing tables again if a cache could not hold those of some dozens of points.
const TABLES_MAX: usize = 100_000;

impl SegmentCache {
    /// The lowered plans of all models.
    pub(super) fn lowered(&self) -> &LoweredPlans {
        &self.lowered
    }

    /// The caches for a request.
    pub(super) fn of_request(
        &self,
        request: &Request,
    ) -> (Arc<AlternativesCache>, Arc<PricedCache>) {
        let mut models = lock(&self.models);
        let is_same = |cached: &ModelEntry| {
            (cached.rules, cached.grouping) == (request.rules, request.grouping)
                && cached.model == request.model
        };
        let new = || ModelEntry {
            model: request.model.clone(),
            rules: request.rules,
            grouping: request.grouping,
            alternatives: Arc::default(),
            priced: MostRecent::default(),
        };
        let cached = models.find_or_insert_with(is_same, new);
        let key = PricesKey {
            profile: request.profile.fingerprint_within_nodes().to_owned(),
            executor: request.executor,
            devices: request.profile.file().measured.is_some().then_some(request.devices),
        };
        let new = || (key.clone(), Arc::default());
        cached.priced.retain(|(_, priced)| priced.len() < TABLES_MAX);
        let (_, priced) = cached.priced.find_or_insert_with(|(other, _)| *other == key, new);
        (cached.alternatives.clone(), priced.clone())
    }
}
