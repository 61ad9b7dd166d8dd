//! Checks the passes that a stage runs: each microbatch runs every pass once and in order, with at most as many in flight
//! as slots, and no more than a buffer has copies between the first and the last pass that access it.

use std::collections::{HashMap, HashSet};

use crate::program::{Action, MicrobatchPass, Phase, StageProgram};

use super::error::{CheckErrors, CheckFault, CheckResult, ensure, fault};

/// Checks that each microbatch runs every pass once and in order, with at most `slots` in flight, and that no buffer has
/// fewer copies than microbatches need at once.
pub(super) fn check_passes(stage: &StageProgram, microbatches: u64) -> CheckResult {
    ensure(stage.slots > 0, || "has no slot for a microbatch in flight".into())?;
    check_order(stage, microbatches)?;
    let last = stage.last_phase();
    check_copies(stage, (Phase::Forward, last), stage.slots, None)?;
    let mut checked = HashSet::new();
    for (buffer, (first, last)) in
        stage.buffers.iter().zip(lifetimes(stage)).filter_map(|(b, l)| Some((b, l?)))
    {
        let is_copied = buffer.copies > 1 && buffer.copies < stage.slots;
        if is_copied && checked.insert((first, last, buffer.copies)) {
            check_copies(stage, (first, last), buffer.copies, Some(&buffer.name))?;
        }
    }
    Ok(())
}

/// Checks that each microbatch runs every pass once, and after its previous pass.
fn check_order(stage: &StageProgram, microbatches: u64) -> CheckResult {
    let passes = passes_of_microbatch(stage);
    // Number of passes that each microbatch has run.
    let mut run = vec![0; usize::try_from(microbatches).unwrap_or(0)];
    for pass in &stage.schedule {
        let MicrobatchPass { phase, microbatch } = pass;
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
        Some(microbatch) => {
            let phase = passes[run[microbatch]];
            fault(format!(
                "never runs the {}",
                MicrobatchPass { phase, microbatch: microbatch as u64 }
            ))
        }
        None => Ok(()),
    }
}

/// The passes that every microbatch runs on a stage, in order.
fn passes_of_microbatch(stage: &StageProgram) -> &'static [Phase] {
    if stage.weight_gradient.is_empty() { &Phase::PASSES[..2] } else { &Phase::PASSES }
}

/// Checks that no microbatch begins phase `first` while another one that has not ended phase `last` uses its copy. The
/// passes of each microbatch are in order.
fn check_copies(
    stage: &StageProgram,
    (first, last): (Phase, Phase),
    copies: u64,
    buffer: Option<&str>,
) -> CheckResult {
    let mut users: HashMap<u64, u64> = HashMap::new();
    for MicrobatchPass { phase, microbatch } in &stage.schedule {
        let copy = microbatch % copies;
        if *phase == first
            && let Some(other) = users.insert(copy, *microbatch)
        {
            let what = buffer.map_or("slot".into(), |name| format!("copy of `{name}`:"));
            return fault(format!(
                "starts microbatch {microbatch} while {other} still needs {what} {copy} of {copies}"
            ));
        }
        if *phase == last {
            users.remove(&copy);
        }
    }
    Ok(())
}

/// The first and the last pass that access each activation.
fn lifetimes(stage: &StageProgram) -> Vec<Option<(Phase, Phase)>> {
    let mut lifetimes = vec![None; stage.buffers.len()];
    for phase in passes_of_microbatch(stage) {
        for instr in stage.instructions(*phase) {
            for access in instr.reads.iter().chain(&instr.writes) {
                if let Some(lifetime) = lifetimes.get_mut(access.buffer.0 as usize) {
                    lifetime.get_or_insert((*phase, *phase)).1 = *phase;
                }
            }
        }
    }
    lifetimes
}

/// Checks that weight-gradient passes communicate with no other stage.
pub(super) fn check_weight_gradient_pass(
    index: usize,
    stage: &StageProgram,
    errors: &mut CheckErrors,
) {
    for (at, instr) in stage.weight_gradient.iter().enumerate() {
        if matches!(instr.action, Action::Send(_) | Action::Receive(_)) {
            let problem = format!("{} in a weight-gradient pass", instr.action.name());
            let fault =
                CheckFault { problem, hint: Some("a transfer in the backward pass".into()) };
            errors.push_instruction((index, Phase::WeightGradient, at), instr, fault);
        }
    }
}
