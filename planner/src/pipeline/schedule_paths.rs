//! Paths of passes through a pipeline that a step waits for, each critical at some times of the stages.
//!
//! The order of passes is fixed, so a step takes at least the time of any path of passes that follow one another, and of the step phase
//! of the stage at which it ends.
//!
//! The gradient reductions of the stage at the end begin with its last pass, and gathers of updated weights with the first pass of a
//! stage. Either h of their time adds to a longer pass, or c' of a shorter pass adds to them, as in the [joint
//! bounds](super::joint_bound). The first of several blocks in a last pass counts in full all the same, as its reductions follow it,
//! and so does the last of several in a first pass, which its gathers precede. A last pass of weight gradients alone hides reductions,
//! unless the stage has none: each block that has no weight gradients with a pass of their own therefore counts as if its backward
//! pass hid them. A later stage hides gathers while it waits for its first microbatch: at most all of them, and at most as long as it
//! waits. A path may also begin with the gathers of a later stage, in place of the forward passes of the first microbatch on the
//! stages before it.

use narrows_cost_model::{
    PassTimes, PassTimesMin, StageTime, StepPart, StepWeights, simulate_schedules,
};
use narrows_plan::program::{MicrobatchPass, Phase, StageSchedule};
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Context, Seconds};

use super::interleaved::chunk_blocks;
use super::joint_times::JointPricing;
use super::overhead::StageOverhead;
use super::roles::{CASES, Longer};
use super::stage_position::StepSchedule;
use super::step_path::{ClassTimes, SegmentClass, StepPath};
use crate::segment::{SegmentSolver, SegmentSpec};

/// A path of passes through the schedules of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SchedulePath {
    /// Forward, backward and weight-gradient passes on the path by virtual stage.
    passes: Vec<[f64; 3]>,
    /// The last stage on whose forward pass of the first microbatch the path waits.
    first_forward: usize,
    /// The stage at which it ends.
    end: usize,
}

/// The part of a later stage's gathers that its wait for the first microbatch hides, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HiddenGathers {
    /// All of them.
    All,
    /// The time of the wait.
    DuringWait,
}

/// A case of collectives over the data axis on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathCase {
    /// The stage whose first forward pass the path begins with: beyond the first stage, its gathers take longer.
    begin: usize,
    /// Whether the gathers of the stage at the begin, and the reductions of the stage at the end, take longer than the pass beside them.
    longer: Longer,
    later_gathers: HiddenGathers,
}

/// Weighs the paths of a pipeline.
pub(super) struct SchedulePaths<'a> {
    segments: &'a SegmentSolver<'a>,
    context: &'a Context,
    boundary: BoundaryLayout,
    step: StepSchedule,
    /// Collectives that may take longer than the passes of a stage.
    possible: Longer,
    /// Least time that a hidden collective adds to a step, over its time alone.
    hidden: f64,
    /// The part of overlapped computation that a longer collective hides.
    hidden_computation: f64,
    /// Least times of the forward, the backward and the weight-gradient pass of one microbatch through a block, in seconds.
    block_min: [f64; 3],
}

