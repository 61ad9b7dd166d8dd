//! Training lowers the loss, reproducibly and equally under every plan.

use std::path::Path;
use std::sync::Arc;

use narrows_plan::model::{Model, presets};
use narrows_plan::{Bytes, CheckedProgram, Context, Mesh, Precision, Workload, Zero, lower};
use narrows_runtime::data::{Sampler, SamplerConfig, TargetRule, TokenFile};
use narrows_runtime::session::{Session, TensorKind};
use narrows_runtime::train::{
    MetricsRecord, StepPrediction, TrainControl, TrainEnd, TrainError, TrainedStep,
};
use narrows_runtime::{Optimizer, RunError, Trainer};
use narrows_test_support::plans::{TestRng, draw_plan};

pub const TEXT: &[u8] = include_bytes!("../../data/moby-dick.txt");
const LENGTH: u64 = 32;

fn model() -> Model {
    presets::find("cola-tiny").unwrap()
}

pub fn mesh(tensor: u64, pipeline: u64, data: u64) -> Mesh {
    Mesh { tensor, pipeline, data, context: 1 }
}

pub fn session(model: &Model, mesh: Mesh, zero: Zero, plan_seed: u64, seed: u64) -> Session {
    session_of(model, context(mesh, zero), plan_seed, seed)
}

pub fn context(mesh: Mesh, zero: Zero) -> Context {
    let workload = Workload { global_batch: 4, sequence_length: LENGTH, micro_batch: 2 };
    Context::new(mesh, workload, Precision::Fp32, zero)
}

pub fn session_of(model: &Model, context: Context, plan_seed: u64, seed: u64) -> Session {
    let mut rng = TestRng::new(plan_seed);
    let plan = (0..50).find_map(|_| draw_plan(&mut rng, model, context)).expect("a plan");
    let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
    let mut session = narrows_cpu::session(model, program, 1).unwrap();
    session.initialise(model, seed).unwrap();
    session
}

pub fn sampler(model: &Model, text: &[u8], seed: u64) -> Sampler {
    let file = Arc::new(TokenFile::from_text(Path::new("text"), text).unwrap());
    let vocabulary = model.vocab as u32;
    Sampler::new(
        file,
        SamplerConfig { sequence_length: LENGTH, vocabulary, seed, targets: TargetRule::default() },
    )
    .unwrap()
}

fn trainer(mesh: Mesh, zero: Zero, plan_seed: u64, seed: u64) -> Trainer {
    let model = model();
    let session = session(&model, mesh, zero, plan_seed, seed);
    Trainer::new(session, sampler(&model, TEXT, seed), Optimizer::new(3e-3, 5, 20)).unwrap()
}

pub fn losses(trainer: &mut Trainer, until: u64) -> Vec<f64> {
    let mut losses = vec![];
    let on_step = |_: &mut Trainer, trained: &TrainedStep| {
        losses.push(trained.loss);
        Ok::<_, TrainError>(TrainControl::Continue)
    };
    assert_eq!(trainer.train(until, on_step).unwrap(), TrainEnd::Completed);
    losses
}

#[test]
fn the_loss_falls_equally_under_every_plan() {
    let expected = losses(&mut trainer(mesh(1, 1, 1), Zero::Off, 1, 7), 20);
    let (first, last) = (expected[0], expected[19]);
    // Untrained, the model predicts all bytes with about the same probability.
    assert!((first - 256_f64.ln()).abs() < 0.2, "{first}");
    assert!(last < first - 1.5, "{first} to {last}");
    for (mesh, zero, plan_seed) in [
        (mesh(2, 1, 1), Zero::Off, 2),
        (mesh(1, 2, 2), Zero::One, 3),
        (mesh(1, 1, 2), Zero::Three, 5),
        (mesh(2, 2, 1), Zero::Off, 4),
    ] {
        let losses = losses(&mut trainer(mesh, zero, plan_seed, 7), 20);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            let error = (loss - expected).abs() / expected;
            assert!(error < 1e-4, "{mesh}, step {}: {loss}, expected {expected}", step + 1);
        }
    }
}

