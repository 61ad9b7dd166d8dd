//! Cross-entropy over a shard of the vocabulary: three ops with two reductions between them.
//!
//! With m the largest logit of the whole row and Σ = Σ exp(logit − m), the loss of a token is
//! m + ln Σ − logit(target), and its gradient is (softmax − onehot)·factor. Each device computes the
//! maximum of its shard, which is reduced to m, and then its Σ and the target's logit (0 where the
//! target is in another shard), which are reduced by addition.
//!
//! Shapes: logits `[tokens, vocabulary shard]`, maximum `[tokens]`, packed `[tokens, 2]` with Σ and
//! the target's logit. The shard begins at token id `first_id`. The factor is 1 over the number of
//! tokens of a step. A token whose target is [`IGNORED_TARGET`] has no loss and no gradient.

use narrows_runtime::IGNORED_TARGET;

use super::embedding::local_index;
use super::matrix::{MatrixView, MatrixViewMut};
use super::parallel::{GroupedRows, Parallel, SharedOperand};
use super::simd::{self, Simd, SimdBody, exp, sum_exp};

/// `LossMaximum`: the largest logit of each row of the shard.
pub fn loss_maximum(logits: MatrixView<'_>, maximum: &mut [f32], parallel: Parallel) {
    assert_eq!(logits.rows(), maximum.len());
    parallel.for_rows::<MaximumRows, _>(logits.rows(), (logits, maximum));
}

struct MaximumRows;

impl SimdBody<(MatrixView<'_>, &mut [f32])> for MaximumRows {
    #[inline(always)]
    fn run<S: Simd>((logits, maximum): (MatrixView<'_>, &mut [f32])) {
        for (row, maximum) in maximum.iter_mut().enumerate() {
            *maximum = simd::maximum(logits.row(row));
        }
    }
}

/// `LossSum`: Σ exp(logit − maximum) over each row of the shard, and the target's logit.
pub fn loss_sum(
    logits: MatrixView<'_>,
    maximum: &[f32],
    targets: &[u32],
    first_id: usize,
    packed: &mut [f32],
    parallel: Parallel,
) {
    let rows = logits.rows();
    assert!(maximum.len() == rows && targets.len() == rows && packed.len() == 2 * rows);
    let packed = GroupedRows { group_size: 2, operand: packed };
    let operands = (logits, maximum, targets, packed, SharedOperand(first_id));
    parallel.for_rows::<SumRows, _>(rows, operands);
}

type SumOperands<'a> =
    (MatrixView<'a>, &'a [f32], &'a [u32], GroupedRows<&'a mut [f32]>, SharedOperand<usize>);

struct SumRows;

impl SimdBody<SumOperands<'_>> for SumRows {
    #[inline(always)]
    fn run<S: Simd>((logits, maximum, targets, packed, SharedOperand(first_id)): SumOperands<'_>) {
        let rows = maximum.iter().zip(targets).zip(packed.operand.chunks_exact_mut(2)).enumerate();
        for (row, ((maximum, target), packed)) in rows {
            let logits = logits.row(row);
            packed[0] = sum_exp::<S>(logits, *maximum);
            let column = local_index(*target, first_id, logits.len());
            packed[1] = column.map_or(0.0, |column| logits[column]);
        }
    }
}

/// Inputs of [`loss_gradient`], reduced over the shards of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct ReducedStatistics<'a> {
    /// Largest logit of each row, `[tokens]`.
    pub maximum: &'a [f32],
    /// Σ and the target's logit of each row, `[tokens, 2]`.
    pub packed: &'a [f32],
    /// Target token ids, `[tokens]`.
    pub targets: &'a [u32],
    /// First token id of the shard.
    pub first_id: usize,
    /// Factor on gradient and loss: 1 over the number of tokens of a step.
    pub factor: f32,
}

/// `LossGradient`: replaces the logits by (softmax − onehot)·factor. Returns the summed loss of these
/// tokens times the factor, which is the same on every device; the step's loss is the sum over its
/// microbatches.
pub fn loss_gradient(
    logits: MatrixViewMut<'_>,
    reduced: ReducedStatistics<'_>,
    parallel: Parallel,
) -> f64 {
    let ReducedStatistics { maximum, packed, targets, first_id, factor } = reduced;
    let rows = logits.rows();
    assert!(maximum.len() == rows && targets.len() == rows && packed.len() == 2 * rows);
    let operands = (
        logits,
        maximum,
        GroupedRows { group_size: 2, operand: packed },
        targets,
        SharedOperand((first_id, factor)),
    );
    parallel.for_rows::<GradientRows, _>(rows, operands);
    let rows = maximum.iter().zip(packed.chunks_exact(2)).zip(targets);
    let predicted = rows.filter(|(_, target)| **target != IGNORED_TARGET);
    let loss = |((maximum, packed), _): ((&f32, &[f32]), &u32)| {
        f64::from(*maximum) + f64::from(packed[0]).ln() - f64::from(packed[1])
    };
    f64::from(factor) * predicted.map(loss).sum::<f64>()
}

