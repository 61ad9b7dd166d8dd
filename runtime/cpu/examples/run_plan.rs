//! Runs a plan without the planner and the cost model.
//!
//! `cargo run -p narrows-cpu --example run_plan -- PLAN.json MODEL [STEPS]` trains on random tokens and
//! prints the losses. MODEL is the name of a preset or a model file.

use std::error::Error;
use std::fs;

use narrows_plan::model::{self, presets};
use narrows_plan::{CheckedProgram, Plan, lower};
use narrows_runtime::session::StepInput;
use narrows_runtime::{CounterRng, Optimizer};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [plan, model, rest @ ..] = &arguments[..] else {
        return Err("usage: run_plan PLAN.json MODEL [STEPS]".into());
    };
    let steps = rest.first().map_or(Ok(5), |steps| steps.parse())?;
    for (step, loss) in run(plan, model, steps)?.into_iter().enumerate() {
        println!("step {}: loss {loss:.6}", step + 1);
    }
    Ok(())
}

/// Trains on the same random tokens in every step, and returns the losses.
pub fn run(plan: &str, name: &str, steps: u64) -> Result<Vec<f64>, Box<dyn Error>> {
    let plan = Plan::read(&fs::read_to_string(plan)?)?;
    let model = match presets::find(name) {
        Ok(model) => model,
        Err(_) => model::read(name, &fs::read_to_string(name)?)?,
    };
    let program = CheckedProgram::check(lower(&plan.resolve(&model)?))?;
    let mut session = narrows_cpu::session(&model, program, 1)?;
    session.initialise(&model, 1)?;
    let count = plan.workload.global_batch * plan.workload.sequence_length;
    let stream = CounterRng::new(1, "tokens");
    let ids: Vec<u32> = (0..=count).map(|n| (stream.bits(n) % model.vocab) as u32).collect();
    let input = StepInput { tokens: &ids[..count as usize], targets: &ids[1..] };
    let step = |_| Ok(session.step(&Optimizer::new(1e-3, 1, steps), input)?.loss);
    (0..steps).map(step).collect()
}
