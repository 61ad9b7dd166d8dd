//! Logits of a cached model equal those of the reference interpreter at every position, however the tokens are divided.

use narrows_cpu::kernels::Parallel;
use narrows_cpu::{CachedModel, SequenceError};
use narrows_plan::model::{Model, presets};
use narrows_plan::{CheckedProgram, Context, Mesh, Precision, Workload, Zero, lower};
use narrows_reference::{Batch, Matrix, Parameters, Reference};
use narrows_runtime::session::{ModelTensors, StepInput, TensorKind};
use narrows_runtime::{CounterRng, logical_parameters, random_stream_name};
use narrows_test_support::plans::{TestRng, draw_plan};
use narrows_test_support::small_models::{small_models, unusual_model};

/// Largest difference of two logits, relative to the largest logit or 1.
const TOLERANCE: f64 = 1e-5;

/// Initial weights with noise, so that scales, biases and gates are not trivial.
fn weights(model: &Model) -> ModelTensors {
    let parameters = logical_parameters(model).into_iter().map(|parameter| {
        let (initial, columns) = (parameter.initial_value(3), parameter.columns);
        let noise = CounterRng::new(4, &random_stream_name(parameter.id));
        let element = |i| initial(i / columns, i % columns) + 0.05 * noise.normal(i);
        let elements = (0..parameter.elements()).map(|i| element(i) as f32).collect();
        (parameter.id, elements)
    });
    parameters.collect()
}

fn tokens(model: &Model, count: usize) -> Vec<u32> {
    (0..count as u64).map(|i| ((i * i * 31 + i * 7 + 5) % model.vocab) as u32).collect()
}

fn cached(model: &Model, weights: &ModelTensors, positions: usize, threads: usize) -> CachedModel {
    CachedModel::new(model, weights.clone(), positions, Parallel::new(threads))
}

/// In f64, one row for each token.
fn reference_logits(model: &Model, weights: &ModelTensors, tokens: &[u32]) -> Matrix<f64> {
    let parameters = Parameters::from_fn(model, |parameter| {
        let (elements, columns) = (weights[&parameter.id].clone(), parameter.columns as usize);
        move |row, column| f64::from(elements[row * columns + column])
    });
    let batch = Batch { tokens, targets: tokens, sequences: 1, length: tokens.len() };
    Reference::new(model, parameters).unwrap().logits(batch).unwrap()
}

#[track_caller]
fn assert_equal_logits(name: &str, actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1.0_f64, |largest, logit| largest.max(logit.abs()));
    for (i, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (f64::from(*actual) - expected).abs() / largest;
        assert!(error < TOLERANCE, "{name}, logit {i}: {actual} instead of {expected}");
    }
}

/// Models of every kind: dense and low-rank, with crossings, grouped queries and tied heads.
fn models() -> Vec<Model> {
    let mut rng = TestRng::new(7);
    let unusual = std::iter::repeat_with(|| unusual_model(&mut rng)).flatten().take(40);
    small_models().into_iter().chain(unusual).collect()
}

#[test]
fn logits_equal_those_of_the_reference_at_every_position() {
    for (index, model) in models().iter().enumerate() {
        let (weights, tokens) = (weights(model), tokens(model, 11));
        let mut cached = cached(model, &weights, 11, 1 + index % 2);
        let logits = cached.push_with_all_logits(&tokens).unwrap();
        let expected = reference_logits(model, &weights, &tokens);
        assert_equal_logits(&model.name, &logits, expected.elements());
    }
}

/// Longer than a chunk, so that the cache is used within one call too.
#[test]
fn cached_tokens_give_the_logits_of_uncached_ones() {
    for name in ["cola-tiny", "lax-60m"] {
        let mut model = presets::find(name).unwrap();
        model.vocab = 256;
        model.blocks.truncate(2);
        let (weights, tokens) = (weights(&model), tokens(&model, 150));
        let expected = reference_logits(&model, &weights, &tokens);
        for sizes in [&[150][..], &[1, 2, 3, 140, 4], &[149, 1]] {
            let mut cached = cached(&model, &weights, 150, 2);
            let mut end = 0;
            for size in sizes {
                let logits = cached.push(&tokens[end..end + size]).unwrap();
                end += size;
                let name = format!("{name}, {end} tokens");
                assert_equal_logits(&name, &logits, expected.row(end - 1));
            }
            assert_eq!(cached.tokens(), 150);
        }
        let mut cached = cached(&model, &weights, 150, 1);
        for (position, token) in tokens.iter().enumerate().take(20) {
            let logits = cached.push(&[*token]).unwrap();
            assert_equal_logits(name, &logits, expected.row(position));
        }
    }
}

/// The loss of the forward passes of a training program, under random plans with any number of devices.
#[test]
fn the_loss_equals_that_of_an_evaluation_under_any_plan() {
    for (seed, model) in small_models().into_iter().enumerate() {
        let mut rng = TestRng::new(seed as u64);
        let workload = Workload { global_batch: 2, sequence_length: 8, micro_batch: 1 };
        let mesh = Mesh { tensor: 2, pipeline: 1, data: 1, context: 1 };
        let context = Context::new(mesh, workload, Precision::Fp32, Zero::Off);
        let Some(plan) = (0..50).find_map(|_| draw_plan(&mut rng, &model, context)) else {
            panic!("no plan of {}", model.name)
        };
        let program = CheckedProgram::check(lower(&plan.resolve(&model).unwrap())).unwrap();
        let mut session = narrows_cpu::session(&model, program, 1).unwrap();
        let weights = weights(&model);
        session.load_tensors(TensorKind::Weights, &weights).unwrap();
        let tokens = tokens(&model, 17);
        let (inputs, targets) = (&tokens[..16], &tokens[1..]);
        let input = StepInput { tokens: inputs, targets };
        let expected = session.evaluate(input).unwrap().loss;
        let vocab = model.vocab as usize;
        let losses = inputs.chunks(8).zip(targets.chunks(8)).flat_map(|(inputs, targets)| {
            let logits = cached(&model, &weights, 8, 1).push_with_all_logits(inputs).unwrap();
            let loss = |(row, target): (&[f32], &u32)| cross_entropy(row, *target);
            logits.chunks(vocab).zip(targets).map(loss).collect::<Vec<_>>()
        });
        let loss = losses.sum::<f64>() / 16.0;
        assert!((loss / expected - 1.0).abs() < TOLERANCE, "{}: {loss}, {expected}", model.name);
    }
}

fn cross_entropy(logits: &[f32], target: u32) -> f64 {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    sum.ln() - f64::from(logits[target as usize])
}

#[test]
fn tokens_that_do_not_fit_change_nothing() {
    let model = presets::find("cola-tiny").unwrap();
    let weights = weights(&model);
    let mut one = cached(&model, &weights, 4, 1);
    let mut other = cached(&model, &weights, 4, 1);
    one.push(&[1, 2]).unwrap();
    other.push(&[1, 2]).unwrap();
    assert_eq!(
        one.push(&[3, 256]),
        Err(SequenceError::TokenOutOfVocabulary { token: 256, vocab: 256 })
    );
    assert_eq!(one.push(&[3, 4, 5]), Err(SequenceError::TooManyTokens { tokens: 5, positions: 4 }));
    assert_eq!(one.push(&[]), Ok(vec![]));
    assert_eq!(one.push(&[3, 4]), other.push(&[3, 4]));
}
