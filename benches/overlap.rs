//! Steps of two devices on the CPU with collectives beside computation, and the same steps in order.
//!
//! ```sh
//! cargo bench --bench overlap -- --model cola-60m --rounds 5 --gbit-per-s 1
//! ```
//!
//! Two devices with one thread each train on a data axis, whose plan reduces gradients during the backward pass and, with ZeRO-1, gathers
//! weights during the next forward pass. Steps of both kinds alternate, so that other load of the machine affects both
//! equally. The devices are threads of one process, or processes that are connected by TCP over loopback. To the latter a link
//! of a given speed is added: a collective takes at least as long as the link needs for the bytes that a member receives.
//! Losses of both kinds must be equal, bit for bit. Other load of the machine affects the shortest step least.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use narrows_calibration::upper_median;
use narrows_cluster::{
    Address, ClusterTimeouts, JobToken, LaunchInfo, Launcher, RunFact, TcpProcessGroup,
};
use narrows_cost_model::profile;
use narrows_cpu::{CollectiveOrder, CpuOptions};
use narrows_plan::model::{Model, presets};
use narrows_plan::program::CollectiveFunction;
use narrows_plan::{CheckedProgram, Zero, lower};
use narrows_planner::{Request, search};
use narrows_runtime::process_group::{
    ClusterError, CollectiveOperands, CollectiveVolume, CombineFn, Communicator, GroupScope,
    PeerLink, ProcessGroup,
};
use narrows_runtime::session::{Session, StepInput};
use narrows_runtime::{CounterRng, Optimizer, PipelineDirection, TimeCategory};
use narrows_test_support::free_port;

const LENGTH: u64 = 256;
const DEVICES: u64 = 2;

/// Number of first steps that are not timed.
const WARM_UP: usize = 2;

type AnyError = Box<dyn Error + Send + Sync>;

/// Connection of the devices.
#[derive(Clone, Copy)]
enum Link {
    /// Threads of one process.
    Memory,
    /// TCP over loopback.
    Loopback,
    /// TCP over loopback, and a link of this many bytes per second.
    Slow(f64),
}

impl Link {
    /// The links that are measured, the last with this many Gbit/s.
    fn all(gbit_per_s: f64) -> [Link; 3] {
        [Link::Memory, Link::Loopback, Link::Slow(gbit_per_s * 1e9 / 8.0)]
    }

    fn name(self) -> String {
        match self {
            Link::Memory => "threads of one process".into(),
            Link::Loopback => "TCP over loopback".into(),
            Link::Slow(rate) => format!("TCP, link of {} Gbit/s", rate * 8e-9),
        }
    }
}

/// A process group whose collectives go over a slow link.
struct SlowGroup {
    inner: TcpProcessGroup,
    link: Link,
}

struct SlowCommunicator {
    inner: Box<dyn Communicator>,
    bytes_per_s: f64,
}

impl Communicator for SlowCommunicator {
    fn size(&self) -> usize {
        self.inner.size()
    }

    fn run(
        &self,
        operands: CollectiveOperands,
        function: CollectiveFunction,
    ) -> Result<CollectiveVolume, ClusterError> {
        let begin = Instant::now();
        let volume = self.inner.run(operands, function)?;
        let time = Duration::from_secs_f64(4.0 * volume.received as f64 / self.bytes_per_s);
        std::thread::sleep(time.saturating_sub(begin.elapsed()));
        Ok(volume)
    }

    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterError> {
        self.inner.shift(source, target)
    }
}

impl ProcessGroup for SlowGroup {
    fn rank(&self) -> u64 {
        self.inner.rank()
    }

    fn world_size(&self) -> u64 {
        self.inner.world_size()
    }

    fn collective_timeout(&self) -> Duration {
        self.inner.collective_timeout()
    }

    fn begin_storage_use(&self) {
        self.inner.begin_storage_use();
    }

    fn end_storage_use(&self) {
        self.inner.end_storage_use();
    }

    fn gather_and_broadcast_bytes(
        &self,
        message: Vec<u8>,
        combine: CombineFn,
    ) -> Result<Vec<u8>, ClusterError> {
        self.inner.gather_and_broadcast_bytes(message, combine)
    }

