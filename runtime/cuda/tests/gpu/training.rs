//! Training on GPUs and on the CPU alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use narrows_cluster::{
    Address, ClusterTimeouts, JobToken, LaunchInfo, Launcher, RunFact, TcpProcessGroup,
};
use narrows_cuda::{AttentionKernels, GpuOptions};
use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Plan, lower};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::{ModelTensors, Session, StepInput, TensorKind};
use narrows_runtime::{Optimizer, RunError, StepReport};
use narrows_test_support::free_port;

use super::device_choice;

/// Steps of a training run: the first uses single launches, the second captures graphs, the third replays them.
const STEPS: u64 = 3;

/// Results of a training run.
#[derive(Debug, PartialEq)]
pub struct Trained {
    pub losses: Vec<f64>,
    pub reports: Vec<StepReport>,
    /// Weights and both moments, on the first device.
    pub tensors: Vec<ModelTensors>,
}

pub fn program(plan: &Plan, model: &Model) -> CheckedProgram {
    CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap()
}

pub fn tokens(plan: &Plan, step: u64, vocab: u64) -> Vec<u32> {
    let work = plan.workload;
    let count = work.global_batch * work.sequence_length;
    (0..count).map(|at| ((at * 7 + step * 13) % vocab) as u32).collect()
}

/// Folder of cubins and algorithms of this process.
pub fn cache_folder() -> PathBuf {
    // The program may run on another machine than the one that built it.
    let built = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = if built.is_dir() { built.to_owned() } else { std::env::temp_dir() };
    folder.join(format!("gpu-{}", std::process::id()))
}

pub fn options(folder: &Path, ordinal: u64, eager: bool) -> GpuOptions {
    GpuOptions {
        ordinal,
        eager,
        attention: AttentionKernels::Fastest,
        cubin_folder: folder.join("cubins"),
        algorithm_folder: folder.join("algorithms"),
        timeout: Duration::from_secs(600),
    }
}

/// Trains for a few steps from fixed weights, with an evaluation directly after the first.
pub fn train(session: &mut Session, model: &Model, plan: &Plan) -> Trained {
    session.initialise(model, 3).unwrap();
    let optimizer = Optimizer { clip_norm: 0.1, ..Optimizer::new(1e-3, 1, 10) };
    let (mut losses, mut reports) = (vec![], vec![]);
    for step in 0..STEPS {
        let (tokens, targets) =
            (tokens(plan, step, model.vocab), tokens(plan, step + 1, model.vocab));
        let input = StepInput { tokens: &tokens, targets: &targets };
        let result = session.step(&optimizer, input).unwrap_or_else(|error| panic!("{error}"));
        losses.push(result.loss);
        reports.push(result.report);
        if step == 0 {
            losses.push(session.evaluate(input).unwrap_or_else(|error| panic!("{error}")).loss);
        }
    }
    let kinds = [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments];
    let tensors = kinds.map(|kind| session.gather_tensors(kind).unwrap()).into();
    Trained { losses, reports, tensors }
}

fn launches(world: u64) -> Vec<LaunchInfo> {
    let rendezvous = Address { host: "127.0.0.1".into(), port: free_port() };
    let launch = |rank| {
        let (launcher, rendezvous) = (Launcher::Torchrun, rendezvous.clone());
        LaunchInfo {
            launcher,
            rank,
            world_size: world,
            local_rank: rank,
            local_world_size: world,
            rendezvous,
            job: JobToken::new("a job"),
        }
    };
    (0..world).map(launch).collect()
}

/// Runs `work` in a thread per device of a plan, with a session on a GPU of its own.
pub fn on_each_device<T: Send>(
    (model, plan): (&Model, &Plan),
    timeout: Duration,
    options: impl Fn(u64) -> GpuOptions + Sync,
    work: impl Fn(Result<Session, RunError>, u64) -> T + Sync,
) -> Vec<T> {
    let (options, work) = (&options, &work);
    let devices = plan.mesh.devices();
    let timeouts = ClusterTimeouts { join: Duration::from_secs(60), collective: timeout };
    let warn = |warning: &str| panic!("{warning}");
    std::thread::scope(|scope| {
        let device = |launch: LaunchInfo| {
            move || {
                let program = program(plan, model);
                let rank = launch.rank;
                let cluster = (devices > 1).then(|| {
                    let facts = vec![RunFact { name: "plan".into(), value: "same".into() }];
                    let peers = Session::peers(program.program(), rank);
                    Arc::new(TcpProcessGroup::join(&launch, facts, &peers, timeouts).unwrap())
                });
                let options = options(rank);
                let mut warn = warn;
                let group = cluster.clone().map(|cluster| cluster as Arc<dyn ProcessGroup>);
                let session = narrows_cuda::session(model, program, &options, group, &mut warn);
                let result = work(session, rank);
                if let Some(cluster) = cluster {
                    // After a failure the other processes may have left.
                    let _ = cluster.shut_down();
                }
                result
            }
        };
        let threads: Vec<_> =
            launches(devices).into_iter().map(|launch| scope.spawn(device(launch))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Trains on a GPU per device.
pub fn train_on_gpus(model: &Model, plan: &Plan, eager: bool, folder: &Path) -> Vec<Trained> {
    on_each_device(
        (model, plan),
        Duration::from_secs(120),
        |rank| options(folder, device_choice::ordinal(rank), eager),
        |session, _| {
            let mut session = session.unwrap_or_else(|error| panic!("{error}"));
            let arena: Vec<u64> = session.allocated_bytes();
            let stage = narrows_runtime::DeviceId(session.devices().start).stage(&plan.mesh);
            assert_eq!(arena, [session.program().stages[stage].arena.0]);
            train(&mut session, model, plan)
        },
    )
}
