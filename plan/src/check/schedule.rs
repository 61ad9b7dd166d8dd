//! Checks the order of transfers and collectives between stages.
//!
//! All devices of a stage run one instruction list, so the devices of a tensor or data group run their
//! collectives in the same order. Between stages, three properties are checked:
//!
//! - sends and receives of neighbouring stages match one by one, in tensors and extents;
//! - there is no deadlock: with rendezvous semantics, all schedules end. A receive waits for its send. A
//!   send may be pending during the receives after it, but ends before the next send of its stage;
//! - all stages run the collectives over the pipeline axis in the same order.

use std::collections::{HashMap, HashSet, VecDeque};

use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use crate::graph::BoundaryTensorId;
use crate::mesh::{Axis, Mesh};
use crate::program::{Action, CollectiveOp, Extent, Instr, Phase, Program, StageProgram};

use super::error::{CheckError, CheckErrors};
use super::step::first_and_last_stage;

/// A transfer of one microbatch in the schedule of a stage.
#[derive(Clone, Copy)]
struct ScheduledTransfer<'a> {
    send: bool,
    peer: usize,
    microbatch: u64,
    phase: Phase,
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
            instruction: Some((self.phase, self.index, self.instr.origin.clone())),
            problem,
            hint: hint.map(String::from),
        }
    }

    /// For messages: `stage 0 cannot send microbatch 1 to stage 1`.
    fn wait(&self, stage: usize) -> String {
        let (verb, preposition) = if self.send { ("send", "to") } else { ("receive", "from") };
        let (microbatch, peer) = (self.microbatch, self.peer);
        format!("stage {stage} cannot {verb} microbatch {microbatch} {preposition} stage {peer}")
    }
}

/// For messages: `hidden 4×8 f32, q 4×2 f32`.
fn payload_text(payload: &[(BoundaryTensorId, Extent)]) -> String {
    let tensors = payload.iter().map(|(tensor, extent)| format!("{} {extent}", tensor.name()));
    tensors.collect::<Vec<_>>().join(", ")
}

fn transfers(stage: &StageProgram, phase: Phase, microbatch: u64) -> Vec<ScheduledTransfer<'_>> {
    let list = stage.instructions(phase).iter().enumerate();
    list.filter_map(|(index, instr)| {
        let (send, transfer) = match &instr.action {
            Action::Send(transfer) => (true, transfer),
            Action::Receive(transfer) => (false, transfer),
            _ => return None,
        };
        Some(ScheduledTransfer {
            send,
            peer: transfer.peer_stage as usize,
            microbatch,
            phase,
            index,
            instr,
        })
    })
    .collect()
}