    fn gather(
        &self,
        elements: &[&[f32]],
        count: &dyn Fn(u64) -> usize,
        on_receive: &mut dyn FnMut(u64, &[f32]),
    ) -> Result<(), ClusterError> {
        self.inner.gather(elements, count, on_receive)
    }

    fn failure(&self, operation: &str) -> Option<ClusterError> {
        self.inner.failure(operation)
    }

    fn abort(&self, origin: u64, reason: &str) {
        self.inner.abort(origin, reason);
    }

    fn communicator(&self, ranks: &[u64], scope: GroupScope) -> Option<Box<dyn Communicator>> {
        let inner = self.inner.communicator(ranks, scope)?;
        Some(match self.link {
            Link::Memory | Link::Loopback => inner,
            Link::Slow(bytes_per_s) => Box::new(SlowCommunicator { inner, bytes_per_s }),
        })
    }

    fn peer_link(&self, rank: u64, direction: PipelineDirection) -> Option<Box<dyn PeerLink>> {
        self.inner.peer_link(rank, direction)
    }
}

/// Command-line arguments.
struct Arguments {
    model: String,
    rounds: usize,
    sequences: u64,
    gbit_per_s: f64,
}

impl Arguments {
    fn read() -> Result<Arguments, String> {
        let model = "cola-60m".into();
        let mut arguments = Arguments { model, rounds: 5, sequences: 8, gbit_per_s: 1.0 };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            let number = |text: String| match text.parse::<f64>() {
                Ok(number) if number >= 1e-3 => Ok(number),
                _ => Err(format!("{text} is not a positive number")),
            };
            match word.as_str() {
                // Added by Cargo.
                "--bench" => {}
                "--model" => arguments.model = value()?,
                "--rounds" => arguments.rounds = number(value()?)? as usize,
                "--sequences" => arguments.sequences = number(value()?)? as u64,
                "--gbit-per-s" => arguments.gbit_per_s = number(value()?)?,
                _ => {
                    return Err(format!(
                        "unknown argument {word} (known: --model, --rounds, --sequences, --gbit-per-s)"
                    ));
                }
            }
        }
        Ok(arguments)
    }
}

/// A program of the data axis with overlap.
fn program(model: &Model, sequences: u64, zero: Zero) -> Result<CheckedProgram, Box<dyn Error>> {
    let profile = profile::preset("cpu-local").map_err(|error| error.to_string())?;
    let mut request = Request::new(model.clone(), profile, DEVICES, sequences, LENGTH);
    request.tensor = Some(1);
    request.data = Some(DEVICES);
    request.zero = Some(zero);
    request.micro_batch = Some(sequences / DEVICES);
    let mut plan = search(&request).best.ok_or("no plan")?.plan;
    plan.overlap_grad_reduce = true;
    plan.overlap_param_gather = true;
    Ok(CheckedProgram::check(lower(&plan.resolve(model)?))?)
}

/// Wall-clock and exposed seconds of each timed step of the first device, in order and overlapped.
type Times = [Vec<[f64; 2]>; 2];

const ORDERS: [CollectiveOrder; 2] = [CollectiveOrder::InOrder, CollectiveOrder::Overlapped];

/// Steps of two sessions in turn.
fn time_steps(
    mut sessions: [Session; 2],
    (model, sequences, rounds): (&Model, u64, usize),
) -> Result<Times, AnyError> {
    let stream = CounterRng::new(1, "tokens");
    let count = (sequences * LENGTH) as usize;
    let ids: Vec<u32> = (0..=count as u64).map(|n| (stream.bits(n) % model.vocab) as u32).collect();
    let input = StepInput { tokens: &ids[..count], targets: &ids[1..] };
    let optimizer = Optimizer { final_fraction: 1.0, ..Optimizer::new(1e-3, 0, 1) };
    for session in &mut sessions {
        session.initialise(model, 1)?;
    }
    let mut times = Times::default();
    for round in 0..WARM_UP + rounds {
        let mut losses = vec![];
        for (session, times) in sessions.iter_mut().zip(&mut times) {
            let begin = Instant::now();
            let result = session.step(&optimizer, input)?;
            let exposed = result.time_breakdown.get(TimeCategory::CollectiveExposed);
            if round >= WARM_UP {
                times.push([begin.elapsed().as_secs_f64(), exposed.as_secs_f64()]);
            }
            losses.push(result.loss.to_bits());
        }
        if losses[0] != losses[1] {
            return Err("the losses differ".into());
        }
    }
    Ok(times)
}

