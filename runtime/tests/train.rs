//! Training lowers the loss, the same way twice, and the same way under every plan.

use std::path::Path;
use std::sync::Arc;

use narrows_plan::lower::lower;
use narrows_plan::mesh::{Mesh, Workload};
use narrows_plan::model::{Model, presets};
use narrows_plan::strategy::{Context, Zero};
use narrows_plan::{Bytes, CheckedProgram, Precision};
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::session::{Session, TensorKind};
use narrows_runtime::train::{
    MetricsRecord, StepPrediction, TrainControl, TrainEnd, TrainError, TrainedStep,
};
use narrows_runtime::{Optimizer, RunError, Trainer};
use narrows_test_support::plans::{TestRng, draw_plan};

const TEXT: &[u8] = include_bytes!("../../data/moby-dick.txt");
const LENGTH: u64 = 32;

fn model() -> Model {
    presets::find("cola-tiny").unwrap()
}

fn mesh(tensor: u64, pipeline: u64, data: u64) -> Mesh {
    Mesh { tensor, pipeline, data }
}

fn session(model: &Model, mesh: Mesh, zero: Zero, dice: u64, seed: u64) -> Session {
    let workload = Workload { global_batch: 4, sequence_length: LENGTH, micro_batch: 2 };
    let context = Context { mesh, workload, precision: Precision::Full32, zero };
    let mut dice = TestRng(dice);
    let plan = (0..50).find_map(|_| draw_plan(&mut dice, model, context)).expect("a plan");
    let program = CheckedProgram::check(lower(&plan.resolve(model).unwrap())).unwrap();
    let mut session = narrows_cpu::session(model, program, 1).unwrap();
    session.initialise(model, seed).unwrap();
    session
}

fn sampler(model: &Model, text: &[u8], seed: u64) -> Sampler {
    let file = Arc::new(TokenFile::from_text(Path::new("text"), text).unwrap());
    let vocabulary = model.vocab as u32;
    Sampler::new(file, SamplerConfig { sequence_length: LENGTH, vocabulary, seed }).unwrap()
}

fn trainer(mesh: Mesh, zero: Zero, dice: u64, seed: u64) -> Trainer {
    let model = model();
    let session = session(&model, mesh, zero, dice, seed);
    Trainer::new(session, sampler(&model, TEXT, seed), Optimizer::new(3e-3, 5, 20)).unwrap()
}

fn losses(trainer: &mut Trainer, until: u64) -> Vec<f64> {
    let mut losses = vec![];
    let watch = |_: &Trainer, trained: &TrainedStep| {
        losses.push(trained.loss);
        Ok::<_, TrainError>(TrainControl::Continue)
    };
    assert_eq!(trainer.train(until, watch).unwrap(), TrainEnd::Completed);
    losses
}

#[test]
fn the_loss_falls_alike_under_every_plan() {
    let expected = losses(&mut trainer(mesh(1, 1, 1), Zero::Off, 1, 7), 20);
    let (first, last) = (expected[0], expected[19]);
    // Before anything is learnt every byte is about as likely.
    assert!((first - 256_f64.ln()).abs() < 0.2, "{first}");
    assert!(last < first - 1.5, "{first} to {last}");
    for (mesh, zero, dice) in [
        (mesh(2, 1, 1), Zero::Off, 2),
        (mesh(1, 2, 2), Zero::One, 3),
        (mesh(2, 2, 1), Zero::Off, 4),
    ] {
        let found = losses(&mut trainer(mesh, zero, dice, 7), 20);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let off = (found - expected).abs() / expected;
            assert!(off < 1e-4, "{mesh}, step {}: {found} and not {expected}", step + 1);
        }
    }
}

