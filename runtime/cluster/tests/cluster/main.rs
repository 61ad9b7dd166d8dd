//! Runs of several processes over loopback. Each process is a thread with a process group of its own, and
//! shares only TCP connections with the others. The tests of the command line start real processes.

mod checkpoints;
mod exact_steps;
mod meeting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use narrows_cluster::{
    Address, ClusterError, ClusterFault, ClusterTimeouts, JobToken, LaunchInfo, Launcher, RunFact,
    TcpProcessGroup,
};
use narrows_plan::model::Model;
use narrows_plan::{
    Axis, CheckedProgram, Context, ContextAttention, Mesh, Plan, Precision, Workload, Zero, lower,
};
use narrows_runtime::process_group::{ProcessGroup, gather_and_broadcast};
use narrows_runtime::session::{ModelTensors, Session, StepInput, StepResult, TensorKind};
use narrows_runtime::{Optimizer, PipelineDirection, RunError};
use narrows_test_support::free_port;
use narrows_test_support::plans::{TestRng, draw_plan, to_json};
use narrows_test_support::small_models::small_models;

const TIMEOUTS: ClusterTimeouts =
    ClusterTimeouts { join: Duration::from_secs(60), collective: Duration::from_secs(60) };

fn launches(world_size: u64) -> Vec<LaunchInfo> {
    let rendezvous = Address { host: "127.0.0.1".into(), port: free_port() };
    let launch = |rank| {
        let (launcher, rendezvous) = (Launcher::Torchrun, rendezvous.clone());
        LaunchInfo {
            launcher,
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            rendezvous,
            job: JobToken::new("a job"),
        }
    };
    (0..world_size).map(launch).collect()
}

fn fact(value: &str) -> Vec<RunFact> {
    vec![RunFact { name: "plan".into(), value: value.into() }]
}

