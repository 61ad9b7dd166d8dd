//! A session: the memory of all devices, and what can be done with it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use narrows_plan::kernel::Attention;
use narrows_plan::model::Model;
use narrows_plan::program::{
    Action, BufferId, Constants, Instr, PassOp, Phase, Program, Region, StageProgram,
};
use narrows_plan::{Bytes, CheckedProgram, Precision};

use super::arena::Arena;
use super::clock::{Clock, Lap};
use super::crew::Crew;
use super::device::{Coordinates, Device, StageParts, Step};
use super::kernels::Parallel;
use super::kernels::rotary::RotaryTable;
use super::links::{Links, neighbours};
use super::share::Share;
use super::tensors::numbers_of;
use super::weights::Held;
use crate::backend::RunError;
use crate::cluster::Cluster;
use crate::optimizer::Optimizer;
use crate::parameters::{Role, fnv1a, logical_parameters};
use crate::parts::{Part, Parts};
use crate::report::{DeviceId, DeviceReport, Report};

/// A program with the memory of the devices that this process runs: all of them, or one.
pub struct Session {
    pub(super) program: CheckedProgram,
    /// The devices of this process; what follows has an entry for each.
    pub(super) devices: Range<u64>,
    pub(super) arenas: Vec<Arena>,
    scratch: Vec<Vec<f32>>,
    /// What each device did in a step.
    reports: Vec<DeviceReport>,
    crew: Crew,
    links: Links,
    rotary: Option<RotaryTable>,
    /// Whether weight decay applies, by stage and weight.
    decays: Vec<HashMap<BufferId, bool>>,
    /// Elements of every logical parameter.
    pub(super) sizes: BTreeMap<String, usize>,
    /// What the time of instructions counts as, by stage.
    parts: Vec<StageParts>,
    clocks: Vec<Clock>,
    parallel: Parallel,
    pub(super) steps: u64,
}

/// The token ids of a step: the global batch, sequence after sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Inputs.
    pub tokens: &'a [u32],
    /// What is to be predicted at each of them.
    pub targets: &'a [u32],
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// Mean cross-entropy over the step's tokens, in nats.
    pub loss: f64,
    /// Norm of all gradients together, before clipping.
    pub gradient_norm: f64,
    /// What each device did.
    pub report: Report,
    /// What its time was spent on: means over the devices, which add up to all of it.
    pub time: Parts,
    /// Bytes that each device holds besides its arena, see [`Session::scratch`].
    pub scratch: Vec<u64>,
}

impl Session {
    /// Allocates the arenas of all devices; weights, gradients and moments are zeros. A device uses
    /// `threads` threads.
    ///
    /// # Errors
    /// When the program is not in f32, or is not of this model.
    pub fn new(
        model: &Model,
        program: CheckedProgram,
        threads: usize,
    ) -> Result<Session, RunError> {
        let devices = 0..program.program().context.mesh.devices();
        let links = Links::in_memory(program.program());
        Session::of_devices(model, program, threads, (devices, links))
    }

    /// The same for one device alone: that whose number this process has in the cluster. Every process
    /// must make the same calls of the session, in the same order.
    ///
    /// # Errors
    /// As [`new`](Session::new), and when the program is not for as many devices as there are processes.
    pub fn of_process(
        model: &Model,
        program: CheckedProgram,
        threads: usize,
        cluster: Arc<Cluster>,
    ) -> Result<Session, RunError> {
        let (devices, processes) = (program.program().context.mesh.devices(), cluster.world());
        if devices != processes {
            return Err(RunError::Processes { devices, processes });
        }
        let device = cluster.rank()..cluster.rank() + 1;
        let links = Links::of_process(program.program(), cluster);
        Session::of_devices(model, program, threads, (device, links))
    }

    /// The processes that one must be connected with, to run a program as the device of this number.
    pub fn neighbours(program: &Program, device: u64) -> Vec<u64> {
        neighbours(device, &program.context.mesh)
    }

