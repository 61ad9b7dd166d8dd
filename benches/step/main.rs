//! Training steps of CoLA-60M against PyTorch on the same processors: tokens/s, and their ratios.
//!
//! ```sh
//! cargo bench --bench step -- --python VENV/bin/python
//! ```
//!
//! Sequences of 256 tokens in f32, with AdamW and clipping. On one thread and on two, PyTorch eager and
//! compiled (`torch_step.py`) and this runtime run steps alternately, so that other load of the machine
//! affects all equally. With two threads, a tensor axis of two devices with one thread each is measured too. Ratios are
//! of the shortest wall-clock times, and in parentheses of processor times, which other load affects less. Without torch,
//! the comparison is skipped with a message.
//!
//! All runners start with the same weights and tokens, so their losses must agree: the largest relative difference is
//! printed, and is an error above [`LOSS_ERROR_MAX`].

use std::error::Error;
use std::io::Write;
use std::time::Instant;

use narrows_cost_model::profile;
use narrows_plan::model::{Model, presets};
use narrows_plan::{CheckedProgram, lower};
use narrows_planner::{Request, search};
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{CounterRng, Optimizer, logical_parameters};

mod times;
mod torch;

use times::{Times, processor_s};
use torch::{Mode, Torch};

const LENGTH: u64 = 256;

/// Largest accepted relative difference of losses of the same step. The differences come from rounding,
/// and grow because AdamW makes equally large updates for gradients close to zero.
const LOSS_ERROR_MAX: f64 = 1e-3;

/// The learning rate of every step.
const LEARNING_RATE: f64 = 1e-3;

/// Seed of weights and tokens.
const SEED: u64 = 1;

/// Command-line arguments.
struct Arguments {
    python: String,
    rounds: usize,
    sequences: u64,
    threads: Vec<usize>,
}

impl Arguments {
    fn read() -> Result<Arguments, String> {
        let mut arguments =
            Arguments { python: "python3".into(), rounds: 5, sequences: 4, threads: vec![1, 2] };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            let number = |text: String| text.parse().map_err(|_| format!("{text} is not a number"));
            match word.as_str() {
                // Added by Cargo.
                "--bench" => {}
                "--python" => arguments.python = value()?,
                "--rounds" => arguments.rounds = number(value()?)?,
                "--sequences" => arguments.sequences = number(value()?)? as u64,
                "--threads" => arguments.threads = vec![number(value()?)?],
                _ => {
                    return Err(format!(
                        "unknown argument {word} (known: --python, --rounds, --sequences, --threads)"
                    ));
                }
            }
        }
        Ok(arguments)
    }
}

/// A runner of steps.
enum Runner {
    Narrows(Box<Narrows>),
    Torch(Torch),
}

/// A session of this runtime.
struct Narrows {
    session: Session,
    optimizer: Optimizer,
    ids: Vec<u32>,
}

impl Narrows {
    /// A session of the fastest plan for `devices` devices of `threads` threads each.
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
        // The learning rate is constant, as in torch_step.py.
        let optimizer = Optimizer { final_fraction: 1.0, ..Optimizer::new(LEARNING_RATE, 0, 1) };
        Ok(Narrows { session, optimizer, ids: token_ids(model, sequences) })
    }

    fn step(&mut self) -> Result<Times, Box<dyn Error>> {
        let count = self.ids.len() - 1;
        let input = StepInput { tokens: &self.ids[..count], targets: &self.ids[1..] };
        let (clock, processor) = (Instant::now(), processor_s());
        let result = self.session.step(&self.optimizer, input)?;
        let (wall_s, processor_s) = (clock.elapsed().as_secs_f64(), processor_s() - processor);
        Ok(Times { wall_s, processor_s, loss: result.loss })
    }
}

/// The token ids of the batch, and one more, which is the last target.
fn token_ids(model: &Model, sequences: u64) -> Vec<u32> {
    let stream = CounterRng::new(SEED, "tokens");
    (0..=sequences * LENGTH).map(|n| (stream.bits(n) % model.vocab) as u32).collect()
}

/// Writes a file with the initial weights in f32, followed by the token ids in i32.
fn write_start(model: &Model, sequences: u64) -> Result<tempfile::NamedTempFile, Box<dyn Error>> {
    let mut file = tempfile::NamedTempFile::new()?;
    for parameter in logical_parameters(model) {
        let value = parameter.initial_value(SEED);
        let mut bytes = Vec::with_capacity(4 * parameter.elements() as usize);
        for row in 0..parameter.rows {
            let elements = (0..parameter.columns).map(|column| value(row, column) as f32);
            bytes.extend(elements.flat_map(f32::to_le_bytes));
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
            Runner::Torch(torch) => torch.step(LEARNING_RATE),
        }
    }
}

