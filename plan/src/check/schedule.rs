//! What the stages do together: the order of passes, transfers, and collectives between stages.
//!
//! Every device of a stage runs one list, so the devices of a tensor or data group meet in one
//! order by construction. Between stages three things are proved. Each microbatch runs forward and
//! then backward once, with no more in flight than there are slots. The transfers of each pair of
//! neighbours match one by one, in microbatch, number and extent; and running all schedules with
//! rendezvous ends: a receive waits for its send, and a send need only be over when its stage
//! comes to its second next transfer, so that a send and the receive after it may wait for one
//! another's neighbour together. And the collectives over the pipeline axis meet in one order.

use std::collections::{HashMap, VecDeque};

use crate::graph::BoundaryTensorId;
use crate::mesh::{Axis, Mesh};
use crate::program::{
    Action, CollectiveOp, Extent, Instr, MicrobatchPass, Phase, Program, StageProgram,
};

use super::error::{CheckError, CheckErrors, CheckResult, ensure, fault};
use super::step::both_ends;

/// Whether each backward pass follows its forward pass at once.
pub(super) fn back_to_back(stage: &StageProgram) -> bool {
    stage.schedule.chunks(2).all(|pair| match pair {
        [first, second] => {
            (first.phase, second.phase) == (Phase::Forward, Phase::Backward)
                && first.microbatch == second.microbatch
        }
        _ => false,
    })
}

/// Each microbatch forward, then backward, once; never more in flight than slots.
pub(super) fn check_turns(stage: &StageProgram, microbatches: u64) -> CheckResult {
    ensure(stage.slots > 0, || "has no slot for a microbatch in flight".into())?;
    let mut in_flight: HashMap<u64, u64> = HashMap::new();
    let mut begun = vec![false; usize::try_from(microbatches).unwrap_or(0)];
    for MicrobatchPass { phase, microbatch } in &stage.schedule {
        let slot = microbatch % stage.slots;
        let Some(begun) = usize::try_from(*microbatch).ok().and_then(|m| begun.get_mut(m)) else {
            return fault(format!("runs microbatch {microbatch} of {microbatches}"));
        };
        match phase {
            Phase::Forward => {
                ensure(!*begun, || format!("runs microbatch {microbatch} forward twice"))?;
                *begun = true;
                if let Some(other) = in_flight.insert(slot, *microbatch) {
                    return fault(format!(
                        "begins microbatch {microbatch} while {other} still needs slot {slot} of {}",
                        stage.slots
                    ));
                }
            }
            Phase::Backward => {
                let found = in_flight.remove(&slot);
                ensure(found == Some(*microbatch), || {
                    format!("runs microbatch {microbatch} backward, which is not in flight")
                })?;
            }
            Phase::Step => return fault("has the step phase among its turns; it comes last, once"),
        }
    }
    if let Some(missing) = begun.iter().position(|begun| !begun) {
        return fault(format!("never runs microbatch {missing} of {microbatches}"));
    }
    match in_flight.values().min() {
        Some(left) => fault(format!("never runs microbatch {left} backward")),
        None => Ok(()),
    }
}

/// One transfer of a schedule.
#[derive(Clone, Copy)]
struct ScheduledTransfer<'a> {
    send: bool,
    other: usize,
    microbatch: u64,
    phase: Phase,
    at: usize,
    instr: &'a Instr,
}

impl ScheduledTransfer<'_> {
    /// The tensors that the transfer carries, with their extents.
    fn payload(&self) -> Vec<(BoundaryTensorId, Extent)> {
        let (side, transfer) = match &self.instr.action {
            Action::Send(transfer) => (&self.instr.reads, transfer),
            Action::Receive(transfer) => (&self.instr.writes, transfer),
            _ => return vec![],
        };
        let extents = side.iter().map(|access| access.extent);
        transfer.carries.iter().copied().zip(extents).collect()
    }

    fn error(&self, stage: usize, problem: String, hint: Option<&str>) -> CheckError {
        CheckError {
            stage: Some(stage),
            instruction: Some((self.phase, self.at, self.instr.origin.clone())),
            problem,
            hint: hint.map(String::from),
        }
    }

    fn name(&self) -> &'static str {
        if self.send { "send" } else { "receive" }
    }
}

/// For messages: `hidden 4×8 f32, q 4×2 f32`.
fn payload_text(payload: &[(BoundaryTensorId, Extent)]) -> String {
    let tensors = payload.iter().map(|(tensor, extent)| format!("{} {extent}", tensor.name()));
    tensors.collect::<Vec<_>>().join(", ")
}

fn transfers(stage: &StageProgram, phase: Phase, microbatch: u64) -> Vec<ScheduledTransfer<'_>> {
    let list = stage.instructions(phase).iter().enumerate();
    list.filter_map(|(at, instr)| {
        let (send, hop) = match &instr.action {
            Action::Send(hop) => (true, hop),
            Action::Receive(hop) => (false, hop),
            _ => return None,
        };
        Some(ScheduledTransfer {
            send,
            other: hop.peer_stage as usize,
            microbatch,
            phase,
            at,
            instr,
        })
    })
    .collect()
}

