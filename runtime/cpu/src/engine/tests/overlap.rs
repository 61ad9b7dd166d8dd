//! Steps whose collectives run on communication threads compute what the same steps compute in order, however late collectives
//! begin and end. A failure on a communication thread is the failure of the step.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use narrows_plan::model::Model;
use narrows_plan::program::CollectiveFunction;
use narrows_plan::random::SplitMix64;
use narrows_plan::{BucketSplit, DeviceGroup, Plan};
use narrows_runtime::process_group::{
    ClusterError, ClusterFault, CollectiveOperands, CollectiveVolume, Communicator,
};
use narrows_runtime::session::StepResult;
use narrows_runtime::{Optimizer, scheduled_instructions};
use narrows_test_support::plans::{draw_schedule, draw_zero};
use narrows_test_support::small_models::small_models;

use super::super::{CollectiveOrder, CpuOptions};
use super::*;
use crate::communication::CommunicationThread;
use crate::device_links::DeviceLinks;

/// Disturbance of the collectives of a communicator.
#[derive(Clone)]
enum Disturbance {
    /// Sleeps for random times before and after each.
    Delays,
    /// Fails instead of this collective, counted over all devices from 0.
    Fault(Arc<AtomicU64>),
    /// Panics instead of this collective.
    Panic(Arc<AtomicU64>),
}

struct DisturbedCommunicator {
    inner: Box<dyn Communicator>,
    disturbance: Disturbance,
    calls: AtomicU64,
    seed: u64,
}

const FAULT: ClusterFault = ClusterFault::Aborted { rank: 7, reason: String::new() };

impl Communicator for DisturbedCommunicator {
    fn size(&self) -> usize {
        self.inner.size()
    }

    fn run(
        &self,
        operands: CollectiveOperands,
        function: CollectiveFunction,
    ) -> Result<CollectiveVolume, ClusterError> {
        let is_due = |left: &AtomicU64| left.fetch_sub(1, Ordering::Relaxed) == 0;
        match &self.disturbance {
            Disturbance::Delays => {
                let call = self.calls.fetch_add(1, Ordering::Relaxed);
                let mut rng = SplitMix64::new(self.seed ^ call);
                let mut sleep = || match rng.next_u64() % 4 {
                    0 => std::thread::sleep(Duration::from_micros(rng.next_u64() % 700)),
                    1 => std::thread::yield_now(),
                    _ => {}
                };
                sleep();
                let result = self.inner.run(operands, function);
                sleep();
                result
            }
            Disturbance::Fault(left) if is_due(left) => Err(FAULT.into()),
            Disturbance::Panic(left) if is_due(left) => panic!("a panic of a communicator"),
            Disturbance::Fault(_) | Disturbance::Panic(_) => self.inner.run(operands, function),
        }
    }

    fn shift(&self, source: &[f32], target: &mut [f32]) -> Result<(), ClusterError> {
        self.inner.shift(source, target)
    }
}

/// A session of a plan, with its engine.
fn session(
    (model, plan): (&Model, &Plan),
    collective_order: CollectiveOrder,
    disturbance: Option<Disturbance>,
) -> (Session, SharedEngine) {
    let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
    let model_program = Arc::new(ModelProgram::new(model, program).unwrap());
    let mut links = DeviceLinks::in_memory(model_program.program());
    for (device, links) in links.iter_mut().enumerate() {
        links.wrap_communicators(|group: &DeviceGroup, inner| match &disturbance {
            None => inner,
            Some(disturbance) => Box::new(DisturbedCommunicator {
                inner,
                disturbance: disturbance.clone(),
                calls: AtomicU64::new(0),
                seed: (device as u64) << 32 ^ group.size << 16,
            }),
        });
    }
    let options = CpuOptions { collective_order, ..CpuOptions::new(1) };
    let engine = CpuEngine::new(model_program.clone(), options, 0, links).unwrap();
    let engine = SharedEngine(Arc::new(Mutex::new(engine)));
    (Session::new(model_program, Box::new(engine.clone()), None), engine)
}

