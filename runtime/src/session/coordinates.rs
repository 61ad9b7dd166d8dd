//! Positions of devices on the mesh, and the members of their groups.

use narrows_plan::{Axis, Mesh};

/// Position of a device on the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoordinates {
    /// Position along the tensor axis.
    pub tensor: u64,
    /// Position along the data axis.
    pub data: u64,
    /// Pipeline stage.
    pub stage: u64,
}

impl MeshCoordinates {
    /// Position of a device, given its number.
    pub fn of_device(device: u64, mesh: &Mesh) -> MeshCoordinates {
        MeshCoordinates {
            tensor: device % mesh.tensor,
            data: device / mesh.tensor % mesh.data,
            stage: device / (mesh.tensor * mesh.data),
        }
    }

    /// Number of the device at this position.
    pub fn device(&self, mesh: &Mesh) -> u64 {
        self.tensor + mesh.tensor * (self.data + mesh.data * self.stage)
    }

    /// Members of the device's group of `size` along an axis, in order. A pipeline group that is
    /// smaller than the axis consists of the first and the last stage.
    pub fn members(self, axis: Axis, size: u64, mesh: &Mesh) -> impl Iterator<Item = u64> {
        let (mesh, last) = (*mesh, mesh.axis_size(axis) - 1);
        (0..size).map(move |position| {
            let position = if size <= last && position > 0 { last } else { position };
            let member = match axis {
                Axis::Tensor => MeshCoordinates { tensor: position, ..self },
                Axis::Data => MeshCoordinates { data: position, ..self },
                Axis::Pipeline => MeshCoordinates { stage: position, ..self },
            };
            member.device(&mesh)
        })
    }

    /// Position along an axis.
    pub fn position(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Data => self.data,
            Axis::Pipeline => self.stage,
        }
    }

    /// Index of the device's group among the groups along an axis.
    pub fn group_index(&self, axis: Axis, mesh: &Mesh) -> u64 {
        match axis {
            Axis::Tensor => self.data + mesh.data * self.stage,
            Axis::Data => self.tensor + mesh.tensor * self.stage,
            Axis::Pipeline => self.tensor + mesh.tensor * self.data,
        }
    }
}

/// Sizes of the groups along an axis. A pipeline of more than two stages also has groups of two: the
/// first and the last stage, which share a tied weight.
pub fn group_sizes(axis: Axis, mesh: &Mesh) -> impl Iterator<Item = u64> {
    let size = mesh.axis_size(axis);
    std::iter::once(size).chain((axis == Axis::Pipeline && size > 2).then_some(2))
}

/// Devices that a device shares collectives or transfers with, in ascending order.
pub fn peers(device: u64, mesh: &Mesh) -> Vec<u64> {
    let own = MeshCoordinates::of_device(device, mesh);
    let groups =
        Axis::ALL.into_iter().flat_map(|axis| own.members(axis, mesh.axis_size(axis), mesh));
    let mut peers: Vec<u64> = groups.filter(|peer| *peer != device).collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}