/// Runs a process for each launch, and returns the result of each.
fn run_processes<T: Send>(
    launches: &[LaunchInfo],
    process: impl Fn(&LaunchInfo) -> T + Sync,
) -> Vec<T> {
    let process = &process;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            launches.iter().map(|launch| scope.spawn(move || process(launch))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn tokens(plan: &Plan, step: u64, vocab: u64) -> Vec<u32> {
    let workload = plan.workload;
    let count = workload.global_batch * workload.sequence_length;
    (0..count).map(|n| ((n * 7 + step * 13) % vocab) as u32).collect()
}

const KINDS: [TensorKind; 3] =
    [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments];

/// Runs three steps. Returns the result of each, and all tensors after them.
fn train(
    session: &mut Session,
    model: &Model,
    plan: &Plan,
) -> (Vec<StepResult>, Vec<ModelTensors>) {
    let optimizer = Optimizer { clip_norm: 0.1, ..Optimizer::new(1e-2, 1, 10) };
    train_with(&optimizer, session, model, plan)
}

/// As [`train`], with another optimizer.
fn train_with(
    optimizer: &Optimizer,
    session: &mut Session,
    model: &Model,
    plan: &Plan,
) -> (Vec<StepResult>, Vec<ModelTensors>) {
    session.initialise(model, 3).unwrap();
    let steps = (0..3).map(|step| {
        let tokens = tokens(plan, step, model.vocab);
        let targets = self::tokens(plan, step + 1, model.vocab);
        let result = session.step(optimizer, StepInput { tokens: &tokens, targets: &targets });
        StepResult { time_breakdown: Default::default(), scratch_bytes: vec![], ..result.unwrap() }
    });
    let results = steps.collect();
    (results, KINDS.map(|kind| session.gather_tensors(kind).unwrap()).into())
}

fn program(plan: &Plan, model: &Model) -> CheckedProgram {
    CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap()
}

fn join(
    launch: &LaunchInfo,
    neighbours: &[u64],
    timeouts: ClusterTimeouts,
) -> Arc<TcpProcessGroup> {
    TcpProcessGroup::join(launch, fact("same"), neighbours, timeouts).unwrap().into()
}

#[test]
fn steps_of_processes_equal_steps_of_threads_bit_for_bit() {
    let models = small_models();
    let mut rng = TestRng::new(77);
    let mut plans = 0;
    let mut rings = 0;
    for (tensor, pipeline, data, context) in [
        (2, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (3, 1, 1, 1),
        (1, 3, 1, 1),
        (4, 1, 1, 1),
        (2, 2, 2, 1),
        (2, 3, 1, 1),
        (1, 1, 1, 2),
        (1, 1, 1, 4),
        (2, 1, 2, 2),
    ] {
        for _ in 0..3 {
            let model = rng.pick(&models).unwrap();
            let mesh = Mesh { tensor, pipeline, data, context };
            let workload = Workload { global_batch: 4 * data, sequence_length: 8, micro_batch: 2 };
            let zero = [Zero::Off, Zero::One][rng.below(2)];
            let context = Context::new(mesh, workload, Precision::Fp32, zero);
            let context = Context {
                context_attention: ContextAttention::Ring,
                ..overlapped(context, plans % 2 == 0)
            };
            let Some(plan) = draw_plan(&mut rng, model, context) else { continue };
            plans += 1;
            rings += u32::from(plan.context_attention == ContextAttention::Ring);
            let program = program(&plan, model);
            let mut session = narrows_cpu::session(model, program.clone(), 1).unwrap();
            let expected = train(&mut session, model, &plan);
            let results = run_processes(&launches(mesh.devices()), |launch| {
                let neighbours = Session::peers(program.program(), launch.rank);
                let group = join(launch, &neighbours, TIMEOUTS);
                let (program, process_group) = (program.clone(), group.clone());
                let mut session =
                    narrows_cpu::session_of_process(model, program, 1, process_group).unwrap();
                let result = train(&mut session, model, &plan);
                group.shut_down().unwrap();
                result
            });
            for (rank, (steps, tensors)) in results.into_iter().enumerate() {
                assert_eq!(steps, expected.0, "process {rank} of\n{}", to_json(&plan));
                if rank == 0 {
                    assert_eq!(tensors, expected.1, "of\n{}", to_json(&plan));
                } else {
                    assert!(tensors.iter().all(ModelTensors::is_empty));
                }
            }
        }
    }
    assert!(plans >= 16 && rings >= 4, "{plans}, {rings}");
}

/// Runs one step of two processes, and then `second` on the second process while the first runs another step. Collectives
/// over the tensor axis run in order, those over the data axis on communication threads. Returns the error of
/// that step, and its duration.
fn fail_second_step(
    axis: Axis,
    collective_timeout: Duration,
    second: impl Fn(&mut Session, &Arc<TcpProcessGroup>) + Sync,
) -> (RunError, Duration) {
    let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
    let (tensor, data) = if axis == Axis::Tensor { (2, 1) } else { (1, 2) };
    let mesh = Mesh { tensor, pipeline: 1, data, context: 1 };
    let workload = Workload { global_batch: 2, sequence_length: 8, micro_batch: 2 / data };
    let zero = if axis == Axis::Tensor { Zero::Off } else { Zero::One };
    let context =
        overlapped(Context::new(mesh, workload, Precision::Fp32, zero), axis == Axis::Data);
    let mut rng = TestRng::new(1);
    let plan = (0..100).find_map(|_| draw_plan(&mut rng, &model, context)).unwrap();
    let timeouts = ClusterTimeouts { collective: collective_timeout, ..TIMEOUTS };
    let results = run_processes(&launches(2), |launch| {
        let group = join(launch, &[1 - launch.rank], timeouts);
        let program = program(&plan, &model);
        let mut session =
            narrows_cpu::session_of_process(&model, program, 1, group.clone()).unwrap();
        session.initialise(&model, 1).unwrap();
        let tokens = tokens(&plan, 0, model.vocab);
        let input = StepInput { tokens: &tokens, targets: &tokens };
        let optimizer = Optimizer::new(1e-3, 1, 10);
        session.step(&optimizer, input).unwrap();
        if launch.rank == 1 {
            second(&mut session, &group);
            return None;
        }
        let start = Instant::now();
        let error = session.step(&optimizer, input).unwrap_err();
        drop(session);
        Some((error, start.elapsed()))
    });
    results.into_iter().flatten().next().unwrap()
}

/// The context with overlap of all kinds, or without any.
fn overlapped(context: Context, overlaps: bool) -> Context {
    Context {
        overlap_grad_reduce: overlaps,
        overlap_param_gather: overlaps,
        overlap_tensor_collectives: overlaps,
        ..context
    }
}

/// Axes whose collectives run in order, and on communication threads: see [`fail_second_step`].
const AXES: [Axis; 2] = [Axis::Tensor, Axis::Data];

fn fault(error: RunError) -> (ClusterFault, Vec<String>) {
    match error {
        RunError::Cluster(ClusterError { fault, recent_operations }) => (fault, recent_operations),
        error => panic!("{error}"),
    }
}

#[test]
fn a_lost_connection_is_reported_at_once() {
    for axis in AXES {
        let (error, waited) = fail_second_step(axis, Duration::from_secs(300), |_, _| {});
        let message = error.to_string();
        let (fault, recent_operations) = fault(error);
        assert!(matches!(fault, ClusterFault::Disconnected { rank: 1, .. }), "{message}");
        assert!(waited < Duration::from_secs(60), "{waited:?}");
        let last = recent_operations.last().unwrap();
        let over = format!("over the {} axis", axis.name());
        assert!(last.contains(&over) && last.ends_with("has not ended"), "{message}");
    }
}

#[test]
fn a_stalled_process_is_reported_after_the_timeout() {
    for axis in AXES {
        let timeout = Duration::from_millis(700);
        let (error, waited) = fail_second_step(axis, timeout, |_, _| {
            std::thread::sleep(Duration::from_secs(3));
        });
        let (fault, _) = fault(error);
        assert!(
            matches!(&fault, ClusterFault::Timeout { rank: 1, waited_s, .. } if *waited_s >= 0.7),
            "{fault}"
        );
        assert!(waited >= timeout);
    }
}

#[test]
fn the_reason_of_a_failed_process_is_reported() {
    for axis in AXES {
        let (error, _) = fail_second_step(axis, Duration::from_secs(300), |session, _| {
            let outside = vec![9999; 16];
            let input = StepInput { tokens: &outside, targets: &outside };
            session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err();
        });
        let (fault, _) = fault(error);
        let ClusterFault::Aborted { rank: 1, reason } = &fault else { panic!("{fault}") };
        assert!(reason.contains("token 9999"), "{reason}");
    }
}

/// A process that aborts while another of its threads waits for a process that stalls.
#[test]
fn an_abort_ends_the_waits_of_all_threads() {
    let faults = run_processes(&launches(2), |launch| {
        let group = join(launch, &[1 - launch.rank], TIMEOUTS);
        if launch.rank == 1 {
            std::thread::sleep(Duration::from_secs(3));
            return None;
        }
        let link = group.peer_link(1, PipelineDirection::Upstream).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || link.receive(&mut |_| {}).unwrap_err());
            std::thread::sleep(Duration::from_millis(100));
            let begin = Instant::now();
            group.abort(0, "a full disk");
            let error = waiting.join().unwrap();
            assert!(begin.elapsed() < Duration::from_secs(2));
            Some(error.fault)
        })
    });
    let aborted = ClusterFault::Aborted { rank: 0, reason: "a full disk".into() };
    assert_eq!(faults[0], Some(aborted));
}

