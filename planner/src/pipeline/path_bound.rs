//! Lower bound on the step of an interleaved pipeline from passes, reductions and updates of the same decisions.
//!
//! The order of passes is fixed, so a step takes at least the time of any path of passes that follow one another, and of the step phase
//! of the stage at which it ends. The updates of all stages follow the norm of all gradients, which follows the path: any mean of
//! them counts. The path is the critical one at typical times, and each stage's updates count by its share of the passes. The time of
//! each segment is the least of its sum over the decisions.

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

    /// Weights of a segment of a virtual stage, where a stage's updates count by this share. `hidden` is the least time that a
    /// hidden collective adds to a step, over its time alone.
    fn weights(&self, virtual_stage: usize, stages: usize, share: f64, hidden: f64) -> StepWeights {
        let [forward, backward] = self.passes[virtual_stage];
        let is_end = virtual_stage % stages == self.end;
        let counted = f64::from(is_end);
        StepWeights {
            forward,
            backward,
            step_phase: counted,
            update: share - counted,
            // A later stage may hide gathers of updated weights while it waits for its first microbatch.
            gathered: if is_end && self.end > 0 { -hidden } else { 0.0 },
            // Whether sharded gradients are reduced after the last backward pass is left open.
            sharded_gathers: hidden * (forward + (backward - 1.0).max(0.0)),
            sharded_reductions: hidden * (backward - 1.0).max(0.0),
            ..StepWeights::default()
        }
    }

    /// Share of the passes of the path that a stage has.
    fn share(&self, stage: usize, stages: usize) -> f64 {
        let count = |passes: &[f64; 2]| passes[0] + passes[1];
        let own: f64 = self.passes.iter().skip(stage).step_by(stages).map(count).sum();
        own / self.passes.iter().map(count).sum::<f64>()
    }
}

/// Lower bound in seconds on the step of an interleaved pipeline with these layouts, without the memory limit; `None` where a segment
/// has no legal decisions.
pub(super) fn path_bound(
    segments: &SegmentSolver,
    context: &Context,
    (boundary, tied_weight): (BoundaryLayout, Option<TiedWeightLayout>),
    overheads: &[StageOverhead],
) -> Option<f64> {
    let shapes = segments.layer_shapes();
    let virtual_stages = context.virtual_stages();
    let blocks = |virtual_stage: usize| &shapes[chunk_blocks(context, virtual_stage, shapes.len())];
    let path =
        SchedulePath::critical(context, &typical_times(segments, context, boundary, overheads)?)?;
    let slowdown = segments.prices(context).overlap_slowdown();
    let hidden = slowdown.map_or(0.0, |slowdown| slowdown.hidden_cost());
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
    let mut bound = overheads[path.end].besides_ends[2].0;
    for virtual_stage in 0..virtual_stages {
        let (stage, chunk) = context.stage_and_chunk(virtual_stage);
        let share = path.share(stage, overheads.len());
        let weights = path.weights(virtual_stage, overheads.len(), share, hidden);
        let ends = [
            (virtual_stage == 0).then_some(SegmentKind::Embedding),
            (virtual_stage + 1 == virtual_stages).then_some(SegmentKind::Head),
        ];
        let ends = ends.into_iter().flatten();
        let ends = ends.map(|kind| SegmentSpec::embedding_or_head(kind, boundary, tied_weight));
        let blocks = blocks(virtual_stage).iter().map(|shape| SegmentSpec::block(*shape, boundary));
        for spec in ends.chain(blocks) {
            bound += least(spec, weights)?;
        }
        let transfers = overheads[stage].transfers[chunk];
        bound += (transfers[0] * weights.forward + transfers[1] * weights.backward).0;
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
