//! Solves segments, once each: blocks of equal shape share a solve.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use narrows_cost_model::memory::{SegmentBytes, segment_bytes};
use narrows_cost_model::segment::{SegmentTime, decode, price_segment, segment_time};
use narrows_cost_model::table::RowId;
use narrows_cost_model::{CostTable, Prices};
use narrows_plan::graph::{
    Grouping, Segment, SegmentKind, block_segment, embedding_segment, head_segment,
};
use narrows_plan::model::{Block, Model};
use narrows_plan::strategy::{Context, SegmentChoice, SegmentSpace, TiedWeight};
use narrows_plan::{Bytes, EdgeLayout, Kernel};
use rayon::prelude::*;

use crate::request::Request;
use crate::solve::exact::Exact;
use crate::solve::front::{FrontRequest, front};
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
    fronts: Mutex<HashMap<Key, Arc<Vec<Arc<Solved>>>>>,
    deadline: Option<Instant>,
    solves: std::sync::atomic::AtomicU64,
    unproven: std::sync::atomic::AtomicBool,
}

/// The most points of a block's front.
const FRONT_POINTS_MAX: usize = 12;

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
            fronts: Mutex::default(),
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

    /// The front of time against bytes of a block with `in_flight` microbatches, the fastest first.
    pub fn front(&self, part: Part, context: &Context, in_flight: u64) -> Arc<Vec<Arc<Solved>>> {
        let key = Key { part, context: *context, in_flight: Some(in_flight) };
        if let Some(known) = lock(&self.fronts).get(&key) {
            return known.clone();
        }
        let microbatches = context.workload.microbatches(&context.mesh);
        let mut points: Vec<Solved> = self
            .groupings(part)
            .par_iter()
            .flat_map_iter(|grouping| self.grouped_front(part, *grouping, context, in_flight))
            .collect();
        let cost =
            |solved: &Solved| (solved.bytes.total(in_flight).0, solved.time.total(microbatches).0);
        points.sort_by(|a, b| cost(b).0.cmp(&cost(a).0).then(cost(b).1.total_cmp(&cost(a).1)));
        // From the fewest bytes up, keep what is faster than everything with fewer bytes.
        let mut best = f64::INFINITY;
        let mut front: Vec<Arc<Solved>> = vec![];
        for point in points.into_iter().rev() {
            let time = cost(&point).1;
            if time < best {
                best = time;
                front.push(Arc::new(point));
            }
        }
        front.reverse();
        let front = Arc::new(front);
        lock(&self.fronts).insert(key, front.clone());
        front
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

    fn space(&self, part: Part, grouping: Grouping, context: &Context) -> SegmentSpace {
        let segment = self.segment(part, grouping);
        let tied = self.request.model.tied;
        let rules = &self.request.rules;
        SegmentSpace::new(segment, part.border, *context, rules, tied, part.tied_weight)
    }

    fn table(&self, space: &SegmentSpace, in_flight: Option<u64>) -> (CostTable, Prices) {
        let context = &space.context;
        let prices = Prices::new(&self.request.profile, self.request.executor, &context.mesh);
        let microbatches = context.workload.microbatches(&context.mesh);
        let price = |kernel: &Kernel| prices.kernel(kernel);
        (price_segment(space, &price, microbatches, in_flight), prices)
    }

    fn solve(&self, part: Part, grouping: Grouping, context: &Context) -> Option<Solved> {
        let space = self.space(part, grouping, context);
        let (table, prices) = self.table(&space, None);
        self.solves.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let limits = Limits { time: self.remaining(), gap: 0.0 };
        let outcome = exact(&table, &limits).ok()?;
        if !matches!(outcome.status, Status::Optimal | Status::Infeasible) {
            self.unproven.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        let assignment = outcome.assignment?;
        Some(finish(&space, &assignment, grouping, &prices))
    }

    fn grouped_front(
        &self,
        part: Part,
        grouping: Grouping,
        context: &Context,
        in_flight: u64,
    ) -> Vec<Solved> {
        let space = self.space(part, grouping, context);
        let (table, prices) = self.table(&space, Some(in_flight));
        let Some(fastest) = self.fastest(part, context) else { return vec![] };
        let most = fastest.bytes.total(in_flight).0;
        let request = FrontRequest {
            row: RowId(0),
            step_min: Bytes(most / (2 * FRONT_POINTS_MAX as u64)),
            points_max: FRONT_POINTS_MAX,
            time_per_point: self.remaining(),
        };
        let progress = |_: &_| {
            self.solves.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            std::ops::ControlFlow::Continue(())
        };
        let Ok(found) = front(&table, &request, &Exact, progress) else { return vec![] };
        found
            .points
            .iter()
            .map(|point| finish(&space, &point.assignment, grouping, &prices))
            .collect()
    }

    fn remaining(&self) -> Option<std::time::Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }
}

fn finish(space: &SegmentSpace, assignment: &[u32], grouping: Grouping, prices: &Prices) -> Solved {
    let choice = decode(space, assignment);
    let price = |kernel: &Kernel| prices.kernel(kernel);
    let time = segment_time(space, &choice, &price);
    let bytes = segment_bytes(space, &choice);
    Solved { grouping, choice, segment: Arc::new(space.segment.clone()), time, bytes }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic in another thread cannot leave a map half-changed.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
