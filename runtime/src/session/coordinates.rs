//! Positions of devices on the mesh, and the members of their groups.

use std::collections::BTreeSet;

use narrows_plan::program::{Action, Program};
use narrows_plan::{Axis, DeviceGroup, Mesh};

/// Position of a device on the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoordinates {
    /// Position along the tensor axis.
    pub tensor: u64,
    /// Position among the replicas, which are the data axis.
    pub replica: u64,
    /// Pipeline stage.
    pub stage: u64,
}

impl MeshCoordinates {
    /// Position of a device, given its number.
    pub fn of_device(device: u64, mesh: &Mesh) -> MeshCoordinates {
        MeshCoordinates {
            tensor: device % mesh.tensor,
            replica: device / mesh.tensor % mesh.replicas(),
            stage: device / mesh.devices_per_stage(),
        }
    }

    /// Number of the device at this position.
    pub fn device(&self, mesh: &Mesh) -> u64 {
        self.tensor + mesh.tensor * (self.replica + mesh.replicas() * self.stage)
    }

    /// Members of the device's group of this shape, in order; `None` for a device in no such group: of those of the first
    /// and the last stage, a device of another stage.
    pub fn members(self, group: &DeviceGroup, mesh: &Mesh) -> Option<Vec<u64>> {
        // Positions along the axis between neighbouring members.
        let step = group.stride / mesh.group(group.axis).stride;
        let position = self.position(group.axis, mesh);
        let first = position / (step * group.size) * (step * group.size) + position % step;
        let members = (0..group.size).map(|member| first + member * step);
        let is_group = members.clone().all(|member| member < mesh.axis_size(group.axis));
        is_group
            .then(|| members.map(|member| self.at(group.axis, member, mesh).device(mesh)).collect())
    }

    /// These coordinates with another position along an axis.
    fn at(self, axis: Axis, position: u64, mesh: &Mesh) -> MeshCoordinates {
        match axis {
            Axis::Tensor => MeshCoordinates { tensor: position, ..self },
            Axis::Context => {
                let first = self.batch_part(mesh) * mesh.context;
                MeshCoordinates { replica: first + position, ..self }
            }
            Axis::Data => MeshCoordinates { replica: position, ..self },
            Axis::Pipeline => MeshCoordinates { stage: position, ..self },
        }
    }

    /// Position along an axis.
    pub fn position(&self, axis: Axis, mesh: &Mesh) -> u64 {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Context => self.replica % mesh.context,
            Axis::Data => self.replica,
            Axis::Pipeline => self.stage,
        }
    }

    /// Index of the device's pipeline among all pipelines.
    pub fn pipeline_index(&self, mesh: &Mesh) -> u64 {
        self.tensor + mesh.tensor * self.replica
    }

    /// Index of the part of the batch that the device computes on.
    pub fn batch_part(&self, mesh: &Mesh) -> u64 {
        self.replica / mesh.context
    }
}

/// The device groups of a program's collectives, and of ring attention.
pub fn collective_groups(program: &Program) -> BTreeSet<DeviceGroup> {
    let groups = program.instructions().filter_map(|instr| match &instr.action {
        Action::Collective(collective) => Some(collective.group),
        Action::Attention(attention) => attention.rotation(),
        _ => None,
    });
    groups.collect()
}

/// Devices that a device shares collectives or transfers with, in ascending order.
pub fn peers(device: u64, mesh: &Mesh) -> Vec<u64> {
    let own = MeshCoordinates::of_device(device, mesh);
    let groups = Axis::ALL.into_iter().filter_map(|axis| own.members(&mesh.group(axis), mesh));
    let mut peers: Vec<u64> = groups.flatten().filter(|peer| *peer != device).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}