#[test]
fn runs_with_equal_seeds_are_equal() {
    let run = |seed| {
        let mut trainer = trainer(mesh(2, 1, 1), Zero::Off, 2, seed);
        (losses(&mut trainer, 4), trainer.session().local_tensors(TensorKind::Weights).unwrap())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let mut uninterrupted = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    let expected = losses(&mut uninterrupted, 6);
    let mut first = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    assert_eq!(losses(&mut first, 3), expected[..3]);
    let cursor = first.cursor();
    assert_eq!(cursor.next_sequence, 12);
    let mut resumed = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    for tensors in [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments] {
        let saved = first.session().local_tensors(tensors).unwrap();
        resumed.session_mut().load_tensors(tensors, &saved).unwrap();
    }
    resumed.resume(&cursor, first.session().steps()).unwrap();
    assert_eq!(losses(&mut resumed, 6), expected[3..]);
    let weights = |trainer: &Trainer| trainer.session().local_tensors(TensorKind::Weights).unwrap();
    assert_eq!(weights(&resumed), weights(&uninterrupted));
}

#[test]
fn a_callback_can_stop_the_run() {
    enum Never {}
    impl From<TrainError> for Never {
        fn from(error: TrainError) -> Never {
            panic!("{error}")
        }
    }
    let mut trainer = trainer(mesh(1, 1, 1), Zero::Off, 1, 1);
    let mut stop_at = |at: u64, until: u64| {
        let on_step = |_: &mut Trainer, trained: &TrainedStep| {
            Ok::<_, Never>(if trained.step == at {
                TrainControl::Stop
            } else {
                TrainControl::Continue
            })
        };
        trainer.train(until, on_step).unwrap_or_else(|never| match never {})
    };
    assert_eq!(stop_at(2, 5), TrainEnd::Stopped);
    // Stopping at the last step completes the run.
    assert_eq!(stop_at(3, 3), TrainEnd::Completed);
    assert_eq!(trainer.session().steps(), 3);
}

#[test]
fn a_step_with_non_finite_gradients_changes_nothing() {
    let model = model();
    let session = session(&model, mesh(1, 1, 1), Zero::Off, 1, 1);
    let optimizer = Optimizer { clip_norm: 1e30, ..Optimizer::new(1e30, 1, 9) };
    let mut trainer = Trainer::new(session, sampler(&model, TEXT, 1), optimizer).unwrap();
    trainer.step().unwrap();
    let (weights, cursor) =
        (trainer.session().local_tensors(TensorKind::Weights).unwrap(), trainer.cursor());
    let error = trainer.step().unwrap_err();
    assert!(
        matches!(error, TrainError::Run(RunError::NonFiniteGradients { step: 2, .. })),
        "{error}"
    );
    assert_eq!(trainer.session().local_tensors(TensorKind::Weights).unwrap(), weights);
    assert_eq!((trainer.session().steps(), trainer.cursor()), (1, cursor));
}

#[test]
fn metrics_contain_predictions() {
    let mut trainer = trainer(mesh(2, 1, 1), Zero::Off, 2, 1);
    let trained = trainer.step().unwrap();
    let allocated = trainer.session().allocated_bytes();
    let expected: Vec<Bytes> = allocated.iter().copied().map(Bytes).collect();
    let prediction = StepPrediction {
        step_time_s: 0.25,
        breakdown_s: [("gemm", 0.25)].into(),
        allocated: expected,
    };
    let record = serde_json::to_value(MetricsRecord::new(&trained, Some(&prediction))).unwrap();
    assert_eq!(record["predicted_step_time_s"], 0.25);
    assert_eq!(record["predicted_breakdown_s"]["gemm"], 0.25);
    let breakdown = record["breakdown_s"].as_object().unwrap();
    let sum: f64 = breakdown.values().filter_map(|seconds| seconds.as_f64()).sum();
    assert!((sum / record["step_time_s"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{breakdown:?}");
    assert!(
        breakdown["gemm"].as_f64() > Some(0.0)
            && breakdown["collective_exposed"].as_f64() > Some(0.0)
    );
    assert_eq!(record["allocated_bytes"], serde_json::json!(allocated));
    assert_eq!(record["allocated_bytes"], record["predicted_allocated_bytes"]);
    assert_eq!(record["scratch_bytes"], serde_json::json!(trainer.session().scratch_bytes()));
    assert_eq!(record["collective_bytes"][0], record["collective_bytes"][1]);
    let unpredicted = serde_json::to_value(MetricsRecord::new(&trained, None)).unwrap();
    assert!(unpredicted["predicted_step_time_s"].is_null());
}

/// Attention needs scratch memory; two stages also keep copies of hidden states.
#[test]
fn scratch_memory_is_reported() {
    let model = model();
    let scratch_of = |mesh| {
        let mut trainer = trainer(mesh, Zero::Off, 4, 1);
        let before = trainer.session().scratch_bytes();
        let scratch = trainer.step().unwrap().scratch_bytes;
        assert_eq!(scratch, trainer.session().scratch_bytes());
        assert_eq!(
            trainer.step().unwrap().scratch_bytes,
            scratch,
            "the first step allocates all of it"
        );
        (before, scratch)
    };
    let (before, scratch) = scratch_of(mesh(1, 1, 1));
    assert_eq!(before, [0]);
    // Two tiles of scores, and k and v of a head.
    let head = 2 * LENGTH * LENGTH + 2 * LENGTH * model.head_dim;
    assert!(scratch[0] >= 4 * head, "{scratch:?}");
    let (before, scratch) = scratch_of(mesh(1, 2, 1));
    // Two microbatches are in flight at most, each of two sequences.
    let hidden = 4 * 2 * LENGTH * model.hidden;
    assert_eq!(before, [2 * hidden; 2]);
    assert!(scratch.iter().all(|bytes| *bytes >= 2 * hidden + 4 * head), "{scratch:?}");
}
