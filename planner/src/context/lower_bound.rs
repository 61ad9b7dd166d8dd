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

/// The links that passes are priced with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassLinks {
    /// Links between nodes as fast as those inside a node, where the tensor or context axis spans nodes: searches that differ in
    /// the bandwidth between nodes share the tables.
    FastInterNode,
    /// Those of the profile.
    Own,
}

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

    /// Lower bound that needs no tables: [`flops_bound`].
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn flops_bound(&self, context: &Context) -> Result<Seconds, Infeasible> {
        let segments = self.segments;
        let (parameters, flops) = (segments.parameters(), segments.sequence_flops());
        bound_of_flops(self.request, (parameters, flops), context)
    }

    /// The key of the passes of a context. Contexts with equal keys share the tables of their passes.
    pub(crate) fn pass_key(&self, context: &Context, links: PassLinks) -> PassKey {
        self.segments_with(context, links).pass_key(context)
    }

    /// Prices the passes of a context, for all contexts that share them.
    pub(crate) fn price_passes(&self, context: &Context, links: PassLinks) {
        self.segments_with(context, links).least_passes(context).fastest();
    }

    fn segments_with(&self, context: &Context, links: PassLinks) -> &SegmentSolver<'_> {
        match links {
            PassLinks::FastInterNode => self.segments.with_fast_inter_node_links(context),
            PassLinks::Own => None,
        }
        .unwrap_or(self.segments)
    }

    /// Lower bound on the step time of a context that is quickly found: contexts that differ in replicas, stages, ZeRO and
    /// schedule share its solves. [`lower_bound`](ContextSolver::lower_bound) is no smaller, and that with
    /// [`PassLinks::FastInterNode`] is no larger.
    ///
    /// # Errors
    /// The reason why the context has no plan.
    pub(crate) fn passes_bound(
        &self,
        context: &Context,
        links: PassLinks,
    ) -> Result<Seconds, Infeasible> {
        let (request, segments) = (self.request, self.segments);
        let limit = request.arena_limit();
        if let Some(infeasible) = too_large(segments.parameters(), context, limit) {
            return Err(infeasible);
        }
        let passes = self.segments_with(context, links).least_passes(context);
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
        let of_passes = self.passes_bound(context, PassLinks::Own)?;
        let segments = self.segments;
        let layouts = segments.boundary_layouts(context).into_iter();
        let least = layouts.filter_map(|layout| min_microbatch_time(segments, context, layout));
        let least = least.min_by(f64::total_cmp).ok_or(Infeasible::NoStrategy)?;
        let average = AverageStage::new(self.request, segments, context, least);
        let filled = match context.schedule {
            PipelineSchedule::OneForwardOneBackward => average.filled_pipeline(context),
            PipelineSchedule::ZeroBubble => {
                let reduced = average.zero_bubble_step_time(context, segments);
                reduced.max(filled_zero_bubble_pipeline(segments, context))
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
/// spend at least the fraction φ of their least microbatch time on these. Without weight gradients, φ is 1: the last
/// microbatch also comes back to the first stage.
fn filled_zero_bubble_pipeline(segments: &SegmentSolver, context: &Context) -> f64 {
    let of_layout = |boundary: BoundaryLayout| {
        let of_layers = segments.of_layers(|shape| {
            let spec = SegmentSpec::block(shape, boundary);
            let time = segments.min_microbatch_time(spec, context)?;
            let passes = segments.min_pass_times_with_flows(spec, context);
            Some((time, passes.forward / time, passes.without_weight_gradients))
        });
        let (mut blocks, mut fraction, mut round_trip) = (0.0, 1.0_f64, 0.0);
        for of_layer in of_layers {
            let (time, forward, without_weight_gradients) = of_layer?;
            fraction = fraction.min(forward);
            blocks += time;
            round_trip += without_weight_gradients;
        }
        let filled = filled_pipeline(context, blocks, fraction);
        Some(filled.max(filled_pipeline(context, round_trip, 1.0)))
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
        let ends = |at| match at {
            0 => embedding,
            at if at == last => head,
            _ => 0.0,
        };
        Some(blocks.step_bound(context, ends, |_| 0.0))
    };
    let layouts = segments.boundary_layouts(context).into_iter();
    layouts.filter_map(of_layout).min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Lower bound that needs no solver: the model's FLOPs at the devices' peak.
///
/// # Errors
/// The reason why the context has no plan.
pub(crate) fn flops_bound(request: &Request, context: &Context) -> Result<Seconds, Infeasible> {
    let flops = model_flops(&request.model, request.sequence_length);
    bound_of_flops(request, (request.model.parameters(), flops), context)
}

/// The bound of a model with this many parameters, and these FLOPs of a sequence.
fn bound_of_flops(
    request: &Request,
    (parameters, flops): (u64, f64),
    context: &Context,
) -> Result<Seconds, Infeasible> {
    if let Some(infeasible) = too_large(parameters, context, request.arena_limit()) {
        return Err(infeasible);
    }
    let peak =
        request.profile.total_peak_flops_per_s(context.mesh.devices(), context.compute_dtype());
    Ok(Seconds(flops * request.global_batch as f64 / peak))
}

/// Lower bound on forward plus backward time of one microbatch over the whole model.
fn min_microbatch_time(
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

#[cfg(test)]
mod tests {
    use narrows_cost_model::profile;
    use narrows_plan::model::presets;

    use crate::context_space::contexts;
    use crate::deadline::Deadline;

    use super::*;

    /// Whatever the bandwidth between nodes, fast links give the same passes, and no larger bound.
    #[test]
    fn fast_links_between_nodes_give_no_larger_bound() {
        for preset in ["a100-80gb-8", "h100-sxm-measured"] {
            let model = presets::find("cola-350m").expect("a preset");
            let mut file = profile::preset(preset).expect("a preset").file().clone();
            let mut fast_passes: Vec<Vec<f64>> = vec![];
            for gb_per_s in [0.5, 25.0] {
                file.links.inter_node.bandwidth_bytes_per_s = gb_per_s * 1e9;
                let hardware = file.clone().resolve().expect("a positive bandwidth");
                let request = Request::new(model.clone(), hardware, 32, 32, 2048);
                let segments = SegmentSolver::new(&request, Deadline::none());
                let solver = ContextSolver::new(&request, &segments);
                let (mut passes, mut smaller) = (vec![], 0);
                let spans_nodes =
                    |context: &Context| segments.with_fast_inter_node_links(context).is_some();
                for context in contexts(&request).iter().filter(|context| spans_nodes(context)) {
                    let [fast, own] = [PassLinks::FastInterNode, PassLinks::Own]
                        .map(|links| solver.passes_bound(context, links).expect("a plan").0);
                    assert!(fast <= own * (1.0 + 1e-12), "{context:?}: {fast} and {own}");
                    smaller += usize::from(fast < own);
                    let fast = solver.segments_with(context, PassLinks::FastInterNode);
                    passes.push(fast.least_passes(context).fastest().expect("a plan").total);
                }
                assert!(passes.len() > 10, "{} contexts", passes.len());
                assert!(smaller > 5 || gb_per_s > 1.0, "{smaller} of {} contexts", passes.len());
                fast_passes.push(passes);
            }
            assert_eq!(fast_passes[0], fast_passes[1]);
        }
    }
}
