//! Resuming under the same plan and under another.

use narrows_plan::model::ParameterId;
use narrows_plan::{Mesh, Zero};
use narrows_runtime::checkpoint::{Checkpoint, ResumeError, load, save};
use narrows_runtime::session::{ModelTensors, TensorKind};

use crate::support::*;

/// Meshes of few devices, because devices wait for each other when the machine has other work.
fn meshes(tied: bool) -> [(Mesh, Zero); 6] {
    [
        (mesh(1, 1, 1), Zero::Off),
        (mesh(2, 1, 1), Zero::Off),
        (mesh(1, 2, 1), Zero::Off),
        (mesh(1, 1, 2), Zero::One),
        (mesh(1, 1, 2), Zero::Three),
        if tied { (mesh(2, 2, 1), Zero::Off) } else { (mesh(2, 1, 2), Zero::One) },
    ]
}

fn bits(whole: &ModelTensors) -> Vec<(ParameterId, Vec<u32>)> {
    let bits = |elements: &Vec<f32>| elements.iter().map(|element| element.to_bits()).collect();
    whole.iter().map(|(id, elements)| (*id, bits(elements))).collect()
}

fn all_tensors(checkpoint: &Checkpoint) -> Vec<(ParameterId, Vec<u32>)> {
    let Checkpoint { weights, first_moments, second_moments, .. } = checkpoint;
    [weights, first_moments, second_moments].map(bits).concat()
}

fn assert_same(a: &Checkpoint, b: &Checkpoint, case: &str) {
    assert_eq!(a.step, b.step, "{case}");
    let (a, b) = (all_tensors(a), all_tensors(b));
    assert_eq!(a.len(), b.len(), "{case}");
    for (a, b) in a.iter().zip(&b) {
        assert!(a == b, "{case}: {} and {}", a.0, b.0);
    }
}

#[test]
fn resuming_under_the_same_plan_is_bitwise_equal() {
    const STEPS: u64 = 3;
    for tied in [false, true] {
        let model = small_model(tied);
        for (seed, (mesh, zero)) in meshes(tied).into_iter().enumerate() {
            let case = format!("{mesh}, tied {tied}");
            let plan = plan(&model, seed as u64, mesh, zero);
            let mut uninterrupted = initialised_session(&model, &plan);
            let losses = train(&mut uninterrupted, 2 * STEPS);

            let folder = tempfile::tempdir().unwrap();
            let mut first = initialised_session(&model, &plan);
            train(&mut first, STEPS);
            let saved = checkpoint_of(&first, &model);
            let path = save(folder.path(), &saved, &model, keep(1)).unwrap();
            let loaded = load(&path, &model).unwrap();
            assert!(loaded == saved, "{case}");
            let mut second = session(&model, &plan);
            loaded.restore(&mut second).unwrap();
            let rest = train(&mut second, STEPS);
            assert_eq!(rest, losses[STEPS as usize..], "{case}");
            let (a, b) = (checkpoint_of(&uninterrupted, &model), checkpoint_of(&second, &model));
            assert_same(&a, &b, &case);
        }
    }
}

#[test]
fn resuming_under_another_plan_follows_the_loss_curve() {
    const STEPS: u64 = 3;
    for tied in [false, true] {
        let model = small_model(tied);
        let mut worst = 0.0_f64;
        for (number, (mesh, zero)) in meshes(tied).into_iter().enumerate() {
            let before = plan(&model, 100 + number as u64, mesh, zero);
            let mut uninterrupted = initialised_session(&model, &before);
            train(&mut uninterrupted, STEPS);
            let saved = checkpoint_of(&uninterrupted, &model);
            let losses = train(&mut uninterrupted, STEPS);
            assert!(losses[2] < 4.1, "the loss does not fall: {losses:?}");
            // Another mesh, and another plan of the same mesh.
            let (next, next_zero) = meshes(tied)[(number + 1) % meshes(tied).len()];
            for (seed, mesh, zero) in [(200, next, next_zero), (300, mesh, zero)] {
                let mut other = session(&model, &plan(&model, seed + number as u64, mesh, zero));
                saved.restore(&mut other).unwrap();
                for (loss, expected) in train(&mut other, STEPS).iter().zip(&losses) {
                    let error = (loss - expected).abs() / expected;
                    worst = worst.max(error);
                    assert!(error < 1e-4, "{error:e} on {mesh} after {}", before.mesh);
                }
            }
        }
        println!("tied {tied}: largest relative error of a loss {worst:e}");
    }
}

#[test]
fn restored_tensors_are_equal_under_every_plan() {
    for tied in [false, true] {
        let model = small_model(tied);
        let mut before = initialised_session(&model, &plan(&model, 7, mesh(2, 2, 2), Zero::One));
        train(&mut before, 2);
        let saved = checkpoint_of(&before, &model);
        assert!(saved.second_moments.values().all(|v| v.iter().any(|element| *element > 0.0)));
        let more = [
            (mesh(4, 1, 1), Zero::Off),
            (mesh(4, 2, 2), Zero::One),
            (mesh(2, 1, 2), Zero::Two),
            (mesh(1, 2, 4), Zero::Three),
        ];
        for (seed, (mesh, zero)) in meshes(tied).into_iter().chain(more).enumerate() {
            let mut after = session(&model, &plan(&model, seed as u64, mesh, zero));
            saved.restore(&mut after).unwrap();
            assert_same(&saved, &checkpoint_of(&after, &model), &format!("{mesh}, tied {tied}"));
        }
    }
}

/// A resumed run reads the next sequence, and rejects another text.
#[test]
fn a_run_resumes_at_its_position_in_the_tokens() {
    let model = small_model(false);
    let plan = plan(&model, 3, mesh(2, 1, 1), Zero::Off);
    let run = |text: &[u8]| trainer(&model, &plan, text);
    // An epoch has less than two steps, so that the run resumes within an epoch.
    let text = &b"It was the best of times, it was the worst of times, ".repeat(2);
    let mut uninterrupted = run(text);
    let losses: Vec<f64> = (0..6).map(|_| uninterrupted.step().unwrap().loss).collect();
    let mut first = run(text);
    (0..3).for_each(|_| drop(first.step().unwrap()));
    let saved = Checkpoint::of_trainer(&first, &model, SEED).unwrap().unwrap();
    assert_eq!((saved.step, saved.cursor.next_sequence), (3, 24));
    let mut second = run(text);
    saved.resume(&mut second).unwrap();
    let rest: Vec<f64> = (0..3).map(|_| second.step().unwrap().loss).collect();
    assert_eq!(rest, losses[3..]);
    let mut other = run(&b"It was the age of wisdom, it was the age of foolishness".repeat(2));
    assert!(matches!(saved.resume(&mut other), Err(ResumeError::Data(_))));
    assert_eq!(other.session().steps(), 0);
}

#[test]
fn a_session_of_another_model_is_not_changed() {
    let saved = trained(&small_model(false));
    let other = small_model(true);
    let mut session = initialised_session(&other, &plan(&other, 1, mesh(1, 1, 1), Zero::Off));
    let before = session.local_tensors(TensorKind::Weights).unwrap();
    let fault = saved.restore(&mut session).unwrap_err();
    assert_eq!(fault.to_string(), "is not a tensor of the model");
    assert_eq!(fault.location().unwrap(), "tensor `head`");
    assert_eq!(session.local_tensors(TensorKind::Weights).unwrap(), before);
}
