//! Assigns decisions to the blocks of each stage of one context, within the memory of the stage.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use narrows_cost_model::InFlight;
use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Bytes, Context, Seconds};
use rustc_hash::FxHashMap;

use super::assignment::{BlockInFlight, StageAssignment, assign_points};
use super::in_flight::in_flight_in_chunks;
use super::interleaved::stage_chunks;
use super::overhead::PipelineOverheads;
use super::partition::{Partition, StageBlocks};
use super::refinement::StageRefinement;
use super::relaxation::least_step_time;
use crate::segment::{ASYMPTOTIC_MICROBATCHES, SegmentSolver, SegmentSpec, SolvedSegment};

/// The best assignment of a run of blocks; `None` when none fits.
type CachedAssignment = Option<Arc<StageAssignment>>;

/// Relative error of sums of times.
const ROUNDING: f64 = 1e-9;

/// The memory of the blocks of a stage.
pub(super) struct StageMemory {
    /// Bytes that all blocks may take.
    pub budget: Bytes,
    /// Microbatches whose activations each chunk stores at once.
    in_flight: Vec<InFlight>,
}

/// Divides the blocks of one context among its stages.
pub(crate) struct StagePartitioner<'a> {
    pub(super) segments: &'a SegmentSolver<'a>,
    pub(super) context: &'a Context,
    pub(super) boundary: BoundaryLayout,
    pub(super) stages: Vec<StageMemory>,
    /// Assignments by run of blocks, as [`cached_run`](StagePartitioner::cached_run) has it.
    assignments: RefCell<FxHashMap<StageBlocks, CachedAssignment>>,
    /// Assignments with other numbers of microbatches, by run and number.
    weighted: RefCell<FxHashMap<(StageBlocks, u64), CachedAssignment>>,
    is_interrupted: Cell<bool>,
}

