//! What ties devices together: the groups of their collectives, and the pipes between neighbouring
//! stages.

use std::collections::HashMap;

use narrows_plan::kernel::CollectiveKind;
use narrows_plan::mesh::{self, Axis, Mesh};
use narrows_plan::program::{Action, Phase, Program, Reduction, StageProgram};
use narrows_runtime::process_group::{
    ClusterError, CollectiveVolume, Communicator, GroupScope, PeerLink, ProcessGroup,
};

use super::barrier::Abort;
use super::device::Stop;
use super::exchange::SharedMemoryGroup;
use super::pipe::Pipe;
use narrows_runtime::RunError;
use narrows_runtime::session::{MeshCoordinates, group_sizes};

/// The groups of all devices, and the pipes between neighbouring stages.
pub struct DeviceLinks {
    groups: HashMap<(Axis, u64, u64), LinkGroup>,
    /// By tensor and data coordinate, sending and receiving stage.
    pipes: HashMap<(u64, u64, u64, u64), StageChannel>,
    pub abort: Abort,
}

/// The devices of a group.
enum LinkGroup {
    /// All of this process.
    Memory(SharedMemoryGroup),
    /// Each a process.
    Wires(Box<dyn Communicator>),
}

/// How what is sent comes to a neighbouring stage.
pub enum StageChannel {
    /// It is of this process.
    Memory(Pipe),
    /// It is another.
    Wire(Box<dyn PeerLink>),
}

/// A group as one of its devices sees it.
pub struct GroupMember<'l> {
    links: &'l DeviceLinks,
    group: &'l LinkGroup,
    me: usize,
}

/// What may be under way from a stage to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageTraffic {
    /// Who sends.
    from: u64,
    /// Who receives.
    to: u64,
    /// Transfers that are sent and not yet received, at most: what is under way belongs to a
    /// microbatch that the earlier stage has in flight.
    transfers: u64,
    /// Numbers of the largest of them.
    numbers: usize,
}

impl StageTraffic {
    /// Bytes of the copies that are kept for it.
    pub fn bytes(&self) -> u64 {
        self.transfers * 4 * self.numbers as u64
    }
}

/// What goes between the stages of a program; every device has what its stage has.
pub fn traffic(program: &Program) -> impl Iterator<Item = StageTraffic> {
    let later = 1..program.stages.len() as u64;
    let pairs = later.flat_map(|stage| [(stage - 1, stage), (stage, stage - 1)]);
    pairs.map(|(from, to)| StageTraffic {
        from,
        to,
        transfers: program.stages[from.min(to) as usize].slots,
        numbers: largest_transfer(&program.stages[from as usize], to),
    })
}

/// The most numbers that a stage sends to another at once.
fn largest_transfer(stage: &StageProgram, to: u64) -> usize {
    let phases = [Phase::Forward, Phase::Backward, Phase::Step];
    let sends = phases.into_iter().flat_map(|phase| stage.instructions(phase)).filter(
        |instr| matches!(&instr.action, Action::Send(hop) if u64::from(hop.peer_stage) == to),
    );
    let bytes = sends.map(|instr| instr.reads.iter().map(|a| a.extent.bytes().0).sum::<u64>());
    (bytes.max().unwrap_or(0) / 4) as usize
}

impl DeviceLinks {
    /// For the devices of a program, all of this process.
    pub fn in_memory(program: &Program) -> DeviceLinks {
        let mesh = &program.context.mesh;
        let mut links = DeviceLinks::none();
        for device in 0..mesh.devices() {
            let at = MeshCoordinates::of_device(device, mesh);
            for axis in Axis::ALL {
                for size in group_sizes(axis, mesh) {
                    let key = (axis, at.group_index(axis, mesh), size);
                    let make = || LinkGroup::Memory(SharedMemoryGroup::new(size as usize));
                    links.groups.entry(key).or_insert_with(make);
                }
            }
            for traffic in traffic(program).filter(|traffic| traffic.from == at.stage) {
                let pipe = Pipe::new(traffic.transfers as usize, traffic.numbers);
                let key = (at.tensor, at.data, traffic.from, traffic.to);
                links.pipes.insert(key, StageChannel::Memory(pipe));
            }
        }
        links
    }

