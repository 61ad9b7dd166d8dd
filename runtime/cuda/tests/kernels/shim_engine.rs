//! An engine that executes all devices of a program on the CPU: each device follows its schedule. The shim runs
//! kernels, matmuls are computed as cublasLtMatmul documents them, collectives in the order of the devices, and sent
//! operands wait in a queue.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use narrows_cuda::{
    Argument, DeviceSchedule, KernelFamily, Launch, LaunchContext, MatmulContext, MemorySpace,
    NcclCollective, NodeWork, OPTIMIZER_COEFFICIENTS, P2pKind, RingShift, ScheduleItem,
    SchedulePass, optimizer_coefficients, recommended_workspace, rotary_table,
};
use narrows_plan::model::Model;
use narrows_plan::program::{Buffer, Phase, Program};
use narrows_plan::{CheckedProgram, DType, DeviceGroup};
use narrows_runtime::session::{
    DeviceStep, Engine, LocalStepResult, MeshCoordinates, ModelProgram, StepRequest, TokenRows,
};
use narrows_runtime::{DeviceReport, InstructionSpan, RunError, Session};

use super::case::{AlignedBytes, MULTIPROCESSORS};
use super::formats::{decode, encode};
use super::reference_matmul;
use super::shim::{self, ExecutionOrder, ShimMemory};
use super::shim_collectives::{collective_results, run_shift};

struct ShimEngine {
    model_program: Arc<ModelProgram>,
    devices: Vec<ShimDevice>,
    rotary: Vec<f32>,
    /// Operands that were sent and not yet received, by sender and receiver.
    sent: HashMap<(u64, u64), VecDeque<Vec<Vec<u8>>>>,
}

/// Position in a schedule.
#[derive(Clone, Copy, Default)]
struct SchedulePosition {
    pass: usize,
    item: usize,
    node: usize,
}

struct ShimDevice {
    coordinates: MeshCoordinates,
    arena: AlignedBytes,
    scratch: AlignedBytes,
    schedule: DeviceSchedule,
    /// Position in the schedule.
    position: SchedulePosition,
    loss: [f64; 1],
    report: DeviceReport,
}

/// A session on the engine; `None` where kernels cannot be compiled for the CPU.
///
/// # Panics
/// When an instruction of the program has no kernel.
pub fn session(model: &Model, program: CheckedProgram) -> Option<Session> {
    shim::kernels(KernelFamily::Norm)?;
    let model_program = ModelProgram::new(model, program).unwrap_or_else(|e| panic!("{e}"));
    let model_program = Arc::new(model_program);
    let engine = ShimEngine::new(model_program.clone());
    Some(Session::new(model_program, Box::new(engine), None))
}

impl ShimEngine {
    fn new(model_program: Arc<ModelProgram>) -> ShimEngine {
        let program = model_program.program();
        let mesh = program.context.mesh;
        let devices = (0..mesh.devices()).map(|device| {
            let coordinates = MeshCoordinates::of_device(device, &mesh);
            let stage = &program.stages[coordinates.stage as usize];
            let device = launch_context(program, coordinates, &model_program);
            let workspace = recommended_workspace((9, 0));
            let context = MatmulContext { device: &device, tied: program.tied, workspace };
            let schedule = DeviceSchedule::new(&context, coordinates.stage)
                .unwrap_or_else(|error| panic!("{error}"));
            // Unwritten memory is NaN.
            let mut arena = AlignedBytes::of(&vec![0xff; stage.arena.0 as usize]);
            for buffer in stage.buffers.iter().filter(|buffer| is_state(buffer)) {
                arena.as_mut_slice()[range_of(buffer)].fill(0);
            }
            let report = DeviceReport { allocated: stage.arena, ..DeviceReport::default() };
            let position = SchedulePosition::default();
            let scratch = AlignedBytes::of(&vec![0; schedule.scratch_bytes as usize]);
            ShimDevice { coordinates, arena, scratch, schedule, position, loss: [0.0], report }
        });
        let devices = devices.collect();
        let positions = program.context.workload.sequence_length;
        let rotary = rotary_table(positions, &program.constants.rope);
        ShimEngine { model_program, devices, rotary, sent: HashMap::new() }
    }

