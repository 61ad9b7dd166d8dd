//! The product of gate and up: `gate⊙up` (CoLA), or `SiLU(gate)⊙up` (SwiGLU).
//!
//! All operands are `[tokens, width]`; gate and up may be columns of one matrix.

use std::marker::PhantomData;

use narrows_plan::model::GatedProduct;

use super::activation::{ActivationFn, Identity, Silu};
use super::simd::{Simd, SimdBody};
use super::{MatrixView, MatrixViewMut, Parallel};

/// `GatedProduct`: y = φ(gate)⊙up.
pub fn gated_product_forward(
    gate: MatrixView<'_>,
    up: MatrixView<'_>,
    product: GatedProduct,
    y: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    let rows = y.rows();
    assert!(gate.rows() == rows && up.rows() == rows);
    assert!(gate.columns() == y.columns() && up.columns() == y.columns());
    let work = (gate, up, y);
    match product {
        GatedProduct::Plain => parallel.for_rows::<GatedForwardRows<Identity>, _>(rows, work),
        GatedProduct::SwiGlu => parallel.for_rows::<GatedForwardRows<Silu>, _>(rows, work),
    };
}

struct GatedForwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)>
    for GatedForwardRows<P>
{
    #[inline(always)]
    fn run<S: Simd>((gate, up, mut y): (MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)) {
        for row in 0..gate.rows() {
            let read = gate.row(row).iter().zip(up.row(row));
            for (y, (gate, up)) in y.row_mut(row).iter_mut().zip(read) {
                *y = P::value::<S>(*gate) * up;
            }
        }
    }
}

/// What [`backward`] reads, each `[tokens, width]`.
#[derive(Clone, Copy, Debug)]
pub struct GatedProductSaved<'a> {
    /// Gradient of the product.
    pub dy: MatrixView<'a>,
    /// The gate.
    pub gate: MatrixView<'a>,
    /// What it gates.
    pub up: MatrixView<'a>,
}

/// `GatedProductBackward`: dgate = dy⊙up⊙φ'(gate), dup = dy⊙φ(gate).
pub fn gated_product_backward(
    saved: GatedProductSaved<'_>,
    product: GatedProduct,
    dgate: MatrixViewMut<'_>,
    dup: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    let GatedProductSaved { dy, gate, up } = saved;
    let (rows, columns) = (dy.rows(), dy.columns());
    assert!([gate.rows(), up.rows(), dgate.rows(), dup.rows()].iter().all(|r| *r == rows));
    let widths = [gate.columns(), up.columns(), dgate.columns(), dup.columns()];
    assert!(widths.iter().all(|width| *width == columns));
    let work = (dy, gate, up, dgate, dup);
    match product {
        GatedProduct::Plain => parallel.for_rows::<PlainBackward, _>(rows, work),
        GatedProduct::SwiGlu => parallel.for_rows::<SwigluBackward, _>(rows, work),
    };
}

type GatedRows<'a> =
    (MatrixView<'a>, MatrixView<'a>, MatrixView<'a>, MatrixViewMut<'a>, MatrixViewMut<'a>);

struct PlainBackward;

impl SimdBody<GatedRows<'_>> for PlainBackward {
    #[inline(always)]
    fn run<S: Simd>((dy, gate, up, mut dgate, mut dup): GatedRows<'_>) {
        for row in 0..dy.rows() {
            let read = dy.row(row).iter().zip(gate.row(row)).zip(up.row(row));
            let written = dgate.row_mut(row).iter_mut().zip(dup.row_mut(row));
            for ((dgate, dup), ((dy, gate), up)) in written.zip(read) {
                *dgate = dy * up;
                *dup = dy * gate;
            }
        }
    }
}

struct SwigluBackward;

impl SimdBody<GatedRows<'_>> for SwigluBackward {
    #[inline(always)]
    fn run<S: Simd>((dy, gate, up, mut dgate, mut dup): GatedRows<'_>) {
        for row in 0..dy.rows() {
            let read = dy.row(row).iter().zip(gate.row(row)).zip(up.row(row));
            let written = dgate.row_mut(row).iter_mut().zip(dup.row_mut(row));
            for ((dgate, dup), ((dy, gate), up)) in written.zip(read) {
                let sigmoid = super::simd::sigmoid::<S>(*gate);
                *dgate = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                *dup = dy * gate * sigmoid;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, gradient, random, weigh, widen};

    #[test]
    fn products_and_their_derivatives() {
        let (rows, width) = (5, 43);
        let (both, dy) = (random(1, rows * 2 * width), random(2, rows * width));
        let both: Vec<f32> = both.iter().map(|x| 4.0 * x).collect();
        let view = MatrixView::new(&both, rows, 2 * width);
        let (gate, up) = (view.column_range(0, width), view.column_range(width, width));
        for product in [GatedProduct::Plain, GatedProduct::SwiGlu] {
            let naive = |both: &[f64]| -> Vec<f64> {
                let one = |i: usize| {
                    let (row, column) = (i / width, i % width);
                    let gate = both[row * 2 * width + column];
                    let up = both[row * 2 * width + width + column];
                    match product {
                        GatedProduct::Plain => gate * up,
                        GatedProduct::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
                    }
                };
                (0..rows * width).map(one).collect()
            };
            for threads in [1, 2] {
                let parallel = Parallel::new(threads);
                let mut y = vec![0.0; rows * width];
                gated_product_forward(
                    gate,
                    up,
                    product,
                    MatrixViewMut::new(&mut y, rows, width),
                    parallel,
                );
                assert_close(&y, &naive(&widen(&both)), 1e-6);
                let mut made = vec![0.0; both.len()];
                let (dgate, dup) =
                    MatrixViewMut::new(&mut made, rows, 2 * width).split_columns(width);
                let saved = GatedProductSaved { dy: MatrixView::new(&dy, rows, width), gate, up };
                gated_product_backward(saved, product, dgate, dup, parallel);
                let wanted = gradient(&widen(&both), |both| weigh(&naive(both), &dy));
                assert_close(&made, &wanted, 1e-6);
            }
        }
    }
}
