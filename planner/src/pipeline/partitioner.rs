//! Divides the blocks of one context among its stages, within the memory of each stage.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use narrows_cost_model::{InFlight, PassTimesMin};
use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Bytes, Context, PipelineSchedule, Seconds};
use rustc_hash::FxHashMap;

use super::assignment::{BlockInFlight, StageAssignment, assign_points};
use super::in_flight::in_flight_in_chunks;
use super::interleaved::{BlockTimesMin, ChunkMin, mean_bound, stage_chunks};
use super::joint_times::JointMinima;
use super::overhead::{PipelineOverheads, StageOverhead};
use super::partition::{FIRST_STAGE_WEIGHTS, Partition, PruningCutoff, StageBlocks, StageChoice};
use super::path_bound::path_bound;
use super::path_mean::{Multipliers, PathMean};
use super::refinement::StageRefinement;
use super::relaxation::{RelaxedStage, least_step_time};
use super::stage_position::StepSchedule;
use super::undominated::DivisionSearch;
use crate::segment::{ASYMPTOTIC_MICROBATCHES, SegmentSolver, SegmentSpec, SolvedSegment};

/// Relaxes a stage with a budget.
type Relax = fn(&SegmentSolver, &Context, BoundaryLayout, usize, Bytes) -> Option<RelaxedStage>;

/// The best assignment of a run of blocks; `None` when none fits.
type CachedAssignment = Option<Arc<StageAssignment>>;

/// Share of the step to beat below which a bound is raised by means of paths.
const MEANS_BELOW: f64 = 0.99;

/// Relative error of sums of times.
const ROUNDING: f64 = 1e-9;

/// The memory of the blocks of a stage.
struct StageMemory {
    /// Bytes that all blocks may take.
    budget: Bytes,
    /// Microbatches whose activations each chunk stores at once.
    in_flight: Vec<InFlight>,
}

/// Choices of stages without blocks whose partitions may take less than a cutoff.
struct OpenChoices<'o> {
    /// The overheads of all stages by choice.
    choices: Vec<&'o [StageOverhead]>,
    cutoff: PruningCutoff,
    relaxed: Option<Vec<RelaxedStage>>,
    /// Partial partitions priced.
    priced: u64,
}

