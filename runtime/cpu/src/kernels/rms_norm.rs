//! RMSNorm in the variants of DESIGN §3.3.
//!
//! For a row x of full width d, with s = Σx² and ρ = (s/d + ε)^-½, the norm is y = γ⊙ρ·x. On a device
//! that holds a shard of the features, x and γ are the shard and s is reduced over the whole row,
//! except in the ops that compute it.
//!
//! Backward, with t = Σ dy⊙γ⊙x over the whole row: dx = ρ·γ⊙dy − (ρ³·t/d)·x, dγ += Σ ρ·dy⊙x. For the
//! online norm y = γ⊙x, whose division by the root mean square is deferred, with g the gradient of y
//! and ds that of s: dx = γ⊙g + 2·ds·x, dγ += Σ g⊙x.
//!
//! Shapes: x, y and their gradients `[tokens, features]`, γ `[features]`, s, t and ds `[tokens]`.

use super::matrix::{MatrixView, MatrixViewMut, WriteMode, assert_equal_sizes};
use super::parallel::{
    Parallel, ParallelRows, SharedOperand, TaskPartialSums, reduce_partial_sums,
};
use super::simd::{Simd, SimdBody, dot3, sum_squares};

/// Width and ε of a norm, which turn a sum of squares into 1/rms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Features of a whole row, d.
    pub width: usize,
    /// ε, added to the mean square.
    pub epsilon: f32,
}

impl RmsNorm {
    /// ρ = (s/d + ε)^-½ for s = Σx².
    #[inline(always)]
    pub fn inverse_rms(self, s: f32) -> f32 {
        1.0 / (s / self.width as f32 + self.epsilon).sqrt()
    }
}

/// `NormForward`: y = γ⊙ρ·x of whole rows; writes s.
pub fn rms_norm_forward(
    x: MatrixView<'_>,
    scale: &[f32],
    rms: RmsNorm,
    y: MatrixViewMut<'_>,
    s: &mut [f32],
    parallel: Parallel,
) {
    assert_equal_sizes(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<RmsNormForwardRows, _>(
        x.rows(),
        (x, y, s, SharedOperand(scale), SharedOperand(rms)),
    );
}

type RmsNormForwardOperands<'a> = (
    MatrixView<'a>,
    MatrixViewMut<'a>,
    &'a mut [f32],
    SharedOperand<&'a [f32]>,
    SharedOperand<RmsNorm>,
);

struct RmsNormForwardRows;

impl SimdBody<RmsNormForwardOperands<'_>> for RmsNormForwardRows {
    #[inline(always)]
    fn run<S: Simd>(
        (x, mut y, s, SharedOperand(scale), SharedOperand(rms)): RmsNormForwardOperands<'_>,
    ) {
        for (row, s) in s.iter_mut().enumerate() {
            let x = x.row(row);
            *s = sum_squares::<S>(x);
            scale_row(x, scale, rms.inverse_rms(*s), y.row_mut(row));
        }
    }
}

/// y = γ⊙factor·x.
#[inline(always)]
pub(super) fn scale_row(x: &[f32], scale: &[f32], factor: f32, y: &mut [f32]) {
    for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
        *y = x * factor * scale;
    }
}

/// `NormStatistic`: s = Σx² of the shard.
pub fn rms_norm_statistic(x: MatrixView<'_>, s: &mut [f32], parallel: Parallel) {
    assert_equal_sizes(&[x.rows(), s.len()], &[]);
    parallel.for_rows::<StatisticRows, _>(x.rows(), (x, s));
}

struct StatisticRows;

impl SimdBody<(MatrixView<'_>, &mut [f32])> for StatisticRows {
    #[inline(always)]
    fn run<S: Simd>((x, s): (MatrixView<'_>, &mut [f32])) {
        for (row, s) in s.iter_mut().enumerate() {
            *s = sum_squares::<S>(x.row(row));
        }
    }
}

/// `NormApply`: y = γ⊙ρ·x of the shard; reads s.
pub fn rms_norm_apply(
    x: MatrixView<'_>,
    scale: &[f32],
    s: &[f32],
    rms: RmsNorm,
    y: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel
        .for_rows::<ApplyRows, _>(x.rows(), (x, y, s, SharedOperand(scale), SharedOperand(rms)));
}

type ApplyOperands<'a> = (
    MatrixView<'a>,
    MatrixViewMut<'a>,
    &'a [f32],
    SharedOperand<&'a [f32]>,
    SharedOperand<RmsNorm>,
);

struct ApplyRows;

impl SimdBody<ApplyOperands<'_>> for ApplyRows {
    #[inline(always)]
    fn run<S: Simd>((x, mut y, s, SharedOperand(scale), SharedOperand(rms)): ApplyOperands<'_>) {
        for (row, s) in s.iter().enumerate() {
            scale_row(x.row(row), scale, rms.inverse_rms(*s), y.row_mut(row));
        }
    }
}

