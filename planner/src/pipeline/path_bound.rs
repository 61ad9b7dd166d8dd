//! Lower bound on the step of an interleaved pipeline from passes, reductions and updates of the same decisions.
//!
//! The order of passes is fixed, so a step takes at least the time of any path of passes that follow one another, and of the step phase
//! of the stage at which it ends. The updates of all stages follow the norm of all gradients, which follows the path: any mean of
//! them counts. The path is the critical one at typical times, and each stage's updates count by its share of the passes. The time of
//! each segment is the least of its sum over the decisions.
//!
//! The gradient reductions of the stage at the end begin with its last pass, the one through its first chunk. They add h of their time to
//! a longer pass, and c' of a shorter pass adds to them, as in the [joint bounds](super::joint_bound) of other schedules.

use narrows_cost_model::{PassTimes, StageTime, StepPart, StepWeights, simulate_schedules};
use narrows_plan::graph::SegmentKind;
use narrows_plan::program::{MicrobatchPass, Phase, StageSchedule};
use narrows_plan::strategy::{BoundaryLayout, TiedWeightLayout};
use narrows_plan::{Context, Seconds};

use super::interleaved::chunk_blocks;
use super::overhead::StageOverhead;
use crate::segment::{SegmentSolver, SegmentSpec};

/// A path of passes through the schedules of an interleaved pipeline.
struct SchedulePath {
    /// Forward and backward passes on the path by virtual stage.
    passes: Vec<[f64; 2]>,
    /// The stage at which it ends.
    end: usize,
}

impl SchedulePath {
    /// The critical path of a step with these times of each stage.
    fn critical(context: &Context, times: &[StageTime]) -> Option<SchedulePath> {
        let stages = times.len();
        let schedules: Vec<Vec<MicrobatchPass>> = (0..stages as u64)
            .map(|stage| StageSchedule::of(context, stage).passes(false))
            .collect();
        let schedules: Vec<&[MicrobatchPass]> = schedules.iter().map(Vec::as_slice).collect();
        let spans = simulate_schedules(times, &schedules).spans;
        let (step_phases, passes): (Vec<_>, Vec<_>) =
            spans.into_iter().partition(|span| span.pass == MicrobatchPass::STEP);
        let end = step_phases.iter().max_by(|a, b| a.end.0.total_cmp(&b.end.0))?.stage;
        let mut path = SchedulePath { passes: vec![[0.0; 2]; context.virtual_stages()], end };
        let mut at = passes.iter().rposition(|span| span.stage == end)?;
        loop {
            let span = &passes[at];
            let virtual_stage = context.virtual_stage(span.stage, span.pass.chunk);
            path.passes[virtual_stage][usize::from(span.pass.phase == Phase::Backward)] += 1.0;
            if span.begin <= Seconds(0.0) {
                return Some(path);
            }
            // A pass begins when the one before it on its stage has ended, or the same microbatch on a neighbour.
            let same_microbatch = MicrobatchPass { chunk: 0, ..span.pass };
            let is_awaited = |other: &MicrobatchPass, stage: usize| {
                let other_stage = context.virtual_stage(stage, other.chunk);
                other_stage.abs_diff(virtual_stage) == 1
                    && MicrobatchPass { chunk: 0, ..*other } == same_microbatch
            };
            at = passes[..at].iter().rposition(|other| {
                other.end == span.begin
                    && (other.stage == span.stage || is_awaited(&other.pass, other.stage))
            })?;
        }
    }

    /// Weights of a segment of a virtual stage, and of backward transfers.
    fn weights(&self, virtual_stage: usize, terms: &Terms) -> (StepWeights, f64) {
        let Terms { stages, hidden, hidden_computation, longer_reductions } = *terms;
        let [forward, backward] = self.passes[virtual_stage];
        let (stage, is_first_chunk) = (virtual_stage % stages, virtual_stage < stages);
        let is_end = stage == self.end;
        let waits = is_end && longer_reductions;
        // The last pass, and its transfer.
        let [of_last, transfer] = match waits && is_first_chunk {
            true => [hidden_computation, 1.0],
            false => [0.0; 2],
        };
        let counted = f64::from(is_end);
        let weights = StepWeights {
            forward,
            backward: backward - of_last,
            step_phase: counted,
            update: self.share(stage, stages) - counted,
            // A later stage may hide gathers of updated weights while it waits for its first microbatch.
            gathered: if is_end && self.end > 0 { -hidden } else { 0.0 },
            overlapped: if waits { 1.0 - hidden } else { 0.0 },
            // Whether sharded gradients are reduced after the last backward pass is left open.
            sharded_gathers: hidden * (forward + (backward - 1.0).max(0.0)),
            sharded_reductions: hidden * (backward - 1.0).max(0.0),
            ..StepWeights::default()
        };
        (weights, backward - transfer)
    }

    /// Share of the passes of the path that a stage has.
    fn share(&self, stage: usize, stages: usize) -> f64 {
        let count = |passes: &[f64; 2]| passes[0] + passes[1];
        let own: f64 = self.passes.iter().skip(stage).step_by(stages).map(count).sum();
        own / self.passes.iter().map(count).sum::<f64>()
    }
}

