//! Checkpoints that all processes write together, and read under any plan.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use narrows_plan::model::Model;
use narrows_plan::{Context, Mesh, Plan, Precision, Workload, Zero};
use narrows_runtime::checkpoint::{self, Checkpoint, FoundCheckpoint, PendingSave, SaveMode};
use narrows_runtime::data::{Sampler, SamplerConfig, TargetRule, TokenFile};
use narrows_runtime::process_group::ProcessGroup;
use narrows_runtime::session::Session;
use narrows_runtime::train::TrainedStep;
use narrows_runtime::{Optimizer, Trainer};
use narrows_test_support::plans::{TestRng, draw_plan, to_json};
use narrows_test_support::small_models::small_models;

use super::{TIMEOUTS, join, launches, program, run_processes};

fn trainer(session: Session, model: &Model) -> Trainer {
    let text: Vec<u8> = (0..2000u32).map(|n| (n * n % 31) as u8).collect();
    let file = TokenFile::from_text(Path::new("text"), &text).unwrap();
    let vocabulary = u32::try_from(model.vocab.max(256)).unwrap();
    let targets = TargetRule::default();
    let sampling = SamplerConfig { sequence_length: 8, vocabulary, seed: 5, targets };
    let sampler = Sampler::new(Arc::new(file), sampling).unwrap();
    Trainer::new(session, sampler, Optimizer::new(1e-2, 1, 10)).unwrap()
}

/// Loss and gradient norm of each step, as bits.
fn curve(steps: &[TrainedStep]) -> Vec<[u64; 2]> {
    steps.iter().map(|step| [step.loss.to_bits(), step.gradient_norm.to_bits()]).collect()
}

/// Runs steps of a plan by processes, from a checkpoint if there is one, and saves another. Returns the steps and the
/// checkpoint.
fn run(
    (model, plan): (&Model, &Plan),
    resumed: Option<&Path>,
    steps: u64,
    dir: &Path,
) -> (Vec<[u64; 2]>, PathBuf) {
    let program = program(plan, model);
    let results = run_processes(&launches(plan.mesh.devices()), |launch| {
        let neighbours = Session::peers(program.program(), launch.rank);
        let group = join(launch, &neighbours, TIMEOUTS);
        let process_group = group.clone();
        let mut session =
            narrows_cpu::session_of_process(model, program.clone(), 1, process_group).unwrap();
        session.initialise(model, 3).unwrap();
        let mut trainer = trainer(session, model);
        if let Some(path) = resumed {
            FoundCheckpoint::open(path).unwrap().resume(&mut trainer, model).unwrap();
        }
        let steps: Vec<TrainedStep> = (0..steps).map(|_| trainer.step().unwrap()).collect();
        let keep = NonZeroUsize::new(9).unwrap();
        let pending = PendingSave::begin(dir, &trainer, (model, 3), SaveMode::Blocking).unwrap();
        let path = pending.commit(keep).unwrap();
        group.shut_down().unwrap();
        (curve(&steps), path)
    });
    results.into_iter().next().unwrap()
}

#[test]
fn checkpoints_of_all_processes_are_those_of_one_process_and_resume_under_any_plan() {
    let models: Vec<Model> =
        small_models().into_iter().filter(|model| model.vocab >= 256 || model.vocab > 31).collect();
    let mut rng = TestRng::new(19);
    let mut plans = vec![];
    for (tensor, pipeline, data) in
        [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3), (2, 2, 1), (2, 1, 2)]
    {
        for zero in [Zero::Off, Zero::One, Zero::Three] {
            let model = rng.pick(&models).unwrap();
            let mesh = Mesh { tensor, pipeline, data, context: 1 };
            let workload = Workload { global_batch: 12, sequence_length: 8, micro_batch: 2 };
            let context = Context::new(mesh, workload, Precision::Fp32, zero);
            let Some(plan) = draw_plan(&mut rng, model, context) else { continue };
            plans.push((model, plan));
        }
    }
    assert!(plans.len() >= 10, "{}", plans.len());
    for (model, plan) in &plans {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let (_, saved) = run((model, plan), None, 2, dir);
        // The same as threads of one process hold.
        let mut session = narrows_cpu::session(model, program(plan, model), 1).unwrap();
        session.initialise(model, 3).unwrap();
        let mut threads = trainer(session, model);
        threads.step().unwrap();
        threads.step().unwrap();
        let expected = Checkpoint::of_trainer(&threads, model, 3).unwrap().unwrap();
        assert!(checkpoint::load(&saved, model).unwrap() == expected, "of\n{}", to_json(plan));
        let weights = checkpoint::load_weights(&saved, model).unwrap();
        assert!(weights == expected.weights, "of\n{}", to_json(plan));
        assert!(saved.join(checkpoint::MODEL_FILE).exists());
        // Resuming is bitwise exact under the same plan.
        let uninterrupted = [threads.step().unwrap(), threads.step().unwrap()];
        let (resumed, last) = run((model, plan), Some(&saved), 2, dir);
        assert_eq!(resumed, curve(&uninterrupted), "of\n{}", to_json(plan));
        // Another plan holds the same state before its first step.
        let Some((_, other)) = plans.iter().find(|(of, other)| of == model && other != plan) else {
            continue;
        };
        let (_, resharded) = run((model, other), Some(&last), 0, &dir.join("resharded"));
        let [before, after] =
            [&last, &resharded].map(|path| checkpoint::load(path, model).unwrap());
        assert!(before.weights == after.weights, "of\n{}", to_json(other));
        assert!(before.second_moments == after.second_moments, "of\n{}", to_json(other));
    }
}