/// `NormOnline`: y = γ⊙x and s = Σx² of the shard.
pub fn rms_norm_online(
    x: MatrixView<'_>,
    scale: &[f32],
    y: MatrixViewMut<'_>,
    s: &mut [f32],
    parallel: Parallel,
) {
    assert_equal_sizes(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<OnlineRows, _>(x.rows(), (x, y, s, SharedOperand(scale)));
}

type OnlineOperands<'a> =
    (MatrixView<'a>, MatrixViewMut<'a>, &'a mut [f32], SharedOperand<&'a [f32]>);

struct OnlineRows;

impl SimdBody<OnlineOperands<'_>> for OnlineRows {
    #[inline(always)]
    fn run<S: Simd>((x, mut y, s, SharedOperand(scale)): OnlineOperands<'_>) {
        for (row, s) in s.iter_mut().enumerate() {
            let x = x.row(row);
            *s = sum_squares::<S>(x);
            scale_row(x, scale, 1.0, y.row_mut(row));
        }
    }
}

/// `NormScale`: y = γ⊙x.
pub fn rms_norm_scale(x: MatrixView<'_>, scale: &[f32], y: MatrixViewMut<'_>, parallel: Parallel) {
    assert_equal_sizes(&[x.rows(), y.rows()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<ScaleRows, _>(x.rows(), (x, y, SharedOperand(scale)));
}

type ScaleOperands<'a> = (MatrixView<'a>, MatrixViewMut<'a>, SharedOperand<&'a [f32]>);

struct ScaleRows;

impl SimdBody<ScaleOperands<'_>> for ScaleRows {
    #[inline(always)]
    fn run<S: Simd>((x, mut y, SharedOperand(scale)): ScaleOperands<'_>) {
        for row in 0..x.rows() {
            scale_row(x.row(row), scale, 1.0, y.row_mut(row));
        }
    }
}

/// Inputs of the backward ops.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormSaved<'a> {
    /// Gradient of the norm's output, `[tokens, features]`.
    pub dy: MatrixView<'a>,
    /// Input of the norm, `[tokens, features]`.
    pub x: MatrixView<'a>,
    /// γ, `[features]`.
    pub scale: &'a [f32],
}

/// Outputs of the backward ops.
pub struct RmsNormGradients<'a> {
    /// Gradient of the norm's input, `[tokens, features]`.
    pub dx: MatrixViewMut<'a>,
    /// Mode in which `dx` is written.
    pub write: WriteMode,
    /// Gradient of γ, `[features]`; always added to.
    pub dscale: &'a mut [f32],
    /// [`Parallel::reduction_scratch_elements`] of the features.
    pub scratch: &'a mut [f32],
}

/// `NormBackward`: gradients of whole rows.
pub fn rms_norm_backward(
    saved: RmsNormSaved<'_>,
    s: &[f32],
    rms: RmsNorm,
    gradients: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[saved.x.rows(), s.len()], &[]);
    let statistics = (s, SharedOperand(rms));
    match gradients.write {
        WriteMode::Replace => {
            run_backward::<RmsNormBackwardRows<false>, _>(saved, statistics, gradients, parallel);
        }
        WriteMode::Add => {
            run_backward::<RmsNormBackwardRows<true>, _>(saved, statistics, gradients, parallel);
        }
    }
}

/// `NormBackwardStatistic`: t = Σ dy⊙γ⊙x of the shard.
pub fn rms_norm_backward_statistic(saved: RmsNormSaved<'_>, t: &mut [f32], parallel: Parallel) {
    let RmsNormSaved { dy, x, scale } = saved;
    assert_equal_sizes(&[x.rows(), dy.rows(), t.len()], &[x.columns(), dy.columns(), scale.len()]);
    parallel.for_rows::<BackwardStatisticRows, _>(x.rows(), (dy, x, t, SharedOperand(scale)));
}

type BackwardStatisticOperands<'a> =
    (MatrixView<'a>, MatrixView<'a>, &'a mut [f32], SharedOperand<&'a [f32]>);

struct BackwardStatisticRows;

impl SimdBody<BackwardStatisticOperands<'_>> for BackwardStatisticRows {
    #[inline(always)]
    fn run<S: Simd>((dy, x, t, SharedOperand(scale)): BackwardStatisticOperands<'_>) {
        for (row, t) in t.iter_mut().enumerate() {
            *t = dot3(dy.row(row), x.row(row), scale);
        }
    }
}

/// `NormBackwardApply`: gradients of the shard; reads s and t of the whole rows.
pub fn rms_norm_backward_apply(
    saved: RmsNormSaved<'_>,
    s: &[f32],
    t: &[f32],
    rms: RmsNorm,
    gradients: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[saved.x.rows(), s.len(), t.len()], &[]);
    let statistics = (s, t, SharedOperand(rms));
    match gradients.write {
        WriteMode::Replace => {
            run_backward::<BackwardApplyRows<false>, _>(saved, statistics, gradients, parallel);
        }
        WriteMode::Add => {
            run_backward::<BackwardApplyRows<true>, _>(saved, statistics, gradients, parallel);
        }
    }
}

