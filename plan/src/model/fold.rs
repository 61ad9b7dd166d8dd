//! Factor pairs folded into dense matrices.

use super::{Activation, Model, Weight};
use crate::defect::Defect;

impl Model {
    /// The dense model that computes the same function, where each factor pair becomes the matrix A·B.
    ///
    /// # Errors
    /// The first linear between whose factors there is an activation or a crossing: its function is not that
    /// of a matrix.
    pub fn folded(&self) -> Result<Model, Defect> {
        let mut folded = self.clone();
        for (index, block) in folded.blocks.iter_mut().enumerate() {
            for (kind, linear) in super::LinearKind::ALL.into_iter().zip(block.linears_mut()) {
                let Weight::Pair(pair) = &linear.weight else { continue };
                let problem = match (pair.activation, &pair.crossing) {
                    (Activation::Silu, _) => "has SiLU between its factors",
                    (Activation::Identity, Some(_)) => "has a latent crossing between its factors",
                    (Activation::Identity, None) => {
                        linear.weight = Weight::Dense;
                        continue;
                    }
                };
                let problem = format!("{problem}, so that no dense matrix computes its function");
                return Err(Defect::new(format!("layer {index} {kind}"), problem));
            }
        }
        Ok(folded)
    }
}
