//! LORO, the low-rank Riemannian optimizer (Mo, Huang & Pan, ICLR 2025): its settings, and its exact step.
//!
//! A factor pair stands for the matrix W = M·Nᵀ, with M = Bᵀ (d_out × r) and N = A (d_in × r), a point of the manifold of
//! matrices of rank r. Most steps are *lazy*: AdamW of each factor, with a learning rate of its own. Every K-th step is
//! *exact*: it moves W along the projection of the gradient onto the tangent space, and back onto the manifold. With the
//! directions D_M and D_N that AdamW takes for the factors, in place of the products G·N and Gᵀ·M of the unknown gradient G of W:
//!
//! ```text
//! M = U·R_M,  N = V·R_N                               thin QR
//! Y = D_M·R_N⁻¹   (for G·V)                           d_out × r
//! Z = D_N·R_M⁻¹   (for Gᵀ·U)                          d_in × r
//! C = Zᵀ·V,  Y − U·Uᵀ·Y = Q₂·K₂,  Z − V·Vᵀ·Z = Q₁·K₁
//!
//!     ⎡ R_M·R_Nᵀ − η·C   −η·K₁ᵀ ⎤
//! S = ⎢                         ⎥                     W − η·ξ = [U Q₂]·S·[V Q₁]ᵀ
//!     ⎣     −η·K₂           0   ⎦
//! ```
//!
//! The truncated singular value decomposition P·Σ·Tᵀ of S, of rank r, gives the new factors M = [U Q₂]·P·Σ^½ and
//! N = [V Q₁]·T·Σ^½. T and Σ² are eigenvectors and eigenvalues of Sᵀ·S, and P·Σ = S·T. With Y − U·Uᵀ·Y in place of Q₂·K₂,
//! neither Q₂ nor K₂ is needed. The sign of a pair of columns is free: each column of N keeps the direction of the column that it
//! replaces.

use std::fmt;
use std::num::NonZeroU64;

use faer::linalg::triangular_solve::solve_lower_triangular_in_place;
use faer::{Mat, MatRef, Par, concat};
use narrows_plan::model::Linear;

use crate::eigenpairs::{Eigenpairs, eigenpairs};

/// Diagonal elements of R below this share of the largest make a factor rank-deficient.
const RANK_TOLERANCE: f64 = 1e-12;

/// Settings of LORO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loro {
    /// Steps between exact steps.
    pub exact_every: NonZeroU64,
    /// Steps after which all moments become zero; 0 for never.
    pub refresh_every: u64,
    /// Learning rate of factors in lazy steps.
    pub rate_scale: FactorRateScale,
}

/// Learning rate of the factors of a pair in lazy steps, as a fraction of that of other weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FactorRateScale {
    /// The rank over the width of the model's hidden state.
    RankOverHidden,
    /// The same for all factors.
    Constant(f64),
}

impl Loro {
    /// Whether a step, counted from 1, is exact.
    pub fn is_exact(&self, step: u64) -> bool {
        step.is_multiple_of(self.exact_every.get())
    }

    /// Whether all moments become zero after a step.
    pub fn refreshes_after(&self, step: u64) -> bool {
        self.refresh_every > 0 && step.is_multiple_of(self.refresh_every)
    }

    /// Number of steps, including this one, since the moments were zero.
    pub fn moment_steps(&self, step: u64) -> u64 {
        match self.refresh_every {
            0 => step,
            every => step.saturating_sub(1) % every + 1,
        }
    }
}

impl fmt::Display for FactorRateScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FactorRateScale::RankOverHidden => f.write_str("auto"),
            FactorRateScale::Constant(scale) => write!(f, "{scale}"),
        }
    }
}

/// Rows and columns of the factors of a pair: A is d_in × rank, B is rank × d_out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairShape {
    /// Rows of A.
    pub d_in: usize,
    /// Columns of A, and rows of B.
    pub rank: usize,
    /// Columns of B.
    pub d_out: usize,
}

/// A factor, row-major, and the direction in which AdamW would change it.
pub struct FactorStep {
    /// The factor.
    pub weights: Vec<f64>,
    /// The direction, to be multiplied by −η.
    pub direction: Vec<f64>,
}

/// Reason why an exact step has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExactStepFault {
    /// A weight or a moment is infinite or NaN, or the result is.
    NotFinite,
    /// The columns of A, or the rows of B, are linearly dependent.
    RankDeficient {
        /// Name of the factor: `a` or `b`.
        factor: &'static str,
    },
    /// The eigensolver did not converge.
    NotConverged,
}

