//! Lower bounds on the step time of a context, before its blocks are divided.

use narrows_plan::graph::SegmentKind;
use narrows_plan::strategy::BoundaryLayout;
use narrows_plan::{Context, PipelineSchedule, Seconds};

use super::average_stage::{StepPhaseMin, min_step_phase, too_large};
use super::memory_limited_bound::memory_limited_bound;
use super::solver::ContextSolver;
use crate::infeasible::Infeasible;
use crate::pipeline::BlockTimesMin;
use crate::predict::model_flops;
use crate::request::Request;
use crate::segment::{PassKey, SegmentSolver, SegmentSpec};

impl ContextSolver<'_> {
    /// Lower bound on the step time of a context that needs no cost table: the least time of every op, without reshards.
    /// [`passes_bound`](ContextSolver::passes_bound) is no smaller.
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn ops_bound(&self, context: &Context) -> Result<Seconds, Infeasible> {
        let (request, segments) = (self.request, self.segments);
        let limit = request.arena_limit();
        if let Some(infeasible) = too_large(segments.parameters(), context, limit) {
            return Err(infeasible);
        }
        let total = segments.least_passes(context).of_ops().ok_or(Infeasible::NoStrategy)?;
        let average = AverageStage::new(request, segments, context, total);
        Ok(Seconds(average.step_time(context)))
    }

    /// The key of the passes of a context. Contexts with equal keys share the tables of their passes.
    pub(crate) fn pass_key(&self, context: &Context) -> PassKey {
        self.segments.pass_key(context)
    }

    /// Prices the passes of a context, for all contexts that share them.
    pub(crate) fn price_passes(&self, context: &Context) {
        self.segments.least_passes(context).fastest();
    }

    /// Lower bound on the step time of a context that is quickly found: contexts that differ in replicas, stages, ZeRO and
    /// schedule share its solves. [`lower_bound`](ContextSolver::lower_bound) is no smaller.
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn passes_bound(&self, context: &Context) -> Result<Seconds, Infeasible> {
        let (request, segments) = (self.request, self.segments);
        let limit = request.arena_limit();
        if let Some(infeasible) = too_large(segments.parameters(), context, limit) {
            return Err(infeasible);
        }
        let passes = segments.least_passes(context);
        let fastest = passes.fastest().ok_or(Infeasible::NoStrategy)?;
        let average = AverageStage::new(request, segments, context, fastest.total);
        let filled = match context.schedule {
            PipelineSchedule::OneForwardOneBackward => average.filled_pipeline(context),
            PipelineSchedule::ZeroBubble | PipelineSchedule::Interleaved => 0.0,
        };
        let limited =
            memory_limited_bound(request, segments, context, &passes, &average.step_phase);
        Ok(Seconds(average.step_time(context).max(filled).max(limited.unwrap_or(0.0))))
    }

    /// Lower bound on the step time of a context, before its blocks are divided.
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn lower_bound(&self, context: &Context) -> Result<Seconds, Infeasible> {
        let of_passes = self.passes_bound(context)?;
        let segments = self.segments;
        let layouts = segments.boundary_layouts(context).into_iter();
        let least = layouts.filter_map(|layout| min_microbatch_time(segments, context, layout));
        let least = least.min_by(f64::total_cmp).ok_or(Infeasible::NoStrategy)?;
        let average = AverageStage::new(self.request, segments, context, least);
        let filled = match context.schedule {
            PipelineSchedule::OneForwardOneBackward => average.filled_pipeline(context),
            PipelineSchedule::ZeroBubble => {
                let reduced = average.zero_bubble_step_time(context, segments);
                reduced.max(filled_by_forward_passes(segments, context))
            }
            PipelineSchedule::Interleaved => interleaved_bound(segments, context),
        };
        Ok(Seconds(average.step_time(context).max(filled).max(of_passes.0)))
    }
}

/// Lower bounds on the model's microbatch time and on the step phase of a stage of average size.
struct AverageStage {
    /// Least forward and backward time of one microbatch on all stages, in seconds.
    microbatch_time: f64,
    step_phase: StepPhaseMin,
}

impl AverageStage {
    /// The bounds of a context, with the least forward and backward time of one microbatch in seconds.
    fn new(
        request: &Request,
        segments: &SegmentSolver,
        context: &Context,
        microbatch_time: f64,
    ) -> AverageStage {
        AverageStage { microbatch_time, step_phase: min_step_phase(request, segments, context) }
    }

    /// No step is shorter: the slowest stage has no less than the average work.
    fn step_time(&self, context: &Context) -> f64 {
        let microbatches = context.workload.microbatches(&context.mesh) as f64;
        let stages = context.mesh.pipeline as f64;
        let StepPhaseMin { counted_reductions, updates, .. } = self.step_phase;
        microbatches * self.microbatch_time / stages + counted_reductions + updates
    }

