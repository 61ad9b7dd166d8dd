//! Multiplicative coordinate descent, for losses that are not smooth and have few parameters, all positive.

/// A search, with the best parameters so far.
#[derive(Clone, Debug)]
pub struct CoordinateDescent<P> {
    /// The parameters with the least loss.
    pub best: P,
    /// Their loss.
    pub loss: f64,
}

impl<P: Clone> CoordinateDescent<P> {
    /// A search from `start`.
    pub fn new(start: P, loss: impl Fn(&P) -> f64) -> CoordinateDescent<P> {
        CoordinateDescent { loss: loss(&start), best: start }
    }

    /// Multiplies each of `parameters` parameters by each factor, at most `moves_max` times in a row, and keeps every
    /// move that reduces the loss. `scale` multiplies the parameter of an index.
    pub fn sweep(
        &mut self,
        parameters: usize,
        factors: [f64; 2],
        moves_max: usize,
        scale: impl Fn(&mut P, usize, f64),
        loss: impl Fn(&P) -> f64,
    ) {
        for index in 0..parameters {
            for factor in factors {
                for _ in 0..moves_max {
                    let mut trial = self.best.clone();
                    scale(&mut trial, index, factor);
                    let trial_loss = loss(&trial);
                    if trial_loss < self.loss {
                        (self.best, self.loss) = (trial, trial_loss);
                    } else {
                        break;
                    }
                }
            }
        }
    }
}