/// Divides the blocks of one context among its stages.
pub(crate) struct StagePartitioner<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    boundary: BoundaryLayout,
    stages: Vec<StageMemory>,
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

    /// The best partitions that may take less than `cutoff`, and the number priced.
    pub(crate) fn partitions(
        &self,
        overheads: &PipelineOverheads,
        cutoff: f64,
    ) -> (Vec<Partition>, u64) {
        if self.context.chunks > 1 {
            // Without the memory limit, bounds need no assignments.
            if self.interleaved_bound(overheads, |_| 0.0) >= cutoff {
                return (vec![], 0);
            }
            let layouts = overheads.layouts();
            let of_stages = overheads.of(&self.even_counts());
            let path = path_bound(self.segments, self.context, layouts, of_stages).unwrap_or(0.0);
            if path >= cutoff {
                return (vec![], 0);
            }
            let partition = self.interleaved_partition(overheads, path, cutoff);
            return (partition.into_iter().collect(), 1);
        }
        let open = self.open(overheads, cutoff);
        self.undominated(open)
    }

    /// Lower bounds in seconds on all partitions that may take less than `cutoff`: that of the [best](StagePartitioner::partitions)
    /// one, and one from [means of paths](super::path_mean); `None` without such partitions. And the number priced.
    pub(crate) fn bounds(
        &self,
        overheads: &PipelineOverheads,
        cutoff: f64,
        multipliers: &mut Option<Multipliers>,
    ) -> (Option<[f64; 2]>, u64) {
        if self.context.chunks > 1 {
            let (partitions, priced) = self.partitions(overheads, cutoff);
            return (partitions.first().map(|best| [best.bound.0, 0.0]), priced);
        }
        let open = self.open(overheads, cutoff);
        let choices = open.choices.clone();
        let (partitions, priced) = self.undominated(open);
        let Some(divided) = partitions.first().map(|best| best.bound.0) else {
            return (None, priced);
        };
        if divided >= MEANS_BELOW * cutoff {
            return (Some([divided, 0.0]), priced);
        }
        let budgets = self.stages.iter().map(|memory| memory.budget).collect();
        let (layouts, known) = (overheads.layouts(), multipliers.take());
        let means = PathMean::new(self.segments, self.context, layouts, budgets, known);
        let Some(mut means) = means else { return (Some([divided, 0.0]), priced) };
        let is_interrupted: &dyn Fn() -> bool = &|| self.interrupt_if_out_of_time();
        let bounds = choices.into_iter().map(|of| means.bound(of, cutoff, is_interrupted));
        let least = bounds.fold(f64::INFINITY, f64::min);
        *multipliers = means.into_multipliers();
        ((least < cutoff).then_some([divided, least]), priced)
    }

    /// The choices of stages without blocks that no relaxation excludes.
    fn open<'o>(&self, overheads: &'o PipelineOverheads, cutoff: f64) -> OpenChoices<'o> {
        let mut open = OpenChoices {
            choices: overheads.choices().collect(),
            cutoff: self.pruning_cutoff(cutoff),
            relaxed: None,
            priced: 0,
        };
        let is_interrupted: &dyn Fn() -> bool = &|| self.interrupt_if_out_of_time();
        let step = StepSchedule::of(self.context);
        // Relaxations at known multipliers are cheaper to compute, and exclude most of the partitions that the others exclude.
        for relax in [RelaxedStage::at_known_multipliers, RelaxedStage::new] {
            open.relaxed = self.relaxed_stages(cutoff, relax);
            if let Some(stages) = &open.relaxed {
                let relaxed = |blocks: StageBlocks| stages[blocks.stage].assignment(blocks.run());
                let (cutoff, priced) = (&open.cutoff, &mut open.priced);
                open.choices.retain(|overheads| {
                    let search = DivisionSearch { overheads, step, cutoff, is_interrupted };
                    let (is_excluded, labels) = search.is_excluded(&relaxed);
                    *priced += labels;
                    !is_excluded
                });
            }
            if open.choices.is_empty() {
                break;
            }
            if open.cutoff.joint.is_none() {
                let layouts = overheads.layouts();
                open.cutoff.joint = JointMinima::new(self.segments, self.context, layouts);
            }
        }
        open
    }

    /// The best partitions of these choices by their bounds, and the number priced.
    fn undominated(&self, open: OpenChoices) -> (Vec<Partition>, u64) {
        let OpenChoices { choices, cutoff, relaxed, mut priced } = open;
        let choice = |blocks| self.best_assignment(blocks);
        let is_interrupted: &dyn Fn() -> bool = &|| self.interrupt_if_out_of_time();
        let step = StepSchedule::of(self.context);
        let relaxed = relaxed
            .map(|stages| move |blocks: StageBlocks| stages[blocks.stage].assignment(blocks.run()));
        let relaxed = relaxed.as_ref().map(|relaxed| relaxed as StageChoice);
        let mut partitions = vec![];
        for overheads in choices {
            let search = DivisionSearch { overheads, step, cutoff: &cutoff, is_interrupted };
            let (undominated, labels) = search.undominated_partitions(&choice, relaxed);
            partitions.extend(undominated);
            priced += labels;
        }
        partitions.sort_by(|a, b| a.bound.0.total_cmp(&b.bound.0));
        (partitions, priced)
    }

    /// The partition of an interleaved pipeline, whose equal chunks are one division; `None` where it does not fit, takes at
    /// least `cutoff`, or the deadline has passed. `known` is a lower bound on its step.
    fn interleaved_partition(
        &self,
        overheads: &PipelineOverheads,
        known: f64,
        cutoff: f64,
    ) -> Option<Partition> {
        let partition =
            Partition::with_counts(self.even_counts(), &|run| self.best_assignment(run))?;
        let least = |stage: usize| partition.stages[stage].microbatch_time_min.0;
        let bound = Seconds(self.interleaved_bound(overheads, least).max(known));
        (bound.0 < cutoff).then_some(Partition { bound, ..partition })
    }

    /// Lower bound in seconds on the step of an interleaved pipeline. `stage_blocks` is a lower bound on one microbatch through
    /// all blocks of a stage.
    fn interleaved_bound(
        &self,
        overheads: &PipelineOverheads,
        stage_blocks: impl Fn(usize) -> f64,
    ) -> f64 {
        let context = self.context;
        let overheads = overheads.of(&self.even_counts());
        let least = self.pruning_cutoff(f64::INFINITY);
        let beside_blocks = |at: usize| {
            let (stage, chunk) = context.stage_and_chunk(at);
            let [forward, backward] = overheads[stage].chunks[chunk];
            (forward + backward).0
        };
        let blocks = BlockTimesMin {
            microbatch: &least.microbatch_times_min,
            step_phase: &least.step_phase_times_min,
        };
        let of_passes = blocks.step_bound(context, beside_blocks, stage_blocks);
        let stages = ChunkMin::of_stages(self.segments, context, self.boundary, overheads, &least);
        let microbatches = context.workload.microbatches(&context.mesh);
        (of_passes + overheads[0].step_phase_min.0).max(mean_bound(&stages, microbatches))
    }

    /// Relaxations of all stages by `relax`; `None` where they would exclude nothing, or cost as much as the
    /// assignments.
    fn relaxed_stages(&self, cutoff: f64, relax: Relax) -> Option<Vec<RelaxedStage>> {
        let is_worthwhile = cutoff.is_finite() && self.stages.len() > 1;
        if !is_worthwhile {
            return None;
        }
        let relaxed = |(stage, memory): (usize, &StageMemory)| {
            relax(self.segments, self.context, self.boundary, stage, memory.budget)
        };
        self.stages.iter().enumerate().map(relaxed).collect()
    }

    /// Lower bounds on the blocks, with the step time to beat.
    fn pruning_cutoff(&self, step_time: f64) -> PruningCutoff {
        let (mut microbatch_times_min, mut step_phase_times_min) = (vec![], vec![]);
        let (mut passes_min, mut uncounted_reductions_min) = (vec![], vec![]);
        let (mut single_microbatch_steps_min, mut weighted_steps_min) = (vec![], vec![]);
        let first_stage_weights = self.first_stage_weights();
        let single = SegmentSolver::with_microbatches(self.context, 1);
        let is_pipeline = self.context.mesh.pipeline > 1;
        let slowdown = self.segments.prices(self.context).overlap_slowdown();
        let uncounted = slowdown.map_or(0.0, |slowdown| 1.0 - slowdown.hidden_cost());
        // Other schedules are bounded by the time of both passes.
        let passes = |spec| match self.context.schedule {
            PipelineSchedule::ZeroBubble => {
                self.segments.min_pass_times_with_flows(spec, self.context)
            }
            _ => PassTimesMin::default(),
        };
        let of_layers = self.segments.of_layers(|shape| {
            let spec = SegmentSpec::block(shape, self.boundary);
            (
                self.segments.min_microbatch_time(spec, self.context),
                passes(spec),
                self.segments.overlapped_range(spec, self.context)[0],
                self.segments.step_phase_range(spec, self.context)[0],
                is_pipeline.then(|| self.segments.fastest(spec, &single)).flatten(),
                first_stage_weights.map(|weight| self.step_min(spec, weight)),
            )
        });
        for (microbatch_time, passes, reductions, step_phase, single, weighted) in of_layers {
            microbatch_times_min.extend(microbatch_time);
            passes_min.push(passes);
            uncounted_reductions_min.push(uncounted * reductions);
            step_phase_times_min.push(step_phase);
            let step_min = single.map_or(0.0, |single| single.time.total(1).0);
            single_microbatch_steps_min.push(step_min);
            weighted_steps_min.push(weighted);
        }
        PruningCutoff {
            microbatch_times_min,
            passes_min,
            uncounted_reductions_min,
            step_phase_times_min,
            single_microbatch_steps_min,
            first_stage_weights,
            weighted_steps_min,
            joint: None,
            step_time,
        }
    }

    /// The weights of passes of a first stage: a half and a quarter of the microbatches of a step.
    fn first_stage_weights(&self) -> [u64; FIRST_STAGE_WEIGHTS] {
        let microbatches = self.context.workload.microbatches(&self.context.mesh);
        let is_divided = self.stages.len() > 1 && self.context.chunks == 1;
        let weights = [microbatches / 2, microbatches / 4];
        if is_divided { weights } else { [0; FIRST_STAGE_WEIGHTS] }
    }

    /// Lower bound in seconds on the time of a segment in a step of this many microbatches, without a memory limit; 0 for none.
    fn step_min(&self, spec: SegmentSpec, microbatches: u64) -> f64 {
        let context = SegmentSolver::with_microbatches(self.context, microbatches);
        let fastest = (microbatches > 0).then(|| self.segments.fastest(spec, &context)).flatten();
        fastest.map_or(0.0, |fastest| fastest.time.total(microbatches).0)
    }

    /// Whether the deadline has passed during the division, so that partitions are missing.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.is_interrupted.get()
    }

    /// Records that the deadline has passed, if it has, and returns whether it has.
    fn interrupt_if_out_of_time(&self) -> bool {
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
    fn even_counts(&self) -> Vec<usize> {
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
        let (mut first, mut is_refined) = (0, false);
        let mut stages = vec![];
        for (stage, assignment) in partition.stages.iter().enumerate() {
            let count = assignment.blocks.len();
            let blocks: Vec<BlockInFlight> =
                self.blocks(StageBlocks { stage, first, count }).collect();
            first += count;
            let budget = assignment.bytes + unused[stage];
            let refinement = StageRefinement::new(self.segments, self.context, budget);
            let refined = refinement.refine(&blocks, assignment);
            is_refined |= refined.is_some();
            stages.push(refined.map_or_else(|| assignment.clone(), Arc::new));
        }
        let (bound, counts) = (partition.bound, partition.counts.clone());
        is_refined.then_some(Partition { bound, counts, stages })
    }

    /// A run of blocks on a stage, or the blocks of its chunks.
    fn blocks(&self, blocks: StageBlocks) -> impl Iterator<Item = BlockInFlight> {
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
