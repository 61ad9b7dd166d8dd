//! What a backend did in a step.

use std::collections::BTreeMap;

use narrows_plan::kernel::{Collective, CollectiveKind};
use narrows_plan::mesh::{Axis, Mesh};
use narrows_plan::{Bytes, Kernel};

/// A process of the mesh, numbered tensor axis first, then data, then pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u64);

impl DeviceId {
    /// The pipeline stage this device belongs to.
    pub fn stage(self, mesh: &Mesh) -> usize {
        (self.0 / (mesh.tensor * mesh.data)) as usize
    }
}

/// What was done in a step, by device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// The mesh.
    pub mesh: Mesh,
    /// One for each pipeline stage: its devices run the same instructions on shards of the same
    /// size, so they do the same amount of everything.
    pub stages: Vec<DeviceReport>,
}

/// What one device did in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// Memory allocated for the program's buffers.
    pub allocated: Bytes,
    /// Instructions executed, by name.
    pub instructions: BTreeMap<&'static str, u64>,
    /// Collectives, by kind and axis.
    pub collectives: BTreeMap<(CollectiveKind, Axis), CollectiveCount>,
    /// Bytes sent to neighbouring stages.
    pub sent: Bytes,
    /// Bytes received from neighbouring stages.
    pub received: Bytes,
}

/// Collectives of one kind over one axis, statistics included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveCount {
    /// How many.
    pub calls: u64,
    /// The whole (unsharded) tensors' bytes: what published volumes count.
    pub payload: Bytes,
    /// Bytes one device sends when nothing is sent twice: see [`sent_by_each`].
    pub sent: Bytes,
}

/// Bytes by kind of collective and axis of the mesh.
pub type BytesByKindAndAxis = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

impl StepReport {
    /// What a device did.
    ///
    /// # Panics
    /// When the mesh has no such device.
    pub fn device(&self, device: DeviceId) -> &DeviceReport {
        &self.stages[device.stage(&self.mesh)]
    }

    /// Every device of the mesh.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.mesh.devices()).map(DeviceId)
    }
}

impl DeviceReport {
    /// That of a device which has done nothing yet.
    pub fn with_arena(arena: Bytes) -> DeviceReport {
        DeviceReport { allocated: arena, ..DeviceReport::default() }
    }

    /// Counts from zero again, in the memory of the counts before.
    pub fn reset_counts(&mut self) {
        self.instructions.values_mut().for_each(|count| *count = 0);
        self.collectives.values_mut().for_each(|count| *count = CollectiveCount::default());
        (self.sent, self.received) = (Bytes(0), Bytes(0));
    }

    /// Instructions of all names.
    pub fn instruction_count(&self) -> u64 {
        self.instructions.values().sum()
    }

    /// Counts one instruction's kernel, with the bytes it says.
    pub fn count(&mut self, name: &'static str, axis: Option<Axis>, kernel: &Kernel) {
        self.count_instruction(name);
        if let (Kernel::Collective(collective), Some(axis)) = (kernel, axis) {
            self.count_collective(axis, collective);
        }
    }

    /// Counts an instruction.
    pub fn count_instruction(&mut self, name: &'static str) {
        *self.instructions.entry(name).or_default() += 1;
    }

    /// Counts the bytes of a collective.
    pub fn count_collective(&mut self, axis: Axis, collective: &Collective) {
        let count = self.collectives.entry((collective.kind, axis)).or_default();
        count.calls += 1;
        count.payload += collective.payload;
        count.sent += bytes_sent_per_member(collective);
    }

    /// The bytes of its collectives, as they are written down.
    pub fn collective_bytes(
        &self,
        bytes: impl Fn(&CollectiveCount) -> Bytes,
    ) -> BytesByKindAndAxis {
        let mut made = BytesByKindAndAxis::new();
        for ((kind, axis), count) in &self.collectives {
            made.entry(kind.name()).or_default().insert(axis.name(), bytes(count).0);
        }
        made
    }
}

/// Bytes each of n members sends in a collective with payload S, when nothing is sent twice:
///
/// ```text
/// all-reduce                    2(n−1)/n · S      (reduce-scatter, then all-gather)
/// reduce-scatter, all-gather     (n−1)/n · S
/// all-to-all                     (n−1)/n² · S
/// ```
/// rounded down to whole bytes.
pub fn bytes_sent_per_member(collective: &Collective) -> Bytes {
    let (members, payload) =
        (u128::from(collective.group.size.max(1)), u128::from(collective.payload.0));
    let passed_on = payload * (members - 1);
    let sent = match collective.kind {
        CollectiveKind::AllReduce => 2 * passed_on / members,
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => passed_on / members,
        CollectiveKind::AllToAll => passed_on / (members * members),
    };
    Bytes(u64::try_from(sent).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_stage_are_neighbours() {
        let mesh = Mesh { tensor: 2, pipeline: 2, data: 3 };
        let stages: Vec<usize> = (0..12).map(|id| DeviceId(id).stage(&mesh)).collect();
        assert_eq!(stages, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn what_a_member_sends() {
        let group = Mesh { tensor: 4, pipeline: 1, data: 1 }.group(Axis::Tensor);
        let sent =
            |kind| bytes_sent_per_member(&Collective { kind, payload: Bytes(1600), group }).0;
        assert_eq!(sent(CollectiveKind::AllReduce), 2400);
        assert_eq!(sent(CollectiveKind::ReduceScatter), 1200);
        assert_eq!(sent(CollectiveKind::AllGather), 1200);
        assert_eq!(sent(CollectiveKind::AllToAll), 300);
    }
}
