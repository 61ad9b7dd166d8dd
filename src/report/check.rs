//! The report of a check: the proof, or the errors.

use std::collections::BTreeMap;

use narrows_plan::program::{Action, Program, StageProgram};
use narrows_plan::{Bytes, CheckError, CheckErrors, CheckedProgram};
use serde::Serialize;

use super::numeric::NumericReport;
use super::page::{Align, Cell, Page};
use super::{Report, finite_limit};
use crate::args::{Detail, PlanFile};
use crate::errors::Problem;
use crate::text::{mesh_and_schedule, plural, thousands};

/// Output of `check`.
#[derive(Serialize)]
pub struct CheckReport {
    proven: bool,
    stages: Vec<StageSummary>,
    /// Memory that a device may use; `null` without a limit.
    memory_limit_bytes: Option<u64>,
    /// Errors; empty for a proven plan.
    errors: Vec<CheckProblem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    numeric: Option<NumericReport>,
    /// The name of the plan file.
    #[serde(skip)]
    file: String,
    /// Model, devices and mesh.
    #[serde(skip)]
    subject: String,
}

/// The program of a stage in numbers.
#[derive(Serialize)]
struct StageSummary {
    instructions: u64,
    buffers: u64,
    collectives: BTreeMap<&'static str, u64>,
    transfers: u64,
    /// Sum over the model chunks of the stage: a microbatch counts once in each chunk that keeps it.
    microbatches_in_flight: u64,
    /// Microbatches in flight in each model chunk of a stage with several; absent for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk_microbatches_in_flight: Option<Vec<u64>>,
    peak_memory_bytes: u64,
    /// Factor pairs that the hosts of the stage decompose in an exact step of LORO; absent without exact steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    exact_step_pairs: Option<u64>,
    /// Instructions of a host in an exact step; absent without exact steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    exact_step_instructions: Option<u64>,
}

/// One reason why a plan is not proven.
#[derive(Clone, Serialize)]
struct CheckProblem {
    stage: Option<usize>,
    /// The chunk of a stage with several; absent for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk: Option<usize>,
    phase: Option<&'static str>,
    instruction: Option<usize>,
    origin: Option<String>,
    problem: String,
    hint: Option<String>,
}

impl CheckReport {
    /// Checks the lowered program of a plan, and its memory.
    pub fn new(file: &PlanFile, program: Program, limit: Bytes) -> CheckReport {
        let mut errors: Vec<CheckProblem> = program
            .stages
            .iter()
            .enumerate()
            .filter(|(_, stage)| stage.arena > limit)
            .map(|(index, stage)| CheckProblem::memory(index, stage.arena, limit))
            .collect();
        let in_pass = program.context.pass_microbatches();
        let summary = |stage| StageSummary::of(stage, in_pass);
        let stages = program.stages.iter().map(summary).collect();
        if let Err(check_errors) = CheckedProgram::check(program) {
            errors.extend(check_errors.0.iter().map(CheckProblem::of));
        }
        let PlanFile { name, plan, model, .. } = file;
        let devices = plural(plan.mesh.devices(), "device");
        CheckReport {
            proven: errors.is_empty(),
            stages,
            memory_limit_bytes: finite_limit(limit),
            errors,
            numeric: None,
            file: name.clone(),
            subject: format!("{} on {devices}: {}", model.name, mesh_and_schedule(plan)),
        }
    }

    /// Whether the program is proven.
    pub fn is_proven(&self) -> bool {
        self.proven
    }

    /// Adds the comparison of the plan's miniature with unsharded training.
    pub fn with_numeric(self, numeric: NumericReport) -> CheckReport {
        CheckReport { numeric: Some(numeric), ..self }
    }

    /// All errors of the plan.
    pub fn problems(&self) -> Vec<Problem> {
        let errors = self.errors.iter().map(|error| error.problem(&self.file));
        let numeric = self.numeric.iter().filter_map(|numeric| numeric.problem(&self.file));
        errors.chain(numeric).collect()
    }
}

/// The errors of a check of the file called `name`.
pub fn check_problems(name: &str, errors: &CheckErrors) -> Vec<Problem> {
    errors.0.iter().map(|error| CheckProblem::of(error).problem(name)).collect()
}

impl CheckProblem {
    fn of(error: &CheckError) -> CheckProblem {
        let at = error.instruction.as_ref();
        CheckProblem {
            stage: error.stage,
            chunk: at.map(|(at, ..)| at.chunk).filter(|chunk| *chunk > 0),
            phase: at.map(|(at, ..)| at.phase.name()),
            instruction: at.map(|(_, index, _)| *index),
            origin: at.map(|(.., origin)| origin.to_string()),
            problem: error.problem.clone(),
            hint: error.hint.clone(),
        }
    }

