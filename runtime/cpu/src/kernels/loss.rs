//! Cross-entropy over a shard of the vocabulary, in the three passes between its two reductions.
//!
//! With m the largest logit of the whole row and Σ = Σ exp(logit − m), a token's loss is
//! m + ln Σ − logit(target), and its gradient is (softmax − onehot)·factor. Each device makes its
//! maximum, then Σ and the target's logit (0 where another device has it), which are added.
//!
//! Shapes: logits `[tokens, vocabulary shard]`, maximum `[tokens]`, packed `[tokens, 2]`: Σ and the
//! target's logit. The shard begins at token id `first`. The factor is 1 over the tokens of the step.

use super::parallel::{GroupedRows, SharedOperand};
use super::simd::{Simd, SimdBody, exp, maximum as largest, sum_exp};
use super::{MatrixView, MatrixViewMut, Parallel};

/// `LossMaximum`: the largest logit of the shard.
pub fn loss_maximum(logits: MatrixView<'_>, maximum: &mut [f32], parallel: Parallel) {
    assert_eq!(logits.rows(), maximum.len());
    parallel.for_rows::<MaximumRows, _>(logits.rows(), (logits, maximum));
}

struct MaximumRows;

impl SimdBody<(MatrixView<'_>, &mut [f32])> for MaximumRows {
    #[inline(always)]
    fn run<S: Simd>((logits, maximum): (MatrixView<'_>, &mut [f32])) {
        for (row, maximum) in maximum.iter_mut().enumerate() {
            *maximum = largest(logits.row(row));
        }
    }
}

/// `LossSum`: Σ exp(logit − maximum) and the target's logit of the shard.
pub fn loss_sum(
    logits: MatrixView<'_>,
    maximum: &[f32],
    targets: &[u32],
    first: usize,
    packed: &mut [f32],
    parallel: Parallel,
) {
    let rows = logits.rows();
    assert!(maximum.len() == rows && targets.len() == rows && packed.len() == 2 * rows);
    let packed = GroupedRows { group_size: 2, operand: packed };
    parallel.for_rows::<SumRows, _>(rows, (logits, maximum, targets, packed, SharedOperand(first)));
}

type SumOperands<'a> =
    (MatrixView<'a>, &'a [f32], &'a [u32], GroupedRows<&'a mut [f32]>, SharedOperand<usize>);

struct SumRows;

impl SimdBody<SumOperands<'_>> for SumRows {
    #[inline(always)]
    fn run<S: Simd>((logits, maximum, targets, packed, SharedOperand(first)): SumOperands<'_>) {
        let rows = maximum.iter().zip(targets).zip(packed.operand.chunks_exact_mut(2)).enumerate();
        for (row, ((maximum, target), packed)) in rows {
            let logits = logits.row(row);
            packed[0] = sum_exp::<S>(logits, *maximum);
            packed[1] = local(*target, first, logits.len()).map_or(0.0, |at| logits[at]);
        }
    }
}

#[inline(always)]
fn local(target: u32, first: usize, count: usize) -> Option<usize> {
    (target as usize).checked_sub(first).filter(|at| *at < count)
}

/// What [`gradient`] reads, reduced over the devices of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct ReducedStatistics<'a> {
    /// The largest logit of each row.
    pub maximum: &'a [f32],
    /// Σ and the target's logit of each row.
    pub packed: &'a [f32],
    /// Token ids to predict.
    pub targets: &'a [u32],
    /// The token id with which the shard begins.
    pub first: usize,
    /// What gradient and loss are multiplied with: 1 over the tokens of the step.
    pub factor: f32,
}

/// `LossGradient`: (softmax − onehot)·factor in place of the logits. Returns the loss of these
/// tokens times the factor, the same on every device; the microbatches' losses add up.
pub fn loss_gradient(
    logits: MatrixViewMut<'_>,
    reduced: ReducedStatistics<'_>,
    parallel: Parallel,
) -> f64 {
    let ReducedStatistics { maximum, packed, targets, first, factor } = reduced;
    let rows = logits.rows();
    assert!(maximum.len() == rows && targets.len() == rows && packed.len() == 2 * rows);
    let work = (
        logits,
        maximum,
        GroupedRows { group_size: 2, operand: packed },
        targets,
        SharedOperand((first, factor)),
    );
    parallel.for_rows::<GradientRows, _>(rows, work);
    let loss = |(maximum, packed): (&f32, &[f32])| {
        f64::from(*maximum) + f64::from(packed[0]).ln() - f64::from(packed[1])
    };
    f64::from(factor) * maximum.iter().zip(packed.chunks_exact(2)).map(loss).sum::<f64>()
}

