//! Devices that are threads of this process, or the one that it is.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use narrows_plan::model::Model;
use narrows_plan::program::Buffer;
use narrows_plan::{Bytes, CheckedProgram, Precision};

use super::arena::Arena;
use super::clock::DeviceClock;
use super::crew::{DeviceOutcome, DeviceThreads};
use super::device::{CpuDevice, StageCategories};
use super::links::DeviceLinks;
use crate::kernels::{Parallel, RopeTable};
use narrows_runtime::RunError;
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::{
    Engine, LocalStepResult, MeshCoordinates, ModelProgram, Session, StepRequest,
};
use narrows_runtime::{DeviceId, DeviceReport};
use narrows_runtime::{InstructionSpan, TimeCategory};

/// The devices of a process, on its processors.
pub struct CpuEngine {
    subject: Arc<ModelProgram>,
    /// The devices of this process; what follows has an entry for each.
    pub devices: Range<u64>,
    pub arenas: Vec<Arena>,
    scratch: Vec<Vec<f32>>,
    /// What each device did in a step.
    reports: Vec<DeviceReport>,
    clocks: Vec<DeviceClock>,
    crew: DeviceThreads,
    links: DeviceLinks,
    rotary: Option<RopeTable>,
    /// What the time of instructions counts as, by stage.
    parts: Vec<StageCategories>,
    parallel: Parallel,
}

/// A session whose devices are all threads of this process; weights, gradients and moments are
/// zeros. A device uses `threads` threads.
///
/// # Errors
/// When the program is not in f32, or is not of this model.
pub fn session(
    model: &Model,
    program: CheckedProgram,
    threads: usize,
) -> Result<Session, RunError> {
    let subject = Arc::new(ModelProgram::new(model, program)?);
    let devices = 0..subject.program().context.mesh.devices();
    let links = DeviceLinks::in_memory(subject.program());
    let engine = CpuEngine::new(subject.clone(), threads, (devices, links))?;
    Ok(Session::new(subject, Box::new(engine), None))
}

/// A session of the one device whose number is this process's rank. Every process must make the same
/// calls of the session, in the same order.
///
/// # Errors
/// As [`session`], and when the program is not for as many devices as there are processes.
pub fn session_of_process(
    model: &Model,
    program: CheckedProgram,
    threads: usize,
    group: Arc<dyn ProcessGroup>,
) -> Result<Session, RunError> {
    let subject = Arc::new(ModelProgram::new(model, program)?);
    let (devices, processes) = (subject.program().context.mesh.devices(), group.world_size());
    if devices != processes {
        return Err(RunError::ProcessCountMismatch { devices, processes });
    }
    let device = group.rank()..group.rank() + 1;
    let links = DeviceLinks::of_process(subject.program(), &*group);
    let engine = CpuEngine::new(subject.clone(), threads, (device, links))?;
    Ok(Session::new(subject, Box::new(engine), Some(group)))
}

impl CpuEngine {
    pub fn new(
        subject: Arc<ModelProgram>,
        threads: usize,
        (devices, links): (Range<u64>, DeviceLinks),
    ) -> Result<CpuEngine, RunError> {
        let program = subject.program();
        if program.context.precision != Precision::Full32 {
            return Err(RunError::UnsupportedPrecision);
        }
        let mesh = program.context.mesh;
        let stage = |device: u64| &program.stages[DeviceId(device).stage(&mesh)];
        let arenas: Vec<Arena> =
            devices.clone().map(|device| Arena::new(stage(device).arena.0)).collect();
        let report = |arena: &Arena| DeviceReport::with_arena(Bytes(arena.bytes()));
        let reports = arenas.iter().map(report).collect();
        let crew = DeviceThreads::new(arenas.len(), threads)
            .map_err(|error| RunError::DeviceThreads { reason: error.to_string() })?;
        let rotary = program.head_dim().map(|head_dim| {
            let positions = program.context.workload.sequence_length as usize;
            RopeTable::new(positions, head_dim as usize, program.constants.rope_theta)
        });
        let scratch = devices.clone().map(|_| vec![]).collect();
        let clocks = devices.clone().map(|_| DeviceClock::new()).collect();
        let parts = program.stages.iter().map(StageCategories::new).collect();
        let parallel = Parallel::new(threads);
        Ok(CpuEngine {
            subject,
            devices,
            arenas,
            scratch,
            reports,
            clocks,
            crew,
            links,
            rotary,
            parts,
            parallel,
        })
    }

