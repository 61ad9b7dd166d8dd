//! Trains on GPUs and on processors alike.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use narrows_cluster::{Address, ClusterTimeouts, LaunchInfo, Launcher, RunFact, TcpProcessGroup};
use narrows_cuda::GpuOptions;
use narrows_plan::lower::lower;
use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Plan};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::{NamedTensors, Session, StepInput, TensorKind};
use narrows_runtime::{Optimizer, RunError, StepReport};

use super::devices;

/// Steps of a training: the first goes launch by launch, the second is captured, the third replayed.
const STEPS: u64 = 3;

/// What a training leaves.
#[derive(Debug, PartialEq)]
pub struct Trained {
    pub losses: Vec<f64>,
    pub reports: Vec<StepReport>,
    /// Weights and moments, on the first device.
    pub tensors: Vec<NamedTensors>,
}

pub fn program(plan: &Plan, model: &Model) -> CheckedProgram {
    CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap()
}

pub fn tokens(plan: &Plan, step: u64, vocab: u64) -> Vec<u32> {
    let work = plan.workload;
    let count = work.global_batch * work.sequence_length;
    (0..count).map(|at| ((at * 7 + step * 13) % vocab) as u32).collect()
}

/// Where kernels and algorithms are kept: beside each other, for all tests of a child.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-{}", std::process::id()))
}

pub fn options(folder: &Path, ordinal: u64, eager: bool) -> GpuOptions {
    let (cubins, algorithms) = (folder.join("cubins"), folder.join("algorithms"));
    let deadline = Duration::from_secs(600);
    GpuOptions { ordinal, eager, cubins, algorithms, deadline }
}

/// A few steps from the same weights.
pub fn train(session: &mut Session, model: &Model, plan: &Plan) -> Trained {
    session.initialise(model, 3).unwrap();
    let optimizer = Optimizer { clip_norm: 0.1, ..Optimizer::new(1e-3, 1, 10) };
    let (mut losses, mut reports) = (vec![], vec![]);
    for step in 0..STEPS {
        let (tokens, targets) =
            (tokens(plan, step, model.vocab), tokens(plan, step + 1, model.vocab));
        let input = StepInput { tokens: &tokens, targets: &targets };
        let done = session.step(&optimizer, input).unwrap_or_else(|error| panic!("{error}"));
        losses.push(done.loss);
        reports.push(done.report);
    }
    let kinds = [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments];
    let tensors = kinds.map(|kind| session.gather_tensors(kind).unwrap()).into();
    Trained { losses, reports, tensors }
}

pub fn launches(world: u64) -> Vec<LaunchInfo> {
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let meeting = Address { host: "127.0.0.1".into(), port };
    let launch = |rank| {
        let (launcher, meeting) = (Launcher::Torchrun, meeting.clone());
        LaunchInfo {
            launcher,
            rank,
            world_size: world,
            local_rank: rank,
            local_world_size: world,
            rendezvous: meeting,
        }
    };
    (0..world).map(launch).collect()
}

/// Lets a thread for each device of a plan do something with a session on a GPU of its own.
pub fn each<T: Send>(
    (model, plan): (&Model, &Plan),
    deadline: Duration,
    options: impl Fn(u64) -> GpuOptions + Sync,
    work: impl Fn(Result<Session, RunError>, u64) -> T + Sync,
) -> Vec<T> {
    let (options, work) = (&options, &work);
    let devices = plan.mesh.devices();
    let deadlines = ClusterTimeouts { join: Duration::from_secs(60), collective: deadline };
    let warn = |warning: &str| panic!("{warning}");
    std::thread::scope(|scope| {
        let device = |launch: LaunchInfo| {
            move || {
                let program = program(plan, model);
                let rank = launch.rank;
                let cluster = (devices > 1).then(|| {
                    let facts = vec![RunFact { name: "plan".into(), value: "same".into() }];
                    let neighbours = Session::peers(program.program(), rank);
                    Arc::new(TcpProcessGroup::join(&launch, facts, &neighbours, deadlines).unwrap())
                });
                let options = options(rank);
                let mut warn = warn;
                let group = cluster.clone().map(|cluster| cluster as Arc<dyn ProcessGroup>);
                let made = narrows_cuda::session(model, program, &options, group, &mut warn);
                let done = work(made, rank);
                if let Some(cluster) = cluster {
                    // After a failure the others may be gone.
                    let _ = cluster.shut_down();
                }
                done
            }
        };
        let threads: Vec<_> =
            launches(devices).into_iter().map(|launch| scope.spawn(device(launch))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Trains on a GPU for each device.
pub fn on_gpus(model: &Model, plan: &Plan, eager: bool, folder: &Path) -> Vec<Trained> {
    each(
        (model, plan),
        Duration::from_secs(120),
        |rank| options(folder, devices::ordinal(rank), eager),
        |session, _| {
            let mut session = session.unwrap_or_else(|error| panic!("{error}"));
            let arena: Vec<u64> = session.allocated_bytes();
            let stage = narrows_runtime::DeviceId(session.devices().start).stage(&plan.mesh);
            assert_eq!(arena, [session.program().stages[stage].arena.0]);
            train(&mut session, model, plan)
        },
    )
}
