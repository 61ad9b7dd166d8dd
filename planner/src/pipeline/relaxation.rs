//! Relaxed stages: lower bounds on the time of a stage's blocks that need two hull edges for all numbers of blocks.
//!
//! A supporting line of the hull bounds the time of each block from below by `intercept − multiplier·bytes`. Blocks of other shapes
//! have other lines at the same multiplier, so n blocks that share a budget of B bytes take at least
//!
//! ```text
//! Σ intercepts − multiplier·B
//! ```
//! The multiplier is that of the edge over the bytes of a block when all stages have equally many. A division of the blocks
//! that is no better with relaxed stages is no better with assigned ones.

use std::ops::{Add, Range};
use std::sync::Arc;

use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Bytes, Context, Seconds};

use super::assignment::StageAssignment;
use super::in_flight::in_flight_in_chunk;
use super::prefix_sums::{prefix_sums, sum_of_run};
use crate::segment::{ASYMPTOTIC_MICROBATCHES, SegmentSolver, SegmentSpec};
use crate::solve::SupportingLine;

/// Relative error of sums of bytes.
const ROUNDING: f64 = 1e-12;

/// Lower bounds for the blocks of one stage.
pub(super) struct RelaxedStage {
    budget: Bytes,
    microbatches: f64,
    /// Time of the blocks in a step: their passes and their step phases.
    step: BlockLines,
    /// Time of the blocks in a step of [`ASYMPTOTIC_MICROBATCHES`].
    asymptotic: BlockLines,
    /// Prefix sums of the largest time of each block in the step phase, in seconds.
    step_phase_max: Vec<f64>,
}

/// Prefix sums over the supporting lines of all blocks at one multiplier.
struct BlockLines {
    multiplier: f64,
    intercepts: Vec<f64>,
    bytes_min: Vec<f64>,
}

impl BlockLines {
    fn new(multiplier: f64, lines: &[SupportingLine]) -> BlockLines {
        BlockLines {
            multiplier,
            intercepts: prefix_sums(lines.iter().map(|line| line.intercept), Add::add),
            bytes_min: prefix_sums(lines.iter().map(|line| line.bytes_min), Add::add),
        }
    }

    /// Lower bound on the time of a run of blocks in seconds, within a budget.
    fn time(&self, run: &Range<usize>, budget: Bytes) -> f64 {
        sum_of_run(&self.intercepts, run) - self.multiplier * budget.as_f64()
    }
}

impl RelaxedStage {
    /// The relaxation of a stage whose blocks have `budget` bytes; `None` when a block has no legal decisions.
    pub(super) fn new(
        segments: &SegmentSolver,
        context: &Context,
        boundary: BoundaryLayout,
        stage: usize,
        budget: Bytes,
    ) -> Option<RelaxedStage> {
        let blocks = segments.layer_shapes().len() as u64;
        let average = Bytes((budget.0 / blocks).saturating_mul(context.mesh.pipeline));
        let in_flight = in_flight_in_chunk(context, stage, 0);
        let spec = typical_block(segments, boundary);
        let line =
            |context: &Context, _| segments.supporting_line(spec, context, in_flight, average);
        let relaxed = RelaxedStage::with_lines(segments, context, (spec, stage, budget), line)?;
        let RelaxedStage { microbatches, step, asymptotic, .. } = &relaxed;
        let multipliers = [
            step.multiplier / microbatches,
            asymptotic.multiplier / ASYMPTOTIC_MICROBATCHES as f64,
        ];
        segments.store_byte_multipliers(spec, context, stage, multipliers);
        Some(relaxed)
    }

    /// As [`RelaxedStage::new`] with lines at multipliers that are known: of earlier searches, or else of the first stage,
    /// which has the most microbatches in flight. A line takes one elimination instead of a hull, and holds at any multiplier.
    pub(super) fn at_known_multipliers(
        segments: &SegmentSolver,
        context: &Context,
        boundary: BoundaryLayout,
        stage: usize,
        budget: Bytes,
    ) -> Option<RelaxedStage> {
        let spec = typical_block(segments, boundary);
        let known = |stage| segments.byte_multipliers(spec, context, stage);
        let Some(multipliers) = known(stage).or_else(|| known(0)) else {
            return RelaxedStage::new(segments, context, boundary, stage, budget);
        };
        let in_flight = in_flight_in_chunk(context, stage, 0);
        let line = |context: &Context, number: usize| {
            let multiplier = multipliers[number] * microbatches(context);
            segments.line_at_multiplier(spec, context, in_flight, multiplier)
        };
        RelaxedStage::with_lines(segments, context, (spec, stage, budget), line)
    }

    /// The relaxation with the lines of a block in a step, number 0, and in a step of [`ASYMPTOTIC_MICROBATCHES`], number 1.
    fn with_lines(
        segments: &SegmentSolver,
        context: &Context,
        (block, stage, budget): (SegmentSpec, usize, Bytes),
        line: impl Fn(&Context, usize) -> Option<SupportingLine>,
    ) -> Option<RelaxedStage> {
        let many = SegmentSolver::asymptotic(context);
        let in_flight = in_flight_in_chunk(context, stage, 0);
        let spec = |shape| SegmentSpec { shape, ..block };
        let lines = |context: &Context, number: usize| {
            let of_block = line(context, number)?;
            let multiplier = of_block.multiplier;
            let of_shape = |shape| match shape == block.shape {
                true => Some(of_block),
                false => segments.line_at_multiplier(spec(shape), context, in_flight, multiplier),
            };
            let of_blocks = segments.of_layers(of_shape).into_iter().collect::<Option<Vec<_>>>()?;
            Some(BlockLines::new(multiplier, &of_blocks))
        };
        let step_phase_max =
            segments.of_layers(|shape| segments.step_phase_range(spec(shape), &many)[1]);
        Some(RelaxedStage {
            budget,
            microbatches: microbatches(context),
            step: lines(context, 0)?,
            asymptotic: lines(&many, 1)?,
            step_phase_max: prefix_sums(step_phase_max.into_iter(), Add::add),
        })
    }

