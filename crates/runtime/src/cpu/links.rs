//! What ties devices together: the groups of their collectives, and the pipes between neighbouring
//! stages.

use std::collections::HashMap;

use narrows_plan::mesh::{Axis, Group, Mesh};
use narrows_plan::program::{Action, Phase, Program, StageProgram};

use super::barrier::Abort;
use super::device::Coordinates;
use super::exchange::Exchange;
use super::pipe::Pipe;

/// The groups of all devices, and the pipes between neighbouring stages.
pub struct Links {
    groups: HashMap<(Axis, u64, u64), Exchange>,
    /// By tensor and data coordinate, sending and receiving stage.
    pipes: HashMap<(u64, u64, u64, u64), Pipe>,
    pub abort: Abort,
}

/// What may be under way from a stage to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
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

impl Way {
    /// Bytes of the copies that are kept for it.
    pub fn bytes(&self) -> u64 {
        self.transfers * 4 * self.numbers as u64
    }
}

/// The ways between the stages of a program; every device has those of its stage.
pub fn ways(program: &Program) -> impl Iterator<Item = Way> {
    let later = 1..program.stages.len() as u64;
    let pairs = later.flat_map(|stage| [(stage - 1, stage), (stage, stage - 1)]);
    pairs.map(|(from, to)| Way {
        from,
        to,
        transfers: program.stages[from.min(to) as usize].slots,
        numbers: largest_transfer(&program.stages[from as usize], to),
    })
}

/// The most numbers that a stage sends to another at once.
fn largest_transfer(stage: &StageProgram, to: u64) -> usize {
    let phases = [Phase::Forward, Phase::Backward, Phase::Step];
    let sends = phases
        .into_iter()
        .flat_map(|phase| stage.phase(phase))
        .filter(|instr| matches!(&instr.action, Action::Send(hop) if u64::from(hop.stage) == to));
    let bytes = sends.map(|instr| instr.reads.iter().map(|a| a.extent.bytes().0).sum::<u64>());
    (bytes.max().unwrap_or(0) / 4) as usize
}

impl Links {
    /// For the devices of a program.
    pub fn new(program: &Program) -> Links {
        let mesh = &program.context.mesh;
        let mut links =
            Links { groups: HashMap::new(), pipes: HashMap::new(), abort: Abort::default() };
        for device in 0..mesh.devices() {
            let at = Coordinates::of(device, mesh);
            for axis in [Axis::Tensor, Axis::Data, Axis::Pipeline] {
                let size = mesh.size(axis);
                let mut add = |size: u64| {
                    let key = (axis, at.group(axis, mesh), size);
                    links.groups.entry(key).or_insert_with(|| Exchange::new(size as usize));
                };
                add(size);
                if axis == Axis::Pipeline && size > 2 {
                    // The first and the last stage, which share a tied weight.
                    add(2);
                }
            }
            for way in ways(program).filter(|way| way.from == at.stage) {
                let pipe = Pipe::new(way.transfers as usize, way.numbers);
                links.pipes.insert((at.tensor, at.data, way.from, way.to), pipe);
            }
        }
        links
    }

    /// One's group, and one's number in it.
    pub fn group(
        &self,
        at: &Coordinates,
        group: &Group,
        mesh: &Mesh,
    ) -> Option<(&Exchange, usize)> {
        let exchange = self.groups.get(&(group.axis, at.group(group.axis, mesh), group.size))?;
        let mut me = at.along(group.axis);
        if group.size != mesh.size(group.axis) {
            me = u64::from(me > 0);
        }
        Some((exchange, me as usize))
    }

    /// The pipe of one's column of stages from one of them to another.
    pub fn pipe(&self, at: &Coordinates, from: u64, to: u64) -> Option<&Pipe> {
        self.pipes.get(&(at.tensor, at.data, from, to))
    }

    /// Bytes of the copies that a device keeps to send with.
    pub fn bytes(&self, at: &Coordinates) -> u64 {
        let neighbours = [at.stage.wrapping_sub(1), at.stage.wrapping_add(1)];
        neighbours.iter().filter_map(|to| self.pipe(at, at.stage, *to)).map(Pipe::bytes).sum()
    }
}
