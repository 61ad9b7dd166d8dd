//! The batch and the replicas of a twin.

use narrows_plan::{Mesh, Workload};

/// Devices are threads: with more than this, replicas are left out.
const DEVICES_MANY: u64 = 64;

/// Fewest tokens of a sequence, where there were as many.
const LENGTH_LEAST: u64 = 8;

/// The twin's mesh and batch.
pub(super) fn shrunk(mesh: Mesh, work: Workload) -> (Mesh, Workload) {
    let data = if mesh.devices() > DEVICES_MANY { mesh.data.min(2) } else { mesh.data };
    // Whether sequences or positions are split depends on what the tensor axis divides, and how
    // they are packed on whether there is one sequence.
    let micro_batch = match work.micro_batch {
        1 => 1,
        many => least(2, many, mesh.tensor),
    };
    let sequence_length =
        least(LENGTH_LEAST.min(work.sequence_length), work.sequence_length, mesh.tensor);
    // Beyond warm-up, alternation and cool-down a schedule has no shape.
    let microbatches = work.microbatches(&mesh).min(2 * mesh.pipeline);
    let global_batch = micro_batch * data * microbatches;
    (Mesh { data, ..mesh }, Workload { global_batch, sequence_length, micro_batch })
}

/// The least number from `least` that `divisor` divides if and only if it divides `number`.
pub(super) fn least(least: u64, number: u64, divisor: u64) -> u64 {
    let divided = number.is_multiple_of(divisor);
    (least..number).find(|small| small.is_multiple_of(divisor) == divided).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn twin(tensor: u64, work: [u64; 3]) -> [u64; 3] {
        let [global_batch, sequence_length, micro_batch] = work;
        let mesh = Mesh { tensor, pipeline: 2, data: 2 };
        let work = Workload { global_batch, sequence_length, micro_batch };
        let (mesh, work) = shrunk(mesh, work);
        assert_eq!(mesh.data, 2);
        [work.global_batch, work.sequence_length, work.micro_batch]
    }

    #[test]
    fn what_is_split_stays_split() {
        assert_eq!(twin(4, [64, 4096, 8]), [4 * 2 * 4, 8, 4]);
        assert_eq!(twin(4, [64, 4096, 2]), [2 * 2 * 4, 8, 2]);
        assert_eq!(twin(4, [4, 4095, 1]), [4, 9, 1]);
        assert_eq!(twin(2, [36, 6, 3]), [3 * 2 * 4, 6, 3]);
        assert_eq!(twin(1, [2, 1, 1]), [2, 1, 1]);
    }

    #[test]
    fn many_replicas_are_two() {
        let mesh = Mesh { tensor: 8, pipeline: 4, data: 16 };
        let work = Workload { global_batch: 512, sequence_length: 4096, micro_batch: 1 };
        let (mesh, work) = shrunk(mesh, work);
        assert_eq!((mesh.data, work.global_batch), (2, 16));
    }
}