/// `NormOnlineBackward`: gradients of the shard; the `dy` of `saved` is g, and `ds` the gradient of s.
pub fn rms_norm_online_backward(
    saved: RmsNormSaved<'_>,
    ds: &[f32],
    gradients: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    assert_equal_sizes(&[saved.x.rows(), ds.len()], &[]);
    match gradients.write {
        WriteMode::Replace => {
            run_backward::<OnlineBackwardRows<false>, _>(saved, (ds,), gradients, parallel);
        }
        WriteMode::Add => {
            run_backward::<OnlineBackwardRows<true>, _>(saved, (ds,), gradients, parallel);
        }
    }
}

/// dy, x, γ and dx.
type RmsNormGradientOperands<'a> =
    (MatrixView<'a>, MatrixView<'a>, SharedOperand<&'a [f32]>, MatrixViewMut<'a>);

fn run_backward<'a, B, R: ParallelRows>(
    saved: RmsNormSaved<'a>,
    statistics: R,
    gradients: RmsNormGradients<'a>,
    parallel: Parallel,
) where
    B: for<'b> SimdBody<(RmsNormGradientOperands<'a>, R, TaskPartialSums<'b>)>,
{
    let RmsNormSaved { dy, x, scale } = saved;
    let RmsNormGradients { dx, dscale, scratch, .. } = gradients;
    let columns = [x.columns(), dy.columns(), dx.columns(), scale.len(), dscale.len()];
    assert_equal_sizes(&[x.rows(), dy.rows(), dx.rows()], &columns);
    let sums = TaskPartialSums::new(dscale, scratch, parallel);
    let operands = ((dy, x, SharedOperand(scale), dx), statistics, sums);
    let tasks = parallel.for_rows::<B, _>(x.rows(), operands);
    reduce_partial_sums(dscale, scratch, tasks);
}

/// s and the norm.
type BackwardStatistics<'a> = (&'a [f32], SharedOperand<RmsNorm>);

struct RmsNormBackwardRows<const ADD: bool>;

impl<const ADD: bool>
    SimdBody<(RmsNormGradientOperands<'_>, BackwardStatistics<'_>, TaskPartialSums<'_>)>
    for RmsNormBackwardRows<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (s, SharedOperand(rms)), dscale): (
            RmsNormGradientOperands<'_>,
            BackwardStatistics<'_>,
            TaskPartialSums<'_>,
        ),
    ) {
        for (row, s) in s.iter().enumerate() {
            let (dy, x) = (dy.row(row), x.row(row));
            let rho = rms.inverse_rms(*s);
            let x_factor = -rho * rho * rho * dot3(dy, x, scale) / rms.width as f32;
            let factors = (rho, x_factor);
            backward_row::<ADD>((dy, x, scale), factors, dx.row_mut(row), dscale.sums);
        }
    }
}

/// s, t and the norm.
type BackwardApplyStatistics<'a> = (&'a [f32], &'a [f32], SharedOperand<RmsNorm>);

struct BackwardApplyRows<const ADD: bool>;

impl<const ADD: bool>
    SimdBody<(RmsNormGradientOperands<'_>, BackwardApplyStatistics<'_>, TaskPartialSums<'_>)>
    for BackwardApplyRows<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (s, t, SharedOperand(rms)), dscale): (
            RmsNormGradientOperands<'_>,
            BackwardApplyStatistics<'_>,
            TaskPartialSums<'_>,
        ),
    ) {
        for (row, (s, t)) in s.iter().zip(t).enumerate() {
            let rho = rms.inverse_rms(*s);
            let x_factor = -rho * rho * rho * t / rms.width as f32;
            let saved = (dy.row(row), x.row(row), scale);
            backward_row::<ADD>(saved, (rho, x_factor), dx.row_mut(row), dscale.sums);
        }
    }
}

struct OnlineBackwardRows<const ADD: bool>;

impl<const ADD: bool> SimdBody<(RmsNormGradientOperands<'_>, (&[f32],), TaskPartialSums<'_>)>
    for OnlineBackwardRows<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (ds,), dscale): (
            RmsNormGradientOperands<'_>,
            (&[f32],),
            TaskPartialSums<'_>,
        ),
    ) {
        for (row, ds) in ds.iter().enumerate() {
            let saved = (dy.row(row), x.row(row), scale);
            backward_row::<ADD>(saved, (1.0, 2.0 * ds), dx.row_mut(row), dscale.sums);
        }
    }
}

/// dx (+)= dy_factor·γ⊙dy + x_factor·x, dγ += dy_factor·dy⊙x.
#[inline(always)]
pub(super) fn backward_row<const ADD: bool>(
    (dy, x, scale): (&[f32], &[f32], &[f32]),
    (dy_factor, x_factor): (f32, f32),
    dx: &mut [f32],
    dscale: &mut [f32],
) {
    let saved = dy.iter().zip(x).zip(scale);
    for ((dx, dscale), ((dy, x), scale)) in dx.iter_mut().zip(dscale).zip(saved) {
        let scaled_dy = dy_factor * dy;
        let gradient = scaled_dy * scale + x_factor * x;
        *dx = if ADD { *dx + gradient } else { gradient };
        *dscale += scaled_dy * x;
    }
}

#[cfg(test)]
mod tests;