impl<'a> SchedulePaths<'a> {
    /// `None` with one stage, and where passes run two microbatches.
    pub(super) fn new(
        segments: &'a SegmentSolver<'a>,
        context: &'a Context,
        layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    ) -> Option<SchedulePaths<'a>> {
        let possible = match context.chunks {
            1 => JointPricing::new(segments, context, layouts)?.possible(),
            _ => Longer { gathers: false, reductions: context.overlap_grad_reduce },
        };
        let slowdown = segments.prices(context).overlap_slowdown();
        let step = StepSchedule::of(context);
        let of_shape = |shape: usize| {
            let spec = SegmentSpec::block(shape, layouts.0);
            let PassTimesMin { forward, backward, .. } = segments.min_pass_times(spec, context);
            let weights = StepWeights { weight_gradient: 1.0, ..StepWeights::default() };
            let weight_gradient = match step.has_weight_gradient_passes {
                true => segments.min_weighted_time(spec, context, &weights)?,
                false => 0.0,
            };
            Some([forward, backward, weight_gradient])
        };
        let of_shapes: Option<Vec<[f64; 3]>> = (0..segments.shape_count()).map(of_shape).collect();
        let least = |a: [f64; 3], b: [f64; 3]| [0, 1, 2].map(|pass| a[pass].min(b[pass]));
        Some(SchedulePaths {
            segments,
            context,
            boundary: layouts.0,
            step,
            possible,
            hidden: slowdown.map_or(0.0, |slowdown| slowdown.hidden_cost()),
            hidden_computation: slowdown
                .map_or(0.0, |slowdown| 1.0 - slowdown.hidden_computation_cost()),
            block_min: of_shapes?.into_iter().reduce(least)?,
        })
    }

    /// Whether a stage may have weight-gradient passes.
    fn defers_weight_gradients(&self, stage: usize) -> bool {
        let schedule = StageSchedule::of(self.context, stage as u64);
        schedule.defers_weight_gradients() && !self.context.shards_gradients()
    }

    /// The critical path where segments have these times, in the case in which it is longest.
    pub(super) fn longest(
        &self,
        times: &[ClassTimes],
        division: (&[StageOverhead], &[usize]),
    ) -> Option<(SchedulePath, PathCase)> {
        let (overheads, _) = division;
        let of_stages: Vec<_> = times.iter().map(SegmentTimes::of).collect();
        let path = self.critical(&of_stages, overheads)?;
        let length = |case: &PathCase| self.weighted(&path, *case, division).length(times);
        let case = self.cases(&path).into_iter().max_by(|a, b| length(a).total_cmp(&length(b)))?;
        Some((path, case))
    }

    /// The critical path with the fastest decisions of each block in an even division, without longer collectives.
    pub(super) fn typical(&self, overheads: &[StageOverhead]) -> Option<(SchedulePath, PathCase)> {
        let path = self.critical(&self.typical_times(overheads)?, overheads)?;
        let case = *self.cases(&path).first()?;
        Some((path, case))
    }

    /// The cases that a path may have, the first one without longer collectives.
    fn cases(&self, path: &SchedulePath) -> Vec<PathCase> {
        let later: &[HiddenGathers] = match path.end > 0 && self.context.gathers_in_forward() {
            true => &[HiddenGathers::All, HiddenGathers::DuringWait],
            false => &[HiddenGathers::All],
        };
        let is_possible = |longer: &Longer| {
            (!longer.gathers || self.possible.gathers)
                && (!longer.reductions || self.possible.reductions)
        };
        let last_begin = if self.context.gathers_in_forward() { path.first_forward } else { 0 };
        let mut cases = vec![];
        for longer in CASES.into_iter().filter(is_possible) {
            let first = |later_gathers| PathCase { begin: 0, longer, later_gathers };
            cases.extend(later.iter().copied().map(first));
            if longer.gathers {
                let at = |begin| PathCase { begin, longer, later_gathers: HiddenGathers::All };
                cases.extend((1..=last_begin).map(at));
            }
        }
        cases
    }

    /// The weights of a path in a case of divisions with at least so many blocks on each stage.
    pub(super) fn weighted(
        &self,
        path: &SchedulePath,
        case: PathCase,
        (overheads, least): (&[StageOverhead], &[usize]),
    ) -> StepPath {
        let stages = overheads.len();
        let end = &overheads[path.end];
        let ends_with_weight_gradients = self.defers_weight_gradients(path.end) && !end.is_empty;
        let mut besides_segments = end.besides_ends[2].0;
        if case.longer.gathers && path.end == case.begin {
            besides_segments -= end.first_gather_min.0;
        }
        if case.longer.reductions {
            besides_segments -= end.first_block_min.0;
        }
        besides_segments +=
            self.beside_no_collective(path, (case, ends_with_weight_gradients), least);
        // A stage all of whose blocks are without such passes ends with a backward pass.
        let ends_with_backward =
            !ends_with_weight_gradients || !self.step.has_weight_gradient_passes;
        for (virtual_stage, [forward, backward, _]) in path.passes.iter().enumerate() {
            let (stage, chunk) = self.context.stage_and_chunk(virtual_stage);
            let overhead = &overheads[stage];
            let [of_forward, of_backward] = match self.context.chunks {
                1 => [overhead.besides_ends[0], overhead.besides_ends[1]],
                _ => overhead.transfers[chunk],
            };
            // The last transfer of a gradient may overlap with reductions.
            let is_last = stage == path.end && virtual_stage < stages;
            let overlaps = is_last && case.longer.reductions && ends_with_backward;
            let hidden = self.hidden_by_wait(path, virtual_stage, case);
            // A first microbatch may come while a stage gathers.
            let is_before = case.begin > 0 && virtual_stage <= case.begin;
            let counted = [forward - hidden - f64::from(is_before), backward - f64::from(overlaps)];
            besides_segments += (of_forward * counted[0] + of_backward * counted[1]).0;
        }
        let weights = |virtual_stage, class| {
            self.weights(path, virtual_stage, class, (case, ends_with_weight_gradients))
        };
        StepPath::new(path.passes.len(), weights, besides_segments)
    }

    /// The hidden part of the blocks whose passes no longer collective overlaps with, in seconds. Parts of the bucket of a stage's only
    /// block overlap with its own passes, and the collectives of the head with those of the blocks.
    fn beside_no_collective(
        &self,
        path: &SchedulePath,
        (case, ends_with_weight_gradients): (PathCase, bool),
        least: &[usize],
    ) -> f64 {
        let has_such =
            |stage: usize| self.context.chunks == 1 && stage + 1 < least.len() && least[stage] >= 2;
        let [forward, backward, weight_gradient] = self.block_min;
        let of_gathers = if case.longer.gathers && has_such(case.begin) { forward } else { 0.0 };
        let last = if ends_with_weight_gradients { weight_gradient } else { backward };
        let of_reductions = if case.longer.reductions && has_such(path.end) { last } else { 0.0 };
        self.hidden_computation * (of_gathers + of_reductions)
    }

    /// The part of the first forward pass on a virtual stage that a later one may hide gathers for.
    fn hidden_by_wait(&self, path: &SchedulePath, virtual_stage: usize, case: PathCase) -> f64 {
        let is_waited_for = virtual_stage < path.end && self.context.gathers_in_forward();
        let is_hidden = is_waited_for && case.later_gathers == HiddenGathers::DuringWait;
        if is_hidden { self.hidden } else { 0.0 }
    }

    /// Weights of the first forward pass of the stage at the begin, beyond one, and of its gathers, beyond those in its step phase.
    fn first_gathers(&self, path: &SchedulePath, case: PathCase) -> [f64; 2] {
        let counted = if path.end == case.begin { self.hidden } else { 0.0 };
        let [pass, gathers] = match case.longer.gathers {
            true => [1.0 - self.hidden_computation, 1.0],
            false => [1.0, self.hidden],
        };
        let kept = 1.0 - self.hidden_by_wait(path, case.begin, case);
        [pass * kept - 1.0, gathers * kept - counted]
    }

    fn weights(
        &self,
        path: &SchedulePath,
        virtual_stage: usize,
        class: SegmentClass,
        (case, ends_with_weight_gradients): (PathCase, bool),
    ) -> StepWeights {
        let stages = self.context.mesh.pipeline as usize;
        let (stage, is_first_chunk) = (virtual_stage % stages, virtual_stage < stages);
        let [forward, backward, weight_gradient] = path.passes[virtual_stage];
        let is_end = stage == path.end;
        let counted = f64::from(is_end);
        let waits = is_end && case.longer.reductions;
        // The reductions of the head follow its last backward pass.
        let is_last = waits && is_first_chunk && class != SegmentClass::Head;
        let of_last = if is_last { self.hidden_computation } else { 0.0 };
        let [last_backward, last_weight_gradient] =
            match ends_with_weight_gradients && class == SegmentClass::Block {
                true => [0.0, of_last],
                false => [of_last, 0.0],
            };
        let [first_forward, gathered] = match stage {
            _ if !self.context.gathers_in_forward() => [0.0; 2],
            _ if stage < case.begin => [-1.0, if is_end { -self.hidden } else { 0.0 }],
            _ if stage == case.begin => self.first_gathers(path, case),
            _ if is_end && case.later_gathers == HiddenGathers::All => [0.0, -self.hidden],
            _ => [-self.hidden_by_wait(path, virtual_stage, case), 0.0],
        };
        let defers = class == SegmentClass::Block && self.defers_weight_gradients(stage);
        // Sharded weights may be gathered before the first microbatch comes, and whether gradients are reduced after the last
        // backward pass is left open.
        let first = f64::from(stage > 0);
        let gathers = (forward - first).max(0.0) + (backward - counted).max(0.0);
        StepWeights {
            forward: forward + first_forward,
            backward: backward - last_backward,
            weight_gradient: if defers {
                weight_gradient - backward - last_weight_gradient
            } else {
                0.0
            },
            step_phase: counted,
            update: -counted,
            gathered,
            overlapped: if waits { 1.0 - self.hidden } else { 0.0 },
            sharded_gathers: self.hidden * gathers,
            sharded_reductions: self.hidden * (backward - counted).max(0.0),
            ..StepWeights::default()
        }
    }

    /// The critical path where segments have these times; those of the stages besides them are added.
    fn critical(
        &self,
        segments: &[SegmentTimes],
        overheads: &[StageOverhead],
    ) -> Option<SchedulePath> {
        let of_stage = |(stage, overhead): (usize, &StageOverhead)| {
            let mut step_phase = overhead.besides_ends[2].0;
            let of_chunk = |(chunk, [forward, backward]): (usize, &[Seconds; 2])| {
                let times = &segments[self.context.virtual_stage(stage, chunk)];
                step_phase += times.step_phase;
                let deferred = match self.defers_weight_gradients(stage) {
                    true => times.weight_gradient,
                    false => 0.0,
                };
                PassTimes {
                    forward: *forward + Seconds(times.forward),
                    backward: *backward + Seconds(times.backward - deferred),
                    weight_gradient: Seconds(deferred),
                }
            };
            let chunks = overhead.transfers.iter().enumerate().map(of_chunk).collect();
            let step_phase = vec![StepPart::Local(Seconds(step_phase))];
            StageTime { chunks, step_phase, overlap: None }
        };
        let times: Vec<StageTime> = overheads.iter().enumerate().map(of_stage).collect();
        let of_stage = |stage: usize| {
            let schedule = StageSchedule::of(self.context, stage as u64);
            schedule.passes(self.defers_weight_gradients(stage))
        };
        let schedules: Vec<Vec<MicrobatchPass>> = (0..times.len()).map(of_stage).collect();
        let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
        SchedulePath::critical(self.context, &times, &schedules)
    }

    /// The times of the segments of each virtual stage with the fastest decisions of each block, in an even division.
    fn typical_times(&self, overheads: &[StageOverhead]) -> Option<Vec<SegmentTimes>> {
        let shapes = self.segments.layer_shapes();
        let of_shapes = self.segments.of_layers(|shape| {
            self.segments.fastest(SegmentSpec::block(shape, self.boundary), self.context)
        });
        let of_virtual_stage = |virtual_stage: usize| {
            let (stage, chunk) = self.context.stage_and_chunk(virtual_stage);
            let overhead = &overheads[stage];
            let [forward, backward] = [0, 1]
                .map(|pass| (overhead.chunks[chunk][pass] - overhead.transfers[chunk][pass]).0);
            let mut times = SegmentTimes { forward, backward, ..SegmentTimes::default() };
            if chunk == 0 {
                let of_ends = overhead.step_phase - overhead.besides_ends[2];
                times.step_phase = (of_ends - overhead.syncs.update).0;
            }
            for block in &of_shapes[chunk_blocks(self.context, virtual_stage, shapes.len())] {
                let time = block.as_ref()?.time;
                times.forward += time.forward.0;
                times.backward += time.backward.0;
                times.weight_gradient += time.weight_gradient.0;
                times.step_phase += (time.step_phase - time.update).0;
            }
            Some(times)
        };
        (0..self.context.virtual_stages()).map(of_virtual_stage).collect()
    }
}

