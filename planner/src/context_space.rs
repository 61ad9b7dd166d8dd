//! Enumerates the contexts of a request: meshes, microbatch sizes, ZeRO stages and shard groups, schedules and overlap.

use std::ops::RangeInclusive;

use narrows_plan::{
    Context, ContextAttention, GEMM_SIZE_MAX, Mesh, PipelineSchedule, Workload, Zero,
};

use crate::request::Request;

/// Every context that a request allows, in no particular order.
pub fn contexts(request: &Request) -> Vec<Context> {
    let mut contexts = vec![];
    let stages_max = request.model.stages_max();
    let meshes = meshes(request).into_iter();
    for (mesh, context_attention) in meshes.filter(|(mesh, _)| mesh.pipeline <= stages_max) {
        for micro_batch in micro_batches(request, &mesh) {
            let workload = Workload {
                global_batch: request.global_batch,
                sequence_length: request.sequence_length,
                micro_batch,
            };
            for (zero, shard_size) in shardings(request, &mesh) {
                let precision = request.profile.precision();
                let context = Context {
                    context_attention,
                    grad_reduce_dtype: request.grad_reduce_dtype,
                    shard_size,
                    loro_every: request.loro_every,
                    ..Context::new(mesh, workload, precision, zero)
                };
                for context in schedules(request, &context) {
                    let of_overlap = |overlap| with_data_overlap(&context, overlap);
                    contexts.extend(overlaps(request, &context).into_iter().map(of_overlap));
                }
            }
        }
    }
    contexts
}

/// Every mesh of the request's devices, with each attention that its context axis allows.
fn meshes(request: &Request) -> Vec<(Mesh, ContextAttention)> {
    let mut meshes = vec![];
    let tensor_sizes = divisors(request.devices).into_iter();
    for tensor in tensor_sizes.filter(|size| request.allows_tensor(*size)) {
        for pipeline in divisors(request.devices / tensor) {
            let replicas = request.devices / tensor / pipeline;
            let allowed = |fixed: Option<u64>, size| fixed.is_none_or(|fixed| fixed == size);
            if !allowed(request.tensor, tensor) || !allowed(request.pipeline, pipeline) {
                continue;
            }
            for context in context_sizes(request, replicas) {
                let mesh = Mesh { tensor, pipeline, data: replicas / context, context };
                if allowed(request.data, mesh.data) {
                    let attentions = request.context_attentions(&mesh).into_iter();
                    meshes.extend(attentions.map(|attention| (mesh, attention)));
                }
            }
        }
    }
    meshes
}

/// The sizes of the context axis among this many replicas.
fn context_sizes(request: &Request, replicas: u64) -> Vec<u64> {
    match request.fixed_context() {
        Some(size) if replicas.is_multiple_of(size) => vec![size],
        Some(_) => vec![],
        None => divisors(replicas),
    }
}

/// The microbatch sizes of a mesh whose tokens kernels can index.
fn micro_batches(request: &Request, mesh: &Mesh) -> Vec<u64> {
    if !request.global_batch.is_multiple_of(mesh.data) {
        return vec![];
    }
    let per_replica = request.global_batch / mesh.data;
    let mut sizes = match request.micro_batch {
        Some(size) if per_replica.is_multiple_of(size) => vec![size],
        Some(_) => vec![],
        None => divisors(per_replica),
    };
    sizes.retain(|size| size.saturating_mul(request.sequence_length) <= GEMM_SIZE_MAX);
    sizes
}

/// Largest number of nodes that a shard group smaller than all replicas spans: more lower the memory of a device by
/// little.
const SHARD_NODES_MAX: u64 = 8;

/// ZeRO stages, each with the replicas of a shard group: all replicas, or the replicas of up to
/// [`SHARD_NODES_MAX`] nodes.
fn shardings(request: &Request, mesh: &Mesh) -> Vec<(Zero, u64)> {
    let stages = match request.zero {
        _ if mesh.replicas() == 1 => vec![Zero::Off],
        Some(zero) => vec![zero],
        None => vec![Zero::Off, Zero::One, Zero::Two, Zero::Three],
    };
    let per_node = request.profile.devices_per_node();
    let within_node = if per_node.is_multiple_of(mesh.tensor) { per_node / mesh.tensor } else { 0 };
    let groups = |zero: Zero| match request.shard_size {
        _ if zero == Zero::Off => vec![1],
        Some(size) if mesh.replicas().is_multiple_of(size) => vec![size],
        Some(_) => vec![],
        None => {
            // What ZeRO-1 shards is small within a node already.
            let nodes = if zero == Zero::One { 1 } else { SHARD_NODES_MAX };
            let sizes = (0..=nodes.ilog2()).map(|log2| within_node << log2);
            let replicas = mesh.replicas();
            let is_group =
                |size: &u64| 1 < *size && *size < replicas && replicas.is_multiple_of(*size);
            sizes.filter(is_group).chain([replicas]).collect()
        }
    };
    stages
        .into_iter()
        .flat_map(|zero| groups(zero).into_iter().map(move |size| (zero, size)))
        .collect()
}

