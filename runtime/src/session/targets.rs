//! The tokens of a step that are predicted.
//!
//! Programs divide the summed loss, and so its gradients, by all tokens of a step, a number that is known
//! when they are lowered. Where some targets are ignored, the mean over the predicted tokens is larger by
//! the ratio of all tokens to the predicted ones. Loss and gradients are linear in that factor, so that it is
//! applied where the gradients are used: by the optimizer, together with the clipping factor.

/// Target of a token that is not predicted: it adds nothing to loss and gradients.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// Number of predicted tokens.
pub(super) fn predicted_tokens(targets: &[u32]) -> u64 {
    targets.iter().filter(|target| **target != IGNORED_TARGET).count() as u64
}

/// Ratio of all tokens to the predicted ones: exactly 1 where every token is predicted, and finite where
/// none is.
pub(super) fn gradient_scale(targets: &[u32]) -> f64 {
    targets.len().max(1) as f64 / predicted_tokens(targets).max(1) as f64
}
