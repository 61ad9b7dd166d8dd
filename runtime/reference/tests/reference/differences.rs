//! Gradients compared with finite differences of the loss, in f64.

use narrows_plan::model::{Model, ParameterId, WeightId};
use narrows_reference::{Parameters, Reference};
use narrows_runtime::{CounterRng, random_stream_name};

use super::cases::{GoldenCase, elements, norm};

/// Distance of the nearer two of the four points from the centre.
const STEP: f64 = 1e-4;
/// Largest error of a slope, relative to the norm of the parameter's gradient.
const TOLERANCE: f64 = 1e-8;
/// The error of a gradient is relative to at least this fraction of the norm of all gradients, because
/// the loss has 16 digits only.
const FLOOR: f64 = 1e-3;
/// Number of elements sampled from each parameter.
const SAMPLES: u64 = 3;

#[test]
fn gradients_equal_finite_differences() {
    for case in GoldenCase::all() {
        let batches = case.microbatches();
        let weights = case.weights::<f64>();
        let (_, gradients) = case.reference::<f64>().loss_and_gradients(&batches).unwrap();
        let (floor, mut largest) = (FLOOR * gradients.norm(), 0.0f64);
        for (id, gradient) in gradients.iter() {
            let gradient = elements(gradient);
            let mut directions = directions(id, gradient.len());
            leave_out_padding_row(&case.model, id, &mut directions);
            for (index, direction) in directions.iter().enumerate() {
                let loss = |distance: f64| {
                    let weights = move_weights(&weights, id, direction, distance);
                    Reference::new(&case.model, weights).unwrap().loss(&batches).unwrap()
                };
                let actual = slope(loss);
                let expected: f64 = gradient.iter().zip(direction).map(|(g, d)| g * d).sum();
                let error = (actual - expected).abs() / norm(&gradient).max(floor);
                assert!(
                    error < TOLERANCE,
                    "{}: {id}, direction {index}: the loss changes by {actual}, the gradient \
                     says {expected}",
                    case.name
                );
                largest = largest.max(error);
            }
            assert!(norm(&gradient) > 1e-6, "{}: {id} has no gradient", case.name);
        }
        println!("{}: largest relative error {largest:.1e}", case.name);
    }
}

/// Removes the row of the padding token, whose gradient leaves out the lookup.
fn leave_out_padding_row(model: &Model, id: ParameterId, directions: &mut [Vec<f64>]) {
    let (Some(token), WeightId::Embedding) = (model.padding_token, id.weight) else { return };
    let (row, width) = (token as usize, model.hidden as usize);
    directions.iter_mut().for_each(|direction| direction[row * width..][..width].fill(0.0));
}

/// Some coordinate axes, and one random direction of unit length.
fn directions(id: ParameterId, elements: usize) -> Vec<Vec<f64>> {
    let stream = CounterRng::new(5, &random_stream_name(id));
    let axis = |sample: u64| {
        let mut axis = vec![0.0; elements];
        axis[(stream.bits(sample) % elements as u64) as usize] = 1.0;
        axis
    };
    let mut directions: Vec<Vec<f64>> = (0..SAMPLES).map(axis).collect();
    let random: Vec<f64> = (0..elements as u64).map(|n| stream.normal(SAMPLES + n)).collect();
    let length = norm(&random);
    directions.push(random.into_iter().map(|x| x / length).collect());
    directions
}

fn move_weights(
    weights: &Parameters<f64>,
    id: ParameterId,
    direction: &[f64],
    distance: f64,
) -> Parameters<f64> {
    let mut moved = weights.clone();
    let matrix = moved.get_mut(id).expect("a parameter");
    for (x, d) in matrix.elements_mut().iter_mut().zip(direction) {
        *x += distance * d;
    }
    moved
}

/// The derivative at 0 by central differences of fourth order.
fn slope(f: impl Fn(f64) -> f64) -> f64 {
    (8.0 * (f(STEP) - f(-STEP)) - (f(2.0 * STEP) - f(-2.0 * STEP))) / (12.0 * STEP)
}
