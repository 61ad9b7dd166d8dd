//! Going on under the same plan, and under another.

use std::path::Path;
use std::sync::Arc;

use narrows_plan::mesh::Mesh;
use narrows_plan::strategy::Zero;
use narrows_runtime::Trainer;
use narrows_runtime::checkpoint::{Checkpoint, ResumeError, load, save};
use narrows_runtime::data::{Sampler, SamplerConfig, TokenFile};
use narrows_runtime::session::{NamedTensors, TensorKind};

use crate::support::*;

/// Few devices: they wait for each other, and a machine with other work lets them wait long.
fn cases(tied: bool) -> [(Mesh, Zero); 5] {
    [
        (mesh(1, 1, 1), Zero::Off),
        (mesh(2, 1, 1), Zero::Off),
        (mesh(1, 2, 1), Zero::Off),
        (mesh(1, 1, 2), Zero::One),
        if tied { (mesh(2, 2, 1), Zero::Off) } else { (mesh(2, 1, 2), Zero::One) },
    ]
}

fn bits(whole: &NamedTensors) -> Vec<(&str, Vec<u32>)> {
    let bits = |numbers: &Vec<f32>| numbers.iter().map(|number| number.to_bits()).collect();
    whole.iter().map(|(name, numbers)| (&**name, bits(numbers))).collect()
}

fn parts(of: &Checkpoint) -> Vec<(&str, Vec<u32>)> {
    [&of.weights, &of.first_moments, &of.second_moments].map(bits).concat()
}

fn assert_same(a: &Checkpoint, b: &Checkpoint, what: &str) {
    assert_eq!(a.step, b.step, "{what}");
    let (a, b) = (parts(a), parts(b));
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(&b) {
        assert!(a == b, "{what}: {} and {}", a.0, b.0);
    }
}

#[test]
fn the_same_plan_goes_on_bit_by_bit() {
    const STEPS: u64 = 3;
    for tied in [false, true] {
        let model = small_model(tied);
        for (seed, (mesh, zero)) in cases(tied).into_iter().enumerate() {
            let what = format!("{mesh}, tied {tied}");
            let plan = plan(&model, seed as u64, mesh, zero);
            let mut straight = begun(&model, &plan);
            let losses = train(&mut straight, 2 * STEPS);

            let folder = tempfile::tempdir().unwrap();
            let mut first = begun(&model, &plan);
            train(&mut first, STEPS);
            let saved = checkpoint_of(&first, &model);
            let path = save(folder.path(), &saved, &model, keep(1)).unwrap();
            let loaded = load(&path, &model).unwrap();
            assert!(loaded == saved, "{what}");
            let mut second = session(&model, &plan);
            loaded.restore(&mut second).unwrap();
            let rest = train(&mut second, STEPS);
            assert_eq!(rest, losses[STEPS as usize..], "{what}");
            let (a, b) = (checkpoint_of(&straight, &model), checkpoint_of(&second, &model));
            assert_same(&a, &b, &what);
        }
    }
}

#[test]
fn another_plan_goes_on_along_the_curve() {
    const STEPS: u64 = 3;
    for tied in [false, true] {
        let model = small_model(tied);
        let mut worst = 0.0_f64;
        for (number, (mesh, zero)) in cases(tied).into_iter().enumerate() {
            let before = plan(&model, 100 + number as u64, mesh, zero);
            let mut straight = begun(&model, &before);
            train(&mut straight, STEPS);
            let saved = checkpoint_of(&straight, &model);
            let losses = train(&mut straight, STEPS);
            assert!(losses[2] < 4.1, "nothing is learned: {losses:?}");
            // The next mesh, and another plan of the same.
            let (next, next_zero) = cases(tied)[(number + 1) % cases(tied).len()];
            for (seed, mesh, zero) in [(200, next, next_zero), (300, mesh, zero)] {
                let mut other = session(&model, &plan(&model, seed + number as u64, mesh, zero));
                saved.restore(&mut other).unwrap();
                for (found, wanted) in train(&mut other, STEPS).iter().zip(&losses) {
                    let off = (found - wanted).abs() / wanted;
                    worst = worst.max(off);
                    assert!(off < 1e-4, "{off:e} on {mesh} after {}", before.mesh);
                }
            }
        }
        println!("tied {tied}: losses are off by {worst:e} at most");
    }
}

#[test]
fn what_one_plan_gave_another_gives_back() {
    for tied in [false, true] {
        let model = small_model(tied);
        let mut before = begun(&model, &plan(&model, 7, mesh(2, 2, 2), Zero::One));
        train(&mut before, 2);
        let saved = checkpoint_of(&before, &model);
        assert!(saved.second_moments.values().all(|v| v.iter().any(|number| *number > 0.0)));
        let more = [(mesh(4, 1, 1), Zero::Off), (mesh(4, 2, 2), Zero::One)];
        for (seed, (mesh, zero)) in cases(tied).into_iter().chain(more).enumerate() {
            let mut after = session(&model, &plan(&model, seed as u64, mesh, zero));
            saved.restore(&mut after).unwrap();
            assert_same(&saved, &checkpoint_of(&after, &model), &format!("{mesh}, tied {tied}"));
        }
    }
}

/// The tokens go on with the next sequence, and are not those of another text.
#[test]
fn a_run_goes_on_where_its_tokens_were() {
    let model = small_model(false);
    let plan = plan(&model, 3, mesh(2, 1, 1), Zero::Off);
    let run = |text: &[u8]| {
        let text: Vec<u8> = text.iter().map(|byte| byte % 64).collect();
        let file = Arc::new(TokenFile::from_text(Path::new("text"), &text).unwrap());
        let sampling = SamplerConfig { sequence_length: 8, vocabulary: 256, seed: 9 };
        let sampler = Sampler::new(file, sampling).unwrap();
        Trainer::new(begun(&model, &plan), sampler, optimizer()).unwrap()
    };
    // Less than two steps an epoch, so that the resumed one begins in the midst of the third.
    let text = &b"It was the best of times, it was the worst of times, ".repeat(2);
    let mut straight = run(text);
    let losses: Vec<f64> = (0..6).map(|_| straight.step().unwrap().loss).collect();
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
fn a_session_of_another_model_is_left_alone() {
    let saved = trained(&small_model(false));
    let other = small_model(true);
    let mut session = begun(&other, &plan(&other, 1, mesh(1, 1, 1), Zero::Off));
    let before = session.local_tensors(TensorKind::Weights).unwrap();
    let fault = saved.restore(&mut session).unwrap_err();
    assert_eq!(fault.to_string(), "is none of the model's");
    assert_eq!(fault.location().unwrap(), "tensor `head`");
    assert_eq!(session.local_tensors(TensorKind::Weights).unwrap(), before);
}
