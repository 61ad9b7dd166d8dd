//! Embedding and cross-entropy loss.
//!
//! Embedding: row t of the result is the table row of token t. The gradient of a table row is the sum
//! of the gradients of its tokens; that of the padding token is zero.
//!
//! Cross-entropy of logits l with the target t: log Σ_j e^(l_j) − l_t, with the gradient
//! softmax(l) − onehot(t). Both are divided by the number of predicted tokens of the whole step, which may
//! have several microbatches. A token whose target is [`IGNORED_TARGET`] is not predicted.

use narrows_runtime::IGNORED_TARGET;

use narrows_plan::model::Model;

use super::{Float, Matrix};

pub(super) fn embedding_forward<T: Float>(table: &Matrix<T>, tokens: &[u32]) -> Matrix<T> {
    Matrix::from_fn(tokens.len(), table.columns(), |row, j| table[(tokens[row] as usize, j)])
}

/// The gradient of the table.
pub(super) fn embedding_backward<T: Float>(
    model: &Model,
    tokens: &[u32],
    gradient: &Matrix<T>,
) -> Matrix<T> {
    let mut dtable = Matrix::zeros(model.vocab as usize, gradient.columns());
    let is_trained = |token: u32| model.padding_token != Some(token.into());
    for (row, token) in tokens.iter().enumerate().filter(|(_, token)| is_trained(**token)) {
        for (sum, dy) in dtable.row_mut(*token as usize).iter_mut().zip(gradient.row(row)) {
            *sum += *dy;
        }
    }
    dtable
}

/// Returns the contribution of a microbatch to the mean loss of the step, and the gradient of its logits.
pub(super) fn cross_entropy<T: Float>(
    logits: &Matrix<T>,
    targets: &[u32],
    predicted_in_step: usize,
) -> (T, Matrix<T>) {
    let factor = T::one() / T::from_f64(predicted_in_step as f64);
    let mut loss = T::zero();
    let mut dlogits = Matrix::zeros(logits.rows(), logits.columns());
    for (row, target) in targets.iter().enumerate() {
        if *target == IGNORED_TARGET {
            continue;
        }
        let logits = logits.row(row);
        let largest = logits.iter().copied().fold(T::neg_infinity(), T::max);
        let sum: T = logits.iter().map(|x| (*x - largest).exp()).sum();
        loss += largest + sum.ln() - logits[*target as usize];
        for (dx, x) in dlogits.row_mut(row).iter_mut().zip(logits) {
            *dx = (*x - largest).exp() / sum * factor;
        }
        dlogits[(row, *target as usize)] -= factor;
    }
    (loss * factor, dlogits)
}
