//! A run of many processes, over loopback. Here a process is a thread with a cluster of its own: it
//! shares nothing with the others but what goes over the wire. Real processes are in the tests of
//! the command line.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use narrows_cluster::{
    Address, ClusterError, ClusterFault, ClusterTimeouts, LaunchInfo, Launcher, RunFact,
    TcpProcessGroup,
};
use narrows_plan::lower;
use narrows_plan::model::Model;
use narrows_plan::{CheckedProgram, Plan, Precision};
use narrows_plan::{Context, Zero};
use narrows_plan::{Mesh, Workload};
use narrows_runtime::session::{NamedTensors, Session, StepInput, StepResult, TensorKind};
use narrows_runtime::{Optimizer, RunError};
use narrows_test_support::plans::{TestRng, draw_plan, drawable_models, to_json};

const DEADLINES: ClusterTimeouts =
    ClusterTimeouts { join: Duration::from_secs(60), collective: Duration::from_secs(60) };

/// A port that nobody listens at.
fn port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn launches(world: u64) -> Vec<LaunchInfo> {
    let meeting = Address { host: "127.0.0.1".into(), port: port() };
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

fn fact(value: &str) -> Vec<RunFact> {
    vec![RunFact { name: "plan".into(), value: value.into() }]
}

/// Runs a process for each launch, and gives what each leaves.
fn all<T: Send>(launches: &[LaunchInfo], process: impl Fn(&LaunchInfo) -> T + Sync) -> Vec<T> {
    let process = &process;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            launches.iter().map(|launch| scope.spawn(move || process(launch))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn tokens(plan: &Plan, step: u64, vocab: u64) -> Vec<u32> {
    let work = plan.workload;
    let count = work.global_batch * work.sequence_length;
    (0..count).map(|at| ((at * 7 + step * 13) % vocab) as u32).collect()
}

const KINDS: [TensorKind; 3] =
    [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments];

/// Three steps; what came of each, and all tensors after them.
fn steps(
    session: &mut Session,
    model: &Model,
    plan: &Plan,
) -> (Vec<StepResult>, Vec<NamedTensors>) {
    session.initialise(model, 3).unwrap();
    let optimizer = Optimizer { clip_norm: 0.1, ..Optimizer::new(1e-2, 1, 10) };
    let steps = (0..3).map(|step| {
        let tokens = tokens(plan, step, model.vocab);
        let targets = self::tokens(plan, step + 1, model.vocab);
        let done = session.step(&optimizer, StepInput { tokens: &tokens, targets: &targets });
        StepResult { time_breakdown: Default::default(), scratch_bytes: vec![], ..done.unwrap() }
    });
    let done = steps.collect();
    (done, KINDS.map(|kind| session.gather_tensors(kind).unwrap()).into())
}

fn program(plan: &Plan, model: &Model) -> CheckedProgram {
    CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap()
}

fn join(
    launch: &LaunchInfo,
    neighbours: &[u64],
    deadlines: ClusterTimeouts,
) -> Arc<TcpProcessGroup> {
    TcpProcessGroup::join(launch, fact("same"), neighbours, deadlines).unwrap().into()
}

/// The bits of a step do not depend on where its devices are.
#[test]
fn processes_compute_what_threads_do() {
    let models: Vec<Model> =
        drawable_models().into_iter().filter(|model| model.hidden == 256).collect();
    let mut dice = TestRng(77);
    let mut drawn = 0;
    for (tensor, pipeline, data) in
        [(2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (4, 1, 1), (2, 2, 2), (2, 3, 1)]
    {
        for _ in 0..3 {
            let model = dice.pick(&models).unwrap();
            let mesh = Mesh { tensor, pipeline, data };
            let workload = Workload { global_batch: 4 * data, sequence_length: 8, micro_batch: 2 };
            let zero = [Zero::Off, Zero::One][dice.below(2)];
            let context = Context { mesh, workload, precision: Precision::Full32, zero };
            let Some(plan) = draw_plan(&mut dice, model, context) else { continue };
            drawn += 1;
            let mut session = narrows_cpu::session(model, program(&plan, model), 1).unwrap();
            let wanted = steps(&mut session, model, &plan);
            let found = all(&launches(mesh.devices()), |launch| {
                let program = program(&plan, model);
                let neighbours = Session::peers(program.program(), launch.rank);
                let cluster = join(launch, &neighbours, DEADLINES);
                let mut session =
                    narrows_cpu::session_of_process(model, program, 1, cluster.clone()).unwrap();
                let made = steps(&mut session, model, &plan);
                cluster.shut_down().unwrap();
                made
            });
            for (rank, (done, tensors)) in found.into_iter().enumerate() {
                assert_eq!(done, wanted.0, "process {rank} of\n{}", to_json(&plan));
                if rank == 0 {
                    assert_eq!(tensors, wanted.1, "of\n{}", to_json(&plan));
                } else {
                    assert!(tensors.iter().all(NamedTensors::is_empty));
                }
            }
        }
    }
    assert!(drawn >= 16, "{drawn}");
}

/// Two processes with a tensor axis of two, of which the second does something else in the end.
fn two(
    answer: Duration,
    second: impl Fn(&mut Session, &Arc<TcpProcessGroup>) + Sync,
) -> (RunError, Duration) {
    let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
    let mesh = Mesh { tensor: 2, pipeline: 1, data: 1 };
    let workload = Workload { global_batch: 2, sequence_length: 8, micro_batch: 2 };
    let context = Context { mesh, workload, precision: Precision::Full32, zero: Zero::Off };
    let mut dice = TestRng(1);
    let plan = (0..100).find_map(|_| draw_plan(&mut dice, &model, context)).unwrap();
    let deadlines = ClusterTimeouts { collective: answer, ..DEADLINES };
    let ended = all(&launches(2), |launch| {
        let cluster = join(launch, &[1 - launch.rank], deadlines);
        let program = program(&plan, &model);
        let mut session =
            narrows_cpu::session_of_process(&model, program, 1, cluster.clone()).unwrap();
        session.initialise(&model, 1).unwrap();
        let tokens = tokens(&plan, 0, model.vocab);
        let input = StepInput { tokens: &tokens, targets: &tokens };
        let optimizer = Optimizer::new(1e-3, 1, 10);
        session.step(&optimizer, input).unwrap();
        if launch.rank == 1 {
            second(&mut session, &cluster);
            return None;
        }
        let begun = Instant::now();
        let error = session.step(&optimizer, input).unwrap_err();
        Some((error, begun.elapsed()))
    });
    ended.into_iter().flatten().next().unwrap()
}

fn fault(error: RunError) -> (ClusterFault, Vec<String>) {
    match error {
        RunError::Cluster(ClusterError { fault, recent_operations: recent }) => (fault, recent),
        error => panic!("{error}"),
    }
}

#[test]
fn who_is_gone_is_named_at_once() {
    let (error, waited) = two(Duration::from_secs(300), |_, _| {});
    let text = error.to_string();
    let (fault, recent) = fault(error);
    assert!(matches!(fault, ClusterFault::Disconnected { rank: 1, .. }), "{text}");
    assert!(waited < Duration::from_secs(60), "{waited:?}");
    let last = recent.last().unwrap();
    assert!(last.contains("over the tensor axis") && last.ends_with("has not ended"), "{text}");
}

#[test]
fn who_stalls_is_named_when_the_deadline_is_over() {
    let over = AtomicU64::new(0);
    let deadline = Duration::from_millis(700);
    let (error, waited) = two(deadline, |_, _| {
        std::thread::sleep(Duration::from_secs(3));
        over.store(1, Ordering::SeqCst);
    });
    let (fault, _) = fault(error);
    assert!(
        matches!(&fault, ClusterFault::Timeout { rank: 1, waited_s, .. } if *waited_s >= 0.7),
        "{fault}"
    );
    assert!(waited >= deadline);
}

#[test]
fn who_fails_says_why() {
    let (error, _) = two(Duration::from_secs(300), |session, _| {
        let outside = vec![9999; 16];
        let input = StepInput { tokens: &outside, targets: &outside };
        session.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err();
    });
    let (fault, _) = fault(error);
    let ClusterFault::Aborted { rank: 1, reason } = &fault else { panic!("{fault}") };
    assert!(reason.contains("token 9999"), "{reason}");
}

#[test]
fn who_is_in_another_collective_is_named() {
    let (error, _) = two(Duration::from_secs(300), |session, cluster| {
        // A session that begins again counts its collectives from the first.
        let model = narrows_plan::model::presets::find("cola-tiny").unwrap();
        let program = CheckedProgram::check(session.program().clone()).unwrap();
        let cluster = Arc::clone(cluster);
        let mut again = narrows_cpu::session_of_process(&model, program, 1, cluster).unwrap();
        let tokens = vec![1; 16];
        let input = StepInput { tokens: &tokens, targets: &tokens };
        again.step(&Optimizer::new(1e-3, 1, 10), input).unwrap_err();
    });
    let (fault, _) = fault(error);
    let ClusterFault::OperationMismatch { rank: 1, theirs, ours } = &fault else {
        panic!("{fault}")
    };
    assert!(theirs.contains(" 0 over the tensor axis") && !ours.contains(" 0 over"), "{fault}");
}

#[test]
fn processes_with_other_plans_do_not_begin() {
    let errors = all(&launches(3), |launch| {
        let plan = if launch.rank == 2 { "other" } else { "same" };
        let joined = TcpProcessGroup::join(launch, fact(plan), &[], DEADLINES);
        joined.err().map(|error| error.fault)
    });
    let differs = ClusterFault::RunMismatch {
        rank: 2,
        fact: "plan".into(),
        theirs: "other".into(),
        ours: "same".into(),
    };
    assert_eq!(errors[0], Some(differs.clone()));
    for error in &errors[1..] {
        let Some(ClusterFault::Aborted { rank: 0, reason }) = error else { panic!("{error:?}") };
        assert_eq!(*reason, differs.to_string());
    }
}

#[test]
fn who_does_not_come_is_named() {
    let launches = launches(4);
    let deadlines = ClusterTimeouts { join: Duration::from_millis(800), ..DEADLINES };
    let errors = all(&launches[..3], |launch| {
        TcpProcessGroup::join(launch, vec![], &[], deadlines)
            .err()
            .map(|error| error.fault.to_string())
    });
    let said = errors[0].as_ref().unwrap();
    assert!(said.starts_with("1 of 4 processes did not join at 127.0.0.1:"), "{said}");
    assert!(said.contains("s: 3 ("), "{said}");
    assert!(errors[1..].iter().flatten().all(|error| error.contains(said)), "{errors:?}");
    // Nobody waits at the address at all.
    let alone = TcpProcessGroup::join(&launches[3], vec![], &[], deadlines).err().unwrap();
    assert!(matches!(alone.fault, ClusterFault::Unreachable { rank: 0, .. }), "{alone}");
}

#[test]
fn noise_at_the_meeting_is_sent_away_and_strangers_are_refused() {
    let launches = launches(2);
    let at = launches[0].rendezvous.to_string();
    // Whoever says nothing, or says it slowly, keeps nobody out.
    let silent: Vec<_> = (0..8).map(|_| at.clone()).collect();
    let silent = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        let streams: Vec<_> = silent.iter().map(std::net::TcpStream::connect).collect();
        std::thread::sleep(Duration::from_secs(1));
        drop(streams);
    });
    let noise = std::thread::spawn(move || {
        for _ in 0..3 {
            if let Ok(mut stream) = std::net::TcpStream::connect(&at) {
                let _ = std::io::Write::write_all(&mut stream, b"GET / HTTP/1.1\r\n\r\n");
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    });
    let joined =
        all(&launches, |launch| TcpProcessGroup::join(launch, fact("same"), &[], DEADLINES));
    noise.join().unwrap();
    silent.join().unwrap();
    assert!(joined.iter().all(Result::is_ok));
    let twice = [launches[0].clone(), launches[1].clone(), launches[1].clone()]
        .map(|launch| LaunchInfo { world_size: 3, ..launch });
    let errors =
        all(&twice, |launch| TcpProcessGroup::join(launch, fact("same"), &[], DEADLINES).err());
    let fault = errors[0].as_ref().map(|error| error.fault.clone());
    assert_eq!(fault, Some(ClusterFault::RankConflict { rank: 1, world_size: 3 }));
}
