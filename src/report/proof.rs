//! What a check proved, or what it found.

use std::collections::BTreeMap;

use narrows_plan::Bytes;
use narrows_plan::program::{Action, Phase, Program};
use serde::Serialize;

use super::limited;
use super::page::{Align, Page, plural, thousands};
use crate::args::resolve::PlanFile;
use crate::errors::Problem;

/// The outcome of a check.
pub struct Proof {
    /// What was counted on the way.
    pub stages: Vec<StageCount>,
    /// What a device may hold.
    pub limit: Bytes,
    /// What is wrong: nothing, when the plan is proven.
    pub problems: Vec<Problem>,
}

/// What a stage's program holds.
#[derive(Serialize)]
pub struct StageCount {
    instructions: u64,
    buffers: u64,
    collectives: BTreeMap<&'static str, u64>,
    sends: u64,
    receives: u64,
    microbatches_in_flight: u64,
    peak_memory_bytes: u64,
}

#[derive(Serialize)]
struct Json<'a> {
    proven: bool,
    stages: &'a [StageCount],
    memory_limit_bytes: Option<u64>,
    errors: Vec<String>,
}

impl Proof {
    /// Checks a lowered plan.
    pub fn of(name: &str, program: Program, limit: Bytes) -> Proof {
        let stages = count(&program);
        let mut problems = vec![];
        for (index, stage) in program.stages.iter().enumerate() {
            if stage.arena > limit {
                let problem = format!(
                    "stage {index} needs {} a device, the limit is {limit}",
                    stage.arena
                );
                let hint = "keep less for the backward pass, or a larger --memory-limit";
                problems.push(Problem::new(name, problem).hint(hint));
            }
        }
        Proof { stages, limit, problems }
    }

    /// The form for programs.
    pub fn json(&self) -> impl Serialize + '_ {
        let plain = |problem: &Problem| problem.problem.clone();
        Json {
            proven: self.problems.is_empty(),
            stages: &self.stages,
            memory_limit_bytes: limited(self.limit).map(|bytes| bytes.0),
            errors: self.problems.iter().map(plain).collect(),
        }
    }
}

fn count(program: &Program) -> Vec<StageCount> {
    program
        .stages
        .iter()
        .map(|stage| {
            let phases = [Phase::Forward, Phase::Backward, Phase::Step];
            let all: Vec<_> = phases.iter().flat_map(|phase| stage.phase(*phase)).collect();
            let mut collectives = BTreeMap::new();
            for instr in &all {
                if let Action::Collective(exchange) = &instr.action {
                    *collectives.entry(exchange.kind.name()).or_default() += 1;
                }
            }
            let number = |wanted: fn(&Action) -> bool| {
                all.iter().filter(|instr| wanted(&instr.action)).count() as u64
            };
            StageCount {
                instructions: all.len() as u64,
                buffers: stage.buffers.len() as u64,
                collectives,
                sends: number(|action| matches!(action, Action::Send(_))),
                receives: number(|action| matches!(action, Action::Receive(_))),
                microbatches_in_flight: stage.slots,
                peak_memory_bytes: stage.arena.0,
            }
        })
        .collect()
}

/// The form for people.
pub fn text(proof: &Proof, file: &PlanFile) -> String {
    let mut page = Page::default();
    page.heading(format!("{} is proven", file.name));
    let mesh = &file.plan.mesh;
    page.line(format!("{} on {}: {mesh}", file.model.name, plural(mesh.devices(), "device")));
    page.line("Every layout follows from the one before it; every sum that is owed is reduced once;");
    page.line("every buffer is written before it is read and not read after it is freed;");
    page.line("sends meet receives; the devices of a group run one order of collectives.");
    page.heading("Stages");
    let rows: Vec<Vec<String>> = proof
        .stages
        .iter()
        .enumerate()
        .map(|(index, stage)| {
            vec![
                index.to_string(),
                thousands(stage.instructions),
                thousands(stage.buffers),
                thousands(stage.collectives.values().sum()),
                thousands(stage.sends + stage.receives),
                thousands(stage.microbatches_in_flight),
                Bytes(stage.peak_memory_bytes).to_string(),
            ]
        })
        .collect();
    let columns = ["stage", "instructions", "buffers", "collectives", "transfers", "in flight", "memory"];
    page.table(&columns.map(|name| (name, Align::Right)), &rows);
    match limited(proof.limit) {
        Some(limit) => page.line(format!("A device may hold {limit}.")),
        None => page.line("A device may hold anything: there is no limit."),
    }
    page.finish()
}