#[test]
fn a_process_in_another_collective_is_reported() {
    let timeout = Duration::from_secs(300);
    let (error, _) = fail_second_step(Axis::Tensor, timeout, |session, group| {
        // A new session counts its collectives from 0.
        let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
        let program = CheckedProgram::check(session.program().clone()).unwrap();
        let group = Arc::clone(group);
        let mut new_session = narrows_cpu::session_of_process(&model, program, 1, group).unwrap();
        let tokens = vec![1; 16];
        let input = StepInput { tokens: &tokens, targets: &tokens };
        new_session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err();
    });
    let (fault, _) = fault(error);
    let ClusterFault::OperationMismatch { rank: 1, peer_operation, local_operation } = &fault
    else {
        panic!("{fault}")
    };
    assert!(
        peer_operation.contains(" 0 over the tensor axis") && !local_operation.contains(" 0 over"),
        "{fault}"
    );
}

#[test]
fn processes_with_different_plans_do_not_join() {
    let errors = run_processes(&launches(3), |launch| {
        let plan = if launch.rank == 2 { "other" } else { "same" };
        let result = TcpProcessGroup::join(launch, fact(plan), &[], TIMEOUTS);
        result.err().map(|error| error.fault)
    });
    let mismatch = ClusterFault::RunMismatch {
        rank: 2,
        fact: "plan".into(),
        peer_value: "other".into(),
        rank_0_value: "same".into(),
    };
    assert_eq!(errors[0], Some(mismatch.clone()));
    for error in &errors[1..] {
        let Some(ClusterFault::Aborted { rank: 0, reason }) = error else { panic!("{error:?}") };
        assert_eq!(*reason, mismatch.to_string());
    }
}

#[test]
fn missing_processes_are_reported() {
    let launches = launches(4);
    let timeouts = ClusterTimeouts { join: Duration::from_millis(800), ..TIMEOUTS };
    let errors = run_processes(&launches[..3], |launch| {
        TcpProcessGroup::join(launch, vec![], &[], timeouts)
            .err()
            .map(|error| error.fault.to_string())
    });
    let message = errors[0].as_ref().unwrap();
    assert!(message.starts_with("1 of 4 processes did not join at 127.0.0.1:"), "{message}");
    assert!(message.ends_with("s: 3"), "{message}");
    assert!(errors[1..].iter().flatten().all(|error| error.contains(message)), "{errors:?}");
    // Rank 0 is not running.
    let error = TcpProcessGroup::join(&launches[3], vec![], &[], timeouts).err().unwrap();
    assert!(matches!(error.fault, ClusterFault::Unreachable { rank: 0, .. }), "{error}");
}

