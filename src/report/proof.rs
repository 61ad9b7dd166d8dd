//! What a check proved, or what it found.

use std::collections::BTreeMap;

use narrows_plan::check::CheckError;
use narrows_plan::program::{Action, Phase, Program, StageProgram};
use narrows_plan::{Bytes, CheckErrors, CheckedProgram};
use serde::Serialize;

use super::limited;
use super::page::{Align, TextPage, plural, thousands};
use crate::args::resolve::PlanFile;
use crate::errors::Problem;

/// The outcome of a check; its JSON form is what `check --format json` prints.
#[derive(Serialize)]
pub struct CheckReport {
    proven: bool,
    /// What was lowered.
    stages: Vec<StageSummary>,
    /// What a device may hold; `null` without a limit.
    memory_limit_bytes: Option<u64>,
    /// What is wrong: nothing, when the plan is proven.
    errors: Vec<CheckProblem>,
}

/// What a stage's program holds.
#[derive(Serialize)]
struct StageSummary {
    instructions: u64,
    buffers: u64,
    collectives: BTreeMap<&'static str, u64>,
    transfers: u64,
    microbatches_in_flight: u64,
    peak_memory_bytes: u64,
}

/// One reason why a plan may not run.
#[derive(Clone, Serialize)]
struct CheckProblem {
    stage: Option<usize>,
    phase: Option<&'static str>,
    instruction: Option<usize>,
    origin: Option<String>,
    problem: String,
    hint: Option<String>,
}

impl CheckReport {
    /// Checks a lowered plan and its memory.
    pub fn of(program: Program, limit: Bytes) -> CheckReport {
        let mut errors: Vec<CheckProblem> = program
            .stages
            .iter()
            .enumerate()
            .filter(|(_, stage)| stage.arena > limit)
            .map(|(index, stage)| CheckProblem::memory(index, stage.arena, limit))
            .collect();
        let stages = program.stages.iter().map(StageSummary::of).collect();
        if let Err(found) = CheckedProgram::check(program) {
            errors.extend(found.0.iter().map(CheckProblem::of));
        }
        let memory_limit_bytes = limited(limit).map(|bytes| bytes.0);
        CheckReport { proven: errors.is_empty(), stages, memory_limit_bytes, errors }
    }

    /// What is wrong with the file called `name`.
    pub fn problems(&self, name: &str) -> Vec<Problem> {
        self.errors.iter().map(|fault| fault.problem(name)).collect()
    }
}

/// What a check found in the file called `name`.
pub fn problems(name: &str, errors: &CheckErrors) -> Vec<Problem> {
    errors.0.iter().map(|error| CheckProblem::of(error).problem(name)).collect()
}

impl CheckProblem {
    fn of(error: &CheckError) -> CheckProblem {
        let at = error.instruction.as_ref();
        CheckProblem {
            stage: error.stage,
            phase: at.map(|(phase, ..)| phase_name(*phase)),
            instruction: at.map(|(_, index, _)| *index),
            origin: at.map(|(.., origin)| origin.to_string()),
            problem: error.problem.clone(),
            hint: error.hint.clone(),
        }
    }

    fn memory(stage: usize, needed: Bytes, limit: Bytes) -> CheckProblem {
        CheckProblem {
            stage: Some(stage),
            phase: None,
            instruction: None,
            origin: None,
            problem: format!("a device needs {needed}, the limit is {limit}"),
            hint: Some("keep less for the backward pass, or a larger --memory-limit".into()),
        }
    }

    fn problem(&self, name: &str) -> Problem {
        let mut field = self.stage.map_or(String::new(), |stage| format!("stage {stage}"));
        if let (Some(phase), Some(index), Some(origin)) =
            (self.phase, self.instruction, &self.origin)
        {
            field += &format!(", {phase} instruction {index} ({origin})");
        }
        let hints = self.hint.iter().cloned().collect();
        Problem { field, hints, ..Problem::new(name, &self.problem) }
    }
}

fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Step => "step",
    }
}

impl StageSummary {
    fn of(stage: &StageProgram) -> StageSummary {
        let all = || stage.forward.iter().chain(&stage.backward).chain(&stage.step);
        let mut collectives = BTreeMap::new();
        for instr in all() {
            if let Action::Collective(exchange) = &instr.action {
                *collectives.entry(exchange.kind.name()).or_default() += 1;
            }
        }
        let is_transfer = |action: &Action| matches!(action, Action::Send(_) | Action::Receive(_));
        StageSummary {
            instructions: all().count() as u64,
            buffers: stage.buffers.len() as u64,
            collectives,
            transfers: all().filter(|instr| is_transfer(&instr.action)).count() as u64,
            microbatches_in_flight: stage.slots,
            peak_memory_bytes: stage.arena.0,
        }
    }
}

/// What was proved, for people.
const PROVED: &str = "Every layout follows from the one before it and every sum that is owed is \
    reduced once. Every buffer is written before it is read and not read after it is freed. Sends \
    meet receives, and all devices of a group run one order of collectives.";

/// The proof, for people.
pub fn text(proof: &CheckReport, file: &PlanFile) -> String {
    let mut page = TextPage::default();
    page.heading(format!("{} is proven", file.name));
    let mesh = &file.plan.mesh;
    page.line(format!("{} on {}: {mesh}", file.model.name, plural(mesh.devices(), "device")));
    page.paragraph(PROVED);
    page.heading("Stages");
    let row = |(index, stage): (usize, &StageSummary)| {
        vec![
            index.to_string(),
            thousands(stage.instructions),
            thousands(stage.buffers),
            thousands(stage.collectives.values().sum()),
            thousands(stage.transfers),
            thousands(stage.microbatches_in_flight),
            Bytes(stage.peak_memory_bytes).to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = proof.stages.iter().enumerate().map(row).collect();
    let columns =
        ["stage", "instructions", "buffers", "collectives", "transfers", "in flight", "memory"];
    page.table(&columns.map(|name| (name, Align::Right)), &rows);
    page.line(match proof.memory_limit_bytes {
        Some(limit) => format!("A device may hold {}.", Bytes(limit)),
        None => "There is no limit to what a device may hold.".into(),
    });
    page.finish()
}
