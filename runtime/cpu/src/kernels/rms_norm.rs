//! RMSNorm in the forms of DESIGN §3.3.
//!
//! Of a row x of whole width d, s = Σx² and ρ = (s/d + ε)^-½; the norm is y = γ⊙ρ·x. On a device
//! that holds a shard of the features, x and γ are the shard and s is that of the whole row (after
//! its reduction), except in the passes that make it.
//!
//! Backward, with t = Σ dy⊙γ⊙x of the whole row: dx = ρ·γ⊙dy − (ρ³·t/d)·x, dγ += Σ ρ·dy⊙x. Of the
//! online norm y = γ⊙x with s known elsewhere: dx = γ⊙g + 2·ds·x, dγ += Σ g⊙x.
//!
//! Shapes: x, y and their gradients `[tokens, features]`, γ `[features]`, s, t, ds `[tokens]`.

use super::parallel::{ParallelRows, PartialSums, SharedOperand, reduce_partial_sums};
use super::simd::{Simd, SimdBody, dot3, sum_squares};
use super::{MatrixView, MatrixViewMut, Parallel, WriteMode};

/// What turns a sum of squares into 1/rms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Features of a whole row, d.
    pub width: usize,
    /// ε, added to the mean square.
    pub epsilon: f32,
}

impl RmsNorm {
    /// ρ = (s/d + ε)^-½.
    #[inline(always)]
    pub fn inverse(self, s: f32) -> f32 {
        1.0 / (s / self.width as f32 + self.epsilon).sqrt()
    }
}

/// `NormForward`: y = γ⊙ρ·x, and s of the whole row.
pub fn rms_norm_forward(
    x: MatrixView<'_>,
    scale: &[f32],
    rms: RmsNorm,
    y: MatrixViewMut<'_>,
    s: &mut [f32],
    parallel: Parallel,
) {
    check(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<NormForwardRows, _>(
        x.rows(),
        (x, y, s, SharedOperand(scale), SharedOperand(rms)),
    );
}

type NormForward<'a> = (
    MatrixView<'a>,
    MatrixViewMut<'a>,
    &'a mut [f32],
    SharedOperand<&'a [f32]>,
    SharedOperand<RmsNorm>,
);

struct NormForwardRows;

impl SimdBody<NormForward<'_>> for NormForwardRows {
    #[inline(always)]
    fn run<S: Simd>((x, mut y, s, SharedOperand(scale), SharedOperand(rms)): NormForward<'_>) {
        for (row, s) in s.iter_mut().enumerate() {
            let x = x.row(row);
            *s = sum_squares::<S>(x);
            scaled(x, scale, rms.inverse(*s), y.row_mut(row));
        }
    }
}

#[inline(always)]
fn scaled(x: &[f32], scale: &[f32], factor: f32, y: &mut [f32]) {
    for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
        *y = x * factor * scale;
    }
}

/// `NormStatistic`: s = Σx² of the row shard.
pub fn rms_norm_statistic(x: MatrixView<'_>, s: &mut [f32], parallel: Parallel) {
    check(&[x.rows(), s.len()], &[]);
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

/// `NormApply`: y = γ⊙ρ·x with s given.
pub fn rms_norm_apply(
    x: MatrixView<'_>,
    scale: &[f32],
    s: &[f32],
    rms: RmsNorm,
    y: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    check(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<NormApplyRows, _>(
        x.rows(),
        (x, y, s, SharedOperand(scale), SharedOperand(rms)),
    );
}

type NormApply<'a> = (
    MatrixView<'a>,
    MatrixViewMut<'a>,
    &'a [f32],
    SharedOperand<&'a [f32]>,
    SharedOperand<RmsNorm>,
);

struct NormApplyRows;

impl SimdBody<NormApply<'_>> for NormApplyRows {
    #[inline(always)]
    fn run<S: Simd>((x, mut y, s, SharedOperand(scale), SharedOperand(rms)): NormApply<'_>) {
        for (row, s) in s.iter().enumerate() {
            scaled(x.row(row), scale, rms.inverse(*s), y.row_mut(row));
        }
    }
}

