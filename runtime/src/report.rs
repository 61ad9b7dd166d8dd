//! Counts of a step: instructions, collectives and transfers of each device.

use std::collections::BTreeMap;

use narrows_plan::kernel::{Collective, CollectiveKind};
use narrows_plan::{Axis, Bytes, Kernel, Mesh};

/// Number of a device on the mesh: see [`Mesh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u64);

impl DeviceId {
    /// Pipeline stage of the device.
    pub fn stage(self, mesh: &Mesh) -> usize {
        (self.0 / mesh.devices_per_stage()) as usize
    }
}

/// Counts of a step, by pipeline stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// Mesh of the program.
    pub mesh: Mesh,
    /// Report of one device of each stage. The devices of a stage execute the same instructions on
    /// shards of the same size, so their reports are equal.
    pub stages: Vec<DeviceReport>,
}

/// Counts of one device in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// Bytes allocated for the program's buffers.
    pub allocated: Bytes,
    /// Executed instructions, by name.
    pub instructions: BTreeMap<&'static str, u64>,
    /// Collectives, by kind and axis.
    pub collectives: BTreeMap<(CollectiveKind, Axis), CollectiveCount>,
    /// Bytes sent to neighbouring stages.
    pub sent: Bytes,
    /// Bytes received from neighbouring stages.
    pub received: Bytes,
}

/// Collectives of one kind along one axis. Norm statistics that are reduced together with a tensor
/// are included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectiveCount {
    /// Number of collectives.
    pub calls: u64,
    /// Bytes of the whole, unsharded tensors, as published volumes count.
    pub payload: Bytes,
    /// Bytes that one device sends at least: see [`bytes_sent_per_member`].
    pub sent: Bytes,
}

/// Bytes by name of the collective kind and of the mesh axis.
pub type BytesByKindAndAxis = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

impl StepReport {
    /// Report of a device.
    ///
    /// # Panics
    /// When the mesh has no such device.
    pub fn device(&self, device: DeviceId) -> &DeviceReport {
        &self.stages[device.stage(&self.mesh)]
    }

    /// All devices of the mesh.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.mesh.devices()).map(DeviceId)
    }
}

impl DeviceReport {
    /// The report of a device that has not executed anything yet.
    pub fn with_arena(arena: Bytes) -> DeviceReport {
        DeviceReport { allocated: arena, ..DeviceReport::default() }
    }

    /// Resets all counts to zero without freeing memory.
    pub fn reset_counts(&mut self) {
        self.instructions.values_mut().for_each(|count| *count = 0);
        self.collectives.values_mut().for_each(|count| *count = CollectiveCount::default());
        (self.sent, self.received) = (Bytes(0), Bytes(0));
    }

    /// Counts an instruction and, for a collective, the bytes of its kernel.
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

    /// Bytes of the collectives by kind and axis, as metrics and reports have them.
    pub fn collective_bytes(
        &self,
        bytes: impl Fn(&CollectiveCount) -> Bytes,
    ) -> BytesByKindAndAxis {
        let mut by_kind = BytesByKindAndAxis::new();
        for ((kind, axis), count) in &self.collectives {
            by_kind.entry(kind.name()).or_default().insert(axis.name(), bytes(count).0);
        }
        by_kind
    }
}

/// Bytes that each of n members sends in a collective with payload S when no byte is sent twice,
/// rounded down:
///
/// ```text
/// all-reduce                    2(n−1)/n · S      (reduce-scatter, then all-gather)
/// reduce-scatter, all-gather     (n−1)/n · S
/// all-to-all                     (n−1)/n² · S
/// shift                               1/n · S
/// ```
pub fn bytes_sent_per_member(collective: &Collective) -> Bytes {
    let (members, payload) =
        (u128::from(collective.group.size.max(1)), u128::from(collective.payload.0));
    let foreign = payload * (members - 1);
    let sent = match collective.kind {
        CollectiveKind::AllReduce => 2 * foreign / members,
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => foreign / members,
        CollectiveKind::AllToAll => foreign / (members * members),
        CollectiveKind::Shift => {
            if members > 1 {
                payload / members
            } else {
                0
            }
        }
    };
    Bytes(u64::try_from(sent).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_stage_are_consecutive() {
        let mesh = Mesh { tensor: 2, pipeline: 2, data: 3, context: 1 };
        let stages: Vec<usize> = (0..12).map(|id| DeviceId(id).stage(&mesh)).collect();
        assert_eq!(stages, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    }

    #[test]
    fn members_send_minimal_volumes() {
        let group = Mesh { tensor: 4, pipeline: 1, data: 1, context: 1 }.group(Axis::Tensor);
        let sent =
            |kind| bytes_sent_per_member(&Collective { kind, payload: Bytes(1600), group }).0;
        assert_eq!(sent(CollectiveKind::AllReduce), 2400);
        assert_eq!(sent(CollectiveKind::ReduceScatter), 1200);
        assert_eq!(sent(CollectiveKind::AllGather), 1200);
        assert_eq!(sent(CollectiveKind::AllToAll), 300);
        assert_eq!(sent(CollectiveKind::Shift), 400);
    }
}
