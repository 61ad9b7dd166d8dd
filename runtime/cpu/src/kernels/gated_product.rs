//! Product of gate and up: `gate⊙up` (CoLA), or `SiLU(gate)⊙up` (SwiGLU).
//!
//! All operands are `[tokens, width]`; gate and up can be columns of one matrix.

use std::marker::PhantomData;

use narrows_plan::model::GatedProduct;

use super::activation::{ActivationFn, Identity, Silu};
use super::matrix::{MatrixView, MatrixViewMut};
use super::parallel::Parallel;
use super::simd::{Simd, SimdBody, sigmoid};

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
    let operands = (gate, up, y);
    match product {
        GatedProduct::Plain => {
            parallel.for_rows::<GatedProductForwardRows<Identity>, _>(rows, operands)
        }
        GatedProduct::SwiGlu => {
            parallel.for_rows::<GatedProductForwardRows<Silu>, _>(rows, operands)
        }
    };
}

struct GatedProductForwardRows<P>(PhantomData<P>);

impl<P: ActivationFn> SimdBody<(MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)>
    for GatedProductForwardRows<P>
{
    #[inline(always)]
    fn run<S: Simd>((gate, up, mut y): (MatrixView<'_>, MatrixView<'_>, MatrixViewMut<'_>)) {
        for row in 0..gate.rows() {
            let inputs = gate.row(row).iter().zip(up.row(row));
            for (y, (gate, up)) in y.row_mut(row).iter_mut().zip(inputs) {
                *y = P::value::<S>(*gate) * up;
            }
        }
    }
}

/// `GatedProductBackward`, in place: gate becomes dy⊙up⊙φ'(gate), and up becomes dy⊙φ(gate). All are `[tokens, width]`.
pub fn gated_product_backward(
    dy: MatrixView<'_>,
    product: GatedProduct,
    gate: MatrixViewMut<'_>,
    up: MatrixViewMut<'_>,
    parallel: Parallel,
) {
    let (rows, columns) = (dy.rows(), dy.columns());
    assert!([gate.rows(), up.rows()].iter().all(|r| *r == rows));
    assert!([gate.columns(), up.columns()].iter().all(|width| *width == columns));
    let operands = (dy, gate, up);
    match product {
        GatedProduct::Plain => parallel.for_rows::<PlainBackwardRows, _>(rows, operands),
        GatedProduct::SwiGlu => parallel.for_rows::<SwiGluBackwardRows, _>(rows, operands),
    };
}

type GatedProductBackwardOperands<'a> = (MatrixView<'a>, MatrixViewMut<'a>, MatrixViewMut<'a>);

struct PlainBackwardRows;

impl SimdBody<GatedProductBackwardOperands<'_>> for PlainBackwardRows {
    #[inline(always)]
    fn run<S: Simd>((dy, mut gate, mut up): GatedProductBackwardOperands<'_>) {
        for row in 0..dy.rows() {
            let saved = gate.row_mut(row).iter_mut().zip(up.row_mut(row));
            for (dy, (gate, up)) in dy.row(row).iter().zip(saved) {
                (*gate, *up) = (dy * *up, dy * *gate);
            }
        }
    }
}

struct SwiGluBackwardRows;

impl SimdBody<GatedProductBackwardOperands<'_>> for SwiGluBackwardRows {
    #[inline(always)]
    fn run<S: Simd>((dy, mut gate, mut up): GatedProductBackwardOperands<'_>) {
        for row in 0..dy.rows() {
            let saved = gate.row_mut(row).iter_mut().zip(up.row_mut(row));
            for (dy, (gate, up)) in dy.row(row).iter().zip(saved) {
                let sigmoid = sigmoid::<S>(*gate);
                let of_gate = dy * *up * sigmoid * (1.0 + *gate * (1.0 - sigmoid));
                (*gate, *up) = (of_gate, dy * *gate * sigmoid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, finite_difference, random, weighted_sum, widen};

    #[test]
    fn backward_is_the_derivative_of_forward() {
        let (rows, width) = (5, 43);
        let (gate_up, dy) = (random(1, rows * 2 * width), random(2, rows * width));
        let gate_up: Vec<f32> = gate_up.iter().map(|x| 4.0 * x).collect();
        let view = MatrixView::new(&gate_up, rows, 2 * width);
        let (gate, up) = (view.column_range(0, width), view.column_range(width, width));
        for product in GatedProduct::ALL {
            let reference = |gate_up: &[f64]| -> Vec<f64> {
                let element = |i: usize| {
                    let (row, column) = (i / width, i % width);
                    let gate = gate_up[row * 2 * width + column];
                    let up = gate_up[row * 2 * width + width + column];
                    match product {
                        GatedProduct::Plain => gate * up,
                        GatedProduct::SwiGlu => gate / (1.0 + (-gate).exp()) * up,
                    }
                };
                (0..rows * width).map(element).collect()
            };
            for threads in [1, 2] {
                let parallel = Parallel::new(threads);
                let mut y = vec![0.0; rows * width];
                let y_view = MatrixViewMut::new(&mut y, rows, width);
                gated_product_forward(gate, up, product, y_view, parallel);
                assert_close(&y, &reference(&widen(&gate_up)), 1e-6);
                let mut gradients = gate_up.clone();
                let (gate, up) =
                    MatrixViewMut::new(&mut gradients, rows, 2 * width).split_columns(width);
                let dy_view = MatrixView::new(&dy, rows, width);
                gated_product_backward(dy_view, product, gate, up, parallel);
                let loss = |gate_up: &[f64]| weighted_sum(&reference(gate_up), &dy);
                assert_close(&gradients, &finite_difference(&widen(&gate_up), loss), 1e-6);
            }
        }
    }
}
