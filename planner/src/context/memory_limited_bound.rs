//! Lower bound on a step whose stages keep activations within their memory, before any block is divided.
//!
//! Stage s of P has nₛ of the L blocks. For a multiplier λₛ of bytes, let vₛ be the least time of a block with the multiplier times
//! the bytes that it keeps of a microbatch, and ρ the bytes of its weights and optimizer states. Where blocks differ, both are the
//! least of all blocks, but vₛ is the mean where one stage has all of them. With wₛ microbatches in flight and Mₛ bytes of memory
//! besides embedding and head, the stage keeps at most (Mₛ − nₛ·ρ)/wₛ bytes of a microbatch, so that its microbatch time is
//!
//! ```text
//! tₛ ≥ nₛ·aₛ − cₛ      with aₛ = vₛ + λₛ·ρ/wₛ and cₛ = λₛ·Mₛ/wₛ
//! ```
//! A step S of m microbatches fills the pipeline, for at least ψ seconds with each block of the stages before s, and then runs m
//! of these. Weights yₛ ≥ 0 add these bounds up so that every block counts once:
//!
//! ```text
//! S ≥ ψ·Σ_{j<s} nⱼ + m·tₛ                               for every s
//! S·Σ yₛ ≥ L − m·Σ yₛ·cₛ                                with m·aⱼ·yⱼ = 1 − ψ·Σ_{s>j} yₛ
//! ```
//! Embedding, head, and what a stage of average size takes in its step phase are added in the same proportions.

use narrows_plan::{Bytes, Context, PipelineSchedule};

use super::average_stage::{StepPhaseMin, evenly_split_bytes};
use crate::request::Request;
use crate::segment::{LeastPasses, RelaxedPasses, SegmentSolver};

/// A line below the microbatch time of a stage.
struct StageLine {
    /// Seconds for each block.
    of_block: f64,
    /// Seconds that the stage's memory saves.
    saved: f64,
}

/// Lower bound in seconds on the step of a context, beside `step_phase`, that of a stage of average size; `None` when a segment
/// has no legal decisions.
pub(super) fn memory_limited_bound(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
    passes: &LeastPasses,
    step_phase: &StepPhaseMin,
) -> Option<f64> {
    let fastest = passes.fastest()?;
    let lines = stage_lines(request, segments, context, passes)?;
    let blocks = segments.layer_shapes().len() as f64;
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    let bound = |fill: f64, step_phase: f64| {
        let mut weights = vec![0.0; lines.len()];
        let mut after = 0.0;
        for (line, weight) in lines.iter().zip(&mut weights).rev() {
            *weight = ((1.0 - fill * after) / (microbatches * line.of_block)).max(0.0);
            after += *weight;
        }
        let total: f64 = weights.iter().sum();
        let saved: f64 = lines.iter().zip(&weights).map(|(line, weight)| line.saved * weight).sum();
        let ends = fastest.embedding * weights[0] + fastest.head * weights[weights.len() - 1];
        let least = weights.iter().copied().fold(f64::INFINITY, f64::min);
        let step_phase = step_phase * least * weights.len() as f64;
        (blocks + microbatches * (ends - saved) + step_phase) / total
    };
    let StepPhaseMin { counted_reductions, updates, .. } = step_phase;
    let step_phase = counted_reductions + updates;
    // Seconds of a block in the passes that fill the pipeline.
    let fill = match context.schedule {
        PipelineSchedule::OneForwardOneBackward => fastest.fastest_block,
        PipelineSchedule::ZeroBubble if segments.shape_count() > 1 => 0.0,
        PipelineSchedule::ZeroBubble => passes.forward() / blocks,
        PipelineSchedule::Interleaved => fastest.fastest_block / context.chunks as f64,
    };
    Some(match context.schedule {
        // The stage with the longest passes may end before the step phase of the first stage.
        PipelineSchedule::OneForwardOneBackward | PipelineSchedule::Interleaved => {
            bound(0.0, step_phase).max(bound(fill, 0.0))
        }
        PipelineSchedule::ZeroBubble => bound(fill, step_phase),
    })
}