type LossGradientOperands<'a> =
    (MatrixViewMut<'a>, &'a [f32], GroupedRows<&'a [f32]>, &'a [u32], SharedOperand<(usize, f32)>);

struct GradientRows;

impl SimdBody<LossGradientOperands<'_>> for GradientRows {
    #[inline(always)]
    fn run<S: Simd>(
        (mut logits, maximum, packed, targets, SharedOperand((first_id, factor))): LossGradientOperands<
            '_,
        >,
    ) {
        let rows = maximum.iter().zip(targets).zip(packed.operand.chunks_exact(2)).enumerate();
        for (row, ((maximum, target), packed)) in rows {
            let logits = logits.row_mut(row);
            if *target == IGNORED_TARGET {
                logits.fill(0.0);
                continue;
            }
            let scale = factor / packed[0];
            for logit in logits.iter_mut() {
                *logit = exp::<S>(*logit - maximum) * scale;
            }
            if let Some(column) = local_index(*target, first_id, logits.len()) {
                logits[column] -= factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, finite_difference, random, widen};

    const ROWS: usize = 6;
    const VOCABULARY: usize = 148;
    const FACTOR: f32 = 1.0 / 24.0;

    fn targets() -> Vec<u32> {
        vec![0, 147, 37, 36, 74, 110]
    }

    /// The loss by definition in f64.
    fn reference(logits: &[f64]) -> f64 {
        let rows = logits.chunks(VOCABULARY).zip(targets());
        let loss = rows.map(|(logits, target)| {
            logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[target as usize]
        });
        f64::from(FACTOR) * loss.sum::<f64>()
    }

    /// Loss and gradient on any number of devices, with the reductions between the ops.
    fn run(logits: &[f32], devices: usize, parallel: Parallel) -> (f64, Vec<f32>) {
        let width = VOCABULARY / devices;
        let mut logits = logits.to_vec();
        let mut maxima = vec![f32::NEG_INFINITY; ROWS];
        let mut sums = [0.0; 2 * ROWS];
        let targets = targets();
        for device in 0..devices {
            let shard =
                MatrixView::new(&logits, ROWS, VOCABULARY).column_range(device * width, width);
            let mut partial = vec![0.0; ROWS];
            loss_maximum(shard, &mut partial, parallel);
            maxima.iter_mut().zip(&partial).for_each(|(m, partial)| *m = m.max(*partial));
        }
        for device in 0..devices {
            let first_id = device * width;
            let shard = MatrixView::new(&logits, ROWS, VOCABULARY).column_range(first_id, width);
            let mut partial = vec![0.0; 2 * ROWS];
            loss_sum(shard, &maxima, &targets, first_id, &mut partial, parallel);
            sums.iter_mut().zip(&partial).for_each(|(sum, partial)| *sum += partial);
        }
        let mut losses = vec![];
        for device in 0..devices {
            let first_id = device * width;
            let shard =
                MatrixViewMut::new(&mut logits, ROWS, VOCABULARY).column_range(first_id, width);
            let (maximum, packed, targets) = (&maxima[..], &sums[..], &targets[..]);
            let reduced = ReducedStatistics { maximum, packed, targets, first_id, factor: FACTOR };
            losses.push(loss_gradient(shard, reduced, parallel));
        }
        assert!(losses.iter().all(|loss| *loss == losses[0]));
        (losses[0], logits)
    }

    #[test]
    fn loss_and_gradient_are_the_definition_on_one_and_four_devices() {
        let logits: Vec<f32> = random(1, ROWS * VOCABULARY).iter().map(|l| 9.0 * l).collect();
        let expected = finite_difference(&widen(&logits), reference);
        for (devices, threads) in [(1, 1), (4, 1), (1, 2), (2, 3)] {
            let (loss, gradient) = run(&logits, devices, Parallel::new(threads));
            assert!((loss - reference(&widen(&logits))).abs() < 1e-6, "{loss}");
            assert_close(&gradient, &expected, 1e-6);
        }
    }

    #[test]
    fn a_nan_logit_makes_the_sum_of_its_row_nan() {
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
