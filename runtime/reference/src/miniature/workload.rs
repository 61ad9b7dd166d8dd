//! Workload and replicas of a miniature.

use narrows_plan::model::AttentionMask;
use narrows_plan::{ContextAttention, Mesh, Workload};

/// Devices are threads. On meshes with more devices, replicas are left out.
const DEVICES_MAX: u64 = 64;

/// Least sequence length, unless sequences are shorter.
const LENGTH_MIN: u64 = 8;

/// Scales down a mesh and a workload.
pub(super) fn shrink_workload(
    mesh: Mesh,
    workload: Workload,
    attention: ContextAttention,
    replicas_max: u64,
) -> (Mesh, Workload) {
    let (data, context) = match mesh.devices() > DEVICES_MAX {
        true => (mesh.data.min(replicas_max), least_factor(mesh.context)),
        false => (mesh.data, mesh.context),
    };
    // Tokens are sharded by sequences or by positions depending on which the tensor axis divides, and
    // are packed differently if there is one sequence.
    let micro_batch = match workload.micro_batch {
        1 => 1,
        sequences => smallest_alike(2, sequences, &[mesh.tensor]),
    };
    let positions = workload.sequence_length / mesh.context;
    let runs = attention.position_parts(&mesh) / mesh.context;
    let positions = smallest_alike(LENGTH_MIN.min(positions), positions, &[mesh.tensor, runs]);
    let sequence_length = positions * context;
    // Enough for the warm-up, the steady state and the cool-down of the schedule.
    let microbatches = workload.microbatches(&mesh).min(2 * mesh.pipeline);
    let global_batch = micro_batch * data * microbatches;
    (Mesh { data, context, ..mesh }, Workload { global_batch, sequence_length, micro_batch })
}

/// A window that hides keys of the short sequences if and only if it hides some of the long ones.
pub(super) fn shrink_window(mask: AttentionMask, [long, short]: [u64; 2]) -> AttentionMask {
    match mask.window(long) {
        Some(window) if short > 1 => {
            AttentionMask::SlidingWindow((window * short / long).clamp(1, short - 1))
        }
        _ => mask,
    }
}

/// The least factor greater than 1, of a number greater than 1.
fn least_factor(number: u64) -> u64 {
    (2..number).find(|factor| number.is_multiple_of(*factor)).unwrap_or(number)
}

/// The least number from `min` on that each divisor divides if and only if it divides `number`.
pub(super) fn smallest_alike(min: u64, number: u64, divisors: &[u64]) -> u64 {
    let is_alike = |small: &u64| {
        divisors.iter().all(|d| small.is_multiple_of(*d) == number.is_multiple_of(*d))
    };
    (min..number).find(is_alike).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shrink(tensor: u64, workload: [u64; 3]) -> [u64; 3] {
        let [global_batch, sequence_length, micro_batch] = workload;
        let mesh = Mesh { tensor, pipeline: 2, data: 2, context: 1 };
        let workload = Workload { global_batch, sequence_length, micro_batch };
        let (mesh, workload) = shrink_workload(mesh, workload, ContextAttention::Exchange, 2);
        assert_eq!(mesh.data, 2);
        [workload.global_batch, workload.sequence_length, workload.micro_batch]
    }

    #[test]
    fn sharded_dimensions_stay_divisible() {
        assert_eq!(shrink(4, [64, 4096, 8]), [4 * 2 * 4, 8, 4]);
        assert_eq!(shrink(4, [64, 4096, 2]), [2 * 2 * 4, 8, 2]);
        assert_eq!(shrink(4, [4, 4095, 1]), [4, 9, 1]);
        assert_eq!(shrink(2, [36, 6, 3]), [3 * 2 * 4, 6, 3]);
        assert_eq!(shrink(1, [2, 1, 1]), [2, 1, 1]);
    }

    #[test]
    fn devices_keep_two_equal_chunks_of_positions() {
        let mesh = Mesh { tensor: 3, pipeline: 1, data: 2, context: 4 };
        for (positions, expected) in [(4096, 8), (1024 * 3, 12), (10, 8)] {
            let sequence_length = positions * mesh.context;
            let workload = Workload { global_batch: 2, sequence_length, micro_batch: 1 };
            let (mesh, workload) = shrink_workload(mesh, workload, ContextAttention::Gather, 2);
            assert_eq!(workload.sequence_length / mesh.context, expected);
        }
    }

    #[test]
    fn meshes_of_many_devices_keep_two_replicas() {
        let mesh = Mesh { tensor: 8, pipeline: 4, data: 16, context: 1 };
        let workload = Workload { global_batch: 512, sequence_length: 4096, micro_batch: 1 };
        let (mesh, workload) = shrink_workload(mesh, workload, ContextAttention::Exchange, 2);
        assert_eq!((mesh.data, workload.global_batch), (2, 16));
    }
}