/// `NormOnline`: y = γ⊙x, and s of the row shard.
pub fn rms_norm_online(
    x: MatrixView<'_>,
    scale: &[f32],
    y: MatrixViewMut<'_>,
    s: &mut [f32],
    parallel: Parallel,
) {
    check(&[x.rows(), y.rows(), s.len()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<OnlineRows, _>(x.rows(), (x, y, s, SharedOperand(scale)));
}

struct OnlineRows;

impl SimdBody<(MatrixView<'_>, MatrixViewMut<'_>, &mut [f32], SharedOperand<&[f32]>)>
    for OnlineRows
{
    #[inline(always)]
    fn run<S: Simd>(
        (x, mut y, s, SharedOperand(scale)): (
            MatrixView<'_>,
            MatrixViewMut<'_>,
            &mut [f32],
            SharedOperand<&[f32]>,
        ),
    ) {
        for (row, s) in s.iter_mut().enumerate() {
            let x = x.row(row);
            *s = sum_squares::<S>(x);
            scaled(x, scale, 1.0, y.row_mut(row));
        }
    }
}

/// `NormScale`: y = γ⊙x.
pub fn rms_norm_scale(x: MatrixView<'_>, scale: &[f32], y: MatrixViewMut<'_>, parallel: Parallel) {
    check(&[x.rows(), y.rows()], &[x.columns(), y.columns(), scale.len()]);
    parallel.for_rows::<ScaleRows, _>(x.rows(), (x, y, SharedOperand(scale)));
}

struct ScaleRows;

impl SimdBody<(MatrixView<'_>, MatrixViewMut<'_>, SharedOperand<&[f32]>)> for ScaleRows {
    #[inline(always)]
    fn run<S: Simd>(
        (x, mut y, SharedOperand(scale)): (
            MatrixView<'_>,
            MatrixViewMut<'_>,
            SharedOperand<&[f32]>,
        ),
    ) {
        for row in 0..x.rows() {
            scaled(x.row(row), scale, 1.0, y.row_mut(row));
        }
    }
}

/// What every backward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormSaved<'a> {
    /// Gradient of the norm's output, `[tokens, features]`.
    pub dy: MatrixView<'a>,
    /// The norm's input, `[tokens, features]`.
    pub x: MatrixView<'a>,
    /// γ.
    pub scale: &'a [f32],
}

/// What every backward pass writes.
pub struct RmsNormGradients<'a> {
    /// Gradient of the norm's input.
    pub dx: MatrixViewMut<'a>,
    /// Whether it is added to what is there.
    pub write: WriteMode,
    /// Gradient of γ; always added to.
    pub dscale: &'a mut [f32],
    /// [`Parallel::sums_scratch`] of the features.
    pub scratch: &'a mut [f32],
}

/// `NormBackward`: whole rows.
pub fn rms_norm_backward(
    saved: RmsNormSaved<'_>,
    s: &[f32],
    rms: RmsNorm,
    made: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    check(&[saved.x.rows(), s.len()], &[]);
    match made.write {
        WriteMode::Replace => {
            run::<WholeRows<false>, _>(saved, (s, SharedOperand(rms)), made, parallel)
        }
        WriteMode::Add => run::<WholeRows<true>, _>(saved, (s, SharedOperand(rms)), made, parallel),
    }
}

/// `NormBackwardStatistic`: t = Σ dy⊙γ⊙x of the row shard.
pub fn rms_norm_backward_statistic(saved: RmsNormSaved<'_>, t: &mut [f32], parallel: Parallel) {
    let RmsNormSaved { dy, x, scale } = saved;
    check(&[x.rows(), dy.rows(), t.len()], &[x.columns(), dy.columns(), scale.len()]);
    parallel.for_rows::<BackwardStatisticRows, _>(x.rows(), (dy, x, t, SharedOperand(scale)));
}

struct BackwardStatisticRows;

impl SimdBody<(MatrixView<'_>, MatrixView<'_>, &mut [f32], SharedOperand<&[f32]>)>
    for BackwardStatisticRows
{
    #[inline(always)]
    fn run<S: Simd>(
        (dy, x, t, SharedOperand(scale)): (
            MatrixView<'_>,
            MatrixView<'_>,
            &mut [f32],
            SharedOperand<&[f32]>,
        ),
    ) {
        for (row, t) in t.iter_mut().enumerate() {
            *t = dot3::<S>(dy.row(row), x.row(row), scale);
        }
    }
}

/// `NormBackwardApply`: with s and t of the whole rows.
pub fn rms_norm_backward_apply(
    saved: RmsNormSaved<'_>,
    s: &[f32],
    t: &[f32],
    rms: RmsNorm,
    made: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    check(&[saved.x.rows(), s.len(), t.len()], &[]);
    match made.write {
        WriteMode::Replace => {
            run::<NormApplyBackward<false>, _>(saved, (s, t, SharedOperand(rms)), made, parallel)
        }
        WriteMode::Add => {
            run::<NormApplyBackward<true>, _>(saved, (s, t, SharedOperand(rms)), made, parallel)
        }
    }
}

