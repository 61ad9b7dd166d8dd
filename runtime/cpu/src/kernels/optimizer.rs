//! The optimizer: the sum of squared gradients, and AdamW.

use std::ops::Range;

use narrows_runtime::UpdateGroup;
use narrows_runtime::session::OptimizerUpdate;

use super::elementwise::fill_zero;
use super::parallel::{Parallel, ParallelRows, SharedOperand};
use super::simd::{Simd, SimdBody, sum_squares};

/// Elements of a block whose squares are summed in f32.
const BLOCK: usize = 4096;

/// `SquareSum`: Σg². Squares are summed in f32 within a block and in f64 over blocks, in a fixed
/// order, so the sum does not depend on the number of threads.
pub fn gradient_square_sum(gradient: &[f32], parallel: Parallel) -> f64 {
    const BLOCKS: usize = 64;
    let mut total = 0.0;
    for piece in gradient.chunks(BLOCK * BLOCKS) {
        let mut sums = [0.0; BLOCKS];
        let blocks = piece.len().div_ceil(BLOCK);
        let operands = (BlockRows(piece), &mut sums[..blocks]);
        parallel.for_rows::<SumSquaresOfBlocks, _>(blocks, operands);
        total += sums.iter().map(|sum| f64::from(*sum)).sum::<f64>();
    }
    total
}

/// Elements whose blocks count as rows of the loop; the last block can be shorter.
struct BlockRows<'a>(&'a [f32]);

impl ParallelRows for BlockRows<'_> {
    fn elements(&self) -> usize {
        self.0.len()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        let (left, right) = self.0.split_at((row * BLOCK).min(self.0.len()));
        (BlockRows(left), BlockRows(right))
    }
}

struct SumSquaresOfBlocks;

impl SimdBody<(BlockRows<'_>, &mut [f32])> for SumSquaresOfBlocks {
    #[inline(always)]
    fn run<S: Simd>((BlockRows(gradient), sums): (BlockRows<'_>, &mut [f32])) {
        for (sum, block) in sums.iter_mut().zip(gradient.chunks(BLOCK)) {
            *sum = sum_squares::<S>(block);
        }
    }
}

/// Hyperparameters of one AdamW step, the same for all elements of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Factor on the gradient: below 1 when it is clipped.
    pub gradient_factor: f32,
    /// Learning rate η of this step.
    pub learning_rate: f32,
    /// Learning rate of the parameter over η.
    pub rate_scale: f64,
    /// Decay β₁ of the first moment.
    pub beta1: f32,
    /// Decay β₂ of the second moment.
    pub beta2: f32,
    /// ε, added to the square root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay λ: weights are multiplied by 1 − η·λ.
    pub weight_decay: f32,
    /// Number of steps since the moments were zero, from 1, for their bias correction.
    pub step: u32,
}

impl AdamWStep {
    /// The hyperparameters of a step for a parameter of this group, where the squares of all gradients sum to `squares`.
    pub fn new(update: &OptimizerUpdate, group: UpdateGroup, squares: f32) -> AdamWStep {
        let OptimizerUpdate { optimizer, coefficients, .. } = update;
        AdamWStep {
            gradient_factor: update.gradient_factor(f64::from(squares).sqrt()) as f32,
            learning_rate: coefficients.learning_rate as f32,
            rate_scale: coefficients.rate_scale(group),
            beta1: optimizer.beta1 as f32,
            beta2: optimizer.beta2 as f32,
            epsilon: coefficients.epsilon as f32,
            weight_decay: coefficients.decay_of(group) as f32,
            step: u32::try_from(coefficients.moment_steps).unwrap_or(u32::MAX),
        }
    }
}

/// Weights and moments that AdamW updates, all of the same length.
pub struct ParameterState<'a> {
    /// Weights w.
    pub weights: &'a mut [f32],
    /// First moments m.
    pub first_moment: &'a mut [f32],
    /// Second moments v.
    pub second_moment: &'a mut [f32],
}

/// Constants of the update loop.
#[derive(Clone, Copy)]
struct AdamWFactors {
    gradient: f32,
    /// 1 − ηλ.
    weight: f32,
    /// η / (1 − β₁ᵗ), with the learning rate of the parameter for η.
    step_size: f32,
    /// 1 / √(1 − β₂ᵗ).
    root: f32,
    epsilon: f32,
    /// β₁ and β₂.
    betas: (f32, f32),
    /// 1 − β₁ and 1 − β₂.
    complements: (f32, f32),
}

/// `AdamW`, as PyTorch computes it: w ← (1 − ηλ)·w − η·m̂/(√v̂ + ε). The gradient is of the parameter's length.
pub fn adamw_update(
    parameter: ParameterState<'_>,
    gradient: &[f32],
    step: AdamWStep,
    parallel: Parallel,
) {
    update_elements(parameter, gradient, step, parallel);
}

/// As [`adamw_update`] with the elements `updated` of a gradient, which is zeroed whole.
pub fn adamw_update_and_zero(
    parameter: ParameterState<'_>,
    gradient: &mut [f32],
    updated: Range<usize>,
    step: AdamWStep,
    parallel: Parallel,
) {
    let (before, rest) = gradient.split_at_mut(updated.start);
    let (local, after) = rest.split_at_mut(updated.len());
    update_elements(parameter, local, step, parallel);
    fill_zero(before, parallel);
    fill_zero(after, parallel);
}

