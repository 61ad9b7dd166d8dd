//! Training steps.

use std::time::Instant;

use narrows_plan::model::presets;
use narrows_reference::{Batch, Parameters, Reference};
use narrows_runtime::{CounterRng, Optimizer};

use super::cases::{GoldenCase, elements};

#[test]
fn gradients_of_microbatches_add_up_to_those_of_the_batch() {
    for case in GoldenCase::all() {
        let whole = case.microbatches()[0];
        let halves: Vec<Batch> = whole
            .tokens
            .chunks(whole.length)
            .zip(whole.targets.chunks(whole.length))
            .map(|(tokens, targets)| Batch { tokens, targets, sequences: 1, ..whole })
            .collect();
        assert_eq!(halves.len(), 2);
        let reference = case.reference::<f64>();
        let (loss, gradients) = reference.loss_and_gradients(&[whole]).unwrap();
        let (sum, sums) = reference.loss_and_gradients(&halves).unwrap();
        assert!((loss - sum).abs() < 1e-13, "{}: {loss} and {sum}", case.name);
        for ((id, one), (_, other)) in gradients.iter().zip(sums.iter()) {
            let pairs = elements(one).into_iter().zip(elements(other));
            let difference = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(difference < 1e-13, "{}: {id} differs by {difference}", case.name);
        }
    }
}

#[test]
fn the_loss_of_cola_tiny_falls_on_repeated_tokens() {
    let model = presets::find("cola-tiny").unwrap();
    let (sequences, length) = (4, 128);
    // The target is a function of the token.
    let stream = CounterRng::new(3, "tokens");
    let tokens: Vec<u32> = (0..sequences * length).map(|n| stream.bits(n) as u32 % 16).collect();
    let targets: Vec<u32> = tokens.iter().map(|token| (token * 5 + 3) % 16).collect();
    let (sequences, length) = (sequences as usize, length as usize);
    let batch = Batch { tokens: &tokens, targets: &targets, sequences, length };
    let mut reference = Reference::new(&model, Parameters::<f32>::initial(&model, 1)).unwrap();
    let (steps, optimizer) = (8, Optimizer::new(3e-3, 2, 8));
    let begin = Instant::now();
    let losses: Vec<f32> =
        (0..steps).map(|_| reference.step(&optimizer, &[batch]).unwrap().loss).collect();
    println!("{:.3} s a step", begin.elapsed().as_secs_f64() / f64::from(steps));
    assert!((losses[0] - 256f32.ln()).abs() < 0.2, "{losses:?}");
    assert!(losses[7] < losses[0] - 1.0, "{losses:?}");
}
