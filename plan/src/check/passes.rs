//! Checks the passes that a stage runs: each microbatch runs every pass through every chunk once and in order, with at most
//! as many in flight as slots, and no more than a buffer has copies between the first and the last pass that access it.

use std::collections::{HashMap, HashSet};

use crate::context::Context;
use crate::program::{Action, ChunkPhase, MicrobatchPass, ModelChunk, Phase, StageProgram};

use super::error::{CheckErrors, CheckFault, CheckResult, ensure, fault};

/// Checks that each microbatch, or pair of them, runs every pass through each chunk once and in order, with at most `slots` in
/// flight, and that no buffer has fewer copies than microbatches need at once.
pub(super) fn check_passes(stage: &StageProgram, context: &Context) -> CheckResult {
    let (chunks, microbatches) = (context.chunks, context.passes());
    ensure(stage.chunks.len() as u64 == chunks, || {
        format!("has {} chunks instead of {chunks}", stage.chunks.len())
    })?;
    for (index, chunk) in stage.chunks.iter().enumerate() {
        ensure(chunk.slots > 0, || "has no slot for a microbatch in flight".into())?;
        check_order(stage, (index, chunk), microbatches)?;
        let all = PassRange { chunk: index, first: Phase::Forward, last: chunk.last_phase() };
        check_copies(stage, all, chunk.slots, None)?;
    }
    let is_scheduled = |pass: &&MicrobatchPass| pass.chunk < stage.chunks.len();
    if let Some(pass) = stage.schedule.iter().find(|pass| !is_scheduled(pass)) {
        return fault(format!("schedules the {pass}, a chunk that it does not have"));
    }
    let mut checked = HashSet::new();
    for (index, lifetime) in lifetimes(stage)?.into_iter().enumerate() {
        let Some(lifetime) = lifetime else { continue };
        let (buffer, slots) = (&stage.buffers[index], stage.chunks[lifetime.chunk].slots);
        let (name, copies) = (&buffer.name, buffer.copies);
        ensure(copies > 0 && slots.is_multiple_of(copies), || {
            format!("`{name}` has {copies} copies, which do not divide the {slots} slots")
        })?;
        let is_copied = copies > 1 && copies < slots;
        if is_copied && checked.insert((lifetime, copies)) {
            check_copies(stage, lifetime, copies, Some(name))?;
        }
    }
    Ok(())
}

/// Checks that each microbatch runs every pass through a chunk once, and after its previous pass.
fn check_order(
    stage: &StageProgram,
    (index, chunk): (usize, &ModelChunk),
    microbatches: u64,
) -> CheckResult {
    let passes = passes_of_microbatch(chunk);
    // Number of passes that each microbatch has run.
    let mut run = vec![0; usize::try_from(microbatches).unwrap_or(0)];
    for pass in stage.schedule.iter().filter(|pass| pass.chunk == index) {
        let MicrobatchPass { phase, microbatch, .. } = pass;
        let Some(run) = usize::try_from(*microbatch).ok().and_then(|m| run.get_mut(m)) else {
            return fault(format!(
                "runs microbatch {microbatch}, but there are only {microbatches}"
            ));
        };
        ensure(*phase != Phase::Step, || {
            "schedules the step phase as a pass: it runs once, after all passes".into()
        })?;
        let Some(at) = passes.iter().position(|other| other == phase) else {
            return fault(format!("schedules the {pass}, which has no instructions"));
        };
        ensure(at >= *run, || format!("runs the {pass} twice"))?;
        ensure(at == *run, || {
            let missing = MicrobatchPass { phase: passes[*run], ..*pass };
            format!("runs the {pass} before the {missing}")
        })?;
        *run += 1;
    }
    match run.iter().position(|run| *run < passes.len()) {
        Some(at) => {
            let (phase, microbatch) = (passes[run[at]], at as u64);
            let missing = MicrobatchPass { phase, chunk: index, microbatch };
            fault(format!("never runs the {missing}"))
        }
        None => Ok(()),
    }
}

/// The passes that every microbatch runs through a chunk, in order.
fn passes_of_microbatch(chunk: &ModelChunk) -> &'static [Phase] {
    if chunk.weight_gradient.is_empty() { &Phase::PASSES[..2] } else { &Phase::PASSES }
}

/// Checks that no microbatch begins the first phase of a lifetime while another one that has not ended the last uses its
/// copy. The passes of each microbatch are in order.
fn check_copies(
    stage: &StageProgram,
    lifetime: PassRange,
    copies: u64,
    buffer: Option<&str>,
) -> CheckResult {
    let mut users: HashMap<u64, u64> = HashMap::new();
    let passes = stage.schedule.iter().filter(|pass| pass.chunk == lifetime.chunk);
    for MicrobatchPass { phase, microbatch, .. } in passes {
        let copy = microbatch % copies;
        if *phase == lifetime.first
            && let Some(other) = users.insert(copy, *microbatch)
        {
            let what = buffer.map_or("slot".into(), |name| format!("copy of `{name}`:"));
            return fault(format!(
                "starts microbatch {microbatch} while {other} still needs {what} {copy} of {copies}"
            ));
        }
        if *phase == lifetime.last {
            users.remove(&copy);
        }
    }
    Ok(())
}

/// The passes that access an activation, all of one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct PassRange {
    chunk: usize,
    first: Phase,
    last: Phase,
}

/// The lifetimes of activations, by buffer.
fn lifetimes(stage: &StageProgram) -> CheckResult<Vec<Option<PassRange>>> {
    let mut lifetimes: Vec<Option<PassRange>> = vec![None; stage.buffers.len()];
    for at in stage.pass_phases() {
        let ChunkPhase { chunk, phase } = at;
        for access in stage.instructions(at).iter().flat_map(|i| i.reads.iter().chain(&i.writes)) {
            let index = access.buffer.0 as usize;
            let Some(lifetime) = lifetimes.get_mut(index) else { continue };
            if stage.buffers[index].role.is_resident() {
                continue;
            }
            let new = PassRange { chunk, first: phase, last: phase };
            let lifetime = lifetime.get_or_insert(new);
            ensure(lifetime.chunk == chunk, || {
                let name = &stage.buffers[index].name;
                format!("accesses `{name}` in chunks {} and {chunk}", lifetime.chunk)
            })?;
            lifetime.last = phase;
        }
    }
    Ok(lifetimes)
}

/// Checks that weight-gradient passes communicate with no other stage.
pub(super) fn check_weight_gradient_pass(
    index: usize,
    stage: &StageProgram,
    errors: &mut CheckErrors,
) {
    let is_weight_gradient = |at: &ChunkPhase| at.phase == Phase::WeightGradient;
    for phase in stage.pass_phases().filter(is_weight_gradient) {
        for (at, instr) in stage.instructions(phase).iter().enumerate() {
            if matches!(instr.action, Action::Send(_) | Action::Receive(_)) {
                let problem = format!("{} in a weight-gradient pass", instr.action.name());
                let fault =
                    CheckFault { problem, hint: Some("a transfer in the backward pass".into()) };
                errors.push_instruction((index, phase, at), instr, fault);
            }
        }
    }
}
