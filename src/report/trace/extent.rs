//! The part of a simulated step that a trace contains, so that viewers can show it.

use narrows_plan::program::{MicrobatchPass, Phase, Program};
use narrows_runtime::DeviceId;

use crate::text::{plural_with, thousands};

/// Most instructions of a simulated trace: viewers become slow with more.
const INSTRUCTIONS_MAX: u64 = 500_000;

/// Devices and microbatches of a simulated trace.
#[derive(Debug, PartialEq)]
pub struct TraceExtent {
    /// The devices.
    pub devices: Vec<DeviceId>,
    /// The microbatches below this number.
    microbatches: u64,
}

impl TraceExtent {
    /// The whole step of a program, or as much of it as a viewer can show.
    pub fn of(program: &Program) -> TraceExtent {
        TraceExtent::within(program, INSTRUCTIONS_MAX)
    }

    /// All devices if they have at most `instructions_max`, or else the first device of each stage, or else of that
    /// device the first microbatches, or else of the first stages the first microbatch. The first microbatch of the first
    /// stage is always traced.
    fn within(program: &Program, instructions_max: u64) -> TraceExtent {
        let mesh = program.context.mesh;
        let total = microbatches(program);
        let steps: Vec<u64> = program.stages.iter().map(|stage| stage.step.len() as u64).collect();
        let passes: Vec<u64> = program
            .stages
            .iter()
            .map(|stage| stage.pass_phases().map(|at| stage.instructions(at).len() as u64).sum())
            .collect();
        let (step, pass) = (steps.iter().sum::<u64>(), passes.iter().sum::<u64>());
        let devices = (0..mesh.devices()).map(DeviceId);
        let replicas = mesh.devices() / mesh.pipeline;
        if replicas.saturating_mul(step + pass.saturating_mul(total)) <= instructions_max {
            return TraceExtent { devices: devices.collect(), microbatches: total };
        }
        let microbatches = instructions_max.saturating_sub(step) / pass.max(1);
        let microbatches = microbatches.clamp(1, total.max(1));
        let mut room = instructions_max;
        let mut is_traced = |stage: usize| {
            let length = steps[stage] + passes[stage] * microbatches;
            let fits = length <= room || stage == 0;
            room = if fits { room.saturating_sub(length) } else { 0 };
            fits
        };
        let stages = (0..program.stages.len()).take_while(|stage| is_traced(*stage)).count();
        let first = |stage| devices.clone().find(|device| device.stage(&mesh) == stage);
        TraceExtent { devices: (0..stages).filter_map(first).collect(), microbatches }
    }

    /// Whether the trace has a pass.
    pub fn contains(&self, pass: MicrobatchPass) -> bool {
        pass.phase == Phase::Step || pass.microbatch < self.microbatches
    }

    /// The extent in words, if it is not the whole step: "one device of each stage".
    pub fn phrase(&self, program: &Program) -> Option<String> {
        let (stages, traced) = (program.stages.len(), self.devices.len());
        let total = microbatches(program);
        if traced as u64 == program.context.mesh.devices() && self.microbatches == total {
            return None;
        }
        let devices = match traced < stages {
            true => format!("one device of each of the first {traced} of {stages} stages"),
            false => "one device of each stage".to_owned(),
        };
        let in_pass = program.context.pass_microbatches();
        let first = match self.microbatches < total {
            true => format!(
                " with the first {} of {}",
                thousands(self.microbatches * in_pass),
                plural_with(total * in_pass, "microbatch", "microbatches")
            ),
            false => String::new(),
        };
        Some(devices + &first)
    }
}

/// Microbatches of a step.
fn microbatches(program: &Program) -> u64 {
    let passes = program.stages.iter().flat_map(|stage| &stage.schedule);
    passes.map(|pass| pass.microbatch + 1).max().unwrap_or_default()
}