/// Terms of the weights of segments on a path.
struct Terms {
    stages: usize,
    /// Least time that a hidden collective adds to a step, over its time alone.
    hidden: f64,
    /// The part of overlapped computation that a longer collective hides.
    hidden_computation: f64,
    /// Whether the reductions of the stage at the end take longer than its last pass.
    longer_reductions: bool,
}

/// Lower bound in seconds on the step of an interleaved pipeline with these layouts, without the memory limit; `None` where a segment
/// has no legal decisions.
pub(super) fn path_bound(
    segments: &SegmentSolver,
    context: &Context,
    layouts: (BoundaryLayout, Option<TiedWeightLayout>),
    overheads: &[StageOverhead],
) -> Option<f64> {
    let times = typical_times(segments, context, layouts.0, overheads)?;
    let path = SchedulePath::critical(context, &times)?;
    let slowdown = segments.prices(context).overlap_slowdown();
    let hidden = slowdown.map_or(0.0, |slowdown| slowdown.hidden_cost());
    let hidden_computation =
        slowdown.map_or(0.0, |slowdown| 1.0 - slowdown.hidden_computation_cost());
    let bound = |longer_reductions| {
        let terms =
            Terms { stages: overheads.len(), hidden, hidden_computation, longer_reductions };
        time_of_path(&path, &terms, (segments, context, layouts), overheads)
    };
    let mut bounds = vec![bound(false)?];
    if context.overlap_grad_reduce {
        bounds.push(bound(true)?);
    }
    bounds.into_iter().reduce(f64::max)
}

/// Lower bound in seconds on a step because of a path.
fn time_of_path(
    path: &SchedulePath,
    terms: &Terms,
    (segments, context, (boundary, tied_weight)): (
        &SegmentSolver,
        &Context,
        (BoundaryLayout, Option<TiedWeightLayout>),
    ),
    overheads: &[StageOverhead],
) -> Option<f64> {
    let shapes = segments.layer_shapes();
    let virtual_stages = context.virtual_stages();
    let mut known: Vec<(SegmentSpec, StepWeights, f64)> = vec![];
    let mut least = |spec: SegmentSpec, weights: StepWeights| {
        let same = known.iter().find(|(other, of, _)| *other == spec && *of == weights);
        if let Some((.., time)) = same {
            return Some(*time);
        }
        let time = segments.min_weighted_time(spec, context, &weights)?;
        known.push((spec, weights, time));
        Some(time)
    };
    let end = &overheads[path.end];
    let mut bound = end.besides_ends[2].0;
    if terms.longer_reductions {
        bound -= end.first_block_min.0;
    }
    for virtual_stage in 0..virtual_stages {
        let (stage, chunk) = context.stage_and_chunk(virtual_stage);
        let (weights, transfers) = path.weights(virtual_stage, terms);
        let ends = [
            (virtual_stage == 0).then_some(SegmentKind::Embedding),
            (virtual_stage + 1 == virtual_stages).then_some(SegmentKind::Head),
        ];
        let ends = ends.into_iter().flatten();
        let ends = ends.map(|kind| SegmentSpec::embedding_or_head(kind, boundary, tied_weight));
        let blocks = &shapes[chunk_blocks(context, virtual_stage, shapes.len())];
        let blocks = blocks.iter().map(|shape| SegmentSpec::block(*shape, boundary));
        for spec in ends.chain(blocks) {
            bound += least(spec, weights)?;
        }
        let [forward, backward] = overheads[stage].transfers[chunk];
        bound += (forward * weights.forward + backward * transfers).0;
    }
    Some(bound)
}

/// Times of each stage with the fastest decisions of each block.
fn typical_times(
    segments: &SegmentSolver,
    context: &Context,
    boundary: BoundaryLayout,
    overheads: &[StageOverhead],
) -> Option<Vec<StageTime>> {
    let shapes = segments.layer_shapes();
    let of_shapes =
        segments.of_layers(|shape| segments.fastest(SegmentSpec::block(shape, boundary), context));
    let of_stage = |(stage, overhead): (usize, &StageOverhead)| {
        let mut step_phase = overhead.step_phase;
        let mut of_chunk = |(chunk, [forward, backward]): (usize, &[Seconds; 2])| {
            let virtual_stage = context.virtual_stage(stage, chunk);
            let mut passes =
                PassTimes { forward: *forward, backward: *backward, ..PassTimes::default() };
            for block in &of_shapes[chunk_blocks(context, virtual_stage, shapes.len())] {
                let time = block.as_ref()?.time;
                passes.forward += time.forward;
                passes.backward += time.backward;
                step_phase += time.step_phase;
            }
            Some(passes)
        };
        let chunks: Option<Vec<PassTimes>> =
            overhead.chunks.iter().enumerate().map(&mut of_chunk).collect();
        Some(StageTime {
            chunks: chunks?,
            step_phase: vec![StepPart::Local(step_phase)],
            overlap: None,
        })
    };
    overheads.iter().enumerate().map(of_stage).collect()
}
