//! Sharded means sharded: what each device holds is found in its memory, not in what the program
//! says of it. Arenas are filled with NaN, one whole tensor is loaded whose elements are their own
//! numbers, and what is then a number anywhere is what that device holds of that tensor.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use narrows_plan::emit::WeightSplit;
use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::program::{Buffer, Program, Region, StageProgram};
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{CheckedProgram, Precision};
use narrows_reference::Miniature;
use narrows_runtime::InstructionSpan;
use narrows_runtime::RunError;
use narrows_runtime::session::{
    Engine, LocalStepResult, MeshCoordinates, ModelProgram, NamedTensors, Session, StepInput,
    StepRequest, TensorKind,
};
use narrows_runtime::{LogicalParameter, logical_name, logical_parameters};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};

use super::links::DeviceLinks;
use super::processors::{CpuEngine, numbers_of};

const TENSORS: [TensorKind; 4] = [
    TensorKind::Weights,
    TensorKind::Gradients,
    TensorKind::FirstMoments,
    TensorKind::SecondMoments,
];

/// Twins of drawn plans of every kind of model, on every mesh.
fn twins(seed: u64, count: usize) -> Vec<Miniature> {
    let (models, mut dice) = (drawable_models(), TestRng(seed));
    let mut made = vec![];
    while made.len() < count {
        let model = dice.pick(&models).unwrap().clone();
        let mesh = Mesh {
            tensor: [1, 2, 4, 8][dice.below(4)],
            pipeline: 1 + dice.below(3) as u64,
            data: 1 + dice.below(2) as u64,
        };
        let micro_batch = [1, 2, 4][dice.below(3)];
        let workload =
            Workload { global_batch: 2 * micro_batch * mesh.data, sequence_length: 8, micro_batch };
        let zero = [Zero::Off, Zero::One][dice.below(2)];
        let context = Context { mesh, workload, precision: Precision::Full32, zero };
        if let Some(plan) = draw_plan(&mut dice, &model, context) {
            made.push(Miniature::new(&plan, &model).unwrap_or_else(|defects| panic!("{defects}")));
        }
    }
    made
}

/// The devices of a session, whose memory the test looks into.
#[derive(Clone)]
struct Inspected(Arc<Mutex<CpuEngine>>);

impl Inspected {
    fn devices(&self) -> Range<u64> {
        self.0.lock().unwrap().devices.clone()
    }

    /// All elements of a device's arena.
    fn arena<R>(&self, device: u64, look: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut processors = self.0.lock().unwrap();
        let arena = &mut processors.arenas[device as usize];
        let elements = (arena.bytes() / 4) as usize;
        look(arena.slice_mut(0..elements))
    }
}

impl Engine for Inspected {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn devices(&self) -> Range<u64> {
        Inspected::devices(self)
    }

    fn run_step(&mut self, step: StepRequest) -> Result<LocalStepResult, RunError> {
        self.0.lock().unwrap().run_step(step)
    }

    fn read_buffer(&self, device: u64, buffer: &Buffer) -> Result<Cow<'_, [f32]>, RunError> {
        Ok(self.0.lock().unwrap().read_buffer(device, buffer)?.into_owned().into())
    }

    fn modify_buffer(
        &mut self,
        device: u64,
        buffer: &Buffer,
        change: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        self.0.lock().unwrap().modify_buffer(device, buffer, change)
    }

    fn allocated_bytes(&self) -> Vec<u64> {
        self.0.lock().unwrap().allocated_bytes()
    }

    fn scratch_bytes(&self) -> Vec<u64> {
        self.0.lock().unwrap().scratch_bytes()
    }

    fn record_instruction_spans(&mut self) {}

    fn instruction_spans(&self, _: u64) -> &[InstructionSpan] {
        &[]
    }
}