impl SharedEngine {
    /// Collectives that were handed over to communication threads so far.
    fn handed_over(&self) -> u64 {
        let engine = self.0.lock().unwrap();
        let threads = engine.devices.iter().filter_map(|device| device.communication.as_ref());
        threads.map(CommunicationThread::handed_over).sum()
    }
}

/// A random plan whose collectives overlap.
fn overlapped_plan(rng: &mut TestRng) -> (Model, Plan) {
    let models = small_models();
    loop {
        let model = rng.pick(&models).unwrap().clone();
        let data = [1, 2, 2, 4][rng.below(4)];
        let mesh = Mesh {
            tensor: [1, 2][rng.below(2)],
            pipeline: [1, 1, 2][rng.below(3)],
            data,
            context: 1,
        };
        let global_batch = 2 * data * (1 + rng.below(3) as u64);
        let workload = Workload { global_batch, sequence_length: 8, micro_batch: 2 };
        let (zero, shard_size) = draw_zero(rng, data);
        let splits = [BucketSplit::Whole, BucketSplit::AtAttention, BucketSplit::ByLinear];
        let context = Context {
            shard_size,
            overlap_grad_reduce: true,
            overlap_param_gather: true,
            overlap_tensor_collectives: true,
            last_gradient_bucket: splits[rng.below(3)],
            first_gather_bucket: splits[rng.below(3)],
            ..Context::new(mesh, workload, Precision::Fp32, zero)
        };
        let context = draw_schedule(rng, context);
        if mesh.devices() > 1
            && let Some(plan) = draw_plan(rng, &model, context)
        {
            return (model, plan);
        }
    }
}

fn token_ids((model, plan): (&Model, &Plan), step: u32) -> Vec<u32> {
    let count = plan.workload.global_batch * plan.workload.sequence_length;
    (0..count as u32).map(|id| (id * 7 + step * 5) % model.vocab as u32).collect()
}

type Outcome = (Vec<StepResult>, Vec<f64>, Vec<ModelTensors>);

/// Trains for five steps, and evaluates, reads and changes weights and computes gradients between some of them.
fn train(session: &mut Session, case: (&Model, &Plan)) -> Outcome {
    let optimizer = Optimizer { clip_norm: 0.1, ..Optimizer::new(1e-2, 1, 10) };
    session.initialise(case.0, 3).unwrap();
    let (mut results, mut losses, mut tensors) = (vec![], vec![], vec![]);
    for step in 0..5 {
        let ids = token_ids(case, step);
        let input = StepInput { tokens: &ids, targets: &ids };
        results.push(session.step(&optimizer, input).unwrap());
        match step {
            1 => losses.push(session.evaluate(input).unwrap().loss),
            2 => {
                let mut weights = session.local_tensors(TensorKind::Weights).unwrap();
                weights.values_mut().flatten().for_each(|weight| *weight *= 1.25);
                session.load_tensors(TensorKind::Weights, &weights).unwrap();
            }
            3 => {
                results.push(session.compute_gradients(input).unwrap());
                tensors.push(session.local_tensors(TensorKind::Gradients).unwrap());
                session.clear_gradients().unwrap();
            }
            _ => {}
        }
    }
    tensors.extend(TENSORS.map(|kind| session.local_tensors(kind).unwrap()));
    for result in &mut results {
        result.time_breakdown = Default::default();
        result.scratch_bytes.clear();
    }
    (results, losses, tensors)
}