    fn of_devices(
        model: &Model,
        program: CheckedProgram,
        threads: usize,
        (devices, links): (Range<u64>, Links),
    ) -> Result<Session, RunError> {
        let whole = program.program();
        if whole.context.precision != Precision::Full32 {
            return Err(RunError::Precision);
        }
        if whole.constants != Constants::of(model) || whole.tied != model.tied {
            return Err(RunError::OtherModel { model: model.name.clone() });
        }
        let logical: BTreeMap<String, (usize, Role)> = logical_parameters(model)
            .into_iter()
            .map(|parameter| {
                let elements = parameter.elements() as usize;
                (parameter.name, (elements, parameter.role))
            })
            .collect();
        let decays = whole
            .stages
            .iter()
            .map(|stage| decays(whole, stage, &logical))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| RunError::OtherModel { model: model.name.clone() })?;
        let mesh = whole.context.mesh;
        let stage = |device: u64| &whole.stages[Coordinates::of(device, &mesh).stage as usize];
        let arenas: Vec<Arena> =
            devices.clone().map(|device| Arena::new(stage(device).arena.0)).collect();
        let report = |arena: &Arena| DeviceReport::of(Bytes(arena.bytes()));
        let reports = arenas.iter().map(report).collect();
        let crew = Crew::new(arenas.len(), threads)
            .map_err(|error| RunError::Threads { why: error.to_string() })?;
        let rotary = head_dim(whole).map(|head_dim| {
            let positions = whole.context.workload.sequence_length as usize;
            RotaryTable::new(positions, head_dim as usize, whole.constants.rope_theta)
        });
        let sizes = logical.into_iter().map(|(name, (size, _))| (name, size)).collect();
        let scratch = devices.clone().map(|_| vec![]).collect();
        let clocks = devices.clone().map(|_| Clock::new()).collect();
        let parts = whole.stages.iter().map(StageParts::new).collect();
        let parallel = Parallel::new(threads);
        let steps = 0;
        Ok(Session {
            program,
            devices,
            arenas,
            scratch,
            reports,
            crew,
            links,
            rotary,
            decays,
            sizes,
            parts,
            clocks,
            parallel,
            steps,
        })
    }

    /// The program.
    pub fn program(&self) -> &Program {
        self.program.program()
    }

    /// The devices of this process.
    pub fn devices(&self) -> Range<u64> {
        self.devices.clone()
    }

    /// The processes that the devices are, if they are not all of this one.
    pub fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.links.cluster.as_ref()
    }

    /// Whether any process wants something.
    ///
    /// # Errors
    /// When a process is gone or late.
    pub fn anyone(&self, wants: bool) -> Result<bool, RunError> {
        match self.cluster() {
            None => Ok(wants),
            Some(cluster) => Ok(cluster.agree(wants, |all| all.into_iter().any(|wants| wants))?),
        }
    }

    /// Bytes allocated for the buffers of each device of this process.
    pub fn allocated(&self) -> Vec<u64> {
        self.arenas.iter().map(Arena::bytes).collect()
    }

    /// Bytes that each device of this process holds besides, to compute and to send with: scratch memory of its
    /// kernels, which its first step makes as large as it takes, and copies of what it sends to other
    /// stages.
    pub fn scratch(&self) -> Vec<u64> {
        let mesh = self.program.program().context.mesh;
        let of = |(device, scratch): (u64, &Vec<f32>)| {
            let at = Coordinates::of(device, &mesh);
            4 * scratch.capacity() as u64 + self.links.bytes(&at)
        };
        self.devices().zip(&self.scratch).map(of).collect()
    }

    /// Optimizer steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Keeps when every instruction of a step was executed, from now on.
    pub fn keep_laps(&mut self) {
        let program = self.program.program();
        let mesh = program.context.mesh;
        for (device, clock) in self.devices.clone().zip(&mut self.clocks) {
            let stage = DeviceId(device).stage(&mesh);
            clock.keep_laps(crate::order::step(&program.stages[stage]).count());
        }
    }

    /// When a device executed the instructions of the last step, in the [order](crate::order::step) in
    /// which it met them; empty unless they are [kept](Session::keep_laps), and of other processes.
    pub fn laps(&self, device: DeviceId) -> &[Lap] {
        let place = device.0.checked_sub(self.devices.start);
        let clock = place.and_then(|place| self.clocks.get(place as usize));
        clock.map_or(&[], Clock::laps)
    }

    /// One optimizer step.
    ///
    /// # Errors
    /// When the batch does not fit the program, a token is outside the vocabulary, or the gradients
    /// are not finite: then no weight has changed.
    pub fn step(&mut self, optimizer: &Optimizer, input: StepInput) -> Result<Done, RunError> {
        let number = self.steps + 1;
        let update = Some((optimizer, optimizer.coefficients(number), number));
        let done = self.run(Step { tokens: input.tokens, targets: input.targets, update })?;
        if !done.gradient_norm.is_finite() || !done.loss.is_finite() {
            self.clear_gradients();
            return Err(RunError::NotFinite { step: number, loss: done.loss });
        }
        self.steps = number;
        Ok(done)
    }

    /// Loss and gradients of a batch, reduced over all axes; no weight changes, and the gradients
    /// stay where they are until [`clear_gradients`](Session::clear_gradients).
    ///
    /// # Errors
    /// As [`step`](Session::step).
    pub fn gradients_only(&mut self, input: StepInput) -> Result<Done, RunError> {
        self.clear_gradients();
        self.run(Step { tokens: input.tokens, targets: input.targets, update: None })
    }

    /// Zeroes all gradients.
    pub fn clear_gradients(&mut self) {
        let program = self.program.program();
        let mesh = program.context.mesh;
        for (device, arena) in self.devices.clone().zip(&mut self.arenas) {
            let stage = &program.stages[Coordinates::of(device, &mesh).stage as usize];
            for buffer in stage.buffers.iter().filter(|b| b.region == Region::Gradient) {
                arena.slice_mut(numbers_of(buffer)).fill(0.0);
            }
        }
    }

    fn check_batch(&self, step: &Step) -> Result<(), RunError> {
        let program = self.program.program();
        let work = program.context.workload;
        let wanted = work.global_batch * work.sequence_length;
        let found = (step.tokens.len(), step.targets.len());
        if found != (wanted as usize, wanted as usize) {
            return Err(RunError::BatchSize { wanted, tokens: found.0, targets: found.1 });
        }
        let vocab = program.constants.vocab;
        let outside = |ids: &[u32]| ids.iter().position(|id| u64::from(*id) >= vocab);
        let tokens = outside(step.tokens).map(|at| (at, step.tokens[at]));
        match tokens.or_else(|| outside(step.targets).map(|at| (at, step.targets[at]))) {
            Some((position, token)) => Err(RunError::Token { token, position, vocab }),
            None => Ok(()),
        }
    }

    fn run(&mut self, step: Step) -> Result<Done, RunError> {
        let own = self.run_own(step);
        let Some(cluster) = &self.links.cluster else { return Ok(own?.done()) };
        let done = own.and_then(|share| share.agree(cluster, self.program.program()));
        done.inspect_err(|error| cluster.give_up(error))
    }

    /// Runs the devices of this process.
    fn run_own(&mut self, step: Step) -> Result<Share, RunError> {
        self.check_batch(&step)?;
        let begun = Instant::now();
        let program = self.program.program();
        let mesh = program.context.mesh;
        let (links, rotary, decays) = (&self.links, self.rotary.as_ref(), &self.decays);
        self.clocks.iter_mut().for_each(|clock| clock.start(begun));
        let memory = self.arenas.iter_mut().zip(&mut self.scratch).zip(&mut self.clocks);
        let devices: Vec<Device> = memory
            .zip(&mut self.reports)
            .zip(self.devices.clone())
            .map(|((((arena, scratch), clock), report), device)| {
                let at = Coordinates::of(device, &mesh);
                report.restart();
                Device {
                    at,
                    context: program.context,
                    constants: program.constants,
                    tied: program.tied,
                    stage: &program.stages[at.stage as usize],
                    arena,
                    scratch,
                    rotary,
                    decays: &decays[at.stage as usize],
                    links,
                    parts: &self.parts[at.stage as usize],
                    clock,
                    parallel: self.parallel,
                    step,
                    report,
                    loss: 0.0,
                }
            })
            .collect();
        let outcomes = self.crew.run(devices)?;
        let ended = Instant::now();
        let mut share = Share::of(program, outcomes)?;
        let waited = if self.clocks.len() > 1 { Part::Bubble } else { Part::Other };
        for clock in &mut self.clocks {
            share.time.join(&clock.stop(waited, ended));
        }
        share.scratch = self.scratch();
        if self.links.cluster.is_some() {
            let ids = step.tokens.iter().chain(step.targets);
            share.tokens = fnv1a(ids.flat_map(|id| id.to_le_bytes()));
        }
        Ok(share)
    }
}

