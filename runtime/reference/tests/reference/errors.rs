//! Errors of invalid batches and parameters.

use narrows_plan::model::{LinearKind, ParameterId, WeightId};
use narrows_reference::{Batch, Matrix, Parameters, Reference, ReferenceError};

use super::cases::GoldenCase;

#[test]
fn invalid_batches_are_errors() {
    let case = GoldenCase::read("llama");
    let reference = case.reference::<f32>();
    let assert_error = |tokens: &[u32], targets: &[u32], sequences, length, message: &str| {
        let batch = Batch { tokens, targets, sequences, length };
        let error = reference.loss(&[batch]).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(reference.logits(batch), Err(error.clone()));
        assert_eq!(reference.loss_and_gradients(&[batch]), Err(error));
    };
    assert_error(&[1, 2], &[2, 3], 1, 3, "1 sequences of 3 tokens need as many");
    assert_error(&[1, 2], &[2], 1, 2, "2 tokens and 1 targets");
    assert_error(&[], &[], 0, 5, "at least one");
    assert_error(&[], &[], 5, 0, "at least one");
    assert_error(&[1, 2], &[2, 3], usize::MAX, 2, "need as many");
    assert_error(&[1, 13], &[2, 3], 1, 2, "token 1 is 13, the vocabulary has 13 tokens");
    assert_error(&[1, 2], &[u32::MAX - 1, 3], 2, 1, "target 0 is 4294967294");
    assert_eq!(reference.loss(&[]), Err(ReferenceError::NoMicrobatch));
}

#[test]
fn parameters_of_another_model_are_errors() {
    let case = GoldenCase::read("cola");
    let head = ParameterId { block: None, weight: WeightId::Head };
    let in_block = |block, weight| ParameterId { block: Some(block), weight };
    let (q_a, k_b) = (WeightId::FactorA(LinearKind::Q), WeightId::FactorB(LinearKind::K));
    // The model is tied, and has no head.
    let without = |missing: ParameterId| -> Vec<(ParameterId, Matrix<f32>)> {
        let weights = case.weights::<f32>();
        let kept = weights.iter().filter(|(id, _)| *id != missing);
        kept.map(|(id, matrix)| (id, matrix.clone())).collect()
    };
    let error = |parameters: Vec<(ParameterId, Matrix<f32>)>| {
        let parameters: Parameters<f32> = parameters.into_iter().collect();
        Reference::new(&case.model, parameters).unwrap_err().to_string()
    };
    assert_eq!(error(without(in_block(1, q_a))), "the parameter `layer 1 q.a` is missing");
    let mut other = without(head);
    other.push((head, Matrix::zeros(12, 13)));
    assert_eq!(error(other), "the model has no parameter `head`");
    let mut other = without(in_block(0, k_b));
    other.push((in_block(0, k_b), Matrix::zeros(16, 4)));
    assert_eq!(
        error(other),
        "the parameter `layer 0 k.b` is (16, 4) (rows, columns), the model has (4, 16)"
    );
}