#[test]
fn other_connections_do_not_prevent_joining_and_equal_ranks_are_errors() {
    let launches = launches(2);
    let address = launches[0].rendezvous.to_string();
    // Connections that send nothing, or send it slowly, do not block the others.
    let silent: Vec<_> = (0..8).map(|_| address.clone()).collect();
    let silent = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        let streams: Vec<_> = silent.iter().map(std::net::TcpStream::connect).collect();
        std::thread::sleep(Duration::from_secs(1));
        drop(streams);
    });
    let noise = std::thread::spawn(move || {
        for _ in 0..3 {
            if let Ok(mut stream) = std::net::TcpStream::connect(&address) {
                let _ = std::io::Write::write_all(&mut stream, b"GET / HTTP/1.1\r\n\r\n");
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    });
    let joined = run_processes(&launches, |launch| {
        TcpProcessGroup::join(launch, fact("same"), &[], TIMEOUTS)
    });
    noise.join().unwrap();
    silent.join().unwrap();
    assert!(joined.iter().all(Result::is_ok));
    let equal_ranks = [launches[0].clone(), launches[1].clone(), launches[1].clone()]
        .map(|launch| LaunchInfo { world_size: 3, ..launch });
    let errors = run_processes(&equal_ranks, |launch| {
        TcpProcessGroup::join(launch, fact("same"), &[], TIMEOUTS).err()
    });
    let fault = errors[0].as_ref().map(|error| error.fault.clone());
    assert_eq!(fault, Some(ClusterFault::RankConflict { rank: 1, world_size: 3 }));
}

/// Process 0 waits for process 1, which waits for process 2. The first wait begins first.
#[test]
fn the_process_that_stalls_is_named_and_not_one_that_waits_for_it() {
    let timeouts = ClusterTimeouts { collective: Duration::from_secs(1), ..TIMEOUTS };
    let faults = run_processes(&launches(3), |launch| {
        let neighbours: &[u64] = [&[1][..], &[0, 2], &[1]][launch.rank as usize];
        let group = join(launch, neighbours, timeouts);
        if launch.rank == 2 {
            std::thread::sleep(Duration::from_secs(5));
            return None;
        }
        std::thread::sleep(Duration::from_millis(400 * launch.rank));
        let link = group.peer_link(launch.rank + 1, PipelineDirection::Upstream).unwrap();
        let error = link.receive(&mut |_| {}).unwrap_err();
        group.abort(launch.rank, &error.fault.to_string());
        // The connection stays open until the others have read the reason.
        std::thread::sleep(Duration::from_millis(200));
        Some(error.fault)
    });
    assert!(matches!(faults[1], Some(ClusterFault::Timeout { rank: 2, .. })), "{faults:?}");
    let Some(ClusterFault::Aborted { rank: 1, reason }) = &faults[0] else { panic!("{faults:?}") };
    assert!(reason.starts_with("process 2 did not take part in receive 0"), "{reason}");
}

#[test]
fn a_process_that_writes_a_checkpoint_is_waited_for() {
    let timeouts = ClusterTimeouts { collective: Duration::from_millis(300), ..TIMEOUTS };
    let received = run_processes(&launches(2), |launch| {
        let group = join(launch, &[1 - launch.rank], timeouts);
        let link = group.peer_link(1 - launch.rank, PipelineDirection::Upstream).unwrap();
        let mut received = vec![];
        if launch.rank == 1 {
            group.begin_storage_use();
            std::thread::sleep(Duration::from_secs(2));
            group.end_storage_use();
            link.send(&[&[1.0, 2.0]]).unwrap();
        } else {
            link.receive(&mut |elements| received.extend_from_slice(elements)).unwrap();
        }
        group.shut_down().unwrap();
        received
    });
    assert_eq!(received[0], [1.0, 2.0]);
}

/// Process 2 waits for process 0, which waits for process 1; 1 and 2 are not connected.
#[test]
fn a_process_that_waits_for_one_that_writes_a_checkpoint_is_waited_for() {
    let timeouts = ClusterTimeouts { collective: Duration::from_millis(300), ..TIMEOUTS };
    let sums = run_processes(&launches(3), |launch| {
        let group = join(launch, &[], timeouts);
        if launch.rank == 1 {
            group.begin_storage_use();
            std::thread::sleep(Duration::from_secs(18));
            group.end_storage_use();
        }
        let sum =
            gather_and_broadcast(&*group, launch.rank, |all: Vec<u64>| all.iter().sum::<u64>());
        group.shut_down().unwrap();
        sum.unwrap()
    });
    assert_eq!(sums, [3, 3, 3]);
}