/// `None` when a weight is not one of the model's.
fn decays(
    program: &Program,
    stage: &StageProgram,
    logical: &BTreeMap<String, (usize, Role)>,
) -> Option<HashMap<BufferId, bool>> {
    let mut made = HashMap::new();
    for (id, buffer) in stage.buffers.iter().enumerate() {
        if buffer.region != Region::Weight {
            continue;
        }
        let held = Held::new(buffer, 0, program.context.tensor(), program.tied)?;
        for name in held.names() {
            let (_, role) = logical.get(&name)?;
            made.insert(BufferId(id as u32), *role == Role::Matrix);
        }
    }
    Some(made)
}

fn instructions(program: &Program) -> impl Iterator<Item = &Instr> {
    let phases = [Phase::Forward, Phase::Backward, Phase::Step];
    let stages = program.stages.iter();
    stages.flat_map(move |stage| phases.into_iter().flat_map(|phase| stage.phase(phase)))
}

/// Features of a head, from the first rotation.
fn head_dim(program: &Program) -> Option<u64> {
    instructions(program).find_map(|instr| match &instr.action {
        Action::Pass(PassOp::Rope { head_dim }) => Some(*head_dim),
        Action::Attention(Attention { head_dim, .. }) => Some(*head_dim),
        _ => None,
    })
}