/// `NormOnlineBackward`: the `dy` of `saved` is g, `ds` the gradient of s.
pub fn rms_norm_online_backward(
    saved: RmsNormSaved<'_>,
    ds: &[f32],
    made: RmsNormGradients<'_>,
    parallel: Parallel,
) {
    check(&[saved.x.rows(), ds.len()], &[]);
    match made.write {
        WriteMode::Replace => run::<NormOnlineBackward<false>, _>(saved, (ds,), made, parallel),
        WriteMode::Add => run::<NormOnlineBackward<true>, _>(saved, (ds,), made, parallel),
    }
}

type NormOperands<'a> =
    (MatrixView<'a>, MatrixView<'a>, SharedOperand<&'a [f32]>, MatrixViewMut<'a>);

fn run<'a, B, R: ParallelRows>(
    saved: RmsNormSaved<'a>,
    statistics: R,
    made: RmsNormGradients<'a>,
    parallel: Parallel,
) where
    B: for<'b> SimdBody<(NormOperands<'a>, R, PartialSums<'b>)>,
{
    let RmsNormSaved { dy, x, scale } = saved;
    let RmsNormGradients { dx, dscale, scratch, .. } = made;
    let columns = [x.columns(), dy.columns(), dx.columns(), scale.len(), dscale.len()];
    check(&[x.rows(), dy.rows(), dx.rows()], &columns);
    let sums = PartialSums::new(dscale, scratch, parallel);
    let tasks =
        parallel.for_rows::<B, _>(x.rows(), ((dy, x, SharedOperand(scale), dx), statistics, sums));
    reduce_partial_sums(dscale, scratch, tasks);
}

struct WholeRows<const ADD: bool>;

impl<const ADD: bool>
    SimdBody<(NormOperands<'_>, (&[f32], SharedOperand<RmsNorm>), PartialSums<'_>)>
    for WholeRows<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (s, SharedOperand(rms)), sums): (
            NormOperands<'_>,
            (&[f32], SharedOperand<RmsNorm>),
            PartialSums<'_>,
        ),
    ) {
        for (row, s) in s.iter().enumerate() {
            let (dy, x) = (dy.row(row), x.row(row));
            let rho = rms.inverse(*s);
            let along = -rho * rho * rho * dot3::<S>(dy, x, scale) / rms.width as f32;
            row_back::<ADD>((dy, x, scale), (rho, along), dx.row_mut(row), sums.sums);
        }
    }
}

/// s, t and the norm.
type BothSums<'a> = (&'a [f32], &'a [f32], SharedOperand<RmsNorm>);

struct NormApplyBackward<const ADD: bool>;

impl<const ADD: bool> SimdBody<(NormOperands<'_>, BothSums<'_>, PartialSums<'_>)>
    for NormApplyBackward<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (s, t, SharedOperand(rms)), sums): (
            NormOperands<'_>,
            BothSums<'_>,
            PartialSums<'_>,
        ),
    ) {
        for (row, (s, t)) in s.iter().zip(t).enumerate() {
            let rho = rms.inverse(*s);
            let along = -rho * rho * rho * t / rms.width as f32;
            let saved = (dy.row(row), x.row(row), scale);
            row_back::<ADD>(saved, (rho, along), dx.row_mut(row), sums.sums);
        }
    }
}

struct NormOnlineBackward<const ADD: bool>;

impl<const ADD: bool> SimdBody<(NormOperands<'_>, (&[f32],), PartialSums<'_>)>
    for NormOnlineBackward<ADD>
{
    #[inline(always)]
    fn run<S: Simd>(
        ((dy, x, SharedOperand(scale), mut dx), (ds,), sums): (
            NormOperands<'_>,
            (&[f32],),
            PartialSums<'_>,
        ),
    ) {
        for (row, ds) in ds.iter().enumerate() {
            let saved = (dy.row(row), x.row(row), scale);
            row_back::<ADD>(saved, (1.0, 2.0 * ds), dx.row_mut(row), sums.sums);
        }
    }
}

/// dx (+)= across·γ⊙dy + along·x, dγ += across·dy⊙x.
#[inline(always)]
fn row_back<const ADD: bool>(
    (dy, x, scale): (&[f32], &[f32], &[f32]),
    (across, along): (f32, f32),
    dx: &mut [f32],
    dscale: &mut [f32],
) {
    let saved = dy.iter().zip(x).zip(scale);
    for ((dx, dscale), ((dy, x), scale)) in dx.iter_mut().zip(dscale).zip(saved) {
        let across = across * dy;
        let made = across * scale + along * x;
        *dx = if ADD { *dx + made } else { made };
        *dscale += across * x;
    }
}

/// That operands have equal rows and equal columns.
fn check(rows: &[usize], columns: &[usize]) {
    let equal = |sizes: &[usize]| sizes.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(equal(rows) && equal(columns), "rows {rows:?}, columns {columns:?}");
}

#[cfg(test)]
mod tests;
