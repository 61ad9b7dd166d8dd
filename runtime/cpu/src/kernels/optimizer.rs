//! The optimizer: the sum of squared gradients, and AdamW.

use std::ops::Range;

use super::Parallel;
use super::parallel::SharedOperand;
use super::simd::{Simd, SimdBody, sum_squares as squares};

/// Numbers of which the squares are summed in f32.
const BLOCK: usize = 4096;

/// `SquareSum`: Σg². Blocks are summed in f32, their sums in f64, in order: the same whatever the
/// threads.
pub fn gradient_square_sum(gradient: &[f32], parallel: Parallel) -> f64 {
    const BLOCKS: usize = 64;
    let mut total = 0.0;
    for piece in gradient.chunks(BLOCK * BLOCKS) {
        let mut sums = [0.0; BLOCKS];
        let blocks = piece.len().div_ceil(BLOCK);
        let work = (Blocks(piece), &mut sums[..blocks]);
        parallel.for_rows::<SquareBlocks, _>(blocks, work);
        total += sums.iter().map(|sum| f64::from(*sum)).sum::<f64>();
    }
    total
}

/// Numbers of which a row of the work takes a block.
struct Blocks<'a>(&'a [f32]);

impl super::parallel::ParallelRows for Blocks<'_> {
    fn elements(&self) -> usize {
        self.0.len()
    }

    fn split(self, row: usize, _: usize) -> (Self, Self) {
        let (left, right) = self.0.split_at((row * BLOCK).min(self.0.len()));
        (Blocks(left), Blocks(right))
    }
}

struct SquareBlocks;

impl SimdBody<(Blocks<'_>, &mut [f32])> for SquareBlocks {
    #[inline(always)]
    fn run<S: Simd>((Blocks(gradient), sums): (Blocks<'_>, &mut [f32])) {
        for (sum, block) in sums.iter_mut().zip(gradient.chunks(BLOCK)) {
            *sum = squares::<S>(block);
        }
    }
}

/// Numbers of one AdamW step, the same for all parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// What the gradient is multiplied with first: less than 1 when clipped.
    pub gradient_factor: f32,
    /// η of this step.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// λ, decoupled: weights shrink by η·λ of themselves.
    pub weight_decay: f32,
    /// Which step, from 1: corrects the moments' bias towards 0.
    pub step: u32,
}

/// What AdamW updates, each as long as the other.
pub struct ParameterState<'a> {
    /// The weights.
    pub weights: &'a mut [f32],
    /// m.
    pub first_moment: &'a mut [f32],
    /// v.
    pub second_moment: &'a mut [f32],
}

/// Numbers that are the same for all elements.
#[derive(Clone, Copy)]
struct AdamWFactors {
    gradient: f32,
    keep: f32,
    step_size: f32,
    root: f32,
    epsilon: f32,
    betas: (f32, f32),
    rests: (f32, f32),
}

/// `AdamWStep`, as PyTorch computes it: w ← (1 − ηλ)·w − η·m̂/(√v̂ + ε). The `updated` part of the
/// gradient belongs to the parameter; all of the gradient is zeroed.
pub fn adamw_update(
    parameter: ParameterState<'_>,
    gradient: &mut [f32],
    updated: Range<usize>,
    numbers: AdamWStep,
    parallel: Parallel,
) {
    let ParameterState { weights, first_moment, second_moment } = parameter;
    let (start, count) = (updated.start, weights.len());
    assert!(updated.len() == count && first_moment.len() == count && second_moment.len() == count);
    let corrections = [numbers.beta1, numbers.beta2]
        .map(|beta| 1.0 - f64::from(beta).powf(f64::from(numbers.step)));
    let factors = AdamWFactors {
        gradient: numbers.gradient_factor,
        keep: 1.0 - numbers.learning_rate * numbers.weight_decay,
        step_size: (f64::from(numbers.learning_rate) / corrections[0]) as f32,
        root: (1.0 / corrections[1].sqrt()) as f32,
        epsilon: numbers.epsilon,
        betas: (numbers.beta1, numbers.beta2),
        rests: (1.0 - numbers.beta1, 1.0 - numbers.beta2),
    };
    let (before, rest) = gradient.split_at_mut(start);
    let (mine, after) = rest.split_at_mut(count);
    let work = (weights, mine, first_moment, second_moment, SharedOperand(factors));
    parallel.for_rows::<AdamwPart, _>(count, work);
    super::fill_zero(before, parallel);
    super::fill_zero(after, parallel);
}

type AdamWOperands<'a> =
    (&'a mut [f32], &'a mut [f32], &'a mut [f32], &'a mut [f32], SharedOperand<AdamWFactors>);

struct AdamwPart;

impl SimdBody<AdamWOperands<'_>> for AdamwPart {
    #[inline(always)]
    fn run<S: Simd>((weights, gradient, first, second, SharedOperand(by)): AdamWOperands<'_>) {
        let moments = first.iter_mut().zip(second);
        for ((w, g), (m, v)) in weights.iter_mut().zip(gradient).zip(moments) {
            let gradient = by.gradient * *g;
            *m = by.betas.0 * *m + by.rests.0 * gradient;
            *v = by.betas.1 * *v + by.rests.1 * gradient * gradient;
            *w = by.keep * *w - by.step_size * *m / (v.sqrt() * by.root + by.epsilon);
            *g = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, random, widen};

    #[test]
    fn squares_of_any_length_and_threads() {
        for length in [0, 1, BLOCK, 70 * BLOCK + 5] {
            let g = random(1, length);
            let wanted: f64 = widen(&g).iter().map(|g| g * g).sum();
            let one = gradient_square_sum(&g, Parallel::SERIAL);
            assert!((one - wanted).abs() <= 1e-6 * wanted, "{one} {wanted}");
            for threads in [2, 3] {
                assert_eq!(gradient_square_sum(&g, Parallel::new(threads)), one);
            }
        }
    }

    /// Three steps against the definition in f64, updating the middle of a larger gradient.
    #[test]
    fn three_steps() {
        let count = 20_000;
        let (mut w, mut m, mut v) = (random(1, count), vec![0.0; count], vec![0.0; count]);
        let (mut w64, mut m64, mut v64) = (widen(&w), widen(&m), widen(&v));
        for step in 1..=3 {
            let mut gradient = random(10 + u64::from(step), count + 30);
            let numbers = AdamWStep {
                gradient_factor: 0.25,
                learning_rate: 3e-3,
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
                w64[i] = w64[i] * (1.0 - 3e-3 * 0.1) - 3e-3 * m / (v.sqrt() + 1e-8);
            }
            let parameter =
                ParameterState { weights: &mut w, first_moment: &mut m, second_moment: &mut v };
            let parallel = Parallel::new(step as usize);
            adamw_update(parameter, &mut gradient, 10..10 + count, numbers, parallel);
            assert!(gradient.iter().all(|g| *g == 0.0));
        }
        assert_close(&w, &w64, 1e-6);
        assert_close(&m, &m64, 1e-6);
        assert_close(&v, &v64, 1e-5);
    }
}