    /// Lower bounds on the times of a run of blocks, over all assignments within the budget; `None` when no assignment
    /// fits.
    pub(super) fn assignment(&self, run: Range<usize>) -> Option<Arc<StageAssignment>> {
        // As sums over other blocks are left out, they are inexact.
        if sum_of_run(&self.step.bytes_min, &run) * (1.0 - ROUNDING) > self.budget.as_f64() {
            return None;
        }
        let step = self.step.time(&run, self.budget);
        let asymptotic =
            self.asymptotic.time(&run, self.budget) - sum_of_run(&self.step_phase_max, &run);
        Some(Arc::new(StageAssignment {
            forward: Seconds((step / self.microbatches).max(0.0)),
            microbatch_time_min: Seconds(asymptotic / ASYMPTOTIC_MICROBATCHES as f64),
            ..StageAssignment::default()
        }))
    }
}

/// Lower bound on the time of a run of blocks in a step over all assignments within the budget of their stage, for which all
/// blocks have the microbatches in flight of its first chunk; `None` when a block has no legal decisions.
pub(super) fn least_step_time(
    segments: &SegmentSolver,
    context: &Context,
    (boundary, stage, budget): (BoundaryLayout, usize, Bytes),
    run: Range<usize>,
) -> Option<Seconds> {
    let in_flight = in_flight_in_chunk(context, stage, 0);
    let typical = typical_block(segments, boundary);
    let average = budget / run.len().max(1) as u64;
    let of_typical = segments.supporting_line(typical, context, in_flight, average)?;
    let multiplier = of_typical.multiplier;
    let of_shape = |shape| match shape == typical.shape {
        true => Some(of_typical),
        false => {
            let spec = SegmentSpec { shape, ..typical };
            segments.line_at_multiplier(spec, context, in_flight, multiplier)
        }
    };
    let of_blocks = segments.of_layers(of_shape).into_iter().collect::<Option<Vec<_>>>()?;
    Some(Seconds(BlockLines::new(multiplier, &of_blocks).time(&run, budget).max(0.0)))
}

/// The block whose shape most blocks have.
fn typical_block(segments: &SegmentSolver, boundary: BoundaryLayout) -> SegmentSpec {
    let count = |shape: &usize| segments.layer_shapes().iter().filter(|of| *of == shape).count();
    let typical = (0..segments.shape_count()).max_by_key(count).unwrap_or(0);
    SegmentSpec::block(typical, boundary)
}

/// Microbatches of a step.
fn microbatches(context: &Context) -> f64 {
    context.workload.microbatches(&context.mesh) as f64
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use super::super::{StageBlocks, StagePartitioner};
    use super::*;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::Request;

    #[test]
    fn no_assignment_is_faster_than_the_relaxed_one() {
        let model = presets::find("cola-350m").expect("a preset");
        let profile = profile::preset("a100-80gb").expect("a preset");
        let request = Request { pipeline: Some(3), ..Request::new(model, profile, 6, 24, 4096) };
        let segments = SegmentSolver::new(&request, Deadline::none());
        let (mut bounded, mut excluded) = (0, 0);
        // Interleaved pipelines divide their blocks evenly, and have no relaxation.
        for context in contexts(&request).into_iter().filter(|context| context.chunks == 1) {
            let Some(boundary) = segments.boundary_layouts(&context).into_iter().next() else {
                continue;
            };
            let microbatches = context.workload.microbatches(&context.mesh) as f64;
            for budget in [1, 2, 4, 8, 16].map(|gib| Bytes(gib << 30)) {
                let budgets = vec![budget; 3];
                let partitioner = StagePartitioner::new(&segments, &context, boundary, budgets);
                for stage in 0..3 {
                    let relaxed = RelaxedStage::new(&segments, &context, boundary, stage, budget);
                    let relaxed = relaxed.expect("a block has legal decisions");
                    for count in [1, 2, 5, 8, 12] {
                        let blocks = StageBlocks { stage, first: 0, count };
                        let assigned = partitioner.best_assignment(blocks);
                        let Some(lower) = relaxed.assignment(0..count) else {
                            assert!(assigned.is_none());
                            excluded += 1;
                            continue;
                        };
                        let Some(assigned) = assigned else { continue };
                        let time = (assigned.forward + assigned.backward).0;
                        let step = microbatches * time + assigned.step_phase.0;
                        let case = format!("{context:?}: {count} blocks in {budget}");
                        assert!(microbatches * lower.forward.0 <= step * (1.0 + 1e-9), "{case}");
                        let relaxed_time = lower.microbatch_time_min.0;
                        assert!(relaxed_time <= time * (1.0 + 1e-9), "{case}");
                        bounded += 1;
                    }
                }
            }
        }
        assert!(bounded > 100 && excluded > 10, "{bounded} bounded, {excluded} excluded");
    }
}