/// Compares steps with and without communication threads, with delays and without, for random plans.
fn compare(seed: u64, plans: usize) {
    let mut rng = TestRng::new(seed);
    let mut handed_over = 0;
    for _ in 0..plans {
        let (model, plan) = overlapped_plan(&mut rng);
        let case = (&model, &plan);
        let (mut in_order, engine) = session(case, CollectiveOrder::InOrder, None);
        let expected = train(&mut in_order, case);
        assert_eq!(engine.handed_over(), 0);
        for disturbance in [None, Some(Disturbance::Delays)] {
            let (mut session, engine) = session(case, CollectiveOrder::Overlapped, disturbance);
            assert!(train(&mut session, case) == expected, "{}", to_json(&plan));
            handed_over += engine.handed_over();
        }
    }
    assert!(handed_over > 100 * plans as u64, "{handed_over}");
}

#[test]
fn overlapped_collectives_change_no_bit() {
    compare(71, 12);
}

#[test]
#[ignore = "second level: many more plans"]
fn overlapped_collectives_change_no_bit_in_more_plans() {
    compare(72, 16);
}

/// A failed collective of any number ends the step or what reads its weights with the failure. The devices stop, and so do their
/// communication threads when the session is dropped.
#[test]
fn a_failure_on_a_communication_thread_is_reported() {
    let mut rng = TestRng::new(73);
    let mut on_communication_threads = 0;
    for case in 0..24 {
        let (model, plan) = overlapped_plan(&mut rng);
        let (model, plan) = (&model, &plan);
        let left = Arc::new(AtomicU64::new(rng.below(300) as u64));
        let is_panic = case % 4 == 3;
        let disturbance = match is_panic {
            true => Disturbance::Panic(left.clone()),
            false => Disturbance::Fault(left.clone()),
        };
        let (mut session, engine) =
            session((model, plan), CollectiveOrder::Overlapped, Some(disturbance));
        session.initialise(model, 3).unwrap();
        let ids = token_ids((model, plan), 1);
        let input = StepInput { tokens: &ids, targets: &ids };
        let begin = Instant::now();
        let error = (0..200).find_map(|_| {
            let stepped = session.step(&Optimizer::new(1e-2, 1, 10), input).err();
            stepped.or_else(|| session.local_tensors(TensorKind::Weights).err())
        });
        let expected = match is_panic {
            true => RunError::DeviceThreadPanicked,
            false => RunError::Cluster(FAULT.into()),
        };
        assert_eq!(error, Some(expected), "{}", to_json(plan));
        on_communication_threads += u64::from(engine.handed_over() > 0);
        drop((session, engine));
        assert!(begin.elapsed() < Duration::from_secs(30), "{}", to_json(plan));
    }
    assert!(on_communication_threads > 10, "{on_communication_threads}");
}

/// Spans of a step that overlaps are those of its instructions: within the step, and those of one communicator one after
/// the other.
#[test]
fn spans_of_overlapped_collectives_are_recorded() {
    let mut rng = TestRng::new(74);
    let mut beside = 0;
    for _ in 0..10 {
        let (model, plan) = overlapped_plan(&mut rng);
        let case = (&model, &plan);
        let (mut session, engine) =
            session(case, CollectiveOrder::Overlapped, Some(Disturbance::Delays));
        session.initialise(&model, 3).unwrap();
        engine.0.lock().unwrap().record_instruction_spans();
        let ids = token_ids(case, 1);
        let input = StepInput { tokens: &ids, targets: &ids };
        for _ in 0..2 {
            session.step(&Optimizer::new(1e-2, 1, 10), input).unwrap();
        }
        let engine = engine.0.lock().unwrap();
        let mesh = plan.mesh;
        for device in 0..mesh.devices() {
            let spans = engine.instruction_spans(device);
            let stage =
                &session.program().stages[MeshCoordinates::of_device(device, &mesh).stage as usize];
            assert_eq!(spans.len(), scheduled_instructions(stage).count());
            assert!(spans.iter().all(|span| span.start <= span.end && span.end > Duration::ZERO));
            beside += spans.windows(2).filter(|two| two[1].start < two[0].end).count();
        }
    }
    assert!(beside > 50, "{beside}");
}
