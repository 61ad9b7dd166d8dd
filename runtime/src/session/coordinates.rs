//! Where devices are on the mesh, and whom they meet.

use narrows_plan::mesh::{Axis, Mesh};

/// Where a device is on the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshCoordinates {
    /// Its place along the tensor axis.
    pub tensor: u64,
    /// Its place along the data axis.
    pub data: u64,
    /// Its pipeline stage.
    pub stage: u64,
}

impl MeshCoordinates {
    /// Those of a device by its number.
    pub fn of_device(device: u64, mesh: &Mesh) -> MeshCoordinates {
        MeshCoordinates {
            tensor: device % mesh.tensor,
            data: device / mesh.tensor % mesh.data,
            stage: device / (mesh.tensor * mesh.data),
        }
    }

    /// The number of the device that is there.
    pub fn device(&self, mesh: &Mesh) -> u64 {
        self.tensor + mesh.tensor * (self.data + mesh.data * self.stage)
    }

    /// One's group along an axis, in its order; of a pipeline longer than `size`, its first and its
    /// last stage.
    pub fn members(self, axis: Axis, size: u64, mesh: &Mesh) -> impl Iterator<Item = u64> {
        let (mesh, last) = (*mesh, mesh.size(axis) - 1);
        (0..size).map(move |place| {
            let place = if size <= last && place > 0 { last } else { place };
            let at = match axis {
                Axis::Tensor => MeshCoordinates { tensor: place, ..self },
                Axis::Data => MeshCoordinates { data: place, ..self },
                Axis::Pipeline => MeshCoordinates { stage: place, ..self },
            };
            at.device(&mesh)
        })
    }

    /// One's place along an axis.
    pub fn position(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Data => self.data,
            Axis::Pipeline => self.stage,
        }
    }

    /// What tells one's group along an axis from the others.
    pub fn group_index(&self, axis: Axis, mesh: &Mesh) -> u64 {
        match axis {
            Axis::Tensor => self.data + mesh.data * self.stage,
            Axis::Data => self.tensor + mesh.tensor * self.stage,
            Axis::Pipeline => self.tensor + mesh.tensor * self.data,
        }
    }
}

/// The sizes that groups over an axis have: of a pipeline also two, the first and the last stage,
/// which share a tied weight.
pub fn group_sizes(axis: Axis, mesh: &Mesh) -> impl Iterator<Item = u64> {
    let size = mesh.size(axis);
    std::iter::once(size).chain((axis == Axis::Pipeline && size > 2).then_some(2))
}

/// The devices that a device meets in collectives and transfers.
pub fn peers(device: u64, mesh: &Mesh) -> Vec<u64> {
    let at = MeshCoordinates::of_device(device, mesh);
    let along = Axis::ALL.into_iter().flat_map(|axis| at.members(axis, mesh.size(axis), mesh));
    let mut all: Vec<u64> = along.filter(|other| *other != device).collect();
    all.sort_unstable();
    all.dedup();
    all
}
