//! φ on latents, side by side and alone.

use narrows_cpu::kernels::{
    LatentRecoverSaved, MatrixView, MatrixViewMut, Parallel, RmsNorm, WriteMode, latent_backward,
    latent_forward, latent_recover, latent_recover_backward,
};
use narrows_plan::DType;
use narrows_plan::model::Activation;
use narrows_plan::program::FusedOp;

use super::case::Case;
use super::numbers::{assert_near, random, rounded};

/// Rows, and the widths of latents side by side.
const SHAPES: [(usize, &[usize]); 6] =
    [(1, &[1]), (7, &[64]), (5, &[33, 7]), (9, &[128, 64, 64]), (2, &[8, 3, 2049]), (3, &[16; 4])];
const RMS: RmsNorm = RmsNorm { width: 300, epsilon: 1e-5 };
const SERIAL: Parallel = Parallel::SERIAL;

struct Drawn {
    dtype: DType,
    activation: Activation,
    rows: usize,
    widths: &'static [usize],
    /// All latents in one, `[rows, Σ widths]`.
    whole: Vec<f32>,
    /// One apiece, `[rows, width]`.
    apart: Vec<Vec<f32>>,
    s: Vec<f32>,
}

impl Drawn {
    fn columns(&self) -> usize {
        self.widths.iter().sum()
    }

    fn whole_shape(&self) -> (u64, u64) {
        (self.rows as u64, self.columns() as u64)
    }

    fn shape(&self, section: usize) -> (u64, u64) {
        (self.rows as u64, self.widths[section] as u64)
    }

    fn case(&self, op: FusedOp) -> Case {
        let mut case = Case::new(op, 1, (1, self.rows as u64));
        case.constants.hidden = RMS.width as u64;
        case
    }

    /// The columns of a latent in the whole.
    fn range(&self, section: usize) -> (usize, usize) {
        (self.widths[..section].iter().sum(), self.widths[section])
    }
}

fn draws() -> impl Iterator<Item = Drawn> {
    let formats = [DType::Bf16, DType::F32];
    let phis = [Activation::Identity, Activation::Silu];
    let kinds = formats.into_iter().flat_map(move |dtype| phis.map(|phi| (dtype, phi)));
    kinds.flat_map(|(dtype, activation)| {
        SHAPES.into_iter().map(move |(rows, widths)| {
            let columns: usize = widths.iter().sum();
            let numbers = |seed, count: usize| {
                rounded(dtype, random(seed, count as u64).into_iter().map(|x| 3.0 * x).collect())
            };
            let apart = (2..).zip(widths).map(|(seed, width)| numbers(seed, rows * width));
            let s = random(9, rows as u64).iter().map(|x| 400.0 * x * x).collect();
            let whole = numbers(1, rows * columns);
            Drawn { dtype, activation, rows, widths, whole, apart: apart.collect(), s }
        })
    })
}

#[test]
fn forward_is_the_processors() {
    for (of, owed) in draws().flat_map(|of| [(of, false)]).chain(draws().map(|of| (of, true))) {
        let activation = of.activation;
        let op = match owed {
            false => FusedOp::LatentForward { activation },
            true => FusedOp::LatentRecover { activation },
        };
        let mut case = of.case(op);
        let h = case.buffer(of.whole_shape(), of.dtype, Some(&of.whole));
        let s = case.buffer((of.rows as u64, 1), DType::F32, Some(&of.s));
        // One recovered latent without φ is worked on in place.
        let in_place = owed && of.widths.len() == 1 && activation == Activation::Identity;
        let results: Vec<_> = (0..of.widths.len())
            .map(|i| if in_place { h } else { case.buffer(of.shape(i), of.dtype, None) })
            .collect();
        let reads = if owed { vec![h, s] } else { vec![h] };
        case.reads(&reads).writes(&results);
        let Some(outcome) = case.run() else { return };
        let whole = MatrixView::new(&of.whole, of.rows, of.columns());
        for (section, result) in results.into_iter().enumerate() {
            let (first, width) = of.range(section);
            let mut wanted = vec![0.0; of.rows * width];
            let (h, z) = (whole.column_range(first, width), &mut wanted);
            let z = MatrixViewMut::new(z, of.rows, width);
            match owed {
                false => latent_forward(h, activation, z, SERIAL),
                true => latent_recover(h, &of.s, RMS, activation, z, SERIAL),
            }
            assert_near(of.dtype, &outcome.numbers(result), &wanted, 1e-6);
        }
    }
}

