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
//! N = [V Q₁]·T·Σ^½. T and Σ² are eigenvectors and eigenvalues of Sᵀ·S, and P·Σ = S·T. The sign of a pair of columns is free:
//! each column of N keeps the direction of the column that it replaces.

use std::fmt;
use std::num::NonZeroU64;

use nalgebra::{DMatrix, SymmetricEigen};
use narrows_plan::counts::every;
use narrows_plan::model::Linear;

/// Diagonal elements of R below this share of the largest make a factor rank-deficient.
const RANK_TOLERANCE: f64 = 1e-12;

/// Iterations of the eigensolver for each eigenvalue; it needs two or three.
const ITERATIONS_PER_EIGENVALUE: usize = 30;

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

impl fmt::Display for Loro {
    /// Prints all settings exactly, so that equal texts mean equal values.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loro { exact_every, refresh_every, rate_scale } = self;
        let refreshed = match refresh_every {
            0 => "never".to_owned(),
            steps => every(*steps, "step"),
        };
        write!(
            f,
            "LORO exact {}, moments refreshed {refreshed}, rate scale of factors {rate_scale}",
            every(exact_every.get(), "step"),
        )
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

    /// Floating-point operations of an exact step: thin QR with an explicit Q, 4dr² each, of both factors and both normal
    /// components, the products with d rows, 9dr² on each side, Sᵀ·S of 16r³, and the decomposition of a symmetric matrix of
    /// order 2r with its vectors, 9(2r)³.
    pub fn exact_step_flops(&self) -> f64 {
        let [d_in, rank, d_out] = [self.d_in, self.rank, self.d_out].map(|size| size as f64);
        17.0 * (d_in + d_out) * rank.powi(2) + 88.0 * rank.powi(3)
    }