impl fmt::Display for ExactStepFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExactStepFault::NotFinite => f.write_str("a value is infinite or not a number"),
            ExactStepFault::RankDeficient { factor } => {
                write!(f, "the factor `{factor}` has a lower rank than its width")
            }
            ExactStepFault::NotConverged => f.write_str("its decomposition did not converge"),
        }
    }
}

impl PairShape {
    /// The shape of a linear's pair; `None` for a dense linear.
    pub fn of(linear: &Linear) -> Option<PairShape> {
        let [d_in, rank, d_out] =
            [linear.d_in, linear.rank()?, linear.d_out].map(|size| size as usize);
        Some(PairShape { d_in, rank, d_out })
    }
}

/// The factors [A, B] after an exact step.
///
/// # Errors
/// Values that are not finite, a rank-deficient factor, or an eigensolver that does not converge.
///
/// # Panics
/// When the sizes are not those of the shape.
pub fn exact_step(
    shape: PairShape,
    a: &FactorStep,
    b: &FactorStep,
    learning_rate: f64,
) -> Result<[Vec<f64>; 2], ExactStepFault> {
    let PairShape { d_in, rank, d_out } = shape;
    let all = [&a.weights, &a.direction, &b.weights, &b.direction];
    if !all.into_iter().flatten().all(|x| x.is_finite()) {
        return Err(ExactStepFault::NotFinite);
    }
    // M is the transpose of B, and columns of M are rows of B.
    let columns = |elements| MatRef::from_column_major_slice(elements, d_out, rank);
    let rows = |elements| MatRef::from_row_major_slice(elements, d_in, rank);
    let n = rows(&a.weights);
    let ThinQr { q: u, r: r_m } = independent_qr(columns(&b.weights), "b")?;
    let ThinQr { q: v, r: r_n } = independent_qr(n, "a")?;
    let mut y = divided(columns(&b.direction), &r_n);
    let mut z = divided(rows(&a.direction), &r_m);
    let core = z.transpose() * &v;
    y -= &u * (u.transpose() * &y);
    z -= &v * core.transpose();
    if !(y.is_all_finite() && z.is_all_finite()) {
        return Err(ExactStepFault::NotFinite);
    }
    let ThinQr { q: q1, r: k1 } = thin_qr(z.as_ref());
    let top =
        concat![[r_m * r_n.transpose() - core * learning_rate, k1.transpose() * -learning_rate]];
    let mut gram = top.transpose() * &top;
    let mut corner = gram.as_mut().submatrix_mut(0, 0, rank, rank);
    corner += y.transpose() * &y * learning_rate.powi(2);
    if !gram.is_all_finite() {
        return Err(ExactStepFault::NotFinite);
    }
    let Eigenpairs { values, vectors } = eigenpairs(&gram).ok_or(ExactStepFault::NotConverged)?;
    let vectors = vectors.subcols(0, rank);
    let (tangent, normal) = vectors.split_at_row(rank);
    let mut n_new = &v * tangent + &q1 * normal;
    let mut m_new = &u * (&top * vectors) - &y * tangent * learning_rate;
    for (index, square) in values[..rank].iter().enumerate() {
        // The square root of a singular value; one of zero has no direction, whose scale is arbitrary.
        let root = if *square > 0.0 { square.powf(0.25) } else { 1.0 };
        let along: f64 = n.col(index).transpose() * n_new.col(index);
        let signed = if along < 0.0 { -root } else { root };
        n_new.col_mut(index).iter_mut().for_each(|x| *x *= signed);
        m_new.col_mut(index).iter_mut().for_each(|x| *x /= signed);
    }
    if !(m_new.is_all_finite() && n_new.is_all_finite()) {
        return Err(ExactStepFault::NotFinite);
    }
    Ok([row_major(n_new.as_ref()), row_major(m_new.transpose())])
}

/// A thin QR decomposition.
struct ThinQr {
    q: Mat<f64>,
    r: Mat<f64>,
}

fn thin_qr(matrix: MatRef<'_, f64>) -> ThinQr {
    let decomposition = matrix.qr();
    ThinQr { q: decomposition.compute_thin_Q(), r: decomposition.thin_R().to_owned() }
}

