//! The best divisions of a context's blocks among its stages, and lower bounds on all of them.

use narrows_cost_model::PassTimesMin;
use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Bytes, Context, Seconds};

use super::interleaved::{BlockTimesMin, ChunkMin, mean_bound};
use super::joint_times::JointMinima;
use super::mixed_division::MixedDivision;
use super::overhead::{PipelineOverheads, StageOverhead};
use super::partition::{FIRST_STAGE_WEIGHTS, Partition, PruningCutoff, StageBlocks, StageChoice};
use super::partitioner::{StageMemory, StagePartitioner};
use super::path_mean::{Multipliers, PathMean};
use super::relaxation::RelaxedStage;
use super::stage_position::StepSchedule;
use super::undominated::DivisionSearch;
use crate::segment::{SegmentSolver, SegmentSpec};

/// Relaxes a stage with a budget.
type Relax = fn(&SegmentSolver, &Context, BoundaryLayout, usize, Bytes) -> Option<RelaxedStage>;

/// Choices of stages without blocks whose partitions may take less than a cutoff.
struct OpenChoices<'o> {
    /// The overheads of all stages by choice.
    choices: Vec<&'o [StageOverhead]>,
    cutoff: PruningCutoff,
    relaxed: Option<Vec<RelaxedStage>>,
    /// Partial partitions priced.
    priced: u64,
}

impl StagePartitioner<'_> {
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
            let partition = self.interleaved_partition(overheads, cutoff);
            return (partition.into_iter().collect(), 1);
        }
        let open = self.open(overheads, cutoff);
        self.undominated(open)
    }

    /// Lower bound in seconds on all partitions by [means of paths](super::path_mean): `cutoff` or more where none takes less, and 0
    /// where there is no such bound.
    pub(crate) fn mean_of_paths(
        &self,
        overheads: &PipelineOverheads,
        cutoff: f64,
        multipliers: &mut Option<Multipliers>,
    ) -> f64 {
        let choices = match self.context.chunks {
            1 => self.open(overheads, cutoff).choices,
            _ => vec![overheads.of(&self.even_counts())],
        };
        let budgets = self.stages.iter().map(|memory| memory.budget).collect();
        let (layouts, known) = (overheads.layouts(), multipliers.take());
        let means = PathMean::new(self.segments, self.context, layouts, budgets, known);
        let Some(mut means) = means else { return 0.0 };
        let is_interrupted: &dyn Fn() -> bool = &|| self.interrupt_if_out_of_time();
        let bounds = choices.into_iter().map(|of| means.bound(of, cutoff, is_interrupted));
        let least = bounds.fold(f64::INFINITY, f64::min);
        *multipliers = means.into_multipliers();
        least
    }

    /// Lower bound in seconds on all partitions by [branching](super::path_mean) on the numbers of blocks of stages, of which `enough` is
    /// enough. With divisions that may take less than `target`.
    pub(crate) fn branched(
        &self,
        overheads: &PipelineOverheads,
        (enough, target): (f64, f64),
    ) -> (f64, Vec<MixedDivision>) {
        let choices = self.open(overheads, target).choices;
        let budgets = self.stages.iter().map(|memory| memory.budget).collect();
        let layouts = overheads.layouts();
        let means = PathMean::new(self.segments, self.context, layouts, budgets, None);
        let Some(mut means) = means else { return (0.0, vec![]) };
        let is_interrupted: &dyn Fn() -> bool = &|| self.interrupt_if_out_of_time();
        means.branched(choices, (enough, target), is_interrupted)
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
    /// least `cutoff`, or the deadline has passed.
    fn interleaved_partition(
        &self,
        overheads: &PipelineOverheads,
        cutoff: f64,
    ) -> Option<Partition> {
        let partition =
            Partition::with_counts(self.even_counts(), &|run| self.best_assignment(run))?;
        let least = |stage: usize| partition.stages[stage].microbatch_time_min.0;
        let bound = Seconds(self.interleaved_bound(overheads, least));
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
        // Interleaved pipelines and single stages are bounded by the time of both passes.
        let passes = |spec| match is_pipeline && self.context.chunks == 1 {
            true => self.segments.min_pass_times_with_flows(spec, self.context),
            false => PassTimesMin::default(),
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
}
