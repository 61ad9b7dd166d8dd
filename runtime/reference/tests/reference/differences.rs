//! Every gradient against differences of the loss, in f64.

use narrows_reference::{Parameters, Reference};
use narrows_runtime::CounterRng;

use super::cases::{Case, elements, norm};

/// Half the distance of the nearer two of the four points.
const STEP: f64 = 1e-4;
/// Largest error of a slope, relative to the norm of the parameter's gradient.
const TOLERANCE: f64 = 1e-8;
/// Gradients whose norm is less than this part of the norm of all are held to this part of it
/// instead: the loss is known to 16 digits only.
const FLOOR: f64 = 1e-3;
/// Elements drawn from each parameter.
const DRAWS: u64 = 3;

#[test]
fn gradients_are_slopes() {
    for case in Case::all() {
        let batches = case.microbatches();
        let weights = case.weights::<f64>();
        let (_, gradients) = case.reference::<f64>().loss_and_gradients(&batches).unwrap();
        let (floor, mut largest) = (FLOOR * gradients.norm(), 0.0f64);
        for (name, gradient) in gradients.iter() {
            let gradient = elements(gradient);
            let directions = directions(name, gradient.len());
            for (index, direction) in directions.iter().enumerate() {
                let loss = |distance: f64| {
                    let moved = moved(&weights, name, direction, distance);
                    Reference::new(&case.model, moved).unwrap().loss(&batches).unwrap()
                };
                let found = slope(loss);
                let expected: f64 = gradient.iter().zip(direction).map(|(g, d)| g * d).sum();
                let error = (found - expected).abs() / norm(&gradient).max(floor);
                assert!(
                    error < TOLERANCE,
                    "{}: {name}, direction {index}: the loss changes by {found}, the gradient \
                     says {expected}",
                    case.name
                );
                largest = largest.max(error);
            }
            assert!(norm(&gradient) > 1e-6, "{}: {name} has no gradient", case.name);
        }
        println!("{}: largest relative error {largest:.1e}", case.name);
    }
}

/// Some axes and one direction of unit length.
fn directions(name: &str, elements: usize) -> Vec<Vec<f64>> {
    let stream = CounterRng::new(5, name);
    let axis = |draw: u64| {
        let mut axis = vec![0.0; elements];
        axis[(stream.bits(draw) % elements as u64) as usize] = 1.0;
        axis
    };
    let mut found: Vec<Vec<f64>> = (0..DRAWS).map(axis).collect();
    let random: Vec<f64> = (0..elements as u64).map(|n| stream.normal(DRAWS + n)).collect();
    let length = norm(&random);
    found.push(random.into_iter().map(|x| x / length).collect());
    found
}

fn moved(
    weights: &Parameters<f64>,
    name: &str,
    direction: &[f64],
    distance: f64,
) -> Parameters<f64> {
    let mut moved = weights.clone();
    let matrix = moved.get_mut(name).expect("a parameter");
    for (x, d) in matrix.elements_mut().iter_mut().zip(direction) {
        *x += distance * d;
    }
    moved
}

/// The derivative at 0 by central differences of fourth order.
fn slope(f: impl Fn(f64) -> f64) -> f64 {
    (8.0 * (f(STEP) - f(-STEP)) - (f(2.0 * STEP) - f(-2.0 * STEP))) / (12.0 * STEP)
}
