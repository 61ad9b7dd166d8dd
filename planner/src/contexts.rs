//! Enumerates the contexts of a request: meshes, microbatch sizes, ZeRO stages and overlap.

use narrows_plan::{Context, GEMM_SIZE_MAX, Mesh, Workload, Zero};

use crate::request::Request;

/// Every context that a request allows, in no particular order.
pub fn contexts(request: &Request) -> Vec<Context> {
    let mut contexts = vec![];
    let blocks = request.model.blocks.len() as u64;
    for mesh in meshes(request).into_iter().filter(|mesh| mesh.pipeline <= blocks) {
        for micro_batch in micro_batches(request, &mesh) {
            let workload = Workload {
                global_batch: request.global_batch,
                sequence_length: request.sequence_length,
                micro_batch,
            };
            for zero in zero_stages(request, &mesh) {
                let precision = request.profile.precision();
                let context = Context {
                    overlap_tensor_collectives: overlaps_tensor_collectives(request, &mesh),
                    ..Context::new(mesh, workload, precision, zero)
                };
                let overlaps = overlaps(request, &mesh).into_iter();
                contexts.extend(
                    overlaps.map(|overlap_grad_reduce| Context { overlap_grad_reduce, ..context }),
                );
            }
        }
    }
    contexts
}

/// Every mesh of the request's devices.
fn meshes(request: &Request) -> Vec<Mesh> {
    let mut meshes = vec![];
    let tensor_sizes = divisors(request.devices).into_iter();
    for tensor in tensor_sizes.filter(|size| request.allows_tensor(*size)) {
        for pipeline in divisors(request.devices / tensor) {
            let data = request.devices / tensor / pipeline;
            let allowed = |fixed: Option<u64>, size| fixed.is_none_or(|fixed| fixed == size);
            if allowed(request.tensor, tensor)
                && allowed(request.pipeline, pipeline)
                && allowed(request.data, data)
            {
                meshes.push(Mesh { tensor, pipeline, data });
            }
        }
    }
    meshes
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

fn zero_stages(request: &Request, mesh: &Mesh) -> Vec<Zero> {
    match request.zero {
        Some(Zero::One) | None if mesh.data == 1 => vec![Zero::Off],
        Some(zero) => vec![zero],
        None => vec![Zero::Off, Zero::One],
    }
}

/// Whether gradients may be reduced beside the last backward pass, where there are replicas and collectives run beside
/// computation.
fn overlaps(request: &Request, mesh: &Mesh) -> Vec<bool> {
    let Some(overlap) = request.profile.file().overlap.as_ref().filter(|_| mesh.data > 1) else {
        return vec![false];
    };
    match request.overlap_grad_reduce {
        Some(overlap) => vec![overlap],
        // On one stage, a reduction that adds less than its time where it is hidden never slows a step. Stages that
        // slow their last backward passes delay each other.
        None if mesh.pipeline == 1 && overlap.slowdown().hidden_cost() < 1.0 => vec![true],
        None => vec![true, false],
    }
}

/// Whether collectives of activation gradients run beside weight-gradient GEMMs: where they add less to a step than
/// alone, unless the request forbids it.
fn overlaps_tensor_collectives(request: &Request, mesh: &Mesh) -> bool {
    let slowdown = request.profile.file().overlap.as_ref().map(|overlap| overlap.slowdown());
    request.overlap_tensor_collectives
        && mesh.tensor > 1
        && slowdown.is_some_and(|slowdown| slowdown.hidden_cost() < 1.0)
}

/// Divisors in ascending order.
fn divisors(number: u64) -> Vec<u64> {
    let mut divisors: Vec<u64> =
        (1..).take_while(|d| d * d <= number).filter(|d| number.is_multiple_of(*d)).collect();
    let large: Vec<u64> = divisors.iter().rev().map(|d| number / d).collect();
    divisors.extend(large.into_iter().filter(|d| d * d > number));
    divisors
}