/// The thin QR decomposition of a factor whose columns are independent.
fn independent_qr(factor: MatRef<'_, f64>, name: &'static str) -> Result<ThinQr, ExactStepFault> {
    let deficient = ExactStepFault::RankDeficient { factor: name };
    if factor.nrows() < factor.ncols() {
        return Err(deficient);
    }
    let decomposition = thin_qr(factor);
    if !decomposition.r.is_all_finite() {
        return Err(ExactStepFault::NotFinite);
    }
    let (mut smallest, mut largest) = (f64::INFINITY, 0.0_f64);
    for x in decomposition.r.diagonal().column_vector().iter() {
        (smallest, largest) = (smallest.min(x.abs()), largest.max(x.abs()));
    }
    if smallest <= RANK_TOLERANCE * largest {
        return Err(deficient);
    }
    Ok(decomposition)
}

/// A matrix times R⁻¹, for an upper triangular R.
fn divided(matrix: MatRef<'_, f64>, r: &Mat<f64>) -> Mat<f64> {
    let mut quotient = matrix.to_owned();
    let transposed = quotient.as_mut().transpose_mut();
    solve_lower_triangular_in_place(r.transpose(), transposed, Par::Seq);
    quotient
}

fn row_major(matrix: MatRef<'_, f64>) -> Vec<f64> {
    matrix.row_iter().flat_map(|row| row.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::CounterRng;

    fn draws(seed: u64, count: usize) -> Vec<f64> {
        CounterRng::new(seed, "loro").normals_from(0).take(count).collect()
    }

    fn step_of(seed: u64, count: usize) -> FactorStep {
        FactorStep { weights: draws(seed, count), direction: draws(seed + 1, count) }
    }

    fn product(shape: PairShape, a: &[f64], b: &[f64]) -> Mat<f64> {
        let PairShape { d_in, rank, d_out } = shape;
        MatRef::from_row_major_slice(a, d_in, rank) * MatRef::from_row_major_slice(b, rank, d_out)
    }

    /// The step in whole matrices: the tangent vector ξ, and the truncated decomposition of W − η·ξ.
    fn dense_step(shape: PairShape, a: &FactorStep, b: &FactorStep, rate: f64) -> Mat<f64> {
        let PairShape { d_in, rank, d_out } = shape;
        let n = MatRef::from_row_major_slice(&a.weights, d_in, rank);
        let m = MatRef::from_column_major_slice(&b.weights, d_out, rank);
        let d_n = MatRef::from_row_major_slice(&a.direction, d_in, rank);
        let d_m = MatRef::from_column_major_slice(&b.direction, d_out, rank);
        // Pseudo-inverses: with G·N = D_M, G·V·Vᵀ = D_M·N⁺, and likewise U·Uᵀ·G = (D_N·M⁺)ᵀ.
        let inverse = |x: MatRef<'_, f64>| x.svd().expect("converges").pseudoinverse();
        let (g_v, u_g) = (d_m * inverse(n), (d_n * inverse(m)).transpose().to_owned());
        let p_u = m * inverse(m);
        let tangent = &u_g + &g_v - &p_u * &g_v;
        let svd = (m * n.transpose() - tangent * rate).thin_svd().expect("converges");
        let (p, t) = (svd.U().subcols(0, rank), svd.V().subcols(0, rank));
        let sigma = svd.S().column_vector().subrows(0, rank).as_diagonal();
        t * sigma * p.transpose()
    }

    #[test]
    fn a_step_is_the_retraction_of_whole_matrices() {
        let sizes = [
            [9, 3, 7],
            [7, 3, 12],
            [5, 5, 8],
            [8, 5, 5],
            [4, 4, 4],
            [6, 1, 5],
            // Several blocks of reflections, and eigenpairs by divide and conquer.
            [160, 70, 150],
            [100, 70, 90],
        ];
        for (index, sizes) in sizes.into_iter().enumerate() {
            let shape = PairShape { d_in: sizes[0], rank: sizes[1], d_out: sizes[2] };
            let seed = 10 * index as u64;
            let a = step_of(seed, shape.d_in * shape.rank);
            let b = step_of(seed + 2, shape.d_out * shape.rank);
            for rate in [0.0, 1e-3, 0.1] {
                let [new_a, new_b] = exact_step(shape, &a, &b, rate).unwrap();
                let (actual, expected) =
                    (product(shape, &new_a, &new_b), dense_step(shape, &a, &b, rate));
                let error = (&actual - &expected).norm_l2() / expected.norm_l2();
                assert!(error < 1e-9, "{shape:?} at {rate}: {error:.1e}");
                // Both factors share the singular values.
                let PairShape { d_in, rank, d_out } = shape;
                let a = MatRef::from_row_major_slice(&new_a, d_in, rank);
                let b = MatRef::from_row_major_slice(&new_b, rank, d_out);
                let difference = a.transpose() * a - b * b.transpose();
                assert!(difference.norm_l2() < 1e-9 * expected.norm_l2());
            }
        }
    }

    #[test]
    fn steps_without_a_result_are_refused() {
        let shape = PairShape { d_in: 6, rank: 2, d_out: 4 };
        let (good_a, good_b) = (|| step_of(1, 12), || step_of(5, 8));
        let fault = |a: FactorStep, b: FactorStep| exact_step(shape, &a, &b, 0.1).unwrap_err();
        let zeros = |count| FactorStep { weights: vec![0.0; count], direction: vec![0.0; count] };
        let deficient = |factor| ExactStepFault::RankDeficient { factor };
        assert_eq!(fault(good_a(), zeros(8)), deficient("b"));
        assert_eq!(fault(zeros(12), good_b()), deficient("a"));
        let equal = [0, 2, 4, 6, 8, 10].iter().flat_map(|i| [f64::from(*i) + 1.0; 2]).collect();
        assert_eq!(fault(FactorStep { weights: equal, ..good_a() }, good_b()), deficient("a"));
        for bad in [f64::NAN, f64::INFINITY] {
            let mut a = good_a();
            a.direction[3] = bad;
            assert_eq!(fault(a, good_b()), ExactStepFault::NotFinite);
        }
        let mut huge = good_b();
        huge.direction.iter_mut().for_each(|x| *x *= 1e300);
        assert_eq!(fault(good_a(), huge), ExactStepFault::NotFinite);
        let mut overflowing = good_b();
        overflowing.weights.iter_mut().for_each(|x| *x = f64::MAX.copysign(*x));
        assert_eq!(fault(good_a(), overflowing), ExactStepFault::NotFinite);
        let wide = PairShape { d_in: 2, rank: 3, d_out: 4 };
        let refused = exact_step(wide, &step_of(1, 6), &step_of(5, 12), 0.1);
        assert_eq!(refused.unwrap_err(), deficient("a"));
    }

    #[test]
    fn without_a_direction_a_pair_keeps_its_product() {
        let shape = PairShape { d_in: 6, rank: 2, d_out: 4 };
        let still =
            |seed, count| FactorStep { weights: draws(seed, count), direction: vec![0.0; count] };
        // The second column of A is a multiple of the first but for a share of itself.
        let near = |distance: f64| {
            let mut a = still(1, 12);
            a.weights.chunks_exact_mut(2).for_each(|row| row[1] = 3.0 * row[0] + distance * row[1]);
            a
        };
        for (a, bound) in [(still(1, 12), 1e-12), (near(1e-3), 1e-10), (near(1e-7), 1e-8)] {
            let b = still(2, 8);
            let [new_a, new_b] = exact_step(shape, &a, &b, 0.1).unwrap();
            let before = product(shape, &a.weights, &b.weights);
            let error = (product(shape, &new_a, &new_b) - &before).norm_l2() / before.norm_l2();
            assert!(error < bound, "{error:.1e}, not below {bound:.1e}");
        }
    }

    #[test]
    fn exact_steps_and_refreshes_follow_from_the_step() {
        let loro = Loro {
            exact_every: NonZeroU64::new(4).unwrap(),
            refresh_every: 6,
            rate_scale: FactorRateScale::Constant(1.0),
        };
        let steps =
            |is: &dyn Fn(u64) -> bool| (1..=12).filter(|step| is(*step)).collect::<Vec<_>>();
        assert_eq!(steps(&|step| loro.is_exact(step)), [4, 8, 12]);
        assert_eq!(steps(&|step| loro.refreshes_after(step)), [6, 12]);
        assert_eq!([1, 6, 7, 12].map(|step| loro.moment_steps(step)), [1, 6, 1, 6]);
        let never = Loro { refresh_every: 0, ..loro };
        assert!(!never.refreshes_after(6) && never.moment_steps(100) == 100);
    }
}
