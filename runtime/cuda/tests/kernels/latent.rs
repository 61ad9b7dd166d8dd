//! Activation of latents, side by side and separate.

use narrows_cpu::kernels::{
    LatentRecoverSaved, MatrixView, MatrixViewMut, Parallel, RmsNorm, WriteMode, latent_backward,
    latent_forward, latent_recover, latent_recover_backward,
};
use narrows_plan::DType;
use narrows_plan::model::Activation;
use narrows_plan::program::FusedOp;

use super::case::KernelCase;
use super::formats::{assert_near, random_values, rounded};

/// Rows, and widths of latents side by side.
const SHAPES: [(usize, &[usize]); 6] =
    [(1, &[1]), (7, &[64]), (5, &[33, 7]), (9, &[128, 64, 64]), (2, &[8, 3, 2049]), (3, &[16; 4])];
const RMS: RmsNorm = RmsNorm { width: 300, epsilon: 1e-5 };
const SERIAL: Parallel = Parallel::SERIAL;

struct LatentCase {
    dtype: DType,
    activation: Activation,
    rows: usize,
    widths: &'static [usize],
    /// All latents in one matrix, `[rows, Σ widths]`.
    joint: Vec<f32>,
    /// Separate matrices, `[rows, width]`.
    separate: Vec<Vec<f32>>,
    s: Vec<f32>,
}

impl LatentCase {
    fn columns(&self) -> usize {
        self.widths.iter().sum()
    }

    fn joint_shape(&self) -> (u64, u64) {
        (self.rows as u64, self.columns() as u64)
    }

    fn shape(&self, section: usize) -> (u64, u64) {
        (self.rows as u64, self.widths[section] as u64)
    }

    fn case(&self, op: FusedOp) -> KernelCase {
        let mut case = KernelCase::new(op, 1, (1, self.rows as u64));
        case.constants.hidden = RMS.width as u64;
        case
    }

    /// First column and width of a latent in the joint matrix.
    fn range(&self, section: usize) -> (usize, usize) {
        (self.widths[..section].iter().sum(), self.widths[section])
    }
}

fn cases() -> impl Iterator<Item = LatentCase> {
    let formats = [DType::Bf16, DType::F32];
    let phis = [Activation::Identity, Activation::Silu];
    let kinds = formats.into_iter().flat_map(move |dtype| phis.map(|phi| (dtype, phi)));
    kinds.flat_map(|(dtype, activation)| {
        SHAPES.into_iter().map(move |(rows, widths)| {
            let columns: usize = widths.iter().sum();
            let values = |seed, count: usize| {
                rounded(
                    dtype,
                    random_values(seed, count as u64).into_iter().map(|x| 3.0 * x).collect(),
                )
            };
            let separate = (2..).zip(widths).map(|(seed, width)| values(seed, rows * width));
            let s = random_values(9, rows as u64).iter().map(|x| 400.0 * x * x).collect();
            let joint = values(1, rows * columns);
            LatentCase { dtype, activation, rows, widths, joint, separate: separate.collect(), s }
        })
    })
}

#[test]
fn forward_matches_the_cpu() {
    for (of, deferred_norm) in
        cases().flat_map(|of| [(of, false)]).chain(cases().map(|of| (of, true)))
    {
        let activation = of.activation;
        let op = match deferred_norm {
            false => FusedOp::LatentForward { activation },
            true => FusedOp::LatentRecover { activation },
        };
        let mut case = of.case(op);
        let h = case.buffer(of.joint_shape(), of.dtype, Some(&of.joint));
        let s = case.buffer((of.rows as u64, 1), DType::F32, Some(&of.s));
        // A single recovered latent without an activation is computed in place.
        let in_place = deferred_norm && of.widths.len() == 1 && activation == Activation::Identity;
        let results: Vec<_> = (0..of.widths.len())
            .map(|i| if in_place { h } else { case.buffer(of.shape(i), of.dtype, None) })
            .collect();
        let reads = if deferred_norm { vec![h, s] } else { vec![h] };
        case.reads(&reads).writes(&results);
        let Some(outcome) = case.run() else { return };
        let joint = MatrixView::new(&of.joint, of.rows, of.columns());
        for (section, result) in results.into_iter().enumerate() {
            let (first, width) = of.range(section);
            let mut expected = vec![0.0; of.rows * width];
            let (h, z) = (joint.column_range(first, width), &mut expected);
            let z = MatrixViewMut::new(z, of.rows, width);
            match deferred_norm {
                false => latent_forward(h, activation, z, SERIAL),
                true => latent_recover(h, &of.s, RMS, activation, z, SERIAL),
            }
            assert_near(of.dtype, &outcome.elements(result), &expected, 1e-6);
        }
    }
}

