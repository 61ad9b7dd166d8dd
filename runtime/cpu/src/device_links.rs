//! Communicators and peer links of a device: over shared memory within a process, or over the
//! connections of a process group.

use std::collections::HashMap;
use std::sync::Arc;

use narrows_plan::program::Program;
use narrows_plan::{Axis, DeviceGroup};
use narrows_runtime::PipelineDirection;
use narrows_runtime::process_group::{Communicator, GroupScope, PeerLink, ProcessGroup};
use narrows_runtime::session::{MeshCoordinates, collective_groups};

use crate::abort::AbortFlag;
use crate::shared_memory_group::{SharedMemoryCommunicator, SharedMemoryGroup};
use crate::stage_pipe::{SharedMemoryLink, StagePipe};
use crate::stage_traffic::{StageTraffic, stage_traffic};

/// The links of one device to others.
pub(crate) struct DeviceLinks {
    communicators: HashMap<DeviceGroup, Box<dyn Communicator>>,
    /// Links to neighbouring stages by direction: those that the device sends to, and those that it receives from.
    outgoing: HashMap<PipelineDirection, StageLink>,
    incoming: HashMap<PipelineDirection, StageLink>,
    /// Outgoing pipes within the process.
    outgoing_pipes: Vec<Arc<StagePipe>>,
    /// Raised when this device fails, for the other devices of the process.
    pub abort: Arc<AbortFlag>,
}

/// One direction of the transfers with a neighbouring stage.
struct StageLink {
    stage: u64,
    link: Box<dyn PeerLink>,
}

impl DeviceLinks {
    /// Links of all devices of a program, in this process. The result is in device order.
    pub fn in_memory(program: &Program) -> Vec<DeviceLinks> {
        let mesh = &program.context.mesh;
        let abort = Arc::new(AbortFlag::default());
        // By shape and first member.
        let mut groups: HashMap<(DeviceGroup, u64), Arc<SharedMemoryGroup>> = HashMap::new();
        let shapes = collective_groups(program);
        // By tensor coordinate, replica and traffic.
        let mut pipes: HashMap<(u64, u64, usize), Arc<StagePipe>> = HashMap::new();
        let traffic: Vec<StageTraffic> = stage_traffic(program).collect();
        let devices = (0..mesh.devices()).map(|device| {
            let coordinates = MeshCoordinates::of_device(device, mesh);
            let mut links = DeviceLinks::without_any(abort.clone());
            for shape in &shapes {
                let Some(members) = coordinates.members(shape, mesh) else { continue };
                let rank = members.iter().take_while(|member| **member != device).count();
                let group = groups
                    .entry((*shape, members[0]))
                    .or_insert_with(|| {
                        Arc::new(SharedMemoryGroup::new(members.len(), abort.event()))
                    })
                    .clone();
                let communicator = SharedMemoryCommunicator { group, rank };
                links.communicators.insert(*shape, Box::new(communicator));
            }
            for (index, traffic) in traffic.iter().enumerate() {
                let StageTraffic { from, to, direction, transfers, elements } = *traffic;
                if coordinates.stage != from && coordinates.stage != to {
                    continue;
                }
                let new = || Arc::new(StagePipe::new(transfers as usize, elements, abort.event()));
                let key = (coordinates.tensor, coordinates.replica, index);
                let pipe = pipes.entry(key).or_insert_with(new).clone();
                let end = || SharedMemoryLink { pipe: pipe.clone() };
                if coordinates.stage == from {
                    links
                        .outgoing
                        .insert(direction, StageLink { stage: to, link: Box::new(end()) });
                    links.outgoing_pipes.push(pipe.clone());
                } else {
                    links
                        .incoming
                        .insert(direction, StageLink { stage: from, link: Box::new(end()) });
                }
            }
            links
        });
        devices.collect()
    }

    /// Links of the device that a process of a group is. Without a connection to all members of a
    /// device group its collectives are refused, and likewise transfers with a neighbouring stage.
    pub fn of_process(program: &Program, group: &dyn ProcessGroup) -> DeviceLinks {
        let mesh = &program.context.mesh;
        let coordinates = MeshCoordinates::of_device(group.rank(), mesh);
        let mut links = DeviceLinks::without_any(Arc::default());
        for shape in collective_groups(program) {
            let Some(members) = coordinates.members(&shape, mesh) else { continue };
            if let Some(communicator) = group.communicator(&members, scope(program, &shape)) {
                links.communicators.insert(shape, communicator);
            }
        }
        let link = |stage: u64, direction: PipelineDirection| {
            let peer = MeshCoordinates { stage, ..coordinates }.device(mesh);
            Some(StageLink { stage, link: group.peer_link(peer, direction)? })
        };
        // A link counts its transfers, so sends and receives have links of their own.
        for StageTraffic { from, to, direction, .. } in stage_traffic(program) {
            if from == coordinates.stage {
                links.outgoing.extend(link(to, direction).map(|link| (direction, link)));
            } else if to == coordinates.stage {
                links.incoming.extend(link(from, direction).map(|link| (direction, link)));
            }
        }
        links
    }

    fn without_any(abort: Arc<AbortFlag>) -> DeviceLinks {
        let (outgoing, incoming) = (HashMap::new(), HashMap::new());
        let (communicators, outgoing_pipes) = (HashMap::new(), vec![]);
        DeviceLinks { communicators, outgoing, incoming, outgoing_pipes, abort }
    }

    /// Replaces each communicator by one that calls it.
    #[cfg(test)]
    pub fn wrap_communicators(
        &mut self,
        wrap: impl Fn(&DeviceGroup, Box<dyn Communicator>) -> Box<dyn Communicator>,
    ) {
        let communicators = self.communicators.drain();
        let wrapped = communicators.map(|(group, inner)| (group, wrap(&group, inner)));
        self.communicators = wrapped.collect();
    }

    /// The communicator of the device's group of this shape; `None` if the program has no such group, or
    /// the process is not connected with all members.
    pub fn communicator(&self, group: &DeviceGroup) -> Option<&dyn Communicator> {
        self.communicators.get(group).map(|communicator| &**communicator)
    }

    /// The link for sends to a neighbouring stage; `None` if the device sends nothing to it in this direction, or is not
    /// connected.
    pub fn outgoing(&self, stage: u64, direction: PipelineDirection) -> Option<&dyn PeerLink> {
        self.outgoing.get(&direction).filter(|link| link.stage == stage).map(|link| &*link.link)
    }

    /// The link for receives from a neighbouring stage; `None` if it sends nothing in this direction, or is not connected.
    pub fn incoming(&self, stage: u64, direction: PipelineDirection) -> Option<&dyn PeerLink> {
        self.incoming.get(&direction).filter(|link| link.stage == stage).map(|link| &*link.link)
    }

    /// Bytes of the buffers that hold this device's outgoing transfers.
    pub fn buffer_bytes(&self) -> u64 {
        self.outgoing_pipes.iter().map(|pipe| pipe.buffer_bytes()).sum()
    }
}

fn scope(program: &Program, group: &DeviceGroup) -> GroupScope {
    let context = &program.context;
    match group.axis {
        axis if *group == context.mesh.group(axis) => GroupScope::Axis(axis),
        Axis::Data if *group == context.shard_group() => GroupScope::ShardGroup,
        Axis::Data => GroupScope::ShardReplicas,
        Axis::Tensor | Axis::Context | Axis::Pipeline => GroupScope::TiedStages,
    }
}
