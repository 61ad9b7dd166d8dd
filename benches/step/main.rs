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
//!
//! All begin from the same weights and see the same tokens, so that they must have the same losses:
//! the largest difference is printed, and one above [`LOSS_OFF_MAX`] ends the comparison.

use std::error::Error;
use std::io::Write;
use std::time::Instant;

use narrows_cost_model::profile;
use narrows_plan::CheckedProgram;
use narrows_plan::lower;
use narrows_plan::model::{Model, presets};
use narrows_planner::{Request, search};
use narrows_runtime::Optimizer;
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{CounterRng, logical_parameters};

mod times;
mod torch;

use times::{Times, processor_s};
use torch::{Mode, Torch};

const LENGTH: u64 = 256;

/// How far losses of the same step may be apart, relative. Rounding alone parts them, and AdamW makes
/// as large a step of a gradient that is nearly zero as of any other, so that they part more in each.
const LOSS_OFF_MAX: f64 = 1e-3;

/// The learning rate of every step.
const RATE: f64 = 1e-3;

/// Weights are drawn with it.
const SEED: u64 = 1;

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
        let mut session = narrows_cpu::session(model, program, threads)?;
        session.initialise(model, SEED)?;
        // The learning rate stays where it is, as the other side's does.
        let optimizer = Optimizer { final_fraction: 1.0, ..Optimizer::new(RATE, 0, 1) };
        Ok(Narrows { session, optimizer, ids: token_ids(model, sequences) })
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

/// The token ids of the only batch, and the one that comes after them.
fn token_ids(model: &Model, sequences: u64) -> Vec<u32> {
    let stream = CounterRng::new(SEED, "tokens");
    (0..=sequences * LENGTH).map(|n| (stream.bits(n) % model.vocab) as u32).collect()
}

/// A file of all weights, f32, as a session begins with them, and the token ids, i32.
fn start_of(model: &Model, sequences: u64) -> Result<tempfile::NamedTempFile, Box<dyn Error>> {
    let mut file = tempfile::NamedTempFile::new()?;
    for parameter in logical_parameters(model) {
        let value = parameter.initial_value(SEED);
        let mut bytes = Vec::with_capacity(4 * parameter.elements() as usize);
        for row in 0..parameter.rows {
            let numbers = (0..parameter.columns).map(|column| value(row, column) as f32);
            bytes.extend(numbers.flat_map(f32::to_le_bytes));
        }
        file.write_all(&bytes)?;
    }
    for id in token_ids(model, sequences) {
        file.write_all(&id.to_le_bytes())?;
    }
    Ok(file)
}

impl Runner {
    fn step(&mut self) -> Result<Times, Box<dyn Error>> {
        match self {
            Runner::Narrows(narrows) => narrows.step(),
            Runner::Torch(torch) => torch.step(RATE),
        }
    }
}

/// A runner, and what its steps took: the first ones too, which compile, touch memory and start threads.
struct Contestant {
    name: String,
    runner: Runner,
    steps: Vec<Times>,
}

/// Steps that are not timed.
const WARM_UP: usize = 3;

impl Contestant {
    /// With its first step made.
    fn new(name: String, mut runner: Runner) -> Result<Contestant, Box<dyn Error>> {
        let first = runner.step().map_err(|error| format!("{name}: the first step: {error}"))?;
        Ok(Contestant { name, runner, steps: vec![first] })
    }

    fn timed(&self) -> &[Times] {
        &self.steps[WARM_UP..]
    }

    /// The largest relative difference between its losses and another's.
    fn loss_off(&self, other: &Contestant) -> f64 {
        let pairs = self.steps.iter().zip(&other.steps);
        pairs.map(|(one, two)| (one.loss / two.loss - 1.0).abs()).fold(0.0, f64::max)
    }
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
    let narrows = |devices, threads| {
        Narrows::new(model, devices, threads, asked.sequences).map(|n| Runner::Narrows(n.into()))
    };
    let mut all = vec![Contestant::new("narrows".into(), narrows(1, threads)?)?];
    if threads > 1 {
        let name = format!("narrows, tensor axis {threads}");
        all.push(Contestant::new(name, narrows(threads as u64, 1)?)?);
    }
    let start = start_of(model, asked.sequences)?;
    let parameters: u64 = logical_parameters(model).iter().map(|p| p.elements()).sum();
    for mode in [Mode::Eager, Mode::Compile] {
        let shape = (asked.sequences, LENGTH);
        let begun = Torch::start(&asked.python, mode, threads, shape, start.path());
        let entered = begun.and_then(|torch| {
            assert_eq!(torch.parameters, parameters, "another model");
            Contestant::new(format!("torch {} {mode}", torch.version), Runner::Torch(torch))
        });
        match entered {
            Ok(contestant) => all.push(contestant),
            Err(why) => println!("torch {mode} is left out: {why}"),
        }
    }
    for _ in 1..WARM_UP + asked.rounds {
        for contestant in &mut all {
            let times = contestant.runner.step()?;
            contestant.steps.push(times);
        }
    }
    report(asked, threads, &all);
    let off = all[1..].iter().map(|other| all[0].loss_off(other)).fold(0.0, f64::max);
    println!("losses differ by at most {off:.1e}\n");
    if off > LOSS_OFF_MAX { Err("they do not compute the same".into()) } else { Ok(()) }
}

fn report(asked: &Asked, threads: usize, all: &[Contestant]) {
    let tokens = (asked.sequences * LENGTH) as f64;
    println!(
        "{threads} thread(s), {} sequences of {LENGTH}, {} rounds",
        asked.sequences, asked.rounds
    );
    println!("{:28} {:>9} {:>9} {:>11} {:>7}", "", "tokens/s", "median", "processor s", "loss");
    let least = |of: &Contestant, time: fn(&Times) -> f64| times::least(of.timed(), time);
    let wall: fn(&Times) -> f64 = |times| times.wall_s;
    let processor: fn(&Times) -> f64 = |times| times.processor_s;
    for one in all {
        let (best, median) = (least(one, wall), times::median(one.timed(), wall));
        let loss = one.steps.last().map_or(f64::NAN, |times| times.loss);
        let busy = least(one, processor);
        let (best, median) = (tokens / best, tokens / median);
        println!("{:28} {best:9.0} {median:9.0} {busy:11.3} {loss:7.3}", one.name);
    }
    for other in &all[1..] {
        let over = |time| least(other, time) / least(&all[0], time);
        println!("narrows : {} = {:.2} ({:.2})", other.name, over(wall), over(processor));
    }
}