#[test]
fn backward_matches_the_cpu() {
    for of in cases() {
        let activation = of.activation;
        let mut case = of.case(FusedOp::LatentBackward { activation });
        let mut reads: Vec<_> = (0..of.widths.len())
            .map(|i| case.buffer(of.shape(i), of.dtype, Some(&of.separate[i])))
            .collect();
        if activation == Activation::Silu {
            reads.push(case.buffer(of.joint_shape(), of.dtype, Some(&of.joint)));
        }
        let dh = case.buffer(of.joint_shape(), of.dtype, None);
        case.reads(&reads).writes(&[dh]);
        let Some(outcome) = case.run() else { return };
        let mut expected = vec![0.0; of.joint.len()];
        for section in 0..of.widths.len() {
            let (first, width) = of.range(section);
            let gradient =
                MatrixViewMut::new(&mut expected, of.rows, of.columns()).column_range(first, width);
            let h = MatrixView::new(&of.joint, of.rows, of.columns()).column_range(first, width);
            let dz = MatrixView::new(&of.separate[section], of.rows, width);
            latent_backward(dz, h, activation, gradient, SERIAL);
        }
        assert_near(of.dtype, &outcome.elements(dh), &expected, 1e-6);
    }
}

#[test]
fn recover_backward_matches_the_cpu() {
    for (of, add) in cases().map(|of| (of, false)).chain(cases().map(|of| (of, true))) {
        let activation = of.activation;
        let mut case = of.case(FusedOp::LatentRecoverBackward { activation });
        let sections = 0..of.widths.len();
        let mut reads: Vec<_> = sections
            .clone()
            .map(|i| case.buffer(of.shape(i), of.dtype, Some(&of.separate[i])))
            .collect();
        let z: Vec<Vec<f32>> = sections
            .clone()
            .map(|i| rounded(of.dtype, random_values(20 + i as u64, of.separate[i].len() as u64)))
            .collect();
        match activation {
            Activation::Silu => {
                reads.push(case.buffer(of.joint_shape(), of.dtype, Some(&of.joint)));
            }
            Activation::Identity => reads
                .extend(sections.clone().map(|i| case.buffer(of.shape(i), of.dtype, Some(&z[i])))),
        }
        let before = random_values(30, of.rows as u64);
        reads.push(case.buffer((of.rows as u64, 1), DType::F32, Some(&of.s)));
        let ds = case.buffer((of.rows as u64, 1), DType::F32, add.then_some(&before[..]));
        reads.extend(add.then_some(ds));
        let dh = case.buffer(of.joint_shape(), of.dtype, None);
        case.reads(&reads).writes(&[dh, ds]);
        let Some(outcome) = case.run() else { return };

        let (mut expected, mut expected_ds) = (vec![0.0; of.joint.len()], before);
        for section in sections {
            let (first, width) = of.range(section);
            let gradient =
                MatrixViewMut::new(&mut expected, of.rows, of.columns()).column_range(first, width);
            let saved = match activation {
                Activation::Silu => {
                    MatrixView::new(&of.joint, of.rows, of.columns()).column_range(first, width)
                }
                Activation::Identity => MatrixView::new(&z[section], of.rows, width),
            };
            let dz = MatrixView::new(&of.separate[section], of.rows, width);
            let saved = LatentRecoverSaved { dz, saved, s: &of.s, rms: RMS, phi: activation };
            let write = if add || section > 0 { WriteMode::Add } else { WriteMode::Replace };
            latent_recover_backward(saved, gradient, &mut expected_ds, write, SERIAL);
        }
        assert_near(of.dtype, &outcome.elements(dh), &expected, 1e-6);
        assert_near(DType::F32, &outcome.elements(ds), &expected_ds, 2e-6);
    }
}

#[test]
fn more_latents_than_a_kernel_takes_are_unsupported() {
    let mut case =
        KernelCase::new(FusedOp::LatentForward { activation: Activation::Silu }, 1, (1, 2));
    let h = case.buffer((2, 40), DType::F32, None);
    let results: Vec<_> = (0..5).map(|_| case.buffer((2, 8), DType::F32, None)).collect();
    case.reads(&[h]).writes(&results);
    let error = case.launches().expect_err("five latents");
    assert!(error.contains("`latent` of a test: 5 latents side by side"), "{error}");
}
