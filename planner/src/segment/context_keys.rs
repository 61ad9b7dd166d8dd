//! Keys of a context: the context without the parts that a table or a solution does not depend on.

use narrows_cost_model::GroupLinks;
use narrows_plan::graph::SegmentKind;
use narrows_plan::{Axis, Context, GradReduceDtype, Mesh, PipelineSchedule, Workload, Zero};

use super::keys::{ByteMultipliersKey, PassKey, StepKey, StepPhaseKey};
use super::solver::SegmentSolver;
use super::spec::SegmentSpec;

impl SegmentSolver<'_> {
    /// The key of the times of one microbatch without the collectives of ZeRO. Of the number of microbatches, these times
    /// depend on [`Context::accumulates_gradients`] alone. They do not depend on overlapped gradient reductions, on the
    /// schedule, or on the numbers of replicas and stages. Of ZeRO, only whether gradients are sharded matters; if so, also
    /// the format of their reduction.
    pub(crate) fn pass_key(&self, context: &Context) -> PassKey {
        let mut shared = context.with_whole_buckets();
        // Sharded gradients are reduced in every microbatch, so that a GEMM does not accumulate into them.
        let (zero, replicas) =
            if context.shards_gradients() { (Zero::Two, 2) } else { (Zero::Off, 1) };
        shared.mesh = Mesh { pipeline: 1, data: replicas, ..context.mesh };
        shared.zero = zero;
        if !context.shards_gradients() {
            shared.grad_reduce_dtype = GradReduceDtype::Fp32;
        }
        shared.shard_size = replicas;
        (shared.overlap_grad_reduce, shared.overlap_param_gather) = (false, false);
        (shared.schedule, shared.chunks) = (PipelineSchedule::default(), 1);
        shared.workload.global_batch = shared.workload.micro_batch * replicas;
        (shared, self.links(context, [Axis::Tensor, Axis::Context]))
    }

    /// The key of a segment's times in a step, which do not depend on the schedule. Blocks do not depend on the number of
    /// stages either. Embedding and head do: on two stages they have two copies of a tied weight.
    pub(super) fn step_key(&self, spec: SegmentSpec, context: &Context) -> StepKey {
        let mut shared = *context;
        let stages_max = if spec.kind == SegmentKind::Block { 1 } else { 2 };
        shared.mesh.pipeline = shared.mesh.pipeline.min(stages_max);
        // Interleaved schedules do not overlap gathers.
        shared.overlap_param_gather = context.gathers_in_forward();
        (shared.schedule, shared.chunks) = (PipelineSchedule::default(), 1);
        (shared, self.links(context, [Axis::Tensor, Axis::Context, Axis::Data]))
    }

    /// The links of a context's groups along these axes.
    fn links<const N: usize>(&self, context: &Context, axes: [Axis; N]) -> [GroupLinks; N] {
        axes.map(|axis| self.prices(context).group_links(&context.mesh.group(axis)))
    }

    /// The key of a segment's times in the step phase.
    pub(super) fn step_phase_key(&self, spec: SegmentSpec, context: &Context) -> StepPhaseKey {
        let mut any_workload = *context;
        any_workload.workload = Workload { global_batch: 1, sequence_length: 1, micro_batch: 1 };
        (self.step_key(spec, &any_workload), context.token_dim())
    }

    /// The key of the multipliers of bytes on a stage.
    pub(super) fn byte_multipliers_key(
        &self,
        spec: SegmentSpec,
        context: &Context,
        stage: usize,
    ) -> ByteMultipliersKey {
        let mut shared = *context;
        shared.workload.global_batch = context.mesh.data * context.workload.micro_batch;
        (spec, shared, stage, self.request.arena_limit())
    }
}