    /// Advances a device until it must wait for another. Returns whether it advanced.
    fn advance(&mut self, index: usize, step: &StepRequest) -> bool {
        let model_program = self.model_program.clone();
        let mut advanced = false;
        loop {
            let device = &mut self.devices[index];
            let SchedulePosition { pass: pass_index, item: item_index, node } = device.position;
            let Some(pass) = device.schedule.passes.get(pass_index) else { return advanced };
            let Some(item) = pass.items.get(item_index).cloned() else {
                device.begin_pass(model_program.program(), pass_index + 1, step);
                advanced = true;
                continue;
            };
            let completed = match item {
                ScheduleItem::Transfer(_) if !step.task.includes(pass.pass.phase) => true,
                ScheduleItem::Transfer(transfer) => {
                    let stage = device.coordinates.stage;
                    let mesh = &model_program.program().context.mesh;
                    let peer = transfer.peer(stage, mesh.pipeline);
                    let peer = MeshCoordinates { stage: peer, ..device.coordinates }.device(mesh);
                    self.transfer(
                        index as u64,
                        peer,
                        &transfer.operands,
                        transfer.kind == P2pKind::Send,
                    )
                }
                // All items run in order.
                ScheduleItem::AwaitGathers(_) => true,
                ScheduleItem::Segment(segment)
                | ScheduleItem::Reductions(segment)
                | ScheduleItem::Gathers { segment, .. } => {
                    let skipped = !step.task.includes(pass.pass.phase);
                    match device.schedule.segments[segment].nodes.get(node) {
                        _ if skipped => true,
                        None => true,
                        Some(next) if next.work.collective().is_some() => {
                            let is_shift = matches!(next.work, NodeWork::Shift(_));
                            let ran = if is_shift {
                                self.run_shift(index)
                            } else {
                                self.run_collective(index)
                            };
                            if !ran {
                                return advanced;
                            }
                            advanced = true;
                            continue;
                        }
                        Some(next) => {
                            if step.update().is_some() || !next.updates_weights {
                                device.execute(segment, node, &mut self.rotary, step);
                            }
                            device.position.node += 1;
                            advanced = true;
                            continue;
                        }
                    }
                }
            };
            if !completed {
                return advanced;
            }
            advanced = true;
            self.devices[index].position =
                SchedulePosition { pass: pass_index, item: item_index + 1, node: 0 };
        }
    }

    /// Sends or receives; false when there is nothing to receive yet.
    fn transfer(&mut self, device: u64, peer: u64, operands: &[Range<u64>], sends: bool) -> bool {
        let arena = self.devices[device as usize].arena.as_mut_slice();
        if sends {
            let bytes = operands.iter().map(|range| arena[indices(range)].to_vec()).collect();
            self.sent.entry((device, peer)).or_default().push_back(bytes);
            return true;
        }
        let Some(message) = self.sent.entry((peer, device)).or_default().pop_front() else {
            return false;
        };
        for (range, bytes) in operands.iter().zip(message) {
            arena[indices(range)].copy_from_slice(&bytes);
        }
        true
    }

    /// The members of a group of a device.
    fn members(&self, index: usize, group: &DeviceGroup) -> Vec<usize> {
        let mesh = &self.model_program.program().context.mesh;
        let members = self.devices[index].coordinates.members(group, mesh);
        let members = members.expect("a group of the device").into_iter();
        members.map(|device| device as usize).collect()
    }

    /// Executes the shift that a device has reached, once all members have; false until then.
    fn run_shift(&mut self, index: usize) -> bool {
        let shift_of = |engine: &ShimEngine, member: usize| match engine.devices[member].next_work()
        {
            Some(NodeWork::Shift(shift)) => Some(shift.clone()),
            _ => None,
        };
        let group = shift_of(self, index).expect("a shift").group;
        let members = self.members(index, &group);
        let shifts: Option<Vec<RingShift>> =
            members.iter().map(|member| shift_of(self, *member)).collect();
        let Some(shifts) = shifts.filter(|all| all.iter().all(|shift| shift.group == group)) else {
            return false;
        };
        let arenas = self.devices.iter_mut().enumerate();
        let arenas = arenas.filter(|(device, _)| members.contains(device));
        run_shift(&shifts, arenas.map(|(_, device)| device.arena.as_mut_slice()).collect());
        for member in members {
            self.devices[member].position.node += 1;
        }
        true
    }