impl SchedulePath {
    /// The stages at which it begins or ends beside longer collectives.
    pub(super) fn with_longer(&self, case: PathCase) -> impl Iterator<Item = usize> {
        let Longer { gathers, reductions } = case.longer;
        let begin = gathers.then_some(case.begin);
        begin.into_iter().chain(reductions.then_some(self.end))
    }

    /// The critical path of a step with these times and passes of each stage.
    fn critical(
        context: &Context,
        times: &[StageTime],
        schedules: &[&[MicrobatchPass]],
    ) -> Option<SchedulePath> {
        let spans = simulate_schedules(times, schedules).spans;
        let (step_phases, passes): (Vec<_>, Vec<_>) =
            spans.into_iter().partition(|span| span.pass == MicrobatchPass::STEP);
        let end = step_phases.iter().max_by(|a, b| a.end.0.total_cmp(&b.end.0))?.stage;
        let passes_on_path = vec![[0.0; 3]; context.virtual_stages()];
        let mut path = SchedulePath { passes: passes_on_path, first_forward: 0, end };
        let mut at = passes.iter().rposition(|span| span.stage == end)?;
        loop {
            let span = &passes[at];
            let virtual_stage = context.virtual_stage(span.stage, span.pass.chunk);
            let phase = match span.pass.phase {
                Phase::Forward => 0,
                Phase::Backward => 1,
                _ => 2,
            };
            path.passes[virtual_stage][phase] += 1.0;
            if phase == 0 && span.pass.microbatch == 0 {
                path.first_forward = path.first_forward.max(virtual_stage);
            }
            if span.begin <= Seconds(0.0) {
                return Some(path);
            }
            // A pass begins when the one before it on its stage has ended, or the same microbatch on a neighbour.
            let same_microbatch = MicrobatchPass { chunk: 0, ..span.pass };
            let is_awaited = |other: &MicrobatchPass, stage: usize| {
                let other_stage = context.virtual_stage(stage, other.chunk);
                other_stage.abs_diff(virtual_stage) == 1
                    && other.phase != Phase::WeightGradient
                    && MicrobatchPass { chunk: 0, ..*other } == same_microbatch
            };
            at = passes[..at].iter().rposition(|other| {
                other.end == span.begin
                    && (other.stage == span.stage || is_awaited(&other.pass, other.stage))
            })?;
        }
    }
}

/// The times of the segments of a virtual stage, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct SegmentTimes {
    forward: f64,
    /// With all weight gradients.
    backward: f64,
    /// Weight gradients that may have passes of their own.
    weight_gradient: f64,
    /// Without updates.
    step_phase: f64,
}

impl SegmentTimes {
    fn of(times: &ClassTimes) -> SegmentTimes {
        let sum = |weights: StepWeights| times.iter().map(|times| times.weighted(&weights)).sum();
        let none = StepWeights::default();
        let of_blocks = &times[SegmentClass::Block as usize];
        SegmentTimes {
            forward: sum(StepWeights { forward: 1.0, ..none }),
            backward: sum(StepWeights { backward: 1.0, ..none }),
            weight_gradient: of_blocks.weighted(&StepWeights { weight_gradient: 1.0, ..none }),
            step_phase: sum(StepWeights { step_phase: 1.0, update: -1.0, ..none }),
        }
    }
}