    /// As [`step_time`](AverageStage::step_time) with the zero-bubble schedule: all reductions follow the begin of the last
    /// pass, which is a backward pass on the first stage.
    fn zero_bubble_step_time(&self, context: &Context, segments: &SegmentSolver) -> f64 {
        let microbatches = context.workload.microbatches(&context.mesh) as f64;
        let last = segments.least_passes(context).forward();
        let passes = (microbatches - 1.0) * self.microbatch_time + last;
        let StepPhaseMin { reductions, updates, .. } = self.step_phase;
        passes / context.mesh.pipeline as f64 + reductions + updates
    }

    /// No 1F1B step is shorter, whatever the sizes of the stages.
    fn filled_pipeline(&self, context: &Context) -> f64 {
        filled_pipeline(context, self.microbatch_time, 1.0)
    }
}

/// Lower bound on a pipeline whose stage s, of microbatch time tₛ, cannot end before φ·Σ_{j<s} tⱼ + m·tₛ. That is least
/// where it is equal for all stages.
fn filled_pipeline(context: &Context, microbatch_time: f64, fraction: f64) -> f64 {
    let microbatches = context.workload.microbatches(&context.mesh) as f64;
    let filled = 1.0 - (1.0 - fraction / microbatches).powi(context.mesh.pipeline as i32);
    if filled > 0.0 { fraction * microbatch_time / filled } else { 0.0 }
}

/// Lower bound on a zero-bubble pipeline: a stage begins after the forward passes of the stages before it, and blocks
/// spend at least the fraction φ of their least microbatch time on these.
fn filled_by_forward_passes(segments: &SegmentSolver, context: &Context) -> f64 {
    let of_layout = |boundary: BoundaryLayout| {
        let of_layers = segments.of_layers(|shape| {
            let spec = SegmentSpec::block(shape, boundary);
            let time = segments.min_microbatch_time(spec, context)?;
            Some((time, segments.min_pass_times(spec, context).forward / time))
        });
        let (mut blocks, mut fraction) = (0.0, 1.0_f64);
        for of_layer in of_layers {
            let (time, forward) = of_layer?;
            fraction = fraction.min(forward);
            blocks += time;
        }
        Some(filled_pipeline(context, blocks, fraction))
    };
    let layouts = segments.boundary_layouts(context).into_iter();
    layouts.filter_map(of_layout).min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Lower bound on an interleaved pipeline of equal chunks. The first stage ends its passes last, and then updates.
fn interleaved_bound(segments: &SegmentSolver, context: &Context) -> f64 {
    let of_layout = |boundary: BoundaryLayout| {
        let end = |kind| {
            segments
                .min_microbatch_time(SegmentSpec::embedding_or_head(kind, boundary, None), context)
        };
        let [embedding, head] = [end(SegmentKind::Embedding)?, end(SegmentKind::Head)?];
        let of_shape = |shape: usize| {
            let spec = SegmentSpec::block(shape, boundary);
            let step_phase = segments.step_phase_range(spec, context)[0];
            Some((segments.min_microbatch_time(spec, context)?, step_phase))
        };
        let of_layers: Option<Vec<(f64, f64)>> = segments.of_layers(of_shape).into_iter().collect();
        let (microbatch, step_phase): (Vec<f64>, Vec<f64>) = of_layers?.into_iter().unzip();
        let blocks = BlockTimesMin { microbatch: &microbatch, step_phase: &step_phase };
        let last = context.virtual_stages() - 1;
        Some(blocks.step_bound(context, |at| match at {
            0 => embedding,
            at if at == last => head,
            _ => 0.0,
        }))
    };
    let layouts = segments.boundary_layouts(context).into_iter();
    layouts.filter_map(of_layout).min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Lower bound that needs no solver: the model's FLOPs at the devices' peak.
///
/// # Errors
/// The reason why the context has no plan.
pub(crate) fn flops_bound(request: &Request, context: &Context) -> Result<Seconds, Infeasible> {
    let parameters = request.model.parameters();
    if let Some(infeasible) = too_large(parameters, context, request.arena_limit()) {
        return Err(infeasible);
    }
    let flops = model_flops(&request.model, request.sequence_length);
    let peak =
        request.profile.total_peak_flops_per_s(context.mesh.devices(), context.compute_dtype());
    Ok(Seconds(flops * request.global_batch as f64 / peak))
}

/// Lower bound on forward plus backward time of one microbatch over the whole model.
pub(super) fn min_microbatch_time(
    segments: &SegmentSolver,
    context: &Context,
    boundary: BoundaryLayout,
) -> Option<f64> {
    let time = |spec| segments.min_microbatch_time(spec, context);
    let of_layers = segments.of_layers(|shape| time(SegmentSpec::block(shape, boundary)));
    let blocks: f64 = of_layers.into_iter().sum::<Option<f64>>()?;
    let end = |kind| time(SegmentSpec::embedding_or_head(kind, boundary, None));
    Some(blocks + end(SegmentKind::Embedding)? + end(SegmentKind::Head)?)
}
