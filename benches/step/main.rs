//! Training steps of CoLA-60M against PyTorch on the same processors: tokens/s, and their ratios.
//!
//! ```sh
//! cargo bench --bench step -- --python VENV/bin/python
//! ```
//!
//! Sequences of 256 tokens, f32, AdamW and clipping included. On one thread and on two, PyTorch eager
//! and compiled (`torch_step.py`) and this runtime make steps in turn, so that what else the machine
//! does meets all alike; with two threads, also a tensor axis of two devices with one thread each.
//! Ratios are of the shortest steps by the clock, and in brackets of processor time, which other
//! work on the machine disturbs less. A Python without torch is said and left out.

use std::error::Error;
use std::time::Instant;

use narrows_cost_model::profile;
use narrows_plan::CheckedProgram;
use narrows_plan::lower::lower;
use narrows_plan::model::{Model, presets};
use narrows_planner::{Request, search};
use narrows_runtime::Optimizer;
use narrows_runtime::cpu::{Session, StepInput};
use narrows_runtime::parameters::{Stream, logical_parameters};

mod times;
mod torch;

use times::{Times, processor_s};
use torch::{Mode, Torch};

const LENGTH: u64 = 256;

/// What was asked on the command line.
struct Asked {
    python: String,
    rounds: usize,
    sequences: u64,
    threads: Vec<usize>,
}

impl Asked {
    fn read() -> Result<Asked, String> {
        let mut asked =
            Asked { python: "python3".into(), rounds: 5, sequences: 4, threads: vec![1, 2] };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            let number = |text: String| text.parse().map_err(|_| format!("{text} is no number"));
            match word.as_str() {
                // Cargo's own.
                "--bench" => {}
                "--python" => asked.python = value()?,
                "--rounds" => asked.rounds = number(value()?)?,
                "--sequences" => asked.sequences = number(value()?)? as u64,
                "--threads" => asked.threads = vec![number(value()?)?],
                _ => return Err(format!("{word}? --python, --rounds, --sequences, --threads")),
            }
        }
        Ok(asked)
    }
}

/// One that makes steps.
enum Runner {
    Narrows(Box<Narrows>),
    Torch(Torch),
}

/// This runtime with a plan for so many devices.
struct Narrows {
    session: Session,
    optimizer: Optimizer,
    ids: Vec<u32>,
}

impl Narrows {
    fn new(
        model: &Model,
        devices: u64,
        threads: usize,
        sequences: u64,
    ) -> Result<Self, Box<dyn Error>> {
        let profile = profile::preset("cpu-local").map_err(|error| error.to_string())?;
        let mut request = Request::new(model.clone(), profile, devices, sequences, LENGTH);
        request.tensor = Some(devices);
        request.micro_batch = Some(sequences);
        let plan = search(&request).best.ok_or("no plan")?.plan;
        let program = CheckedProgram::check(lower(&plan.resolve(model)?))?;
        let mut session = Session::new(model, program, threads)?;
        session.initialise(model, 1);
        let stream = Stream::new(1, "tokens");
        let count = sequences * LENGTH;
        let ids = (0..=count).map(|n| (stream.bits(n) % model.vocab) as u32).collect();
        Ok(Narrows { session, optimizer: Optimizer::new(1e-3, 1, 1000), ids })
    }

    fn step(&mut self) -> Result<Times, Box<dyn Error>> {
        let count = self.ids.len() - 1;
        let input = StepInput { tokens: &self.ids[..count], targets: &self.ids[1..] };
        let (clock, processor) = (Instant::now(), processor_s());
        let done = self.session.step(&self.optimizer, input)?;
        let (wall_s, processor_s) = (clock.elapsed().as_secs_f64(), processor_s() - processor);
        Ok(Times { wall_s, processor_s, loss: done.loss })
    }
}

impl Runner {
    fn step(&mut self) -> Result<Times, Box<dyn Error>> {
        match self {
            Runner::Narrows(narrows) => narrows.step(),
            Runner::Torch(torch) => torch.step(),
        }
    }
}

/// A runner, and what its steps took.
struct Contestant {
    name: String,
    runner: Runner,
    steps: Vec<Times>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let asked = Asked::read()?;
    let model = presets::find("cola-60m").map_err(|defect| defect.to_string())?;
    for threads in &asked.threads {
        compare(&asked, &model, *threads)?;
    }
    Ok(())
}

fn compare(asked: &Asked, model: &Model, threads: usize) -> Result<(), Box<dyn Error>> {
    let mut all = vec![];
    let mut add = |name: String, runner| all.push(Contestant { name, runner, steps: vec![] });
    let narrows = |devices, threads| {
        Narrows::new(model, devices, threads, asked.sequences).map(|n| Runner::Narrows(n.into()))
    };
    add("narrows".into(), narrows(1, threads)?);
    if threads > 1 {
        add(format!("narrows, tensor axis {threads}"), narrows(threads as u64, 1)?);
    }
    let parameters: u64 = logical_parameters(model).iter().map(|p| p.elements()).sum();
    for mode in [Mode::Eager, Mode::Compile] {
        match Torch::start(&asked.python, mode, threads, (asked.sequences, LENGTH)) {
            Ok(torch) => {
                assert_eq!(torch.parameters, parameters, "another model");
                add(format!("torch {} {mode}", torch.version), Runner::Torch(torch));
            }
            Err(why) => println!("torch {mode} is left out: {why}"),
        }
    }
    // The first steps compile, touch memory and start threads.
    for round in 0..asked.rounds + 2 {
        for contestant in &mut all {
            let times = contestant.runner.step()?;
            if round >= 2 {
                contestant.steps.push(times);
            }
        }
    }
    report(asked, threads, &all);
    Ok(())
}

fn report(asked: &Asked, threads: usize, all: &[Contestant]) {
    let tokens = (asked.sequences * LENGTH) as f64;
    println!(
        "{threads} thread(s), {} sequences of {LENGTH}, {} rounds",
        asked.sequences, asked.rounds
    );
    println!("{:28} {:>9} {:>9} {:>11} {:>7}", "", "tokens/s", "median", "processor s", "loss");
    let least = |of: &Contestant, time: fn(&Times) -> f64| times::least(&of.steps, time);
    let wall: fn(&Times) -> f64 = |times| times.wall_s;
    let processor: fn(&Times) -> f64 = |times| times.processor_s;
    for one in all {
        let (best, median) = (least(one, wall), times::median(&one.steps, wall));
        let loss = one.steps.last().map_or(f64::NAN, |times| times.loss);
        let busy = least(one, processor);
        let (best, median) = (tokens / best, tokens / median);
        println!("{:28} {best:9.0} {median:9.0} {busy:11.3} {loss:7.3}", one.name);
    }
    for other in &all[1..] {
        let over = |time| least(other, time) / least(&all[0], time);
        println!("narrows : {} = {:.2} ({:.2})", other.name, over(wall), over(processor));
    }
    println!();
}