    /// Elements of both factors.
    pub fn elements(&self) -> usize {
        (self.d_in + self.d_out) * self.rank
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
    let columns = |elements: &[f64]| DMatrix::from_column_slice(d_out, rank, elements);
    let rows = |elements: &[f64]| DMatrix::from_row_slice(d_in, rank, elements);
    let (m, n) = (columns(&b.weights), rows(&a.weights));
    let ThinQr { q: u, r: r_m, inverse: inverse_m } = thin_qr(m, "b")?;
    let ThinQr { q: v, r: r_n, inverse: inverse_n } = thin_qr(n.clone(), "a")?;
    let y = columns(&b.direction) * inverse_n;
    let z = rows(&a.direction) * inverse_m;
    let core = z.transpose() * &v;
    let y = &y - &u * (u.transpose() * &y);
    let z = &z - &v * (v.transpose() * &z);
    let ((q1, k1), (q2, k2)) = (z.qr().unpack(), y.qr().unpack());
    let mut s = DMatrix::zeros(2 * rank, 2 * rank);
    let square = (rank, rank);
    s.view_mut((0, 0), square).copy_from(&(r_m * r_n.transpose() - core * learning_rate));
    s.view_mut((0, rank), square).copy_from(&(k1.transpose() * -learning_rate));
    s.view_mut((rank, 0), square).copy_from(&(k2 * -learning_rate));
    let (left, right) = truncated(&s, rank)?;
    let product = |basis: &DMatrix<f64>, normal: &DMatrix<f64>, part: &DMatrix<f64>| {
        basis * part.rows(0, rank) + normal * part.rows(rank, rank)
    };
    let (mut m_new, mut n_new) = (product(&u, &q2, &left), product(&v, &q1, &right));
    for ((before, mut n), mut m) in
        n.column_iter().zip(n_new.column_iter_mut()).zip(m_new.column_iter_mut())
    {
        if before.dot(&n) < 0.0 {
            n.neg_mut();
            m.neg_mut();
        }
    }
    if !m_new.iter().chain(n_new.iter()).all(|x| x.is_finite()) {
        return Err(ExactStepFault::NotFinite);
    }
    // nalgebra stores columns: those of Nᵀ are the rows of A.
    Ok([n_new.transpose().as_slice().to_vec(), m_new.as_slice().to_vec()])
}

/// A thin QR decomposition of a factor.
struct ThinQr {
    q: DMatrix<f64>,
    r: DMatrix<f64>,
    /// R⁻¹.
    inverse: DMatrix<f64>,
}

fn thin_qr(factor: DMatrix<f64>, name: &'static str) -> Result<ThinQr, ExactStepFault> {
    let deficient = ExactStepFault::RankDeficient { factor: name };
    let rank = factor.ncols();
    if factor.nrows() < rank {
        return Err(deficient);
    }
    let (q, r) = factor.qr().unpack();
    let (mut smallest, mut largest) = (f64::INFINITY, 0.0_f64);
    for x in r.diagonal().iter() {
        (smallest, largest) = (smallest.min(x.abs()), largest.max(x.abs()));
    }
    if smallest <= RANK_TOLERANCE * largest {
        return Err(deficient);
    }
    let inverse = r.solve_upper_triangular(&DMatrix::identity(rank, rank)).ok_or(deficient)?;
    Ok(ThinQr { q, r, inverse })
}

/// P·Σ^½ and T·Σ^½ of the truncated singular value decomposition of a square matrix.
fn truncated(
    s: &DMatrix<f64>,
    rank: usize,
) -> Result<(DMatrix<f64>, DMatrix<f64>), ExactStepFault> {
    let iterations = ITERATIONS_PER_EIGENVALUE * s.ncols();
    let gram = s.transpose() * s;
    if !gram.iter().all(|x| x.is_finite()) {
        return Err(ExactStepFault::NotFinite);
    }
    let eigen = SymmetricEigen::try_new(gram, f64::EPSILON, iterations)
        .ok_or(ExactStepFault::NotConverged)?;
    let squares = &eigen.eigenvalues;
    let mut order: Vec<usize> = (0..squares.len()).collect();
    order.sort_by(|i, j| squares[*j].total_cmp(&squares[*i]));
    order.truncate(rank);
    let mut right = eigen.eigenvectors.select_columns(&order);
    let mut left = s * &right;
    for (n, index) in order.iter().enumerate() {
        // The square root of a singular value; one of zero has no direction, whose scale is arbitrary.
        let root = if squares[*index] > 0.0 { squares[*index].powf(0.25) } else { 1.0 };
        left.column_mut(n).unscale_mut(root);
        right.column_mut(n).scale_mut(root);
    }
    Ok((left, right))
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

    fn product(shape: PairShape, a: &[f64], b: &[f64]) -> DMatrix<f64> {
        let PairShape { d_in, rank, d_out } = shape;
        DMatrix::from_row_slice(d_in, rank, a) * DMatrix::from_row_slice(rank, d_out, b)
    }

    /// The step in whole matrices: the tangent vector ξ, and the truncated decomposition of W − η·ξ.
    fn dense_step(shape: PairShape, a: &FactorStep, b: &FactorStep, rate: f64) -> DMatrix<f64> {
        let PairShape { d_in, rank, d_out } = shape;
        let matrix = |rows, columns, x: &[f64]| DMatrix::from_row_slice(rows, columns, x);
        let (n, m) = (matrix(d_in, rank, &a.weights), matrix(rank, d_out, &b.weights).transpose());
        let d_n = matrix(d_in, rank, &a.direction);
        let d_m = matrix(rank, d_out, &b.direction).transpose();
        // Pseudo-inverses: with G·N = D_M, G·V·Vᵀ = D_M·N⁺, and likewise U·Uᵀ·G = (D_N·M⁺)ᵀ.
        let inverse = |x: &DMatrix<f64>| x.clone().pseudo_inverse(1e-12).expect("converges");
        let (g_v, u_g) = (&d_m * inverse(&n), (&d_n * inverse(&m)).transpose());
        let p_u = &m * inverse(&m);
        let tangent = &u_g + &g_v - &p_u * &g_v;
        let svd = (&m * n.transpose() - tangent * rate).svd(true, true);
        let (p, t) = (svd.u.expect("vectors"), svd.v_t.expect("vectors"));
        let mut order: Vec<usize> = (0..svd.singular_values.len()).collect();
        order.sort_by(|i, j| svd.singular_values[*j].total_cmp(&svd.singular_values[*i]));
        let terms =
            order[..rank].iter().map(|i| p.column(*i) * t.row(*i) * svd.singular_values[*i]);
        terms.sum::<DMatrix<f64>>().transpose()
    }

    #[test]
    fn a_step_is_the_retraction_of_whole_matrices() {
        for (index, sizes) in [[9, 3, 7], [7, 3, 12], [5, 5, 8], [8, 5, 5], [4, 4, 4], [6, 1, 5]]
            .into_iter()
            .enumerate()
        {
            let shape = PairShape { d_in: sizes[0], rank: sizes[1], d_out: sizes[2] };
            let seed = 10 * index as u64;
            let a = step_of(seed, shape.d_in * shape.rank);
            let b = step_of(seed + 2, shape.d_out * shape.rank);
            for rate in [0.0, 1e-3, 0.1] {
                let [new_a, new_b] = exact_step(shape, &a, &b, rate).unwrap();
                let (actual, expected) =
                    (product(shape, &new_a, &new_b), dense_step(shape, &a, &b, rate));
                let error = (&actual - &expected).norm() / expected.norm();
                assert!(error < 1e-9, "{shape:?} at {rate}: {error:.1e}");
                // Both factors share the singular values.
                let PairShape { d_in, rank, d_out } = shape;
                let a = DMatrix::from_row_slice(d_in, rank, &new_a);
                let b = DMatrix::from_row_slice(rank, d_out, &new_b);
                assert!((a.tr_mul(&a) - &b * b.transpose()).norm() < 1e-9 * expected.norm());
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
        let wide = PairShape { d_in: 2, rank: 3, d_out: 4 };
        let refused = exact_step(wide, &step_of(1, 6), &step_of(5, 12), 0.1);
        assert_eq!(refused.unwrap_err(), deficient("a"));
    }

    #[test]
    fn without_a_direction_a_pair_keeps_its_product() {
        let shape = PairShape { d_in: 6, rank: 2, d_out: 4 };
        let still =
            |seed, count| FactorStep { weights: draws(seed, count), direction: vec![0.0; count] };
        let (a, b) = (still(1, 12), still(2, 8));
        let [new_a, new_b] = exact_step(shape, &a, &b, 0.1).unwrap();
        let before = product(shape, &a.weights, &b.weights);
        assert!((product(shape, &new_a, &new_b) - &before).norm() < 1e-12 * before.norm());
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
