//! Checks the order of transfers and collectives between stages.
//!
//! All devices of a stage run one instruction list, so the devices of a tensor or data group run their
//! collectives in the same order. Between stages, three properties are checked:
//!
//! - sends and receives of neighbouring virtual stages match one by one, in tensors and extents;
//! - there is no deadlock: with rendezvous semantics, all schedules end. A receive waits for its send, the n-th of a phase
//!   from one stage to another. A send may be pending during the transfers after it, but ends before the next send of its
//!   stage in the same phase;
//! - all stages run the collectives over the pipeline axis in the same order.

use std::collections::{HashMap, VecDeque};

use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};

use crate::context::Context;
use crate::graph::BoundaryTensorId;
use crate::mesh::{Axis, Mesh};
use crate::program::{
    Action, ChunkPhase, CollectiveOp, Extent, Instr, MicrobatchPass, Phase, Program, StageProgram,
};

use super::error::{CheckError, CheckErrors};
use super::step::first_and_last_stage;

/// A transfer of one microbatch in the schedule of a stage.
#[derive(Clone, Copy)]
struct ScheduledTransfer<'a> {
    send: bool,
    peer: usize,
    pass: MicrobatchPass,
    index: usize,
    instr: &'a Instr,
}

impl ScheduledTransfer<'_> {
    /// The transferred tensors with their extents.
    fn payload(&self) -> Vec<(BoundaryTensorId, Extent)> {
        let (side, transfer) = match &self.instr.action {
            Action::Send(transfer) => (&self.instr.reads, transfer),
            Action::Receive(transfer) => (&self.instr.writes, transfer),
            _ => return vec![],
        };
        let extents = side.iter().map(|access| access.extent);
        transfer.tensors.iter().copied().zip(extents).collect()
    }

    fn error(&self, stage: usize, problem: String, hint: Option<&str>) -> CheckError {
        CheckError {
            stage: Some(stage),
            instruction: Some((self.pass.chunk_phase(), self.index, self.instr.origin.clone())),
            problem,
            hint: hint.map(String::from),
        }
    }

    /// For messages: `stage 0 cannot send microbatch 1 to stage 1`.
    fn wait(&self, stage: usize) -> String {
        let (verb, preposition) = if self.send { ("send", "to") } else { ("receive", "from") };
        let (pass, peer) = (self.pass, self.peer);
        let chunk = match pass.chunk {
            0 => String::new(),
            chunk => format!(" of chunk {chunk}"),
        };
        format!(
            "stage {stage} cannot {verb} microbatch {}{chunk} {preposition} stage {peer}",
            pass.microbatch
        )
    }
}

/// For messages: `hidden 4×8 f32, q 4×2 f32`.
fn payload_text(payload: &[(BoundaryTensorId, Extent)]) -> String {
    let tensors = payload.iter().map(|(tensor, extent)| format!("{} {extent}", tensor.name()));
    tensors.collect::<Vec<_>>().join(", ")
}

fn transfers(stage: &StageProgram, pass: MicrobatchPass) -> Vec<ScheduledTransfer<'_>> {
    let list = stage.instructions(pass.chunk_phase()).iter().enumerate();
    list.filter_map(|(index, instr)| {
        let (send, transfer) = match &instr.action {
            Action::Send(transfer) => (true, transfer),
            Action::Receive(transfer) => (false, transfer),
            _ => return None,
        };
        Some(ScheduledTransfer { send, peer: transfer.peer_stage as usize, pass, index, instr })
    })
    .collect()
}

/// Checks that the sends and receives of one microbatch between neighbouring virtual stages match one by one.
pub(super) fn check_transfers_match(program: &Program, errors: &mut CheckErrors) {
    let context = &program.context;
    for phase in [Phase::Forward, Phase::Backward] {
        let of_virtual_stage = |at: usize| {
            let (stage, chunk) = context.stage_and_chunk(at);
            transfers(&program.stages[stage], MicrobatchPass { phase, chunk, microbatch: 0 })
        };
        let lists: Vec<Vec<ScheduledTransfer>> =
            (0..context.virtual_stages()).map(of_virtual_stage).collect();
        for later in 1..lists.len() {
            let (from, to) = match phase {
                Phase::Forward => (later - 1, later),
                _ => (later, later - 1),
            };
            let [from_stage, to_stage] = [from, to].map(|at| context.stage_and_chunk(at).0);
            let sends: Vec<&ScheduledTransfer> =
                lists[from].iter().filter(|t| t.send && t.peer == to_stage).collect();
            let receives: Vec<&ScheduledTransfer> =
                lists[to].iter().filter(|t| !t.send && t.peer == from_stage).collect();
            check_pair((from_stage, to_stage), &sends, &receives, errors);
        }
    }
}

