//! Solves segments, once each: blocks of equal shape share a solve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use narrows_cost_model::Prices;
use narrows_cost_model::memory::{SegmentBytes, segment_bytes};
use narrows_cost_model::segment::{PricedSpace, SegmentTime, decode};
use narrows_cost_model::table::RowId;
use narrows_plan::graph::{
    Grouping, Segment, SegmentKind, block_segment, embedding_segment, head_segment,
};
use narrows_plan::model::{Block, Model};
use narrows_plan::strategy::{Context, SegmentChoice, SegmentSpace, TiedWeight, Zero};
use narrows_plan::{EdgeLayout, Kernel};
use rayon::prelude::*;

use crate::request::Request;
use crate::solve::hull::hull;
use crate::solve::{Limits, Status, exact};

/// A segment's decisions with what they cost.
#[derive(Clone, Debug)]
pub struct Solved {
    /// Which factors are grouped.
    pub grouping: Grouping,
    /// The decisions.
    pub choice: SegmentChoice,
    /// The op graph they are for.
    pub segment: Arc<Segment>,
    /// Times of one instance.
    pub time: SegmentTime,
    /// Bytes of one instance.
    pub bytes: SegmentBytes,
}

/// Which segment, and how its ends are fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Embedding, block or head.
    pub kind: SegmentKind,
    /// For blocks: which shape.
    pub shape: usize,
    /// Layouts of the hidden state at its ends.
    pub border: EdgeLayout,
    /// For tied embeddings and heads: how the weight lies.
    pub tied_weight: Option<TiedWeight>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    part: Part,
    context: Context,
    in_flight: Option<u64>,
}

/// Solves and remembers.
pub struct Segments<'a> {
    request: &'a Request,
    shapes: Vec<Block>,
    layer_shapes: Vec<usize>,
    fastest: Mutex<HashMap<Key, Option<Arc<Solved>>>>,
    spaces: Mutex<HashMap<(Part, Grouping, Context), Arc<PricedSpace>>>,
    hulls: Mutex<HashMap<Key, Arc<Vec<Arc<Solved>>>>>,
    deadline: Option<Instant>,
    solves: std::sync::atomic::AtomicU64,
    unproven: std::sync::atomic::AtomicBool,
}

impl<'a> Segments<'a> {
    /// For one request.
    pub fn new(request: &'a Request, deadline: Option<Instant>) -> Self {
        let mut shapes: Vec<Block> = vec![];
        let layer_shapes = request
            .model
            .blocks
            .iter()
            .map(|block| {
                shapes.iter().position(|shape| shape == block).unwrap_or_else(|| {
                    shapes.push(block.clone());
                    shapes.len() - 1
                })
            })
            .collect();
        Segments {
            request,
            shapes,
            layer_shapes,
            fastest: Mutex::default(),
            spaces: Mutex::default(),
            hulls: Mutex::default(),
            deadline,
            solves: Default::default(),
            unproven: Default::default(),
        }
    }

    /// The shape of each layer's block.
    pub fn layer_shapes(&self) -> &[usize] {
        &self.layer_shapes
    }

    /// How many shapes there are.
    pub fn shapes(&self) -> usize {
        self.shapes.len()
    }