    /// For the device that a process of a cluster is. Where a group is, and it is not connected with
    /// all of it, its collectives are refused.
    pub fn of_process(program: &Program, group: &dyn ProcessGroup) -> DeviceLinks {
        let mesh = &program.context.mesh;
        let at = MeshCoordinates::of_device(group.rank(), mesh);
        let mut links = DeviceLinks::none();
        for axis in Axis::ALL {
            for size in group_sizes(axis, mesh) {
                let ends = size != mesh.axis_size(axis);
                let scope = if ends { GroupScope::TiedStages } else { GroupScope::Axis(axis) };
                let members: Vec<u64> = at.members(axis, size, mesh).collect();
                if let Some(wires) = group.communicator(&members, scope) {
                    links
                        .groups
                        .insert((axis, at.group_index(axis, mesh), size), LinkGroup::Wires(wires));
                }
            }
        }
        for traffic in traffic(program) {
            let other = match (traffic.from == at.stage, traffic.to == at.stage) {
                (true, _) => traffic.to,
                (_, true) => traffic.from,
                _ => continue,
            };
            let other = MeshCoordinates { stage: other, ..at }.device(mesh);
            if let Some(wire) = group.peer_link(other) {
                let key = (at.tensor, at.data, traffic.from, traffic.to);
                links.pipes.insert(key, StageChannel::Wire(wire));
            }
        }
        links
    }

    fn none() -> DeviceLinks {
        let (groups, pipes) = (HashMap::new(), HashMap::new());
        DeviceLinks { groups, pipes, abort: Abort::default() }
    }

    /// One's group, and one's place in it.
    pub fn group(
        &self,
        at: &MeshCoordinates,
        group: &mesh::DeviceGroup,
        mesh: &Mesh,
    ) -> Option<GroupMember<'_>> {
        let key = (group.axis, at.group_index(group.axis, mesh), group.size);
        let mut me = at.position(group.axis);
        if group.size != mesh.axis_size(group.axis) {
            me = u64::from(me > 0);
        }
        Some(GroupMember { links: self, group: self.groups.get(&key)?, me: me as usize })
    }

    /// The way of one's column of stages from one of them to another.
    pub fn way(&self, at: &MeshCoordinates, from: u64, to: u64) -> Option<&StageChannel> {
        self.pipes.get(&(at.tensor, at.data, from, to))
    }

    /// Bytes of the copies that a device keeps to send with.
    pub fn bytes(&self, at: &MeshCoordinates) -> u64 {
        let neighbours = [at.stage.wrapping_sub(1), at.stage.wrapping_add(1)];
        let ways = neighbours.iter().filter_map(|to| self.way(at, at.stage, *to));
        ways.map(|way| if let StageChannel::Memory(pipe) = way { pipe.bytes() } else { 0 }).sum()
    }

    /// Sends these, one after the other.
    ///
    /// # Errors
    /// When the other stage's process is gone.
    pub fn send<'a>(
        &self,
        way: &StageChannel,
        operands: impl Iterator<Item = &'a [f32]> + Clone,
    ) -> Result<(), Stop> {
        match way {
            StageChannel::Memory(pipe) => {
                pipe.send(operands);
                Ok(())
            }
            StageChannel::Wire(wire) => wire.send(&operands.collect::<Vec<_>>()).map_err(stopped),
        }
    }

    /// Waits for the next transfer, and passes it to `take`.
    ///
    /// # Errors
    /// When another device failed.
    pub fn receive(&self, way: &StageChannel, take: impl FnOnce(&[f32])) -> Result<(), Stop> {
        match way {
            StageChannel::Memory(pipe) => Ok(pipe.receive(&self.abort, take)?),
            StageChannel::Wire(wire) => {
                let mut take = Some(take);
                let mut once = |elements: &[f32]| take.take().into_iter().for_each(|t| t(elements));
                wire.receive(&mut once).map_err(stopped)
            }
        }
    }
}

impl GroupMember<'_> {
    /// How many members.
    pub fn members(&self) -> usize {
        match self.group {
            LinkGroup::Memory(exchange) => exchange.members(),
            LinkGroup::Wires(wires) => wires.size(),
        }
    }

    /// A collective of a whole buffer in place.
    ///
    /// # Errors
    /// When another device failed.
    pub fn in_place(
        &self,
        operand: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, Stop> {
        match self.group {
            LinkGroup::Memory(exchange) => {
                Ok(exchange.in_place(self.me, operand, (kind, reduction), &self.links.abort)?)
            }
            LinkGroup::Wires(wires) => wires.in_place(operand, kind, reduction).map_err(stopped),
        }
    }

    /// A collective from one buffer to another.
    ///
    /// # Errors
    /// When another device failed.
    pub fn between(
        &self,
        source: &[f32],
        target: &mut [f32],
        kind: CollectiveKind,
        reduction: Reduction,
    ) -> Result<CollectiveVolume, Stop> {
        match self.group {
            LinkGroup::Memory(exchange) => Ok(exchange.between(
                self.me,
                source,
                target,
                (kind, reduction),
                &self.links.abort,
            )?),
            LinkGroup::Wires(wires) => {
                wires.out_of_place(source, target, kind, reduction).map_err(stopped)
            }
        }
    }
}

/// A failure of another process, as what stops this device.
fn stopped(error: ClusterError) -> Stop {
    Stop::Failed(Box::new(RunError::Cluster(error)))
}