/// The line of each stage at the multiplier that is best for its memory if all stages have equally many blocks.
fn stage_lines(
    request: &Request,
    segments: &SegmentSolver,
    context: &Context,
    passes: &LeastPasses,
) -> Option<Vec<StageLine>> {
    let model = &request.model;
    let (blocks, stages) = (segments.layer_shapes().len() as u64, context.mesh.pipeline);
    let vocabulary = model.vocab * model.hidden;
    let of_elements = |elements: u64| evenly_split_bytes(elements, context).as_f64();
    let is_uniform = segments.shape_count() == 1;
    let of_block = of_elements(match is_uniform {
        true => segments.block_parameters(),
        false => segments.block_parameters_min(),
    });
    let ends = segments.parameters() - segments.block_parameters() * blocks;
    let limit: Bytes = request.arena_limit();
    let line = |stage: u64| {
        // A tied weight of a single stage is there once.
        let ends = match (stages, stage) {
            (1, _) => ends,
            _ if stage == 0 || stage + 1 == stages => vocabulary,
            _ => 0,
        };
        let memory = limit.as_f64() - of_elements(ends);
        let in_flight = passes.in_flight_min(stage as usize).max(1) as f64;
        let kept_by_stage = (memory - of_block * blocks as f64 / stages as f64) / in_flight;
        let RelaxedPasses { multiplier, blocks: all, fastest_block, .. } =
            passes.within(kept_by_stage * stages as f64)?;
        // A single stage has all blocks, others any of them.
        let time = match is_uniform || stages == 1 {
            true => all / blocks as f64,
            false => fastest_block,
        };
        let of_block = time + multiplier * of_block / in_flight;
        Some(StageLine { of_block, saved: multiplier * memory / in_flight })
    };
    (0..stages).map(line).collect()
}

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use crate::context::ContextSolver;
    use crate::context::PassLinks;
    use crate::context_space::contexts;
    use crate::deadline::Deadline;
    use crate::request::{MemoryLimit, Request};
    use crate::segment::SegmentSolver;

    use super::*;

    #[test]
    fn no_plan_within_the_memory_is_faster_than_the_bound() {
        let (solved, raised) = check_every("cola-350m", 9);
        assert!(solved > 12 && raised > 2, "{solved} solved, {raised} raised");
    }

    /// The first and the last block of LaX have other shapes.
    #[test]
    fn no_plan_of_a_model_with_several_shapes_is_faster_than_the_bound() {
        let (solved, raised) = check_every("lax-350m", 11);
        assert!(solved > 8 && raised > 1, "{solved} solved, {raised} raised");
    }

    #[test]
    #[ignore = "second level: five times as many contexts"]
    fn no_plan_within_the_memory_of_more_contexts_is_faster_than_the_bound() {
        let (solved, raised) = check_every("cola-350m", 2);
        assert!(solved > 50 && raised > 10, "{solved} solved, {raised} raised");
    }

    /// Checks every n-th context of pipelines and of one stage, of all schedules and stages of ZeRO. Returns the number of
    /// those with a plan, and of those whose bound the memory limit raised.
    fn check_every(name: &str, n: usize) -> (usize, usize) {
        let model = presets::find(name).expect("a preset");
        let profile = profile::preset("a100-80gb").expect("a preset");
        let (mut solved, mut raised, mut interleaved_raised) = (0, 0, 0);
        for (devices, limit_gib) in [(1, 10), (2, 6), (4, 4), (4, 6)] {
            let request = Request {
                memory_limit: MemoryLimit::Bytes(Bytes(limit_gib << 30)),
                ..Request::new(model.clone(), profile.clone(), devices, 16, 4096)
            };
            let unlimited = Request { memory_limit: MemoryLimit::None, ..request.clone() };
            let segments = SegmentSolver::new(&request, Deadline::none());
            let solver = ContextSolver::new(&request, &segments);
            let without_limit = ContextSolver::new(&unlimited, &segments);
            for context in contexts(&request).iter().step_by(n) {
                let Ok(bound) = solver.passes_bound(context, PassLinks::Own) else { continue };
                let of_ops = solver
                    .ops_bound(context)
                    .expect("fails only where the bound of the passes fails");
                assert!(of_ops.0 <= bound.0, "{context:?}: {of_ops} from ops, {bound} from passes");
                let bounds = solver.bounds(context, [0.0, f64::INFINITY]);
                let Ok(Some(plan)) = solver.solve(context, &bounds, f64::INFINITY).best else {
                    continue;
                };
                let case = format!("{context:?} in {limit_gib} GiB: {bound} and {}", plan.time);
                let divided = bounds.bound(f64::INFINITY).expect("a plan").0;
                for bound in [bound.0, divided] {
                    assert!(bound <= plan.time.0 * (1.0 + 1e-9), "{case}: {divided} divided");
                }
                solved += 1;
                let least =
                    without_limit.passes_bound(context, PassLinks::Own).expect("more memory").0;
                raised += usize::from(bound.0 > least * (1.0 + 1e-3));
                if context.schedule == PipelineSchedule::Interleaved {
                    let least = without_limit.bounds(context, [0.0, f64::INFINITY]);
                    let least = least.bound(f64::INFINITY).expect("more memory").0;
                    interleaved_raised += usize::from(divided > least * (1.0 + 1e-3));
                }
            }
        }
        assert!(
            interleaved_raised > 0,
            "no interleaved pipeline of {solved} plans is bounded by memory"
        );
        (solved, raised)
    }
}
