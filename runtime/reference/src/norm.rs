//! RMSNorm and LayerNorm of rows x of width d, with their gradients.
//!
//! RMSNorm (Zhang & Sennrich 2019): y = ρ·γ⊙x with ρ = (Σx²/d + ε)^-½. With g = γ⊙dy:
//!
//! ```text
//! dx = ρ·g − x·ρ³/d·Σ g⊙x          dγ = Σ_rows ρ·x⊙dy
//! ```
//!
//! LayerNorm (Ba et al. 2016): y = γ⊙n + β with n = ρ·(x − mean x), ρ = (var x + ε)^-½, the variance
//! without Bessel's correction. With g = γ⊙dy:
//!
//! ```text
//! dx = ρ·(g − mean g − n·mean(g⊙n))    dγ = Σ_rows n⊙dy    dβ = Σ_rows dy
//! ```

use super::{Float, Matrix};

/// RMSNorm of every run of features as long as the scale: of whole rows, or of the heads in them.
pub(super) fn rms_forward<T: Float>(x: &Matrix<T>, scale: &Matrix<T>, epsilon: f64) -> Matrix<T> {
    let width = scale.columns();
    assert!(x.columns().is_multiple_of(width), "{} features and a scale of {width}", x.columns());
    let mut y = Matrix::zeros(x.rows(), x.columns());
    let runs = x.elements().chunks_exact(width).zip(y.elements_mut().chunks_exact_mut(width));
    for (x, y) in runs {
        let rho = rms_factor(x, epsilon);
        for ((y, x), scale) in y.iter_mut().zip(x).zip(scale.elements()) {
            *y = rho * *scale * *x;
        }
    }
    y
}

/// Returns the gradients of x and of the scale.
pub(super) fn rms_backward<T: Float>(
    x: &Matrix<T>,
    scale: &Matrix<T>,
    epsilon: f64,
    dy: &Matrix<T>,
) -> (Matrix<T>, Matrix<T>) {
    let width = scale.columns();
    assert!(x.columns().is_multiple_of(width), "{} features and a scale of {width}", x.columns());
    let mut dx = Matrix::zeros(x.rows(), x.columns());
    let mut dscale = Matrix::zeros(1, width);
    let saved = x.elements().chunks_exact(width).zip(dy.elements().chunks_exact(width));
    for (dx, (x, dy)) in dx.elements_mut().chunks_exact_mut(width).zip(saved) {
        let rho = rms_factor(x, epsilon);
        let g: Vec<T> = zip(scale.elements(), dy, |scale, dy| scale * dy);
        let projection = rho.powi(3) / T::from_f64(width as f64) * dot(&g, x);
        for (j, g) in g.into_iter().enumerate() {
            dx[j] = rho * g - x[j] * projection;
            dscale[(0, j)] += rho * x[j] * dy[j];
        }
    }
    (dx, dscale)
}

/// ρ of one run of features.
fn rms_factor<T: Float>(x: &[T], epsilon: f64) -> T {
    let mean_square = dot(x, x) / T::from_f64(x.len() as f64);
    T::one() / (mean_square + T::from_f64(epsilon)).sqrt()
}

pub(super) fn layer_forward<T: Float>(
    x: &Matrix<T>,
    scale: &Matrix<T>,
    bias: &Matrix<T>,
    epsilon: f64,
) -> Matrix<T> {
    let mut y = Matrix::zeros(x.rows(), x.columns());
    for row in 0..x.rows() {
        let (n, _) = normalized(x.row(row), epsilon);
        for (j, n) in n.into_iter().enumerate() {
            y[(row, j)] = scale[(0, j)] * n + bias[(0, j)];
        }
    }
    y
}

/// Returns the gradients of x, of the scale and of the bias.
pub(super) fn layer_backward<T: Float>(
    x: &Matrix<T>,
    scale: &Matrix<T>,
    epsilon: f64,
    dy: &Matrix<T>,
) -> (Matrix<T>, Matrix<T>, Matrix<T>) {
    let mut dx = Matrix::zeros(x.rows(), x.columns());
    let mut dscale = Matrix::zeros(1, x.columns());
    let mut dbias = Matrix::zeros(1, x.columns());
    let width = T::from_f64(x.columns() as f64);
    for row in 0..x.rows() {
        let (n, rho) = normalized(x.row(row), epsilon);
        let g: Vec<T> = zip(scale.row(0), dy.row(row), |scale, dy| scale * dy);
        let mean_g = g.iter().copied().sum::<T>() / width;
        let mean_gn = dot(&g, &n) / width;
        for j in 0..x.columns() {
            dx[(row, j)] = rho * (g[j] - mean_g - n[j] * mean_gn);
            dscale[(0, j)] += n[j] * dy[(row, j)];
            dbias[(0, j)] += dy[(row, j)];
        }
    }
    (dx, dscale, dbias)
}

/// n and ρ of one row.
fn normalized<T: Float>(x: &[T], epsilon: f64) -> (Vec<T>, T) {
    let width = T::from_f64(x.len() as f64);
    let mean = x.iter().copied().sum::<T>() / width;
    let centred: Vec<T> = x.iter().map(|x| *x - mean).collect();
    let variance = dot(&centred, &centred) / width;
    let rho = T::one() / (variance + T::from_f64(epsilon)).sqrt();
    (centred.into_iter().map(|x| rho * x).collect(), rho)
}

fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    x.iter().zip(y).map(|(x, y)| *x * *y).sum()
}

fn zip<T: Float>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> Vec<T> {
    x.iter().zip(y).map(|(x, y)| f(*x, *y)).collect()
}