type GradientOperands<'a> =
    (MatrixViewMut<'a>, &'a [f32], GroupedRows<&'a [f32]>, &'a [u32], SharedOperand<(usize, f32)>);

struct GradientRows;

impl SimdBody<GradientOperands<'_>> for GradientRows {
    #[inline(always)]
    fn run<S: Simd>(
        (mut logits, maximum, packed, targets, SharedOperand((first, factor))): GradientOperands<
            '_,
        >,
    ) {
        let rows = maximum.iter().zip(targets).zip(packed.operand.chunks_exact(2)).enumerate();
        for (row, ((maximum, target), packed)) in rows {
            let logits = logits.row_mut(row);
            let share = factor / packed[0];
            for logit in logits.iter_mut() {
                *logit = exp::<S>(*logit - maximum) * share;
            }
            if let Some(at) = local(*target, first, logits.len()) {
                logits[at] -= factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, gradient as differences, random, widen};

    const ROWS: usize = 6;
    const VOCABULARY: usize = 148;
    const FACTOR: f32 = 1.0 / 24.0;

    fn targets() -> Vec<u32> {
        vec![0, 147, 37, 36, 74, 110]
    }

    fn naive(logits: &[f64]) -> f64 {
        let rows = logits.chunks(VOCABULARY).zip(targets());
        let loss = rows.map(|(logits, target)| {
            logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[target as usize]
        });
        f64::from(FACTOR) * loss.sum::<f64>()
    }

    /// Loss and gradient over any number of devices, with the reductions between the passes.
    fn run(logits: &[f32], devices: usize, parallel: Parallel) -> (f64, Vec<f32>) {
        let width = VOCABULARY / devices;
        let mut logits = logits.to_vec();
        let mut maxima = vec![f32::NEG_INFINITY; ROWS];
        let mut sums = [0.0; 2 * ROWS];
        let targets = targets();
        for device in 0..devices {
            let shard =
                MatrixView::new(&logits, ROWS, VOCABULARY).column_range(device * width, width);
            let mut part = vec![0.0; ROWS];
            loss_maximum(shard, &mut part, parallel);
            maxima.iter_mut().zip(&part).for_each(|(m, part)| *m = m.max(*part));
        }
        for device in 0..devices {
            let first = device * width;
            let shard = MatrixView::new(&logits, ROWS, VOCABULARY).column_range(first, width);
            let mut part = vec![0.0; 2 * ROWS];
            loss_sum(shard, &maxima, &targets, first, &mut part, parallel);
            sums.iter_mut().zip(&part).for_each(|(sum, part)| *sum += part);
        }
        let mut losses = vec![];
        for device in 0..devices {
            let first = device * width;
            let shard =
                MatrixViewMut::new(&mut logits, ROWS, VOCABULARY).column_range(first, width);
            let (maximum, packed, targets) = (&maxima[..], &sums[..], &targets[..]);
            let reduced = ReducedStatistics { maximum, packed, targets, first, factor: FACTOR };
            losses.push(loss_gradient(shard, reduced, parallel));
        }
        assert!(losses.iter().all(|loss| *loss == losses[0]));
        (losses[0], logits)
    }

    #[test]
    fn one_device_and_four_are_the_definition() {
        let logits: Vec<f32> = random(1, ROWS * VOCABULARY).iter().map(|l| 9.0 * l).collect();
        let wanted = differences(&widen(&logits), naive);
        for (devices, threads) in [(1, 1), (4, 1), (1, 2), (2, 3)] {
            let (loss, gradient) = run(&logits, devices, Parallel::new(threads));
            assert!((loss - naive(&widen(&logits))).abs() < 1e-6, "{loss}");
            assert_close(&gradient, &wanted, 1e-6);
        }
    }

    #[test]
    fn a_nan_shows() {
        let mut logits = random(1, ROWS * VOCABULARY);
        logits[200] = f32::NAN;
        let mut maxima = vec![0.0; ROWS];
        let mut packed = vec![0.0; 2 * ROWS];
        let view = MatrixView::new(&logits, ROWS, VOCABULARY);
        loss_maximum(view, &mut maxima, Parallel::SERIAL);
        loss_sum(view, &maxima, &targets(), 0, &mut packed, Parallel::SERIAL);
        assert!(packed[2].is_nan() && packed[0].is_finite());
    }
}