    /// Executes the collective that a device has reached, once all members have; false until then.
    fn run_collective(&mut self, index: usize) -> bool {
        let first = self.devices[index].next_collective().expect("a collective").clone();
        let members = self.members(index, &first.group);
        let collectives: Option<Vec<NcclCollective>> =
            members.iter().map(|member| self.devices[*member].next_collective().cloned()).collect();
        let Some(collectives) = collectives else { return false };
        let matches_first = |collective: &NcclCollective| {
            (collective.function, collective.group) == (first.function, first.group)
        };
        if !collectives.iter().all(matches_first) {
            return false;
        }
        for port in 0..first.buffers.len() {
            let dtype = first.buffers[port].dtype;
            let in_place = first.buffers[port].in_place();
            let sources: Vec<Vec<f32>> = members
                .iter()
                .zip(&collectives)
                .map(|(member, collective)| {
                    self.devices[*member].read(&collective.buffers[port].source, dtype)
                })
                .collect();
            let results = collective_results(&first, &sources, in_place);
            for ((member, collective), result) in members.iter().zip(&collectives).zip(results) {
                self.devices[*member].write(&collective.buffers[port].target, dtype, &result);
            }
        }
        for member in members {
            self.devices[member].position.node += 1;
        }
        true
    }
}

fn indices(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Size of the scratch memory that launches access.
fn scratch_bytes(launches: &[Launch]) -> usize {
    let arguments = launches.iter().flat_map(Launch::all_arguments);
    let ends = arguments.filter_map(|argument| match argument {
        Argument::Pointer(span) if span.memory == MemorySpace::Scratch && span.rows > 0 => {
            Some(span.row_range(span.rows - 1).end)
        }
        _ => None,
    });
    ends.max().unwrap_or(0) as usize
}

impl ShimDevice {
    /// The work that comes next, if it is that of a node.
    fn next_work(&self) -> Option<&NodeWork> {
        let SchedulePosition { pass, item, node } = self.position;
        let segment = self.schedule.passes.get(pass)?.items.get(item)?.segment()?;
        Some(&self.schedule.segments[segment].nodes.get(node)?.work)
    }

    /// The collective that comes next, if one does.
    fn next_collective(&self) -> Option<&NcclCollective> {
        match self.next_work()? {
            NodeWork::Collective(collective) => Some(collective),
            _ => None,
        }
    }

    /// Moves to the start of a pass and writes the token ids of this device's rows to the arena. The tokens must be there
    /// before another device executes a collective with which the pass begins.
    fn begin_pass(&mut self, program: &Program, pass: usize, step: &StepRequest) {
        self.position = SchedulePosition { pass, ..SchedulePosition::default() };
        let Some(SchedulePass { pass, .. }) = self.schedule.passes.get(pass) else { return };
        if pass.phase == Phase::Step {
            return;
        }
        let (context, coordinates) = (&program.context, self.coordinates);
        let microbatch = pass.microbatch;
        for buffer in &program.stages[coordinates.stage as usize].buffers {
            let Some(ids) = step.input_ids(buffer) else { continue };
            let rows = TokenRows::of_device(context, &coordinates, buffer.extent.rows);
            let rows = rows.id_ranges(context, &coordinates, microbatch);
            let local: Vec<u32> = rows.flat_map(|row| ids[row].to_vec()).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&local);
            self.arena.as_mut_slice()[range_of(buffer)].copy_from_slice(bytes);
        }
    }

    fn execute(&mut self, segment: usize, node: usize, rotary: &mut [f32], step: &StepRequest) {
        let node = &self.schedule.segments[segment].nodes[node];
        if node.begins_instr {
            self.scratch.as_mut_slice().fill(0xff);
        }
        match &node.work {
            NodeWork::Matmul(matmul) => {
                reference_matmul::execute(self.arena.as_mut_slice(), matmul)
            }
            NodeWork::Collective(_) | NodeWork::Shift(_) => {
                unreachable!("all members execute collectives together")
            }
            NodeWork::Launches(launches) | NodeWork::Attention(_, launches) => {
                let scratch = &mut self.scratch.as_mut_slice()[..scratch_bytes(launches)];
                let mut coefficients = [f32::NAN; OPTIMIZER_COEFFICIENTS as usize];
                if let Some(update) = step.update() {
                    coefficients = optimizer_coefficients(update);
                }
                for launch in launches {
                    let mut memory = ShimMemory {
                        arena: self.arena.as_mut_slice(),
                        scratch,
                        rotary,
                        coefficients: &mut coefficients,
                        loss: &mut self.loss,
                    };
                    let kernels = shim::kernels(launch.family).expect("a compiler");
                    let result = kernels.run(launch, &mut memory, ExecutionOrder::Ascending);
                    result.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
                }
            }
        }
    }

    fn read(&mut self, bytes: &Range<u64>, dtype: DType) -> Vec<f32> {
        decode(&self.arena.as_mut_slice()[indices(bytes)], dtype)
    }

    fn write(&mut self, bytes: &Range<u64>, dtype: DType, elements: &[f32]) {
        let to = &mut self.arena.as_mut_slice()[indices(bytes)];
        to.copy_from_slice(&encode(elements, dtype));
    }
}

