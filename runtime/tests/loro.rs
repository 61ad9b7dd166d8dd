//! LORO trains equally under every plan, resumes exactly, and refuses what it cannot train.

use std::num::NonZeroU64;

use narrows_plan::model::{self, LinearKind, Model, ParameterId, WeightId};
use narrows_plan::{Context, Mesh, Zero};
use narrows_runtime::session::TensorKind;
use narrows_runtime::train::TrainError;
use narrows_runtime::{
    ExactStepFault, FactorRateScale, Loro, Optimizer, RunError, Session, Trainer,
};

use super::train::{TEXT, context, losses, mesh, sampler, session_of};

const STEPS: u64 = 8;

/// A model of two blocks; `default` are the fields of both.
fn model_of(default: &str) -> Model {
    let text = format!(
        r#"{{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 96,
        "blocks": {{"count": 2, "default": {{"product": "swiglu", {default}}}}}}}"#
    );
    model::read("small", &text).expect("a valid model")
}

fn pairs() -> Model {
    model_of(r#""all": {"rank": 16, "activation": "identity"}, "v": "dense""#)
}

fn optimizer(exact_every: u64, rate_scale: FactorRateScale) -> Optimizer {
    let exact_every = NonZeroU64::new(exact_every).unwrap();
    let loro = Some(Loro { exact_every, refresh_every: 4, rate_scale });
    Optimizer { loro, epsilon: 1e-6, ..Optimizer::new(1e-2, 2, 20) }
}

fn loro() -> Optimizer {
    optimizer(4, FactorRateScale::RankOverHidden)
}

fn trainer(optimizer: Optimizer, mesh: Mesh, zero: Zero, plan_seed: u64) -> Trainer {
    let model = pairs();
    let loro_every = optimizer.loro.map(|loro| loro.exact_every);
    let context = Context { loro_every, ..context(mesh, zero) };
    let session = session_of(&model, context, plan_seed, 7);
    Trainer::new(session, sampler(&model, TEXT, 7), optimizer).unwrap()
}

#[test]
fn losses_are_equal_under_every_plan() {
    let run = |optimizer, mesh, zero, plan_seed| {
        losses(&mut trainer(optimizer, mesh, zero, plan_seed), STEPS + 1)
    };
    let expected = run(loro(), mesh(1, 1, 1), Zero::Off, 1);
    assert!(expected[STEPS as usize] < expected[0] - 0.5, "{expected:?}");
    for (mesh, zero, plan_seed) in [
        (mesh(2, 1, 1), Zero::Off, 2),
        (mesh(4, 1, 1), Zero::Off, 3),
        (mesh(1, 2, 2), Zero::One, 4),
        (mesh(2, 1, 2), Zero::Two, 5),
        (mesh(1, 1, 2), Zero::Three, 6),
        (mesh(2, 2, 2), Zero::One, 7),
    ] {
        let losses = run(loro(), mesh, zero, plan_seed);
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            let error = (loss - expected).abs() / expected;
            assert!(error < 1e-4, "{mesh}, step {}: {loss}, expected {expected}", step + 1);
        }
    }
    // Losses show exact steps, refreshes and learning rates from the step after them on.
    let differ_from = |other: Optimizer| {
        let losses = run(other, mesh(1, 1, 1), Zero::Off, 1);
        losses.iter().zip(&expected).position(|(loss, expected)| loss != expected)
    };
    assert_eq!(differ_from(optimizer(100, FactorRateScale::RankOverHidden)), Some(4));
    assert_eq!(differ_from(optimizer(4, FactorRateScale::Constant(1.0))), Some(1));
    let never = loro().loro.map(|loro| Loro { refresh_every: 0, ..loro });
    assert_eq!(differ_from(Optimizer { loro: never, ..loro() }), Some(5));
}

const KINDS: [TensorKind; 3] =
    [TensorKind::Weights, TensorKind::FirstMoments, TensorKind::SecondMoments];

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let new = || trainer(loro(), mesh(2, 1, 2), Zero::One, 5);
    let mut uninterrupted = new();
    let expected = losses(&mut uninterrupted, STEPS);
    // Before an exact step, right after it, and later.
    for stop in [3, 4, 6] {
        let mut first = new();
        losses(&mut first, stop);
        let mut resumed = new();
        for kind in KINDS {
            let saved = first.session().local_tensors(kind).unwrap();
            let is_zero = saved.values().flatten().all(|x| *x == 0.0);
            assert_eq!(
                is_zero,
                stop == 4 && kind != TensorKind::Weights,
                "{kind:?} of step {stop}"
            );
            resumed.session_mut().load_tensors(kind, &saved).unwrap();
        }
        resumed.resume(&first.cursor(), first.session().steps()).unwrap();
        assert_eq!(losses(&mut resumed, STEPS), expected[stop as usize..]);
        for kind in KINDS {
            let tensors = |trainer: &Trainer| trainer.session().local_tensors(kind).unwrap();
            assert_eq!(tensors(&resumed), tensors(&uninterrupted), "{kind:?} of step {stop}");
        }
    }
}

#[test]
fn optimizers_that_a_program_cannot_have_are_refused() {
    let session_of = |model: &Model, loro_every: u64, plan_seed| {
        let loro_every = NonZeroU64::new(loro_every);
        let context = Context { loro_every, ..context(mesh(1, 1, 1), Zero::Off) };
        session_of(model, context, plan_seed, 1)
    };
    for (loro_every, part) in [
        (0, "the program has no exact steps"),
        (3, "the program has exact steps every 3 steps, not 4"),
    ] {
        let session = session_of(&pairs(), loro_every, 1);
        let error = session.model_program().check_optimizer(&loro()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    // Pairs of different ranks share a buffer under some plans.
    let mixed = model_of(
        r#""all": {"rank": 8, "activation": "identity"}, "k": {"rank": 4, "activation": "identity"}"#,
    );
    let sessions: Vec<Session> = (0..20).map(|seed| session_of(&mixed, 4, seed)).collect();
    let constant = optimizer(4, FactorRateScale::Constant(0.5));
    assert!(
        sessions.iter().all(|session| session.model_program().check_optimizer(&constant).is_ok())
    );
    let refused: Vec<RunError> = sessions
        .iter()
        .filter_map(|session| session.model_program().check_optimizer(&loro()).err())
        .collect();
    assert!(!refused.is_empty() && refused.len() < sessions.len(), "{} refused", refused.len());
    let part = "k.a have different ranks, and so learning rates, but one buffer, which has one";
    assert!(refused[0].to_string().contains(part), "{}", refused[0]);
}

#[test]
fn an_exact_step_without_a_result_ends_the_run() {
    let mut trainer = trainer(loro(), mesh(2, 1, 1), Zero::Off, 2);
    let id = ParameterId { block: Some(1), weight: WeightId::FactorB(LinearKind::Down) };
    losses(&mut trainer, 3);
    let weights = trainer.session().local_tensors(TensorKind::Weights).unwrap();
    let zeros = [(id, vec![0.0; weights[&id].len()])].into();
    trainer.session_mut().load_tensors(TensorKind::Weights, &zeros).unwrap();
    let error = trainer.step().unwrap_err();
    let fault = ExactStepFault::RankDeficient { factor: "b" };
    let TrainError::Run(RunError::ExactStep { step: 4, linear, fault: found }) = error else {
        panic!("{error}");
    };
    assert_eq!((linear.as_str(), found), ("layer 1 down", fault));
    assert_eq!(trainer.session().steps(), 3);
}
