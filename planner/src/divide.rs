//! Divides the blocks of one context among its stages, under the stages' byte budgets.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use narrows_plan::graph::SegmentKind;
use narrows_plan::program::slots_in_flight;
use narrows_plan::strategy::{BoundaryLayout, Context};
use narrows_plan::{Bytes, Seconds};

use crate::extras::StageOverhead;
use crate::segments::{MANY, SegmentSolver, SegmentSpec, SolvedSegment};
use crate::stages::{Partition, PruningCutoff, StageAssignment, allot, partitions};

/// The best allotment of a run of blocks, or that none fits.
type CachedAssignment = Option<Arc<StageAssignment>>;

/// Divides the blocks among stages under their budgets.
pub struct StagePartitioner<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    border: BoundaryLayout,
    budgets: Vec<Bytes>,
    /// By stage, first block (0 when all are alike) and count.
    known: RefCell<HashMap<(usize, usize, usize), CachedAssignment>>,
    is_interrupted: Cell<bool>,
}

impl<'a> StagePartitioner<'a> {
    /// For one layout of what blocks hand on; `budgets` are the bytes left for blocks.
    pub fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        border: BoundaryLayout,
        budgets: Vec<Bytes>,
    ) -> Self {
        StagePartitioner {
            segments,
            context,
            border,
            budgets,
            known: RefCell::default(),
            is_interrupted: Cell::new(false),
        }
    }

    /// The context whose blocks are divided.
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// The best partitions that may beat the incumbent, and how many were priced.
    pub fn partitions(&self, extras: &[StageOverhead], incumbent: f64) -> (Vec<Partition>, u64) {
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        let choice = |stage, first, count| self.known_allotment(stage, first, count);
        let (mut turns, mut steps) = (vec![], vec![]);
        for shape in self.segments.layer_shapes() {
            let part = block_part(*shape, self.border);
            turns.extend(self.segments.least_turn(part, self.context));
            steps.push(self.segments.step_range(part, self.context)[0]);
        }
        let cutoff = PruningCutoff { turns, steps, time: incumbent };
        partitions(extras, microbatches, &cutoff, &choice)
    }

    /// Whether the deadline came in between: what was not found may exist.
    pub fn is_interrupted(&self) -> bool {
        self.is_interrupted.get()
    }

    /// The fastest points for a run of blocks on a stage, remembered; `None` when none fits, or when
    /// there is no time left.
    pub fn known_allotment(
        &self,
        stage: usize,
        first: usize,
        count: usize,
    ) -> Option<Arc<StageAssignment>> {
        if self.is_interrupted.get() || self.segments.is_late() {
            self.is_interrupted.set(true);
            return None;
        }
        let first = if self.segments.shapes() == 1 { 0 } else { first };
        if let Some(known) = self.known.borrow().get(&(stage, first, count)) {
            return known.clone();
        }
        let made = self.allot(self.context, stage, first, count).map(|mut allotment| {
            // The least turn within the bytes is what a step of very many microbatches is made of.
            let mut many = *self.context;
            many.workload.global_batch = many.mesh.data * many.workload.micro_batch * MANY;
            // One stage is bounded by all of its step at once.
            let several = self.context.mesh.pipeline > 1;
            let least = several.then(|| self.allot(&many, stage, first, count)).flatten();
            allotment.turn_least = least.map_or(Seconds(0.0), |least| {
                // MANY·t + u is least but for the slack; others spend at most so much once a step.
                let most: f64 = self
                    .parts(first, count)
                    .map(|part| self.segments.step_range(part, &many)[1])
                    .sum();
                let once = (most - (least.step - least.slack).0).max(0.0) / MANY as f64;
                least.forward + least.backward - Seconds(once)
            });
            Arc::new(allotment)
        });
        self.known.borrow_mut().insert((stage, first, count), made.clone());
        made
    }

    /// As many blocks on every stage, or one more on the first ones, as fast as their bytes allow.
    pub fn evenly(&self) -> Option<Partition> {
        let (blocks, stages) = (self.segments.layer_shapes().len(), self.budgets.len());
        let counts: Vec<usize> = (0..stages)
            .map(|stage| blocks / stages + usize::from(stage < blocks % stages))
            .collect();
        let choice =
            |stage, first, count| self.allot(self.context, stage, first, count).map(Arc::new);
        Partition::of(counts, &choice)
    }

    fn parts(&self, first: usize, count: usize) -> impl Iterator<Item = SegmentSpec> {
        let shapes = &self.segments.layer_shapes()[first..first + count];
        shapes.iter().map(|&shape| block_part(shape, self.border))
    }

    /// The fastest points for a run of blocks on a stage.
    fn allot(
        &self,
        context: &Context,
        stage: usize,
        first: usize,
        count: usize,
    ) -> Option<StageAssignment> {
        let segments = self.segments;
        let in_flight = in_flight(self.context, stage);
        let fastest: Option<Vec<Arc<SolvedSegment>>> =
            self.parts(first, count).map(|part| segments.fastest(part, context)).collect();
        let fastest = StageAssignment::new(fastest?, in_flight);
        if fastest.bytes <= self.budgets[stage] {
            return Some(fastest);
        }
        // Blocks that are alike mix the points around their average; others may need any point.
        let hull = |part, average| segments.hull(part, context, in_flight, average);
        let hulls: Vec<_> = if segments.shapes() == 1 {
            let average = Some(self.budgets[stage] / count as u64);
            vec![hull(block_part(0, self.border), average); count]
        } else {
            self.parts(first, count).map(|part| hull(part, None)).collect()
        };
        let microbatches = context.workload.microbatches(&context.mesh);
        allot(&hulls, in_flight, microbatches, self.budgets[stage])
    }

    /// How far the smallest decisions exceed the budgets, were the blocks divided evenly.
    pub fn excess(&self) -> Bytes {
        let blocks = self.segments.layer_shapes().len();
        let count = blocks.div_ceil(self.budgets.len());
        let over = |(stage, budget): (usize, &Bytes)| {
            let in_flight = in_flight(self.context, stage);
            let least = |part| {
                let smallest = Some(Bytes(0));
                let hull = self.segments.hull(part, self.context, in_flight, smallest);
                hull.last().map_or(Bytes(0), |solved| solved.bytes.total(in_flight))
            };
            let first = (stage * count).min(blocks - count);
            self.parts(first, count).map(least).sum::<Bytes>().saturating_sub(*budget)
        };
        self.budgets.iter().enumerate().map(over).max().unwrap_or_default()
    }
}

/// A block's part of the search.
pub fn block_part(shape: usize, border: BoundaryLayout) -> SegmentSpec {
    SegmentSpec { kind: SegmentKind::Block, shape, border, tied_weight: None }
}

/// Microbatches in flight on a stage.
pub fn in_flight(context: &Context, stage: usize) -> u64 {
    let microbatches = context.workload.microbatches(&context.mesh);
    slots_in_flight(stage as u64, context.mesh.pipeline, microbatches)
}
