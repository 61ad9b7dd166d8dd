//! Models that the optimizer LORO can train.

use super::{Activation, Model, Weight};

/// Reason why a model cannot have exact steps of LORO, and what to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExactStepObstacle {
    /// The reason, as a clause.
    pub reason: String,
    /// The kind of model that has exact steps.
    pub hint: &'static str,
}

impl Model {
    /// The first reason why the model cannot have exact steps: it has no factor pairs; a pair with an activation, a latent crossing
    /// or a rank above a width. `None` where it can.
    pub fn exact_step_obstacle(&self) -> Option<ExactStepObstacle> {
        let plain = "a model of plain factor pairs, such as svd-60m";
        let obstacle = |reason: String, hint| Some(ExactStepObstacle { reason, hint });
        let mut pairs = 0;
        for (layer, block) in self.blocks.iter().enumerate() {
            for (kind, linear) in block.linears() {
                let Weight::Pair(pair) = &linear.weight else { continue };
                pairs += 1;
                if pair.activation != Activation::Identity || pair.crossing.is_some() {
                    let reason = format!(
                        "layer {layer} {kind} has an activation or a latent crossing between its factors: an exact step moves \
                         their product and chooses the factors anew, on which such a linear depends"
                    );
                    return obstacle(reason, plain);
                }
                let (rank, width) = (pair.rank, linear.d_in.min(linear.d_out));
                if rank > width {
                    let reason = format!(
                        "layer {layer} {kind} has rank {rank}, which is above its width {width}"
                    );
                    return obstacle(reason, "a model with smaller ranks");
                }
            }
        }
        match pairs {
            0 => obstacle("the model has no factor pairs".into(), plain),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::model;

    #[test]
    fn models_without_plain_pairs_have_obstacles() {
        let pairs = r#""activation": "identity""#;
        for (linears, expected) in [
            (format!(r#"{{"rank": 16, {pairs}}}"#), None),
            (r#""dense""#.into(), Some("the model has no factor pairs")),
            (
                r#"{"rank": 8, "activation": "silu"}"#.into(),
                Some("layer 0 q has an activation or a latent crossing between its factors"),
            ),
            (
                format!(
                    r#"{{"rank": 8, {pairs}, "crossing": {{"form": "paper", "gate": "identity"}}}}"#
                ),
                Some("layer 1 q has an activation or a latent crossing between its factors"),
            ),
            (
                format!(r#"{{"rank": 80, {pairs}}}"#),
                Some("layer 0 q has rank 80, which is above its width 64"),
            ),
        ] {
            let text = format!(
                r#"{{"format": "narrows-model/1", "hidden": 64, "vocab": 256, "heads": 4, "d_ff": 96,
                "blocks": {{"count": 2, "default": {{"product": "swiglu", "all": {linears}}}}}}}"#
            );
            let model = model::read("small", &text).unwrap();
            let reason = model.exact_step_obstacle().map(|obstacle| obstacle.reason);
            match expected {
                None => assert_eq!(reason, None),
                Some(part) => assert!(reason.is_some_and(|reason| reason.contains(part)), "{part}"),
            }
        }
    }
}