#[test]
fn backward_is_the_processors() {
    for of in draws() {
        let activation = of.activation;
        let mut case = of.case(FusedOp::LatentBackward { activation });
        let mut reads: Vec<_> = (0..of.widths.len())
            .map(|i| case.buffer(of.shape(i), of.dtype, Some(&of.apart[i])))
            .collect();
        if activation == Activation::Silu {
            reads.push(case.buffer(of.whole_shape(), of.dtype, Some(&of.whole)));
        }
        let dh = case.buffer(of.whole_shape(), of.dtype, None);
        case.reads(&reads).writes(&[dh]);
        let Some(outcome) = case.run() else { return };
        let mut wanted = vec![0.0; of.whole.len()];
        for section in 0..of.widths.len() {
            let (first, width) = of.range(section);
            let made =
                MatrixViewMut::new(&mut wanted, of.rows, of.columns()).column_range(first, width);
            let h = MatrixView::new(&of.whole, of.rows, of.columns()).column_range(first, width);
            let dz = MatrixView::new(&of.apart[section], of.rows, width);
            latent_backward(dz, h, activation, made, SERIAL);
        }
        assert_near(of.dtype, &outcome.numbers(dh), &wanted, 1e-6);
    }
}

#[test]
fn recovered_backward_is_the_processors() {
    for (of, add) in draws().map(|of| (of, false)).chain(draws().map(|of| (of, true))) {
        let activation = of.activation;
        let mut case = of.case(FusedOp::LatentRecoverBackward { activation });
        let sections = 0..of.widths.len();
        let mut reads: Vec<_> = sections
            .clone()
            .map(|i| case.buffer(of.shape(i), of.dtype, Some(&of.apart[i])))
            .collect();
        let z: Vec<Vec<f32>> = sections
            .clone()
            .map(|i| rounded(of.dtype, random(20 + i as u64, of.apart[i].len() as u64)))
            .collect();
        match activation {
            Activation::Silu => {
                reads.push(case.buffer(of.whole_shape(), of.dtype, Some(&of.whole)));
            }
            Activation::Identity => reads
                .extend(sections.clone().map(|i| case.buffer(of.shape(i), of.dtype, Some(&z[i])))),
        }
        let before = random(30, of.rows as u64);
        reads.push(case.buffer((of.rows as u64, 1), DType::F32, Some(&of.s)));
        let ds = case.buffer((of.rows as u64, 1), DType::F32, add.then_some(&before[..]));
        reads.extend(add.then_some(ds));
        let dh = case.buffer(of.whole_shape(), of.dtype, None);
        case.reads(&reads).writes(&[dh, ds]);
        let Some(outcome) = case.run() else { return };

        let (mut wanted, mut wanted_ds) = (vec![0.0; of.whole.len()], before);
        for section in sections {
            let (first, width) = of.range(section);
            let made =
                MatrixViewMut::new(&mut wanted, of.rows, of.columns()).column_range(first, width);
            let saved = match activation {
                Activation::Silu => {
                    MatrixView::new(&of.whole, of.rows, of.columns()).column_range(first, width)
                }
                Activation::Identity => MatrixView::new(&z[section], of.rows, width),
            };
            let dz = MatrixView::new(&of.apart[section], of.rows, width);
            let owed = LatentRecoverSaved { dz, saved, s: &of.s, rms: RMS, phi: activation };
            let write = if add || section > 0 { WriteMode::Add } else { WriteMode::Replace };
            latent_recover_backward(owed, made, &mut wanted_ds, write, SERIAL);
        }
        assert_near(of.dtype, &outcome.numbers(dh), &wanted, 1e-6);
        assert_near(DType::F32, &outcome.numbers(ds), &wanted_ds, 2e-6);
    }
}

#[test]
fn more_latents_than_a_kernel_takes_are_refused() {
    let mut case = Case::new(FusedOp::LatentForward { activation: Activation::Silu }, 1, (1, 2));
    let h = case.buffer((2, 40), DType::F32, None);
    let results: Vec<_> = (0..5).map(|_| case.buffer((2, 8), DType::F32, None)).collect();
    case.reads(&[h]).writes(&results);
    let error = case.launches().expect_err("five latents");
    assert!(error.contains("`latent` of a test: 5 latents side by side"), "{error}");
}
