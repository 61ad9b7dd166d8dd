//! Tests of the placement of tensors, from the memory of the devices and not from their program.
//! Arenas are filled with NaN, and tensors are loaded whose elements are their own indices: the
//! elements of an arena that are then not NaN are those that the device holds.

mod overlap;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use narrows_plan::model::{ParameterId, WeightId};
use narrows_plan::program::{Buffer, BufferRole, Program, StageProgram};
use narrows_plan::{CheckedProgram, Context, Mesh, Precision, WeightSplit, Workload, Zero, lower};
use narrows_reference::Miniature;
use narrows_runtime::session::{
    Engine, LocalStepResult, MeshCoordinates, ModelProgram, ModelTensors, Session, StepInput,
    StepRequest, TensorKind,
};
use narrows_runtime::{InstructionSpan, LogicalParameter, RunError, logical_parameters};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};

use super::{CpuEngine, element_range};

const TENSORS: [TensorKind; 4] = [
    TensorKind::Weights,
    TensorKind::Gradients,
    TensorKind::FirstMoments,
    TensorKind::SecondMoments,
];

/// Miniatures of random plans, of every kind of model on meshes of every kind.
fn miniatures(seed: u64, count: usize) -> Vec<Miniature> {
    let (models, mut rng) = (drawable_models(), TestRng::new(seed));
    let mut miniatures = vec![];
    while miniatures.len() < count {
        let model = rng.pick(&models).unwrap().clone();
        let mesh = Mesh {
            tensor: [1, 2, 4, 8][rng.below(4)],
            pipeline: 1 + rng.below(3) as u64,
            data: 1 + rng.below(2) as u64,
            context: [1, 1, 2][rng.below(3)],
        };
        let micro_batch = [1, 2, 4][rng.below(3)];
        let workload =
            Workload { global_batch: 2 * micro_batch * mesh.data, sequence_length: 8, micro_batch };
        let zero = [Zero::Off, Zero::One][rng.below(2)];
        let context = Context::new(mesh, workload, Precision::Fp32, zero);
        if let Some(plan) = draw_plan(&mut rng, &model, context) {
            let miniature = Miniature::new(&plan, &model);
            miniatures.push(miniature.unwrap_or_else(|defects| panic!("{defects}")));
        }
    }
    miniatures
}

/// The engine of a session, shared with the test, which reads and writes the arenas.
#[derive(Clone)]
struct SharedEngine(Arc<Mutex<CpuEngine>>);

impl SharedEngine {
    /// Calls `access` with all elements of a device's arena.
    fn with_arena<R>(&self, device: u64, access: impl FnOnce(&mut [f32]) -> R) -> R {
        let mut engine = self.0.lock().unwrap();
        let arena = engine.arena_mut(device).unwrap();
        let elements = (arena.bytes() / 4) as usize;
        access(arena.slice_mut(0..elements))
    }
}