impl<'a> StagePartitioner<'a> {
    /// A partitioner under one boundary layout; `budgets` are the bytes of each stage's blocks.
    pub(crate) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        boundary: BoundaryLayout,
        budgets: Vec<Bytes>,
    ) -> Self {
        let memory = |(stage, budget)| StageMemory {
            budget,
            in_flight: in_flight_in_chunks(context, stage),
        };
        StagePartitioner {
            segments,
            context,
            boundary,
            stages: budgets.into_iter().enumerate().map(memory).collect(),
            assignments: RefCell::default(),
            weighted: RefCell::default(),
            is_interrupted: Cell::new(false),
        }
    }

    /// The context of the blocks.
    pub(crate) fn context(&self) -> &'a Context {
        self.context
    }

    /// Whether the deadline has passed during the division, so that partitions are missing.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.is_interrupted.get()
    }

    /// Records that the deadline has passed, if it has, and returns whether it has.
    pub(super) fn interrupt_if_out_of_time(&self) -> bool {
        if !self.is_interrupted.get() && self.segments.out_of_time() {
            self.is_interrupted.set(true);
        }
        self.is_interrupted.get()
    }

    /// The fastest assignment for a run of blocks on a stage, cached; `None` when none fits or the
    /// deadline has passed.
    pub(crate) fn best_assignment(&self, blocks: StageBlocks) -> Option<Arc<StageAssignment>> {
        if self.interrupt_if_out_of_time() {
            return None;
        }
        let blocks = self.cached_run(blocks);
        if let Some(cached) = self.assignments.borrow().get(&blocks) {
            return cached.clone();
        }
        let assignment = self.assign(self.context, blocks).map(|mut assignment| {
            // In a step of very many microbatches only the microbatch time matters: minimising the step
            // minimises the microbatch time.
            let many = SegmentSolver::asymptotic(self.context);
            // With one stage the whole step is minimised at once.
            let is_pipeline = self.context.mesh.pipeline > 1;
            let fastest = is_pipeline.then(|| self.assign(&many, blocks)).flatten();
            assignment.microbatch_time_min = fastest.map_or(Seconds(0.0), |fastest| {
                // M·t + u is minimal up to the integrality slack, and u is at most `step_max`.
                let step_max: f64 = self
                    .blocks(blocks)
                    .map(|block| self.segments.step_phase_range(block.spec, &many)[1])
                    .sum();
                let once = (step_max - (fastest.step_phase - fastest.integrality_slack).0).max(0.0)
                    / ASYMPTOTIC_MICROBATCHES as f64;
                fastest.forward + fastest.backward - Seconds(once)
            });
            // The step phase of the first stage follows all passes.
            if is_pipeline && blocks.stage == 0 {
                let single = SegmentSolver::with_microbatches(self.context, 1);
                let shortest = self.assign(&single, blocks);
                assignment.single_microbatch_step_min = shortest.map_or(Seconds(0.0), |shortest| {
                    let StageAssignment { forward, backward, step_phase, .. } = shortest;
                    forward + backward + step_phase - shortest.integrality_slack
                });
            }
            Arc::new(assignment)
        });
        self.assignments.borrow_mut().insert(blocks, assignment.clone());
        assignment
    }

    /// The assignment of a run of blocks on a stage that is fastest with this many microbatches, cached; `None` when none
    /// fits or the deadline has passed.
    pub(super) fn weighted_assignment(
        &self,
        blocks: StageBlocks,
        microbatches: u64,
    ) -> Option<Arc<StageAssignment>> {
        let blocks = self.cached_run(blocks);
        if self.segments.out_of_time() {
            return None;
        }
        let key = (blocks, microbatches);
        if let Some(cached) = self.weighted.borrow().get(&key) {
            return cached.clone();
        }
        let context = SegmentSolver::with_microbatches(self.context, microbatches);
        let assignment = self.assign(&context, blocks).map(Arc::new);
        self.weighted.borrow_mut().insert(key, assignment.clone());
        assignment
    }

    /// The run of blocks that stands for this one: blocks of one shape are equal, so it begins with the first of those around.
    fn cached_run(&self, blocks: StageBlocks) -> StageBlocks {
        let shapes = self.segments.layer_shapes();
        let run = &shapes[blocks.run()];
        let Some(shape) = run.first() else { return StageBlocks { first: 0, ..blocks } };
        if run.iter().any(|other| other != shape) {
            return blocks;
        }
        let other = shapes[..blocks.first].iter().rposition(|other| other != shape);
        StageBlocks { first: other.map_or(0, |other| other + 1), ..blocks }
    }

    /// Equal numbers of blocks on all stages, with the remainder on the first stages. With fewer blocks than stages, the
    /// last stage has none, and then the first.
    pub(super) fn even_counts(&self) -> Vec<usize> {
        let (blocks, stages) = (self.segments.layer_shapes().len(), self.stages.len());
        let first = usize::from(stages > blocks + 1);
        let remainder = first..first + blocks % stages;
        let count = |stage| blocks / stages + usize::from(remainder.contains(&stage));
        (0..stages).map(count).collect()
    }

    /// [Even numbers of blocks](Self::even_counts) on all stages, each stage as fast as its bytes allow; `None` when a stage
    /// does not fit, or alone takes more than `cutoff` seconds of a step.
    pub(crate) fn even_partition(
        &self,
        overheads: &PipelineOverheads,
        cutoff: f64,
    ) -> Option<Partition> {
        let counts = self.even_counts();
        let overheads = overheads.of(&counts);
        let microbatches = self.context.workload.microbatches(&self.context.mesh) as f64;
        let choice = |blocks: StageBlocks| {
            let overhead = &overheads[blocks.stage];
            let is_slower = |assignment: &StageAssignment| {
                let step_phase = (assignment.step_phase + overhead.step_phase).0;
                let time = microbatches * assignment.microbatch_time(overhead) + step_phase;
                time * (1.0 - ROUNDING) > cutoff
            };
            let of_blocks: Vec<BlockInFlight> = self.blocks(blocks).collect();
            let fastest = self.fastest(self.context, &of_blocks)?;
            let budget = self.stages[blocks.stage].budget;
            if fastest.bytes <= budget || is_slower(&fastest) {
                return (!is_slower(&fastest)).then(|| Arc::new(fastest));
            }
            // One edge of a hull excludes most of the stages that are too slow, of several chunks none.
            if cutoff.is_finite() && self.context.chunks == 1 {
                let step = least_step_time(
                    self.segments,
                    self.context,
                    (self.boundary, blocks.stage, budget),
                    blocks.run(),
                )?;
                let forward = step * (1.0 / microbatches);
                if is_slower(&StageAssignment { forward, ..StageAssignment::default() }) {
                    return None;
                }
            }
            let assignment = self.assign_hulls(self.context, blocks, &of_blocks)?;
            (!is_slower(&assignment)).then(|| Arc::new(assignment))
        };
        Partition::with_counts(counts, &choice)
    }

    /// The partition with faster assignments, by integer programs, for stages where memory binds; `None` when
    /// no assignment is faster. The blocks of a stage may use its `unused` bytes besides their own.
    pub(crate) fn refine(&self, partition: &Partition, unused: &[Bytes]) -> Option<Partition> {
        let (mut stages, mut is_refined) = (vec![], false);
        let runs = StageBlocks::of_counts(&partition.counts);
        for (run, assignment) in runs.zip(&partition.stages) {
            let blocks: Vec<BlockInFlight> = self.blocks(run).collect();
            let budget = assignment.bytes + unused[run.stage];
            let refinement = StageRefinement::new(self.segments, self.context, budget);
            let refined = refinement.refine(&blocks, assignment);
            is_refined |= refined.is_some();
            stages.push(refined.map_or_else(|| assignment.clone(), Arc::new));
        }
        let (bound, counts) = (partition.bound, partition.counts.clone());
        is_refined.then_some(Partition { bound, counts, stages })
    }

    /// A run of blocks on a stage, or the blocks of its chunks.
    pub(super) fn blocks(&self, blocks: StageBlocks) -> impl Iterator<Item = BlockInFlight> {
        let StageBlocks { stage, first, count } = blocks;
        let shapes = self.segments.layer_shapes();
        let is_interleaved = self.context.chunks > 1;
        let chunks = stage_chunks(self.context, stage, shapes.len());
        chunks.zip(&self.stages[stage].in_flight).flat_map(move |(chunk, in_flight)| {
            let layers = if is_interleaved { chunk } else { first..first + count };
            layers.map(move |layer| BlockInFlight {
                spec: SegmentSpec::block(shapes[layer], self.boundary),
                in_flight: *in_flight,
            })
        })
    }

    /// The fastest assignment for a run of blocks on a stage.
    fn assign(&self, context: &Context, run: StageBlocks) -> Option<StageAssignment> {
        let blocks: Vec<BlockInFlight> = self.blocks(run).collect();
        let fastest = self.fastest(context, &blocks)?;
        match fastest.bytes <= self.stages[run.stage].budget {
            true => Some(fastest),
            false => self.assign_hulls(context, run, &blocks),
        }
    }

    /// The fastest assignment for blocks without a memory limit.
    fn fastest(&self, context: &Context, blocks: &[BlockInFlight]) -> Option<StageAssignment> {
        let fastest = blocks.iter().map(|block| self.segments.fastest(block.spec, context));
        let fastest: Option<Vec<Arc<SolvedSegment>>> = fastest.collect();
        Some(StageAssignment::of_blocks(blocks, fastest?))
    }

    /// The fastest assignment of hull vertices for a run of blocks on a stage, which are `blocks`.
    fn assign_hulls(
        &self,
        context: &Context,
        run: StageBlocks,
        blocks: &[BlockInFlight],
    ) -> Option<StageAssignment> {
        let segments = self.segments;
        let budget = self.stages[run.stage].budget;
        // Blocks of one shape mix the two vertices around their average bytes; blocks of several shapes, or with different
        // microbatches in flight, may need any vertex.
        let hull = |block: &BlockInFlight, average| {
            segments.hull(block.spec, context, block.in_flight, average)
        };
        let hulls: Vec<_> = if segments.shape_count() == 1 && context.chunks == 1 {
            let average = Some(budget / run.count as u64);
            vec![hull(blocks.first()?, average); run.count]
        } else {
            blocks.iter().map(|block| hull(block, None)).collect()
        };
        let microbatches = context.workload.microbatches(&context.mesh);
        assign_points(&hulls, blocks, microbatches, budget)
    }
}