fn launch(rank: u64, port: u16) -> LaunchInfo {
    LaunchInfo {
        launcher: Launcher::Torchrun,
        rank,
        world_size: DEVICES,
        local_rank: rank,
        local_world_size: DEVICES,
        rendezvous: Address { host: "127.0.0.1".into(), port },
        job: JobToken::new("overlap"),
    }
}

/// The times of one process.
fn process(
    (rank, ports, link): (u64, [u16; 2], Link),
    program: &CheckedProgram,
    work: (&Model, u64, usize),
) -> Result<Times, AnyError> {
    let open = |index: usize| -> Result<Session, AnyError> {
        let facts = vec![RunFact { name: "bench".into(), value: "overlap".into() }];
        let peers = Session::peers(program.program(), rank);
        let launch = launch(rank, ports[index]);
        let inner = TcpProcessGroup::join(&launch, facts, &peers, ClusterTimeouts::DEFAULT)?;
        let options = CpuOptions { collective_order: ORDERS[index], ..CpuOptions::new(1) };
        let group = Arc::new(SlowGroup { inner, link });
        Ok(options.open(work.0, program.clone(), Some(group))?)
    };
    time_steps([open(0)?, open(1)?], work)
}

fn measure(
    link: Link,
    program: &CheckedProgram,
    work: (&Model, u64, usize),
) -> Result<Times, AnyError> {
    if let Link::Memory = link {
        let open = |collective_order| {
            let options = CpuOptions { collective_order, ..CpuOptions::new(1) };
            options.open(work.0, program.clone(), None)
        };
        return time_steps([open(ORDERS[0])?, open(ORDERS[1])?], work);
    }
    let ports = [free_port(), free_port()];
    std::thread::scope(|scope| {
        let other = scope.spawn(move || process((1, ports, link), program, work));
        let first = process((0, ports, link), program, work);
        other.join().map_err(|_| "a process panicked")??;
        first
    })
}

/// The shortest step.
fn shortest(steps: &[[f64; 2]]) -> [f64; 2] {
    steps.iter().copied().min_by(|one, two| one[0].total_cmp(&two[0])).unwrap_or([f64::NAN; 2])
}

/// The median time of a step.
fn median(steps: &[[f64; 2]]) -> f64 {
    upper_median(steps.iter().map(|[step, _]| *step).collect()).unwrap_or(f64::NAN)
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { model, rounds, sequences, gbit_per_s } = Arguments::read()?;
    let model = presets::find(&model).map_err(|defect| defect.to_string())?;
    println!(
        "{}, {sequences} sequences of {LENGTH}, {DEVICES} devices, {rounds} rounds",
        model.name
    );
    println!("{:22} {:>10} {:>10} {:>7}", "ms", "in order", "overlapped", "ratio");
    for zero in [Zero::Off, Zero::One] {
        let program = program(&model, sequences, zero)?;
        for link in Link::all(gbit_per_s) {
            let times = measure(link, &program, (&model, sequences, rounds));
            let times = times.map_err(|error| error.to_string())?;
            let of_orders =
                |time: fn(&[[f64; 2]]) -> f64| times.each_ref().map(|steps| time(steps));
            let rows = [
                ("shortest step", of_orders(|steps| shortest(steps)[0])),
                ("exposed in it", of_orders(|steps| shortest(steps)[1])),
                ("median step", of_orders(median)),
            ];
            println!("{}, {zero:?}", link.name());
            for (name, [in_order, overlapped]) in rows {
                let ratio = overlapped / in_order;
                let [in_order, overlapped] = [in_order, overlapped].map(|time| 1e3 * time);
                println!("  {name:20} {in_order:10.1} {overlapped:10.1} {ratio:7.3}");
            }
        }
    }
    Ok(())
}