fn check_pair(
    (from, to): (usize, usize),
    sends: &[&ScheduledTransfer],
    receives: &[&ScheduledTransfer],
    errors: &mut CheckErrors,
) {
    for (send, receive) in sends.iter().zip(receives) {
        let (sent, expected) = (send.payload(), receive.payload());
        if sent != expected {
            let problem = format!(
                "receives {}, but stage {from} sends {}",
                payload_text(&expected),
                payload_text(&sent)
            );
            errors.push(receive.error(to, problem, None));
        }
    }
    let matched = sends.len().min(receives.len());
    if let Some(send) = sends.get(matched) {
        let problem =
            format!("sends a tensor that stage {to} never receives: it would wait forever");
        errors.push(send.error(from, problem, Some("a receive on the neighbour, or no send here")));
    }
    if let Some(receive) = receives.get(matched) {
        let problem =
            format!("receives a tensor that stage {from} never sends: it would wait forever");
        errors.push(receive.error(
            to,
            problem,
            Some("a send on the neighbour, or no receive here"),
        ));
    }
}

/// Checks that the schedules of all stages end: the dependencies between transfers have no cycle.
///
/// A node of the graph is a rendezvous of a send with its receive: the n-th send of a phase from one stage to another
/// with the n-th receive. An edge states that a stage begins a transfer only after another has ended. A
/// cycle, or a transfer without counterpart, blocks all transfers that depend on it.
pub(super) fn check_deadlock_free(program: &Program, errors: &mut CheckErrors) {
    let schedules: Vec<Vec<ScheduledTransfer>> = program
        .stages
        .iter()
        .map(|stage| {
            let passes = stage.schedule.iter();
            passes.flat_map(|pass| transfers(stage, *pass)).collect()
        })
        .collect();
    let mut graph: DiGraph<Rendezvous, ()> = DiGraph::new();
    let mut unmatched = Unmatched::new();
    let nodes: Vec<Vec<NodeIndex>> = schedules
        .iter()
        .enumerate()
        .map(|(stage, schedule)| {
            let mut node =
                |at: usize| join_rendezvous(&mut graph, &mut unmatched, (stage, at), &schedule[at]);
            (0..schedule.len()).map(&mut node).collect()
        })
        .collect();
    for (schedule, nodes) in schedules.iter().zip(&nodes) {
        add_dependencies(&mut graph, schedule, nodes);
    }
    let blocked = blocked(&graph);
    let matched = graph.node_indices().filter(|node| !blocked[node.index()]);
    for (send, receive) in matched.filter_map(|node| graph[node].send.zip(graph[node].receive)) {
        let (sent, received) = (&schedules[send.0][send.1], &schedules[receive.0][receive.1]);
        if expected_pass(sent.pass, (send.0, receive.0), &program.context) != Some(received.pass) {
            let problem = format!(
                "sends the {} where stage {} expects the {}",
                sent.pass, receive.0, received.pass
            );
            errors.push(sent.error(send.0, problem, None));
            return;
        }
    }
    let first_blocked: Vec<(usize, &ScheduledTransfer)> = schedules
        .iter()
        .enumerate()
        .filter_map(|(stage, schedule)| {
            let at = nodes[stage].iter().position(|node| blocked[node.index()])?;
            Some((stage, &schedule[at]))
        })
        .collect();
    if let Some((stage, transfer)) = first_blocked.first() {
        let waits: Vec<String> =
            first_blocked.iter().map(|(stage, next)| next.wait(*stage)).collect();
        let problem = format!("deadlock between the schedules: {}", waits.join(", "));
        errors.push(transfer.error(*stage, problem, None));
    }
}

/// The pass that receives the tensors that a pass of one stage sends to another; `None` for stages that are not neighbours.
fn expected_pass(
    sent: MicrobatchPass,
    (from, to): (usize, usize),
    context: &Context,
) -> Option<MicrobatchPass> {
    let own = context.virtual_stage(from, sent.chunk);
    let (stage, chunk) = context.stage_and_chunk(match sent.phase {
        Phase::Forward => own + 1,
        _ => own.checked_sub(1)?,
    });
    (stage == to).then_some(MicrobatchPass { chunk, ..sent })
}

/// Rendezvous that wait for their other side, by sending stage, receiving stage and phase.
type Unmatched = HashMap<(usize, usize, Phase), VecDeque<NodeIndex>>;

/// A send and its receive, each by stage and index among the transfers of the stage.
#[derive(Default)]
struct Rendezvous {
    send: Option<(usize, usize)>,
    receive: Option<(usize, usize)>,
}

/// The rendezvous of a transfer: one that waits for this side, or a new one.
fn join_rendezvous(
    graph: &mut DiGraph<Rendezvous, ()>,
    unmatched: &mut Unmatched,
    place: (usize, usize),
    transfer: &ScheduledTransfer,
) -> NodeIndex {
    let (stage, peer) = (place.0, transfer.peer);
    let (from, to) = if transfer.send { (stage, peer) } else { (peer, stage) };
    let waiting = unmatched.entry((from, to, transfer.pass.phase)).or_default();
    let is_free = |rendezvous: &Rendezvous| {
        if transfer.send { rendezvous.send.is_none() } else { rendezvous.receive.is_none() }
    };
    let node = match waiting.front() {
        Some(node) if is_free(&graph[*node]) => waiting.pop_front(),
        _ => None,
    };
    let node = node.unwrap_or_else(|| {
        let node = graph.add_node(Rendezvous::default());
        waiting.push_back(node);
        node
    });
    let rendezvous = &mut graph[node];
    *(if transfer.send { &mut rendezvous.send } else { &mut rendezvous.receive }) = Some(place);
    node
}