fn update_elements<'a, G>(
    parameter: ParameterState<'a>,
    gradient: G,
    step: AdamWStep,
    parallel: Parallel,
) where
    G: ParallelRows + IntoIterator<Item: GradientElement>,
{
    let ParameterState { weights, first_moment, second_moment } = parameter;
    let count = weights.len();
    assert!(gradient.elements() == count);
    assert!(first_moment.len() == count && second_moment.len() == count);
    let corrections =
        [step.beta1, step.beta2].map(|beta| 1.0 - f64::from(beta).powf(f64::from(step.step)));
    let factors = AdamWFactors {
        gradient: step.gradient_factor,
        weight: 1.0 - step.learning_rate * step.weight_decay,
        step_size: (step.rate_scale * f64::from(step.learning_rate) / corrections[0]) as f32,
        root: (1.0 / corrections[1].sqrt()) as f32,
        epsilon: step.epsilon,
        betas: (step.beta1, step.beta2),
        complements: (1.0 - step.beta1, 1.0 - step.beta2),
    };
    let operands = (weights, gradient, first_moment, second_moment, SharedOperand(factors));
    parallel.for_rows::<AdamWElements, _>(count, operands);
}

/// An element of a gradient that an update reads.
trait GradientElement {
    /// The value. An element that can be written becomes zero.
    fn take(self) -> f32;
}

impl GradientElement for &f32 {
    #[inline(always)]
    fn take(self) -> f32 {
        *self
    }
}

impl GradientElement for &mut f32 {
    #[inline(always)]
    fn take(self) -> f32 {
        std::mem::take(self)
    }
}

type AdamWOperands<'a, G> =
    (&'a mut [f32], G, &'a mut [f32], &'a mut [f32], SharedOperand<AdamWFactors>);

struct AdamWElements;

impl<'a, G> SimdBody<AdamWOperands<'a, G>> for AdamWElements
where
    G: IntoIterator<Item: GradientElement>,
{
    #[inline(always)]
    fn run<S: Simd>((weights, gradient, m, v, SharedOperand(factors)): AdamWOperands<'a, G>) {
        let moments = m.iter_mut().zip(v);
        for ((w, g), (m, v)) in weights.iter_mut().zip(gradient).zip(moments) {
            let gradient = factors.gradient * g.take();
            *m = factors.betas.0 * *m + factors.complements.0 * gradient;
            *v = factors.betas.1 * *v + factors.complements.1 * gradient * gradient;
            let update = factors.step_size * *m / (v.sqrt() * factors.root + factors.epsilon);
            *w = factors.weight * *w - update;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random, widen};

    #[test]
    fn square_sum_is_equal_with_any_number_of_threads() {
        for length in [0, 1, BLOCK, 70 * BLOCK + 5] {
            let g = random(1, length);
            let expected: f64 = widen(&g).iter().map(|g| g * g).sum();
            let serial = gradient_square_sum(&g, Parallel::SERIAL);
            assert!((serial - expected).abs() <= 1e-6 * expected, "{serial} {expected}");
            for threads in [2, 3] {
                assert_eq!(gradient_square_sum(&g, Parallel::new(threads)), serial);
            }
        }
    }

    /// Three steps on elements in the middle of a larger gradient, which is zeroed or not.
    #[test]
    fn adamw_is_the_definition_in_f64() {
        let count = 20_000;
        let (mut w, mut m, mut v) = (random(1, count), vec![0.0; count], vec![0.0; count]);
        let (mut w64, mut m64, mut v64) = (widen(&w), widen(&m), widen(&v));
        for step in 1..=3 {
            let mut gradient = random(10 + u64::from(step), count + 30);
            let hyperparameters = AdamWStep {
                gradient_factor: 0.25,
                learning_rate: 3e-3,
                rate_scale: 0.25,
                beta1: 0.9,
                beta2: 0.95,
                epsilon: 1e-8,
                weight_decay: 0.1,
                step,
            };
            let power = f64::from(step);
            for i in 0..count {
                let g = 0.25 * f64::from(gradient[10 + i]);
                m64[i] = 0.9 * m64[i] + 0.1 * g;
                v64[i] = 0.95 * v64[i] + 0.05 * g * g;
                let (m, v) =
                    (m64[i] / (1.0 - 0.9f64.powf(power)), v64[i] / (1.0 - 0.95f64.powf(power)));
                w64[i] = w64[i] * (1.0 - 3e-3 * 0.1) - 0.25 * 3e-3 * m / (v.sqrt() + 1e-8);
            }
            let parameter =
                ParameterState { weights: &mut w, first_moment: &mut m, second_moment: &mut v };
            let (parallel, part) = (Parallel::new(step as usize), 10..10 + count);
            if step == 2 {
                adamw_update(parameter, &gradient[part], hyperparameters, parallel);
            } else {
                adamw_update_and_zero(parameter, &mut gradient, part, hyperparameters, parallel);
                assert!(gradient.iter().all(|g| *g == 0.0));
            }
        }
        assert_close(&w, &w64, 1e-6);
        assert_close(&m, &m64, 1e-6);
        assert_close(&v, &v64, 1e-5);
    }
}