/// A runner and the times of its steps, including those of the warm-up.
struct TimedRunner {
    name: String,
    runner: Runner,
    steps: Vec<Times>,
}

/// Number of first steps that are not timed: they compile, allocate memory and start threads.
const WARM_UP: usize = 3;

impl TimedRunner {
    /// Runs the first step.
    fn new(name: String, mut runner: Runner) -> Result<TimedRunner, Box<dyn Error>> {
        let first_step =
            runner.step().map_err(|error| format!("{name}: the first step: {error}"))?;
        Ok(TimedRunner { name, runner, steps: vec![first_step] })
    }

    fn timed(&self) -> &[Times] {
        &self.steps[WARM_UP..]
    }

    /// Largest relative difference between the losses of both.
    fn loss_error(&self, other: &TimedRunner) -> f64 {
        let pairs = self.steps.iter().zip(&other.steps);
        pairs.map(|(one, two)| (one.loss / two.loss - 1.0).abs()).fold(0.0, f64::max)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    let model = presets::find("cola-60m").map_err(|defect| defect.to_string())?;
    for threads in &arguments.threads {
        compare(&arguments, &model, *threads)?;
    }
    Ok(())
}

fn compare(arguments: &Arguments, model: &Model, threads: usize) -> Result<(), Box<dyn Error>> {
    let narrows = |devices, threads| {
        Narrows::new(model, devices, threads, arguments.sequences)
            .map(|n| Runner::Narrows(n.into()))
    };
    let mut all = vec![TimedRunner::new("narrows".into(), narrows(1, threads)?)?];
    if threads > 1 {
        let name = format!("narrows, tensor axis {threads}");
        all.push(TimedRunner::new(name, narrows(threads as u64, 1)?)?);
    }
    let start = write_start(model, arguments.sequences)?;
    let parameters: u64 = logical_parameters(model).iter().map(|p| p.elements()).sum();
    for mode in [Mode::Eager, Mode::Compile] {
        let shape = (arguments.sequences, LENGTH);
        let torch = Torch::start(&arguments.python, mode, threads, shape, start.path());
        let timed_runner = torch.and_then(|torch| {
            assert_eq!(torch.parameters, parameters, "torch_step.py has another model");
            TimedRunner::new(format!("torch {} {mode}", torch.version), Runner::Torch(torch))
        });
        match timed_runner {
            Ok(timed_runner) => all.push(timed_runner),
            Err(error) => println!("torch {mode} is skipped: {error}"),
        }
    }
    for _ in 1..WARM_UP + arguments.rounds {
        for timed_runner in &mut all {
            let times = timed_runner.runner.step()?;
            timed_runner.steps.push(times);
        }
    }
    report(arguments, threads, &all);
    let error = all[1..].iter().map(|other| all[0].loss_error(other)).fold(0.0, f64::max);
    println!("losses differ by at most {error:.1e}\n");
    if error > LOSS_ERROR_MAX { Err("the losses differ".into()) } else { Ok(()) }
}

fn report(arguments: &Arguments, threads: usize, all: &[TimedRunner]) {
    let tokens = (arguments.sequences * LENGTH) as f64;
    println!(
        "{threads} thread(s), {} sequences of {LENGTH}, {} rounds",
        arguments.sequences, arguments.rounds
    );
    println!("{:28} {:>9} {:>9} {:>11} {:>7}", "", "tokens/s", "median", "processor s", "loss");
    let min = |timed_runner: &TimedRunner, time: fn(&Times) -> f64| {
        times::min(timed_runner.timed(), time)
    };
    let wall: fn(&Times) -> f64 = |times| times.wall_s;
    let processor: fn(&Times) -> f64 = |times| times.processor_s;
    for timed_runner in all {
        let (shortest, median) =
            (min(timed_runner, wall), times::median(timed_runner.timed(), wall));
        let loss = timed_runner.steps.last().map_or(f64::NAN, |times| times.loss);
        let processor_s = min(timed_runner, processor);
        let (fastest, median) = (tokens / shortest, tokens / median);
        println!(
            "{:28} {fastest:9.0} {median:9.0} {processor_s:11.3} {loss:7.3}",
            timed_runner.name
        );
    }
    for other in &all[1..] {
        let ratio = |time| min(other, time) / min(&all[0], time);
        println!("narrows : {} = {:.2} ({:.2})", other.name, ratio(wall), ratio(processor));
    }
}