/// Adds the order of the transfers of one stage. A transfer begins after all receives before it have ended, and all sends
/// but the last one of each phase. A send follows that of its own phase too.
fn add_dependencies(
    graph: &mut DiGraph<Rendezvous, ()>,
    schedule: &[ScheduledTransfer],
    nodes: &[NodeIndex],
) {
    // Receives follow each other, as do the sends of a phase: the last one that has ended implies the others.
    let mut last_receive = None;
    let mut last_sends: HashMap<Phase, NodeIndex> = HashMap::new();
    let mut ended_sends: HashMap<Phase, NodeIndex> = HashMap::new();
    for (transfer, node) in schedule.iter().zip(nodes) {
        let phase = transfer.pass.phase;
        if transfer.send
            && let Some(earlier) = last_sends.insert(phase, *node)
        {
            ended_sends.insert(phase, earlier);
        }
        for earlier in ended_sends.values().copied().chain(last_receive) {
            graph.add_edge(earlier, *node, ());
        }
        if !transfer.send {
            last_receive = Some(*node);
        }
    }
}

/// Whether each rendezvous never takes place, because it is on a cycle, has one side only, or depends on such a
/// rendezvous. All others have a topological order.
fn blocked(graph: &DiGraph<Rendezvous, ()>) -> Vec<bool> {
    let is_matched = |node: NodeIndex| graph[node].send.is_some() && graph[node].receive.is_some();
    let mut dependencies: Vec<usize> = graph
        .node_indices()
        .map(|node| graph.neighbors_directed(node, Direction::Incoming).count())
        .collect();
    let is_free = |node: &NodeIndex| dependencies[node.index()] == 0 && is_matched(*node);
    let mut ready: Vec<NodeIndex> = graph.node_indices().filter(is_free).collect();
    let mut blocked = vec![true; graph.node_count()];
    while let Some(node) = ready.pop() {
        blocked[node.index()] = false;
        for next in graph.neighbors(node) {
            dependencies[next.index()] -= 1;
            if dependencies[next.index()] == 0 && is_matched(next) {
                ready.push(next);
            }
        }
    }
    blocked
}

/// Checks that all stages run the collectives over the pipeline axis in the same order.
pub(super) fn check_pipeline_order(program: &Program, errors: &mut CheckErrors) {
    let mesh = &program.context.mesh;
    let mut queues: Vec<VecDeque<(usize, &Instr, &CollectiveOp)>> =
        program.stages.iter().map(pipeline_collectives).collect();
    while let Some(stage) = queues.iter().position(|queue| !queue.is_empty()) {
        // The first stage with a remaining collective must be one of its members.
        let Some((at, instr, collective)) = queues[stage].front().copied() else { return };
        let members = members(collective, mesh);
        let mismatched = members.iter().find(|member| {
            let next = queues.get(**member).and_then(|queue| queue.front());
            !next.is_some_and(|(_, other, other_collective)| {
                *other_collective == collective
                    && other.reads.first().map(|a| a.extent)
                        == instr.reads.first().map(|a| a.extent)
            })
        });
        if mismatched.is_some() || !members.contains(&stage) {
            let other = mismatched.copied().unwrap_or(stage);
            errors.push(CheckError {
                stage: Some(stage),
                instruction: Some((ChunkPhase::STEP, at, instr.origin.clone())),
                problem: format!(
                    "runs a collective over the pipeline axis that is not the next one of stage {other}"
                ),
                hint: Some("the same collectives in the same order on every stage".into()),
            });
            return;
        }
        for member in members {
            queues[member].pop_front();
        }
    }
}

fn pipeline_collectives(stage: &StageProgram) -> VecDeque<(usize, &Instr, &CollectiveOp)> {
    let list = stage.step.iter().enumerate();
    list.filter_map(|(at, instr)| match &instr.action {
        Action::Collective(collective) if collective.axis == Axis::Pipeline => {
            Some((at, instr, collective))
        }
        _ => None,
    })
    .collect()
}

fn members(collective: &CollectiveOp, mesh: &Mesh) -> Vec<usize> {
    let all = mesh.group(Axis::Pipeline);
    let stages = mesh.pipeline as usize;
    if collective.group == all {
        (0..stages).collect()
    } else if stages > 1 && collective.group == first_and_last_stage(all) {
        vec![0, stages - 1]
    } else {
        vec![]
    }
}

#[cfg(test)]
mod tests;
