//! All devices of a program on processors: each does what its tape says. Kernels are run by the shim,
//! products are what cublasLtMatmul takes, executed as it is documented, collectives are made in the
//! order of the devices, and what is sent waits in a queue.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use narrows_cuda::launch::{COEFFICIENTS, coefficients, rotary_table};
use narrows_cuda::products::{self, MatmulSetting};
use narrows_cuda::tape::{DeviceSchedule, NcclCollective, NodeWork, ScheduleItem};
use narrows_cuda::{KernelFamily, LaunchContext};
use narrows_plan::kernel::CollectiveKind;
use narrows_plan::model::Model;
use narrows_plan::program::{Action, Buffer, FusedOp, Phase, Program, Reduction};
use narrows_plan::{CheckedProgram, DType};
use narrows_runtime::InstructionSpan;
use narrows_runtime::session::{
    DeviceStep, Engine, LocalStepResult, MeshCoordinates, ModelProgram, StepRequest, TokenRows,
};
use narrows_runtime::{DeviceReport, RunError, Session};

use super::case::Aligned;
use super::matmul::{bytes_of, execute, numbers};
use super::shim::{self, Memories, Order};

struct Machine {
    subject: Arc<ModelProgram>,
    places: Vec<Place>,
    rotary: Vec<f32>,
    /// What was sent and not yet received, by sender and receiver.
    sent: HashMap<(u64, u64), VecDeque<Vec<Vec<u8>>>>,
}

/// A device.
struct Place {
    at: MeshCoordinates,
    arena: Aligned,
    tape: DeviceSchedule,
    /// The turn, its leg and the leg's entry that come next.
    next: [usize; 3],
    loss: [f64; 1],
    report: DeviceReport,
}

/// A session on the machine; `None` where nothing compiles kernels for processors.
///
/// # Panics
/// When an instruction of the program has no kernel.
pub fn session(model: &Model, program: CheckedProgram) -> Option<Session> {
    shim::kernels(KernelFamily::Norm)?;
    let subject = Arc::new(ModelProgram::new(model, program).unwrap_or_else(|e| panic!("{e}")));
    let machine = Machine::new(subject.clone());
    Some(Session::new(subject, Box::new(machine), None))
}

impl Machine {
    fn new(subject: Arc<ModelProgram>) -> Machine {
        let program = subject.program();
        let mesh = program.context.mesh;
        let places = (0..mesh.devices()).map(|device| {
            let at = MeshCoordinates::of_device(device, &mesh);
            let stage = &program.stages[at.stage as usize];
            let device = device_of(program, at, &subject);
            let workspace = products::workspace((9, 0));
            let setting = MatmulSetting { device: &device, tied: program.tied, workspace };
            let tape =
                DeviceSchedule::new(&setting, at.stage).unwrap_or_else(|error| panic!("{error}"));
            // What nobody wrote is not a number.
            let mut arena = Aligned::of(&vec![0xff; stage.arena.0 as usize]);
            for buffer in stage.buffers.iter().filter(|buffer| is_state(buffer)) {
                arena.bytes()[range_of(buffer)].fill(0);
            }
            let report = DeviceReport { allocated: stage.arena, ..DeviceReport::default() };
            Place { at, arena, tape, next: [0; 3], loss: [0.0], report }
        });
        let places = places.collect();
        let head_dim = program.stages[0].forward.iter().find_map(|instr| match &instr.action {
            Action::Fused(FusedOp::Rope { head_dim }) => Some(*head_dim),
            Action::Attention(attention) => Some(attention.head_dim),
            _ => None,
        });
        let positions = program.context.workload.sequence_length;
        let rotary = rotary_table(positions, head_dim.unwrap_or(2), program.constants.rope_theta);
        Machine { subject, places, rotary, sent: HashMap::new() }
    }

    /// Goes on with a device until it must wait for another; whether it did anything.
    fn advance(&mut self, number: usize, step: &StepRequest) -> bool {
        let subject = self.subject.clone();
        let mut moved = false;
        loop {
            let place = &mut self.places[number];
            let [turn_number, leg_number, entry] = place.next;
            let Some(turn) = place.tape.turns.get(turn_number) else { return moved };
            if leg_number == 0 && entry == 0 && turn.phase != Phase::Step {
                place.load(subject.program(), turn_number, step);
            }
            let place = &mut self.places[number];
            let Some(leg) = place.tape.turns[turn_number].legs.get(leg_number).cloned() else {
                place.next = [turn_number + 1, 0, 0];
                moved = true;
                continue;
            };
            let went = match leg {
                ScheduleItem::Transfer(transfer) => {
                    let ahead = transfer.onward == transfer.sends;
                    let other = if ahead { place.at.stage + 1 } else { place.at.stage - 1 };
                    let mesh = &subject.program().context.mesh;
                    let other = MeshCoordinates { stage: other, ..place.at }.device(mesh);
                    self.transfer(number as u64, other, &transfer.operands, transfer.sends)
                }
                ScheduleItem::Piece(piece) => match place.tape.pieces[piece].entries.get(entry) {
                    None => true,
                    Some(found) if matches!(found.work, NodeWork::Joint(_)) => {
                        if !self.join(number) {
                            return moved;
                        }
                        moved = true;
                        continue;
                    }
                    Some(found) => {
                        if step.update.is_some() || !found.updates {
                            place.execute(piece, entry, &mut self.rotary, step);
                        }
                        place.next[2] += 1;
                        moved = true;
                        continue;
                    }
                },
            };
            if !went {
                return moved;
            }
            moved = true;
            self.places[number].next = [turn_number, leg_number + 1, 0];
        }
    }