fn session(twin: &Miniature) -> (Session, Inspected) {
    let program = CheckedProgram::check(lower(&twin.plan.resolve(&twin.model).unwrap())).unwrap();
    let subject = Arc::new(ModelProgram::new(&twin.model, program).unwrap());
    let links = DeviceLinks::in_memory(subject.program());
    let devices = 0..subject.program().context.mesh.devices();
    let processors = CpuEngine::new(subject.clone(), 1, (devices, links)).unwrap();
    let inspected = Inspected(Arc::new(Mutex::new(processors)));
    (Session::new(subject, Box::new(inspected.clone()), None), inspected)
}

fn poison(inspected: &Inspected) {
    for device in inspected.devices() {
        inspected.arena(device, |arena| arena.fill(f32::NAN));
    }
}

/// The numbers in each device's memory, by their place.
fn numbers(inspected: &Inspected) -> Vec<Vec<(usize, f32)>> {
    let devices = inspected.devices();
    devices
        .map(|device| {
            inspected.arena(device, |arena| {
                let all = arena.iter().copied().enumerate();
                all.filter(|(_, number)| !number.is_nan()).collect()
            })
        })
        .collect()
}

/// The elements of a parameter that the layout of a buffer gives to a device of the tensor axis.
fn share(parameter: &LogicalParameter, split: WeightSplit, at: u64, devices: u64) -> BTreeSet<u64> {
    let part = |size: u64, is_split: bool| match is_split {
        true => {
            assert!(size.is_multiple_of(devices), "{} does not divide", parameter.name);
            size / devices * at..size / devices * (at + 1)
        }
        false => 0..size,
    };
    let rows = part(parameter.rows, split == WeightSplit::Rows);
    let columns = part(parameter.columns, split == WeightSplit::Columns);
    rows.flat_map(|row| columns.clone().map(move |column| row * parameter.columns + column))
        .collect()
}

/// How a stage lays out a parameter, once for every buffer that holds it.
fn layouts(stage: &StageProgram, program: &Program, name: &str) -> Vec<WeightSplit> {
    let weights = stage.buffers.iter().filter(|buffer| buffer.region == Region::Weight);
    let held = |buffer: &Buffer| {
        let shard = buffer.shard.as_ref()?;
        shard.members.iter().find_map(|(member, _, _)| {
            // A tied head is the embedding's transpose.
            let (found, split) = match (program.tied && member == "head", shard.split) {
                (true, WeightSplit::Rows) => ("embedding".to_owned(), WeightSplit::Columns),
                (true, WeightSplit::Columns) => ("embedding".to_owned(), WeightSplit::Rows),
                (true, WeightSplit::Whole) => ("embedding".to_owned(), WeightSplit::Whole),
                (false, split) => (logical_name(&buffer.name, member), split),
            };
            (found == name).then_some(split)
        })
    };
    weights.filter_map(held).collect()
}

/// Whole tensors whose elements are their own numbers, counted through all of them, and the first
/// number of each.
fn numbered(parameters: &[LogicalParameter]) -> (NamedTensors, Vec<u64>) {
    let mut next = 0;
    let mut firsts = vec![];
    let mut whole = NamedTensors::new();
    for parameter in parameters {
        let end = next + parameter.elements();
        whole.insert(parameter.name.clone(), (next..end).map(|n| n as f32).collect());
        firsts.push(next);
        next = end;
    }
    assert!(next < 1 << 24, "single precision counts no further");
    (whole, firsts)
}