    /// Where what belongs to a device is among those of this process.
    fn place(&self, device: u64) -> usize {
        (device - self.devices.start) as usize
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn devices(&self) -> Range<u64> {
        self.devices.clone()
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        let begun = Instant::now();
        let program = self.subject.program();
        let mesh = program.context.mesh;
        let (links, rotary) = (&self.links, self.rotary.as_ref());
        self.clocks.iter_mut().for_each(|clock| clock.start(begun));
        let memory = self.arenas.iter_mut().zip(&mut self.scratch).zip(&mut self.clocks);
        let devices: Vec<CpuDevice> = memory
            .zip(&mut self.reports)
            .zip(self.devices.clone())
            .map(|((((arena, scratch), clock), report), device)| {
                let at = MeshCoordinates::of_device(device, &mesh);
                report.reset_counts();
                CpuDevice {
                    at,
                    context: program.context,
                    constants: program.constants,
                    tied: program.tied,
                    stage: &program.stages[at.stage as usize],
                    arena,
                    scratch,
                    rotary,
                    decays: self.subject.weight_decay_applies(at.stage as usize),
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
        let mut outcomes = self.crew.run(devices)?;
        let ended = Instant::now();
        let failed = outcomes.iter_mut().find_map(DeviceOutcome::take_failure);
        if let Some(error) = failed {
            return Err(error);
        }
        // Where another process failed first, some stopped on the way.
        let whole = outcomes.into_iter().filter(|outcome| outcome.stopped.is_none());
        let mut share = LocalStepResult::from_devices(program, whole.map(|outcome| outcome.left));
        let waited = if self.clocks.len() > 1 { TimeCategory::Bubble } else { TimeCategory::Other };
        for clock in &mut self.clocks {
            share.time_breakdown.add_all(&clock.stop(waited, ended));
        }
        Ok(share)
    }

    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        Ok(self.arenas[self.place(device)].slice(numbers_of(buffer)).into())
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        let place = self.place(device);
        change(self.arenas[place].slice_mut(numbers_of(buffer)));
        Ok(())
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        self.arenas.iter().map(Arena::bytes).collect()
    }

    /// Scratch memory of the kernels, which the first step makes as large as it takes, and copies of what
    /// is sent to other stages.
    fn scratch_bytes(&self) -> Vec<u64> {
        let mesh = self.subject.program().context.mesh;
        let of = |(device, scratch): (u64, &Vec<f32>)| {
            let at = MeshCoordinates::of_device(device, &mesh);
            4 * scratch.capacity() as u64 + self.links.bytes(&at)
        };
        self.devices().zip(&self.scratch).map(of).collect()
    }

    fn record_instruction_spans(&mut self) {
        let program = self.subject.program();
        let mesh = program.context.mesh;
        for (device, clock) in self.devices.clone().zip(&mut self.clocks) {
            let stage = DeviceId(device).stage(&mesh);
            clock
                .keep_laps(narrows_runtime::scheduled_instructions(&program.stages[stage]).count());
        }
    }

    fn instruction_spans(&self, device: u64) -> &[InstructionSpan] {
        self.clocks[self.place(device)].laps()
    }
}

/// The numbers of a resident buffer in its arena.
pub fn numbers_of(buffer: &Buffer) -> Range<usize> {
    let begin = (buffer.offset / 4) as usize;
    begin..begin + (buffer.extent.bytes().0 / 4) as usize
}