    fn transfer(&mut self, me: u64, other: u64, operands: &[Range<u64>], sends: bool) -> bool {
        let arena = self.places[me as usize].arena.bytes();
        let of = |range: &Range<u64>| range.start as usize..range.end as usize;
        if sends {
            let bytes = operands.iter().map(|range| arena[of(range)].to_vec()).collect();
            self.sent.entry((me, other)).or_default().push_back(bytes);
            return true;
        }
        let Some(came) = self.sent.entry((other, me)).or_default().pop_front() else {
            return false;
        };
        for (range, bytes) in operands.iter().zip(came) {
            arena[of(range)].copy_from_slice(&bytes);
        }
        true
    }

    /// Makes the collective at which a device waits, once all of its group do.
    fn join(&mut self, number: usize) -> bool {
        let mesh = self.subject.program().context.mesh;
        let first = self.places[number].joint().expect("a collective").clone();
        let at = self.places[number].at;
        let members = at.members(first.sharing.axis, first.sharing.size, &mesh);
        let members: Vec<usize> = members.map(|device| device as usize).collect();
        let joints: Option<Vec<NcclCollective>> =
            members.iter().map(|member| self.places[*member].joint().cloned()).collect();
        let Some(joints) = joints else { return false };
        let alike = |joint: &NcclCollective| {
            (joint.kind, joint.sharing, joint.reduction)
                == (first.kind, first.sharing, first.reduction)
        };
        if !joints.iter().all(alike) {
            return false;
        }
        for port in 0..first.shares.len() {
            let dtype = first.shares[port].dtype;
            let in_place = first.shares[port].in_place();
            let given: Vec<Vec<f32>> = members
                .iter()
                .zip(&joints)
                .map(|(member, joint)| self.places[*member].read(&joint.shares[port].source, dtype))
                .collect();
            for (me, (member, joint)) in members.iter().zip(&joints).enumerate() {
                let made = combined(&first, &given, me, in_place);
                self.places[*member].write(&joint.shares[port].target, dtype, &made);
            }
        }
        for member in members {
            self.places[member].next[2] += 1;
        }
        true
    }
}

/// What a member has afterwards. Sums are made in f32 and rounded once. In place, each has a part of the
/// whole where it lies.
fn combined(joint: &NcclCollective, given: &[Vec<f32>], me: usize, in_place: bool) -> Vec<f32> {
    let count = given[0].len();
    let combine = |a: f32, b: f32| match joint.reduction {
        Reduction::Sum => a + b,
        Reduction::Maximum => a.max(b),
    };
    let sum = |i: usize| given.iter().map(|of| of[i]).reduce(combine).expect("a member");
    let part = count / given.len();
    let mine = me * part..(me + 1) * part;
    match joint.kind {
        CollectiveKind::AllReduce => (0..count).map(sum).collect(),
        CollectiveKind::ReduceScatter if in_place => {
            let mut made = given[me].clone();
            mine.for_each(|i| made[i] = sum(i));
            made
        }
        CollectiveKind::ReduceScatter => mine.map(sum).collect(),
        CollectiveKind::AllGather if in_place => {
            (0..count).map(|i| given[(i / part).min(given.len() - 1)][i]).collect()
        }
        CollectiveKind::AllGather => given.concat(),
        CollectiveKind::AllToAll => given.iter().flat_map(|of| of[mine.clone()].to_vec()).collect(),
    }
}

impl Place {
    /// The collective that comes next, if one does.
    fn joint(&self) -> Option<&NcclCollective> {
        let [turn, leg, entry] = self.next;
        let ScheduleItem::Piece(piece) = self.tape.turns.get(turn)?.legs.get(leg)? else {
            return None;
        };
        match &self.tape.pieces[*piece].entries.get(entry)?.work {
            NodeWork::Joint(joint) => Some(joint),
            _ => None,
        }
    }