/// Whether collectives over the data axis overlap with computation, where there are replicas and the hardware can.
fn overlaps(request: &Request, context: &Context) -> Vec<bool> {
    let mesh = &context.mesh;
    let Some(overlap) = request.profile.file().overlap.as_ref().filter(|_| mesh.replicas() > 1)
    else {
        return vec![false];
    };
    // On one stage, a reduction that adds less than its time where it is hidden never slows a step. Stages that slow their
    // last backward passes delay each other, and sharded parameters of two blocks need more memory than of one.
    let is_never_worse = mesh.pipeline == 1 && !context.shards_gradients();
    match request.overlap_grad_reduce {
        Some(overlap) => vec![overlap],
        None if is_never_worse && overlap.slowdown().hidden_cost() < 1.0 => vec![true],
        None => vec![true, false],
    }
}

/// The context with or without overlap of collectives over the data axis. Gathers of updated weights overlap as gradient
/// reductions do, where there are any that can.
fn with_data_overlap(context: &Context, overlap: bool) -> Context {
    let context =
        Context { overlap_grad_reduce: overlap, overlap_param_gather: overlap, ..*context };
    Context { overlap_param_gather: context.gathers_in_forward(), ..context }
}

/// The context with each order of passes, each with whether tensor-axis collectives overlap with weight-gradient GEMMs, or with
/// another microbatch.
/// With the zero-bubble schedule, a weight-gradient GEMM either overlaps with a collective or has a pass of its own, so
/// that contexts with and without this overlap are searched. Where gradients are reduced in every backward pass, the
/// zero-bubble schedule defers nothing and equals 1F1B.
fn schedules(request: &Request, context: &Context) -> Vec<Context> {
    use PipelineSchedule::{Interleaved, OneForwardOneBackward, ZeroBubble};
    let overlaps = overlaps_tensor_collectives(request, context);
    let of = |schedule, overlap_tensor_collectives| Context {
        schedule,
        overlap_tensor_collectives,
        ..*context
    };
    let mut schedules = vec![of(OneForwardOneBackward, overlaps)];
    let has_deferrable = !context.shards_gradients() || request.schedule == Some(ZeroBubble);
    if context.mesh.pipeline > 1 && has_deferrable {
        schedules.push(of(ZeroBubble, false));
        schedules.extend(overlaps.then_some(of(ZeroBubble, true)));
    }
    let in_pairs = Context { overlap_microbatch_pairs: true, ..of(OneForwardOneBackward, false) };
    schedules.extend(overlaps_microbatch_pairs(request, &in_pairs).then_some(in_pairs));
    let interleaved = |chunks| Context { chunks, ..of(Interleaved, overlaps) };
    schedules.extend(chunk_counts(request, context).into_iter().map(interleaved));
    schedules.retain(|context| request.schedule.is_none_or(|fixed| fixed == context.schedule));
    schedules
}

/// Numbers of chunks of a stage in interleaved pipelines. More would shorten the idle time further, with more memory
/// and transfers.
pub(crate) const CHUNKS: RangeInclusive<u64> = 2..=4;

/// Numbers of chunks of a stage that divide the blocks evenly, where the stages divide the microbatches.
fn chunk_counts(request: &Request, context: &Context) -> Vec<u64> {
    let stages = context.mesh.pipeline;
    let microbatches = context.workload.microbatches(&context.mesh);
    // Each pass through a chunk would have collectives of its own.
    if stages == 1 || context.shards_gradients() || !microbatches.is_multiple_of(stages) {
        return vec![];
    }
    let blocks = request.model.blocks.len() as u64;
    CHUNKS.filter(|chunks| blocks.is_multiple_of(stages * chunks)).collect()
}

/// Whether collectives of activation gradients overlap with weight-gradient GEMMs: where they add less to a step than
/// alone, unless the request forbids it.
fn overlaps_tensor_collectives(request: &Request, context: &Context) -> bool {
    request.overlap_tensor_collectives
        && context.has_activation_collectives()
        && overlap_is_faster(request)
}

/// Whether passes may run two microbatches, so that collectives of one overlap with the computation of the other: on one
/// stage, as those of a pipeline would wait longer for their neighbours.
fn overlaps_microbatch_pairs(request: &Request, context: &Context) -> bool {
    request.overlap_microbatch_pairs
        && context.mesh.pipeline == 1
        && context.can_pair_microbatches()
        && overlap_is_faster(request)
}

/// Whether a collective adds less to a step where it overlaps with computation than alone.
fn overlap_is_faster(request: &Request) -> bool {
    let slowdown = request.profile.file().overlap.as_ref().map(|overlap| overlap.slowdown());
    slowdown.is_some_and(|slowdown| slowdown.hidden_cost() < 1.0)
}

/// Whether a context may have the plan with the least memory: zero-bubble and interleaved pipelines need no less than
/// with 1F1B, which is searched as well unless the request fixes the schedule. Two microbatches need no less than one.
pub(crate) fn may_need_least_memory(request: &Request, context: &Context) -> bool {
    let is_1f1b = context.schedule == PipelineSchedule::OneForwardOneBackward;
    (is_1f1b || request.schedule.is_some()) && !context.overlap_microbatch_pairs
}

/// Divisors in ascending order.
fn divisors(number: u64) -> Vec<u64> {
    let mut divisors: Vec<u64> =
        (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d)).collect();
    let large: Vec<u64> = divisors.iter().rev().map(|d| number / d).collect();
    divisors.extend(large.into_iter().filter(|d| d * d > number));
    divisors
}