/// A process that reads long files does not go on until it needs a process that is gone.
#[test]
fn an_abort_ends_processes_that_load_a_checkpoint() {
    let models = small_models();
    let mut rng = TestRng::new(23);
    let mesh = Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 };
    let workload = Workload { global_batch: 2, sequence_length: 8, micro_batch: 2 };
    let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
    let mut plans = models.iter().filter(|model| model.vocab > 31);
    let (model, plan) = plans
        .find_map(|model| Some((model, draw_plan(&mut rng, model, context)?)))
        .expect("a plan of two devices");
    let folder = tempfile::tempdir().unwrap();
    let (_, saved) = run((model, &plan), None, 1, folder.path());
    let program = program(&plan, model);
    let errors = run_processes(&launches(2), |launch| {
        let neighbours = Session::peers(program.program(), launch.rank);
        let group = join(launch, &neighbours, TIMEOUTS);
        let process_group = group.clone();
        let session =
            narrows_cpu::session_of_process(model, program.clone(), 1, process_group).unwrap();
        if launch.rank == 0 {
            group.abort(0, "a signal stopped it");
            // The connection stays open until the other process has ended.
            let start = Instant::now();
            while group.failure("the test").is_none() && start.elapsed() < TIMEOUTS.collective {
                std::thread::sleep(Duration::from_millis(1));
            }
            return vec![];
        }
        while group.failure("the test").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let shared: Arc<dyn ProcessGroup> = group;
        let verified = FoundCheckpoint::verify_part(&saved, &shared).map(drop).unwrap_err();
        let mut trainer = trainer(session, model);
        let found = FoundCheckpoint::open(&saved).unwrap();
        let resumed = found.resume(&mut trainer, model).map(drop).unwrap_err();
        vec![verified.to_string(), resumed.to_string()]
    });
    assert_eq!(errors[1].len(), 2);
    for error in &errors[1] {
        assert!(error.contains("process 0 aborted the run: a signal stopped it"), "{error}");
    }
}

#[test]
fn a_folder_that_processes_do_not_share_is_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let shared = folder.path().join("shared");
    for (of_last, refused) in
        [("shared", false), ("own", true), ("missing/folder", true), ("file", true)]
    {
        std::fs::create_dir_all(folder.path().join("own")).unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let results = run_processes(&launches(3), |launch| {
            let group = join(launch, &[], TIMEOUTS);
            let dir = if launch.rank == 2 { folder.path().join(of_last) } else { shared.clone() };
            let result = checkpoint::require_shared(&dir, &*group);
            group.shut_down().unwrap();
            result.map_err(|error| error.to_string())
        });
        for (rank, result) in results.into_iter().enumerate() {
            match (refused, result) {
                (false, result) => assert_eq!(result, Ok(())),
                (true, Ok(())) => panic!("process {rank} does not refuse {of_last}"),
                (true, Err(message)) if of_last != "file" => {
                    let sentence = "is not the same folder for process 2 as for process 0";
                    assert!(message.contains(sentence), "{message}");
                }
                (true, Err(message)) if rank == 2 => {
                    assert!(message.contains("file: cannot be written into: "), "{message}");
                }
                (true, Err(message)) => {
                    let sentence = "process 2 cannot write its part: ";
                    assert!(message.contains(sentence), "{message}");
                }
            }
        }
        assert_eq!(std::fs::read_dir(&shared).unwrap().count(), 0, "the probe remains");
    }
}

/// The first process cannot give the checkpoint its name; the others have written their files by then.
#[cfg(unix)]
#[test]
fn a_checkpoint_that_cannot_be_committed_is_an_error_of_all_processes() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let model = &small_models()[0];
    let mesh = Mesh { tensor: 1, pipeline: 1, data: 2, context: 1 };
    let workload = Workload { global_batch: 4, sequence_length: 8, micro_batch: 2 };
    let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
    let plan = draw_plan(&mut TestRng::new(1), model, context).unwrap();
    let program = program(&plan, model);
    std::os::unix::fs::symlink("nowhere", dir.join("step-00000000")).unwrap();
    for mode in [SaveMode::Blocking, SaveMode::Background] {
        let messages = run_processes(&launches(2), |launch| {
            let group = join(launch, &Session::peers(program.program(), launch.rank), TIMEOUTS);
            let process_group = group.clone();
            let session =
                narrows_cpu::session_of_process(model, program.clone(), 1, process_group).unwrap();
            let trainer = trainer(session, model);
            let pending = PendingSave::begin(dir, &trainer, (model, 3), mode).unwrap();
            let keep = NonZeroUsize::new(9).unwrap();
            let message = pending.commit(keep).unwrap_err().to_string();
            group.shut_down().unwrap();
            message
        });
        assert!(messages[0].contains("step-00000000: cannot be renamed: "), "{messages:?}");
        assert!(messages[1].contains("process 0 cannot write its part: "), "{messages:?}");
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1, "temporary folders remain");
    }
}