/// Sends and receives of one microbatch between neighbours, one by one.
pub(super) fn check_matched(program: &Program, errors: &mut CheckErrors) {
    for phase in [Phase::Forward, Phase::Backward] {
        let lists: Vec<Vec<ScheduledTransfer>> =
            program.stages.iter().map(|stage| transfers(stage, phase, 0)).collect();
        for stage in 1..lists.len() {
            let (from, to) = match phase {
                Phase::Forward => (stage - 1, stage),
                _ => (stage, stage - 1),
            };
            let sends: Vec<&ScheduledTransfer> =
                lists[from].iter().filter(|t| t.send && t.other == to).collect();
            let receives: Vec<&ScheduledTransfer> =
                lists[to].iter().filter(|t| !t.send && t.other == from).collect();
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
        let problem = format!("sends what stage {to} never receives, so it would wait for ever");
        errors.push(send.error(from, problem, Some("a receive on the neighbour, or no send here")));
    }
    if let Some(receive) = receives.get(matched) {
        let problem = format!("receives what stage {from} never sends, so it would wait for ever");
        errors.push(receive.error(
            to,
            problem,
            Some("a send on the neighbour, or no receive here"),
        ));
    }
}

/// Runs all schedules with rendezvous until every transfer is over or none can go on.
pub(super) fn check_progress(program: &Program, errors: &mut CheckErrors) {
    let mut queues: Vec<VecDeque<ScheduledTransfer>> = program
        .stages
        .iter()
        .map(|stage| {
            let turns = stage.schedule.iter();
            turns.flat_map(|turn| transfers(stage, turn.phase, turn.microbatch)).collect()
        })
        .collect();
    loop {
        let mut moved = false;
        for stage in 0..queues.len() {
            while let Some((at, other, theirs)) = meeting(&queues, stage) {
                let (one, two) = (queues[stage][at], queues[other][theirs]);
                if (one.microbatch, one.phase) != (two.microbatch, two.phase) {
                    let problem = format!(
                        "sends microbatch {} when stage {other} waits for microbatch {}",
                        one.microbatch, two.microbatch
                    );
                    errors.push(one.error(stage, problem, None));
                    return;
                }
                queues[stage].remove(at);
                queues[other].remove(theirs);
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let waits: Vec<String> = queues
        .iter()
        .enumerate()
        .filter_map(|(stage, queue)| {
            let next = queue.front()?;
            let (name, other) = (next.name(), next.other);
            Some(format!("stage {stage} to {name} microbatch {} (stage {other})", next.microbatch))
        })
        .collect();
    if let Some(stage) = queues.iter().position(|queue| !queue.is_empty()) {
        let problem = format!("the schedules wait for one another: {}", waits.join(", "));
        errors.push(queues[stage][0].error(stage, problem, None));
    }
}

/// A send of `stage` and the receive it meets: both must be within reach of their stages.
fn meeting(queues: &[VecDeque<ScheduledTransfer>], stage: usize) -> Option<(usize, usize, usize)> {
    let reach = |stage: usize| -> usize {
        // A send lets the receive after it begin.
        let queue = queues.get(stage);
        let pending = queue.and_then(|q| q.front()).is_some_and(|first| first.send);
        let receive = queue.and_then(|q| q.get(1)).is_some_and(|second| !second.send);
        if pending && receive { 2 } else { 1 }
    };
    for at in 0..reach(stage).min(queues[stage].len()) {
        let send = queues[stage][at];
        if !send.send {
            continue;
        }
        let theirs = queues.get(send.other)?;
        let reached = reach(send.other).min(theirs.len());
        let met = (0..reached).find(|i| !theirs[*i].send && theirs[*i].other == stage);
        if let Some(met) = met {
            return Some((at, send.other, met));
        }
    }
    None
}

/// The collectives over the pipeline axis meet in one order on all stages that take part.
pub(super) fn check_pipeline_order(program: &Program, errors: &mut CheckErrors) {
    let mesh = &program.context.mesh;
    let mut queues: Vec<VecDeque<(usize, &Instr, &CollectiveOp)>> =
        program.stages.iter().map(between_stages).collect();
    while let Some(stage) = queues.iter().position(|queue| !queue.is_empty()) {
        // The first stage with something left is a member of its next collective, or of none.
        let Some((at, instr, exchange)) = queues[stage].front().copied() else { return };
        let members = members(exchange, mesh);
        let odd = members.iter().find(|member| {
            let theirs = queues.get(**member).and_then(|queue| queue.front());
            !theirs.is_some_and(|(_, other, theirs)| {
                *theirs == exchange
                    && other.reads.first().map(|a| a.extent)
                        == instr.reads.first().map(|a| a.extent)
            })
        });
        if odd.is_some() || !members.contains(&stage) {
            let other = odd.copied().unwrap_or(stage);
            errors.push(CheckError {
                stage: Some(stage),
                instruction: Some((Phase::Step, at, instr.origin.clone())),
                problem: format!(
                    "waits for stage {other} in a collective over the pipeline axis that stage \
                     {other} does not come to next"
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

fn between_stages(stage: &StageProgram) -> VecDeque<(usize, &Instr, &CollectiveOp)> {
    let list = stage.step.iter().enumerate();
    list.filter_map(|(at, instr)| match &instr.action {
        Action::Collective(exchange) if exchange.axis == Axis::Pipeline => {
            Some((at, instr, exchange))
        }
        _ => None,
    })
    .collect()
}

fn members(exchange: &CollectiveOp, mesh: &Mesh) -> Vec<usize> {
    let all = mesh.group(Axis::Pipeline);
    let stages = mesh.pipeline as usize;
    if exchange.group == all {
        (0..stages).collect()
    } else if stages > 1 && exchange.group == both_ends(all) {
        vec![0, stages - 1]
    } else {
        vec![]
    }
}
