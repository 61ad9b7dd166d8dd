//! Logits, gradients and ten training steps compared with those of PyTorch.

use std::collections::BTreeMap;

use narrows_reference::{Float, Matrix, Parameters};
use serde_json::Value;

use super::cases::{GoldenCase, elements, norm, number, numbers, rows};

/// Largest accepted errors.
struct Tolerance {
    /// Norm of the difference over the norm of the tensor.
    relative: f64,
    /// The error of a gradient is relative to at least this fraction of the norm of all gradients. In
    /// f32, small gradients are differences of larger values: that of PyTorch for `layer 0 k.b` of `svd`
    /// has a relative error of 3e-5.
    floor: f64,
    /// Replaces `relative` for the gradient norm at later steps. AdamW divides by the root of the second
    /// moment, so where that is small the weights differ by more than the gradients.
    later_norm: f64,
}

#[test]
fn results_in_f64_agree_to_nine_digits() {
    let tolerance = Tolerance { relative: 1e-9, floor: 0.0, later_norm: 1e-9 };
    GoldenCase::all().for_each(|case| compare::<f64>(&case, &tolerance));
}

#[test]
fn results_in_f32_agree_to_five_digits() {
    let tolerance = Tolerance { relative: 1e-5, floor: 1.0, later_norm: 1e-3 };
    GoldenCase::all().for_each(|case| compare::<f32>(&case, &tolerance));
}

fn compare<T: Float>(case: &GoldenCase, tolerance: &Tolerance) {
    let total_norm = numbers(case.value("step_gradient_norms"))[0];
    let mut errors: BTreeMap<&str, f64> = BTreeMap::new();
    let mut check = |kind: &'static str, name: &str, actual: &[f64], expected: &[f64]| {
        assert_eq!(actual.len(), expected.len(), "{}: {kind} {name}", case.name);
        let difference: Vec<f64> = actual.iter().zip(expected).map(|(x, y)| x - y).collect();
        let floor = if kind.starts_with("gradient") { tolerance.floor * total_norm } else { 0.0 };
        let error = norm(&difference) / norm(expected).max(floor);
        let tolerance = match kind {
            "norm in training" => tolerance.later_norm,
            _ => tolerance.relative,
        };
        assert!(
            error < tolerance,
            "{}: the relative error of {kind} {name} is {error:.1e}",
            case.name
        );
        let largest = errors.entry(kind).or_default();
        *largest = largest.max(error);
    };
    let float = |x: T| x.to_f64().expect("a float");
    let mut reference = case.reference::<T>();
    let batches = case.microbatches();

    let logits = reference.logits(batches[0]).unwrap();
    check("logits", "of the first microbatch", &elements(&logits), &rows(case.value("logits")));
    let (loss, gradients) = reference.loss_and_gradients(&batches).unwrap();
    check("loss", "", &[float(loss)], &[number(case.value("loss"))]);
    let norms = object(case.value("gradient_norms"));
    let names: Vec<String> = gradients.iter().map(|(id, _)| id.to_string()).collect();
    assert_eq!(names, norms.iter().map(|(name, _)| *name).collect::<Vec<_>>(), "{}", case.name);
    for (name, expected) in norms {
        let actual = elements(by_name(&gradients, name));
        check("gradient norm", name, &[norm(&actual)], &[number(expected)]);
    }
    for (name, expected) in object(case.value("gradients")) {
        let actual = elements(by_name(&gradients, name));
        check("gradient", name, &actual, &rows(expected));
    }

    let losses = numbers(case.value("losses"));
    let norms = numbers(case.value("step_gradient_norms"));
    for (step, (loss, norm)) in losses.into_iter().zip(norms).enumerate() {
        let result = reference.step(&case.optimizer(), &batches).unwrap();
        let when = format!("at step {}", step + 1);
        check("loss in training", &when, &[float(result.loss)], &[loss]);
        check("norm in training", &when, &[float(result.gradient_norm)], &[norm]);
    }
    for (name, expected) in object(case.value("final_weight_norms")) {
        let actual = elements(by_name(reference.parameters(), name));
        check("weight norm", name, &[norm(&actual)], &[number(expected)]);
    }
    for (kind, error) in errors {
        println!("{}: {kind} {error:.1e}", case.name);
    }
}

/// The parameter that a golden file calls `name`.
fn by_name<'a, T: Float>(parameters: &'a Parameters<T>, name: &str) -> &'a Matrix<T> {
    let found = parameters.iter().find(|(id, _)| id.to_string() == name);
    found.unwrap_or_else(|| panic!("no parameter {name}")).1
}

/// The entries of an object, by name.
fn object(value: &Value) -> Vec<(&str, &Value)> {
    let entries = value.as_object().expect("an object");
    let sorted: BTreeMap<&str, &Value> = entries.iter().map(|(k, v)| (k.as_str(), v)).collect();
    sorted.into_iter().collect()
}
