//! Checks of exact steps: every factor pair of a stage is read, summed over all devices, decomposed once, summed again and
//! written to all of its buffers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::context::Context;
use crate::mesh::{Axis, DeviceGroup};
use crate::model::{LinearKind, WeightId, WeightShape};
use crate::program::{
    Buffer, BufferId, BufferRole, ExactStep, HostAction, OwnedPair, StageProgram,
};

use super::error::{CheckResult, ensure, fault};

/// Block and linear of a pair.
type PairKey = (u64, LinearKind);

/// Contents of host memory for a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PairState {
    /// Nothing.
    Unread,
    /// Factors and directions in a transfer, still to be summed over these groups.
    Factors(Vec<DeviceGroup>),
    /// The owner has the factors.
    Kept,
    /// The owner has the new factors.
    Decomposed,
    /// New factors in a transfer, still to be summed over these groups.
    Updates(Vec<DeviceGroup>),
    /// The devices have the new factors.
    Written,
}

pub(super) fn check_exact_step(stage: &StageProgram, context: &Context) -> CheckResult {
    let ExactStep { pairs, instrs } = &stage.exact_step;
    if context.loro_every.is_none() {
        return ensure(pairs.is_empty() && instrs.is_empty(), || {
            "there is an exact step, but the optimizer has none".into()
        });
    }
    check_pairs(stage, context)?;
    let [tensor, data] = [Axis::Tensor, Axis::Data].map(|axis| context.mesh.group(axis));
    let dividing = |groups: [DeviceGroup; 2]| -> Vec<DeviceGroup> {
        groups.into_iter().filter(|group| group.size > 1).collect()
    };
    // The optimizer states of a pair are divided over the devices that share a copy, its owners over all of the stage.
    let divided = [dividing([tensor, context.shard_group()]), dividing([tensor, data])];
    let buffers = PairBuffers::of_stage(stage);
    let mut states = vec![PairState::Unread; pairs.len()];
    let mut transfer: Option<Range<usize>> = None;
    for (index, instr) in instrs.iter().enumerate() {
        let in_instr = |problem: String| {
            fault(format!("exact step, {} {index}: {problem}", instr.action.name()))
        };
        let Range { start, end } = instr.pairs;
        if start >= end || end > pairs.len() {
            return in_instr(format!("there are no pairs {start} to {end}"));
        }
        let of_instr = &pairs[start..end];
        let accessed = |of_pair: fn(&PairBuffers) -> &Vec<BufferId>| {
            let keys = of_instr.iter().map(|pair| (pair.block, pair.linear));
            let buffers = keys.filter_map(|key| buffers.get(&key)).flat_map(of_pair);
            buffers.copied().collect::<BTreeSet<BufferId>>()
        };
        match &instr.action {
            HostAction::Read(listed) => {
                require_buffers(stage, accessed(|buffers| &buffers.read), listed)?;
            }
            HostAction::Write(listed) => {
                require_buffers(stage, accessed(|buffers| &buffers.written), listed)?;
            }
            _ => {}
        }
        let expected = match &instr.action {
            HostAction::Read(_) | HostAction::Place | HostAction::Decompose => None,
            _ => Some(instr.pairs.clone()),
        };
        if transfer != expected {
            return in_instr(
                "a host holds one transfer at a time, whose pairs these are not".into(),
            );
        }
        transfer = match &instr.action {
            HostAction::Read(_) | HostAction::Place => Some(instr.pairs.clone()),
            HostAction::Keep | HostAction::Write(_) => None,
            _ => transfer,
        };
        for (OwnedPair { block, linear, .. }, state) in of_instr.iter().zip(&mut states[start..end])
        {
            match next_state(&instr.action, state, &divided) {
                Some(next) => *state = next,
                None => return in_instr(format!("layer {block} {linear} is not ready: {state:?}")),
            }
        }
    }
    let is_unwritten = |(_, state): &(&OwnedPair, &PairState)| **state != PairState::Written;
    match pairs.iter().zip(&states).find(is_unwritten) {
        Some((OwnedPair { block, linear, .. }, _)) => {
            fault(format!("the exact step does not write the factors of layer {block} {linear}"))
        }
        None => Ok(()),
    }
}

/// The state of a pair after an action; `None` where the action may not follow. `divided` are the groups that divide factors, and
/// those that divide new factors.
fn next_state(
    action: &HostAction,
    state: &PairState,
    divided: &[Vec<DeviceGroup>; 2],
) -> Option<PairState> {
    let without = |groups: &[DeviceGroup], summed: &DeviceGroup| -> Option<Vec<DeviceGroup>> {
        let others = groups.iter().copied().filter(|group| group != summed);
        groups.contains(summed).then(|| others.collect())
    };
    let [factors, updates] = divided;
    Some(match (action, state) {
        (HostAction::Read(_), PairState::Unread) => PairState::Factors(factors.clone()),
        (HostAction::SumFactors(group), PairState::Factors(groups)) => {
            PairState::Factors(without(groups, group)?)
        }
        (HostAction::Keep, PairState::Factors(groups)) if groups.is_empty() => PairState::Kept,
        (HostAction::Decompose, PairState::Kept) => PairState::Decomposed,
        (HostAction::Place, PairState::Decomposed) => PairState::Updates(updates.clone()),
        (HostAction::SumUpdates(group), PairState::Updates(groups)) => {
            PairState::Updates(without(groups, group)?)
        }
        (HostAction::Write(_), PairState::Updates(groups)) if groups.is_empty() => {
            PairState::Written
        }
        _ => return None,
    })
}