    fn memory(stage: usize, needed: Bytes, limit: Bytes) -> CheckProblem {
        CheckProblem {
            stage: Some(stage),
            chunk: None,
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
            let chunk = self.chunk.map_or(String::new(), |chunk| format!(", chunk {chunk}"));
            field += &format!("{chunk}, {phase} instruction {index} ({origin})");
        }
        let hints = self.hint.iter().cloned().collect();
        Problem { field, hints, ..Problem::new(name, &self.problem) }
    }
}

impl StageSummary {
    /// A stage whose passes run this many microbatches.
    fn of(stage: &StageProgram, in_pass: u64) -> StageSummary {
        let mut collectives = BTreeMap::new();
        for instr in stage.all_instructions() {
            if let Action::Collective(collective) = &instr.action {
                *collectives.entry(collective.kind().name()).or_default() += 1;
            }
        }
        let is_transfer = |action: &Action| matches!(action, Action::Send(_) | Action::Receive(_));
        let in_flight = |chunk| stage.microbatches_in_flight(chunk) * in_pass;
        let in_flight: Vec<u64> = (0..stage.chunks.len()).map(in_flight).collect();
        let has_exact_step = !stage.exact_step.is_empty();
        let in_exact_step = |count: usize| has_exact_step.then_some(count as u64);
        StageSummary {
            instructions: stage.all_instructions().count() as u64,
            buffers: stage.buffers.len() as u64,
            collectives,
            transfers: stage.all_instructions().filter(|instr| is_transfer(&instr.action)).count()
                as u64,
            microbatches_in_flight: in_flight.iter().sum(),
            chunk_microbatches_in_flight: (in_flight.len() > 1).then_some(in_flight),
            peak_memory_bytes: stage.arena.0,
            exact_step_pairs: in_exact_step(stage.exact_step.pairs.len()),
            exact_step_instructions: in_exact_step(stage.exact_step.instrs.len()),
        }
    }

    /// The microbatches in flight in words; of several model chunks, those of each one: `4+2`.
    fn in_flight(&self) -> String {
        let Some(chunks) = &self.chunk_microbatches_in_flight else {
            return thousands(self.microbatches_in_flight);
        };
        chunks.iter().map(|slots| thousands(*slots)).collect::<Vec<_>>().join("+")
    }
}

const PROVEN: &str = "Every layout follows from the one before it, and every partial sum is reduced \
    once. Every buffer is written before it is read, and not read after it is freed. Sends match \
    receives, and all devices of a group issue their collectives in one order.";

impl Report for CheckReport {
    fn page(&self, detail: Detail) -> Page {
        let mut page = Page::default();
        page.heading(format!("{} is proven correct", self.file));
        page.line(&self.subject);
        page.paragraph(PROVEN);
        page.heading("Stages");
        let row = |(index, stage): (usize, &StageSummary)| {
            vec![
                index.to_string().into(),
                thousands(stage.instructions).into(),
                thousands(stage.buffers).into(),
                thousands(stage.collectives.values().sum()).into(),
                thousands(stage.transfers).into(),
                stage.in_flight().into(),
                Bytes(stage.peak_memory_bytes).into(),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.stages.iter().enumerate().map(row).collect();
        let columns =
            ["stage", "instructions", "buffers", "collectives", "transfers", "in flight", "memory"];
        page.table(&columns.map(|name| (name, Align::Right)), &rows);
        if self.stages.iter().any(|stage| stage.chunk_microbatches_in_flight.is_some()) {
            page.line("In flight: microbatches in each model chunk of a stage.");
        }
        let sum = |of_stage: fn(&StageSummary) -> Option<u64>| {
            self.stages.iter().filter_map(of_stage).reduce(|a, b| a + b)
        };
        if let Some(pairs) = sum(|stage| stage.exact_step_pairs) {
            let instructions = sum(|stage| stage.exact_step_instructions).unwrap_or(0);
            page.line(format!(
                "Exact steps: {} of hosts, which decompose {} once each",
                plural(instructions, "instruction"),
                plural(pairs, "factor pair")
            ));
        }
        page.line(match self.memory_limit_bytes {
            Some(limit) => format!("Memory limit of a device: {}", Bytes(limit)),
            None => "No memory limit".into(),
        });
        if let Some(numeric) = &self.numeric {
            page.extend(numeric.page(detail));
        }
        page
    }
}