    /// Token ids of the rows of this device.
    fn load(&mut self, program: &Program, turn: usize, step: &StepRequest) {
        let (context, at) = (&program.context, self.at);
        let microbatch = self.tape.turns[turn].microbatch;
        for buffer in &program.stages[at.stage as usize].buffers {
            let Some(ids) = step.input_ids(buffer) else { continue };
            let rows = TokenRows::of_device(context, &at, buffer.extent.rows)
                .id_ranges(context, &at, microbatch);
            let mine: Vec<u32> = rows.flat_map(|row| ids[row].to_vec()).collect();
            let bytes: &[u8] = bytemuck::cast_slice(&mine);
            self.arena.bytes()[range_of(buffer)].copy_from_slice(bytes);
        }
    }

    fn execute(&mut self, piece: usize, entry: usize, rotary: &mut [f32], step: &StepRequest) {
        match &self.tape.pieces[piece].entries[entry].work {
            NodeWork::Product(matmul) => execute(self.arena.bytes(), matmul),
            NodeWork::Joint(_) => unreachable!("collectives are made by all members together"),
            NodeWork::Launches(launches) => {
                let mut scratch = Aligned::of(&vec![0xff; self.tape.scratch_bytes as usize]);
                let mut numbers = [f32::NAN; COEFFICIENTS as usize];
                if let Some(update) = step.update {
                    numbers = coefficients(update.optimizer, update.step);
                }
                for launch in launches {
                    let mut memory = Memories {
                        arena: self.arena.bytes(),
                        scratch: scratch.bytes(),
                        rotary,
                        coefficients: &mut numbers,
                        loss: &mut self.loss,
                    };
                    let kernels = shim::kernels(launch.family).expect("a compiler");
                    let done = kernels.run(launch, &mut memory, Order::Ascending);
                    done.unwrap_or_else(|error| panic!("{}: {error}", launch.kernel));
                }
            }
        }
    }

    fn read(&mut self, bytes: &Range<u64>, dtype: DType) -> Vec<f32> {
        numbers(&self.arena.bytes()[bytes.start as usize..bytes.end as usize], dtype)
    }

    fn write(&mut self, bytes: &Range<u64>, dtype: DType, of: &[f32]) {
        let to = &mut self.arena.bytes()[bytes.start as usize..bytes.end as usize];
        to.copy_from_slice(&bytes_of(of, dtype));
    }
}

impl Engine for Machine {
    fn name(&self) -> &'static str {
        "shim"
    }

    fn devices(&self) -> Range<u64> {
        0..self.places.len() as u64
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        for place in &mut self.places {
            (place.next, place.loss) = ([0; 3], [0.0]);
        }
        while (0..self.places.len()).filter(|number| self.advance(*number, &step)).count() > 0 {}
        let subject = self.subject.clone();
        let program = subject.program();
        let left: Vec<_> = self
            .places
            .iter_mut()
            .map(|place| {
                assert_eq!(place.next[0], place.tape.turns.len(), "{:?} waits", place.at);
                let buffers = &program.stages[place.at.stage as usize].buffers;
                let sum = buffers.iter().find(|buffer| buffer.name == "square sum");
                let bytes = range_of(sum.expect("a sum of squares"));
                (place.at, place.loss[0], numbers(&place.arena.bytes()[bytes], DType::F32)[0])
            })
            .collect();
        let left =
            left.into_iter().zip(&self.places).map(|((at, loss, squares), place)| DeviceStep {
                coordinates: at,
                loss,
                gradient_square_sum: squares,
                report: &place.report,
            });
        Ok(LocalStepResult::from_devices(program, left))
    }

    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        let held = self.places[device as usize].arena.held();
        Ok(numbers(&held[range_of(buffer)], buffer.extent.dtype).into())
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        let bytes = &mut self.places[device as usize].arena.bytes()[range_of(buffer)];
        let mut held = numbers(bytes, buffer.extent.dtype);
        change(&mut held);
        bytes.copy_from_slice(&bytes_of(&held, buffer.extent.dtype));
        Ok(())
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        self.places.iter().map(|place| place.arena.held().len() as u64).collect()
    }

    fn scratch_bytes(&self) -> Vec<u64> {
        self.places.iter().map(|place| place.tape.scratch_bytes).collect()
    }

    fn record_instruction_spans(&mut self) {}

    fn instruction_spans(&self, _: u64) -> &[InstructionSpan] {
        &[]
    }
}

/// Weights, gradients and moments: a session begins with zeros there.
fn is_state(buffer: &Buffer) -> bool {
    use narrows_plan::program::Region::{Gradient, Optimizer, Weight};
    matches!(buffer.region, Weight | Gradient | Optimizer)
}

fn range_of(buffer: &Buffer) -> Range<usize> {
    let begin = buffer.offset as usize;
    begin..begin + buffer.extent.bytes().0 as usize
}

fn device_of<'a>(
    program: &'a Program,
    at: MeshCoordinates,
    subject: &'a ModelProgram,
) -> LaunchContext<'a> {
    LaunchContext {
        context: &program.context,
        constants: &program.constants,
        stage: &program.stages[at.stage as usize],
        tensor: at.tensor,
        data: at.data,
        decays: subject.weight_decay_applies(at.stage as usize),
    }
}
