//! Communicators and peer links of a device: over shared memory within a process, or over the
//! connections of a process group.

use std::collections::HashMap;
use std::sync::Arc;

use narrows_plan::program::Program;
use narrows_plan::{Axis, DeviceGroup};
use narrows_runtime::process_group::{
    ClusterError, Communicator, GroupScope, PeerLink, ProcessGroup,
};
use narrows_runtime::session::{MeshCoordinates, collective_groups};

use crate::abort::AbortFlag;
use crate::shared_memory_group::{SharedMemoryCommunicator, SharedMemoryGroup};
use crate::stage_pipe::{SharedMemoryLink, StagePipe};
use crate::stage_traffic::{StageTraffic, stage_traffic};

/// The links of one device to others.
pub(crate) struct DeviceLinks {
    communicators: HashMap<DeviceGroup, Box<dyn Communicator>>,
    /// Pipes by neighbouring pipeline stage.
    peers: HashMap<u64, Box<dyn PeerLink>>,
    /// Outgoing pipes within the process.
    outgoing: Vec<Arc<StagePipe>>,
    /// Raised when this device fails, for the other devices of the process.
    pub abort: Arc<AbortFlag>,
}

impl DeviceLinks {
    /// Links of all devices of a program, in this process. The result is in device order.
    pub fn in_memory(program: &Program) -> Vec<DeviceLinks> {
        let mesh = &program.context.mesh;
        let abort = Arc::new(AbortFlag::default());
        // By shape and first member.
        let mut groups: HashMap<(DeviceGroup, u64), Arc<SharedMemoryGroup>> = HashMap::new();
        let shapes = collective_groups(program);
        let mut pipes: HashMap<(u64, u64, u64, u64), Arc<StagePipe>> = HashMap::new();
        let traffic: HashMap<(u64, u64), StageTraffic> =
            stage_traffic(program).map(|traffic| ((traffic.from, traffic.to), traffic)).collect();
        let devices = (0..mesh.devices()).map(|device| {
            let coordinates = MeshCoordinates::of_device(device, mesh);
            let mut links = DeviceLinks::without_any(abort.clone());
            for shape in &shapes {
                let Some(members) = coordinates.members(shape, mesh) else { continue };
                let rank = members.iter().take_while(|member| **member != device).count();
                let group = groups
                    .entry((*shape, members[0]))
                    .or_insert_with(|| Arc::new(SharedMemoryGroup::new(members.len())))
                    .clone();
                let communicator = SharedMemoryCommunicator { group, rank, abort: abort.clone() };
                links.communicators.insert(*shape, Box::new(communicator));
            }
            let mut pipe = |from: u64, to: u64| {
                let traffic = traffic.get(&(from, to))?;
                let new = || Arc::new(StagePipe::new(traffic.transfers as usize, traffic.elements));
                let key = (coordinates.tensor, coordinates.data, from, to);
                Some(pipes.entry(key).or_insert_with(new).clone())
            };
            for peer in [coordinates.stage.wrapping_sub(1), coordinates.stage.wrapping_add(1)] {
                let pair = (pipe(coordinates.stage, peer), pipe(peer, coordinates.stage));
                let (Some(outgoing), Some(incoming)) = pair else { continue };
                links.outgoing.push(outgoing.clone());
                let link = SharedMemoryLink { outgoing, incoming, abort: abort.clone() };
                links.peers.insert(peer, Box::new(link));
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
        for traffic in stage_traffic(program).filter(|traffic| traffic.from == coordinates.stage) {
            let peer = MeshCoordinates { stage: traffic.to, ..coordinates }.device(mesh);
            // A link counts its transfers, so each direction has a link of its own.
            if let (Some(outgoing), Some(incoming)) = (group.peer_link(peer), group.peer_link(peer))
            {
                links.peers.insert(traffic.to, Box::new(TwoWayLink { outgoing, incoming }));
            }
        }
        links
    }

    fn without_any(abort: Arc<AbortFlag>) -> DeviceLinks {
        let (communicators, peers) = (HashMap::new(), HashMap::new());
        DeviceLinks { communicators, peers, outgoing: vec![], abort }
    }

    /// The communicator of the device's group of this shape; `None` if the program has no such group, or
    /// the process is not connected with all members.
    pub fn communicator(&self, group: &DeviceGroup) -> Option<&dyn Communicator> {
        self.communicators.get(group).map(|communicator| &**communicator)
    }

    /// The link to a neighbouring stage; `None` if it is no neighbour, or not connected.
    pub fn peer(&self, stage: u64) -> Option<&dyn PeerLink> {
        self.peers.get(&stage).map(|link| &**link)
    }

    /// Bytes of the buffers that hold this device's outgoing transfers.
    pub fn buffer_bytes(&self) -> u64 {
        self.outgoing.iter().map(|pipe| pipe.buffer_bytes()).sum()
    }
}

/// Two links to one peer, for sending and for receiving.
struct TwoWayLink {
    outgoing: Box<dyn PeerLink>,
    incoming: Box<dyn PeerLink>,
}

impl PeerLink for TwoWayLink {
    fn send(&self, operands: &[&[f32]]) -> Result<(), ClusterError> {
        self.outgoing.send(operands)
    }

    fn receive(&self, on_receive: &mut dyn FnMut(&[f32])) -> Result<(), ClusterError> {
        self.incoming.receive(on_receive)
    }
}

fn scope(program: &Program, group: &DeviceGroup) -> GroupScope {
    let context = &program.context;
    match group.axis {
        axis if *group == context.mesh.group(axis) => GroupScope::Axis(axis),
        Axis::Data if *group == context.shard_group() => GroupScope::ShardGroup,
        Axis::Data => GroupScope::ShardReplicas,
        Axis::Tensor | Axis::Pipeline => GroupScope::TiedStages,
    }
}