    /// Integer programs solved so far.
    pub fn solves(&self) -> u64 {
        self.solves.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Whether some solve ended by a limit instead of a proof.
    pub fn has_unproven(&self) -> bool {
        self.unproven.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The fastest decisions for a segment without a memory limit; `None` when no legal ones exist.
    pub fn fastest(&self, part: Part, context: &Context) -> Option<Arc<Solved>> {
        let key = Key { part, context: *context, in_flight: None };
        if let Some(known) = lock(&self.fastest).get(&key) {
            return known.clone();
        }
        let microbatches = context.workload.microbatches(&context.mesh);
        let solved = self
            .groupings(part)
            .par_iter()
            .filter_map(|grouping| self.solve(part, *grouping, context))
            .min_by(|a, b| {
                let total = |solved: &Solved| solved.time.total(microbatches).0;
                total(a).total_cmp(&total(b))
            })
            .map(Arc::new);
        lock(&self.fastest).insert(key, solved.clone());
        solved
    }

    /// The hull of time against bytes of a block with `in_flight` microbatches, the fastest first:
    /// vertices of the lower convex hull over all groupings.
    pub fn hull(&self, part: Part, context: &Context, in_flight: u64) -> Arc<Vec<Arc<Solved>>> {
        let key = Key { part, context: *context, in_flight: Some(in_flight) };
        if let Some(known) = lock(&self.hulls).get(&key) {
            return known.clone();
        }
        let microbatches = context.workload.microbatches(&context.mesh);
        let points: Vec<Solved> = self
            .groupings(part)
            .par_iter()
            .flat_map_iter(|grouping| self.grouped_hull(part, *grouping, context, in_flight))
            .collect();
        let hull = Arc::new(convex(points, in_flight, microbatches));
        lock(&self.hulls).insert(key, hull.clone());
        hull
    }

    fn groupings(&self, part: Part) -> &'static [Grouping] {
        match part.kind {
            SegmentKind::Block => self.request.grouping.groupings(),
            _ => &Grouping::ALL[..1],
        }
    }

    /// The op graph of a part.
    pub fn segment(&self, part: Part, grouping: Grouping) -> Segment {
        let model: &Model = &self.request.model;
        match part.kind {
            SegmentKind::Embedding => embedding_segment(model),
            SegmentKind::Block => block_segment(model, &self.shapes[part.shape], grouping),
            SegmentKind::Head => head_segment(model),
        }
    }

    /// The space of a part, priced for its tensor axis and microbatch.
    fn priced(&self, part: Part, grouping: Grouping, context: &Context) -> Arc<PricedSpace> {
        let mut shared = *context;
        // Neither the microbatches of a step nor ZeRO nor the stages show in a microbatch's times.
        shared.mesh.data *= shared.mesh.pipeline;
        shared.mesh.pipeline = 1;
        shared.zero = Zero::Off;
        shared.workload.global_batch = shared.mesh.data * shared.workload.micro_batch;
        let key = (part, grouping, shared);
        if let Some(known) = lock(&self.spaces).get(&key) {
            return known.clone();
        }
        let segment = self.segment(part, grouping);
        let tied = self.request.model.tied;
        let rules = &self.request.rules;
        let space = SegmentSpace::new(segment, part.border, shared, rules, tied, part.tied_weight);
        let prices = self.prices(&shared);
        let made = Arc::new(PricedSpace::new(space, &|kernel: &Kernel| prices.kernel(kernel)));
        lock(&self.spaces).insert(key, made.clone());
        made
    }

    fn prices(&self, context: &Context) -> Prices {
        Prices::new(&self.request.profile, self.request.executor, &context.mesh)
    }

    fn solve(&self, part: Part, grouping: Grouping, context: &Context) -> Option<Solved> {
        let priced = self.priced(part, grouping, context);
        let prices = self.prices(context);
        let table = priced.table(context, &|kernel: &Kernel| prices.kernel(kernel), None);
        self.solves.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let limits = Limits { time: self.remaining(), gap: 0.0 };
        let outcome = exact(&table, &limits).ok()?;
        if !matches!(outcome.status, Status::Optimal | Status::Infeasible) {
            self.unproven.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        let assignment = outcome.assignment?;
        Some(finish(&priced, context, &assignment, grouping, &prices))
    }

    fn grouped_hull(
        &self,
        part: Part,
        grouping: Grouping,
        context: &Context,
        in_flight: u64,
    ) -> Vec<Solved> {
        let priced = self.priced(part, grouping, context);
        let prices = self.prices(context);
        let price = |kernel: &Kernel| prices.kernel(kernel);
        let table = priced.table(context, &price, Some(in_flight));
        let vertices = hull(&table, RowId(0)).unwrap_or_default();
        self.solves.fetch_add(vertices.len() as u64, std::sync::atomic::Ordering::Relaxed);
        vertices
            .iter()
            .map(|vertex| finish(&priced, context, &vertex.assignment, grouping, &prices))
            .collect()
    }

    fn remaining(&self) -> Option<std::time::Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

fn finish(
    priced: &PricedSpace,
    context: &Context,
    assignment: &[u32],
    grouping: Grouping,
    prices: &Prices,
) -> Solved {
    let space = &priced.space;
    let choice = decode(space, assignment);
    let time = priced.time(context, &choice, &|kernel: &Kernel| prices.kernel(kernel));
    let bytes = segment_bytes(space, context, &choice);
    Solved { grouping, choice, segment: Arc::new(space.segment.clone()), time, bytes }
}

/// The lower convex hull of points, from the fastest to the smallest.
fn convex(mut points: Vec<Solved>, in_flight: u64, microbatches: u64) -> Vec<Arc<Solved>> {
    let at = |solved: &Solved| {
        (solved.bytes.total(in_flight).as_f64(), solved.time.total(microbatches).0)
    };
    points.sort_by(|a, b| at(a).1.total_cmp(&at(b).1).then(at(a).0.total_cmp(&at(b).0)));
    let mut hull: Vec<Arc<Solved>> = vec![];
    for point in points {
        if hull.last().is_some_and(|last| at(last).0 <= at(&point).0) {
            continue;
        }
        while hull.len() > 1 {
            let (first, second) = (at(&hull[hull.len() - 2]), at(&hull[hull.len() - 1]));
            let third = at(&point);
            // The second is on the hull if it saves bytes at a lower price than the third.
            let saved = (second.1 - first.1) * (first.0 - third.0);
            if saved < (third.1 - first.1) * (first.0 - second.0) {
                break;
            }
            hull.pop();
        }
        hull.push(Arc::new(point));
    }
    hull
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic in another thread cannot leave a map half-changed.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