#[test]
fn a_seed_is_a_run() {
    let run = |seed| {
        let mut trainer = trainer(mesh(2, 1, 1), Zero::Off, 2, seed);
        (losses(&mut trainer, 4), trainer.session().local_tensors(TensorKind::Weights).unwrap())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
}

#[test]
fn a_run_that_is_resumed_is_the_run() {
    let mut whole = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    let expected = losses(&mut whole, 6);
    let mut begun = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    assert_eq!(losses(&mut begun, 3), expected[..3]);
    let cursor = begun.cursor();
    assert_eq!(cursor.next_sequence, 12);
    let mut resumed = trainer(mesh(1, 1, 1), Zero::Off, 1, 3);
    for tensors in [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments] {
        let held = begun.session().local_tensors(tensors).unwrap();
        resumed.session_mut().load_tensors(tensors, &held).unwrap();
    }
    resumed.resume(&cursor, begun.session().steps()).unwrap();
    assert_eq!(losses(&mut resumed, 6), expected[3..]);
    let weights = |trainer: &Trainer| trainer.session().local_tensors(TensorKind::Weights).unwrap();
    assert_eq!(weights(&resumed), weights(&whole));
}

#[test]
fn whoever_watches_may_stop() {
    enum Never {}
    impl From<TrainError> for Never {
        fn from(error: TrainError) -> Never {
            panic!("{error}")
        }
    }
    let mut trainer = trainer(mesh(1, 1, 1), Zero::Off, 1, 1);
    let mut stop_at = |at: u64, until: u64| {
        let watch = |_: &Trainer, trained: &TrainedStep| {
            Ok::<_, Never>(if trained.step == at {
                TrainControl::Stop
            } else {
                TrainControl::Continue
            })
        };
        trainer.train(until, watch).unwrap_or_else(|never| match never {})
    };
    assert_eq!(stop_at(2, 5), TrainEnd::Stopped);
    // Whoever stops at the last step has seen all of them.
    assert_eq!(stop_at(3, 3), TrainEnd::Completed);
    assert_eq!(trainer.session().steps(), 3);
}

#[test]
fn a_step_without_numbers_changes_nothing() {
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
fn a_record_says_what_was_expected_too() {
    let mut trainer = trainer(mesh(2, 1, 1), Zero::Off, 2, 1);
    let trained = trainer.step().unwrap();
    let allocated = trainer.session().allocated_bytes();
    let expected: Vec<Bytes> = allocated.iter().copied().map(Bytes).collect();
    let predicted = StepPrediction {
        step_time_s: 0.25,
        breakdown_s: [("gemm", 0.25)].into(),
        allocated: expected,
    };
    let record = serde_json::to_value(MetricsRecord::new(&trained, Some(&predicted))).unwrap();
    assert_eq!(record["predicted_step_time_s"], 0.25);
    assert_eq!(record["predicted_breakdown_s"]["gemm"], 0.25);
    let parts = record["breakdown_s"].as_object().unwrap();
    let sum: f64 = parts.values().filter_map(|part| part.as_f64()).sum();
    assert!((sum / record["step_time_s"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{parts:?}");
    assert!(parts["gemm"].as_f64() > Some(0.0) && parts["collective_exposed"].as_f64() > Some(0.0));
    assert_eq!(record["allocated_bytes"], serde_json::json!(allocated));
    assert_eq!(record["allocated_bytes"], record["predicted_allocated_bytes"]);
    assert_eq!(record["scratch_bytes"], serde_json::json!(trainer.session().scratch_bytes()));
    assert_eq!(record["collective_bytes"][0], record["collective_bytes"][1]);
    let alone = serde_json::to_value(MetricsRecord::new(&trained, None)).unwrap();
    assert!(alone["predicted_step_time_s"].is_null());
}

/// Scratch memory is for attention at least; two stages keep copies of hidden states besides.
#[test]
fn what_is_held_besides_the_arenas_is_told() {
    let model = model();
    let held = |mesh| {
        let mut trainer = trainer(mesh, Zero::Off, 4, 1);
        let before = trainer.session().scratch_bytes();
        let scratch = trainer.step().unwrap().scratch_bytes;
        assert_eq!(scratch, trainer.session().scratch_bytes());
        assert_eq!(
            trainer.step().unwrap().scratch_bytes,
            scratch,
            "the first step makes it as large"
        );
        (before, scratch)
    };
    let (before, scratch) = held(mesh(1, 1, 1));
    assert_eq!(before, [0]);
    // Two tiles of scores, and k and v of a head.
    let head = 2 * LENGTH * LENGTH + 2 * LENGTH * model.head_dim;
    assert!(scratch[0] >= 4 * head, "{scratch:?}");
    let (before, scratch) = held(mesh(1, 2, 1));
    // Two microbatches are in flight at most, each of two sequences.
    let hidden = 4 * 2 * LENGTH * model.hidden;
    assert_eq!(before, [2 * hidden; 2]);
    assert!(scratch.iter().all(|bytes| *bytes >= 2 * hidden + 4 * head), "{scratch:?}");
}