impl Engine for ShimEngine {
    fn name(&self) -> &'static str {
        "shim"
    }

    fn devices(&self) -> Range<u64> {
        0..self.devices.len() as u64
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        let model_program = self.model_program.clone();
        let program = model_program.program();
        for device in &mut self.devices {
            device.loss = [0.0];
            device.begin_pass(program, 0, &step);
        }
        while (0..self.devices.len()).filter(|index| self.advance(*index, &step)).count() > 0 {}
        let results: Vec<_> = self
            .devices
            .iter_mut()
            .map(|device| {
                let passes = device.schedule.passes.len();
                assert_eq!(device.position.pass, passes, "{:?} waits", device.coordinates);
                let stage = &program.stages[device.coordinates.stage as usize];
                let bytes = range_of(stage.buffer(stage.square_sum()));
                let squares = decode(&device.arena.as_mut_slice()[bytes], DType::F32)[0];
                (device.coordinates, device.loss[0], squares)
            })
            .collect();
        let steps = results.into_iter().zip(&self.devices).map(|((at, loss, squares), device)| {
            DeviceStep {
                coordinates: at,
                loss,
                gradient_square_sum: squares,
                report: &device.report,
            }
        });
        Ok(LocalStepResult::from_devices(program, steps))
    }

    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        let arena = self.devices[device as usize].arena.as_slice();
        Ok(decode(&arena[range_of(buffer)], buffer.extent.dtype).into())
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        let bytes = &mut self.devices[device as usize].arena.as_mut_slice()[range_of(buffer)];
        let mut elements = decode(bytes, buffer.extent.dtype);
        change(&mut elements);
        bytes.copy_from_slice(&encode(&elements, buffer.extent.dtype));
        Ok(())
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        self.devices.iter().map(|device| device.arena.as_slice().len() as u64).collect()
    }

    fn scratch_bytes(&self) -> Vec<u64> {
        self.devices.iter().map(|device| device.schedule.scratch_bytes).collect()
    }

    fn record_instruction_spans(&mut self) {}

    fn instruction_spans(&self, _: u64) -> &[InstructionSpan] {
        &[]
    }
}

/// Whether a buffer is a weight, a gradient or a moment, which are zero at the beginning of a session.
fn is_state(buffer: &Buffer) -> bool {
    buffer.role.is_parameter()
}

fn range_of(buffer: &Buffer) -> Range<usize> {
    let begin = buffer.offset as usize;
    begin..begin + buffer.extent.bytes().0 as usize
}

fn launch_context<'a>(
    program: &'a Program,
    coordinates: MeshCoordinates,
    model_program: &'a ModelProgram,
) -> LaunchContext<'a> {
    LaunchContext {
        context: &program.context,
        constants: &program.constants,
        stage: &program.stages[coordinates.stage as usize],
        coordinates,
        update_groups: model_program.update_groups(coordinates.stage as usize),
        multiprocessors: MULTIPROCESSORS,
    }
}