impl Engine for SharedEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn devices(&self) -> Range<u64> {
        self.0.lock().unwrap().devices()
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
        modify: &mut dyn FnMut(&mut [f32]),
    ) -> Result<(), RunError> {
        self.0.lock().unwrap().modify_buffer(device, buffer, modify)
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

fn session(miniature: &Miniature) -> (Session, SharedEngine) {
    let resolved = miniature.plan.resolve(&miniature.model).unwrap();
    let program = CheckedProgram::check(lower(&resolved)).unwrap();
    let model_program = Arc::new(ModelProgram::new(&miniature.model, program).unwrap());
    let engine = CpuEngine::in_memory(model_program.clone(), super::CpuOptions::new(1)).unwrap();
    let engine = SharedEngine(Arc::new(Mutex::new(engine)));
    (Session::new(model_program, Box::new(engine.clone()), None), engine)
}

fn fill_with_nan(engine: &SharedEngine) {
    for device in engine.devices() {
        engine.with_arena(device, |arena| arena.fill(f32::NAN));
    }
}

/// The elements of each device's arena that are not NaN, with their indices.
fn elements(engine: &SharedEngine) -> Vec<Vec<(usize, f32)>> {
    let devices = engine.devices();
    devices
        .map(|device| {
            engine.with_arena(device, |arena| {
                let all = arena.iter().copied().enumerate();
                all.filter(|(_, element)| !element.is_nan()).collect()
            })
        })
        .collect()
}

/// Indices of the elements of a parameter that a layout gives to a device of the tensor axis.
fn shard(
    parameter: &LogicalParameter,
    split: WeightSplit,
    device: u64,
    devices: u64,
) -> BTreeSet<u64> {
    let range = |size: u64, is_split: bool| {
        if !is_split {
            return 0..size;
        }
        assert!(size.is_multiple_of(devices), "{} does not divide", parameter.id);
        size / devices * device..size / devices * (device + 1)
    };
    let rows = range(parameter.rows, split == WeightSplit::Rows);
    let columns = range(parameter.columns, split == WeightSplit::Columns);
    rows.flat_map(|row| columns.clone().map(move |column| row * parameter.columns + column))
        .collect()
}

/// Layouts of a parameter on a stage, one for each buffer that holds it.
fn layouts(stage: &StageProgram, program: &Program, parameter: ParameterId) -> Vec<WeightSplit> {
    let weights = stage.buffers.iter().filter(|buffer| buffer.role == BufferRole::Weight);
    let layout = |buffer: &Buffer| {
        let shard = buffer.shard.as_ref()?;
        shard.members.iter().find_map(|member| {
            // A tied head is the transpose of the embedding.
            let (weight, split) =
                match (program.tied && member.weight == WeightId::Head, shard.split) {
                    (true, WeightSplit::Rows) => (WeightId::Embedding, WeightSplit::Columns),
                    (true, WeightSplit::Columns) => (WeightId::Embedding, WeightSplit::Rows),
                    (true, WeightSplit::Whole) => (WeightId::Embedding, WeightSplit::Whole),
                    (false, split) => (member.weight, split),
                };
            (parameter == ParameterId { block: shard.block, weight }).then_some(split)
        })
    };
    weights.filter_map(layout).collect()
}

/// Whole tensors whose elements are their own indices, counted through all tensors, and the first index
/// of each.
fn indexed_tensors(parameters: &[LogicalParameter]) -> (ModelTensors, Vec<u64>) {
    let mut next = 0;
    let mut first_indices = vec![];
    let mut whole = ModelTensors::new();
    for parameter in parameters {
        let end = next + parameter.elements();
        whole.insert(parameter.id, (next..end).map(|n| n as f32).collect());
        first_indices.push(next);
        next = end;
    }
    assert!(next < 1 << 24, "f32 cannot represent all indices");
    (whole, first_indices)
}

#[test]
fn a_device_holds_its_shard_of_every_tensor_and_nothing_else() {
    for miniature in miniatures(41, 24) {
        let (mut session, engine) = session(&miniature);
        let mesh = miniature.plan.mesh;
        let parameters = logical_parameters(&miniature.model);
        let (whole, first_indices) = indexed_tensors(&parameters);
        for tensors in TENSORS {
            let case = || format!("{tensors:?} of {}", to_json(&miniature.plan));
            fill_with_nan(&engine);
            session.load_tensors(tensors, &whole).unwrap();
            let program = session.program();
            let zero = mesh.replicas() > 1 && program.context.zero == Zero::One;
            // With ZeRO-1, each data-parallel replica holds a part of its tensor shard.
            let replicas_hold_parts = zero && tensors != TensorKind::Weights;
            let (mut elements_held, mut parts, mut shards) = (0, BTreeSet::new(), BTreeSet::new());
            for (device, elements) in elements(&engine).iter().enumerate() {
                let coordinates = MeshCoordinates::of_device(device as u64, &mesh);
                let stage = &program.stages[coordinates.stage as usize];
                let mut expected = BTreeSet::new();
                for (parameter, first) in parameters.iter().zip(&first_indices) {
                    let layouts = layouts(stage, program, parameter.id);
                    assert!(layouts.len() <= 1, "{} twice: {}", parameter.id, case());
                    for split in layouts {
                        let shard = shard(parameter, split, coordinates.tensor, mesh.tensor);
                        expected.extend(shard.into_iter().map(|element| first + element));
                    }
                }
                let actual: BTreeSet<u64> = elements.iter().map(|(_, n)| *n as u64).collect();
                assert_eq!(actual.len(), elements.len(), "twice on device {device}: {}", case());
                assert!(replicas_hold_parts || actual == expected, "device {device}: {}", case());
                assert!(actual.is_subset(&expected), "device {device}: {}", case());
                elements_held += actual.len();
                parts.extend(actual.iter().map(|n| (coordinates.tensor, coordinates.stage, *n)));
                shards.extend(expected.iter().map(|n| (coordinates.tensor, coordinates.stage, *n)));
            }
            // The parts of all replicas are the shard, without overlap.
            assert!(parts == shards, "elements on no replica: {}", case());
            let overlap = replicas_hold_parts && parts.len() != elements_held;
            assert!(!overlap, "elements on two replicas: {}", case());
            let present: BTreeSet<u64> = parts.iter().map(|(_, _, n)| *n).collect();
            let all: u64 = parameters.iter().map(LogicalParameter::elements).sum();
            assert_eq!(present.len() as u64, all, "elements on no device: {}", case());
        }
    }
}

#[test]
fn the_tensors_fill_the_resident_buffers() {
    for miniature in miniatures(43, 12) {
        let (mut session, engine) = session(&miniature);
        let whole: ModelTensors = logical_parameters(&miniature.model)
            .into_iter()
            .map(|parameter| (parameter.id, vec![1.0; parameter.elements() as usize]))
            .collect();
        for tensors in TENSORS {
            fill_with_nan(&engine);
            session.load_tensors(tensors, &whole).unwrap();
            let mesh = miniature.plan.mesh;
            for (device, elements) in elements(&engine).into_iter().enumerate() {
                let coordinates = MeshCoordinates::of_device(device as u64, &mesh);
                let program = session.program();
                let stage = &program.stages[coordinates.stage as usize];
                let resident: BTreeSet<usize> =
                    tensors.master_buffers(stage).flat_map(element_range).collect();
                let outside = elements.iter().find(|(index, _)| !resident.contains(index));
                assert_eq!(outside, None, "{tensors:?} of {}", to_json(&miniature.plan));
                // With ZeRO-1, buffers may end in padding, so that replicas have equal parts.
                if program.context.zero == Zero::Off {
                    assert_eq!(elements.len(), resident.len(), "{}", to_json(&miniature.plan));
                }
            }
        }
    }
}

/// A step depends on weights, moments and tokens only: other contents of memory are not read.
#[test]
fn uninitialised_memory_is_not_read() {
    for miniature in miniatures(47, 12) {
        let Miniature { plan, model, .. } = &miniature;
        let count = plan.workload.global_batch * plan.workload.sequence_length;
        let tokens: Vec<u32> = (0..count).map(|n| (n * 5 % model.vocab) as u32).collect();
        let input = StepInput { tokens: &tokens, targets: &tokens };
        let run = |nan: bool| {
            let (mut session, engine) = session(&miniature);
            if nan {
                fill_with_nan(&engine);
            }
            session.initialise(model, 3).unwrap();
            let result = session.compute_gradients(input).unwrap();
            (result.loss, session.local_tensors(TensorKind::Gradients).unwrap())
        };
        assert_eq!(run(true), run(false), "{}", to_json(plan));
    }
}