/// The pairs of the exact step are those of the stage's weights, each once, and each has an owner.
fn check_pairs(stage: &StageProgram, context: &Context) -> CheckResult {
    let mut expected: BTreeMap<PairKey, [Option<WeightShape>; 2]> = BTreeMap::new();
    for buffer in stage.buffers.iter().filter(|buffer| buffer.role == BufferRole::Weight) {
        for (key, factor, shape) in factors(buffer) {
            expected.entry(key).or_default()[factor] = Some(shape);
        }
    }
    let owners = context.mesh.devices_per_stage();
    let pairs = &stage.exact_step.pairs;
    for OwnedPair { block, linear, d_in, rank, d_out, owner } in pairs {
        let name = format!("the pair of layer {block} {linear}");
        let shapes = expected.remove(&(*block, *linear));
        let Some([Some(a), Some(b)]) = shapes else {
            return fault(format!("{name} is not one of the stage, or is listed twice"));
        };
        ensure(
            [a.rows, a.columns] == [*d_in, *rank] && [b.rows, b.columns] == [*rank, *d_out],
            || {
                format!(
                    "{name} is listed with the sizes {d_in}, {rank}, {d_out}, which it does not have"
                )
            },
        )?;
        ensure(*rank <= *d_in.min(d_out), || format!("{name} has a rank above its width"))?;
        ensure(*owner < owners, || {
            format!("{name} belongs to device {owner} of a stage of {owners} devices")
        })?;
    }
    match expected.first_key_value() {
        Some(((block, linear), _)) => {
            fault(format!("the exact step leaves out the pair of layer {block} {linear}"))
        }
        None => Ok(()),
    }
}

/// The factors in a buffer: pair, 0 for A and 1 for B, and shape.
fn factors(buffer: &Buffer) -> impl Iterator<Item = (PairKey, usize, WeightShape)> {
    let shard = buffer.shard.as_ref();
    let block = shard.and_then(|shard| shard.block);
    let members = shard.map_or(&[][..], |shard| &shard.members);
    members.iter().filter_map(move |shape| match shape.weight {
        WeightId::FactorA(linear) => Some(((block?, linear), 0, *shape)),
        WeightId::FactorB(linear) => Some(((block?, linear), 1, *shape)),
        _ => None,
    })
}

/// The buffers that an exact step accesses for a pair.
#[derive(Default)]
struct PairBuffers {
    /// Moments, and the weights in fp32.
    read: Vec<BufferId>,
    /// Weights in each format.
    written: Vec<BufferId>,
}

impl PairBuffers {
    /// The buffers of each pair of a stage.
    fn of_stage(stage: &StageProgram) -> BTreeMap<PairKey, PairBuffers> {
        let is_master = |buffer: &Buffer| buffer.role == BufferRole::MasterWeight;
        let has_masters = stage.buffers.iter().any(is_master);
        let mut pairs: BTreeMap<PairKey, PairBuffers> = BTreeMap::new();
        for (id, buffer) in (0..).map(BufferId).zip(&stage.buffers) {
            for (key, ..) in factors(buffer) {
                let PairBuffers { read, written } = pairs.entry(key).or_default();
                let is_weight = buffer.role == BufferRole::Weight;
                if buffer.role.is_optimizer_state() || is_weight && !has_masters {
                    read.push(id);
                }
                if is_weight || is_master(buffer) {
                    written.push(id);
                }
            }
        }
        pairs
    }
}

/// Checks that the buffers of an instruction are those that it accesses, each once.
fn require_buffers(
    stage: &StageProgram,
    expected: BTreeSet<BufferId>,
    listed: &[BufferId],
) -> CheckResult {
    let distinct: BTreeSet<BufferId> = listed.iter().copied().collect();
    let name = |id: &BufferId| stage.buffers.get(id.0 as usize).map_or("?", |buffer| &buffer.name);
    if let Some(missing) = expected.difference(&distinct).next() {
        return fault(format!("an exact step needs `{}`", name(missing)));
    }
    if let Some(other) = distinct.difference(&expected).next() {
        return fault(format!("an exact step may not access `{}`", name(other)));
    }
    ensure(distinct.len() == listed.len(), || "an exact step lists a buffer twice".into())
}