/// Checks that the sends and receives of one microbatch between neighbours match one by one.
pub(super) fn check_transfers_match(program: &Program, errors: &mut CheckErrors) {
    for phase in [Phase::Forward, Phase::Backward] {
        let lists: Vec<Vec<ScheduledTransfer>> =
            program.stages.iter().map(|stage| transfers(stage, phase, 0)).collect();
        for stage in 1..lists.len() {
            let (from, to) = match phase {
                Phase::Forward => (stage - 1, stage),
                _ => (stage, stage - 1),
            };
            let sends: Vec<&ScheduledTransfer> =
                lists[from].iter().filter(|t| t.send && t.peer == to).collect();
            let receives: Vec<&ScheduledTransfer> =
                lists[to].iter().filter(|t| !t.send && t.peer == from).collect();
            check_pair((from, to), &sends, &receives, errors);
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
/// A node of the graph is a rendezvous of a send with its receive: the n-th send from one stage to another
/// with the n-th receive. An edge states that a stage begins a transfer only after another has ended. A
/// cycle, or a transfer without counterpart, blocks all transfers that depend on it.
pub(super) fn check_deadlock_free(program: &Program, errors: &mut CheckErrors) {
    let schedules: Vec<Vec<ScheduledTransfer>> = program
        .stages
        .iter()
        .map(|stage| {
            let passes = stage.schedule.iter();
            passes.flat_map(|pass| transfers(stage, pass.phase, pass.microbatch)).collect()
        })
        .collect();
    let mut graph: DiGraph<Rendezvous, ()> = DiGraph::new();
    let mut unmatched: HashMap<(usize, usize), VecDeque<NodeIndex>> = HashMap::new();
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
    let matched = graph.node_indices().filter(|node| !blocked.contains(node));
    for (send, receive) in matched.filter_map(|node| graph[node].send.zip(graph[node].receive)) {
        let (sent, received) = (&schedules[send.0][send.1], &schedules[receive.0][receive.1]);
        if (sent.microbatch, sent.phase) != (received.microbatch, received.phase) {
            let problem = format!(
                "sends microbatch {} where stage {} expects microbatch {}",
                sent.microbatch, receive.0, received.microbatch
            );
            errors.push(sent.error(send.0, problem, None));
            return;
        }
    }
    let first_blocked: Vec<(usize, &ScheduledTransfer)> = schedules
        .iter()
        .enumerate()
        .filter_map(|(stage, schedule)| {
            let at = nodes[stage].iter().position(|node| blocked.contains(node))?;
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

/// A send and its receive, each by stage and index among the transfers of the stage.
#[derive(Default)]
struct Rendezvous {
    send: Option<(usize, usize)>,
    receive: Option<(usize, usize)>,
}

/// The rendezvous of a transfer: one that waits for this side, or a new one.
fn join_rendezvous(
    graph: &mut DiGraph<Rendezvous, ()>,
    unmatched: &mut HashMap<(usize, usize), VecDeque<NodeIndex>>,
    place: (usize, usize),
    transfer: &ScheduledTransfer,
) -> NodeIndex {
    let (stage, peer) = (place.0, transfer.peer);
    let pair = if transfer.send { (stage, peer) } else { (peer, stage) };
    let waiting = unmatched.entry(pair).or_default();
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

/// Adds the order of the transfers of one stage. A transfer begins after all transfers before it have
/// ended, except that a receive need not wait for the last send before it.
fn add_dependencies(
    graph: &mut DiGraph<Rendezvous, ()>,
    schedule: &[ScheduledTransfer],
    nodes: &[NodeIndex],
) {
    // The last two sends before a transfer.
    let (mut second_last, mut last): (Option<usize>, Option<usize>) = (None, None);
    for (at, transfer) in schedule.iter().enumerate() {
        // A send depends on all transfers before it, so dependencies before the last send are implied.
        let before = if transfer.send {
            last.unwrap_or(0)..at
        } else if at > 0 && last == Some(at - 1) {
            second_last.unwrap_or(0)..at - 1
        } else {
            at.saturating_sub(1)..at
        };
        for earlier in before {
            graph.add_edge(nodes[earlier], nodes[at], ());
        }
        if transfer.send {
            (second_last, last) = (last, Some(at));
        }
    }
}

/// The rendezvous that never take place: those on a cycle, those with one side only, and all that depend
/// on them.
fn blocked(graph: &DiGraph<Rendezvous, ()>) -> HashSet<NodeIndex> {
    let unmatched =
        |node: &NodeIndex| graph[*node].send.is_none() || graph[*node].receive.is_none();
    let on_cycle = |component: &Vec<NodeIndex>| {
        component.len() > 1 || graph.contains_edge(component[0], component[0])
    };
    let cycles = tarjan_scc(graph).into_iter().filter(on_cycle).flatten();
    let mut stack: Vec<NodeIndex> = graph.node_indices().filter(unmatched).chain(cycles).collect();
    let mut blocked = HashSet::new();
    while let Some(node) = stack.pop() {
        if blocked.insert(node) {
            stack.extend(graph.neighbors(node));
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
                instruction: Some((Phase::Step, at, instr.origin.clone())),
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