#[test]
fn a_device_holds_its_share_of_every_tensor_and_no_more() {
    for twin in twins(41, 24) {
        let (mut session, inspected) = session(&twin);
        let mesh = twin.plan.mesh;
        let parameters = logical_parameters(&twin.model);
        let (whole, firsts) = numbered(&parameters);
        for tensors in TENSORS {
            let what = || format!("{tensors:?} of {}", to_json(&twin.plan));
            poison(&inspected);
            session.load_tensors(tensors, &whole).unwrap();
            let held_by_devices = numbers(&inspected);
            let program = session.program();
            let parted = mesh.data > 1 && program.context.zero == Zero::One;
            let parted = parted && tensors != TensorKind::Weights;
            let (mut held_by_all, mut parts, mut shares) = (0, BTreeSet::new(), BTreeSet::new());
            for (device, held) in held_by_devices.iter().enumerate() {
                let at = MeshCoordinates::of_device(device as u64, &mesh);
                let stage = &program.stages[at.stage as usize];
                let mut expected = BTreeSet::new();
                for (parameter, first) in parameters.iter().zip(&firsts) {
                    let layouts = layouts(stage, program, &parameter.name);
                    assert!(layouts.len() <= 1, "{} twice: {}", parameter.name, what());
                    for split in layouts {
                        let share = share(parameter, split, at.tensor, mesh.tensor);
                        expected.extend(share.into_iter().map(|element| first + element));
                    }
                }
                let found: BTreeSet<u64> = held.iter().map(|(_, n)| *n as u64).collect();
                assert_eq!(found.len(), held.len(), "twice on device {device}: {}", what());
                assert!(parted || found == expected, "device {device}: {}", what());
                assert!(found.is_subset(&expected), "device {device}: {}", what());
                held_by_all += found.len();
                parts.extend(found.iter().map(|n| (at.tensor, at.stage, *n)));
                shares.extend(expected.iter().map(|n| (at.tensor, at.stage, *n)));
            }
            // One replica's part of the share; together they are all of it, each once.
            assert!(parts == shares, "held by none: {}", what());
            assert!(!parted || parts.len() == held_by_all, "held by two: {}", what());
            let found: BTreeSet<u64> = parts.iter().map(|(_, _, n)| *n).collect();
            let all: u64 = parameters.iter().map(LogicalParameter::elements).sum();
            assert_eq!(found.len() as u64, all, "lost: {}", what());
        }
    }
}

/// All tensors together fill the resident buffers, and nothing beside them.
#[test]
fn resident_memory_is_the_shares_and_nothing_else() {
    for twin in twins(43, 12) {
        let (mut session, inspected) = session(&twin);
        let whole: NamedTensors = logical_parameters(&twin.model)
            .into_iter()
            .map(|parameter| (parameter.name.clone(), vec![1.0; parameter.elements() as usize]))
            .collect();
        for tensors in TENSORS {
            poison(&inspected);
            session.load_tensors(tensors, &whole).unwrap();
            let held_by_devices = numbers(&inspected);
            let mesh = twin.plan.mesh;
            for (device, held) in held_by_devices.into_iter().enumerate() {
                let at = MeshCoordinates::of_device(device as u64, &mesh);
                let program = session.program();
                let stage = &program.stages[at.stage as usize];
                let resident: BTreeSet<usize> =
                    tensors.master_buffers(stage).flat_map(numbers_of).collect();
                let beside = held.iter().find(|(place, _)| !resident.contains(place));
                assert_eq!(beside, None, "{tensors:?} of {}", to_json(&twin.plan));
                // With ZeRO-1 buffers may end in padding, so that replicas have equal parts.
                if program.context.zero == Zero::Off {
                    assert_eq!(held.len(), resident.len(), "{}", to_json(&twin.plan));
                }
            }
        }
    }
}

/// What a step computes follows from weights, states and tokens: whatever else lay in memory, of
/// one's own or of others, is not read.
#[test]
fn nothing_is_read_that_was_not_written() {
    for twin in twins(47, 12) {
        let work = twin.plan.workload;
        let count = work.global_batch * work.sequence_length;
        let tokens: Vec<u32> = (0..count).map(|n| (n * 5 % twin.model.vocab) as u32).collect();
        let input = StepInput { tokens: &tokens, targets: &tokens };
        let run = |poisoned: bool| {
            let (mut session, inspected) = session(&twin);
            if poisoned {
                poison(&inspected);
            }
            session.initialise(&twin.model, 3).unwrap();
            let done = session.compute_gradients(input).unwrap();
            (done.loss, session.local_tensors(TensorKind::Gradients).unwrap())
        };
        assert_eq!(run(true), run(false), "{}", to_json(&twin.plan));
    }
}
